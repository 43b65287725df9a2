"""The folder of a shard's log: locked, read, cut where it ends, and continued."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from embershard.proto.clock import SYSTEM_CLOCK, SystemClock
from embershard.proto.errors import EmbershardError, LogDamaged, LogLocked, LogMismatch, LogUnusable
from embershard.ps.journal.disk import NO_DESCRIPTORS, Disk, DiskLock, LocalDisk
from embershard.ps.journal.journal import Journal
from embershard.ps.journal.manifest import MANIFEST, OTHER_LOG, LogBase, LogManifest, read_manifest, write_manifest
from embershard.ps.journal.progress import RecoveryProgress
from embershard.ps.journal.reader import LoggedRecord, LogPosition, LogReader
from embershard.ps.journal.record import HEADER_BYTES
from embershard.ps.journal.segments import (
    LOCK,
    LOCK_LOST,
    SEGMENT_BYTES,
    SegmentName,
    SegmentWriter,
    SyncFailed,
    is_spare,
    random_id,
)

DurabilityMode = Literal["log", "fsync"]

_log = logging.getLogger(__name__)
_OF_SHARD = re.compile(r"shard-[0-9]+")
_BASE = re.compile(r"base-[0-9]{20}-[0-9a-f]{16}")
_PIECE_BYTES = 2**20
_MANIFEST_ROOM = 2**12  # bytes, about: a new manifest stands beside the old one before it replaces it
_LINE_SECONDS = 5  # between lines about a full disk
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # also of files and of quotas, of which the free bytes say nothing
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def log_folder(log_dir: Path, shard: int) -> Path:
    """The folder of a shard in the folder of all logs."""
    return log_dir / f"shard-{shard}"


def check_log_dir(log_dir: Path, shard: int, num_shards: int, disk: Disk | None = None) -> None:
    """Before a shard begins a log: LogUnusable in the folder of one log, LogMismatch beside those of other jobs."""
    disk = disk or LocalDisk()
    try:
        names = set(disk.list(log_dir))
    except OSError:  # what is wrong with it shows when it is used
        return
    if MANIFEST in names:
        reason = f"it is the log of one shard; name the folder above it, {log_dir.parent}"
        raise LogUnusable(path=str(log_dir), reason=reason)
    for name in sorted(filter(_OF_SHARD.fullmatch, names - {f"shard-{shard}"})):
        manifest = None
        with suppress(OSError, EmbershardError):  # it is another shard's to say so
            manifest = read_manifest(disk, log_dir / name)
        if manifest is not None and manifest.num_shards != num_shards:
            path, got, want = str(log_dir / name / MANIFEST), str(manifest.num_shards), str(num_shards)
            raise LogMismatch(path=path, what="a shard of", got=got, want=want, remedy=OTHER_LOG)


def remove_base(disk: Disk, path: Path) -> None:
    """Remove a base's folder, finished or not."""
    for name in disk.list(path):
        disk.remove(path / name)
    disk.remove_folder(path)


@dataclass(frozen=True, slots=True)
class LostRecords:
    """The records that a cut takes: how many of each kind, their bytes, and the highest LSN (0: none)."""

    kinds: Mapping[int, int]
    num_bytes: int
    last_lsn: int


