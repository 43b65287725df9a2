"""Read and write a snapshot's manifest, as msgpack: docs/snapshots.md has the format field by field.

The map is sealed (sealed.py): a reader knows damage, other people's files and newer versions before it looks inside.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np

from embershard.proto.arrays import Ids
from embershard.proto.codec.name import CodecName
from embershard.proto.errors import BadSnapshotName, SnapshotDamaged, SnapshotTooNew
from embershard.proto.routing import NUM_BUCKETS
from embershard.proto.snapshot.sealed import Fields as _Fields
from embershard.proto.snapshot.sealed import SealedFormat
from embershard.proto.spec import Initializer, Optimizer, TableSpec

FORMAT = "embershard snapshot"
VERSION = 3  # what an older one can say is written as that: 2 without increments, 1 without the parts' `control`
MANIFEST = "manifest.msgpack"
LATEST = "LATEST"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")
_FILE = re.compile(r"shard-[0-9]{1,5}-[0-9a-f]{16}/[0-9]{1,6}-[0-9]{1,9}\.safetensors")  # no path leads elsewhere
# in the same folder; or in one beside it, as those of checkpoints are
_PARENT = re.compile(rf"\.\./{_NAME.pattern}|\.\./\.\./{_NAME.pattern}/{_NAME.pattern}")
_SEALED = SealedFormat(
    FORMAT, VERSION, lambda where, reason: SnapshotDamaged(path=where, reason=reason), SnapshotTooNew
)
_seal, _unseal = _SEALED.seal, _SEALED.unseal


@dataclass(frozen=True, slots=True)
class BlockFile:
    """Rows of one table in one file, sorted by bucket."""

    path: str  # within the snapshot
    bytes: int
    sha256: str  # hex
    rows: int
    first_bucket: int
    last_bucket: int  # inclusive


@dataclass(frozen=True, slots=True)
class Increment:
    """An increment of a table on one shard: its parent's rows, less those of `removed`, plus those in its files."""

    total_rows: int  # those of the parent included
    removed: Ids = field(compare=False)  # (N,) int64, ascending; some may be in the files again


@dataclass(frozen=True, slots=True)
class TableBlocks:
    """One shard's part of a table; a row has dim weights and num_state floats of optimizer state."""

    spec: TableSpec
    num_state: int
    rows: int  # in its files
    files: tuple[BlockFile, ...]
    increment: Increment | None = None

    @property
    def total_rows(self) -> int:
        """Rows of the table, those of the parents' files included."""
        return self.rows if self.increment is None else self.increment.total_rows


@dataclass(frozen=True, slots=True)
class Parent:
    """The snapshot that another one is an increment of."""

    path: str  # from the other's folder
    sha256: str  # of its manifest, hex


@dataclass(frozen=True, slots=True)
class WorkerWindow:
    """The pushes of a worker's incarnation that a shard had applied: all below first_incomplete, and some after.

    replies: (seq, rows applied, rows skipped) of these.
    """

    worker: int
    epoch: int
    first_incomplete: int
    replies: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class ShardPart:
    """The tables and files that one shard wrote. `clock` is its first clock that was not closed.

    `control` is the shard's state beside the rows (ps/core.py), in what msgpack can say; None in version 1.
    """

    shard: int
    num_shards: int
    placement_epoch: int
    clock: int
    workers: tuple[WorkerWindow, ...]
    tables: tuple[TableBlocks, ...]
    control: Mapping[str, object] | None = None

    def table_flags(self) -> dict[str, tuple[bool, tuple[str, str]]]:
        """Table -> whether it is of layers, and the codecs of pushes and pulls; ValueError where they make no sense."""
        if self.control is None:
            return {}
        try:
            return {
                str(name): (bool(dense), (str(push), str(pull)))
                for name, _, dense, (push, pull) in cast(list[list[Any]], self.control["tables"])
            }
        except (KeyError, TypeError) as error:
            raise ValueError(f"field 'control': {type(error).__name__} {error}") from None


@dataclass(frozen=True)
class Manifest:
    """A snapshot. `extra` is the caller's: what msgpack can say."""

    name: str
    created: float  # seconds since 1970
    package: str  # version of embershard that wrote it
    shards: tuple[ShardPart, ...]  # by index
    extra: Mapping[str, object] = field(default_factory=dict)
    id: int = 0  # by which shards know what changed since; 0 where they do not
    parent: Parent | None = None  # where tables of shards are increments

    @property
    def num_shards(self) -> int:
        """Shards that it was taken from."""
        return len(self.shards)

    @property
    def clock(self) -> int:
        """The first clock that was not closed, of the shard that was behind the most."""
        return min(part.clock for part in self.shards)

    @cached_property
    def tables(self) -> dict[str, TableBlocks]:
        """Every table by name, over all shards."""
        found: dict[str, TableBlocks] = {}
        for table in (table for part in self.shards for table in part.tables):
            before = found.get(table.spec.name)
            found[table.spec.name] = table if before is None else _joined(before, table)
        return found

    @property
    def rows(self) -> int:
        """The number of rows of all tables, those of the parents' files included."""
        return sum(table.total_rows for part in self.shards for table in part.tables)

    @property
    def bytes(self) -> int:
        """Bytes of all files with rows."""
        return sum(file.bytes for table in self.tables.values() for file in table.files)


