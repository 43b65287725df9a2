"""A peer that shares memory with a shard, and says of it what it likes."""

import socket

import numpy as np

from embershard.proto import wire
from embershard.proto.arrays import MAX_MESSAGE_BYTES, Array, Floats
from embershard.proto.messages import KIND_OF, Request, arrays
from embershard.proto.protobuf import head_bytes
from embershard.proto.shared_memory import SharedHeap
from embershard.proto.wire import IN_FRAME, Feature, FrameReader
from harness.hostile_peers import Peer


class MemoryPeer(Peer):
    """A raw connection to a Unix socket that has given a file with its hello, by default that of a heap of its own."""

    def __init__(self, path: str, file: int | None = None, wanted: Feature = Feature.SHARED_MEMORY) -> None:
        self.heap = SharedHeap(2**20)
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(path)
        socket.send_fds(self.sock, [wire.client_hello(wanted)], [self.heap.file if file is None else file])
        self.shares = bool(wire.read_server_hello(self.sock.recv(16, socket.MSG_WAITALL)).features)
        self._frames = []
        self._reader = FrameReader(MAX_MESSAGE_BYTES, self._place, checksum=False, has_memory=self.shares)

    def _place(self, header: wire.Header) -> list[memoryview]:
        offsets = header.offsets or [IN_FRAME] * len(header.lengths)
        return [
            np.empty(length, np.uint8).data if offset == IN_FRAME else self.heap.view(offset, length)
            for length, offset in zip(header.lengths, offsets, strict=True)
        ]

    def floats(self, *shape: int, value: float = 0) -> Floats:
        """An array in the memory of both, of at least 32 KiB."""
        found = self.heap.floats(*shape)
        assert found is not None
        found.fill(value)
        return found

    def offset(self, array: Array) -> int:
        place = self.heap.offset_of(array)
        return IN_FRAME if place is None else place

    def framed(
        self, request: Request, into: tuple[Array, ...] = (), offsets: tuple[int, ...] = (), timeout_ms: int = 60_000
    ) -> bytes:
        """The frame of a request whose arrays, and those for rows, lie where they do, or at these `offsets`."""
        bulk = [np.ascontiguousarray(array) for array in (*arrays(request), *into)]
        places = list(offsets or map(self.offset, bulk)) if self.shares else None
        head, kind = head_bytes(request), KIND_OF[type(request)]
        buffers = [array.data for array in bulk]
        return b"".join(wire.encode(kind, 7, timeout_ms, head, buffers, checksum=False, offsets=places))
