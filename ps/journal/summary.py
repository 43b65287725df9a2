"""What a log holds, without locking it: a shard may be writing it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from embershard.proto.errors import LogDamaged, LogUnusable
from embershard.ps.journal.disk import Disk, LocalDisk
from embershard.ps.journal.folder import manifest_of, named_errors
from embershard.ps.journal.manifest import MANIFEST, LogManifest
from embershard.ps.journal.reader import LogEnd, LogReader
from embershard.ps.journal.record import SegmentFlag
from embershard.ps.journal.segments import SegmentName

_TRIES = 3


@dataclass(slots=True)
class SegmentSummary:
    """The records of one segment; its LSNs are 0 where it has none."""

    name: SegmentName
    size: int  # of the file
    is_synced: bool
    first_lsn: int = 0
    last_lsn: int = 0
    records: int = 0
    num_bytes: int = 0


@dataclass(slots=True)
class LogSummary:
    """The records of a log up to its end, or to the damage."""

    folder: Path
    manifest: LogManifest
    segments: list[SegmentSummary] = field(default_factory=list)
    kinds: Counter[int] = field(default_factory=Counter)  # records of each
    kind_bytes: Counter[int] = field(default_factory=Counter)
    term: int = 0  # of the last record
    end: LogEnd | None = None
    damage: LogDamaged | None = None


def find_logs(path: Path) -> list[Path]:
    """The folders of shards' logs at a path: itself, or those in it. LogUnusable where none is."""
    if (path / MANIFEST).exists() or any(path.glob("log-*")):
        return [path]
    found = [one for one in path.glob("shard-*") if one.is_dir()]
    found.sort(key=lambda one: (len(one.name), one.name))  # shard-2 before shard-10
    if not found:
        raise LogUnusable(
            path=str(path), reason=f"neither it nor a folder shard-S in it has a {MANIFEST}; name that of --log-dir"
        )
    return found


def summarize(folder: Path, disk: Disk | None = None) -> LogSummary:
    """Read a whole log. LogUnusable, LogMismatch, LogTooNew; damage is a part of the summary."""
    disk = disk or LocalDisk()
    place: tuple[object, ...] = ()
    for left in range(_TRIES - 1, -1, -1):
        try:
            with named_errors(folder):
                summary = _read(folder, disk)
        except LogUnusable as error:
            if not left or not isinstance(error.__cause__, FileNotFoundError):
                raise
            continue  # a running shard gave up a segment that was listed
        before, place = place, () if summary.damage is None else tuple(summary.damage.fields.values())
        if not place or place == before:
            break  # what a running shard was just writing may look like damage, and is none at the next look
    return summary


def _read(folder: Path, disk: Disk) -> LogSummary:
    manifest = manifest_of(folder, disk)
    summary = LogSummary(folder, manifest)
    try:
        reader = LogReader(disk, folder, manifest)
        segments = {
            one.name: SegmentSummary(one.name, one.size, bool(one.header and one.header.flags & SegmentFlag.SYNCED))
            for one in reader.segments
        }
        summary.segments = list(segments.values())
        for record in reader.records():
            header, segment = record.header, segments[record.segment]
            segment.first_lsn = segment.first_lsn or header.lsn
            segment.last_lsn = header.lsn
            segment.records += 1
            segment.num_bytes += header.num_bytes
            summary.kinds[header.kind] += 1
            summary.kind_bytes[header.kind] += header.num_bytes
            summary.term = header.term
        summary.end = reader.end
    except LogDamaged as damage:
        summary.damage = damage
    return summary
