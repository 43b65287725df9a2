"""What an event made of a shard's state."""

from __future__ import annotations

from typing import NamedTuple

from embershard.proto.errors import EmbershardError
from embershard.proto.messages import Loaded, Pushed, Reply
from embershard.ps.coordination.clock import MustWait


class Outcome(NamedTuple):
    """The reply to an event, and what it did; a replay of the event has the same outcome.

    Without a reply there is an `error`, of an update that was begun and stopped, or the request is `waiting`: it is
    answered when it is applied again, once others have moved. An event that has not `changed` the state need not be
    applied again by a replay.
    """

    reply: Reply | None = None
    changed: bool = True
    error: EmbershardError | None = None
    waiting: MustWait | None = None
    version: int = 0  # updates applied, after it
    clock: int = 0  # the first that is not closed, after it

    @property
    def rows(self) -> tuple[int, int]:
        """The rows applied and those skipped, of a push or a load."""
        match self.reply:
            case Pushed():
                return self.reply.applied, self.reply.skipped
            case Loaded():
                return self.reply.rows, 0
            case _:
                return 0, 0
