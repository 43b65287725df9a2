"""One connection of the `stream` transport to a shard: requests out, replies in."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import sys
import termios
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, cast

from embershard.proto.arrays import MAX_MESSAGE_BYTES, Array
from embershard.proto.errors import (
    BadToken,
    EmbershardError,
    NotAllowed,
    NotAShard,
    Status,
    TLSNotOffered,
    WrongVersion,
    from_wire,
)
from embershard.proto.messages import ERROR_KIND, KIND_OF, METHODS
from embershard.proto.protobuf import read
from embershard.proto.security.tokens import pack_token
from embershard.proto.shared_memory import Process, SharedHeap, shared_heap
from embershard.proto.timing import span
from embershard.proto.transport.io_thread import peer_credentials
from embershard.proto.transport.shared_socket import Poller, SharedSocket, SocketProtocol
from embershard.proto.transport.transport import TransportClosed, Unreachable, end_unanswered, keep_alive
from embershard.proto.wire import (
    HELLO_BYTES,
    IN_FRAME,
    Feature,
    Frame,
    FrameReader,
    Header,
    client_hello,
    encode,
    frame_bytes,
    read_server_hello,
)

if TYPE_CHECKING:
    from embershard.proto.transport.client_tls import ClientTLS
    from embershard.proto.transport.stream import StreamCall, StreamTransport

# A push of some MiB passes a Unix socket without waiting for its reader at each 200 KiB, where net.core.wmem_max allows
# so much: there the sender's buffer counts alone. A shard's replies keep the system's default: with this size they took
# as much CPU time, those of 2 MiB 1.15 to 1.7 times as much. TCP's buffers grow by themselves.
_SEND_BYTES = 4 * 2**20


class StreamConnection(SocketProtocol):
    """One connection, from its hello to its end.

    All of it happens with the owner's lock held; once it is shared by any thread, else by the I/O thread alone.
    """

    def __init__(self, owner: StreamTransport) -> None:
        self._owner, self._link = owner, owner.link
        self._features = owner._features
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # once its hello was answered
        self.uses_tls = False
        self._hello = memoryview(bytearray(HELLO_BYTES))
        self._filled = 0
        self._reader: FrameReader | None = None
        self._checksum = False
        self._heap: SharedHeap | None = None  # what both sides of this connection share
        self._process: Process | None = None  # the shard's, where the system tells
        self._late: dict[int, list[Array]] = {}  # call -> what it has in shared memory, though nobody waits for it
        self._calls: dict[int, StreamCall] = {}
        self._arriving: Sequence[memoryview] | None = None  # what is being received into, if it is a call's
        self._sent = 0  # bytes, those that asyncio still holds included
        self._answered = 0  # of these, up to the end of the last request that was answered
        self._heard = 0.0
        self.lost: Unreachable | EmbershardError | None = None  # why it ended
        self.refused: EmbershardError | None = None  # why the shard ended it
        self._reason = "the connection broke"
        self._transport: asyncio.Transport
        self._shared: SharedSocket | None = None  # what sends and receives in its place
        self._outer: asyncio.Transport | None = None  # below TLS
        self._socket: socket.socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say hello to the shard."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop has classes of its own
        sock = self._socket = transport.get_extra_info("socket")
        if sock.family == socket.AF_UNIX:
            with suppress(OSError):  # either side has ended it already, as a shard does that serves somebody else
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
                self._heap = self._heap_for(sock)
        else:
            self.uses_tls = self._owner.tls is not None
            keep_alive(sock)
            end_unanswered(sock)
        if self._link is not None:
            self._link.join(self._transport)
        if sock.family != socket.AF_UNIX or self._owner.token.at_unix_sockets:
            self._features |= Feature.TOKEN
        if self._heap is None:
            self._transport.write(client_hello(Feature.TLS if self.uses_tls else self._features))
        else:
            self._give(self._heap)

    def _heap_for(self, sock: socket.socket) -> SharedHeap | None:
        """Return what to share with a shard: nothing with one of another user, or over an emulated link."""
        number, uid = peer_credentials(sock)
        if self._link is not None or uid not in (0, os.getuid()):
            return None
        with suppress(OSError, AttributeError):
            self._process = Process(number)
        return shared_heap()

    def _give(self, heap: SharedHeap) -> None:
        """Say hello, and give the shard our shared memory with it: asyncio cannot send a descriptor."""
        self._features |= Feature.SHARED_MEMORY
        try:
            with socket.socket(fileno=os.dup(self._socket.fileno())) as sock:
                socket.send_fds(sock, [client_hello(self._features)], [heap.file])  # 16 bytes have room
        except OSError as error:
            self._reason += f" ({error.strerror or error})"
            self._transport.abort()

    async def start_tls(self, tls: ClientTLS) -> None:
        """Begin TLS on this connection; the hello inside it is the one that counts.

        An error that says so where a side does not trust the other; Unreachable where the connection just ends.
        """
        outer = self._outer = self._transport
        if self._link is not None:
            self._link.leave(outer)
        self.ready, self._filled, self._reader = asyncio.get_running_loop().create_future(), 0, None
        try:
            self._transport = await tls.handshake(outer, self)
            if self._link is not None:
                self._link.join(self._transport)
            self._transport.write(client_hello(self._features))
            await self.ready
        except BaseException:
            self._owner.lost(self)
            self.drop("no hello")
            outer.abort()
            raise

    @property
    def is_shared(self) -> bool:
        """Whether any thread may send and receive, not the loop's alone."""
        return self._shared is not None

    @property
    def was_answered(self) -> bool:
        """Whether a request was: whoever made it knows whose shard this is."""
        return self._answered > 0

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way."""
        return not self._calls

    def share(self, poller: Poller) -> None:
        """From here on, have the threads that send and wait move the bytes."""
        if self.lost is None:
            self._shared = SharedSocket(self._transport, self, self._owner.lock, poller)

    def ended(self, reason: str) -> None:
        """Learn that nothing more is sent or received: the next call makes another connection."""
        self._reason += f" ({reason})" * bool(reason)
        self._owner.lost(self)

    def connection_lost(self, error: Exception | None) -> None:
        """End the calls under way with the reason why the connection ended."""
        with self._owner.lock:
            self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        if self._shared is not None:
            self._shared.abort()
        self._owner.lost(self)
        if self._link is not None:
            self._link.leave(self._transport)
        reason = self.lost or Unreachable(f"{self._reason} ({error})" if error else self._reason)
        if not self.ready.done() and self._outer is not None and error is not None and self._owner.tls is not None:
            # where it does not like our certificate it says so after its own handshake, when ours has ended well
            reason = self._owner.tls.explain(error) or reason
        if self._owner.closed:
            reason = TransportClosed()
        self.lost = reason
        if not self.ready.done():
            self.ready.set_exception(reason)
            self.ready.exception()  # retrieved: nobody waits for it during a TLS handshake, which has its own error
        for call in self._calls.values():
            self._late[call.number] = call.in_memory
            call.fail(self.refused or reason)
        if self._heap is not None:
            self._heap.abandon(chain.from_iterable(self._late.values()), self._process)
        self._calls.clear()
        self._late.clear()
        self._shared = self._reader = None  # each holds this connection: without a collection all three would stay

    def eof_received(self) -> None:
        """End the connection: the shard sends nothing more."""
        self._transport.abort()  # what is still to be sent would have no reply

    def drop(self, reason: str) -> None:
        """End the connection and what is under way on it."""
        self._reason = reason
        if self._link is not None:
            self._link.leave(self._transport)
        (self._shared or self._transport).abort()

    def send(self, call: StreamCall) -> None:
        """Write a call's request to the connection."""
        kind, timeout_ms = KIND_OF[call.request], min(max(1, int(call.seconds * 1000)), 2**32 - 1)
        try:
            with span("send"):
                bulk, offsets = (call.bulk, None) if self._heap is None else call.lay_out(self._heap)
                buffers = [array.data for array in bulk]
                pieces = encode(
                    kind, call.number, timeout_ms, call.head, buffers, checksum=self._checksum, offsets=offsets
                )
                self._calls[call.number] = call
                call.gone = self._sent if self._answered == self._sent else self._gone()
                call.sent_bytes = frame_bytes(len(call.head), [array.nbytes for array in call.bulk])
                self._owner.sent_bytes += call.sent_bytes
                self._sent += sum(map(len, pieces))
                call.end = self._sent
                if self._link is None:
                    (self._shared or self._transport).writelines(pieces)
                else:
                    self._link.send(self._transport, pieces)
        except EmbershardError as error:
            call.fail(error)

    def expire(self, call: StreamCall) -> bool:
        """A call's deadline has passed: once it ends, nothing may be received into its arrays or sent from them.

        False where the connection has to end with it; the call then fails when nothing moves any more.
        """
        if self._calls.get(call.number) is not call:
            return True
        if self._arriving is not None and self._arriving is call.places:
            self.drop("no answer: its deadline passed while it arrived")
        elif self._heard < call.started and not call.gone < self._gone() < call.end:
            self.drop("no answer")  # nor does it wait behind bytes that move: the next call tries another connection
        elif call.end > self._left() and any(part.nbytes for part in call.bulk):  # a head is in memory of its own
            self.drop("no answer: its deadline passed while it was sent")
        else:
            del self._calls[call.number]
            if call.in_memory:
                self._late[call.number] = call.in_memory
            return True
        return False

    def _left(self) -> int:
        """Bytes that have left this process."""
        waiting = 0 if self._link is None else self._link.unsent(self._transport)
        if self._outer is not None:
            waiting += self._outer.get_write_buffer_size()
        return self._sent - (self._shared or self._transport).get_write_buffer_size() - waiting

    def _gone(self) -> int:
        """Bytes that the other side's system has received, as far as this one says."""
        queued = bytes(4)
        with suppress(OSError):
            queued = fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, queued)
        return self._left() - int.from_bytes(queued, sys.byteorder)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next bytes: of a large reply, the caller's own arrays."""
        buffer = self._hello[self._filled :] if self._reader is None else self._reader.buffer()
        return buffer if self._link is None else buffer[: self._link.chunk_bytes]

    def buffer_updated(self, num_bytes: int) -> None:
        """Read what so many new bytes complete, and end the calls whose replies they are."""
        self._heard = time.monotonic()
        self._owner.received_bytes += num_bytes
        if self._link is not None:
            self._link.received(num_bytes)
        try:
            if self._reader is None:
                self._greet(num_bytes)
                return
            with span("receive"):
                frames = self._reader.received(num_bytes)
            for frame in frames:
                self._finish(frame)
        except EmbershardError as error:
            self.drop(str(error))

    def _greet(self, num_bytes: int) -> None:
        self._filled += num_bytes
        if self._filled < HELLO_BYTES:
            return
        is_outer = self.uses_tls and self._outer is None  # of it nothing counts but that TLS follows
        try:
            agreed = read_server_hello(bytes(self._hello))
            if is_outer and Feature.TLS not in agreed.features:
                raise TLSNotOffered(address=self._owner.address, reason="it was started without certificates")
        except EmbershardError as error:
            if not isinstance(error, WrongVersion | TLSNotOffered):
                error = NotAShard(address=self._owner.address, reason=str(error))
            if not self.ready.done():
                self.ready.set_exception(error)
            self._transport.abort()
            return
        if Feature.TOKEN in agreed.features and not is_outer:
            try:
                self._transport.write(pack_token(self._token()))
            except BadToken as error:
                self.ready.set_exception(error)
                self._transport.abort()
                return
        self._checksum = Feature.CHECKSUM in agreed.features
        if Feature.SHARED_MEMORY not in agreed.features:
            self._heap = None
        has_memory = self._heap is not None
        self._reader = FrameReader(MAX_MESSAGE_BYTES, self._place, checksum=self._checksum, has_memory=has_memory)
        if not self.ready.done():
            self.ready.set_result(None)

    def _token(self) -> str | None:
        """The token to present; looked up only once the shard has answered, as it writes its own before that."""
        if self.uses_tls:  # a shard with certificates has written none
            return self._owner.token.find("", 0)
        peer = self._transport.get_extra_info("peername")
        ip, port = peer[:2] if isinstance(peer, tuple) else ("", 0)
        return self._owner.token.find(ip, port)

    def _place(self, header: Header) -> Sequence[memoryview] | None:
        """Where the arrays of a reply go: to the caller's own, if they fit."""
        call = self._calls.get(header.call)
        if call is None or call.places is not None:
            self._late.pop(header.call, None)
            return None  # nobody waits for it any more, or it has its reply
        if header.uses_memory:
            self._check_places(call, header)
        call.places = call.place(header.lengths)
        self._arriving = call.places
        return call.places

    def _check_places(self, call: StreamCall, header: Header) -> None:
        """NotAShard where a reply lies elsewhere in shared memory than where it may."""
        sizes = [array.nbytes for array in call.into]
        for number, (offset, nbytes) in enumerate(zip(header.offsets, header.lengths, strict=True)):
            if offset == IN_FRAME:
                continue
            if number >= len(call.into_offsets) or (call.into_offsets[number], sizes[number]) != (offset, nbytes):
                raise NotAShard(address=self._owner.address, reason="its reply lies outside the memory given for it")

    def _finish(self, frame: Frame) -> None:
        header, buffers = frame
        if self._arriving is buffers:  # and not those of a frame behind it, of which a part is here already
            self._arriving = None
        if header.call == 0 and header.kind == ERROR_KIND:
            error = from_wire(header.head, "")
            if isinstance(error, NotAllowed) or error.status is Status.UNAUTHENTICATED:  # nor will it be another time
                self.refused = error
                self._owner.lost(self)
            self.drop(str(error))
            return
        call = self._calls.get(header.call)
        if call is None:
            self._late.pop(header.call, None)
            return
        if self._arriving is not None and self._arriving is call.places:
            # the second arrives in the caller's arrays
            raise NotAShard(address=self._owner.address, reason="it sent two replies to one call")
        del self._calls[header.call]
        call.in_memory = []
        call.received_bytes = header.num_bytes
        self._owner.received_bytes += sum(header.lengths) - header.bulk_bytes
        self._answered = max(self._answered, call.end)
        reply = METHODS[call.request][1]
        if header.kind == ERROR_KIND:
            call.fail(from_wire(header.head, ""))
        elif header.kind != KIND_OF[reply]:
            call.fail(NotAShard(address=self._owner.address, reason=f"its reply is of kind {header.kind}"))
        else:
            try:
                message = read(reply, header.head, buffers)
            except EmbershardError as error:
                call.fail(NotAShard(address=self._owner.address, reason=str(error)))
                return
            call.finish(message)
