"""Rendezvous of the workers of a job on a shard."""

from __future__ import annotations

import numpy as np
import pytest

from embershard.proto.errors import ClockAhead, InvalidRequest, LeaseLost, MessageTooLarge, RendezvousOver, ShardBusy
from embershard.proto.messages import Heartbeat, Join, Leave, Rendezvous, RendezvousResult
from embershard.proto.routing import Placement
from embershard.ps.coordination import rendezvous as module
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry

LEASE_MS = 10_000


class Workers:
    """Workers of one job; each says its own number, over and over."""

    def __init__(self, count: int, **settings: int) -> None:
        self.shard = Shard(0, Placement.even(1), OptimizerRegistry(), **settings)
        self.now = 0.0
        for worker in range(count):
            self.join(worker, workers=count)

    def join(self, worker: int, clock: int = 0, workers: int = 1, epoch: int = 1, run: int = 0) -> None:
        self.shard.handle(
            Join(worker=worker, epoch=epoch, clock=clock, staleness=0, workers=workers, lease_ms=LEASE_MS, run=run),
            self.now,
        )

    def leave(self, worker: int, *, rest: bool = False) -> None:
        self.shard.handle(Leave(worker=worker, epoch=1, pause=rest), self.now)

    def request(self, worker: int, name: str = "m", size: int = 2, **fields: object) -> Rendezvous:
        return Rendezvous(worker, 1, name, np.full(size, worker, np.uint8), **fields)  # type: ignore[arg-type]

    def meet(self, worker: int, name: str = "m", size: int = 2, **fields: object) -> dict[int, list[int]]:
        reply = self.shard.handle(self.request(worker, name, size, **fields), self.now)
        assert isinstance(reply, RendezvousResult)
        return dict(zip(reply.workers, (payload.tolist() for payload in reply.payloads), strict=bool(reply.payloads)))

    def waits(self, worker: int, name: str = "m", **fields: object) -> str:
        """For whom it is said to wait."""
        moves = self.shard.generation
        with pytest.raises(ClockAhead) as caught:
            self.meet(worker, name, **fields)
        assert self.shard.generation == moves  # or it would be tried again for ever
        return str(caught.value.fields["workers"])

    def live(self, *workers: int) -> None:
        """Time for a lease passes, in which only these are heard of."""
        for _ in range(2):
            self.now += 0.6 * LEASE_MS / 1000
            for worker in workers:
                self.shard.handle(Heartbeat(worker=worker, epoch=1), self.now)
        self.shard.advance(self.now)


@pytest.fixture
def workers():
    return Workers(3)


def test_those_who_meet_wait_for_all_and_read_what_each_put_down_in_order(workers):
    assert workers.waits(2) == "0, 1"
    assert workers.waits(0) == "1"
    moves = workers.shard.generation
    assert list(workers.meet(1).items()) == [(0, [0, 0]), (1, [1, 1]), (2, [2, 2])]
    assert workers.shard.generation > moves
    assert workers.meet(0) == workers.meet(2) == {0: [0, 0], 1: [1, 1], 2: [2, 2]}


def test_who_does_not_listen_hears_who_came(workers):
    workers.waits(0)
    workers.waits(1)
    reply = workers.shard.handle(workers.request(2, want_payloads=False), 0.0)
    assert reply == RendezvousResult((0, 1, 2), ())


def test_a_lost_reply_is_given_again_while_the_others_meet_on(workers):
    for name in "abc":
        for worker in (0, 1):
            workers.waits(worker, name)
        first = workers.meet(2, name)
        assert workers.meet(2, name) == workers.meet(0, name) == workers.meet(1, name) == first
    assert workers.meet(2, "a") == first
    assert workers.shard.status().rendezvous == "c"


def test_a_worker_that_leaves_or_is_given_up_is_not_waited_for(workers):
    workers.waits(0)
    moves = workers.shard.generation
    workers.leave(1)
    assert workers.shard.generation > moves  # who waits is asked again
    assert workers.waits(0) == "2"
    workers.live(0)
    assert workers.meet(0) == {0: [0, 0]}


def test_what_a_worker_put_down_before_it_was_lost_counts(workers):
    workers.waits(2)
    workers.live(0, 1)
    workers.waits(0)
    assert workers.meet(1) == {0: [0, 0], 1: [1, 1], 2: [2, 2]}


def test_a_worker_that_comes_after_all_are_through_reads_what_they_read(workers):
    workers.waits(0)
    workers.waits(1)
    workers.live(0, 1)
    met = workers.meet(0)
    with pytest.raises(LeaseLost):
        workers.meet(2)
    workers.join(2, 5)
    assert workers.meet(2) == met == {0: [0, 0], 1: [1, 1]}


def test_a_resting_worker_is_waited_for(workers):
    workers.leave(1, rest=True)
    workers.waits(0)
    assert workers.waits(2) == "1"
    assert len(workers.meet(1)) == 3


