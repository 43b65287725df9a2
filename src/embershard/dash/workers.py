"""The workers of a job: their clocks as the shards see them, and where their steps go as they themselves say."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from embershard.dash.events import Event, Severity
from embershard.dash.run_log import Line
from embershard.proto.messages import ShardStatus

_WAIT_SECONDS = 1.0  # a shorter wait is a part of every step
_SILENT_SECONDS = 3.0
_RECORD_SECONDS = 15.0  # after which a worker's own record is of the past
# the parts of proto/timing.py as the panel sums them
PARTS = {
    "data": ("data",),
    "compute": ("forward", "backward", "gather"),
    "pull": ("route", "encode", "send", "receive", "decode", "pull"),
    "push": ("push",),
    "shards": ("wait", "shards"),
}


@dataclass(slots=True, kw_only=True)
class WorkerRow:
    """One worker. `parts` are milliseconds of its step: data, compute, pull, push, shards, workers, other."""

    worker: int
    state: str  # trains, waits, waited for, paused, silent, gone, ended
    clock: int | None = None
    lease: float | None = None  # seconds that are left
    waits_for: list[int] = field(default_factory=list)  # other workers
    waits_for_shards: list[int] = field(default_factory=list)
    seconds: float = 0.0  # in this state, where it waits or is waited for
    step: int | None = None
    samples_per_second: float | None = None
    step_ms: float | None = None
    parts: dict[str, float] = field(default_factory=dict)


class WorkersWatch:
    """Follows members from one round to the next."""

    def __init__(self) -> None:
        self._moved: dict[int, tuple[int, float]] = {}  # clock of a member, and when it was new
        self._closed = (-1, 0.0)  # likewise, of the job
        self._members: set[int] | None = None
        self._expired = 0

    def rows(
        self, statuses: Sequence[ShardStatus], down: Sequence[int], records: Mapping[int, Line], ended: bool
    ) -> list[WorkerRow]:
        """The workers, by the shards that answer, those that are down, and their own records."""
        now = time.monotonic()
        bound = max((status.staleness for status in statuses), default=-1)
        closed = min((status.clock for status in statuses if status.members), default=0)
        if closed != self._closed[0]:
            self._closed = (closed, now)
        clocks: dict[int, int] = {}
        rows: dict[int, WorkerRow] = {}
        paused: set[int] = set()
        for status in statuses:
            for member in status.members:
                clocks[member.worker] = min(clocks.get(member.worker, member.clock), member.clock)
                row = rows.setdefault(member.worker, WorkerRow(worker=member.worker, state="trains"))
                row.lease = min(row.lease if row.lease is not None else member.lease_seconds, member.lease_seconds)
                paused |= {member.worker} if member.paused else set()
        behind = sorted(worker for worker, clock in clocks.items() if clock <= closed and worker not in paused)
        stuck = now - self._closed[1]
        for worker, clock in clocks.items():
            if self._moved.get(worker, (-1, 0.0))[0] != clock:
                self._moved[worker] = (clock, now)
            row = rows[worker]
            row.clock = clock
            still = now - self._moved[worker][1]
            if worker in paused:
                row.state = "paused"
            elif bound >= 0 and clock > closed + bound and stuck > _WAIT_SECONDS:
                row.state, row.seconds, row.waits_for = "waits", stuck, behind
            elif bound >= 0 and worker in behind and stuck > _WAIT_SECONDS and clock < max(clocks.values()):
                row.state, row.seconds = "waited for", stuck
            elif still > _SILENT_SECONDS:
                row.state, row.seconds = "waits" if down else "silent", still
                row.waits_for_shards = list(down)
        for worker, record in records.items():
            # one worker alone is no member, and without shards nobody says who is one: its record has to do
            age = time.time() - _float(record.get("time"))
            is_here = not clocks and (age < _RECORD_SECONDS or (bool(down) and not statuses))
            state = "ended" if ended else "trains" if is_here else "gone"
            row = rows.setdefault(worker, WorkerRow(worker=worker, state=state))
            if row.state == "trains" and down and age > _SILENT_SECONDS:
                row.state, row.seconds, row.waits_for_shards = "waits", age, list(down)
            _add_record(row, record)
        return [rows[worker] for worker in sorted(rows)]

    def events(self, statuses: Sequence[ShardStatus], whole: bool) -> list[Event]:
        """Return the workers that came and went, as events; `whole` says whether all shards answered."""
        if not statuses or not whole:
            return []
        now = time.time()
        members = {member.worker for status in statuses for member in status.members}
        expired = max(status.expired_leases for status in statuses)
        events = []
        if self._members is not None:
            events += [Event(now, Severity.INFO, f"worker {one} joined") for one in sorted(members - self._members)]
            how = "was evicted: its lease ran out" if expired > self._expired else "left"
            severity = Severity.WARNING if expired > self._expired else Severity.INFO
            events += [Event(now, severity, f"worker {one} {how}") for one in sorted(self._members - members)]
            if expired > self._expired and not self._members - members:
                events.append(Event(now, Severity.WARNING, f"{expired - self._expired} leases ran out"))
        self._members, self._expired = members, expired
        return events


def _add_record(row: WorkerRow, record: Line) -> None:
    parts, waits = record.get("parts_ms"), record.get("waits")
    step, written = record.get("step"), record.get("time")
    row.step = step if isinstance(step, int) else None
    if row.state not in ("ended", "gone") and time.time() - _float(written) > _RECORD_SECONDS:
        return  # what its steps were like is of the past
    if row.state not in ("ended", "gone", "waits", "waited for", "silent"):
        row.samples_per_second = _float(record.get("samples_per_second"))
    if not isinstance(parts, dict) or not isinstance(waits, dict):
        return
    whole = sum(map(_float, parts.values()))
    summed = {name: sum(_float(parts.get(part)) for part in of) for name, of in PARTS.items()}
    workers = min(_float(waits.get("workers")) * whole, summed["shards"])
    row.step_ms = whole
    row.parts = {
        **summed,
        "shards": summed["shards"] - workers,
        "workers": workers,
        "other": max(0.0, whole - sum(summed.values())),
    }


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
