"""Rendezvous of the workers of a job on a shard."""

from functools import partial
from operator import methodcaller

import numpy as np
import pytest

from embershard.proto import errors
from embershard.proto.messages import Heartbeat, Leave, Rendezvous
from embershard.ps.coordination import rendezvous as module
from harness import shards

LEASE = 10.0
TWO, ALL = {0: [0, 0], 1: [1, 1]}, {0: [0, 0], 1: [1, 1], 2: [2, 2]}


class Workers:
    """Workers of one job; each says its own number, over and over."""

    def __init__(self, count=3, **settings) -> None:
        self.shard, self.now = shards.make_shard(**settings), 0.0
        for worker in range(count):
            self.join(worker, workers=count)

    def join(self, worker, clock=0, **fields):
        self.shard.handle(shards.join(worker, clock=clock, lease_ms=round(1000 * LEASE), **fields), self.now)

    def leave(self, worker, *, pause=False):
        self.shard.handle(Leave(worker=worker, epoch=1, pause=pause), self.now)

    def meet(self, worker, name="m", size=2, **fields):
        """What each put down; for whom it has to wait, or the type of its error."""
        generation = self.shard.generation
        request = Rendezvous(worker, 1, name, np.full(size, worker, np.uint8), **fields)
        try:
            reply = self.shard.handle(request, self.now)
        except errors.ClockAhead as ahead:
            assert self.shard.generation == generation  # or it would be tried again for ever
            return ahead.fields["workers"]
        except errors.EmbershardError as error:
            return type(error)
        if not request.want_payloads:
            assert reply.payloads == ()
            return reply.workers
        return dict(zip(reply.workers, map(np.ndarray.tolist, reply.payloads), strict=True))

    def all_meet(self, name="m", size=2, workers=(0, 1, 2), **fields):
        return [self.meet(worker, name, size, **fields) for worker in workers][-1]

    def live(self, *workers):
        """Time for a lease passes, in which only these are heard of."""
        for _ in range(2):
            self.now += 0.6 * LEASE
            for worker in workers:
                self.shard.handle(Heartbeat(worker=worker, epoch=1), self.now)
        self.shard.advance(self.now)

    @property
    def kept(self):
        return list(self.shard.core.rendezvous._by_name)


@pytest.fixture
def workers():
    return Workers()


join, leave, meet, all_meet, live = (
    partial(methodcaller, name) for name in ("join", "leave", "meet", "all_meet", "live")
)
# (what is claimed, steps, the answers that meet gets or the types of its errors)
SCENES = [
    ("those who meet wait for all and read what each put down in order",
     (meet(2), "0, 1"), (meet(0), "1"), (meet(1), ALL), (meet(0), ALL), (meet(2), ALL)),
    ("who wants no payloads is told who came",
     (meet(0), "1, 2"), (meet(1), "2"), (meet(2, want_payloads=False), (0, 1, 2))),
    ("a lost reply is given again while the others meet on",
     (all_meet("a"), ALL), (all_meet("b"), ALL), (meet(0, "b"), ALL), (meet(1, "b"), ALL), (meet(2, "a"), ALL)),
    ("a worker that leaves or is evicted is not waited for",
     (meet(0), "1, 2"), (leave(1), None), (meet(0), "2"), (live(0), None), (meet(0), {0: [0, 0]})),
    ("what a worker put down before it was lost counts",
     (meet(2), "0, 1"), (live(0, 1), None), (meet(0), "1"), (meet(1), ALL)),
    ("a worker that comes after all are through reads what they read",
     (meet(0), "1, 2"), (meet(1), "2"), (live(0, 1), None), (meet(0), TWO), (meet(2), errors.LeaseLost),
     (join(2, 5), None), (meet(2), TWO)),
    ("a paused worker is waited for",
     (leave(1, pause=True), None), (meet(0), "1, 2"), (meet(2), "1"), (meet(1), ALL)),
    ("only those named are waited for",
     (join(3, 5), None), (meet(0, participants=(0, 1, 7)), "1"), (meet(1, participants=(0, 1, 7)), TWO)),
    ("a stranger does not meet", (meet(9), errors.InvalidRequest)),
    ("what is too large is refused",
     (meet(0, size=module.MAX_PAYLOAD_BYTES + 1), errors.MessageTooLarge), (meet(0, ""), errors.InvalidRequest),
     (meet(0, "n" * 201), errors.InvalidRequest)),
    ("another job uses the names again",
     (all_meet(), ALL), (leave(0), None), (leave(1), None), (leave(2), None), (join(4), None), (meet(4), {4: [4, 4]})),
    ("a later run uses the names again while the members of the earlier one live",
     (all_meet(), ALL), (meet(0, "n"), "1, 2"), (join(4, run=1), None), (meet(4), {4: [4, 4]}),
     (meet(1, "n"), errors.LeaseLost)),
]  # fmt: skip


