"""The queue of the parts of a pass over the data."""

from collections import Counter
from functools import partial
from operator import methodcaller

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.proto.errors import ClockAhead, InvalidRequest, ModeMismatch, StaleWorker
from embershard.proto.messages import Heartbeat, Leave, TakeSplit
from harness import shards
from harness.raises import raises

LEASE = 10.0


class Queue:
    """A shard with members 0..count-1."""

    def __init__(self, count=2, num_splits=4) -> None:
        self.shard, self.now, self.num_splits = shards.make_shard(), 0.0, num_splits
        for worker in range(count):
            self.join(worker)

    def join(self, worker, clock=0, **fields):
        mode = {"staleness": -1, "lease_ms": round(LEASE * 1000)}
        self.shard.handle(shards.join(worker, clock=clock, **mode, **fields), self.now)

    def leave(self, worker):
        self.shard.handle(Leave(worker=worker, epoch=1), self.now)

    def take(self, worker, done=-1, data_epoch=0, epoch=1, **fields):
        """The part's index and how many came back; for whom it has to wait."""
        fields = {"num_splits": self.num_splits, **fields}
        request = TakeSplit(worker=worker, epoch=epoch, data_epoch=data_epoch, done=done, **fields)
        try:
            split = self.shard.handle(request, self.now)
        except ClockAhead as ahead:
            return ahead.fields["workers"]
        return split.index, split.returned

    def lose(self, worker, *others):
        for _ in range(2):
            self.now += 0.6 * LEASE
            for other in others:
                self.shard.handle(Heartbeat(worker=other, epoch=1), self.now)
        self.shard.advance(self.now)
        assert worker not in [member.worker for member in self.shard.status().members]


@pytest.fixture
def queue():
    return Queue()


take, join, leave, lose = (partial(methodcaller, name) for name in ("take", "join", "leave", "lose"))
BOTH = [(take(0), (0, 0)), (take(1), (1, 0))]
# (what is claimed, how many parts there are, steps with the answers that takes get)
SCENES = [
    ("fast workers take more", 4, (take(1), (0, 0)), (take(0), (1, 0)), (take(0, 1), (2, 0)), (take(0, 2), (3, 0))),
    ("a reply that was lost is given again", 4, (take(0), (0, 0)), *BOTH, *[(take(0, 0), (2, 0))] * 3),
    ("the part of a lost worker is dealt again and counted", 4,
     *BOTH, (lose(0, 1), None), (take(1, 1), (0, 1)), (take(1, 0), (2, 1))),
    ("the part of a worker that left is dealt again", 4, (take(0), (0, 0)), (leave(0), None), (take(1), (0, 1))),
    ("the part of an earlier incarnation is dealt again", 4,
     (take(0), (0, 0)), (join(0, 5, epoch=2), None), (take(0, epoch=2), (0, 1))),
    ("the part of a worker that was evicted and came back is dealt again", 4,
     (take(0), (0, 0)), (lose(0, 1), None), (join(0, 5), None), (take(0, 0), (0, 1))),
    ("a worker that was evicted and came back does not end what another has", 2,
     (take(0), (0, 0)), (lose(0, 1), None), (take(1), (0, 1)), (join(0, 9), None), (take(0, 0), (1, 1)),
     (take(0, 1), "1")),
    ("the last parts are waited for and may come back", 2,
     *BOTH, (take(1, 1), "0"), (lose(0, 1), None), (take(1, 1), (0, 1)), (take(1, 0), (-1, 1))),
    ("passes follow one another", 1,
     *[(take(0, done, data_epoch), (index, 0)) for data_epoch in (0, 1) for done, index in ((-1, 0), (0, -1))],
     (take(1), (-1, 0))),
    ("nothing of a pass is left to the next", 4,
     (join(2), None), *BOTH, (take(2), (2, 0)), (lose(0, 1, 2), None), (lose(1, 2), None), (take(2, 2), (0, 1)),
     *[(take(2, done, data_epoch=1), (index, 0)) for done, index in enumerate([0, 1, 2, 3, -1], start=-1)]),
    ("a later run is dealt every part anew", 4,
     *BOTH, (take(1, 1), (2, 0)), (join(0, epoch=2, run=1), None),
     *[(take(0, done, epoch=2), (index, 0)) for done, index in enumerate([0, 1, 2, 3, -1], start=-1)]),
]  # fmt: skip


@pytest.mark.parametrize(("num_splits", "steps"), [(case[1], case[2:]) for case in SCENES], ids=[c[0] for c in SCENES])
def test_parts_are_dealt(num_splits, steps):
    queue = Queue(num_splits=num_splits)
    assert [step(queue) for step, _ in steps] == [answer for _, answer in steps]


@pytest.mark.parametrize("next_pass", [False, True])
def test_a_wait_for_the_end_of_a_pass_ends_when_every_part_is_finished_or_the_next_pass_begins(queue, next_pass):
    queue.num_splits = 2
    assert [queue.take(0), queue.take(1), queue.take(0, 0)] == [(0, 0), (1, 0), "1"]
    generation = queue.shard.generation
    assert queue.take(0, 0) == "1"
    assert queue.shard.generation == generation  # or it would be tried again for ever
    assert queue.take(1, data_epoch=1) == (0, 0) if next_pass else queue.take(1, 1) == (-1, 0)
    assert queue.shard.generation > generation
    assert queue.take(0, 0) == (-1, 0)


def test_who_takes_no_part_or_counts_other_parts_is_refused(queue):
    with pytest.raises(InvalidRequest, match="worker 7 is no member"):
        queue.take(7)
    for num_splits in (0, 2**31):
        with pytest.raises(InvalidRequest, match="num_splits"):
            queue.take(0, num_splits=num_splits)
    queue.take(0)
    with raises(ModeMismatch, worker=1, got=5, want=4):
        queue.take(1, num_splits=5)
    queue.join(0, epoch=2)
    with pytest.raises(StaleWorker):
        queue.take(0)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=60))
def test_each_part_is_finished_exactly_once_when_nobody_is_lost(steps):
    queue, hands, finished = Queue(3, 7), [-1] * 3, Counter()
    for worker, lost_reply in [*steps, *[(worker, False) for worker in range(3)] * 8]:
        split = queue.take(worker, hands[worker])
        if isinstance(split, str) or lost_reply:
            continue
        if hands[worker] >= 0 and split[0] != hands[worker]:
            finished[hands[worker]] += 1
        hands[worker], returned = split
        assert returned == 0
    assert finished == Counter(range(7))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["take", "take", "die"])), max_size=40))
def test_each_part_is_finished_at_least_once_when_workers_die(steps):
    queue, finished = Queue(3, 7), set()
    epochs, hands = [1] * 3, [-1] * 3
    for worker, step in [*steps, *[(worker, "take") for worker in range(3)] * 8]:
        if step == "die":
            epochs[worker] += 1
            hands[worker] = -1
            queue.join(worker, epoch=epochs[worker])
            continue
        finished.add(hands[worker])
        split = queue.take(worker, hands[worker], epoch=epochs[worker])
        hands[worker] = hands[worker] if isinstance(split, str) else split[0]
    assert finished >= set(range(7))