class LogFolder:
    """A log that this process has locked. Close it after use.

    Read its `records`, then `begin` to append; or `cut` it. LogLocked, LogUnusable, LogDamaged, LogTooNew.
    """

    def __init__(self, folder: Path, disk: Disk, lock: DiskLock, manifest: LogManifest, new_id: Callable[[], int]):
        self.folder = folder
        self.manifest = manifest
        self.disk = disk
        self._is_new = not manifest.term
        self._lock = lock
        self._new_id = new_id
        self._reader: LogReader | None = None
        self._inherited: set[SegmentName] = set()  # of which a sync of an earlier process may have failed
        self._manifest_lock = SYSTEM_CLOCK.lock()  # of the threads that change the manifest, once there are any

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        shard: int,
        num_shards: int,
        lineage: int = 0,
        modules: Mapping[str, str] | None = None,
        package: str = "",
        disk: Disk | None = None,
        new_id: Callable[[], int] = random_id,
    ) -> Self:
        """Lock the log of a shard, and begin one where there is none.

        `modules` is the sha256 of each module with the user's row functions and codecs. LogMismatch where it is not the
        log of this shard, lineage (0: any) and code.
        """
        disk = disk or LocalDisk()
        modules = modules or {}
        with named_errors(folder):
            disk.make_folder(folder)
        lock = _locked(disk, folder)
        try:
            with named_errors(folder):
                manifest = read_manifest(disk, folder)
                if manifest is None:
                    _refuse_segments(disk, folder)
                    manifest = LogManifest(lineage or new_id(), shard, num_shards, modules=modules, package=package)
                    write_manifest(disk, folder, manifest)
            manifest.check(folder, shard, num_shards, lineage, modules)
            known = {**manifest.modules, **modules}
            return cls(folder, disk, lock, replace(manifest, modules=known, package=package), new_id)
        except BaseException:
            lock.close()
            raise

    @classmethod
    def existing(cls, folder: Path, *, disk: Disk | None = None) -> Self:
        """Lock a log that is there, whosever it is. LogUnusable where none is."""
        disk = disk or LocalDisk()
        manifest_of(folder, disk)  # a folder that is no log gets no lock
        lock = _locked(disk, folder)
        try:
            return cls(folder, disk, lock, manifest_of(folder, disk), random_id)
        except BaseException:
            lock.close()
            raise

    @property
    def reader(self) -> LogReader:
        """The reader of the log as it was when it was locked."""
        if self._reader is None:
            with named_errors(self.folder):
                self._reader = LogReader(self.disk, self.folder, self.manifest)
        return self._reader

    @property
    def num_bytes(self) -> int:
        """Bytes of the records, about."""
        with named_errors(self.folder):
            return self.reader.num_bytes

    def close(self) -> None:
        """Let another process have the folder."""
        self._lock.close()

    def records(self, from_lsn: int = 0) -> Iterator[LoggedRecord]:
        """The records from an LSN on. LogDamaged."""
        with named_errors(self.folder):
            records = self.reader.records(from_lsn)
            yield from self.disk.read_ahead(records, lambda record: record.header.num_bytes)

    def begin(
        self,
        mode: DurabilityMode,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        progress: RecoveryProgress | None = None,
        clock: SystemClock = SYSTEM_CLOCK,
    ) -> Journal:
        """Open the log for writing in a new term; all records must have been read. LogUnusable, and see `when_room`."""
        end = self.reader.end
        assert end is not None, "read the records to their end first"
        progress = progress or RecoveryProgress(clock)
        with named_errors(self.folder):
            if end.state == "unsynced":
                _log.warning(
                    "%s: the event log ends before LSN %d, and %d later events or more are lost: the machine was "
                    "restarted before everything was on disk",
                    self.folder, end.position.lsn, end.lost_records,
                )  # fmt: skip
            if self.manifest.segment:  # first: it may have no record
                self.when_room(partial(self.update_manifest, segment=0), progress)
            kept = self._cut(end.position)  # which frees what the last process had reserved
            self._remove_other_bases()
            self.when_room(partial(self._check_room, segment_bytes), progress)
            self._inherited = set(kept)
            if mode == "fsync":  # what the last process wrote may be in the kernel only, and is built on from here
                is_synced = self.manifest.mode == "fsync"
                write_again = self._write_group_again if is_synced else self._write_inherited_again
                self.when_room(partial(write_again, kept), progress)
                self._sync(kept)
            self._manifest_lock = clock.lock()
            term, boot = self.manifest.term + 1, self.disk.boot_id()
            fields = {"term": term, "mode": mode, "boot": boot, "end_lsn": end.position.lsn}
            self.when_room(partial(self.update_manifest, **fields), progress)
            segments = SegmentWriter(
                self.disk,
                self.folder,
                self._lock,
                self.manifest,
                segments=kept,
                previous=self.reader.id_before(end.position),
                segment_bytes=segment_bytes,
                new_id=self._new_id,
                clock=clock,
            )
        return Journal(segments, next_lsn=end.position.lsn, term=self.manifest.term, clock=clock)

    def when_room(self, write: Callable[[], object], progress: RecoveryProgress) -> None:
        """Call `write` again and again until the disk, and its quotas, have room for what it writes.

        A shard that ended in place of that would only be started again, until nobody does. A new log has nothing to
        lose: its OSError is raised, as any other is.
        """
        waited = 0
        while True:
            try:
                write()
                progress.waits_for_room = ""
                return
            except OSError as error:
                if self._is_new or error.errno not in _NO_ROOM:
                    raise
                reason = error.strerror or str(error)
                if waited == 0 and self._free_room():
                    continue
                if waited % _LINE_SECONDS == 0:  # again and again: a supervisor waits as long as there are lines
                    _log.warning("%s: the event log cannot go on: %s; the shard waits for room", self.folder, reason)
            progress.wait_for_room(reason, 1.0)
            waited += 1

    def _free_room(self) -> bool:
        """Remove bases of ended processes, of which one may have filled the disk; whether there were any."""
        kept = {base.name for base in self.manifest.bases}
        if not any(_BASE.fullmatch(name) and name not in kept for name in self.reader.files):
            return False
        self.reader.files = []  # once: what is full without them has to be waited for
        with suppress(OSError):  # of a full disk, too
            self.disk.sync_folder(self.folder)  # a loss of power must not bring a manifest back that names what goes
            self._remove_other_bases()
        return True

    def new_base(self, lsn: int) -> Path:
        """A folder for the image of the shard after an event: none has had its name."""
        return self.folder / f"base-{lsn:020}-{self._new_id():016x}"

    def recycle(self, journal: Journal, bases: tuple[LogBase, ...]) -> None:
        """Begin the log with these, an image and its increments, and give up the events and bases that they replace.

        They are on the disk, and the events up to the last one's are safe. SyncFailed, LogLocked: the process has to
        end. OSError: the log begins with them or with what it began with before, and has too many files.
        """
        segments, base = journal.segments, bases[-1]
        if not segments.is_locked:
            raise LogLocked(path=str(self.folder), holder=LOCK_LOST)
        if not segments.syncs:  # a loss of power must not leave the log shorter than its base
            try:
                needed = [name for name in segments.names_from(base.redo_lsn) if name.first_lsn <= base.lsn]
                self._write_inherited_again(needed)
                self._sync(needed)
                self.disk.sync_folder(self.folder)
            except OSError as error:
                if error.errno in NO_DESCRIPTORS:  # it was not tried
                    raise
                raise SyncFailed(f"{self.folder}: {error.strerror or error}") from error
        self.update_manifest(first_lsn=base.redo_lsn, bases=bases, **self._end_of(journal))
        segments.recycle(base.redo_lsn)
        self._remove_other_bases()

    def record_end(self, journal: Journal) -> None:
        """Have the manifest say how far the log goes, and in which segment, unless it names that one already.

        Where this file is lost later, the log ends too early, and is refused. LogLocked: the process has to end.
        OSError: the manifest may not say it yet.
        """
        end = self._end_of(journal)
        if end["segment"] == self.manifest.segment:
            return
        if not journal.segments.is_locked:  # the manifest is another process's, of a later term
            raise LogLocked(path=str(self.folder), holder=LOCK_LOST)
        if not journal.segments.syncs:  # the segment's name first: not every file system keeps the order of names
            self.disk.sync_folder(self.folder)
        self.update_manifest(**end)

    def _end_of(self, journal: Journal) -> dict[str, int]:
        """The fields of a manifest that say how far a log goes now."""
        safe = journal.safe.lsn
        return {"end_lsn": safe + 1, "segment": journal.segments.names_from(safe)[0].id}

    def update_manifest(self, **fields: Any) -> None:
        """Put a manifest with other values of these fields in the place of the folder's."""
        with self._manifest_lock:
            manifest = replace(self.manifest, **fields)
            write_manifest(self.disk, self.folder, manifest)
            self.manifest = manifest

    def lost_by_cut(self, lsn: int) -> LostRecords:
        """Count what `cut` at this LSN would remove, also intact records behind damage. Errors as those of `cut`."""
        self._check_cut(lsn)
        kinds: Counter[int] = Counter()
        num_bytes = last_lsn = 0
        with named_errors(self.folder):
            for record in self.reader.intact_behind(self.reader.find(lsn)):
                kinds[record.header.kind] += 1
                num_bytes += record.header.num_bytes
                last_lsn = max(last_lsn, record.header.lsn)
        return LostRecords(kinds, num_bytes, last_lsn)

    def cut(self, lsn: int) -> None:
        """Remove all records from this LSN on. LogDamaged below it; LogUnusable where a base needs it."""
        self._check_cut(lsn)
        with named_errors(self.folder):
            position = self.reader.find(lsn)
            if self.manifest.end_lsn > lsn:  # first: the log may end there from here on
                self.update_manifest(end_lsn=lsn, segment=0)
            self._sync(self._cut(position))
        self._reader = None

    def _check_cut(self, lsn: int) -> None:
        if lsn <= (needed := self.manifest.last_base_lsn):
            reason = (
                f"it cannot be cut at LSN {lsn}: the shard's image has all events up to {needed}. To give those up, "
                "too, begin a new log in another folder, and restore a snapshot of the job"
            )
            raise LogUnusable(path=str(self.folder), reason=reason)

    def _cut(self, position: LogPosition) -> list[SegmentName]:
        """Remove what is behind a place, the last file first, so that at no time a gap is left; what is kept.

        A segment without a record goes, too: the next one begins at its LSN.
        """
        kept = []
        first_lsn = position.lsn if position.segment is None else position.segment.first_lsn
        for segment in reversed(self.reader.segments):
            is_here = segment.name == position.segment and position.offset > HEADER_BYTES
            if segment.name.first_lsn >= first_lsn and not is_here:
                self.disk.remove(segment.path)
                continue
            kept.append(segment.name)
            if is_here and segment.size > position.offset:
                with closing(self.disk.open(segment.path, write=True)) as file:
                    file.truncate(position.offset)
        self.disk.sync_folder(self.folder)
        return kept[::-1]

    def _remove_other_bases(self) -> None:
        """Remove the bases that the manifest does not name: older ones, and what an ended process began."""
        kept = {base.name for base in self.manifest.bases}
        for name in self.disk.list(self.folder):
            if _BASE.fullmatch(name) and name not in kept:
                remove_base(self.disk, self.folder / name)

    # Where a sync failed, the process ended, and the kernel may say that what only it has is on the disk (Rebello et
    # al., ATC 2020): a sync of the next process would do nothing then. So what an earlier process may have failed to
    # sync is written again before it is synced: of mode `fsync` its last group, of mode `log` all that is needed.

    def _write_group_again(self, kept: list[SegmentName]) -> None:
        """Write the last group again, and its segment's header."""
        group = self.reader.last_group
        if group is None or group.segment not in kept:
            return
        with closing(self.disk.open(self.folder / str(group.segment), write=True)) as file:
            for start, end in ((0, HEADER_BYTES), (group.offset, file.size())):
                file.pwritev([file.pread(end - start, start)], start)

    def _write_inherited_again(self, names: list[SegmentName]) -> None:
        """Write those of the segments again that are of earlier processes, once."""
        for name in self._inherited.intersection(names):
            with closing(self.disk.open(self.folder / str(name), write=True)) as file:
                for offset in range(0, file.size(), _PIECE_BYTES):
                    file.pwritev([file.pread(_PIECE_BYTES, offset)], offset)
            self._inherited.remove(name)

    def _check_room(self, segment_bytes: int) -> None:
        """OSError where one segment and a manifest have no room."""
        has_spare = any(map(is_spare, self.disk.list(self.folder)))
        needed = (0 if has_spare else segment_bytes) + (0 if self._is_new else _MANIFEST_ROOM)
        free = self.disk.free_bytes(self.folder)
        if free < needed:
            reason = f"{os.strerror(errno.ENOSPC)}, it needs {needed} bytes and {free} are free"
            raise OSError(errno.ENOSPC, reason, str(self.folder))

    def _sync(self, names: list[SegmentName]) -> None:
        for name in names:
            with closing(self.disk.open(self.folder / str(name), write=True)) as file:
                file.sync()


