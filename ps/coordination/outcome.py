"""What an event made of a shard's state."""

from __future__ import annotations

from dataclasses import dataclass

from embershard.proto.errors import EmbershardError
from embershard.proto.messages import Reply
from embershard.ps.coordination.clock import MustWait
from embershard.ps.table.table import Applied


@dataclass(slots=True)
class Outcome:
    """The reply to an event (to a push or a load: its counts), and what it did; a replay has the same outcome.

    Without a reply there is an `error`, of an update that was begun and stopped, or the request is `waiting`: it is
    answered when it is applied again, once others have moved. An event that has not `changed` the state need not be
    applied again by a replay.
    """

    reply: Reply | Applied | None = None
    changed: bool = True
    error: EmbershardError | None = None
    waiting: MustWait | None = None
    version: int = 0  # updates applied, after it
    clock: int = 0  # the first that is not closed, after it

    @property
    def rows(self) -> tuple[int, int]:
        """The rows applied and those skipped, of a push or a load."""
        return self.reply if isinstance(self.reply, Applied) else (0, 0)