def test_only_those_named_are_waited_for(workers):
    workers.join(3, 5)
    assert workers.waits(0, participants=(0, 1, 7)) == "1"
    assert sorted(workers.meet(1, participants=(0, 1, 7))) == [0, 1]


def test_nobody_meets_before_all_expected_workers_are_here():
    workers = Workers(0)
    workers.join(0, workers=2)
    assert workers.waits(0) == "1 (not here yet)"
    moves = workers.shard.generation
    workers.join(1, workers=2)
    assert workers.shard.generation > moves
    workers.waits(0)
    assert len(workers.meet(1)) == 2


def test_a_stranger_does_not_meet(workers):
    with pytest.raises(InvalidRequest, match="worker 9 is no member"):
        workers.meet(9)


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda w: w.meet(0, size=module.MAX_PAYLOAD_BYTES + 1), MessageTooLarge),
        (lambda w: w.meet(0, ""), InvalidRequest),
        (lambda w: w.meet(0, "n" * 201), InvalidRequest),
    ],
    ids=["payload", "no name", "long name"],
)
def test_what_is_too_large_is_refused(workers, ask, error):
    with pytest.raises(error):
        ask(workers)


def test_who_listens_to_more_than_a_message_holds_is_told():
    workers = Workers(2, max_message_bytes=100)
    workers.waits(0, size=60)
    with pytest.raises(MessageTooLarge, match="120 bytes"):
        workers.meet(1, size=60)
    assert workers.meet(0, want_payloads=False) == {}


def test_rendezvous_are_forgotten_once_all_were_answered(workers):
    for number in range(3 * module.KEPT):
        for worker in range(3):
            workers.waits(worker, f"m{number}") if worker < 2 else workers.meet(worker, f"m{number}")
        if number > 0:
            workers.meet(0, f"m{number}")
            workers.meet(1, f"m{number}")
    held = workers.shard._rendezvous._by_name
    assert list(held)[:2] == ["m0", f"m{2 * module.KEPT}"]  # of the first, two were not told yet
    assert len(held) == 1 + module.KEPT
    with pytest.raises(RendezvousOver, match="'m1'"):
        workers.meet(2, "m1")
    assert len(workers.meet(0, "m0")) == 3


def test_a_meeting_that_is_waited_for_outlives_those_that_others_hold(workers):
    workers.waits(0, "long")
    for number in range(3 * module.KEPT):
        workers.waits(1, f"m{number}", participants=(1, 2))
        for worker in (2, 1):
            workers.meet(worker, f"m{number}", participants=(1, 2))
    assert workers.waits(1, "long") == "2"
    assert sorted(workers.meet(2, "long")) == [0, 1, 2]


def test_rendezvous_of_workers_that_are_gone_are_forgotten(workers):
    for number in range(3 * module.KEPT):
        workers.waits(2, f"m{number}")
    workers.leave(2)
    workers.waits(0)
    workers.meet(1)
    assert len(workers.shard._rendezvous._by_name) == 1 + module.KEPT
    assert workers.waits(0, "m0") == "1"  # it never was


def test_the_names_that_are_remembered_are_the_last_ones(workers, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 0)
    monkeypatch.setattr(module, "KEPT_NAMES", 2)
    for number in range(5):
        workers.waits(0, f"m{number}", participants=(0, 1))
        for worker in (1, 0):
            workers.meet(worker, f"m{number}", participants=(0, 1))
    assert list(workers.shard._rendezvous._over) == ["m3", "m4"]


def test_large_rendezvous_are_forgotten_sooner(workers, monkeypatch):
    monkeypatch.setattr(module, "KEPT_BYTES", 7)
    for name in "abc":
        for worker in (0, 1, 2, 0, 1):
            workers.waits(
                worker, name
            ) if worker < 2 and name not in workers.shard.status().rendezvous else workers.meet(worker, name)
    assert list(workers.shard._rendezvous._by_name) == ["c"]


def test_what_waits_is_bounded(workers, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 3)
    monkeypatch.setattr(module, "MAX_OPEN", 2)
    workers.waits(0, "a")
    workers.waits(0, "b", size=1)
    workers.waits(0, "a")  # again is not more
    with pytest.raises(ShardBusy):
        workers.meet(0, "c")
    with pytest.raises(ShardBusy):
        workers.meet(1, "a")


def test_another_job_uses_the_names_again(workers):
    for worker in range(3):
        workers.waits(worker) if worker < 2 else workers.meet(worker)
    for worker in range(3):
        workers.leave(worker)
    workers.join(4, workers=1)
    assert workers.meet(4) == {4: [4, 4]}


def test_a_later_run_uses_the_names_again_while_the_members_of_the_earlier_one_live(workers):
    for worker in range(3):
        workers.waits(worker) if worker < 2 else workers.meet(worker)
    workers.waits(0, "n")
    workers.join(4, run=1)
    assert workers.shard.status().rendezvous == ""
    assert workers.meet(4) == {4: [4, 4]}
    with pytest.raises(LeaseLost):
        workers.meet(1, "n")
