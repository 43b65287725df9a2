"""The manifest of a shard's log: whose it is, and where it begins."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from embershard.proto.errors import EmbershardError, LogDamaged, LogMismatch, LogTooNew
from embershard.proto.snapshot.sealed import Fields, SealedFormat
from embershard.ps.journal.disk import Disk

MANIFEST = "MANIFEST"
VERSION = 2  # one without bases is written as version 1, which older readers know
_NEW = "MANIFEST.new"
_MOST_BYTES = 2**24

OTHER_LOG = "Name the folder of this shard's log, or an empty one to begin anew"
_OTHER_MODULE = (
    "The events were made with the file of then: start the shard with that, or, without the rows, on an empty folder"
)


def _damaged(where: str, reason: str) -> EmbershardError:
    remedy = "Restore it from a copy of the folder, or begin a new log in another folder"
    return LogDamaged(path=where, offset=0, lsn=0, reason=reason, remedy=remedy)


_SEALED = SealedFormat("embershard log", VERSION, _damaged, LogTooNew)


@dataclass(frozen=True, slots=True)
class LogBase:
    """An image of the shard after the event `lsn`; the events from `redo_lsn` on, at most `lsn`, are needed with it."""

    name: str
    lsn: int
    redo_lsn: int


@dataclass(frozen=True, slots=True)
class LogManifest:
    """The state of a log that changes rarely."""

    lineage: int  # random, of the shard's history
    shard: int
    num_shards: int
    term: int = 0  # of the shard's last primacy
    first_lsn: int = 1  # the log need not have those below it
    bases: tuple[LogBase, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)  # of the user's code that events need: sha256 by name
    package: str = ""  # version of embershard that wrote it
    mode: str = "fsync"  # of the last process: with "log" it synced nothing
    boot: int = 0  # the start of the machine under which it began to write; 0: not known
    end_lsn: int = 0  # behind the last event that was safe when this was written; 0: not known
    segment: int = 0  # id of the segment with that event, whose name was on the disk before this; 0: not known

    @property
    def last_base_lsn(self) -> int:
        """The event up to which the log cannot do without its base; 0 where it has none."""
        return max((base.lsn for base in self.bases), default=0)

    def check(self, folder: Path, shard: int, num_shards: int, lineage: int, modules: Mapping[str, str]) -> None:
        """LogMismatch where it is not the log of this shard, job (lineage 0: of any) and code."""
        facts = [("shard", f"{self.shard} of {self.num_shards}", f"{shard} of {num_shards}", OTHER_LOG)]
        if lineage:
            facts.append(("lineage", f"{self.lineage:016x}", f"{lineage:016x}", OTHER_LOG))
        for name in sorted(self.modules.keys() & modules.keys()):
            facts.append((f"module {name} with sha256", self.modules[name], modules[name], _OTHER_MODULE))
        for what, got, want, remedy in facts:
            if got != want:
                raise LogMismatch(path=str(folder / MANIFEST), what=what, got=got, want=want, remedy=remedy)


def read_manifest(disk: Disk, folder: Path) -> LogManifest | None:
    """The manifest of a folder; None where it has none. LogDamaged, LogTooNew."""
    path = folder / MANIFEST
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return None
    with closing(file):
        data = file.pread(_MOST_BYTES, 0)
    fields = _SEALED.unseal(data, str(path))
    modules = fields.get("modules", dict)
    if not all(isinstance(text, str) for pair in modules.items() for text in pair):
        raise fields.wrong("modules", "texts were expected")
    later: dict[str, Any] = {  # of versions that wrote them
        name: fields.get(name, kind)
        for name, kind in (("mode", str), ("boot", int), ("end_lsn", int), ("segment", int))
        if name in fields
    }
    manifest = LogManifest(
        fields.get("lineage", int),
        fields.get("shard", int),
        fields.get("num_shards", int),
        fields.get("term", int),
        fields.get("first_lsn", int),
        tuple(_base(base) for base in fields.maps("bases")),
        cast(dict[str, str], modules),
        fields.get("package", str),
        **later,
    )
    if not manifest.first_lsn:
        raise fields.wrong("first_lsn", "LSNs begin at 1")
    return manifest


def write_manifest(disk: Disk, folder: Path, manifest: LogManifest) -> None:
    """Put a manifest in the place of the folder's, on the disk and in one step."""
    plain = {name: getattr(manifest, name) for name in manifest.__slots__}
    plain["bases"] = [{"name": base.name, "lsn": base.lsn, "redo_lsn": base.redo_lsn} for base in manifest.bases]
    plain["modules"] = dict(manifest.modules)
    if _NEW in disk.list(folder):  # of a process that ended meanwhile
        disk.remove(folder / _NEW)
    with closing(disk.open(folder / _NEW, write=True, create=True)) as file:
        file.pwritev([_SEALED.seal(plain, VERSION if manifest.bases else 1)], 0)
        file.sync()
    disk.rename(folder / _NEW, folder / MANIFEST)
    disk.sync_folder(folder)


def _base(fields: Fields) -> LogBase:
    base = LogBase(fields.get("name", str), fields.get("lsn", int), fields.get("redo_lsn", int))
    if "/" in base.name or base.name.startswith("."):
        raise fields.wrong("name", f"{base.name[:100]!r} is no file of a log")
    return base
