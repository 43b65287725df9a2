"""Transports: each moves a request to one shard and its reply back.

A transport knows nothing of routing, retries or tokens: it sends one message and waits for one reply. Its
implementations are beside it: `stream`, `grpc`, `rpc` and `local` (docs/transports.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from embershard.proto.arrays import Array
from embershard.proto.messages import Reply, Request


class Unreachable(Exception):
    """No answer came: the shard may or may not have handled the request, so it is sent again, byte for byte."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class TransportClosed(Unreachable):
    """This process closed the transport: nothing is to be sent again."""

    def __init__(self) -> None:
        super().__init__("the connection was closed by this worker")


class PendingReply(Protocol):
    """A reply on its way."""

    @property
    def num_bytes(self) -> int:
        """The bytes that the call has moved until now, both ways."""
        ...

    def result(self) -> Reply:
        """The reply, by the deadline given to `submit`.

        Raises the shard's EmbershardError, NotAShard where something else answers, Unreachable where nothing does, and
        Closed after `close`.
        """
        ...


class Transport(Protocol):
    """A way to one shard; safe for use by several threads."""

    address: str
    sent_bytes: int
    received_bytes: int

    def submit(self, request: Request, timeout: timedelta, into: Sequence[Array] = ()) -> PendingReply:
        """Send a request without waiting for its reply.

        `into` is memory for the rows of a pull, or their payload, an array per table: a transport that can receives
        straight into those that fit, and then these very arrays are the reply's. The request's arrays stay as they are
        until the outcome is there.
        """
        ...

    def close(self) -> None:
        """Cancel the calls in flight."""
        ...
