"""The `stream` transport's side of a shard: frames in, frames out, over TCP and Unix sockets (docs/wire.md).

Whatever does not begin as a frame stream is piped to the shard's gRPC server, so that one address serves both.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.errors import ShardBusy
from embershard.proto.wire import Feature
from embershard.ps.dispatch import Dispatch
from embershard.ps.monitoring.log_lines import LinesPerMinute
from embershard.ps.transport.pipe import PipedServer
from embershard.ps.transport.shared_memory import SharedMemories
from embershard.ps.transport.stream_connection import Connection

if TYPE_CHECKING:
    from embershard.ps.transport.tls import TLSPort

STALL_SECONDS = 30.0  # see STALL_RATE
PRESSED_SECONDS = 2.0  # in place of STALL_SECONDS, for as long as others are turned away for the memory
SWEEP_SECONDS = 1.0
MAX_CONNECTIONS = 10_000  # several of each of a thousand workers
FREE_FILES = 32  # that connections leave to the log, snapshots and compilers
ALL_UNSENT_BYTES = 8 * MAX_MESSAGE_BYTES  # of rows that wait to be read
_RETRY_MS = 100

_log = logging.getLogger(__name__)


class StreamServer:
    """The connections of one shard. All of it runs on the event loop, but for what Dispatch runs elsewhere.

    `foreign` is where connections go that speak something else; without it they are closed. With `tls`, those over TCP
    have to use it, and `foreign` is for Unix sockets alone. At Unix sockets nobody but this process's user and root is
    answered.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        foreign: PipedServer | None = None,
        *,
        tls: TLSPort | None = None,
        limit: int = MAX_MESSAGE_BYTES,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.dispatch = dispatch
        self.foreign = foreign
        self.tls = tls
        self.limit = limit
        self.features = Feature.CHECKSUM if dispatch.access is None else Feature.CHECKSUM | Feature.TOKEN
        self.loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self.counters, self.rejected = dispatch.counters.transports["stream"], dispatch.counters.rejected
        self.passed_on = dispatch.counters.transports["grpc"]  # whose connections come through here
        self.connections: set[Connection] = set()
        self.max_connections, self.open_connections = max_connections, 0  # those passed on included
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # the system gives the lowest free number: at this one no other is free below it
        self.last_file = sys.maxsize if files == resource.RLIM_INFINITY else files - FREE_FILES
        with socket.socket() as probe:
            self.first_file = probe.fileno()  # so many are open already
        self.memories = SharedMemories(self.counters, dispatch.budget_bytes)
        self.receiving_bytes = 0
        self.made_bytes = 0  # replies with rows, or with payloads of a rendezvous; counted by the apply thread
        self._sent_bytes = 0  # of these, what was given to transports
        self._unsent_bytes = 0  # what these hold of it, or more
        self.dropped_lines = LinesPerMinute(_log, "%d more connections were refused or dropped in an earlier minute")
        self._pressed = False  # whether somebody was turned away since the last sweep
        self._sweeper = self.loop.call_later(SWEEP_SECONDS, self._sweep)
        dispatch.set_activity_probe(self._last_seen)

    def protocol(self) -> Connection:
        """A new connection's protocol, as loop.create_server wants it."""
        return Connection(self)

    def may_pass_on(self) -> bool:
        """Whether there are two files for a connection more that is passed on, beside its own."""
        return self.first_file + self.open_connections + 2 * (self.passed_on.connections + 1) <= self.last_file

    def call(self, function: Callable[..., None], *args: object) -> None:
        """Call a function on the event loop: now, if this is its thread, else soon; not at all once it has ended."""
        if threading.get_ident() == self._thread:
            function(*args)
            return
        with suppress(RuntimeError):  # the loop has ended, and the connections with it
            self.loop.call_soon_threadsafe(function, *args)

    def turn_away(self, held_bytes: int, reason: str) -> ShardBusy:
        """The error of a request for which there is no memory now; each `reason` is counted by a thread of its own."""
        self._pressed = True
        self.rejected[reason] += 1
        return ShardBusy(queued_bytes=held_bytes, retry_after_ms=_RETRY_MS)

    def check_room(self, full: bool) -> None:
        """ShardBusy where too many rows wait to be read, by this peer (`full`) or by all; on the apply thread."""
        held = self._unsent_bytes + self.made_bytes - self._sent_bytes
        if full or held > ALL_UNSENT_BYTES:
            raise self.turn_away(held, "unsent")

    def sent(self, num_bytes: int) -> None:
        """A reply with rows was given to a transport."""
        self._sent_bytes += num_bytes
        self._unsent_bytes += num_bytes
        if self._unsent_bytes > ALL_UNSENT_BYTES // 2:  # before it matters what was read since
            self._unsent_bytes = sum(connection.unsent_bytes for connection in self.connections)

    async def close(self, grace: float) -> None:
        """Send what waits to be read, for at most `grace` seconds, and end all connections."""
        self._sweeper.cancel()
        end = time.monotonic() + grace
        while any(c.unsent_bytes for c in self.connections) and time.monotonic() < end:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.drop("")

    def check_certificates(self) -> None:
        """Drop the peers whose certificates were revoked since they came."""
        for connection in list(self.connections):
            connection.check_certificate()

    def _last_seen(self, worker: int, epoch: int) -> float:
        """When bytes of a worker's incarnation arrived last; on the apply thread."""
        times = (c.last_seen for c in tuple(self.connections) if c.sender == (worker, epoch))
        return max(times, default=-math.inf)

    def _sweep(self) -> None:
        now = time.monotonic()
        wait_timeout, self._pressed = PRESSED_SECONDS if self._pressed else STALL_SECONDS, False
        for connection in list(self.connections):
            connection.check(now, wait_timeout)
        self._unsent_bytes = sum(connection.unsent_bytes for connection in self.connections)
        self._sweeper = self.loop.call_later(SWEEP_SECONDS, self._sweep)
