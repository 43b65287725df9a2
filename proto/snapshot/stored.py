"""Snapshots as they lie in a storage, read without shards: each with those that it is an increment of."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from embershard.proto.arrays import Floats, Ids
from embershard.proto.errors import EmbershardError, SnapshotDamaged, SnapshotNotFound, UnknownTable
from embershard.proto.snapshot.blocks import read_block
from embershard.proto.snapshot.manifest import (
    LATEST,
    MANIFEST,
    Manifest,
    Parent,
    TableBlocks,
    check_name,
    unpack_manifest,
)
from embershard.proto.snapshot.storage import Storage

# A shard's part of a table in snapshots, the newest first, down to one with all rows: the first row of an id counts.
Layers = list[tuple["StoredSnapshot", TableBlocks]]


@dataclass(frozen=True)
class StoredSnapshot:
    """A snapshot as it lies in its storage, in a folder of it."""

    storage: Storage
    folder: str
    manifest: Manifest
    sha256: str  # of the manifest, hex
    # of a parent's place, before it is read
    check: Callable[[str], object] = field(default=lambda url: None, compare=False)

    @property
    def url(self) -> str:
        """The folder that the snapshot is."""
        return self.storage.at(self.folder)

    @cached_property
    def chain(self) -> list[StoredSnapshot]:
        """This snapshot, the one that it is an increment of, and so on to a full one.

        SnapshotDamaged where one of them is not there, or not the one that it was.
        """
        chain = [self]
        while (parent := chain[-1].manifest.parent) is not None:
            chain.append(_parent(chain[-1], parent))
        return chain

    @cached_property
    def layers(self) -> dict[str, list[Layers]]:
        """Table -> of each shard that has it, where its rows are. SnapshotDamaged where a parent has none like it."""
        parts = [
            [{blocks.spec.name: blocks for blocks in part.tables} for part in one.manifest.shards] for one in self.chain
        ]
        found: dict[str, list[Layers]] = {}
        for shard, tables in enumerate(parts[0]):
            for name in tables:
                blocks = [one[shard].get(name) for one in parts]
                found.setdefault(name, []).append(_layers(self.chain, blocks, f"table {name!r} of shard {shard}"))
        return found

    def read_table(self, table: str) -> Iterator[tuple[Ids, Floats, Floats]]:
        """(ids (n,), rows (n, dim), state (n, num_state)) of a table, a file at a time, each checked.

        UnknownTable where it has none of that name, SnapshotDamaged where a file is not what was written.
        """
        if table not in self.manifest.tables:
            known = ", ".join(sorted(self.manifest.tables)) or "none"
            raise UnknownTable(shard=self.url, table=table, known=known)
        for layers in self.layers[table]:
            yield from _newest_rows(layers)


def open_snapshot(url: str, name: str = "") -> StoredSnapshot:
    """Open the snapshot `name` of a folder, without shards; by default the folder itself, or the latest snapshot in it.

    SnapshotNotFound, SnapshotDamaged, SnapshotTooNew, SnapshotUnreadable.
    """
    storage = Storage(url)
    folder = check_name(name) if name else ""
    try:
        data = storage.read(posixpath.join(folder, MANIFEST))
    except FileNotFoundError:
        if not folder:
            folder = _latest(storage)
        try:
            data = storage.read(f"{folder}/{MANIFEST}")
        except FileNotFoundError:
            reason = f"it has no {MANIFEST}: it was never finished, or is none. {_others(storage)}"
            raise SnapshotNotFound(path=storage.at(folder), reason=reason) from None
    manifest = unpack_manifest(data, storage.at(posixpath.join(folder, MANIFEST)))
    return StoredSnapshot(storage, folder, manifest, hashlib.sha256(data).hexdigest())


def read_manifest(url: str, name: str = "") -> Manifest:
    """Read a snapshot's manifest; see `open_snapshot`."""
    return open_snapshot(url, name).manifest


def list_snapshots(url: str) -> list[str]:
    """Names of the whole snapshots in a folder, sorted."""
    storage = Storage(url)
    folders = [name for name, size in storage.sizes("").items() if size is None]
    return sorted(name for name in folders if MANIFEST in storage.sizes(name))


def _latest(storage: Storage) -> str:
    try:
        name = storage.read(LATEST).decode(errors="replace").strip()
    except FileNotFoundError:
        missing = "there is no such folder; name that of `embershard snapshot`, or one snapshot in it"
        reason = missing if storage.is_missing else f"there is no {LATEST} in it. {_others(storage)}"
        raise SnapshotNotFound(path=storage.url, reason=reason) from None
    try:
        return check_name(name)
    except EmbershardError as error:
        raise SnapshotDamaged(path=storage.at(LATEST), reason=f"{error}. {_others(storage)}") from None


def _others(storage: Storage) -> str:
    names = list_snapshots(storage.url)
    if names:
        return f"Snapshots there: {', '.join(names[-5:])}"
    others = sorted(name for name, size in storage.sizes("").items() if size is None)  # of checkpoints, say
    return f"There are no snapshots in it{', only the folders ' * bool(others)}{', '.join(others[-5:])}"


def _layers(chain: Sequence[StoredSnapshot], blocks: Sequence[TableBlocks | None], what: str) -> Layers:
    """A shard's part of a table in the snapshots of a chain, as far as they count."""
    layers: Layers = []
    width = None
    for stored, one in zip(chain, blocks, strict=True):
        if one is None or width not in (None, (one.spec.dim, one.num_state)):
            break
        width = one.spec.dim, one.num_state
        layers.append((stored, one))
        if one.increment is None:
            return layers
    reason = f"{what} is an increment, and the snapshot before has no such table"
    raise SnapshotDamaged(path=layers[-1][0].url, reason=reason)


def _parent(child: StoredSnapshot, parent: Parent) -> StoredSnapshot:
    url = child.url
    for step in parent.path.split("/"):
        url = posixpath.dirname(url) if step == ".." else f"{url}/{step}"
    child.check(url)
    storage = Storage(url)
    where = storage.at(MANIFEST)
    wants = f"{child.url} is an increment of it, and has only the rows that changed since"
    try:
        data = storage.read(MANIFEST)
    except FileNotFoundError:
        raise SnapshotDamaged(path=where, reason=f"it is missing; {wants}") from None
    digest = hashlib.sha256(data).hexdigest()
    if digest != parent.sha256:
        raise SnapshotDamaged(path=where, reason=f"its sha256 is {digest}, not {parent.sha256}; {wants}")
    manifest = unpack_manifest(data, where)
    placements = [
        [(part.num_shards, part.placement_epoch) for part in one.shards] for one in (manifest, child.manifest)
    ]
    if placements[0] != placements[1]:
        raise SnapshotDamaged(path=where, reason=f"its rows were on other shards; {wants}")
    return StoredSnapshot(storage, "", manifest, digest, child.check)


def _newest_rows(layers: Layers) -> Iterator[tuple[Ids, Floats, Floats]]:
    """The rows of a shard's part of a table, a file at a time."""
    newer = np.empty(0, np.int64)  # ids whose rows in older layers do not count
    for stored, blocks in layers:
        own = [newer]
        for file in blocks.files:
            ids, rows, state = read_block(stored.storage, stored.folder, file, blocks)
            if newer.size and not (counts := np.isin(ids, newer, invert=True)).all():
                ids, rows, state = ids[counts], rows[counts], state[counts]
            own.append(ids)
            yield ids, rows, state
        if blocks.increment is not None:
            newer = np.concatenate([*own, blocks.increment.removed])
