"""The clock that the workers of a job share: who takes part, which clock is open, and what its pushes become.

A clock closes once every member that does not rest has pushed it. A member whose lease runs out is dropped, and the
clock goes on without it; leases.py says when. What was pushed of a clock to the end counts, also where its worker has
left since. docs/consistency.md says what this promises.

Nothing here knows the time: the same calls in the same order give the same state.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from embershard.proto.errors import (
    EmbershardError,
    InvalidRequest,
    JobOver,
    LeaseLost,
    ModeMismatch,
    StaleRun,
    StaleWorker,
    UpdateFailed,
    clipped,
)
from embershard.proto.messages import Join, Joined, Leave, LeaveAck, Push
from embershard.ps.coordination.aggregate import PendingUpdates, Sender, apply_clock
from embershard.ps.coordination.dedup import MAX_WORKERS
from embershard.ps.memory import MemoryBudget
from embershard.ps.table.checked import CheckedGradients
from embershard.ps.table.table import Applied

TERM_VERSIONS = 2**32  # versions of a term begin at a multiple: what was read in another one is of another history
SEEN = 32  # places of the histogram of staleness; the last one: so much or more
MAX_CLOCK = 2**62
MAX_RUN = 2**63 - 1
MAX_LEASE_MS = 40 * 24 * 3600 * 1000  # about what 32 bits hold
# Gradients that wait for the other workers' of their clock. A worker sends a clock's as it computes them, so this many
# are there when a clock closes: about those of 16 workers with the largest messages.
GATHER_BYTES = 2**30

Plain = dict[str, Any]  # what msgpack can say
_PLAIN = ("open", "staleness", "staleness_aware_lr", "started", "expired", "job", "run", "workers", "_serial")

_log = logging.getLogger(__name__)


class MustWait(Exception):
    """A request cannot be answered before these members have moved, or those came that have not joined yet."""

    def __init__(self, members: Iterable[Member]) -> None:
        super().__init__()
        self.workers = tuple(sorted(member.worker for member in members))


@dataclass(slots=True)
class Member:
    """One incarnation of a worker that takes part."""

    worker: int
    epoch: int
    clock: int  # the next that it will push
    lease_ms: int
    run: int  # that it takes part in
    serial: int  # of all members that this shard has had: another one after each time that it was gone
    paused: bool = False
    lost: bool = False  # its lease ran out, or a later run began
    job: int = -1  # of the shard's; -1: not known, as in what older versions wrote
    first: int = 0  # the clock at which it joined again after its lease had ended; else 0, as in older versions' logs
    number: int = 0  # of its last join or pause; 0: it gave none, as older versions

    @property
    def sender(self) -> Sender:
        """Return the worker and epoch under which it pushes."""
        return Sender(self.worker, self.epoch)

    def is_past(self, request: Join | Leave) -> bool:
        """Whether a join or a pause comes behind a later one: a copy may that a broken connection had for long."""
        return 0 < request.number < self.number


class Updates:
    """The updates that a shard has applied, and how many of them pushes had missed."""

    def __init__(self) -> None:
        self.version = 0  # updates applied
        self.seen = [0] * SEEN  # pushes by what their rows had missed

    def missed(self, version: int) -> int:
        """Updates since rows were of this version; 0 where it is not known, as for one of an earlier term."""
        return max(0, self.version - version) if self._is_known(version) else 0

    def begin_term(self) -> None:
        """Skip to versions that nobody has seen: the process before may have shown some that were lost with it."""
        self.version = (self.version // TERM_VERSIONS + 1) * TERM_VERSIONS

    def count(self, versions: Iterable[int]) -> None:
        """An update was applied, made of pushes whose rows were of these versions (0: not known)."""
        for version in versions:
            if self._is_known(version):
                self.seen[min(self.missed(version), SEEN - 1)] += 1
        self.version += 1

    def _is_known(self, version: int) -> bool:
        return version > 0 and version // TERM_VERSIONS == self.version // TERM_VERSIONS


class Clock:
    """Members and clocks of one shard."""

    def __init__(self, budget: MemoryBudget | None = None) -> None:
        self.open = 0  # the first clock that is not closed
        self.staleness = -1
        self.staleness_aware_lr = False
        self.started = False  # as many as expected have joined
        self.members: dict[int, Member] = {}
        self.expired = 0
        self.updates = Updates()
        self.failed: UpdateFailed | None = None  # the first update of this job that was not applied in full
        self.job = 0  # counts the jobs that this shard has served; 0: no worker has joined yet
        self.run = 0  # the highest that was named
        self.generation = 0  # grows with whatever may let a request be answered that had to wait
        self.pending = PendingUpdates(MemoryBudget() if budget is None else budget)  # that wait for other workers'
        self._left: dict[int, Member] = {}  # who take part no more
        self._epochs: dict[int, int] = {}  # the newest of each worker that ever joined
        self._joined: set[int] = set()
        self._serial = 0  # of the newest member
        self.workers = 1  # that are expected

    def join(self, request: Join) -> Joined:
        """Take a worker in from `request.clock` on, end its rest, or tell it that this clock is closed."""
        _check_join(request)
        worker, epoch = request.worker, request.epoch
        self.fence(worker, epoch)
        self._enter_run(request)
        _check_mode(request, self)
        self._epochs[worker] = epoch
        member, gone = self.members.get(worker), self._left.get(worker)
        if member is not None and member.epoch == epoch and member.is_past(request):
            return Joined(member=True, clock=self.open, started=self.started, members=self.workers_here())
        if gone is not None and (gone.epoch, gone.run) != (epoch, self.run):
            gone = None
        if member is not None and member.epoch != epoch:
            self._remove(member)
            self._close()
            member = None
        may_rejoin = (
            gone
            and gone.lost
            and (self.staleness, self.staleness_aware_lr) == (request.staleness, request.staleness_aware_lr)
        )
        if not self.members and not may_rejoin:
            self._begin(request)
        elif gone is not None and gone.lost and gone.job not in (-1, self.job):
            # it would wait for clocks of the job before, and the others for it
            raise JobOver(worker=worker)
        # a clock that it has pushed before it was gone is not pushed a second time
        first = max(self.open, gone.clock) if gone else self.open
        if request.clock < first:
            return Joined(member=False, clock=first, started=self.started, members=self.workers_here())
        if member is None:
            self._serial += 1
            again = request.clock if gone is not None and gone.lost else 0
            member = Member(
                worker, epoch, request.clock, request.lease_ms, self.run, self._serial, job=self.job, first=again
            )
            self.members[worker] = member
        member.clock = max(member.clock, request.clock)
        member.lease_ms, member.paused, member.number = request.lease_ms, False, request.number
        self._left.pop(worker, None)
        self._joined.add(worker)
        self.started = self.started or len(self._joined) >= self.workers
        self.generation += 1
        self._close()
        return Joined(member=True, clock=self.open, started=self.started, members=self.workers_here())

    def leave(self, request: Leave) -> LeaveAck:
        """Wait for a worker no longer; a second time, as after a lost reply, this changes nothing."""
        self.fence(request.worker, request.epoch)
        member = self.find_member(request.worker, request.epoch)
        if member is None or member.is_past(request):
            return LeaveAck()
        if request.pause:
            member.paused, member.number = True, request.number
            self.pending.drop(member.sender)
            self.generation += 1
        else:
            self._remove(member)
        self._close()
        return LeaveAck()

    def expire(self, worker: int, epoch: int) -> bool:
        """Evict a member whose lease ran out; whether it was one."""
        member = self.members.get(worker)
        if member is None or member.epoch != epoch:
            return False
        self.expired += 1
        self._remove(member, lost=True)
        self._close()
        return True

    def fence(self, worker: int, epoch: int) -> None:
        """StaleWorker for an earlier incarnation than the one that joined last."""
        newest = self._epochs.get(worker, 0)
        if epoch < newest:
            raise StaleWorker(worker=worker, got=epoch, want=newest, by="")

    def find_member(self, worker: int, epoch: int) -> Member | None:
        """The member that a worker's incarnation is; None for one that takes no part.

        LeaseLost where it did until its lease ran out.
        """
        member = self.members.get(worker)
        if member is not None and member.epoch == epoch:
            return member
        gone = self._left.get(worker)
        if gone is not None and gone.lost and gone.epoch == epoch:
            raise LeaseLost(worker=worker, lease_ms=gone.lease_ms)
        return None

    def member(self, worker: int, epoch: int) -> Member:
        """The member that a worker's incarnation is; StaleWorker, LeaseLost, InvalidRequest where it is none."""
        self.fence(worker, epoch)
        member = self.find_member(worker, epoch)
        if member is None:
            raise InvalidRequest(reason=f"worker {worker} is no member here; it has to join first")
        return member

    def check_late(self, member: Member, request: Push) -> None:
        """InvalidRequest for a push of before the member's lease ended.

        It may have been refused then (LeaseLost), which the log says. If it were taken now, and lost with the machine's
        power, the log would still count it as refused, and its sender would not be told (MemoryLost). A replay does not
        ask: earlier versions took such a push.
        """
        if request.clock < member.first:
            raise _wrong_clock(member, request.clock, member.first)

    def check_push(self, member: Member, request: Push) -> None:
        """Whether a member's push can be taken now.

        InvalidRequest for a clock that is closed or a weight without sense, MustWait while too much waits for other
        workers; what the open clock waits for is taken in any case, since nothing is freed before it closes.
        """
        first = max(self.open, member.clock) if self.staleness == 0 else 0
        if not first <= request.clock < MAX_CLOCK:
            raise _wrong_clock(member, request.clock, first)
        if not 0 <= request.weight < math.inf:
            raise InvalidRequest(reason=f"the weight of a push must be finite and >= 0, got {request.weight}")
        if self.pending.nbytes > GATHER_BYTES and request.clock > self.open:
            raise self.ahead(request.clock)

    def gathers(self, member: Member, request: Push) -> bool:
        """Whether a member's push has to wait for those of other workers; else it is applied at once."""
        if self.staleness != 0:
            return False
        closes = request.last and request.weight > 0 and not self.pending and self.started
        return not closes or any(
            other.clock <= request.clock and other is not member and not other.paused for other in self.members.values()
        )

    def gather(self, sender: Sender, request: Push, parts: list[CheckedGradients], event: int) -> Applied:
        """Keep a push, which is event number `event`, until its clock closes."""
        return self.pending.add(sender, request, parts, event)

    def pushed(self, member: Member, clock: int) -> None:
        """Note that a member has pushed a clock to the end, and close the clocks that waited for it."""
        member.clock = max(member.clock, clock + 1)
        self._close(clock + 1 if self.staleness == 0 else 0)  # it may be applied, and not gathered

    def divisor(self, version: int) -> float:
        """Staleness of a push, at least 1, which divides its learning rate (Zhang et al. 2016); 1 where it does not."""
        return float(max(1, self.updates.missed(version))) if self.staleness_aware_lr else 1.0

    def await_closed(self, clocks: int) -> None:
        """Raise MustWait unless so many clocks are closed, UpdateFailed where the update of one of them failed."""
        if clocks > self.open:
            raise self.ahead(clocks)
        if self.failed is not None and clocks > self.failed.clock:
            raise clipped(self.failed)  # as another exception: it is raised more than once

    def ahead(self, clock: int) -> MustWait:
        """Return the error of a request that has to wait until `clock` clocks are closed."""
        return MustWait(m for m in self.members.values() if not m.paused and m.clock < clock)

    def absent(self) -> list[int]:
        """The workers that are expected, and have not joined yet."""
        if not self.members or self.started:
            return []
        return [worker for worker in range(self.workers) if worker not in self._joined]

    def control(self) -> Plain:
        """All of it in plain values; of gradients that wait, the numbers of their events."""
        return {
            "plain": {name: getattr(self, name) for name in _PLAIN},
            "version": self.updates.version,
            "seen": list(self.updates.seen),
            "failed": self.failed and [self.failed.fields["clock"], self.failed.fields["reason"]],
            "members": [list(dataclasses.astuple(member)) for member in self.members.values()],
            "left": [list(dataclasses.astuple(member)) for member in self._left.values()],
            "epochs": [list(pair) for pair in self._epochs.items()],
            "joined": sorted(self._joined),
            "pending": self.pending.events(),
        }

    def restore(self, control: Plain) -> None:
        """Be as `control` said, but for the gradients that wait."""
        for name in _PLAIN:
            setattr(self, name, control["plain"][name])
        self.updates.version, self.updates.seen = control["version"], list(control["seen"])
        failed = control["failed"]
        self.failed = None if failed is None else UpdateFailed(clock=failed[0], reason=failed[1])
        self.members = {fields[0]: Member(*fields) for fields in control["members"]}
        self._left = {fields[0]: Member(*fields) for fields in control["left"]}
        self._epochs, self._joined = dict(control["epochs"]), set(control["joined"])

    def workers_here(self) -> tuple[int, ...]:
        """Return the numbers of the workers that are members, ascending."""
        return tuple(sorted(self.members))

    def _begin(self, request: Join) -> None:
        """Begin another job, with this worker as its first: no member of the last one is left."""
        self.job += 1
        self.open, self.staleness, self.staleness_aware_lr = (
            request.clock,
            request.staleness,
            request.staleness_aware_lr,
        )
        self.started, self.workers = False, request.workers
        self.failed = None
        self._joined.clear()
        for gone in self._left.values():
            gone.clock = 0

    def _enter_run(self, request: Join) -> None:
        """Have a later run end the one that goes on, as if all its leases ended now. StaleRun for an earlier one."""
        gone = self._left.get(request.worker)
        run = request.run or (gone.run if gone is not None and gone.epoch == request.epoch else self.run)
        if run < self.run:
            raise StaleRun(worker=request.worker, got=run, want=self.run, by="")
        if run > self.run:
            self.run = run
            for member in list(self.members.values()):
                self._remove(member, lost=True)
            self._close()

    def _remove(self, member: Member, *, lost: bool = False) -> None:
        member.lost = lost
        self._left[member.worker] = self.members.pop(member.worker)
        self.pending.drop(member.sender)
        self.generation += 1

    def _close(self, done: int = 0) -> None:
        """Close the clocks for which nobody is waited any more, and apply what was gathered of them.

        done: clocks up to one that was pushed now; they are closed where all members pause.
        """
        if self.members and not self.started:
            return
        active = [member.clock for member in self.members.values() if not member.paused]
        end = min(active) if active else max(self.pending.end, done)
        if end <= self.open:
            return
        self.open = end
        self.generation += 1
        for clock, pushes in self.pending.take(before=end):
            try:
                apply_clock(pushes)
            except Exception as error:  # not for the request that closes the clock: it has a reply of its own
                self._note_failure(clock, error)
            self.updates.count(push.version for push in pushes)  # changes are of the version before it

    def _note_failure(self, clock: int, error: Exception) -> None:
        """Keep the error for whoever waits for this clock or a later one; all of its pushes were acknowledged."""
        reason = error.message if isinstance(error, EmbershardError) else f"{type(error).__name__}: {error}"
        failed = UpdateFailed(clock=clock, reason=reason)
        _log.error("%s", failed, exc_info=None if isinstance(error, EmbershardError) else error)
        self.failed = self.failed or failed