def check_name(name: str) -> str:
    """The name of a snapshot, which is a folder's. BadSnapshotName where it cannot be one."""
    if not _NAME.fullmatch(name) or name == LATEST:
        raise BadSnapshotName(name=name, what="a snapshot's name", reason="write letters, digits and _ . -")
    return name


def is_parent_path(path: str) -> bool:
    """Whether a path leads from a snapshot to one in the same folder, or in one beside that."""
    return _PARENT.fullmatch(path) is not None


def pack_part(part: ShardPart) -> bytes:
    """Serialise a shard's part, with its checksum."""
    return _seal(_plain_part(part), _version_of(part))


def unpack_part(data: bytes, where: str) -> ShardPart:
    """The part in a file that is named `where`. SnapshotDamaged or SnapshotTooNew."""
    return _part(_unseal(data, where))


def pack_manifest(manifest: Manifest) -> bytes:
    """A manifest, sealed. BadSnapshotName where `extra` holds what msgpack cannot say."""
    plain = {
        "name": manifest.name,
        "created": manifest.created,
        "package": manifest.package,
        "shards": [_plain_part(part) for part in manifest.shards],
        "extra": dict(manifest.extra),
    }
    if manifest.id:
        plain["id"] = manifest.id
    if manifest.parent is not None:
        plain["parent"] = _shallow(manifest.parent)
    try:
        return _seal(plain, _version_of(*manifest.shards))
    except (TypeError, ValueError, OverflowError) as error:
        raise BadSnapshotName(name="extra", what="part of a manifest", reason=f"msgpack says {error}") from None


def unpack_manifest(data: bytes, where: str) -> Manifest:
    """The manifest in a file that is named `where`. SnapshotDamaged or SnapshotTooNew."""
    fields = _unseal(data, where)
    shards = tuple(_part(part) for part in fields.maps("shards"))
    if [part.shard for part in shards] != list(range(len(shards))) or not shards:
        raise fields.wrong("shards", "they are not 0, 1, ... in order")
    if any(part.num_shards != len(shards) for part in shards):
        raise fields.wrong("shards", f"they are not parts of {len(shards)} shards")
    extra = cast(dict[str, object], fields.get("extra", dict))
    manifest = Manifest(
        fields.get("name", str),
        fields.get("created", float),
        fields.get("package", str),
        shards,
        extra,
        fields.get("id", int) if "id" in fields else 0,
        _parent(fields.map("parent")) if "parent" in fields else None,
    )
    if manifest.parent is None and any(table.increment for part in shards for table in part.tables):
        raise fields.wrong("parent", "tables are increments of one, and it names none")
    for part in shards:
        for table in part.tables:
            if difference := manifest.tables[table.spec.name].spec.difference(table.spec):
                raise fields.wrong("shards", f"they know table {table.spec.name!r} apart: {difference}")
    return manifest


def _joined(one: TableBlocks, other: TableBlocks) -> TableBlocks:
    rows, files = one.rows + other.rows, one.files + other.files
    increment = None
    if one.increment or other.increment:
        removed = [part.increment.removed for part in (one, other) if part.increment]
        increment = Increment(one.total_rows + other.total_rows, np.concatenate(removed))
    return dataclasses.replace(one, rows=rows, files=files, increment=increment)


def _version_of(*parts: ShardPart) -> int:
    if any(table.increment for part in parts for table in part.tables):
        return 3
    return 2 if any(part.control is not None for part in parts) else 1


def _plain_part(part: ShardPart) -> dict[str, object]:
    tables = [{**_shallow(table), "spec": plain_spec(table.spec),
               "files": [_shallow(file) for file in table.files]} for table in part.tables]  # fmt: skip
    for plain_table, table in zip(tables, part.tables, strict=True):
        if table.increment is None:
            del plain_table["increment"]
        else:
            plain_table["increment"] = {
                "total_rows": table.increment.total_rows, "removed": table.increment.removed.tobytes()
            }  # fmt: skip
    plain = {**_shallow(part), "workers": [_shallow(window) for window in part.workers], "tables": tables}
    if part.control is None:
        del plain["control"]
    return plain


