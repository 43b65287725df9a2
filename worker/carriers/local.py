"""A shard in the worker's own process: for tests, notebooks and models that fit one machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from embershard.proto.errors import EmbershardError
from embershard.proto.messages import Floats, Reply, Request, bulk_bytes


class _Done:
    """A reply, or the error in its place."""

    def __init__(self, outcome: Reply | EmbershardError) -> None:
        self._outcome = outcome

    def result(self) -> Reply:
        if isinstance(self._outcome, EmbershardError):
            raise self._outcome
        return self._outcome


class LocalCarrier:
    """Calls `handle` in the caller's thread; `handle` must bear the threads that its callers use."""

    def __init__(self, handle: Callable[[Request], Reply], address: str) -> None:
        self.address = address
        self.sent_bytes = 0
        self.received_bytes = 0
        self._handle = handle

    def submit(self, request: Request, timeout: timedelta, into: Sequence[Floats] = ()) -> _Done:
        """Handle the request at once; nothing here can take longer than the shard's own work."""
        self.sent_bytes += bulk_bytes(request)
        try:
            reply = self._handle(request)
        except EmbershardError as error:
            return _Done(error)
        self.received_bytes += bulk_bytes(reply)
        return _Done(reply)

    def close(self) -> None:
        """Nothing is under way."""
