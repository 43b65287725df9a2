"""The queue of the parts of a pass over the data."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.proto.errors import ClockAhead, InvalidRequest, ModeMismatch, StaleWorker
from embershard.proto.messages import Heartbeat, Join, Leave, Split, TakeSplit
from embershard.proto.routing import Placement
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry

LEASE = 10.0


class Queue:
    """A shard with members 0..count-1."""

    def __init__(self, count: int, num_splits: int = 4) -> None:
        self.shard = Shard(0, Placement.even(1), OptimizerRegistry())
        self.now, self.num_splits = 0.0, num_splits
        for worker in range(count):
            self.join(worker)

    def join(self, worker: int, clock: int = 0, epoch: int = 1, run: int = 0) -> None:
        self.shard.handle(
            Join(
                worker=worker, epoch=epoch, clock=clock, staleness=-1, workers=1, lease_ms=round(LEASE * 1000), run=run
            ),
            self.now,
        )

    def take(
        self, worker: int, done: int = -1, data_epoch: int = 0, *, epoch: int = 1, num_splits: int | None = None
    ) -> Split:
        request = TakeSplit(
            worker=worker,
            epoch=epoch,
            data_epoch=data_epoch,
            num_splits=self.num_splits if num_splits is None else num_splits,
            done=done,
        )
        reply = self.shard.handle(request, self.now)
        assert isinstance(reply, Split)
        return reply

    def waits(self, worker: int, done: int = -1) -> str:
        with pytest.raises(ClockAhead) as caught:
            self.take(worker, done)
        return str(caught.value.fields["workers"])

    def lose(self, worker: int, *others: int) -> None:
        for _ in range(2):
            self.now += 0.6 * LEASE
            for other in others:
                self.shard.handle(Heartbeat(worker=other, epoch=1), self.now)
        self.shard.advance(self.now)
        assert worker not in [member.worker for member in self.shard.status().members]


@pytest.fixture
def queue():
    return Queue(2)


def test_fast_workers_take_more(queue):
    assert queue.take(1) == Split(index=0, returned=0)
    assert [queue.take(0).index, queue.take(0, 1).index, queue.take(0, 2).index] == [1, 2, 3]


def test_a_reply_that_was_lost_is_given_again(queue):
    assert queue.take(0) == queue.take(0) == Split(index=0, returned=0)
    assert queue.take(1) == Split(index=1, returned=0)
    assert queue.take(0, 0) == queue.take(0, 0) == queue.take(0, 0) == Split(index=2, returned=0)


def test_a_pass_ends_when_every_part_is_finished(queue):
    for done in (-1, 0, 1):
        queue.take(0, done)
    queue.take(1)
    assert queue.waits(0, 2) == "1"
    moves = queue.shard.generation
    assert queue.waits(0, 2) == "1"
    assert queue.shard.generation == moves  # or it would be tried again for ever
    assert queue.take(1, 3) == Split(index=-1, returned=0)
    assert queue.shard.generation > moves
    assert queue.take(0, 2) == queue.take(1, 3) == Split(index=-1, returned=0)


def test_a_lost_workers_part_is_dealt_again_and_counted(queue):
    queue.take(0)
    queue.take(1)
    queue.lose(0, 1)
    assert queue.take(1, 1) == Split(index=0, returned=1)
    assert queue.take(1, 0) == Split(index=2, returned=1)


@pytest.mark.parametrize("newer", [False, True], ids=["left", "restarted"])
def test_what_a_worker_leaves_behind_is_dealt_again(queue, newer):
    queue.take(0)
    if newer:
        queue.join(0, 5, epoch=2)
        assert queue.take(0, epoch=2) == Split(index=0, returned=1)
    else:
        queue.shard.handle(Leave(worker=0, epoch=1), queue.now)
        assert queue.take(1) == Split(index=0, returned=1)


def test_the_last_parts_are_waited_for_and_may_come_back(queue):
    queue.num_splits = 2
    queue.take(0)
    queue.take(1)
    assert queue.waits(1, 1) == "0"
    queue.lose(0, 1)
    assert queue.take(1, 1) == Split(index=0, returned=1)
    assert queue.take(1, 0) == Split(index=-1, returned=1)


def test_a_worker_that_was_given_up_and_comes_back_does_not_end_what_another_has(queue):
    queue.num_splits = 2
    queue.take(0)
    queue.lose(0, 1)
    assert queue.take(1) == Split(index=0, returned=1)
    queue.join(0, 9)
    assert queue.take(0, 0) == Split(index=1, returned=1)
    assert queue.waits(0, 1) == "1"


def test_passes_follow_one_another(queue):
    queue.num_splits = 1
    assert [queue.take(0), queue.take(0, 0)] == [Split(index=0, returned=0), Split(index=-1, returned=0)]
    assert [queue.take(0, data_epoch=1), queue.take(0, 0, data_epoch=1)] == [
        Split(index=0, returned=0),
        Split(index=-1, returned=0),
    ]
    assert queue.take(1, data_epoch=0) == Split(index=-1, returned=0)


def test_who_waits_for_the_end_of_a_pass_hears_that_the_next_one_has_begun(queue):
    queue.num_splits = 2
    queue.take(0)
    queue.take(1)
    assert queue.waits(0, 0) == "1"
    moves = queue.shard.generation
    assert queue.take(1, data_epoch=1) == Split(index=0, returned=0)
    assert queue.shard.generation > moves  # who waits is asked again
    assert queue.take(0, 0) == Split(index=-1, returned=0)


def test_nothing_of_a_pass_is_left_to_the_next():
    queue = Queue(3)
    for worker in range(3):
        queue.take(worker)
    queue.lose(0, 1, 2)
    queue.lose(1, 2)
    assert queue.take(2, 2).returned == 1  # and another one is still to be dealt again
    dealt = [queue.take(2, done, data_epoch=1) for done in (-1, 0, 1, 2, 3)]
    assert dealt == [
        Split(index=0, returned=0),
        Split(index=1, returned=0),
        Split(index=2, returned=0),
        Split(index=3, returned=0),
        Split(index=-1, returned=0),
    ]


def test_who_takes_no_part_in_the_job_is_given_none(queue):
    with pytest.raises(InvalidRequest, match="worker 7 is no member"):
        queue.take(7)
    queue.join(0, epoch=2)
    with pytest.raises(StaleWorker):
        queue.take(0)


def test_workers_that_count_other_parts_are_refused(queue):
    queue.take(0)
    with pytest.raises(ModeMismatch, match="num_splits of pass 0 5, the others train with 4"):
        queue.take(1, num_splits=5)


@pytest.mark.parametrize("num_splits", [0, 2**31])
def test_a_number_of_parts_without_sense_is_refused(queue, num_splits):
    with pytest.raises(InvalidRequest, match="num_splits"):
        queue.take(0, num_splits=num_splits)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=60))
def test_each_part_is_finished_exactly_once_when_nobody_is_lost(steps):
    queue, hands, finished = Queue(3, 7), [-1] * 3, Counter[int]()
    rest = [(worker, False) for worker in range(3)] * 8
    for worker, lost_reply in [*steps, *rest]:
        try:
            split = queue.take(worker, hands[worker])
        except ClockAhead:
            continue
        if lost_reply:
            continue
        if hands[worker] >= 0 and split.index != hands[worker]:
            finished[hands[worker]] += 1
        hands[worker] = split.index
        assert split.returned == 0
    assert finished == Counter(range(7))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["take", "take", "die"])), max_size=40))
def test_each_part_is_finished_at_least_once_when_workers_die(steps):
    queue, finished = Queue(3, 7), set[int]()
    epochs, hands = [1] * 3, [-1] * 3
    for worker, step in [*steps, *[(worker, "take") for worker in range(3)] * 8]:
        if step == "die":
            epochs[worker] += 1
            hands[worker] = -1
            queue.join(worker, 0, epochs[worker])
            continue
        done = hands[worker]
        try:
            hands[worker] = queue.take(worker, done, epoch=epochs[worker]).index
        except ClockAhead:
            pass
        finished.add(done)
    assert finished >= set(range(7))


def test_a_part_is_dealt_again_where_its_worker_was_given_up_and_came_back(queue):
    assert queue.take(0) == Split(index=0, returned=0)
    queue.lose(0, 1)
    queue.join(0, clock=5)  # it has dropped what it had computed
    assert queue.take(0, 0) == Split(index=0, returned=1)


def test_a_later_run_is_dealt_every_part_anew(queue):
    assert [queue.take(0).index, queue.take(1).index, queue.take(1, 1).index] == [0, 1, 2]
    queue.join(0, epoch=2, run=1)
    assert [queue.take(0, done, epoch=2).index for done in (-1, 0, 1, 2, 3)] == [0, 1, 2, 3, -1]