def _shallow(one: ShardPart | TableBlocks | BlockFile | WorkerWindow | Parent) -> dict[str, object]:
    return {f.name: getattr(one, f.name) for f in dataclasses.fields(one)}


def _part(fields: _Fields) -> ShardPart:
    part = ShardPart(
        fields.get("shard", int),
        fields.get("num_shards", int),
        fields.get("placement_epoch", int),
        fields.get("clock", int),
        tuple(_window(window) for window in fields.maps("workers")),
        tuple(_table(table) for table in fields.maps("tables")),
        fields.get("control", dict) if "control" in fields else None,
    )
    try:
        part.table_flags()
    except ValueError as error:
        raise fields.wrong("control", str(error)) from None
    if part.shard >= part.num_shards:
        raise fields.wrong("shard", f"there is no shard {part.shard} of {part.num_shards}")
    return part


def _window(fields: _Fields) -> WorkerWindow:
    replies = fields.lists("replies")
    if not all(len(reply) == 3 and all(isinstance(number, int) for number in reply) for reply in replies):
        raise fields.wrong("replies", "three numbers each were expected")
    return WorkerWindow(
        fields.get("worker", int),
        fields.get("epoch", int),
        fields.get("first_incomplete", int),
        cast(tuple[tuple[int, int, int], ...], tuple(map(tuple, replies))),
    )


def _table(fields: _Fields) -> TableBlocks:
    files = tuple(_file(file) for file in fields.maps("files"))
    increment = _increment(fields.map("increment")) if "increment" in fields else None
    table = TableBlocks(read_spec(fields), fields.get("num_state", int), fields.get("rows", int), files, increment)
    if sum(file.rows for file in files) != table.rows:
        raise fields.wrong("rows", f"table {table.spec.name!r} has {table.rows}, its files have another number")
    return table


def _increment(fields: _Fields) -> Increment:
    removed = fields.get("removed", bytes)
    if len(removed) % 8:
        raise fields.wrong("removed", f"{len(removed)} bytes are no ids")
    return Increment(fields.get("total_rows", int), np.frombuffer(removed, np.int64))


def _parent(fields: _Fields) -> Parent:
    parent = Parent(fields.get("path", str), fields.get("sha256", str))
    if not is_parent_path(parent.path):
        raise fields.wrong("path", f"{parent.path[:100]!r} is no path to another snapshot")
    return parent


def _file(fields: _Fields) -> BlockFile:
    file = BlockFile(
        fields.get("path", str),
        fields.get("bytes", int),
        fields.get("sha256", str),
        fields.get("rows", int),
        fields.get("first_bucket", int),
        fields.get("last_bucket", int),
    )
    if not _FILE.fullmatch(file.path):
        raise fields.wrong("path", f"{file.path[:100]!r} is no file of a snapshot")
    if not file.first_bucket <= file.last_bucket < NUM_BUCKETS:
        raise fields.wrong("last_bucket", f"{file.first_bucket} to {file.last_bucket} are no buckets")
    return file


def plain_spec(spec: TableSpec) -> dict[str, object]:
    """A table's spec in what msgpack can say."""
    return {
        "name": spec.name,
        "dim": spec.dim,
        "optimizer": {"name": spec.optimizer.name, "settings": list(spec.optimizer.params().items())},
        "initializer": {"kind": spec.initializer.kind, "params": spec.initializer.params()},
        "id_space": spec.id_space,
        "seed": spec.seed,
        # maps, since readers of this version of the format look for their `params`
        "push_codec": {"kind": str(spec.push_codec), "params": {}},
        "pull_codec": {"kind": str(spec.pull_codec), "params": {}},
    }


def read_spec(table: _Fields) -> TableSpec:
    """The spec in the field `spec` of a table's map."""
    fields = table.map("spec")
    optimizer = fields.map("optimizer")
    initializer = fields.map("initializer")
    try:
        return TableSpec(
            name=fields.get("name", str),
            dim=fields.get("dim", int),
            optimizer=Optimizer.of(optimizer.get("name", str), dict(_settings(optimizer))),
            initializer=Initializer.of(initializer.get("kind", str), initializer.get("params", dict)),
            id_space=fields.get("id_space", str),
            seed=fields.get("seed", int),
            push_codec=CodecName.parse(fields.map("push_codec").get("kind", str)),
            pull_codec=CodecName.parse(fields.map("pull_codec").get("kind", str)),
        )
    except (ValueError, TypeError) as error:
        raise table.wrong("spec", str(error)) from None


def _settings(optimizer: _Fields) -> Iterator[tuple[str, float]]:
    for name, value in optimizer.lists("settings"):
        yield cast(str, name), cast(float, value)
