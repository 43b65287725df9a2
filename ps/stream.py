"""The `stream` carrier's side of a shard: frames in, frames out, over TCP and Unix sockets (docs/wire.md).

Whatever does not begin as a frame stream is piped to the shard's gRPC server, so that one address serves both.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import cast

import numpy as np

from embershard.proto.errors import EmbershardError, InternalError, InvalidRequest, ShardBusy, to_wire
from embershard.proto.messages import (
    ERROR_KIND,
    KIND_OF,
    MAX_MESSAGE_BYTES,
    REQUEST_KINDS,
    Reply,
    arrays,
)
from embershard.proto.protobuf import head_bytes, read
from embershard.proto.wire import HELLO_BYTES, MAGIC, Feature, Frame, Header, Reader, encode, server_hello
from embershard.ps.dispatch import Dispatch
from embershard.ps.pipe import pipe_to

HELLO_SECONDS = 10.0  # to say what is spoken
STALL_SECONDS = 30.0  # without a byte, within a frame or of a reply that waits to be read
SWEEP_SECONDS = 1.0
# Frames that are arriving, over all connections: eight of the largest; more is told to come back later.
RECEIVING_BYTES = 8 * MAX_MESSAGE_BYTES
# Replies that wait for a slow reader before its requests are left unread.
UNSENT_BYTES = MAX_MESSAGE_BYTES
_RETRY_MS = 100

_log = logging.getLogger(__name__)
Pieces = list[bytes | memoryview]


class StreamServer:
    """The connections of one shard. All of it runs on the event loop, but for what Dispatch runs elsewhere.

    `foreign`, a Unix socket's path, is where connections go that speak something else; without it they are closed.
    """

    def __init__(self, dispatch: Dispatch, foreign: str = "", *, limit: int = MAX_MESSAGE_BYTES) -> None:
        self.dispatch = dispatch
        self.foreign = foreign
        self.limit = limit
        self.loop = asyncio.get_running_loop()
        self.connections: set[Connection] = set()
        self.receiving_bytes = 0
        self._sweeper = self.loop.call_later(SWEEP_SECONDS, self._sweep)

    def protocol(self) -> Connection:
        """A new connection's protocol, as loop.create_server wants it."""
        return Connection(self)

    async def close(self, grace: float) -> None:
        """Send what waits to be read, for at most `grace` seconds, and end all connections."""
        self._sweeper.cancel()
        end = time.monotonic() + grace
        while any(c.unsent_bytes for c in self.connections) and time.monotonic() < end:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.drop("")

    def _sweep(self) -> None:
        now = time.monotonic()
        for connection in list(self.connections):
            connection.check(now)
        self._sweeper = self.loop.call_later(SWEEP_SECONDS, self._sweep)


