"""The messages about snapshots; messages.py lists them with all others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Write this shard's part of a snapshot, at once or when `at_clock` clocks are closed.

    `step` is "begin", "watch" (how far is it?) or "cancel".
    """

    url: str
    name: str
    id: int
    at_clock: int = 0
    step: str = "begin"


@dataclass(frozen=True, slots=True)
class Snapshotted:
    """How far a shard's part is: `state` is "waiting", "writing", "done", "cancelling" or "cancelled".

    `clock` is the first one that was not closed. Once done, `path` is the list of its files, and `sha256` (hex) that
    list's digest.
    """

    state: str
    clock: int = 0
    rows: int = 0
    total_rows: int = 0
    bytes: int = 0
    files: int = 0
    path: str = ""
    sha256: str = ""
    stall_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Restore:
    """Read what belongs to this shard from a snapshot whose manifest has this digest (hex).

    `step` is "begin", "watch" (how far is it?), "install" (put what was read in place) or "cancel".
    """

    url: str
    name: str
    id: int
    sha256: str
    replace: bool = False
    step: str = "begin"


@dataclass(frozen=True, slots=True)
class Restored:
    """How far it is: `state` is "reading", "ready", "installed" or "cancelled"; rows are those that belong here."""

    state: str
    rows: int = 0
    bytes: int = 0
