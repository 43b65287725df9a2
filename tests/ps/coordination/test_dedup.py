"""The completion records against a model that never forgets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.proto.errors import InvalidRequest, MemoryLost, StaleWorker
from embershard.proto.messages import PushToken
from embershard.ps.coordination.dedup import MAX_IN_FLIGHT, MAX_WORKERS, Dedup
from embershard.ps.table.table import Applied
from harness.raises import raises

REPLY = Applied(rows=3, skipped=1)


@pytest.fixture
def dedup():
    """Records in which worker 0 has pushed once, in its epoch 7."""
    made = Dedup()
    take(made, PushToken(0, 7, 1, 1))
    return made


def take(dedup, token):
    assert dedup.find(token) is None
    dedup.record(token, REPLY)


def test_a_retried_push_is_answered_with_its_counts_also_after_its_acknowledgement(dedup):
    assert dedup.find(PushToken(0, 7, 1, 1)) == REPLY
    take(dedup, PushToken(0, 7, 2, 2))
    assert dedup.find(PushToken(0, 7, 1, 1)) is not None


def test_a_shard_that_lost_its_memory_says_so_and_an_earlier_incarnation_is_fenced(dedup):
    with pytest.raises(MemoryLost, match="all below 5"):
        Dedup().find(PushToken(worker=0, epoch=1, seq=6, first_incomplete=5))
    with raises(MemoryLost, worker=0):  # a newer incarnation that was acknowledged elsewhere
        dedup.find(PushToken(0, 8, 9, 9))
    with raises(StaleWorker, worker=0, got=6, want=7, by=""):
        dedup.find(PushToken(0, 6, 2, 1))


def test_a_worker_that_sends_no_push_is_told_too_that_some_are_not_known(dedup):
    dedup.check_known(0, 7, 2)
    dedup.check_known(0, 6, 9)  # of an earlier incarnation, which is fenced elsewhere
    for worker, epoch, first_incomplete in [(0, 7, 3), (0, 8, 2), (1, 1, 2)]:
        with raises(MemoryLost, worker=worker, first_incomplete=first_incomplete):
            dedup.check_known(worker, epoch, first_incomplete)


def test_an_incarnation_whose_first_push_was_refused_goes_on():
    dedup = Dedup()
    assert dedup.find(PushToken(0, 1, 1, 1)) is None
    with pytest.raises(MemoryLost):  # to ask changes nothing
        dedup.find(PushToken(0, 1, 2, 2))
    assert not dedup.knows(0, 1, 0)
    assert [dedup.settle(0, 1, 1) for _ in range(2)] == [True, False]
    assert dedup.find(PushToken(0, 1, 2, 2)) is None
    assert [dedup.knows(0, epoch, seq) for epoch, seq in ((1, 1), (1, 2), (2, 1))] == [True, False, False]


@pytest.mark.parametrize(
    ("worker", "seq", "first_incomplete", "message"),
    [
        (0, 0, 0, "counts from 1"),
        (0, 0, 1, "counts from 1"),
        (0, 1, 2, "first_incomplete is at most its seq"),
        (0, MAX_IN_FLIGHT + 1, 1, "first_incomplete names the first push without an answer"),
        (0, 2**40, 0, "at most 4096 may be"),
        (MAX_WORKERS, 1, 1, r"must be 0\.\.65535, got 65536"),
    ],
)
def test_numbers_that_no_client_sends_are_refused(worker, seq, first_incomplete, message):
    with pytest.raises(InvalidRequest, match=message):
        Dedup().find(PushToken(worker, 1, seq, first_incomplete))


def test_a_push_without_an_epoch_is_refused():
    """The next process of such a worker begins with the same tokens: its pushes would be answered and not applied."""
    with pytest.raises(InvalidRequest, match="has epoch 0; send the time"):
        Dedup().find(PushToken(0, 0, 1, 1))


def test_memory_stays_flat_over_many_pushes_and_incarnations():
    dedup = Dedup()
    for epoch in (1, 2):
        for seq in range(1, 1001):
            take(dedup, PushToken(0, epoch, seq, max(1, seq - 3)))
            assert len(dedup) <= 4


@st.composite
def deliveries(draw):
    """What a network makes of two workers' pushes, in two incarnations each: reordered, doubled, late."""
    arriving = []
    for worker in range(2):
        for epoch in (1, 2):
            for seq in range(1, draw(st.integers(1, 8)) + 1):
                # a client keeps a few in flight: below first_incomplete it had every acknowledgement
                token = PushToken(worker, epoch, seq, draw(st.integers(max(1, seq - 3), seq)))
                times = draw(st.lists(st.floats(0, 30), min_size=1, max_size=3))
                arriving += [(20 * epoch + seq + late, token) for late in times]
    return [token for _, token in sorted(arriving, key=lambda pair: pair[0])]


class Model:
    """Remembers everything, and says whether a push may be applied."""

    def __init__(self) -> None:
        self.applied, self.newest, self.acknowledged = set(), {}, {}

    def offer(self, token):
        newest, incarnation = self.newest.get(token.worker, 0), (token.worker, token.epoch)
        if token.epoch < newest:
            return StaleWorker
        if token.epoch > newest and token.first_incomplete > 1:
            return MemoryLost
        known = self.acknowledged.get(incarnation, 0)
        if (*incarnation, token.seq) in self.applied or token.seq < known:
            return "duplicate"
        self.newest[token.worker] = token.epoch
        self.applied.add((*incarnation, token.seq))
        self.acknowledged[incarnation] = max(known, token.first_incomplete)
        return "applied"


@given(deliveries())
def test_every_delivery_is_judged_as_by_a_model_that_never_forgets(tokens):
    dedup, model = Dedup(), Model()
    for token in tokens:
        try:
            got = "duplicate" if dedup.find(token) else "applied"
            if got == "applied":
                dedup.record(token, REPLY)
        except (StaleWorker, MemoryLost) as error:
            got = type(error)
        assert got == model.offer(token), token


def test_a_first_push_that_was_put_off_is_a_change_of_the_state_once():
    """Its incarnation is known from then on, which a replay has to know, too."""
    dedup = Dedup()
    assert [dedup.settle(0, 1, 0), dedup.settle(0, 1, 0), dedup.settle(0, 2, 0), dedup.settle(0, 2, 3)] == [
        True, False, True, True,
    ]  # fmt: skip
