"""A shard's side of one connection of the `stream` transport: frames in, frames out."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, cast

import numpy as np

from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.errors import (
    EmbershardError,
    InternalError,
    InvalidRequest,
    NotAllowed,
    QuotaExceeded,
    ShuttingDown,
    TLSRequired,
    UntrustedCertificate,
    clipped,
    to_wire,
)
from embershard.proto.messages import (
    ERROR_KIND,
    KIND_OF,
    METHODS,
    REQUEST_KINDS,
    Heartbeat,
    Join,
    Pull,
    Push,
    Rendezvous,
    RendezvousResult,
    Reply,
    Request,
    Rows,
    arrays,
)
from embershard.proto.protobuf import head_bytes, read
from embershard.proto.security.tokens import RECORD_BYTES, unpack_token
from embershard.proto.shared_memory import SharedMemory, is_possible
from embershard.proto.transport.transport import keep_alive
from embershard.proto.wire import (
    HELLO_BYTES,
    IN_FRAME,
    MAGIC,
    SCRATCH_BYTES,
    Agreed,
    Feature,
    Frame,
    FrameReader,
    Header,
    encode,
    server_hello,
)
from embershard.ps.monitoring.counters import TransportCounters
from embershard.ps.security.access import Principal
from embershard.ps.security.peers import Peer, peer_of
from embershard.ps.transport.pipe import TLS_RECORD, pipe_to
from embershard.ps.transport.shared_memory import SharedBuffers, place_in, received_file

if TYPE_CHECKING:
    from embershard.ps.transport.stream import StreamServer
    from embershard.ps.transport.tls import Inside, TLSPort

HELLO_SECONDS = 10.0  # to say what is spoken
# A frame that has begun, and a reply that waits to be read, move at this rate, or their connection is dropped after
# STALL_SECONDS: a peer that drips must not hold memory for ever. 2 Mbit/s is less than any link that trains.
STALL_RATE = 2**18  # bytes per second
# Frames that are arriving, over all connections: eight of the largest; more is told to come back later.
RECEIVING_BYTES = 8 * MAX_MESSAGE_BYTES
# Rows that wait to be read, of one peer, before its requests are left unread and no more rows are made for it.
UNSENT_BYTES = MAX_MESSAGE_BYTES
# Frames up to this size may be answered on the event loop, where that is quick and nothing else runs. Larger ones would
# keep other frames from arriving, and larger pulls took a fifth more CPU there: the system maps memory for their rows
# anew. A push has its memory already, and 64 rows of dim 64 are more than a pull may have.
AT_ONCE_BYTES: dict[type[Request], int] = {Pull: 2**14, Push: 2**16}
# Gradients that lie in shared memory do not count with these, up to this size: with a log they are copied, too.
AT_ONCE_SHARED_BYTES = 2**19
# a TLS record with the alert handshake_failure: what a server says that speaks no TLS
_HANDSHAKE_FAILURE = bytes([0x15, 3, 1, 0, 2, 2, 40])
# For so long the frames of one read are answered before other connections have their turn: there may be 4,096.
TURN_SECONDS = 0.002
_NO_FILES = "the shard may open no more files for it; raise the limit (ulimit -n 65536, LimitNOFILE= in systemd)"
_LAST_WORDS_SECONDS = 1.0  # in which a peer that is refused reads why
_REFUSED = memoryview(bytearray(2**16))  # where goes what it sends meanwhile

_log = logging.getLogger(__name__)
Pieces = list[bytes | memoryview]


class _Pace:
    """Whether what a peer has begun goes on."""

    def __init__(self) -> None:
        self._since, self._done = time.monotonic(), 0

    def behind(self, now: float, busy: bool, done_bytes: int) -> float:
        """Seconds for which it has been `busy` and slower than STALL_RATE; `done_bytes` only grow."""
        if not busy or done_bytes - self._done > STALL_RATE * (now - self._since):
            self._since, self._done = now, done_bytes
        return now - self._since


class Connection(asyncio.BufferedProtocol):
    """The shard's side of one connection: reads frames and writes replies."""

    def __init__(self, server: StreamServer) -> None:
        self.sender: tuple[int, int] | None = None  # the worker and its epoch, once a request has said so
        self.last_seen = 0.0  # when bytes arrived last
        self.peer_identity = ""  # whom its certificate names; nobody without TLS
        self._server = server
        self._tls: TLSPort | None = None  # what it still has to go through
        self._inside: Inside | None = None  # once it has
        self._hello = memoryview(bytearray(HELLO_BYTES))
        self._filled = 0  # bytes of the hello
        self._reader: FrameReader | None = None  # once it is known who the peer is
        self._principal: Principal | None = None
        self._agreed: Agreed | None = None  # with a peer that has yet to show its token
        self._checksum = False
        self._receiving = 0  # bytes of frames that are arriving, or came in one read with what is answered
        self._full = False  # whether too much waits to be read
        self._waiting: deque[Frame] = deque()  # frames that came in one read and are not answered yet
        self._refused = False  # it was told why, and nothing that it sends counts any more
        self._gone = False
        self._counted: TransportCounters | None = None  # among whose connections it is
        self._peer = Peer("")
        self._may_give = False  # whether shared memory may come with the first bytes
        self._memory: SharedMemory | None = None  # what a peer has given
        self._began = time.monotonic()
        self._received = self._written = 0  # bytes
        self._made = self._handed = 0  # bytes of replies with rows: by the apply thread, and of these to the transport
        self._receives, self._reads = _Pace(), _Pace()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a connection, or drop it where its peer may not speak here, or there are too many."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop has classes of its own
        sock = transport.get_extra_info("socket")
        self._peer = peer_of(sock)
        if not self._peer.is_admitted:
            self._server.rejected["other_user"] += 1
            self.drop("a shard's Unix sockets are for its own user and root")
            return
        if self._server.open_connections >= self._server.max_connections:
            self._server.rejected["connections"] += 1
            self.drop(f"the shard has {self._server.max_connections} connections already (--connections)")
            return
        if sock.fileno() >= self._server.last_file:
            self._server.rejected["connections"] += 1
            self.drop(_NO_FILES)
            return
        self._server.open_connections += 1
        self._count(self._server.counters)
        self._transport.set_write_buffer_limits(high=UNSENT_BYTES)
        if sock.family != socket.AF_UNIX:
            self._tls = self._server.tls  # a Unix socket's peers are of this machine, and the system says who they are
            keep_alive(sock)  # between calls a peer may be silent
        else:
            self._may_give = is_possible()
        self._server.connections.add(self)

    def _look_for_memory(self) -> None:
        """Map the memory that a peer gives with its first bytes, before asyncio reads these and drops it."""
        self._may_give = False
        file = received_file(self._transport.get_extra_info("socket"))
        if file is not None:
            self._memory = self._server.memories.map(file)

    def connection_lost(self, error: Exception | None) -> None:
        """The peer has gone; what it asked for is still done, for a push may not be lost half-way."""
        self._gone = True
        self._end()
        self._server.connections.discard(self)
        self._received_frame(self._receiving)
        self._waiting.clear()  # not begun, as if it had not arrived
        self._reader = None  # which holds this connection: without a collection both would stay, and 128 KiB

    def _end(self) -> None:
        """Count this connection no longer, and give back what it holds."""
        self._memory = None
        if self._principal is not None:
            self._principal.usage.disconnect()
            self._principal = None
        if self._counted is not None:
            self._count(None)
            self._server.open_connections -= 1

    def _count(self, among: TransportCounters | None) -> None:
        """Count this connection among those of a transport."""
        if self._counted is not None:
            self._counted.connections -= 1
        if among is not None:
            among.connections += 1
        self._counted = among

    @property
    def unsent_bytes(self) -> int:
        """Bytes of replies that the peer has not read."""
        size = self._transport.get_write_buffer_size()
        return size if self._inside is None else size + self._inside.unsent_bytes

    def pause_writing(self) -> None:
        """A peer that does not read its replies gets no more of them."""
        self._full = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Read requests again: the peer has read its replies."""
        self._full = False
        if self._waiting:
            self._server.loop.call_soon(self._take_turn)
        else:
            self._transport.resume_reading()

    def check(self, now: float, wait_timeout: float) -> None:
        """Drop a peer that is silent, or too slow, where it must not be; between calls it may be silent."""
        if self._refused:
            return
        if self._reader is None:
            if now - self._began > HELLO_SECONDS:
                self._server.rejected["hello"] += 1
                self.drop(f"it did not say hello within {HELLO_SECONDS:.0f} s")
            return
        if (principal := self._known_principal()) is not None and principal.revoked:
            self._fail(principal.revocation())
            return
        unsent = self.unsent_bytes
        # what we leave unread is not its fault
        arriving = self._reader.in_frame and not self._full and not self._waiting
        if self._receives.behind(now, arriving, self._received) > wait_timeout:
            self._server.rejected["slow"] += 1
            self.drop(f"its frames come slower than {STALL_RATE >> 10} KiB/s, for {wait_timeout:.0f} s")
        elif self._reads.behind(now, unsent > 0, self._written - unsent) > wait_timeout:
            self._server.rejected["slow"] += 1
            self.drop(f"it has not read {unsent} bytes of replies for {wait_timeout:.0f} s")
        elif self._inside is not None and self._inside.is_over(now, now - self.last_seen if not unsent else 0.0):
            self._transport.close()  # the next one uses the certificates of that day

    def check_certificate(self) -> None:
        """Drop a peer whose certificate was revoked since it came."""
        if self._inside is not None:
            try:
                self._inside.check()
            except EmbershardError as error:
                self._fail(error)

    def drop(self, reason: str) -> None:
        """End the connection and log the reason, as far as there is room in the log."""
        if reason:
            self._log_drop(reason)
        self._transport.abort()

    def _log_drop(self, reason: object) -> None:
        if self._server.dropped_lines.may_log():
            _log.warning("dropping the connection of %s: %s", self._peer.address, reason)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next bytes: for a large frame, the array that the tables read."""
        if self._refused:
            return _REFUSED
        if self._may_give:
            self._look_for_memory()
        return self._hello[self._filled :] if self._reader is None else self._reader.buffer()

    def buffer_updated(self, num_bytes: int) -> None:
        """So many bytes have come to where `get_buffer` said."""
        if self._refused:
            return
        self._received += num_bytes
        self._server.counters.received_bytes += num_bytes
        self.last_seen = time.monotonic()
        if self._reader is None:
            self._greet(num_bytes)
            return
        try:
            frames = self._reader.received(num_bytes)
        except EmbershardError as error:
            self._fail(error)
            return
        if len(frames) == 1 and not self._waiting:  # nearly always
            self._answer(frames[0])
        elif frames:
            is_first = not self._waiting
            self._waiting += frames
            if is_first:
                self._take_turn()

    def _take_turn(self) -> None:
        """Answer frames that came in one read, for TURN_SECONDS and while the peer reads its replies; then others."""
        end = time.monotonic() + TURN_SECONDS
        while self._waiting and not self._full and not self._refused and not self._transport.is_closing():
            self._answer(self._waiting.popleft())
            if self._waiting and time.monotonic() > end:
                self._transport.pause_reading()
                self._server.loop.call_soon(self._take_turn)
                return
        if self._refused or self._transport.is_closing():
            self._waiting.clear()
        elif not self._waiting and not self._full:
            self._transport.resume_reading()

    def _greet(self, num_bytes: int) -> None:
        self._filled += num_bytes
        hello = bytes(self._hello[: self._filled])
        if self._agreed is not None:
            if self._filled == RECORD_BYTES:
                self._admit(self._agreed, unpack_token(hello))
        elif hello[: len(MAGIC)] != MAGIC[: self._filled]:
            self._pass_on(hello)
        elif self._filled == HELLO_BYTES:
            supported = self._server.features if self._tls is None else Feature.TLS
            if self._memory is not None:
                supported |= Feature.SHARED_MEMORY
            answer, agreed = server_hello(hello, supported)
            if agreed is not None and Feature.TLS in agreed.features:
                # before the answer: what comes next is for the handshake, and uvloop loses what comes before it
                self._transport.pause_reading()
            self._transport.write(answer)
            self._server.counters.sent_bytes += len(answer)
            if agreed is None:
                self._transport.close()
            elif Feature.TLS in agreed.features:
                self._begin_tls()
            elif self._tls is not None:
                self._fail(TLSRequired())
            elif Feature.TOKEN in agreed.features:
                self._agreed, self._hello, self._filled = agreed, memoryview(bytearray(RECORD_BYTES)), 0
            else:
                self._admit(agreed, None)

    def _admit(self, agreed: Agreed, token: str | None) -> None:
        """Read the frames of a peer that is known; end the connection of another, with the reason."""
        self._checksum = Feature.CHECKSUM in agreed.features
        has_memory = Feature.SHARED_MEMORY in agreed.features
        if not has_memory:
            self._memory = None
        access = self._server.dispatch.access
        try:
            if self._inside is not None:
                self._inside.check()
            if access is not None:
                principal = access.identify(self._peer, token, [self.peer_identity] if self.peer_identity else ())
                principal.usage.connect()
                self._principal = principal
        except EmbershardError as error:
            self._fail(error)
            return
        self._reader = FrameReader(self._server.limit, self._place, checksum=self._checksum, has_memory=has_memory)

    def _known_principal(self) -> Principal | None:
        """Who the peer is, by access.yaml as it is now."""
        before, access = self._principal, self._server.dispatch.access
        if before is not None and before.revoked and access is not None:
            now = access.known_again(before)
            if now is not before:
                now.usage.connect(is_new=False)
                before.usage.disconnect()
                self._principal = now
        return self._principal

    def _begin_tls(self) -> None:
        assert self._tls is not None
        self._filled = 0  # a second hello comes, and only that one counts
        if self._too_many_handshakes(self._tls):
            return
        self._tls.begin(self._handshake())

    def _too_many_handshakes(self, tls: TLSPort) -> bool:
        """Whether no further handshake may begin; the connection is dropped then."""
        if tls.is_full():
            self._server.rejected["handshakes"] += 1
            self.drop(f"{tls.handshakes} other TLS handshakes are under way")
        return tls.is_full()

    async def _handshake(self) -> None:
        outer, tls = self._transport, self._tls
        assert tls is not None
        try:
            self._transport, self._inside = await tls.handshake(outer, self, self._peer.address)
        except EmbershardError as error:
            self._end_handshake(outer, str(error))
            return
        except OSError as error:
            self._end_handshake(outer, f"the TLS handshake did not end: {error.strerror or error}")
            return
        self._tls = None  # from here on, it is like any other
        self.peer_identity = self._inside.identity
        self._transport.set_write_buffer_limits(high=UNSENT_BYTES)

    def _end_handshake(self, outer: asyncio.Transport, reason: str) -> None:
        if not self._gone:  # else it was dropped, or it left
            self._server.rejected["tls"] += 1
            self._log_drop(reason)
        outer.abort()
        self.connection_lost(None)  # which a failed handshake does not always call

    def _pass_on(self, received: bytes) -> None:
        self._memory = None  # only frames use it
        self._server.connections.discard(self)
        # inside TLS, too, nothing else is passed on: gRPC's server would take it for a peer of this machine
        target, is_tls = None if self._inside is not None else self._server.foreign, received[0] == TLS_RECORD
        if self._tls is not None:
            target = self._tls.grpc if is_tls else self._tls.refusing_grpc
            if is_tls and self._too_many_handshakes(self._tls):
                return
        elif is_tls and self._inside is None:
            self._transport.write(_HANDSHAKE_FAILURE)
            self._server.rejected["tls"] += 1
            self._log_drop("it speaks TLS, and this shard has no certificates (--tls)")
            self._transport.close()
            return
        if target is None:
            self.drop("it speaks something else than this protocol")
            return
        if not self._server.may_pass_on():
            self._server.rejected["connections"] += 1
            self.drop(_NO_FILES)
            return
        self._count(self._server.passed_on)
        ended = None
        if self._tls is not None and is_tls:
            self._tls.handshakes += 1
            ended = self._end_grpc_handshake
        elif self._tls is not None:
            self._server.rejected["tls"] += 1  # told to use it
        pipe_to(target, self._transport, received, self._peer, self._end, handshake_ended=ended)

    def _end_grpc_handshake(self, failed: bool) -> None:
        assert self._tls is not None
        self._tls.handshakes -= 1
        if failed:
            self._server.rejected["tls"] += 1
            if self._server.dropped_lines.may_log():
                _log.warning(
                    "the TLS handshake of gRPC with %s failed: one side does not trust the other's certificate, or the "
                    "client speaks no TLS 1.3 (the client's error says which)",
                    self._peer.address,
                )

    def _place(self, header: Header) -> Sequence[memoryview] | None:
        """Memory for a request's arrays; None, with an error as the reply, for one that cannot be taken now."""
        size = header.bulk_bytes
        server = self._server
        kind = REQUEST_KINDS.get(header.kind)
        if kind is None:
            self._refuse(header, _unknown(header))
            return None
        if server.dispatch.access is not None:
            try:
                server.dispatch.access.check(self._known_principal(), kind)
            except EmbershardError as error:
                server.dispatch.access.refused(self._principal, self._peer.address, METHODS[kind][0], error)
                self._refuse(header, error)
                return None
        # a small one always: it needs no more than the memory that every connection has anyway
        if size > SCRATCH_BYTES and server.receiving_bytes + size > RECEIVING_BYTES:
            self._refuse(header, server.turn_away(server.receiving_bytes, "receiving"))
            return None
        self._receiving += size
        server.receiving_bytes += size
        if not header.uses_memory:
            return [np.empty(length, np.uint8).data for length in header.lengths]
        return [
            np.empty(length, np.uint8).data if offset == IN_FRAME else place_in(self._memory, offset, length)
            for length, offset in zip(header.lengths, header.offsets, strict=True)
        ]

    def _received_frame(self, num_bytes: int) -> None:
        self._server.receiving_bytes -= num_bytes
        self._receiving -= num_bytes

    def _answer(self, frame: Frame) -> None:
        header, buffers = frame
        bulk_bytes = header.bulk_bytes
        self._received_frame(bulk_bytes)
        kind = REQUEST_KINDS.get(header.kind)
        if kind is None:
            self._refuse(header, _unknown(header))
            return
        request = kind
        dispatch, has_memory = self._server.dispatch, self._memory is not None
        shared = SharedBuffers(kind, header, buffers) if header.uses_memory else None
        if shared is not None:
            self._server.counters.received_bytes += shared.read_bytes
        frame_bytes, shared_bytes = len(header.head) + bulk_bytes, 0 if shared is None else shared.read_bytes
        is_small = frame_bytes <= AT_ONCE_BYTES.get(kind, -1) and shared_bytes <= AT_ONCE_SHARED_BYTES

        def read_request() -> Request:
            if request is Pull or request is Rendezvous:
                if self._gone:  # it may have waited for other workers: no rows are made for nobody
                    raise ShuttingDown()
                self._server.check_room(self._full or self._made - self._handed > UNSENT_BYTES)
            if shared is None:
                message = read(request, header.head, buffers)
            else:
                message = shared.read(copies=dispatch.keeps_arrays)
            if isinstance(message, (Join, Heartbeat)):
                self.sender = message.worker, message.epoch
            return message

        def write(reply: Reply) -> Pieces:
            bulk = [np.ascontiguousarray(array).data for array in arrays(reply)]
            offsets = [IN_FRAME] * len(bulk) if has_memory else None
            if shared is not None and isinstance(reply, Rows):
                offsets = shared.offsets(reply)
            head = head_bytes(reply)
            pieces = encode(KIND_OF[type(reply)], header.call, 0, head, bulk, checksum=self._checksum, offsets=offsets)
            if isinstance(reply, (Rows, RendezvousResult)):
                num_bytes = sum(map(len, pieces))
                self._made += num_bytes
                self._server.made_bytes += num_bytes
            return pieces

        future = dispatch.submit(
            kind,
            read_request,
            write,
            num_bytes=frame_bytes + shared_bytes,
            deadline=time.monotonic() + header.timeout_ms / 1000,
            peer=self._peer.address,
            principal=self._known_principal(),
            is_small=is_small,
        )
        future.add_done_callback(self._sender(header, kind, shared))

    def _sender(
        self, header: Header, kind: type[Request], shared: SharedBuffers | None
    ) -> Callable[[Future[Pieces]], None]:
        arrived, counters = self.last_seen, self._server.counters

        def finish(pieces: Pieces, error: BaseException | None) -> None:
            if shared is not None:
                counters.sent_bytes += shared.written_bytes
            self._send(pieces, error is None and kind in (Pull, Rendezvous))
            counters.answered(kind, time.monotonic() - arrived, error)

        def send(future: Future[Pieces]) -> None:
            try:  # one look at it, of which each takes its lock
                pieces = future.result()
            except CancelledError:  # its deadline passed: nobody waits for it
                self._server.call(counters.expired, kind)
                if shared is not None:  # but to use its memory again
                    self._server.call(self._send, self._error(header, ShuttingDown()))
            except BaseException as error:
                self._server.call(finish, self._error(header, error), error)
            else:
                self._server.call(finish, pieces, None)

        return send

    def _send(self, pieces: Pieces, rows: bool = False) -> None:
        num_bytes = sum(map(len, pieces))
        if not self._transport.is_closing():
            self._written += num_bytes
            self._server.counters.sent_bytes += num_bytes
            self._transport.writelines(pieces)
        if rows:
            self._handed += num_bytes
            self._server.sent(num_bytes)

    def _refuse(self, header: Header, error: EmbershardError) -> None:
        self._send(self._error(header, error))

    def _error(self, header: Header, error: BaseException) -> Pieces:
        if not isinstance(error, EmbershardError):
            error = InternalError(reason=f"{type(error).__name__}: {error}; see the shard's output")
        return encode(ERROR_KIND, header.call, 0, to_wire(clipped(error))[1], checksum=self._checksum)

    def _fail(self, error: EmbershardError) -> None:
        """Say what is wrong with the stream, under call 0, and end it: where the next frame starts is unknown."""
        is_refusal = isinstance(error, NotAllowed | QuotaExceeded | UntrustedCertificate)
        if isinstance(error, TLSRequired | UntrustedCertificate):
            self._server.rejected["tls"] += 1
        elif not is_refusal:
            self._server.rejected["bad_frame"] += 1
        self._log_drop(error)
        self._send(encode(ERROR_KIND, 0, 0, to_wire(clipped(error))[1], checksum=self._checksum))
        if is_refusal and not self._transport.is_closing():
            # what it has sent meanwhile is read and dropped: else the system would tell it of a reset, not of the error
            self._refused = True
            if self._transport.can_write_eof():
                self._transport.write_eof()
            else:  # inside TLS, which goes on until the peer has closed its side, too
                self._transport.close()
            self._server.loop.call_later(_LAST_WORDS_SECONDS, self._transport.abort)
        else:
            self._transport.close()


def _unknown(header: Header) -> InvalidRequest:
    return InvalidRequest(reason=f"no request has kind {header.kind}; this shard knows 1..{len(REQUEST_KINDS)}")
