"""Hostile bytes for the stream transport's reader: a typed error or frames within the limits, whatever comes.

`make fuzz` runs a thousand times as many.
"""

import struct
import tracemalloc
from zlib import crc32

import numpy as np
import pytest

from embershard.proto import wire
from embershard.proto.errors import BadFrame, WrongVersion
from embershard.proto.wire import Feature, FrameReader
from harness.fuzz import CASES, mutate, run_cases

LIMIT = 2048  # small limits are reached often
HEAD = 512
BUFFERS = 16
EDGES = [0, 1, 2, 31, 32, 33, BUFFERS, BUFFERS + 1, HEAD, HEAD + 1, LIMIT, LIMIT + 1, 2**15, 2**31, 2**32 - 1]
# offset and width of what a start of a frame says about itself
FIELDS = [(0, 4), (4, 1), (5, 1), (6, 2), (8, 4), (12, 4), (16, 4), (20, 4), (24, 4), (28, 4), (32, 4), (36, 4)]


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch):
    monkeypatch.setattr(wire, "MAX_HEAD_BYTES", HEAD)
    monkeypatch.setattr(wire, "MAX_BUFFERS", BUFFERS)
    monkeypatch.setattr(wire, "SCRATCH_BYTES", 32)  # set anew for each reader, and put back after the test


class Receiver:
    """A reader under test, and what it is held to."""

    def __init__(self, rng, checksum, shared=False):
        wire.SCRATCH_BYTES = rng.choice([32, 40, 64, 300, 4096])  # heads larger than it, and buffers not through it
        self.rng = rng
        self.reader = FrameReader(LIMIT, self.place, checksum=checksum, has_memory=shared)

    def place(self, header):
        assert sum(header.lengths) <= LIMIT
        assert 0 < len(header.lengths) <= BUFFERS
        if self.rng.random() < 0.1:
            return None
        return [np.empty(length, np.uint8).data for length in header.lengths]

    def frames(self, data):
        """The frames of `data`, received in pieces of random sizes."""
        most = self.rng.choice([1, 10, 100, 10**6])
        pos = 0
        while pos < len(data):
            room = self.reader.buffer()
            assert 0 < len(room) <= max(wire.SCRATCH_BYTES, wire.PREFIX_BYTES + 8 * BUFFERS + HEAD, LIMIT)
            n = min(len(room), self.rng.randint(1, most), len(data) - pos)
            room[:n] = data[pos : pos + n]
            pos += n
            for frame in self.reader.received(n):
                assert len(frame.header.head) <= HEAD
                assert tuple(buffer.nbytes for buffer in frame.buffers) == frame.header.lengths
                yield frame


def valid_frame(rng, checksum, shared=False):
    head = rng.randbytes(rng.choice([0, 1, 20, HEAD]))
    buffers = [rng.randbytes(rng.choice([0, 1, 8, 100])) for _ in range(rng.choice([0, 0, 1, 2, BUFFERS]))]
    if rng.random() < 0.1:
        buffers = [rng.randbytes(LIMIT)]
    offsets = [rng.choice([wire.IN_FRAME, wire.IN_FRAME, 64]) for _ in buffers] if shared else None
    number, call = rng.randrange(256), rng.getrandbits(32)
    return b"".join(wire.encode(number, call, 0, head, buffers, checksum=checksum, offsets=offsets))


def reseal(data, shared=False):
    """Make the checksum of the first frame's start right, so that what lies behind it is reached."""
    if len(data) >= wire.PREFIX_BYTES:
        buffers, head = struct.unpack_from("<H", data, 6)[0], struct.unpack_from("<I", data, 16)[0]
        start = data[wire.PREFIX_BYTES : wire.PREFIX_BYTES + (8 if shared else 4) * buffers + head]
        struct.pack_into("<I", data, 28, crc32(start, crc32(data[:28])))


def mutated(rng, data, shared=False):
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0:
                data[at:at] = data[: rng.randrange(len(data) + 1)]
            case 1:
                offset, width = rng.choice(FIELDS)
                if offset + width <= len(data):
                    value = rng.choice(EDGES) if rng.random() < 0.7 else rng.getrandbits(32)
                    data[offset : offset + width] = (value % 256**width).to_bytes(width, "little")
            case _:
                mutate(rng, data, at, rng.choice([1, 4, 32, 100]))
        if rng.random() < 0.5:
            reseal(data, shared)
    return bytes(data)


def test_mutated_frames_give_frames_within_limits_or_a_bad_frame():
    handed_over = 0

    def check(rng):
        nonlocal handed_over
        checksum, shared = rng.random() < 0.5, rng.random() < 0.5
        valid = b"".join(valid_frame(rng, checksum, shared) for _ in range(rng.randint(1, 3)))
        data = mutated(rng, bytearray(valid), shared)
        for _ in Receiver(rng, checksum, shared).frames(data):
            handed_over += 1
        return True

    cases = CASES // 2
    assert run_cases(check, BadFrame, cases) < cases * 3 // 4, "the mutations reach the checks"
    assert handed_over > cases // 10, "and what is behind them"


def test_random_bytes_are_refused_as_soon_as_a_prefix_is_there():
    def check(rng):
        data = rng.randbytes(rng.randint(32, 400))
        return list(Receiver(rng, False).frames(data)) is not None

    assert run_cases(check, BadFrame) == 0


def test_any_hello_gives_an_answer_or_a_typed_error():
    def check(rng):
        hello = bytearray(wire.client_hello(Feature.CHECKSUM))
        for _ in range(rng.randint(1, 4)):
            hello[rng.randrange(16)] = rng.choice([0, 1, 2, 255, rng.randrange(256)])
        answer, agreed = wire.server_hello(bytes(hello), Feature.CHECKSUM)
        assert agreed is None or wire.read_server_hello(answer) == agreed
        wire.read_server_hello(bytes(hello))

    run_cases(check, (BadFrame, WrongVersion))


def test_an_announced_head_takes_no_memory_before_the_scratch_is_full_of_it(monkeypatch):
    monkeypatch.setattr(wire, "SCRATCH_BYTES", 2**17)
    monkeypatch.setattr(wire, "MAX_HEAD_BYTES", 2**20)
    start = b"".join(wire.encode(4, 1, 0, b"h" * 2**20, [], checksum=False))
    readers = [FrameReader(2**26, lambda _: None, checksum=False) for _ in range(20)]
    tracemalloc.start()
    try:
        for reader in readers:
            reader.buffer()[:1000] = start[:1000]
            reader.received(1000)
        assert tracemalloc.get_traced_memory()[1] < 20_000
    finally:
        tracemalloc.stop()
