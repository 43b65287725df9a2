"""Transports: each moves a request to one shard and its reply back.

A transport knows nothing of routing, retries or tokens: it sends one message and waits for one reply. Its
implementations are beside it: `stream`, `grpc`, `rpc` and `local` (docs/transports.md).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

from embershard.proto.arrays import Array
from embershard.proto.messages import Reply, Request

# Of TCP: the system's own defaults are two hours until it asks, and a quarter of one until it ends a connection.
_IDLE_SECONDS, _PAUSE_SECONDS, _PROBES = 10, 5, 3  # also sooner than firewalls forget a connection
_UNANSWERED_SECONDS = 25  # less than half of a call's timeout: a call still has time for another connection


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
        TransportClosed after `close`.
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


def keep_alive(sock: socket.socket) -> None:
    """Have the system ask the other end's system whether it is there while nothing is sent."""
    with suppress(OSError):  # the connection has ended
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("KEEPIDLE", _IDLE_SECONDS), ("KEEPINTVL", _PAUSE_SECONDS), ("KEEPCNT", _PROBES)):
            _set(sock, name, value)


def end_unanswered(sock: socket.socket) -> None:
    """Have the system end the connection once the other end's system has not taken what was sent for 25 s.

    That is also so where the other process is stopped, or reads nothing: what was sent is then sent again, once it is
    there.
    """
    with suppress(OSError):
        _set(sock, "USER_TIMEOUT", 1000 * _UNANSWERED_SECONDS)


def _set(sock: socket.socket, name: str, value: int) -> None:
    option = getattr(socket, f"TCP_{name}", None)  # which only some systems have
    if option is not None:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