def _check_join(request: Join) -> None:
    for what, value, low, high in (
        ("worker", request.worker, 0, MAX_WORKERS - 1),
        ("epoch", request.epoch, 1, 2**64 - 1),
        ("clock", request.clock, 0, MAX_CLOCK - 1),
        ("staleness", request.staleness, -1, MAX_CLOCK),
        ("workers", request.workers, 1, MAX_WORKERS),
        ("lease_ms", request.lease_ms, 1, MAX_LEASE_MS),
        ("run", request.run, 0, MAX_RUN),
    ):
        if not low <= value <= high:
            raise InvalidRequest(reason=f"worker {request.worker} joins with {what} {value}, not {low}..{high}")


def _wrong_clock(member: Member, got: int, first: int) -> InvalidRequest:
    return InvalidRequest(reason=f"worker {member.worker} pushes clock {got}; the first that it may push is {first}")


def _check_mode(request: Join, clock: Clock) -> None:
    """ModeMismatch where the members that stay train otherwise."""
    if not any(m.worker != request.worker or m.epoch == request.epoch for m in clock.members.values()):
        return
    pairs = [
        ("staleness", request.staleness, clock.staleness),
        ("staleness_aware_lr", request.staleness_aware_lr, clock.staleness_aware_lr),
    ]
    if not clock.started:
        pairs.append(("workers", request.workers, clock.workers))
    for what, got, want in pairs:
        if got != want:
            raise ModeMismatch(worker=request.worker, what=what, got=int(got), want=int(want))
