"""The bytes of a shard's log: a record per event, and the header of a segment; docs/durability.md has both in tables.

A record is a header of 64 bytes, a body whose bytes mean nothing here, and zeros up to the next multiple of 8. Its
checksum is seeded with the random id of its segment: what an earlier use of the file left in it is no record.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

VERSION = 1  # of the format of segments and records
SEGMENT_MAGIC = b"EMBLSEG\n"
RECORD_MAGIC = b"EMBL"
HEADER_BYTES = 64  # of a segment, and of a record
MAX_GROUP = 2**16  # records of a group: `in_group` is a u16
MAX_BODY_BYTES = 2**32 - 9  # padded, it still fits in a u32

# Without their last field, the checksum, which covers these bytes and, in a record, the body with its padding.
_SEGMENT = struct.Struct("<8sHHIQQQQQ")
_RECORD = struct.Struct("<4sBBHIIQIIIIQQ")
_CHECKSUM = struct.Struct("<Q")
_SMALL_BYTES = 4096
_CHECKED_BYTES = HEADER_BYTES - _CHECKSUM.size
assert _SEGMENT.size == _RECORD.size == _CHECKED_BYTES
# of a record's header, as words of 8 bytes
_LSN_WORD, _TAG_WORD = 2, 3


class LogRecord(NamedTuple):
    """An event of a shard, and what applying it did.

    `body` is the event's bytes in pieces, none of which is copied. `applied` and `skipped` count rows, `done` those
    that were applied before a fault. `version` and `clock` (the open one) are the shard's after the event.
    """

    kind: int  # 0..255
    body: Sequence[ReadableBuffer]
    version: int = 0
    clock: int = 0
    applied: int = 0
    skipped: int = 0
    done: int = 0
    flags: int = 0  # 0..255, the kind's own

    @property
    def body_bytes(self) -> int:
        """The length of the record's body in bytes."""
        return sum(memoryview(piece).nbytes for piece in self.body)

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes in a log."""
        return record_bytes(self.body_bytes)


class RecordHeader(NamedTuple):
    """The header of a record, in the order of its bytes."""

    kind: int
    flags: int
    in_group: int  # records before it in its group, which was written and synced as one
    body_bytes: int
    done: int
    lsn: int
    term: int
    tag: int  # the low half of its segment's id: what is not of this segment is passed by without a checksum
    applied: int
    skipped: int
    version: int
    clock: int
    checksum: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole record."""
        return record_bytes(self.body_bytes)


class SegmentFlag(enum.IntFlag):
    """Name the ways in which a segment was written."""

    SYNCED = 1  # each group reached the disk before the next one was written


class SegmentHeader(NamedTuple):
    """The first 64 bytes of a segment, in their order."""

    version: int
    flags: int
    shard: int
    lineage: int
    first_lsn: int
    id: int
    previous: int  # id of the segment before it; 0 for a log's first
    boot: int  # which start of which machine it was written under


def record_bytes(body_bytes: int) -> int:
    """Bytes of a record with a body of this size."""
    return HEADER_BYTES + (body_bytes + 7) // 8 * 8


def tag_of(segment: int) -> int:
    """The field `tag` of the records of a segment with this id."""
    return segment & 0xFFFFFFFF


def encode_record(record: LogRecord, lsn: int, term: int, in_group: int, seed: int) -> list[bytes | memoryview]:
    """A record as the pieces to write, in order: its header, the memory of the body's own pieces, and padding.

    A small one is a single piece: to copy it costs less than to write its pieces one by one.
    """
    body_bytes = record.body_bytes
    padding = bytes(-body_bytes % 8)
    checked = _RECORD.pack(
        RECORD_MAGIC, record.kind, record.flags, in_group, body_bytes, record.done, lsn, term, tag_of(seed),
        record.applied, record.skipped, record.version, record.clock,
    )  # fmt: skip
    if body_bytes <= _SMALL_BYTES:
        rest = b"".join((*record.body, padding))
        return [checked + _CHECKSUM.pack(xxh3_64_intdigest(checked + rest, seed)) + rest]
    pieces = [memoryview(piece).cast("B") for piece in record.body if memoryview(piece).nbytes]
    checksum = xxh3_64(checked, seed)
    for piece in pieces:
        checksum.update(piece)
    checksum.update(padding)
    return [checked + _CHECKSUM.pack(checksum.intdigest()), *pieces, *([padding] if padding else ())]


def read_record_header(data: ReadableBuffer) -> RecordHeader | None:
    """The header in the first HEADER_BYTES of `data`; None where no record begins."""
    magic, *fields = _RECORD.unpack_from(data)
    if magic != RECORD_MAGIC:
        return None
    return RecordHeader(*fields, *_CHECKSUM.unpack_from(data, _CHECKED_BYTES))


def is_intact(header: RecordHeader, record: memoryview, seed: int) -> bool:
    """Whether a whole record, padding included, is what was written to the segment of this id."""
    checksum = xxh3_64(record[:_CHECKED_BYTES], seed)
    checksum.update(record[HEADER_BYTES:])
    return checksum.intdigest() == header.checksum


def find_headers(data: memoryview, segment: int, lowest_lsn: int) -> list[int]:
    """Offsets, multiples of 8, at which records of this segment and at least this LSN may begin; nothing is checked."""
    words = np.frombuffer(data, "<u8", len(data) // 8)
    starts = np.flatnonzero(words.view("<u4")[::2] == int.from_bytes(RECORD_MAGIC, "little"))
    starts = starts[starts + HEADER_BYTES // 8 <= len(words)]
    mine = (words[starts + _LSN_WORD] >= lowest_lsn) & (words[starts + _TAG_WORD] >> 32 == tag_of(segment))
    return cast(list[int], (8 * starts[mine]).tolist())


def encode_segment_header(header: SegmentHeader) -> bytes:
    """The first HEADER_BYTES of a segment."""
    checked = _SEGMENT.pack(SEGMENT_MAGIC, *header)
    return checked + _CHECKSUM.pack(xxh3_64(checked, header.id).intdigest())


def read_segment_header(data: bytes) -> SegmentHeader | None:
    """The header in the first HEADER_BYTES of a segment; None where they are no intact one."""
    if len(data) < HEADER_BYTES:
        return None
    magic, *fields = _SEGMENT.unpack_from(data)
    header = SegmentHeader(*fields)
    (checksum,) = _CHECKSUM.unpack_from(data, _CHECKED_BYTES)
    intact = magic == SEGMENT_MAGIC and xxh3_64(data[:_CHECKED_BYTES], header.id).intdigest() == checksum
    return header if intact else None
