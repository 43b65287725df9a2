"""When each member's last request arrived, and whose lease has run out.

The clock of clock.py is told, and knows no time.

Times are seconds of a clock that only moves on, given by the caller: when a request arrived.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from embershard.proto.errors import ClockAhead
from embershard.proto.messages import MemberStatus
from embershard.ps.coordination.clock import Clock, Member, MustWait

_NAMED = 8  # workers in an error


class Leases:
    """The leases of a clock's members. A member that is not known here yet is given a whole one."""

    def __init__(self, clock: Clock) -> None:
        self.now = -math.inf  # as its owner knows it
        self.next_end = -math.inf  # no lease ends before
        self.closed_at = -math.inf  # when the last clock was closed
        # when anything of a worker's incarnation arrived last, a part of a request included
        self.find_last_seen: Callable[[int, int], float] = lambda worker, epoch: -math.inf
        self._clock = clock
        self._last_seen: dict[int, float] = {}  # by the member's serial number: when a request of it arrived last
        self._began = 0.0  # when the job did
        self._seen_open, self._seen_job = clock.open, clock.job

    def renew(self, worker: int, epoch: int, now: float) -> Member | None:
        """The member whose request arrived, its lease renewed; None for one that takes no part. LeaseLost."""
        member = self._clock.find_member(worker, epoch)
        if member is not None:
            self._last_seen[member.serial] = max(self._last_seen.get(member.serial, now), now)
        return member

    def begin(self, worker: int, epoch: int, now: float) -> None:
        """A worker has joined, perhaps again, perhaps with another lease; forget the members that are gone."""
        member = self.renew(worker, epoch, now)
        if member is not None:
            self.next_end = min(self.next_end, self._end(member))
        if len(self._last_seen) > 2 * len(self._clock.members):
            here = {member.serial for member in self._clock.members.values()}
            self._last_seen = {serial: seen for serial, seen in self._last_seen.items() if serial in here}

    def clock_moved(self) -> None:
        """Note the time of what an event did to the clock; to be called after each."""
        if self._clock.job != self._seen_job:
            self._seen_job, self._began, self.next_end = self._clock.job, self.now, -math.inf
        elif self._clock.open != self._seen_open:
            self.closed_at = self.now
        self._seen_open = self._clock.open

    def ended(self) -> list[Member]:
        """The members without a request within their lease, of whom there are none until `next_end`."""
        ended = [member for member in self._clock.members.values() if self._has_ended(member)]
        self.next_end = min(map(self._end, self._clock.members.values()), default=math.inf)
        return ended

    def extend(self, seconds: float) -> None:
        """Extend all leases by `seconds`, in which this process received nothing."""
        for serial in self._last_seen:
            self._last_seen[serial] += seconds

    def status(self) -> tuple[MemberStatus, ...]:
        """The members in order; may be read by any thread."""
        members = sorted(tuple(self._clock.members.values()), key=lambda member: member.worker)
        return tuple(
            MemberStatus(
                worker=m.worker, clock=m.clock, paused=m.paused, lease_seconds=max(0.0, self._end(m) - self.now)
            )
            for m in members
        )

    def error(self, waiting: MustWait) -> ClockAhead:
        """The error of a request that waits for others: for whom, and for how long no request of theirs came."""
        clock = self._clock
        members = [clock.members[worker] for worker in waiting.workers]
        absent = clock.absent()
        names = [str(worker) for worker in waiting.workers] + [f"{worker} (not here yet)" for worker in absent]
        silent = [self.now - self._seen(member) for member in members] + ([self.now - self._began] if absent else [])
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        workers = (", ".join(names[:_NAMED]) or "(none has joined)") + more
        return ClockAhead(clock=clock.open, workers=workers, seconds=max([0.0, *silent]))

    def _seen(self, member: Member) -> float:
        return self._last_seen.setdefault(member.serial, self.now)

    def _end(self, member: Member) -> float:
        return self._last_seen.get(member.serial, self.now) + member.lease_ms / 1000

    def _has_ended(self, member: Member) -> bool:
        if self._seen(member) + member.lease_ms / 1000 >= self.now:
            return False
        arrived = self.find_last_seen(member.worker, member.epoch)
        self._last_seen[member.serial] = max(self._last_seen[member.serial], arrived)
        return self._end(member) < self.now