def manifest_of(folder: Path, disk: Disk) -> LogManifest:
    """The manifest of a log that is there. LogUnusable where none is, LogDamaged, LogTooNew."""
    with named_errors(folder):
        try:
            manifest = read_manifest(disk, folder)
        except (FileNotFoundError, NotADirectoryError):
            manifest = None
        if manifest is None:
            with suppress(FileNotFoundError, NotADirectoryError):
                _refuse_segments(disk, folder)
            raise LogUnusable(path=str(folder), reason=f"it has no {MANIFEST}; name the folder of one shard's log")
    return manifest


def _refuse_segments(disk: Disk, folder: Path) -> None:
    """LogDamaged where segments are there although the manifest is not."""
    names = sorted(filter(None, map(SegmentName.parse, disk.list(folder))))
    if names:
        remedy = "Restore it from a copy of the folder, or begin a new log in another folder"
        path, lsn = str(folder / MANIFEST), names[0].first_lsn
        raise LogDamaged(path=path, offset=0, lsn=lsn, reason="it is missing, but segments are here", remedy=remedy)


def _locked(disk: Disk, folder: Path) -> DiskLock:
    with named_errors(folder):
        try:
            return disk.lock(folder / LOCK)
        except BlockingIOError as error:
            raise LogLocked(path=str(folder), holder=error.strerror or "another process") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            reason = f"its file system has no locks that hold ({error.strerror}); choose a folder on a local disk"
            raise LogUnusable(path=str(folder), reason=reason) from None


@contextmanager
def named_errors(folder: Path) -> Iterator[None]:
    """Name the folder in what the system says about it."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror or error}; correct that, or choose another folder"
        raise LogUnusable(path=error.filename or str(folder), reason=reason) from error
