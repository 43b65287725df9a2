"""The files that a log's records are in: the one that is written, the spares for those to come, those that are done."""

from __future__ import annotations

import errno
import os
import re
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from embershard.proto.clock import SYSTEM_CLOCK, SystemClock
from embershard.proto.errors import LogLocked
from embershard.ps.journal.disk import Disk, DiskFile, DiskLock
from embershard.ps.journal.manifest import LogManifest
from embershard.ps.journal.record import HEADER_BYTES, VERSION, SegmentFlag, SegmentHeader, encode_segment_header

SEGMENT_BYTES = 256 * 2**20
NUM_SPARES = 2
LOCK = "LOCK"
LOCK_LOST = f"another process, or was removed: its {LOCK} is not that of this process any more"

_NAME = re.compile(r"log-([0-9]{20})-([0-9a-f]{16})")
_SPARE = re.compile(r"spare-[0-9a-f]{16}")
_ZEROS = bytes(2**20)


class SegmentName(NamedTuple):
    """The name of a segment: the LSN of its first record, and its random id."""

    first_lsn: int
    id: int

    def __str__(self) -> str:
        return f"log-{self.first_lsn:020}-{self.id:016x}"

    @classmethod
    def parse(cls, name: str) -> SegmentName | None:
        """The name of a file; None where it is no segment's."""
        match = _NAME.fullmatch(name)
        return cls(int(match[1]), int(match[2], 16)) if match else None


def is_spare(name: str) -> bool:
    """Whether a file of this name is a spare segment."""
    return _SPARE.fullmatch(name) is not None


class SyncFailed(Exception):
    """The disk did not take what was written to it, and what it holds now is not known (Rebello et al., ATC 2020)."""


def random_id() -> int:
    """An id of a segment."""
    return SYSTEM_CLOCK.random_bits(64) or 1


