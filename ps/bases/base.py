"""A base: the image of a shard after one of its events, as files in a folder of its log.

docs/durability.md has the format. Files of rows are those of a snapshot (safetensors), in the order of slots; they have
checksums by pieces of XXH3-64, which finds what a disk does to them and costs a twentieth of sha256.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from embershard.proto.arrays import Ids
from embershard.proto.errors import EmbershardError, LogDamaged, LogMismatch, LogTooNew, OtherOptimizer
from embershard.proto.snapshot.blocks import block_header, rows_per_file
from embershard.proto.snapshot.manifest import plain_spec, read_spec
from embershard.proto.snapshot.sealed import Fields, SealedFormat
from embershard.proto.spec import TableSpec
from embershard.ps.journal.disk import Disk, LocalDisk, page_aligned
from embershard.ps.journal.manifest import LogBase, LogManifest
from embershard.ps.journal.reader import NO_COPY
from embershard.ps.table.frozen import CopyOnWriteRows, FrozenTable, RowBlock
from embershard.ps.table.frozen_kernels import Slots
from embershard.ps.table.table import Table

BASE = "base.msgpack"
VERSION = 1
PIECE_BYTES = 4 * 2**20  # of a file, under one checksum
_MOST_BYTES = 2**31  # of BASE: what the state has beside its rows
_LENGTH_BYTES = 8


def _damaged(where: str, reason: str) -> EmbershardError:
    return LogDamaged(path=where, offset=0, lsn=0, reason=reason, remedy=NO_COPY)


_SEALED = SealedFormat("embershard base", VERSION, _damaged, LogTooNew)


@dataclass(frozen=True, slots=True)
class RowFile:
    """Some rows of a table, with the XXH3-64 of each PIECE_BYTES of the file."""

    name: str
    bytes: int
    rows: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TableImage:
    """A table of a base; a row has dim weights and num_state floats of optimizer state.

    Of an increment there are only the rows that were changed or made since the base before, and the ids of those that
    were removed.
    """

    spec: TableSpec
    num_state: int
    files: tuple[RowFile, ...]
    increment: bool = False
    removed: Ids = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def num_rows(self) -> int:
        """The number of rows that the files of this table hold."""
        return sum(file.rows for file in self.files)


@dataclass(frozen=True, slots=True)
class ShardBase:
    """The manifest of a base: its LSN and its files of rows. `control` is the state beside the rows (ps/core.py)."""

    lineage: int  # the log's
    shard: int
    num_shards: int
    lsn: int
    redo_lsn: int
    tables: tuple[TableImage, ...]
    control: dict[str, Any]
    parent: str = ""  # name of the base before, whose rows count where this one has no others

    @property
    def num_bytes(self) -> int:
        """Bytes of its rows' files."""
        return sum(file.bytes for table in self.tables for file in table.files)

    @property
    def num_rows(self) -> int:
        """The number of rows that the files of all tables hold."""
        return sum(table.num_rows for table in self.tables)


def write_base(
    disk: Disk,
    path: Path,
    log: LogManifest,
    control: dict[str, Any],
    tables: Sequence[FrozenTable],
    parent: str = "",
    go_on: Callable[[], None] = lambda: None,
) -> ShardBase:
    """Write the image of a shard of this log into a new folder, which is on the disk then.

    `control` and the frozen rows are of one moment. With a `parent`, of tables whose changes since it are known only
    these are written. A table is thawed once it is written. `go_on` is called often, and ends the work by what it
    raises. OSError.
    """
    disk.make_folder(path)
    images = []
    for number, (table, rows, changed) in enumerate(tables):
        changed = changed if parent else None
        files = tuple(_write_rows(disk, path, number, table.spec, rows, rows.slots(changed), go_on))
        image = TableImage(table.spec, rows.num_state, files)
        if changed is not None:
            image = replace(image, increment=True, removed=changed.removed_ids())
        images.append(image)
        table.thaw(rows)
    lsn, redo_lsn = range_of(control)
    base = ShardBase(log.lineage, log.shard, log.num_shards, lsn, redo_lsn, tuple(images), control, parent)
    _write_file(disk, path / BASE, [_SEALED.seal(_plain(base))])
    disk.sync_folder(path)
    disk.sync_folder(path.parent)
    return base


def range_of(control: dict[str, Any]) -> tuple[int, int]:
    """The LSN of a state, and the first that is needed with it: that of the oldest push that waits for its clock.

    That is at most its own LSN, so that a log with a base is never empty: a missing file shows.
    """
    return control["lsn"], min([control["lsn"], *control["clock"]["pending"]])


