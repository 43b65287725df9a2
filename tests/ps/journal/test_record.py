"""The bytes of a log's records and segments."""

import re
from pathlib import Path

import numpy as np

from embershard.ps.journal import record as module
from embershard.ps.journal.record import HEADER_BYTES, LogRecord, SegmentHeader

SEED = 0x1122334455667788
PUSH = LogRecord(1, [b"abc", b"", bytearray(b"defgh"), b"ij"], 7, 9, applied=5, skipped=6, done=4, flags=2)
SEGMENT = SegmentHeader(1, 1, 3, 0xA1, 40, SEED, 0xB2, 0xC3)
# hex, spaces between fields
GOLDEN_RECORD = """
454d424c 01 02 0300 0a000000 04000000 2900000000000000 02000000 88776655 05000000 06000000
0700000000000000 0900000000000000 79431ac63004396e 6162636465666768696a 000000000000
"""
GOLDEN_SEGMENT = """
454d424c5345470a 0100 0100 03000000 a100000000000000 2800000000000000 8877665544332211
b200000000000000 c300000000000000 270056f67d081681
"""


def encoded(record=PUSH, lsn=41, term=2, in_group=3):
    return b"".join(module.encode_record(record, lsn, term, in_group, SEED))


def test_the_bytes_are_those_of_the_documentation():
    assert encoded() == bytes.fromhex(GOLDEN_RECORD)
    assert module.encode_segment_header(SEGMENT) == bytes.fromhex(GOLDEN_SEGMENT)


def test_a_record_is_read_as_it_was_written():
    data = bytes.fromhex(GOLDEN_RECORD)
    header = module.read_record_header(data)
    assert header[:11] == (1, 2, 3, 10, 4, 41, 2, 0x55667788, 5, 6, 7)
    assert (header.clock, header.num_bytes, PUSH.num_bytes) == (9, len(data), len(data))
    assert data[HEADER_BYTES : HEADER_BYTES + header.body_bytes] == b"abcdefghij"
    assert module.is_intact(header, memoryview(data), SEED)
    assert module.read_segment_header(bytes.fromhex(GOLDEN_SEGMENT)) == SEGMENT


def test_a_changed_bit_anywhere_shows():
    for bit in range(8 * 80):
        data = bytearray(encoded())
        data[bit // 8] ^= 1 << bit % 8
        header = module.read_record_header(data)
        assert header is None or header.num_bytes != 80 or not module.is_intact(header, memoryview(data), SEED)
    for bit in range(8 * HEADER_BYTES):
        data = bytearray(module.encode_segment_header(SEGMENT))
        data[bit // 8] ^= 1 << bit % 8
        assert module.read_segment_header(bytes(data)) is None


def test_a_large_record_has_the_bytes_of_a_small_one_and_the_memory_of_its_arrays():
    array = np.arange(3001, dtype=np.float32)
    one = LogRecord(1, [b"ab", array, b""], 7, 9)
    pieces = module.encode_record(one, 41, 2, 3, SEED)
    assert np.shares_memory(np.frombuffer(pieces[2], np.float32), array)
    data = b"".join(pieces)
    assert data[HEADER_BYTES:] == b"ab" + array.tobytes() + bytes(2)
    assert len(data) == one.num_bytes
    assert module.is_intact(module.read_record_header(data), memoryview(data), SEED)


def test_a_record_of_another_segment_is_not_intact():
    data = encoded()
    assert not module.is_intact(module.read_record_header(data), memoryview(data), SEED + (1 << 40))


def test_headers_are_found_at_multiples_of_8_by_segment_and_lsn():
    old = b"".join(module.encode_record(PUSH, 99, 1, 0, SEED + 1))
    data = old + encoded(lsn=5) + bytes(16) + encoded(lsn=6) + bytes(4) + encoded(lsn=7)
    assert module.find_headers(memoryview(data), SEED, 0) == [80, 176]
    assert module.find_headers(memoryview(data), SEED, 6) == [176]
    assert module.find_headers(memoryview(data[: 176 + 63]), SEED, 0) == [80]
    assert module.find_headers(memoryview(b"EMBL"), SEED, 0) == []


def test_a_short_or_foreign_segment_has_no_header():
    assert module.read_segment_header(b"") is None
    assert module.read_segment_header(bytes(64)) is None
    assert module.read_record_header(bytes(64)) is None


def test_the_examples_of_the_documentation_are_these_bytes():
    page = (Path(__file__).parents[3] / "docs" / "durability.md").read_text()
    examples = dict(re.findall(r"```hex (\w+)\n(.*?)```", page, re.DOTALL))
    assert bytes.fromhex(examples["segment"]) == module.encode_segment_header(SEGMENT)
    assert bytes.fromhex(examples["record"]) == encoded()