@pytest.mark.parametrize("steps", [case[1:] for case in SCENES], ids=[case[0] for case in SCENES])
def test_a_rendezvous(workers, steps):
    assert [step(workers) for step, _ in steps] == [answer for _, answer in steps]


def test_whatever_lets_a_rendezvous_end_has_those_who_wait_asked_again():
    workers = Workers(0)
    workers.join(0, workers=2)
    assert workers.meet(0) == "1 (not here yet)"  # nobody meets before all expected workers are here
    seen = [workers.shard.generation]
    for step in (join(1, workers=2), join(2, 5, workers=3), leave(2), meet(1)):
        step(workers)
        seen.append(workers.shard.generation)
    assert sorted(set(seen)) == seen
    assert workers.meet(0) == TWO
    assert workers.shard.status().rendezvous == "m"


def test_who_reads_more_than_a_message_holds_is_told():
    workers = Workers(2, max_message_bytes=100)
    assert workers.all_meet(size=60, workers=(0, 1)) is errors.MessageTooLarge
    assert workers.meet(0, want_payloads=False) == (0, 1)


def test_rendezvous_are_forgotten_once_all_were_answered_but_for_the_last_ones(workers):
    for number in range(3 * module.KEPT):
        workers.all_meet(f"m{number}", workers=(0, 1, 2, 0, 1) if number else (0, 1, 2))
    assert workers.kept == ["m0", *(f"m{number}" for number in range(2 * module.KEPT, 3 * module.KEPT))]
    assert workers.meet(2, "m1") is errors.RendezvousOver
    assert workers.meet(0, "m0") == ALL  # two were not told yet


def test_a_rendezvous_that_is_waited_for_outlives_those_that_others_hold(workers):
    workers.meet(0, "long")
    for number in range(3 * module.KEPT):
        workers.all_meet(f"m{number}", workers=(1, 2, 1), participants=(1, 2))
    assert workers.meet(1, "long") == "2"
    assert workers.meet(2, "long") == ALL


def test_rendezvous_of_workers_that_are_gone_are_forgotten(workers):
    for number in range(3 * module.KEPT):
        workers.meet(2, f"m{number}")
    workers.leave(2)
    workers.all_meet(workers=(0, 1))
    assert len(workers.kept) == 1 + module.KEPT
    assert workers.meet(0, "m0") == "1"  # it never was


def test_what_is_remembered_and_what_waits_is_bounded(workers, monkeypatch):
    monkeypatch.setattr(module, "KEPT_BYTES", 7)
    for name in "abc":
        workers.all_meet(name, workers=(0, 1, 2, 0, 1))
    assert workers.kept == ["c"]
    monkeypatch.setattr(module, "KEPT_NAMES", 2)
    for name in "de":
        workers.all_meet(name, workers=(0, 1, 2, 0, 1))
    assert list(workers.shard.core.rendezvous._over) == ["c", "d"]
    monkeypatch.setattr(module, "MAX_BYTES", 9)
    monkeypatch.setattr(module, "MAX_OPEN", 3)
    assert [workers.meet(0, "x"), workers.meet(0, "y", 1), workers.meet(0, "x")] == ["1, 2"] * 3  # again is not more
    assert [workers.meet(0, "z"), workers.meet(1, "x")] == [errors.ShardBusy] * 2


def test_the_size_of_what_waits_is_looked_at_once_for_each_who_comes():
    """Adding up what all others have put down took seconds for a thousand workers."""
    looked = []

    class Payload(np.ndarray):
        @property
        def nbytes(self):
            looked.append(1)
            return super().nbytes

    workers = Workers(30)
    for worker in range(30):
        request = Rendezvous(worker, 1, "m", np.zeros(2, np.uint8).view(Payload))
        try:
            workers.shard.handle(request, 0.0)
        except errors.ClockAhead:
            assert worker < 29
    assert len(looked) <= 5 * 30


def test_a_payload_that_takes_the_place_of_another_is_counted_by_what_it_has_more(workers):
    registry = workers.shard.core.rendezvous
    for size in (5, 3, 9):
        workers.meet(0, "m", size)
        assert registry._nbytes == size
    workers.meet(1, "m", 4)
    again = module.RendezvousRegistry(workers.shard.core.clock, 1000)
    again.restore(registry.control(payloads=True))
    assert (registry._nbytes, again._nbytes) == (13, 13)
