"""The completion records against a model that never forgets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.proto.errors import InvalidRequest, MemoryLost, StaleWorker
from embershard.proto.messages import Pushed, PushToken
from embershard.ps.coordination.dedup import MAX_IN_FLIGHT, MAX_WORKERS, Dedup

REPLY = Pushed(duplicate=False, applied=3, skipped=1)


def test_a_retried_push_is_known_and_answered_with_its_counts():
    dedup = Dedup()
    token = PushToken(worker=0, epoch=1, seq=1, first_incomplete=1)
    assert dedup.find(token) is None
    dedup.record(token, REPLY)
    assert dedup.find(token) == Pushed(duplicate=True, applied=3, skipped=1)


def test_a_push_that_was_not_recorded_may_come_again():
    dedup = Dedup()
    token = PushToken(worker=0, epoch=1, seq=1, first_incomplete=1)
    assert dedup.find(token) is None
    assert dedup.find(token) is None


def apply(dedup: Dedup, token: PushToken) -> None:
    assert dedup.find(token) is None
    dedup.record(token, REPLY)


def test_a_shard_that_lost_its_memory_says_so():
    with pytest.raises(MemoryLost, match="all below 5"):
        Dedup().find(PushToken(worker=0, epoch=1, seq=6, first_incomplete=5))
    dedup = Dedup()
    apply(dedup, PushToken(0, 1, 1, 1))
    with pytest.raises(MemoryLost, match="worker 0"):  # a newer incarnation that was acknowledged elsewhere
        dedup.find(PushToken(0, 2, 9, 9))


def test_an_incarnation_whose_first_push_was_refused_goes_on():
    dedup = Dedup()
    assert dedup.find(PushToken(0, 1, 1, 1)) is None  # what it asked for made no sense: nothing was recorded
    assert dedup.find(PushToken(0, 1, 2, 2)) is None


def test_a_copy_that_comes_after_its_acknowledgement_is_not_applied():
    dedup = Dedup()
    apply(dedup, PushToken(0, 1, 1, 1))
    apply(dedup, PushToken(0, 1, 2, 2))
    found = dedup.find(PushToken(0, 1, 1, 1))
    assert found is not None
    assert found.duplicate


def test_an_earlier_incarnation_is_fenced():
    dedup = Dedup()
    apply(dedup, PushToken(0, 7, 1, 1))
    with pytest.raises(StaleWorker, match="epoch 6") as caught:
        dedup.find(PushToken(0, 6, 2, 1))
    assert caught.value.fields == {"worker": 0, "got": 6, "want": 7, "by": ""}


def test_a_new_incarnation_starts_its_own_numbers():
    dedup = Dedup()
    apply(dedup, PushToken(0, 7, 1, 1))
    apply(dedup, PushToken(0, 8, 1, 1))
    assert len(dedup) == 1


def test_workers_do_not_share_numbers():
    dedup = Dedup()
    apply(dedup, PushToken(0, 1, 1, 1))
    assert dedup.find(PushToken(1, 1, 1, 1)) is None


@pytest.mark.parametrize(
    ("seq", "first_incomplete"), [(0, 0), (1, 2), (MAX_IN_FLIGHT + 1, 1), (2**40, 0)], ids=lambda value: str(value)
)
def test_numbers_that_no_client_sends_are_refused(seq, first_incomplete):
    with pytest.raises(InvalidRequest):
        Dedup().find(PushToken(0, 1, seq, first_incomplete))


def test_a_worker_number_over_the_limit_is_refused():
    with pytest.raises(InvalidRequest, match="workers"):
        Dedup().find(PushToken(MAX_WORKERS, 1, 1, 1))


def test_memory_stays_flat_over_many_pushes():
    dedup = Dedup()
    for seq in range(1, 10_001):
        token = PushToken(0, 1, seq, max(1, seq - 3))
        assert dedup.find(token) is None
        dedup.record(token, REPLY)
        assert len(dedup) <= 4


@st.composite
def deliveries(draw: st.DrawFn) -> list[PushToken]:
    """What a network makes of two workers' pushes, in two incarnations each: reordered, doubled, late."""
    arriving: list[tuple[float, PushToken]] = []
    for worker in range(2):
        for epoch in (1, 2):
            for seq in range(1, draw(st.integers(1, 8)) + 1):
                # a client keeps a few in flight: below first_incomplete it had every acknowledgement
                first = draw(st.integers(max(1, seq - 3), seq))
                for _ in range(draw(st.integers(1, 3))):
                    late = draw(st.floats(0, 30))
                    arriving.append((20 * epoch + seq + late, PushToken(worker, epoch, seq, first)))
    return [token for _, token in sorted(arriving, key=lambda pair: pair[0])]


class Model:
    """Remembers everything, and says whether a push may be applied."""

    def __init__(self) -> None:
        self.applied: set[tuple[int, int, int]] = set()
        self.newest: dict[int, int] = {}
        self.acknowledged: dict[tuple[int, int], int] = {}

    def offer(self, token: PushToken) -> str:
        if token.epoch < self.newest.get(token.worker, 0):
            return "stale"
        incarnation = (token.worker, token.epoch)
        if token.epoch > self.newest.get(token.worker, 0) and token.first_incomplete > 1:
            return "lost"
        key = (*incarnation, token.seq)
        if key in self.applied or token.seq < self.acknowledged.get(incarnation, 0):
            return "duplicate"
        self.newest[token.worker] = token.epoch
        self.applied.add(key)
        self.acknowledged[incarnation] = max(self.acknowledged.get(incarnation, 0), token.first_incomplete)
        return "applied"


@given(deliveries())
def test_every_delivery_is_judged_as_by_a_model_that_never_forgets(tokens):
    dedup, model = Dedup(), Model()
    for token in tokens:
        try:
            found = dedup.find(token)
        except StaleWorker:
            got = "stale"
        except MemoryLost:
            got = "lost"
        else:
            got = "duplicate" if found else "applied"
            if found is None:
                dedup.record(token, REPLY)
        assert got == model.offer(token), token
