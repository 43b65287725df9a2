"""A shard in the worker's own process: for tests, notebooks and models that fit one machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from embershard.proto.arrays import Array
from embershard.proto.errors import ClockAhead, EmbershardError
from embershard.proto.messages import Reply, Request, bulk_bytes
from embershard.proto.transport.transport import Deadline

_POLL_SECONDS = 0.05  # leases end by the time, of which nobody tells


class LocalTransport:
    """Calls `handle` in the caller's thread; `handle` must bear the threads that its callers use.

    `moved` is notified when a request that was refused with ClockAhead may be answered; `handle` runs within it.
    """

    def __init__(
        self, handle: Callable[[Request], Reply], address: str, moved: threading.Condition | None = None
    ) -> None:
        self.address = address
        self.sent_bytes = 0
        self.received_bytes = 0
        self._handle = handle
        self._moved = moved or threading.Condition()

    def submit(self, request: Request, timeout: timedelta, into: Sequence[Array] = ()) -> _Answer:
        """Handle the request at once, if it need not wait for other workers."""
        self.sent_bytes += bulk_bytes(request)
        return _Answer(self, request, Deadline(timeout))

    def close(self) -> None:
        """Nothing is under way."""

    def _try(self, request: Request) -> Reply | EmbershardError:
        try:
            reply = self._handle(request)
        except EmbershardError as error:
            return error
        self.received_bytes += bulk_bytes(reply)
        return reply


class _Answer:
    """A reply, or the error in its place."""

    def __init__(self, transport: LocalTransport, request: Request, deadline: Deadline) -> None:
        self._transport, self._request, self._deadline = transport, request, deadline
        self._sent_bytes = bulk_bytes(request)
        self._outcome = transport._try(request)

    @property
    def num_bytes(self) -> int:
        """See Pending."""
        return self._sent_bytes + (0 if isinstance(self._outcome, EmbershardError) else bulk_bytes(self._outcome))

    def result(self) -> Reply:
        if isinstance(self._outcome, ClockAhead):
            self._wait()
        if isinstance(self._outcome, EmbershardError):
            raise self._outcome
        return self._outcome

    def _wait(self) -> None:
        moved = self._transport._moved
        with moved:  # so that no move is missed between a try and the wait
            while isinstance(self._outcome, ClockAhead) and self._deadline.seconds > 0:
                self._outcome = self._transport._try(self._request)
                if isinstance(self._outcome, ClockAhead):
                    moved.wait(max(0.0, min(_POLL_SECONDS, self._deadline.seconds)))
