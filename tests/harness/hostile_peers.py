"""Peers that do with a shard's stream what no client of ours does: raw connections, and frames made by hand."""

import socket
import struct
from contextlib import suppress
from zlib import crc32

import numpy as np

from embershard.proto import wire
from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.errors import from_wire
from embershard.proto.messages import (
    ERROR_KIND,
    KIND_OF,
    REPLY_KINDS,
    Pull,
    Push,
    PushToken,
    Reply,
    Request,
    TableGradients,
    TableIds,
    arrays,
)
from embershard.proto.protobuf import head_bytes, read
from embershard.proto.security.loopback import find_loopback_token
from embershard.proto.security.tokens import pack_token
from embershard.proto.wire import Feature, Frame, FrameReader

NONE = Feature(0)


def connected(address: str, receive_bytes: int = 0) -> socket.socket:
    """A TCP connection to host:port, with or without tcp:// before it."""
    host, port = address.removeprefix("tcp://").split(":")
    sock = socket.socket()
    if receive_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.settimeout(60)
    sock.connect((host, int(port)))
    return sock


class Peer:
    """A raw connection that has said hello, but for `features` None, and shown a token where a shard asks for it."""

    def __init__(
        self, address: str, features: Feature | None = NONE, receive_bytes: int = 0, token: str | None = None
    ) -> None:
        self.sock = connected(address, receive_bytes)
        if features is not None:
            self.sock.sendall(wire.client_hello(features))
            assert wire.read_server_hello(self.sock.recv(16, socket.MSG_WAITALL)).features == features
            if Feature.TOKEN in features:
                host, port = self.sock.getpeername()
                self.sock.sendall(pack_token(token or find_loopback_token(host, port)))
        self._frames: list[Frame] = []
        self._reader = FrameReader(
            MAX_MESSAGE_BYTES,
            lambda header: [np.empty(length, np.uint8).data for length in header.lengths],
            checksum=Feature.CHECKSUM in (features or NONE),
        )

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def receive(self) -> Frame | None:
        """The next frame; None where the connection ends instead."""
        while not self._frames:
            try:
                got = self.sock.recv_into(self._reader.buffer())
            except ConnectionError:
                got = 0
            if not got:
                return None
            self._frames += self._reader.received(got)
        return self._frames.pop(0)

    def reply(self) -> Reply:
        """The next frame's reply, or its error."""
        frame = self.receive()
        assert frame is not None, "the connection has ended"
        if frame.header.kind == ERROR_KIND:
            raise from_wire(frame.header.head, "")
        return read(REPLY_KINDS[frame.header.kind], frame.header.head, frame.buffers)

    def ask(self, request: Request) -> Reply:
        self.send(framed(request))
        return self.reply()

    def ask_all(self, requests: list[Pull]) -> None:
        """Send them, and read nothing; a connection that ends meanwhile is no error."""
        with suppress(OSError):
            for call, request in enumerate(requests):
                self.send(framed(request, call))

    def was_dropped(self) -> bool:
        """Whether the connection ends, after an error frame at most."""
        try:
            while self.receive() is not None:
                pass
        except TimeoutError:
            return False
        return True


def framed(request: Request, call: int = 7, *, checksum: bool = False, timeout_ms: int = 60_000) -> bytes:
    bulk = [np.ascontiguousarray(array).data for array in arrays(request)]
    kind = KIND_OF[type(request)]
    return b"".join(wire.encode(kind, call, timeout_ms, head_bytes(request), bulk, checksum=checksum))


def push(num_rows: int = 3, dim: int = 4, table: str = "items", seq: int = 1, worker: int = 0) -> Push:
    ids = np.arange(num_rows, dtype=np.int64)
    return Push(PushToken(worker, 1, seq, 1), 0, 1, (TableGradients(table, ids, np.ones((num_rows, dim), np.float32)),))


def pull(num_rows: int = 3, table: str = "items") -> Pull:
    return Pull(1, (TableIds(table, np.arange(num_rows, dtype=np.int64)),))


def begun(bulk_bytes: int, call: int = 1) -> bytes:
    """The start of a push, without the arrays that it announces."""
    head = head_bytes(push())
    lengths = struct.pack("<2I", 8, bulk_bytes - 8)
    start = struct.pack("<4sBBHIIIII", b"EMBF", wire.VERSION, KIND_OF[Push], 2, call, 20_000, len(head), bulk_bytes, 0)
    return start + crc32(lengths + head, crc32(start)).to_bytes(4, "little") + lengths + head


def with_field(data: bytes, offset: int, value: bytes) -> bytes:
    """A frame with another value at an offset of its start, and the checksum that fits it."""
    changed = bytearray(data)
    changed[offset : offset + len(value)] = value
    if offset != 28:  # the checksum itself
        buffers, head = struct.unpack_from("<H", data, 6)[0], struct.unpack_from("<I", data, 16)[0]
        start = bytes(changed[32 : 32 + 4 * buffers + head])
        changed[28:32] = crc32(start, crc32(bytes(changed[:28]))).to_bytes(4, "little")
    return bytes(changed)
