"""What the stream transport's frames cost in Python, and what a checksum of the buffers adds (docs/wire.md).

Frames go from one process to another over a Unix socket, without an event loop, and the CPU time of the receiving one
is taken: with and without CHECKSUM, in turns in one run. The last rows are a small frame's encode and decode alone.
"""

from __future__ import annotations

import os
import socket
from zlib import crc32

import numpy as np

from embershard.proto.wire import Feature, FrameReader, encode
from timing import finish, machine, median, print_table, thread_seconds

ROUNDS = 7
SOCKET_BYTES = 2**20  # as the transport's own
SHAPES = [(26, 4096), (26, 32768), (2, 8 * 2**20)]  # buffers of a frame, bytes of each


def send_forever(sock: socket.socket, num: int, size: int, checksum: bool) -> None:
    arrays = [np.ones(size, np.uint8) for _ in range(num)]
    while True:
        for piece in encode(4, 1, 0, b"x" * 40, arrays, checksum=checksum):
            sock.sendall(piece)


class Stream:
    """A sending process, and the reader of what it sends."""

    def __init__(self, num: int, size: int, checksum: bool) -> None:
        self.sock, other = socket.socketpair()
        for end in (self.sock, other):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        self.child = os.fork()
        if not self.child:
            self.sock.close()
            try:
                send_forever(other, num, size, checksum)
            finally:
                os._exit(0)
        other.close()
        place = [np.zeros(size, np.uint8).data for _ in range(num)]
        self.reader = FrameReader(num * size, lambda _: place, checksum=checksum)

    def receive(self, frames: int) -> None:
        while frames > 0:
            received = self.sock.recv_into(self.reader.buffer())
            assert received, "the sender has ended"
            frames -= len(self.reader.received(received))

    def close(self) -> None:
        self.sock.close()
        os.waitpid(self.child, 0)


def receive_microseconds(num: int, size: int, checksum: bool) -> float:
    """CPU microseconds of receiving one frame."""
    stream, frames = Stream(num, size, checksum), max(8, 2**28 // (num * size))
    stream.receive(2)
    seconds = thread_seconds(lambda: stream.receive(frames))
    stream.close()
    return seconds / frames * 1e6


def small_frame_microseconds() -> tuple[float, float]:
    """Encode and decode of a frame with a head of 40 bytes and no buffers."""
    count, head = 20_000, b"x" * 40
    data = encode(4, 1, 2000, head, checksum=False)[0]
    reader = FrameReader(0, lambda _: None, checksum=False)

    def decode() -> None:
        for _ in range(count):
            reader.buffer()[: len(data)] = data
            reader.received(len(data))

    encoded = thread_seconds(lambda: [encode(4, 1, 2000, head, checksum=False) for _ in range(count)])
    return encoded / count * 1e6, thread_seconds(decode) / count * 1e6


def main() -> None:
    print(machine(), flush=True)
    plain: dict[tuple[int, int], list[float]] = {shape: [] for shape in SHAPES}
    checked: dict[tuple[int, int], list[float]] = {shape: [] for shape in SHAPES}
    small, block, passes = [], np.ones(2**20, np.uint8), []
    for _ in range(ROUNDS):
        for shape in SHAPES:
            plain[shape].append(receive_microseconds(*shape, checksum=False))
            checked[shape].append(receive_microseconds(*shape, checksum=True))
        small.append(small_frame_microseconds())
        passes.append(thread_seconds(lambda: [crc32(block) for _ in range(50)]) / 50)
    result: dict[str, object] = {"crc32_gb_per_s": round(block.nbytes / median(passes) / 1e9, 2)}
    rows = []
    for num, size in SHAPES:
        without, with_it = median(plain[num, size]), median(checked[num, size])
        rows.append([f"{num} x {size >> 10} KiB", without, num * size / without / 1e3, with_it, with_it / without])
        result[f"receive_us_{num}x{size}"] = [round(without, 1), round(with_it, 1)]
    print_table(["frame of", "receive us", "GB/s", f"with {Feature.CHECKSUM.name}", "times"], rows)
    result["encode_us"], result["decode_us"] = (round(median(column), 2) for column in zip(*small, strict=True))
    print(f"a frame without buffers: encode {result['encode_us']} us, decode {result['decode_us']} us")
    finish(result, [])


if __name__ == "__main__":
    main()
