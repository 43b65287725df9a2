"""A worker's place among the workers of a job: it joins their clock, keeps its lease, and waits for them on shard 0.

docs/consistency.md says how the clock closes. A member whose lease ran out was evicted: its next request is refused,
it joins again at a later clock, and what it computed in between is dropped.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import numpy as np

from embershard.proto.arrays import Array
from embershard.proto.clock import ClockEvent
from embershard.proto.errors import (
    ClockAhead,
    EmbershardError,
    LeaseLost,
    MemoryLost,
    ShardUnavailable,
    WorkerLost,
    clipped,
)
from embershard.proto.messages import (
    Heartbeat,
    HeartbeatAck,
    Join,
    Joined,
    Leave,
    Pull,
    Rendezvous,
    RendezvousResult,
    Reply,
    Request,
    Split,
    TakeSplit,
)
from embershard.proto.timing import Deadline
from embershard.proto.transport.io_thread import has_ended
from embershard.worker.client.connections import Outcome, ShardConnections

_HEARTBEATS = 4  # of a lease
_MARGIN = 2  # clocks beyond the shards' own at which a late worker joins; doubled while they run away from it
_SAID_AFTER = timedelta(seconds=10)  # waiting for another worker for longer is said, once
_TRIES = 3  # a lease that is lost so often in a row is too short for this machine
_FAREWELL = timedelta(seconds=5)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms that all workers of a job agree on: staleness, lease, number of workers.

    `staleness` 0: the pushes of a clock are gathered and applied once; k: a worker is at most k clocks ahead; None: no
    bound. With `staleness_aware_lr` the learning rate of a push is divided by the updates that its rows had missed
    (Zhang et al. 2016). A worker without a heartbeat for `lease` is evicted. `wait_timeout` ends a wait for workers
    that keep their lease and do not come. A higher `run` than any before on these shards starts a new job there,
    whoever still trains: give all workers of a run the same. With 0 a worker takes part in the current run.
    ValueError names what is out of range.
    """

    workers: int = 1  # expected at the start
    staleness: int | None = None
    lease: timedelta = timedelta(seconds=10)
    staleness_aware_lr: bool = False
    wait_timeout: timedelta = timedelta(minutes=30)
    run: int = 0

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")
        if self.staleness is not None and self.staleness < 0:
            raise ValueError(f"staleness must be None or at least 0, got {self.staleness}")
        if self.staleness_aware_lr and self.staleness == 0:
            raise ValueError("staleness_aware_lr has no meaning at staleness 0, where no push misses an update")
        if not 0 <= self.run < 2**63:
            raise ValueError(f"run must be in 0..2**63-1, got {self.run}")
        for name, value in (("lease", self.lease), ("wait_timeout", self.wait_timeout)):
            if not timedelta(0) < value < timedelta(days=40):
                raise ValueError(f"{name} must be above zero and below 40 days, got {value}")