def read_base(disk: Disk, path: Path, log: LogManifest, named: LogBase) -> ShardBase:
    """Read the manifest of a base. LogDamaged; LogMismatch where it is another log's; LogTooNew."""
    where = str(path / BASE)
    try:
        data = _read_file(disk, path / BASE, _MOST_BYTES)
    except FileNotFoundError:
        raise _damaged_at(where, 0, named.lsn, "the file is missing") from None
    base = _base(_SEALED.unseal(data, where))
    for what, got, want in (
        ("shard", f"{base.shard} of {base.num_shards}", f"{log.shard} of {log.num_shards}"),
        ("lineage", f"{base.lineage:016x}", f"{log.lineage:016x}"),
        ("LSN", str(base.lsn), str(named.lsn)),
    ):
        if got != want:
            remedy = "Restore the folder of this base from a copy"
            raise LogMismatch(path=str(path), what=what, got=got, want=want, remedy=remedy)
    return base


def blocks_of(disk: Disk, path: Path, base: ShardBase, table: TableImage) -> Iterator[RowBlock]:
    """The rows of a table of a base, file by file, each until the next is taken. LogDamaged."""
    largest = max((file.bytes for file in table.files), default=0)
    buffers = page_aligned(largest), page_aligned(largest)  # new memory for each costs half of a read
    blocks = (
        _read_rows(disk, path / file.name, file, table, base.lsn, buffers[number % 2][: file.bytes])
        for number, file in enumerate(table.files)
    )
    yield from disk.read_ahead(blocks)  # one at a time: there is memory for two


def check_bases(folder: Path, log: LogManifest, disk: Disk | None = None) -> list[ShardBase]:
    """The bases that a log's manifest names, all of their files read. LogDamaged, LogMismatch, LogTooNew."""
    disk = disk or LocalDisk()
    bases = read_bases(disk, folder, log)
    for named, base in zip(log.bases, bases, strict=True):
        for table in base.tables:
            for _ in blocks_of(disk, folder / named.name, base, table):
                pass
    return bases


def read_bases(disk: Disk, folder: Path, log: LogManifest) -> list[ShardBase]:
    """Read the manifests of a log's bases: an image, and increments of it. Errors as those of `read_base`."""
    bases: list[ShardBase] = []
    parent = ""
    for named in log.bases:
        path = folder / named.name
        base = read_base(disk, path, log, named)
        if base.parent != parent:
            reason = f"it goes on from {base.parent or 'nothing'!r}, not from {parent or 'nothing'!r}"
            raise _damaged_at(str(path / BASE), 0, base.lsn, reason)
        bases.append(base)
        parent = named.name
    return bases


def make_tables(
    disk: Disk, folder: Path, log: LogManifest, bases: Sequence[ShardBase], new_table: Callable[[TableSpec], Table]
) -> list[Table]:
    """The tables of a log's bases, with their rows. LogDamaged; OtherOptimizer where one has another state now."""
    tables: dict[str, Table] = {}
    for named, base in zip(log.bases, bases, strict=True):
        path, before = folder / named.name, tables
        tables = {}
        for image in base.tables:
            name = image.spec.name
            table = before.get(name) if image.increment else new_table(image.spec)
            if table is None:
                raise _damaged_at(str(path / BASE), 0, base.lsn, f"the base before has no table {name!r}")
            if table.num_state != image.num_state:
                optimizer, want = image.spec.optimizer.name, table.num_state
                raise OtherOptimizer(path=str(path), table=name, got=image.num_state, optimizer=optimizer, want=want)
            table.remove(image.removed)
            # the rows of an increment may be there
            with table.filling(0 if image.increment else image.num_rows):
                for block in blocks_of(disk, path, base, image):
                    table.restore(*block)
            tables[name] = table
    return list(tables.values())


def _write_rows(
    disk: Disk, path: Path, number: int, spec: TableSpec, rows: CopyOnWriteRows, slots: Slots, go_on: Callable[[], None]
) -> Iterator[RowFile]:
    step, about = rows_per_file(rows.dim, rows.num_state), {"table": spec.name}
    head_bytes = len(block_header(rows.block(min(step, len(slots)))._asdict(), about))
    # of a whole file: the pieces of its checksums lie across the arrays
    memory = np.empty(head_bytes + min(step, len(slots)) * (8 + 4 * (rows.dim + rows.num_state)), np.uint8)
    for count, start in enumerate(range(0, len(slots), step)):
        go_on()
        part = slots[start : start + step]
        block = rows.read(part, rows.block(len(part), memory[head_bytes:]))
        header = block_header(block._asdict(), about)
        first = head_bytes - len(header)  # of fewer rows it may be shorter
        memory[first:head_bytes] = np.frombuffer(header, np.uint8)
        data = memory[first : head_bytes + sum(array.nbytes for array in block)].data
        name = f"{number}-{count}.safetensors"
        _write_file(disk, path / name, [data])
        yield RowFile(name, len(data), len(block.ids), _checksums(data))