class SegmentWriter:
    """The segment at the end of a log, and its spares.

    `write`, `sync` and `rotate` belong to the thread that writes the log; `prepare_spare` and `recycle` to another one.
    `segments` are those that the log of this manifest has already, `previous` is the id of the last of them.
    """

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        lock: DiskLock,
        manifest: LogManifest,
        *,
        segments: Sequence[SegmentName],
        previous: int,
        segment_bytes: int = SEGMENT_BYTES,
        new_id: Callable[[], int] = random_id,
        clock: SystemClock = SYSTEM_CLOCK,
    ) -> None:
        self.folder = folder
        self.syncs = manifest.mode == "fsync"  # what is written counts only once it is on the disk
        self.no_room: OSError | None = None  # why the last spare could not be made
        self.limit_bytes: int | None = None  # of all segments, beyond which no spare is made
        self.wants_spare = clock.event()
        self.wants_spare.set()
        self._disk = disk
        self._lock = lock
        self._shard, self._lineage = manifest.shard, manifest.lineage
        self._segment_bytes = segment_bytes
        self._new_id = new_id
        self._boot = disk.boot_id()
        self._names_lock = clock.lock()
        self._names = sorted(segments)
        self._sizes = {name: self._size_of(folder / str(name)) for name in segments}
        self._spares_lock = clock.lock()  # of what makes spares
        self._previous = previous
        # The last that was freed is used first: the kernel still has its pages, and others need never be touched.
        self._spares: deque[Path] = deque()
        # At a time, by a base. So many more spares are kept: as many are needed before the next base, and to fill
        # others with zeros costs more than to write a record.
        self._most_freed = 0
        self._file: DiskFile | None = None
        self._name = SegmentName(0, 0)
        self._size = self._end = 0
        self._find_spares()

    @property
    def id(self) -> int:
        """The id of the segment that is written."""
        return self._name.id

    @property
    def left_bytes(self) -> int:
        """Bytes that still fit into the segment that is written."""
        return self._size - self._end

    @property
    def room_bytes(self) -> int:
        """Bytes of the log for which the disk has given room already."""
        return self.left_bytes + len(self._spares) * (self._segment_bytes - HEADER_BYTES)

    @property
    def is_locked(self) -> bool:
        """Whether the folder is still this process's."""
        return self._lock.is_held()

    @property
    def names(self) -> list[SegmentName]:
        """The segments of the log, by LSN."""
        with self._names_lock:
            return list(self._names)

    @property
    def file_bytes(self) -> int:
        """Bytes of the files of the log's segments, and of the spares."""
        with self._names_lock:
            return sum(self._sizes.values()) + len(self._spares) * self._segment_bytes

    def names_from(self, lsn: int) -> list[SegmentName]:
        """The segments that have the records from this LSN on."""
        with self._names_lock:
            return self._names[self._first_with(lsn) :]

    def _first_with(self, lsn: int) -> int:
        return max(0, sum(name.first_lsn <= lsn for name in self._names) - 1)

    def bytes_up_to(self, lsn: int) -> int:
        """Bytes of the files of segments that begin up to an LSN; one at least."""
        with self._names_lock:
            return max(self._segment_bytes, sum(size for name, size in self._sizes.items() if name.first_lsn <= lsn))

    @property
    def segment_bytes(self) -> int:
        """Bytes of a segment, unless one record needs more."""
        return self._segment_bytes

    @property
    def at_limit(self) -> bool:
        """Whether a spare is wanted and `limit_bytes` does not allow one more."""
        limit = self.limit_bytes
        return limit is not None and len(self._spares) < NUM_SPARES and self.file_bytes + self._segment_bytes > limit

    def write(self, pieces: list[bytes | memoryview], num_bytes: int) -> None:
        """Write at the end of the segment, and with it, its header if it has none yet. Nothing moves on an OSError."""
        assert self._file is not None
        assert num_bytes <= self.left_bytes
        if self._end > HEADER_BYTES:
            self._file.pwritev(pieces, self._end)
        else:
            self._file.pwritev([self._header(), *pieces], 0)
        self._end += num_bytes

    def sync(self) -> None:
        """Wait until the disk has what was written. SyncFailed."""
        assert self._file is not None
        _sync(self._file.sync, self.folder / str(self._name))

    def rotate(self, first_lsn: int, num_bytes: int) -> None:
        """Continue in a new segment with room for a record of `num_bytes`. On an OSError the old one stays in use.

        SyncFailed, or LogLocked where the folder is another process's now.
        """
        if not self.is_locked:
            raise LogLocked(path=str(self.folder), holder=LOCK_LOST)
        name = SegmentName(first_lsn, self._new_id())
        size = max(self._segment_bytes, HEADER_BYTES + num_bytes)
        path = self.folder / str(name)
        file = self._open(path, size)
        if self.syncs:
            _sync(lambda: self._disk.sync_folder(self.folder), self.folder)
        self._previous = self._name.id or self._previous
        if self._file is not None:
            self._file.close()
        self._file, self._name, self._size, self._end = file, name, size, HEADER_BYTES
        with self._names_lock:
            insort(self._names, name)
            self._sizes[name] = size
        self.wants_spare.set()

    def prepare_spare(self) -> bool:
        """Make a segment that has its room on the disk already; whether one more is wanted.

        Where records are synced it is filled with zeros: a sync then writes records alone, and nothing of where the
        file's blocks are. Else the disk reserves them, which takes no time.

        An OSError is kept in `no_room` until a spare can be made, as is the limit of all segments.
        """
        with self._spares_lock:
            return self._prepare_spare()

    def _prepare_spare(self) -> bool:
        if len(self._spares) >= NUM_SPARES:
            self.no_room = None
            return False
        if self.at_limit:
            self.no_room = OSError(errno.EDQUOT, "the folder has the bytes that --log-bytes allows")
            return False
        if self._disk.free_bytes(self.folder) < self._segment_bytes:  # to try would take all that others need
            self.no_room = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise self.no_room
        path = self._spare_path()
        try:
            with closing(self._disk.open(path, write=True, create=True)) as file:
                if not self.syncs:
                    file.reserve(self._segment_bytes)
                else:
                    for offset in range(0, self._segment_bytes, len(_ZEROS)):
                        file.pwritev([memoryview(_ZEROS)[: self._segment_bytes - offset]], offset)
                    file.sync()  # else the first fdatasync of a group would write all of them
        except OSError as error:
            self.no_room = error
            with suppress(OSError):
                self._disk.remove(path)
            raise
        self.no_room = None
        self._spares.appendleft(path)
        return len(self._spares) < NUM_SPARES

    def recycle(self, redo_lsn: int) -> None:
        """Make spares of the segments that have only records below `redo_lsn`, or remove them."""
        with self._spares_lock:
            self._recycle(redo_lsn)
        self.wants_spare.set()

    def _recycle(self, redo_lsn: int) -> None:
        with self._names_lock:
            done = self._names[: self._first_with(redo_lsn)]
        self._most_freed = max(self._most_freed, len(done))
        most = NUM_SPARES + self._most_freed
        for name in done:
            path = self.folder / str(name)
            if self.limit_bytes is not None and self.file_bytes > self.limit_bytes:
                most = NUM_SPARES
            if len(self._spares) < most and self._size_of(path) == self._segment_bytes:
                spare = self._spare_path()
                self._disk.rename(path, spare)
                self._spares.append(spare)
            else:
                self._disk.remove(path)
            with self._names_lock:
                self._names.remove(name)
                del self._sizes[name]

    def close(self) -> None:
        """Close the segment that is written."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _header(self) -> bytes:
        flags = SegmentFlag.SYNCED if self.syncs else 0
        name, previous = self._name, self._previous
        return encode_segment_header(
            SegmentHeader(VERSION, flags, self._shard, self._lineage, name.first_lsn, name.id, previous, self._boot)
        )

    def _open(self, path: Path, size: int) -> DiskFile:
        """A file of this size: a spare that gets the name, or a new one."""
        if self._spares and size == self._segment_bytes:
            spare = self._spares.pop()
            try:
                self._disk.rename(spare, path)
            except OSError:
                self._spares.append(spare)
                raise
            return self._disk.open(path, write=True)
        file = self._disk.open(path, write=True, create=True)
        try:
            file.truncate(size)
        except OSError:
            file.close()
            with suppress(OSError):
                self._disk.remove(path)
            raise
        return file

    def _find_spares(self) -> None:
        """Take the spares that an earlier process left; what it did not finish is removed."""
        for name in filter(is_spare, self._disk.list(self.folder)):
            path = self.folder / name
            if len(self._spares) < NUM_SPARES and self._size_of(path) == self._segment_bytes:
                self._spares.append(path)
            else:
                self._disk.remove(path)

    def _size_of(self, path: Path) -> int:
        with closing(self._disk.open(path)) as file:
            return file.size()

    def _spare_path(self) -> Path:
        return self.folder / f"spare-{self._new_id():016x}"


def _sync(sync: Callable[[], None], path: Path) -> None:
    try:
        sync()
    except OSError as error:
        raise SyncFailed(f"{path}: {error.strerror or error}") from error
