"""A connection passed on to a Unix socket, byte for byte, no faster than either side takes them."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from typing import cast

from embershard.ps.security.peers import Peer

TLS_RECORD = 0x16  # the first byte of a connection that begins with TLS
_TLS_ALERT, _TLS_ENCRYPTED = 0x15, 0x17
_ENCRYPTED_ALERT_BYTES = 2 + 1 + 16  # level and description, the kind of the record, the tag of each cipher of TLS 1.3
_RECORD_HEADER_BYTES = 5
_TLS13 = 0x0304
_FLUSH_SECONDS = 30.0  # for what one end had not yet read when the other one left

_log = logging.getLogger(__name__)
_connecting: set[asyncio.Task[None]] = set()  # the loop itself holds tasks only weakly


class PipedServer:
    """A server that is reached through pipes alone: the Unix socket at which it listens, and whose pipes lead there.

    Each pipe has a name, which the server sees as its peer's address, so that it learns who is at the other end. One
    that listens at several sockets has one of these for each, with the same `peers`.
    """

    def __init__(self, path: str, peers: dict[str, Peer] | None = None) -> None:
        self.path = path
        self.peers = {} if peers is None else peers  # by the name of the pipe, as gRPC writes it


def pipe_to(
    server: PipedServer,
    transport: asyncio.Transport,
    received: bytes,
    peer: Peer,
    ended: Callable[[], None] = lambda: None,
    *,
    handshake_ended: Callable[[bool], None] | None = None,
) -> None:
    """Pipe `transport`, of `peer`, to a server, which first gets `received`; call `ended` at the end.

    With `handshake_ended` the two speak TLS: it is told once whether their handshake failed, and the connection ends
    where the server answers with a version before 1.3.
    """
    name = _pipe_name(server.path)
    known_as = f"unix-abstract:{name[1:]}" if name.startswith("\0") else f"unix:{name}"
    server.peers[known_as] = peer

    def end() -> None:
        server.peers.pop(known_as, None)
        ended()

    if handshake_ended is None:
        near, far = _End(end), _End()
    else:
        handshake = _Handshake(handshake_ended)
        handshake.client_sent(received)
        near, far = _TLSClientEnd(handshake, end), _TLSServerEnd(handshake)
    near.transport = transport
    transport.pause_reading()
    transport.set_protocol(near)
    transport.set_write_buffer_limits()  # the usual ones: what is read there waits for what is read here
    task = asyncio.get_running_loop().create_task(_connect(server.path, name, near, far, received))
    _connecting.add(task)
    task.add_done_callback(_connecting.discard)


def _pipe_name(path: str) -> str:
    """A name for this process's end of a pipe that nobody can guess and take before."""
    if sys.platform == "linux":
        return f"\0embershard-pipe-{secrets.token_hex(16)}"
    return f"{os.path.dirname(path)}/{secrets.token_hex(8)}"


async def _connect(path: str, name: str, near: _End, far: _End, received: bytes) -> None:
    far.other = near  # before it connects: a gRPC server speaks first
    try:
        sock = _connected(path, name)
        await asyncio.get_running_loop().create_unix_connection(lambda: far, sock=sock)
    except OSError as error:
        _log.warning("cannot pass a connection on to %s: %s", path, error)
        near.transport.abort()
        return
    near.other = far
    far.transport.write(received)
    if near.transport.is_closing():
        far.transport.close()
    else:
        near.transport.resume_reading()