class Connection(asyncio.BufferedProtocol):
    """One peer."""

    def __init__(self, server: StreamServer) -> None:
        self._server = server
        self._hello = memoryview(bytearray(HELLO_BYTES))
        self._filled = 0  # bytes of the hello
        self._reader: Reader | None = None
        self._checksum = False
        self._receiving = 0  # bytes of the frame that is arriving
        self._since = time.monotonic()  # when the peer was last seen to move
        self._unsent = 0  # at the last check
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A peer has come."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop has classes of its own
        self._transport.set_write_buffer_limits(high=UNSENT_BYTES)
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        """The peer has gone; what it asked for is still done, for a push may not be lost half-way."""
        self._server.connections.discard(self)
        self._received_all()

    @property
    def unsent_bytes(self) -> int:
        """Bytes of replies that the peer has not read."""
        return self._transport.get_write_buffer_size()

    def pause_writing(self) -> None:
        """A peer that does not read its replies gets no more of them."""
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """It read them."""
        self._transport.resume_reading()

    def check(self, now: float) -> None:
        """Drop a peer that is silent where it must not be."""
        unsent = self.unsent_bytes
        if self._reader is not None and not unsent and not self._reader.in_frame:
            return  # between calls it may be silent
        if unsent != self._unsent:
            self._since, self._unsent = now, unsent
        if self._reader is None and now - self._since > HELLO_SECONDS:
            self.drop(f"it said nothing for {HELLO_SECONDS:.0f} s")
        elif now - self._since > STALL_SECONDS:
            self.drop(f"it stood still for {STALL_SECONDS:.0f} s, with {unsent} bytes of replies unread")

    def drop(self, reason: str) -> None:
        """End the connection."""
        if reason:
            _log.warning("dropping the connection of %s: %s", self._transport.get_extra_info("peername"), reason)
        self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: for a large frame, the array that the tables read them from."""
        return self._hello[self._filled :] if self._reader is None else self._reader.buffer()

    def buffer_updated(self, num_bytes: int) -> None:
        """So many bytes have come to where `get_buffer` said."""
        self._since = time.monotonic()
        if self._reader is None:
            self._greet(num_bytes)
            return
        try:
            for frame in self._reader.received(num_bytes):
                self._answer(frame)
        except EmbershardError as error:
            self._fail(error)

    def _greet(self, num_bytes: int) -> None:
        self._filled += num_bytes
        hello = bytes(self._hello[: self._filled])
        if hello[: len(MAGIC)] != MAGIC[: self._filled]:
            self._pass_on(hello)
        elif self._filled == HELLO_BYTES:
            answer, agreed = server_hello(hello, Feature.CHECKSUM)
            self._transport.write(answer)
            if agreed is None:
                self._transport.close()
                return
            self._checksum = Feature.CHECKSUM in agreed.features
            self._reader = Reader(self._server.limit, self._place, checksum=self._checksum)

    def _pass_on(self, received: bytes) -> None:
        self._server.connections.discard(self)
        if not self._server.foreign:
            self.drop("it speaks something else than this protocol")
            return
        pipe_to(self._server.foreign, self._transport, received)

    def _place(self, header: Header) -> Sequence[memoryview] | None:
        """Memory for a request's arrays; None, with an error as the reply, for one that cannot be taken now."""
        size = sum(header.lengths)
        server = self._server
        if header.kind not in REQUEST_KINDS:
            self._refuse(header, _unknown(header))
            return None
        if server.receiving_bytes and server.receiving_bytes + size > RECEIVING_BYTES:
            self._refuse(header, ShardBusy(queued_bytes=server.receiving_bytes, retry_after_ms=_RETRY_MS))
            return None
        self._receiving = size
        server.receiving_bytes += size
        return [np.empty(length, np.uint8).data for length in header.lengths]

    def _received_all(self) -> None:
        self._server.receiving_bytes -= self._receiving
        self._receiving = 0

    def _answer(self, frame: Frame) -> None:
        header, buffers = frame
        self._received_all()
        kind = REQUEST_KINDS.get(header.kind)
        if kind is None:
            self._refuse(header, _unknown(header))
            return
        request = kind
        call = header.call

        def write(reply: Reply) -> Pieces:
            bulk = [np.ascontiguousarray(array).data for array in arrays(reply)]
            return encode(KIND_OF[type(reply)], call, 0, head_bytes(reply), bulk, checksum=self._checksum)

        future = self._server.dispatch.submit(
            kind,
            lambda: read(request, header.head, buffers),
            write,
            num_bytes=len(header.head) + sum(header.lengths),
            deadline=time.monotonic() + header.timeout_ms / 1000,
        )
        future.add_done_callback(self._sender(header))

    def _sender(self, header: Header) -> Callable[[Future[Pieces]], None]:
        def send(future: Future[Pieces]) -> None:
            if future.cancelled():
                return  # its deadline passed: nobody waits for it
            error = future.exception()
            pieces = future.result() if error is None else self._error(header, error)
            try:
                self._server.loop.call_soon_threadsafe(self._send, pieces)
            except RuntimeError:
                pass  # the loop has ended, and the connection with it

        return send

    def _send(self, pieces: Pieces) -> None:
        if not self._transport.is_closing():
            self._transport.writelines(pieces)

    def _refuse(self, header: Header, error: EmbershardError) -> None:
        self._send(self._error(header, error))

    def _error(self, header: Header, error: BaseException) -> Pieces:
        if not isinstance(error, EmbershardError):
            error = InternalError(reason=f"{type(error).__name__}: {error}; see the shard's log")
        return encode(ERROR_KIND, header.call, 0, to_wire(error)[1], checksum=self._checksum)

    def _fail(self, error: EmbershardError) -> None:
        """Say what is wrong with the stream, under call 0, and end it: where the next frame starts is unknown."""
        _log.warning("dropping the connection of %s: %s", self._transport.get_extra_info("peername"), error)
        self._send(encode(ERROR_KIND, 0, 0, to_wire(error)[1], checksum=self._checksum))
        self._transport.close()


def _unknown(header: Header) -> InvalidRequest:
    return InvalidRequest(reason=f"no request has kind {header.kind}; this shard knows 1..{len(REQUEST_KINDS)}")
