"""The events of a shard: each change of its state is one, and the same events in the same order give the same state.

Requests that change the state are events as they came, but for a push, whose ids have to stand in it. The other events
are made by the shard itself (ps/shard.py): nothing else that it does on its own, as by the time, changes the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from embershard.proto.arrays import Ids
from embershard.proto.messages import Compress, Declare, Join, Leave, Load, Push, Rendezvous, TakeSplit
from embershard.ps.coordination.outcome import Outcome

if TYPE_CHECKING:
    from embershard.ps.restore import Contents


@dataclass(frozen=True, slots=True)
class PushEvent:
    """A push that is no duplicate. `ids` has those of the parts that name them by a route number, None for the others.

    They are () where no part does. Pulls, which left the ids with the shard, are no events.
    """

    push: Push
    ids: tuple[Ids | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Expired:
    """The lease of a worker's incarnation ran out."""

    worker: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Settled:
    """A push or load was refused for good, and its worker counts on; seq 0: it is put off, and may come again."""

    worker: int
    epoch: int
    seq: int


@dataclass(frozen=True, slots=True)
class TablesRestored:
    """The tables of a snapshot took the place of those that were here."""

    contents: Contents


Event = (
    PushEvent | Load | Declare | Compress | Join | Leave | Rendezvous | TakeSplit | Expired | Settled | TablesRestored
)  # fmt: skip


class EventLog(Protocol):
    """Keeps the events of a shard, in order, so that it can be made again after its process has ended."""

    @property
    def lsn(self) -> int:
        """The number of the last event that was appended; they count from 1."""
        ...

    def append(self, event: Event, outcome: Outcome) -> int:
        """Take an event that has changed the state; its number. Its arrays are not changed after this call."""
        ...
