"""The messages that switch codecs while workers train; messages.py lists them with all others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TableCodecs:
    """How a table is to travel, as codec texts; "": as its workers say themselves."""

    table: str
    push: str = ""
    pull: str = ""


@dataclass(frozen=True, slots=True)
class Compress:
    """Have the workers switch these tables, under a revision above the shard's; revision 0 only checks and asks.

    A direction that is "" stays as it was said before. Without tables all that was said before is forgotten, unless
    members of a job are there: so begins a worker that trains alone, and never joins.
    """

    revision: int = 0
    tables: tuple[TableCodecs, ...] = ()


@dataclass(frozen=True, slots=True)
class Compressed:
    """All that was said of the tables of this job until this revision, which only grows; 0: nothing ever was."""

    revision: int
    tables: tuple[TableCodecs, ...]