class Membership:
    """One worker of a job, for which a thread sends heartbeats from `join` to `leave`. Any thread may call it.

    Waits for other workers last as long as these keep their lease, at most `terms.wait_timeout`: then WorkerLost.
    """

    def __init__(
        self,
        connections: ShardConnections,
        terms: Terms,
        *,
        worker: int,
        epoch: int,
        numbers: Iterator[int],
        timeout: timedelta,
    ) -> None:
        self.terms = terms
        self.worker = worker
        self.first = 0  # the clock at which this worker joined last: pushes of earlier ones are not waited for
        self.asked = 0  # the clock of the last join; some shards may have taken it where others did not answer
        self.lost_leases = 0
        self.members: tuple[int, ...] = ()  # as shard 0 said last, in order
        self.paused = False
        # False where something else ties the workers' steps together, as an all-reduce does: one that came back at a
        # later clock and those who went on would wait for each other
        self.may_rejoin = True
        self._connections, self._epoch, self._timeout = connections, epoch, timeout
        self._next = 0  # after the last clock that was pushed
        self._numbers = numbers  # of joins and pauses, ascending as long as the epoch is the same
        self._paused_terms: dict[int, int] = {}  # shard -> term of the process that knows of the pause
        self._memory_lost: MemoryLost | None = None  # what a shard has answered a heartbeat
        self._joins = 0  # that all shards have taken
        self._evicted: tuple[int, LeaseLost] | None = None  # what a shard has answered a heartbeat after so many joins
        self._lock = connections.clock.rlock()  # of joining
        self._ended = connections.clock.event()

    def join(self, clock: int = 0) -> int:
        """Join at `clock`, or as soon after it as all shards take this worker; the clock.

        ModeMismatch where the others train on other terms.
        """
        seconds = self.terms.lease.total_seconds() / _HEARTBEATS
        work = partial(_send_heartbeats, weakref.ref(self), self._ended, seconds)
        # first: one shard may have taken the join for longer than a lease before another has room for it
        self._connections.clock.spawn("embershard heartbeat", work)
        try:
            with self._lock:
                self._join(clock)
        except BaseException:  # a Ctrl-C, too: some shards may have taken it, and heartbeats would keep it there
            self.leave()
            raise
        self._connections.heartbeat = Heartbeat(worker=self.worker, epoch=self._epoch)
        return self.first

    def pause(self) -> None:
        """Let the others' clock advance without this worker; a rendezvous still waits for it.

        Its pushes must be safe (`Client.flush`): one that is sent again after the pause is refused, as it is late.
        """
        with self._lock:
            self.paused = True
            self._say_paused()

    def resume(self, clock: int = 0) -> int:
        """End a pause: push again from `clock` on, or as soon after it as all shards agree; the clock."""
        with self._lock:
            self.paused = False
            return self._join(max(clock, self._next))

    def rendezvous(
        self,
        name: str,
        payload: bytes = b"",
        *,
        want_payloads: bool = True,
        participants: Sequence[int] = (),
        wait_timeout: timedelta | None = None,
    ) -> dict[int, bytes]:
        """Wait until every live member has joined the rendezvous `name`; return their payloads, by worker.

        Without `want_payloads` the payloads (at most 16 MiB each) are not sent here, and are empty. `participants` are
        the expected workers, by default all members. A name is used once in a job. `wait_timeout` replaces that of the
        terms.
        """
        data = np.frombuffer(payload, np.uint8)
        met = self._ask_first(
            Rendezvous(self.worker, self._epoch, name, data, want_payloads, tuple(participants)), wait_timeout
        )
        assert isinstance(met, RendezvousResult)
        self.members = tuple(sorted({*self.members, *met.workers}))  # a heartbeat may not know of all of them yet
        payloads = [part.tobytes() for part in met.payloads] if want_payloads else [b""] * len(met.workers)
        return dict(zip(met.workers, payloads, strict=True))

    def take_split(self, data_epoch: int, num_splits: int, done: int = -1) -> Split:
        """The next of `num_splits` parts of pass `data_epoch` over the data; `done` is the one just finished, or -1.

        Waits while the last parts are in other workers' hands, which may not live to finish them.
        """
        split = self._ask_first(
            TakeSplit(worker=self.worker, epoch=self._epoch, data_epoch=data_epoch, num_splits=num_splits, done=done)
        )
        assert isinstance(split, Split)
        return split

    def required_clock(self, clock: int) -> int:
        """Return the number of clocks that must be closed before this worker reads rows for `clock`."""
        if self.terms.staleness is None or self.paused:  # the clock need not come to one that does not go on
            return 0
        return max(0, max(clock, self.first) - self.terms.staleness)

    @property
    def next_clock(self) -> int:
        """The first that may still be pushed."""
        return max(self._next, self.first)

    def pushed(self, clock: int) -> None:
        """Take note of a push."""
        self._next = max(self._next, clock + 1)

    def wait(
        self,
        requests: Mapping[int, Request],
        into: Mapping[int, Sequence[Array]] | None = None,
        wait_timeout: timedelta | None = None,
        *,
        until_error: bool = False,
    ) -> dict[int, Outcome]:
        """Call shards that may wait for other workers before they answer; WorkerLost at the end of the wait.

        MemoryLost where any shard has told a heartbeat that it has lost acknowledged pushes of this worker. Where one
        has told it that it evicted this worker, the outcome of pulls that wait is LeaseLost: they need another clock
        then. For other requests the worker joins again, and goes on waiting.
        With `until_error` the first error of a shard, which comes first in the outcomes, ends the wait for the others.
        """
        outcomes: dict[int, Outcome] = {}
        waiting = dict(requests)
        ahead: dict[int, ClockAhead] = {}
        clock = self._connections.clock
        over = Deadline(self.terms.wait_timeout if wait_timeout is None else wait_timeout, clock)
        deadline = Deadline(self._timeout, clock)
        first, said = True, False
        while waiting:
            left = min(deadline.remaining, over.remaining)
            answers = self._connections.call(waiting, into, timeout=min(left, _SAID_AFTER) if first else left)
            outcomes.update(answers)
            again = (ClockAhead, ShardUnavailable)
            errors = [a for a in answers.values() if isinstance(a, EmbershardError) and not isinstance(a, again)]
            if until_error and errors:  # the others may wait for this worker, which has to hear of it first
                return dict(sorted(outcomes.items(), key=lambda one: not any(one[1] is error for error in errors)))
            waiting = {shard: waiting[shard] for shard, answer in answers.items() if isinstance(answer, again)}
            if waiting and self._memory_lost is not None:
                # the others may wait for it at the shard that has lost them, and none of these requests goes there
                raise clipped(self._memory_lost)  # as another exception: it is raised more than once
            lost_leases, evicted = self.lost_leases, self._evicted
            if waiting and evicted is not None and evicted[0] == self._joins:
                # the others may wait for it at the shard that evicted it, and none of these requests goes there
                if any(isinstance(request, Pull) for request in waiting.values()):  # they need a later clock
                    return outcomes | dict.fromkeys(waiting, clipped(evicted[1]))
                self.rejoin(lost_leases)  # what came of a push is for its shard to say, and it refuses older clocks now
            ahead |= {shard: answer for shard, answer in answers.items() if isinstance(answer, ClockAhead)}
            # one that is silent now may have said before for whom it waits
            waits = next((ahead[shard] for shard in waiting if shard in ahead), None)
            if waits is not None and over.seconds <= 0:
                reason = f"{waits.message} ({over.timeout} have passed)"
                raise WorkerLost(worker=self.worker, world_size=self.terms.workers, reason=reason)
            if waits is not None and not said:
                said = True
                _log.warning("worker %d: %s", self.worker, waits)
            if not any(isinstance(answer, ShardUnavailable) for answer in answers.values()):
                deadline = Deadline(self._timeout, clock)  # the shards answer: it is for workers that they wait
            elif deadline.seconds <= 0 or over.seconds <= 0:  # the silent shard first: it is why the wait ends
                return dict(sorted(outcomes.items(), key=lambda one: isinstance(one[1], ClockAhead)))
            first = False
        return outcomes

    def rejoin(self, lost_leases: int, within: timedelta | None = None) -> None:
        """Be a member again after LeaseLost; `lost_leases` as it was before the request that was refused.

        Raises LeaseLost where this worker must not come back. Without `within` it waits for shards as every call does.
        """
        if not self.may_rejoin:
            raise LeaseLost(worker=self.worker, lease_ms=round(self.terms.lease.total_seconds() * 1000))
        with self._lock:
            if self.lost_leases != lost_leases:
                return  # another thread was quicker
            self._join(self._next, within)
            self.lost_leases += 1
            if self.paused:
                self._say_paused(within)
        _log.warning(
            "worker %d was evicted: no request of it arrived within its lease of %s. It joined again at clock %d and "
            "drops what it computed in between",
            self.worker, self.terms.lease, self.first,
        )  # fmt: skip

    def call_with_rejoin(self, ask: Callable[[], dict[int, Outcome]]) -> dict[int, Outcome]:
        """Call `ask`; where the lease was lost, join again and call it again."""
        for _ in range(_TRIES):
            lost_leases = self.lost_leases
            outcomes = ask()
            if not any(isinstance(outcome, LeaseLost) for outcome in outcomes.values()):
                break
            self.rejoin(lost_leases)
        return outcomes

    def leave(self, timeout: timedelta = _FAREWELL) -> None:
        """Leave the job and stop sending heartbeats; a shard that does not answer in time is left to the lease."""
        if not self._ended.is_set():
            self._ended.set()
            self._connections.heartbeat = None
            leave = Leave(worker=self.worker, epoch=self._epoch)
            deadline = Deadline(min(self._timeout, timeout), self._connections.clock)
            if self._lock.acquire(timeout=deadline.seconds / 2):  # a heartbeat may join again now, behind this
                self._lock.release()
            self._call_all(leave, deadline.remaining, awaits_recovery=False)

    def _join(self, clock: int, within: timedelta | None = None) -> int:
        terms, margin = self.terms, _MARGIN
        deadline = Deadline(within or self._timeout, self._connections.clock)
        while True:
            staleness = -1 if terms.staleness is None else terms.staleness
            lease_ms = max(1, round(terms.lease.total_seconds() * 1000))
            staleness_aware_lr = terms.staleness_aware_lr
            join = Join(
                worker=self.worker,
                epoch=self._epoch,
                clock=clock,
                staleness=staleness,
                workers=terms.workers,
                lease_ms=lease_ms,
                staleness_aware_lr=staleness_aware_lr,
                run=terms.run,
                number=next(self._numbers),
            )
            self.asked = clock
            replies = [reply for reply in self._ask_all(join, within) if isinstance(reply, Joined)]
            if all(reply.member for reply in replies):
                # the same first clock everywhere: no shard closes one that another still waits for
                self.first, self.members = clock, tuple(replies[0].members)
                self._joins += 1
                return clock
            if deadline.seconds <= 0:
                reason = f"the clock ran away from it for {deadline.timeout}"
                raise WorkerLost(worker=self.worker, world_size=terms.workers, reason=reason)
            clock, margin = max(reply.clock for reply in replies) + margin, 2 * margin

    def _say_paused(self, within: timedelta | None = None) -> None:
        terms = self._terms()
        self._ask_all(Leave(worker=self.worker, epoch=self._epoch, pause=True, number=next(self._numbers)), within)
        self._paused_terms = terms

    def _terms(self) -> dict[int, int]:
        return {shard: self._connections.term(shard) for shard in self._connections.shards}

    def _ask_first(self, request: Request, wait_timeout: timedelta | None = None) -> Reply:
        """The reply of shard 0, from a member."""
        outcome = self.call_with_rejoin(lambda: self.wait({0: request}, wait_timeout=wait_timeout))[0]
        if isinstance(outcome, EmbershardError):
            raise outcome
        return outcome

    def _ask_all(self, request: Request, within: timedelta | None) -> list[Outcome]:
        outcomes = self._call_all(request, within or self._timeout, awaits_recovery=within is None)
        for outcome in outcomes:
            # a lease that is lost already needs no leave, and the next request says so
            if isinstance(outcome, EmbershardError) and not isinstance(outcome, LeaseLost):
                raise outcome
        return outcomes

    def _call_all(self, request: Request, timeout: timedelta, *, awaits_recovery: bool = True) -> list[Outcome]:
        shards = self._connections.shards
        outcomes = self._connections.call(
            dict.fromkeys(shards, request), timeout=timeout, counted=False, awaits_recovery=awaits_recovery
        )
        return [outcomes[shard] for shard in shards]

    def _heartbeat(self, timeout: timedelta) -> None:
        """Renew the lease on every shard; one that does not answer must not delay the others."""
        beats = {
            shard: Heartbeat(worker=self.worker, epoch=self._epoch, term=self._connections.term(shard))
            for shard in self._connections.shards
        }
        lost_leases, joins = self.lost_leases, self._joins
        outcomes = self._connections.call(beats, timeout=timeout, counted=False, awaits_recovery=False)
        evicted = next((outcome for outcome in outcomes.values() if isinstance(outcome, LeaseLost)), None)
        if evicted is not None:
            self._evicted = (joins, evicted)
        # whoever has the lock joins or pauses, and may wait for a shard for longer than a lease
        if self.paused and self._lock.acquire(blocking=False):
            try:
                with suppress(EmbershardError):  # the next heartbeat tries again
                    self._keep_paused(None if evicted is None else lost_leases, timeout)
            finally:
                self._lock.release()
        lost = (outcome for outcome in outcomes.values() if isinstance(outcome, MemoryLost))
        self._memory_lost = next(lost, self._memory_lost)  # for good: the shard does not get them back
        first = outcomes[self._connections.shards[0]]
        if isinstance(first, HeartbeatAck):
            self.members = tuple(first.members)

    def _keep_paused(self, lost_leases: int | None, within: timedelta) -> None:
        """Have each shard know of the pause; `lost_leases` where one evicted this worker. The caller has the lock."""
        if not self.paused or self._ended.is_set():
            return
        if self.may_rejoin and lost_leases is not None:
            self.rejoin(lost_leases, within)  # no request of its own would say so, and others may wait for it there
        elif self._paused_terms != self._terms():
            self._say_paused(within)  # the pause may be lost with the power of a machine


def _send_heartbeats(membership: weakref.ref[Membership], ended: ClockEvent, seconds: float) -> None:
    """Renew the lease until it ends, its session was collected without being closed, or Python ends."""
    while not ended.wait(seconds) and not has_ended() and (member := membership()) is not None:
        member._heartbeat(timedelta(seconds=seconds))
        del member
