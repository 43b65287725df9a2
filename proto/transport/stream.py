"""A shard behind the `stream` transport: frames over TCP or a Unix socket (docs/wire.md).

A thread that has a request sends it itself, and reads what arrives while it waits for its reply; otherwise one I/O
thread moves the bytes of all shards, on a uvloop, and always where TLS or an emulated link is between. Replies are
received straight into the arrays that the caller named, requests leave from the memory of their arrays.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, cast

import numpy as np

from embershard.proto.arrays import Array
from embershard.proto.errors import (
    EmbershardError,
)
from embershard.proto.messages import Request, arrays
from embershard.proto.protobuf import head_bytes
from embershard.proto.security.client_token import ClientToken
from embershard.proto.timing import span
from embershard.proto.transport.announcements import current_address, folder_of
from embershard.proto.transport.emulated_link import EmulatedLink
from embershard.proto.transport.io_thread import connect_beside, io_loop, io_poller, runs_here
from embershard.proto.transport.stream_connection import StreamCall, StreamConnection
from embershard.proto.transport.transport import TransportClosed, Unreachable
from embershard.proto.wire import (
    Feature,
)

if TYPE_CHECKING:
    from embershard.proto.transport.client_tls import ClientTLS

_RELEASE_SECONDS = 0.1  # between two looks whether a connection that nobody has is idle
CONNECT_SECONDS = 5.0  # for a connection and its hello; a call waits no longer than its own deadline


class StreamTransport:
    """One connection to `address`, made at the first call and again when it must.

    "host:port" is a Unix socket where the shard runs on this machine, else TCP; "tcp://host:port" is always TCP, and
    "unix:/path" is a socket of the user's choice; "file:DIR#2" is where shard 2 is announced in a folder, looked up at
    each connection. `checksum` has the arrays checked too, for a network that is not
    trusted to do it. `link` is the emulated one that it shares with the worker's other transports. With `tls`, nothing
    is sent over TCP that is not encrypted, to nobody but a shard whose certificate is trusted. `token` says what to
    show to shards that ask who it is.
    """

    def __init__(
        self,
        address: str,
        *,
        checksum: bool = False,
        link: EmulatedLink | None = None,
        tls: ClientTLS | None = None,
        token: ClientToken | None = None,
    ) -> None:
        self.address = address
        self.link = link
        self.tls = tls
        self.token = token or ClientToken()
        self.sent_bytes = 0
        self.received_bytes = 0
        self._features = Feature.CHECKSUM if checksum else Feature(0)
        self._loop = io_loop()
        # TLS and the emulated link are the loop's: only its thread may touch their connections
        self.poller = io_poller() if tls is None and link is None else None
        self.lock = threading.RLock()  # of all that follows, and of the connection
        self._unstarted: deque[StreamCall] = deque()  # calls that the loop has still to start
        self._connection: StreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._waiting: list[StreamCall] = []
        self._numbers = count(1)
        self.closed = False

    def submit(self, request: Request, timeout: timedelta, into: Sequence[Array] = ()) -> StreamCall:
        """Send a request without waiting for its reply; the rows of a pull are received into `into`, if given.

        The arrays of both must stay as they are until the reply, or the error in its place, is there.
        """
        if self.closed:
            raise TransportClosed
        if not runs_here(self._loop):
            # the parent's tokens too: pushes of both would be taken for retries of one another
            raise RuntimeError(f"the connection to {self.address} is that of the process that forked; make one here")
        with span("encode"):
            bulk = [cast(Array, np.ascontiguousarray(array)) for array in arrays(request)]
            call = StreamCall(self, type(request), head_bytes(request), bulk, into, timeout.total_seconds())
        with self.lock:
            if self._connection is not None and self._connection.is_shared and not self._unstarted:
                self._send(self._connection, call)
                return call
            self._unstarted.append(call)
        self._loop.call_soon_threadsafe(self._start)
        return call

    def close(self) -> None:
        """Cancel the calls in flight and close the connection."""
        self.closed = True
        self._loop.call_soon_threadsafe(self._close)

    def release(self) -> None:
        """Close the connection as soon as no call is under way: nobody has this transport any more.

        Without it the connection stays, which the loop knows, and which knows this transport.
        """
        if runs_here(self._loop) and not self.closed:
            with suppress(RuntimeError):  # the loop has ended, at the interpreter's end
                self._loop.call_soon_threadsafe(self._release)

    def _release(self) -> None:
        with self.lock:
            calls = self._unstarted or self._waiting or (self._connection is not None and not self._connection.is_idle)
        if calls:
            self._loop.call_later(_RELEASE_SECONDS, self._release)
        else:
            self.close()

    def _close(self) -> None:
        with self.lock:
            if self._connecting is not None:
                self._connecting.cancel()
            if self._connection is not None:
                self._connection.drop(str(TransportClosed()))
            self._fail_waiting(TransportClosed())

    def _start(self) -> None:
        with self.lock:
            while self._unstarted:
                call = self._unstarted.popleft()
                if self.closed:
                    call.fail(TransportClosed())
                elif self._connection is not None:
                    self._send(self._connection, call)
                elif not call.is_done():  # its deadline may have passed
                    self._waiting.append(call)
                    if self._connecting is None:
                        self._connecting = self._loop.create_task(self._connect())

    def _send(self, connection: StreamConnection, call: StreamCall) -> None:
        call.number = next(self._numbers) & 0xFFFFFFFF or next(self._numbers) & 0xFFFFFFFF
        if not call.is_done():
            connection.send(call)

    def expire(self, call: StreamCall) -> None:
        """End a call whose deadline has passed, as soon as nothing is received into its arrays or sent from them."""
        with self.lock:
            if self._connection is None or self._connection.is_shared:
                self._expire(call)
                return
        self._loop.call_soon_threadsafe(self._expire, call)

    def _expire(self, call: StreamCall) -> None:
        with self.lock:
            if call in self._waiting:
                self._waiting.remove(call)
            elif self._connection is not None and not self._connection.expire(call):
                return
            call.fail(Unreachable("no answer"))

    async def _connect(self) -> None:
        error: Exception
        try:
            connection = await self._greeted()
        except TimeoutError:
            error = Unreachable("it takes connections and says nothing, or does not answer at all")
        except EmbershardError as known:
            error = known
        except Unreachable as unreachable:
            error = unreachable
        except (OSError, ValueError) as failure:  # a name that cannot be one is a UnicodeError
            error = Unreachable(getattr(failure, "strerror", None) or str(failure))
        else:
            with self.lock:
                self._connecting = None
                if self.poller is not None:
                    connection.share(self.poller)
                self._connection = connection
                waiting, self._waiting = self._waiting, []
                for call in waiting:
                    self._send(connection, call)
            return
        with self.lock:
            self._connecting = None
            self._fail_waiting(error)

    def _fail_waiting(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call.fail(error)

    async def _greeted(self) -> StreamConnection:
        """A connection whose hello was answered."""
        async with asyncio.timeout(CONNECT_SECONDS):
            connection = await self._open()
            try:
                await connection.ready
            except BaseException:
                connection.drop("no hello")
                raise
        if connection.uses_tls:
            assert self.tls is not None
            async with asyncio.timeout(CONNECT_SECONDS):
                await connection.start_tls(self.tls)
        if connection.lost is not None:  # it said hello and left
            raise connection.refused or connection.lost
        return connection

    async def _open(self) -> StreamConnection:
        protocol = lambda: StreamConnection(self)  # noqa: E731
        address = self.address
        if folder_of(address) is not None:  # in a thread: the folder may be on a slow network
            address = await asyncio.to_thread(current_address, address)
            if self.tls is not None and address.startswith("unix:"):
                raise Unreachable(f"it is announced at a Unix socket ({address}), which shows no certificate")
        if address.startswith("unix:"):
            _, connection = await self._loop.create_unix_connection(protocol, address.removeprefix("unix:"))
            return connection
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        host = host.strip("[]")
        # an emulated network has TCP's buffers: a Unix socket's hold less than the millisecond or two that a busy shard
        # takes to fill them again, and at 1 Gbit/s a tenth of the bandwidth was lost
        tcp = address.startswith("tcp://") or self.link is not None
        beside = None if tcp else await connect_beside(host, int(port))
        if beside is not None:
            _, connection = await self._loop.create_unix_connection(protocol, sock=beside)
        else:
            _, connection = await self._loop.create_connection(protocol, host, int(port))
        return connection

    def lost(self, connection: StreamConnection) -> None:
        """A connection has ended; the next call makes another."""
        if self._connection is connection:
            self._connection = None
