"""The messages about a shard's health; messages.py lists them with all others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GetStatus:
    """How are you?"""


@dataclass(frozen=True, slots=True)
class TableStatus:
    """One table of a shard."""

    name: str
    dim: int
    rows: int
    bytes: int
    optimizer: str
    loading: bool
    push_codec: str = ""  # of the worker that declared it last
    pull_codec: str = ""


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One worker of the job, as a shard sees it: the next clock that it will push, and what is left of its lease."""

    worker: int
    clock: int
    paused: bool
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard; counters run from its start.

    `clock` is the first that is not closed; `staleness_seen[n]` are pushes whose rows had missed n updates (the last
    number: so many or more).
    """

    shard: int
    num_shards: int
    placement_epoch: int
    version: str
    instance: str
    uptime_seconds: float
    resident_bytes: int
    requests: int
    pulled_rows: int
    pushed_rows: int
    duplicate_pushes: int
    skipped_rows: int
    queued_bytes: int
    tables: tuple[TableStatus, ...]
    clock: int = 0
    staleness: int = -1
    members: tuple[MemberStatus, ...] = ()
    staleness_seen: tuple[int, ...] = ()
    expired_leases: int = 0
    meeting: str = ""  # the last one that was held
    failed_update: str = ""  # the first error of this job's updates, empty without one
    used_bytes: int = 0  # of the memory budget: rows, index, copies for a snapshot, updates that wait
    budget_bytes: int = 0
