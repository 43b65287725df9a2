"""The records of a log in their order, and how it ends: cleanly, torn, or damaged.

A record counts if it is intact and its LSN is the next one. The first that does not ends the log, unless something
intact behind it shows that it was written whole once. What that proves depends on how it was written:

- synced: a group was on the disk before the next one was written. A record of the same group proves nothing: the disk
  takes the pages of a group in any order. One of a later group, or a later segment, proves damage.
- not synced, and the machine has not started anew since: the kernel has all that was written, in order. Any record
  behind proves damage.
- not synced, and the machine has started anew: it may have lost power before the kernel wrote everything.
"""

from __future__ import annotations

import math
import mmap
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from embershard.proto.errors import LogDamaged, LogMismatch, LogTooNew
from embershard.ps.journal.disk import Disk, page_aligned
from embershard.ps.journal.manifest import MANIFEST, LogManifest
from embershard.ps.journal.record import (
    HEADER_BYTES,
    RECORD_MAGIC,
    VERSION,
    RecordHeader,
    SegmentFlag,
    SegmentHeader,
    find_headers,
    is_intact,
    read_record_header,
    read_segment_header,
    tag_of,
)
from embershard.ps.journal.segments import SegmentName

NO_COPY = (
    "Restore it from a copy of the folder. Without a copy this shard's rows are lost: begin a new log in another "
    "folder, and restore a snapshot of the job onto all shards"
)
_WINDOW_BYTES = 4 * 2**20
_PROBE_STEP, _PROBE_BYTES = 2**20, 4096  # more than an embedding row that happens to be zero


class LoggedRecord(NamedTuple):
    """A record as it was found; `body` stays valid."""

    header: RecordHeader
    body: memoryview
    segment: SegmentName
    offset: int


class LogPosition(NamedTuple):
    """A place in a log, at which LSN `lsn` begins or is due. `segment` is None in a log without segments."""

    lsn: int
    segment: SegmentName | None
    offset: int


@dataclass(frozen=True, slots=True)
class LogEnd:
    """Name the ways in which a log ends. `torn`: within a record, half written. `unsynced`: with a loss of power.

    `lost_records` are those behind the end of an unsynced log that are still intact, or that the manifest knows of.
    """

    position: LogPosition
    state: Literal["clean", "torn", "unsynced"]
    lost_records: int = 0


@dataclass(slots=True)
class StoredSegment:
    """A segment's file; `header` is None where it has none that is its own."""

    name: SegmentName
    path: Path
    size: int = 0
    header: SegmentHeader | None = None