def _connected(path: str, name: str) -> socket.socket:
    """A socket of this name, connected to the one at a path. OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.bind(name)
        if not name.startswith("\0"):
            os.unlink(name)  # the other side has it all the same
        sock.connect(path)  # at once, or not at all; uvloop itself does not know abstract names
    except OSError:
        sock.close()
        raise
    return sock


class _End(asyncio.Protocol):
    """One end of a pipe: what arrives here leaves at the other."""

    transport: asyncio.Transport
    other: _End | None = None
    ended = False  # whether its peer has sent everything
    _flush: asyncio.TimerHandle | None = None  # ends it, where its peer does not read what is left

    def __init__(self, closed: Callable[[], None] = lambda: None) -> None:
        self._closed = closed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop has classes of its own

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def eof_received(self) -> bool:
        self.ended = True
        if self.other is not None and not self.other.ended:
            self.other.transport.write_eof()
            return True  # the other direction goes on until its own end
        return False  # closes it, and with it the other

    def connection_lost(self, error: Exception | None) -> None:
        self._closed()
        if self._flush is not None:
            self._flush.cancel()  # else it would keep both ends in memory
        if self.other is not None:
            self.other.close()

    def close(self) -> None:
        """End once the peer has read what is left, or after some time."""
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._flush = asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self.transport.abort)


class _Records:
    """One direction of a TLS connection, of which the headers of the records are read."""

    def __init__(self) -> None:
        self._start = b""  # of a header
        self._left = 0  # bytes of the last record that are still to come

    def begun(self, data: bytes) -> Iterator[tuple[int, int]]:
        """The kind and the size of each record whose header ends in `data`, the next bytes."""
        data, at = self._start + data, self._left
        while at + _RECORD_HEADER_BYTES <= len(data):
            size = int.from_bytes(data[at + 3 : at + _RECORD_HEADER_BYTES])
            yield data[at], size
            at += _RECORD_HEADER_BYTES + size
        self._start, self._left = data[at:], max(0, at - len(data))


class _Handshake:
    """Finds out whether a handshake of TLS 1.3 succeeds, which gRPC does not say; nothing of it can be decrypted.

    A server that accepts what the client sent last, its encrypted Finished, goes on with HTTP/2's settings or a ticket.
    One that does not sends an alert, which its size tells, or nothing.
    """

    def __init__(self, ended: Callable[[bool], None]) -> None:
        self.is_over = False
        self._ended = ended
        self._of_client, self._of_server = _Records(), _Records()
        self._server_spoke = self._client_answered = False

    def client_sent(self, data: bytes) -> None:
        """Follow bytes of the client."""
        for kind, _ in self._of_client.begun(data):
            if self._server_spoke and kind in (_TLS_ALERT, _TLS_ENCRYPTED):
                self._client_answered = True

    def server_sent(self, data: bytes) -> None:
        """Follow bytes of the server."""
        for kind, size in self._of_server.begun(data):
            if kind == _TLS_ENCRYPTED and self._client_answered and size != _ENCRYPTED_ALERT_BYTES:
                self._end(failed=False)
            self._server_spoke = self._server_spoke or kind == _TLS_ENCRYPTED

    def client_left(self) -> None:
        """The client ended the connection: it refuses the server, or, where it had not answered it, just left."""
        self._end(failed=self._client_answered)

    def server_left(self) -> None:
        """The server ended the connection."""
        self._end(failed=True)

    def _end(self, *, failed: bool) -> None:
        if not self.is_over:
            self.is_over = True
            self._ended(failed)


class _TLSClientEnd(_End):
    """The end at a client that speaks TLS."""

    def __init__(self, handshake: _Handshake, closed: Callable[[], None]) -> None:
        super().__init__(closed)
        self._handshake = handshake

    def data_received(self, data: bytes) -> None:
        if not self._handshake.is_over:
            self._handshake.client_sent(data)
        super().data_received(data)

    def eof_received(self) -> bool:
        self._handshake.client_left()
        return super().eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._handshake.client_left()
        super().connection_lost(error)


class _TLSServerEnd(_End):
    """The end at a server that speaks TLS: gRPC's takes 1.2 too, and cannot be told otherwise from Python."""

    def __init__(self, handshake: _Handshake) -> None:
        super().__init__()
        self._handshake = handshake
        self._start: bytes | None = b""  # of what the server says, until its hello is there

    def data_received(self, data: bytes) -> None:
        if self._start is not None:
            self._start += data
            if (version := _negotiated_version(self._start)) is None:
                return
            if version != _TLS13:
                self.transport.abort()
                return
            data, self._start = self._start, None
        if not self._handshake.is_over:
            self._handshake.server_sent(data)
        super().data_received(data)

    def eof_received(self) -> bool:
        self._handshake.server_left()
        return super().eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._handshake.server_left()
        super().connection_lost(error)


def _negotiated_version(data: bytes) -> int | None:
    """The version of TLS that a server's first bytes, a ServerHello, agree on; None while there are too few.

    0 where they are none. An alert is let through.
    """
    if len(data) < 5:
        return None
    if data[0] != TLS_RECORD:
        return _TLS13 if data[0] == _TLS_ALERT else 0  # an alert: let the client read it
    end = 5 + int.from_bytes(data[3:5])
    if len(data) < end:
        return None
    try:
        at = 9 + 2 + 32  # the headers of record and handshake, the version before 1.3, the random
        at += 1 + data[at] + 3  # session id, cipher, compression
        (length,) = struct.unpack_from(">H", data, at)
        at, end = at + 2, min(end, at + 2 + length)
        while at < end:
            kind, size = struct.unpack_from(">HH", data, at)
            if kind == 43:  # supported_versions
                return int.from_bytes(data[at + 4 : at + 4 + size])
            at += 4 + size
    except (struct.error, IndexError):
        return 0
    return 0x0303