def _write_file(disk: Disk, path: Path, pieces: Sequence[bytes | memoryview]) -> None:
    with closing(disk.open(path, write=True, create=True)) as file:
        file.pwritev(pieces, 0)
        file.sync()


def _read_file(disk: Disk, path: Path, most: int) -> bytes:
    with closing(disk.open(path)) as file:
        return file.pread(most, 0)


def _checksums(data: memoryview) -> tuple[int, ...]:
    return tuple(xxh3_64_intdigest(data[at : at + PIECE_BYTES]) for at in range(0, len(data), PIECE_BYTES))


def _read_rows(disk: Disk, path: Path, file: RowFile, table: TableImage, lsn: int, data: memoryview) -> RowBlock:
    """The rows of a file, which takes all of `data`."""
    try:
        opened = disk.open(path)
    except FileNotFoundError:
        raise _damaged_at(str(path), 0, lsn, "the file is missing") from None
    with closing(opened):
        if (size := opened.size()) != file.bytes:
            raise _damaged_at(str(path), min(size, file.bytes), lsn, f"it has {size} bytes, not {file.bytes}")
        for at, want in zip(range(0, file.bytes, PIECE_BYTES), file.checksums, strict=True):
            piece = data[at : at + PIECE_BYTES]
            opened.pread_into(piece, at)
            if (got := xxh3_64_intdigest(piece)) != want:
                reason = f"the checksum of {PIECE_BYTES} bytes is {got:016x}, not {want:016x}"
                raise _damaged_at(str(path), at, lsn, reason)
    dim, num_state, at = table.spec.dim, table.num_state, _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    if at + file.rows * (8 + 4 * (dim + num_state)) != len(data):
        raise _damaged_at(str(path), at, lsn, f"{file.rows} rows do not take {len(data) - at} bytes")
    ids = np.frombuffer(data, np.int64, file.rows, at)
    rows = np.frombuffer(data, np.float32, file.rows * dim, at + ids.nbytes).reshape(file.rows, dim)
    state = np.frombuffer(data, np.float32, file.rows * num_state, at + ids.nbytes + rows.nbytes)
    return RowBlock(ids, rows, state.reshape(file.rows, num_state))


def _damaged_at(path: str, offset: int, lsn: int, reason: str) -> LogDamaged:
    return LogDamaged(path=path, offset=offset, lsn=lsn, reason=reason, remedy=NO_COPY)


def _plain(base: ShardBase) -> dict[str, object]:
    plain = {name: getattr(base, name) for name in base.__slots__}
    plain["tables"] = [
        {
            "spec": plain_spec(table.spec),
            "num_state": table.num_state,
            "files": [{name: getattr(file, name) for name in file.__slots__} for file in table.files],
            "increment": table.increment,
            "removed": table.removed.tobytes(),
        }
        for table in base.tables
    ]
    return plain


def _base(fields: Fields) -> ShardBase:
    base = ShardBase(
        fields.get("lineage", int),
        fields.get("shard", int),
        fields.get("num_shards", int),
        fields.get("lsn", int),
        fields.get("redo_lsn", int),
        tuple(_table(table) for table in fields.maps("tables")),
        fields.get("control", dict),
        fields.get("parent", str),
    )
    try:
        found = range_of(base.control)
    except (KeyError, TypeError):
        found = None
    if found != (base.lsn, base.redo_lsn):
        raise fields.wrong("control", f"it is of the events {found}, not {base.redo_lsn} to {base.lsn}")
    return base


def _table(fields: Fields) -> TableImage:
    files = tuple(map(_file, fields.maps("files")))
    image = TableImage(read_spec(fields), fields.get("num_state", int), files, fields.get("increment", bool))
    removed = fields.get("removed", bytes)
    if len(removed) % 8:
        raise fields.wrong("removed", f"{len(removed)} bytes are no ids")
    return replace(image, removed=np.frombuffer(removed, np.int64))


def _file(fields: Fields) -> RowFile:
    checksums = fields.get("checksums", list)
    file = RowFile(fields.get("name", str), fields.get("bytes", int), fields.get("rows", int), tuple(checksums))
    if "/" in file.name or file.name.startswith("."):
        raise fields.wrong("name", f"{file.name[:100]!r} is no file of a base")
    if len(checksums) != -(-file.bytes // PIECE_BYTES) or not all(isinstance(one, int) for one in checksums):
        raise fields.wrong("checksums", f"one number for each {PIECE_BYTES} bytes was expected")
    return file