class LogReader:
    """Reads the log in a folder, without changing it.

    LogMismatch where a segment is another log's, LogTooNew.
    """

    def __init__(self, disk: Disk, folder: Path, manifest: LogManifest) -> None:
        self.folder = folder
        self.end: LogEnd | None = None  # once all records were read
        self._disk = disk
        self._boot = disk.boot_id()
        self._manifest = manifest
        self.last_group: LogPosition | None = None  # its first record, once all records were read
        self._position = LogPosition(manifest.first_lsn, None, 0)
        self.files = disk.list(folder)
        names = sorted(filter(None, map(SegmentName.parse, self.files)))
        self.segments = [self._stored(name) for name in names]  # by LSN
        self._by_first_lsn = defaultdict(list)
        for segment in self.segments:
            self._by_first_lsn[segment.name.first_lsn].append(segment)

    def records(self, from_lsn: int = 0) -> Iterator[LoggedRecord]:
        """The records from an LSN on, to the end of the log, which `end` describes then. LogDamaged."""
        yield from self._walk(max(from_lsn, self._manifest.first_lsn))
        self.end = self._end(self._position)

    @property
    def num_bytes(self) -> int:
        """Bytes of the segments that are read, about: what follows the last record may be taken for more of them."""
        first = self._first(self._manifest.first_lsn)
        read = [] if first is None else [one for one in self.segments if one.name.first_lsn >= first.name.first_lsn]
        return sum(one.size for one in read[:-1]) + sum(map(self._used_bytes, read[-1:]))

    def find(self, lsn: int) -> LogPosition:
        """The place of a record, or the end of the log where it has none of this LSN. LogDamaged before it."""
        for _ in self._walk(self._manifest.first_lsn, stop_at=lsn):
            pass
        if self._position.lsn < lsn:
            self._end(self._position)
        return self._position

    def id_before(self, position: LogPosition) -> int:
        """The id of the last segment with a record before a place; 0 where there is none."""
        if position.segment is None or position.offset > HEADER_BYTES:
            return position.segment.id if position.segment else 0
        here = next(segment for segment in self.segments if segment.name == position.segment)
        return here.header.previous if here.header else 0

    def intact_behind(self, position: LogPosition) -> Iterator[LoggedRecord]:
        """All intact records at and behind a place, of this LSN or a higher one, whatever lies between them."""
        for segment in self._from(position):
            yield from self._intact(segment, position.offset if segment.name == position.segment else 0, position.lsn)

    def _stored(self, name: SegmentName) -> StoredSegment:
        segment = StoredSegment(name, self.folder / str(name))
        with closing(self._disk.open(segment.path)) as file:
            segment.size = file.size()
            header = read_segment_header(file.pread(HEADER_BYTES, 0))
        if header is None or (header.first_lsn, header.id) != name:  # of an earlier use of the file
            return segment
        if header.version > VERSION:
            raise LogTooNew(path=str(segment.path), got=header.version, want=VERSION)
        for what, got, want in (
            ("shard", str(header.shard), str(self._manifest.shard)),
            ("lineage", f"{header.lineage:016x}", f"{self._manifest.lineage:016x}"),
        ):
            if got != want:
                remedy = f"It or {MANIFEST} was put there by hand: move it out, and have the log's own files there"
                raise LogMismatch(path=str(segment.path), what=what, got=got, want=want, remedy=remedy)
        segment.header = header
        return segment

    def _used_bytes(self, segment: StoredSegment) -> int:
        """Where the zeros at the end of a segment begin, as far as samples show."""
        with closing(self._disk.open(segment.path)) as file:
            for offset in range(0, segment.size, _PROBE_STEP):
                if not any(file.pread(_PROBE_BYTES, offset)):
                    return offset
        return segment.size

    def _walk(self, from_lsn: int, stop_at: int | None = None) -> Iterator[LoggedRecord]:
        """The records from an LSN on; `_position` is the place of the first that is missing, or of `stop_at`."""
        segment = self._first(from_lsn)
        while segment is not None:
            lsn, following = segment.name.first_lsn, None
            with closing(_SegmentBytes(self._disk, segment)) as data:
                offset = HEADER_BYTES if segment.header else 0
                while offset and lsn != stop_at:
                    if following := self._following(segment, lsn):
                        break
                    record = data.record(offset, lsn)
                    if record is None:
                        # damage below `from_lsn` does not matter
                        start = self._offset_of(segment, offset, from_lsn) if lsn < from_lsn else 0
                        if not start:
                            break
                        lsn, offset = from_lsn, start
                        continue
                    if not record.header.in_group:
                        self.last_group = LogPosition(lsn, segment.name, offset)
                    if lsn >= from_lsn:
                        yield record
                    lsn += 1
                    offset += record.header.num_bytes
            self._position = LogPosition(max(lsn, from_lsn), segment.name, offset)
            segment = following

    def _first(self, lsn: int) -> StoredSegment | None:
        """The segment in which an LSN is; None in a log without segments."""
        candidates = [segment for segment in self.segments if segment.name.first_lsn <= lsn]
        # one without a header may be empty, and of the same first LSN as the next
        if found := [segment for segment in candidates if segment.header] or candidates:
            return found[-1]
        return None

    def _following(self, segment: StoredSegment, lsn: int) -> StoredSegment | None:
        """The segment that continues this one at an LSN."""
        for other in self._by_first_lsn.get(lsn, ()):
            if other.header and other.header.previous == segment.name.id:
                return other
        return None

    def _from(self, position: LogPosition) -> Iterator[StoredSegment]:
        """The segment of a place, and those that may hold something behind it."""
        for segment in self.segments:
            if segment.name == position.segment:
                yield segment
        for segment in self.segments:
            if segment.name.first_lsn >= position.lsn and segment.name != position.segment:
                yield segment

    def _end(self, position: LogPosition) -> LogEnd:
        """How the log ends at the first place without a record. LogDamaged where something behind it proves damage.

        So does a base: the log had all of its events when the base was named.
        """
        if position.segment is None:
            if any(segment.header or any(self._intact(segment, 0, 0)) for segment in self.segments):
                reason = "the file with it is missing, but later ones are here"
                raise self._damaged(position, self._missing(0) or reason)
            self._check_base(position)
            missing = self._num_missing(position)
            return LogEnd(position, "unsynced" if missing else "clean", missing)
        here = next(segment for segment in self.segments if segment.name == position.segment)
        state: Literal["clean", "torn", "unsynced"] = "torn" if self._is_begun(here, position) else "clean"
        lost = 0
        for segment in self._from(position):
            is_synced, was_whole = self._was_whole(here, segment)
            for lsn, first_lsn, what in self._proofs(segment, position):
                if (first_lsn > position.lsn or lsn == position.lsn) if is_synced else was_whole:
                    reason = f"no intact record is there, but {what} behind it is intact"
                    raise self._damaged(position, self._missing(position.lsn) or reason)
                state = "torn" if is_synced else "unsynced"
                lost += lsn > 0 and not is_synced
        self._check_base(position)
        if missing := self._num_missing(position):
            state, lost = "unsynced", max(lost, missing)
        return LogEnd(position, state, lost)

    def _missing(self, lsn: int, last: float = math.inf) -> str:
        """Name the first segment that is missing; empty where none is.

        It is missing if one behind this LSN, up to the `last`, continues it.
        """
        ids = {segment.name.id for segment in self.segments}
        for one in self.segments:
            previous = one.header.previous if one.header and lsn < one.name.first_lsn <= last else 0
            if previous and previous not in ids:
                return f"the segment that {one.name} continues is missing, log-*-{previous:016x}"
        return ""

    def _check_base(self, position: LogPosition) -> None:
        """LogDamaged where the log ends before the last event of its base."""
        base = max(self._manifest.bases, key=lambda base: base.lsn, default=None)
        if base is not None and position.lsn <= base.lsn:
            path = str(self.folder / str(position.segment or ""))
            reason = f"the log ends there, but {base.name} has all events up to {base.lsn}"
            raise LogDamaged(path=path, offset=position.offset, lsn=position.lsn, reason=reason, remedy=NO_COPY)

    def _num_missing(self, position: LogPosition) -> int:
        """How many events the manifest knows of behind the end of the log; LogDamaged where they cannot be missing.

        The last process had synced all of them, or the kernel still has them, unless the machine was started anew. That
        may take records, but no file: the manifest came to the disk after its name.
        """
        known, segment = self._manifest.end_lsn, self._manifest.segment
        is_kept = self._manifest.mode == "fsync" or (self._boot != 0 and self._manifest.boot == self._boot)
        is_gone = segment and all(one.name.id != segment for one in self.segments)
        gone = f"log-*-{segment:016x} with that is missing" if is_gone else self._missing(position.lsn, known)
        if position.lsn < known and (is_kept or gone):
            reason = f"the log ends there, but {MANIFEST} says that it went up to LSN {known - 1}"
            raise self._damaged(position, f"{reason}: {gone}" if gone else reason)
        return max(0, known - position.lsn)

    def _was_whole(self, here: StoredSegment, behind: StoredSegment) -> tuple[bool, bool]:
        """Whether what one segment holds was on the disk before a later group of another began; before anything did."""
        (here_synced, here_boot), (behind_synced, behind_boot) = map(self._written, (here, behind))
        if here_synced or behind_synced:
            return True, True
        # the kernel had it, or a process read it from the disk after the machine had started anew
        is_next = behind.header is not None and behind.header.previous == here.name.id
        return False, behind_boot == self._boot or (is_next and here_boot != behind_boot)

    def _written(self, segment: StoredSegment) -> tuple[bool, int]:
        """Whether a segment was synced, and under which start of the machine it was written.

        One without a header is of the last process: those before it, it has read or removed.
        """
        if segment.header is None:
            return self._manifest.mode != "log", self._manifest.boot
        return bool(segment.header.flags & SegmentFlag.SYNCED), segment.header.boot

    def _proofs(self, segment: StoredSegment, position: LogPosition) -> Iterator[tuple[int, int, str]]:
        """Yield what is intact in a segment behind a place: LSN (0: the header), first LSN of its group, name."""
        is_here = segment.name == position.segment
        if segment.header and not is_here and segment.name.first_lsn > position.lsn:
            yield 0, segment.name.first_lsn, f"the header of {segment.name}"
        for record in self._intact(segment, position.offset if is_here else 0, position.lsn):
            header = record.header
            yield header.lsn, header.lsn - header.in_group, f"LSN {header.lsn} ({segment.name}, byte {record.offset})"

    def _intact(self, segment: StoredSegment, offset: int, lowest_lsn: int) -> Iterator[LoggedRecord]:
        """The intact records of a segment at and behind an offset, of these LSNs."""
        offset = max(offset, HEADER_BYTES)
        with closing(_SegmentBytes(self._disk, segment)) as data:
            while offset + HEADER_BYTES <= segment.size:
                piece = data.bytes_at(offset, min(_WINDOW_BYTES, segment.size - offset))
                if piece is None:
                    return  # it became shorter
                end = offset  # of the last intact record
                for start in find_headers(piece, segment.name.id, lowest_lsn):
                    if offset + start >= end and (record := data.record(offset + start)):
                        yield record
                        end = record.offset + record.header.num_bytes
                # the next header may lie across the end of these bytes
                offset = max(end, offset + max(len(piece) - HEADER_BYTES, 0) // 8 * 8 + 8)

    def _offset_of(self, segment: StoredSegment, offset: int, lsn: int) -> int:
        """Where an intact record of this LSN begins behind an offset; 0 where there is none."""
        return next((one.offset for one in self._intact(segment, offset, lsn) if one.header.lsn == lsn), 0)

    def _is_begun(self, segment: StoredSegment, position: LogPosition) -> bool:
        """Whether a part of the record with the LSN of a place is there."""
        with closing(self._disk.open(segment.path)) as file:
            start = file.pread(HEADER_BYTES, position.offset)
        if len(start) == HEADER_BYTES:
            header = read_record_header(start)
            return header is not None and (header.lsn, header.tag) == (position.lsn, tag_of(segment.name.id))
        return bool(start) and start.startswith(RECORD_MAGIC[: len(start)])

    def _damaged(self, position: LogPosition, reason: str) -> LogDamaged:
        path = self.folder / str(position.segment or "")
        remedy = (
            NO_COPY
            if position.lsn <= self._manifest.last_base_lsn
            else (
                "Restore the file from a copy of the folder; or truncate the log there: `embershard log truncate "
                f"{self.folder} --at {position.lsn}` prints what would be lost, and asks for confirmation"
            )
        )
        return LogDamaged(path=str(path), offset=position.offset, lsn=position.lsn, reason=reason, remedy=remedy)


class _SegmentBytes:
    """A segment's bytes, read in large pieces."""

    def __init__(self, disk: Disk, segment: StoredSegment) -> None:
        self._segment = segment
        self._file = disk.open(segment.path)
        self._start = 0
        self._data = memoryview(b"")

    def close(self) -> None:
        self._file.close()

    def bytes_at(self, offset: int, num_bytes: int, window: int = _WINDOW_BYTES) -> memoryview | None:
        """Bytes at an offset; None where the file has fewer. Where it reads, then `window` bytes or more."""
        if offset < self._start or offset + num_bytes > self._start + len(self._data):
            if offset + num_bytes > self._segment.size:
                return None
            self._start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            size = min(max(offset - self._start + num_bytes + HEADER_BYTES, window), self._segment.size - self._start)
            data = page_aligned(size)
            self._data = data[: self._file.pread_into(data, self._start)]
            if offset + num_bytes > self._start + len(self._data):
                return None
        at = offset - self._start
        return self._data[at : at + num_bytes]

    def record(self, offset: int, lsn: int | None = None) -> LoggedRecord | None:
        """The intact record at an offset, of this LSN if one is given; None where there is none."""
        start = self.bytes_at(offset, HEADER_BYTES, window=_PROBE_BYTES)
        header = None if start is None else read_record_header(start)
        if header is None or (lsn is not None and header.lsn != lsn):
            return None
        whole = self.bytes_at(offset, header.num_bytes)
        if whole is None or not is_intact(header, whole, self._segment.name.id):
            return None
        body = whole[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
        return LoggedRecord(header, body, self._segment.name, offset)
