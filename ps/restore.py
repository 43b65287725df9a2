"""Restore a shard: read its rows of a snapshot in a thread into new tables, and put these in place at once."""

from __future__ import annotations

import hashlib
import logging
import posixpath
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from embershard.proto.arrays import Floats, Ids
from embershard.proto.errors import (
    EmbershardError,
    InvalidRequest,
    OtherOptimizer,
    RestoreRunning,
    SnapshotDamaged,
    SnapshotUnknown,
    SnapshotUnreadable,
    TablesInTheWay,
    clipped,
)
from embershard.proto.messages import Restore, Restored
from embershard.proto.routing import Placement
from embershard.proto.snapshot.manifest import MANIFEST, TableBlocks, WorkerWindow, check_name, unpack_manifest
from embershard.proto.spec import TableSpec
from embershard.ps.memory import MemoryBudget
from embershard.ps.security.places import AnyPlace, SnapshotPlaces
from embershard.ps.table.frozen_kernels import mark_own
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Table

if TYPE_CHECKING:
    from embershard.proto.snapshot.stored import StoredSnapshot

# A client asks four times a second, and gives a silent shard up after so long: what a dead one's restore has read is
# dropped then. One that comes later begins it again.
HELD_SECONDS = 60.0
# If a client does not ask for so long, another client's restore may replace its own; one that is being put in place
# goes on without its client, since other shards may have their rows.
WATCHED_SECONDS = 5.0
_PIECE_BYTES = 16 * 2**20  # of an event of restored rows
_NAMES_SHOWN = 5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Contents:
    """Tables, what is known of them, and windows of pushes to restore.

    The windows only where each shard has the ids that it had.
    """

    tables: list[Table] = field(default_factory=list)
    workers: list[WorkerWindow] = field(default_factory=list)
    lineage: int = 0
    flags: dict[str, tuple[bool, tuple[str, str]]] = field(default_factory=dict)  # see Tables.replace


class RestoredPiece(NamedTuple):
    """Some rows of a restored table, with their states."""

    spec: TableSpec
    ids: Ids
    rows: Floats
    state: Floats

    @property
    def num_bytes(self) -> int:
        """Count the bytes of the ids, rows and states, which the event log needs room for."""
        return self.ids.nbytes + self.rows.nbytes + self.state.nbytes


class UnloggedRows:
    """The rows of restored tables, in pieces that the event log takes one after the other."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._pieces = (piece for table in tables for piece in _pieces(table))
        self.next = next(self._pieces, None)  # the first that is not in the log
        self.last_lsn = 0  # of those that are
        self.logged_bytes = 0

    def logged(self, piece: RestoredPiece, lsn: int) -> None:
        """The log has the next piece."""
        self.last_lsn = lsn
        self.logged_bytes += piece.num_bytes
        self.next = next(self._pieces, None)


def _pieces(table: Table) -> Iterator[RestoredPiece]:
    row_bytes = 8 + 4 * (table.spec.dim + table.num_state)
    for rows in table.scan(max(1, _PIECE_BYTES // row_bytes)):
        yield RestoredPiece(table.spec, *rows)
    # one without rows: the table may have none
    empty = np.empty((0, table.spec.dim), np.float32), np.empty((0, 0), np.float32)
    yield RestoredPiece(table.spec, np.empty(0, np.int64), *empty)


class Restores:
    """Carry out the restores of a shard, one at a time, on the apply thread.

    `names` gives the tables that are here. `install` puts others in their place, once the event log has their rows:
    False as long as it has to be called again for that.
    """

    def __init__(
        self,
        shard: int,
        placement: Placement,
        optimizers: OptimizerRegistry,
        names: Callable[[], Sequence[str]],
        install: Callable[[Contents, UnloggedRows], bool],
        budget: MemoryBudget | None = None,
        places: SnapshotPlaces | None = None,
    ) -> None:
        self._shard, self._placement, self._optimizers = shard, placement, optimizers
        self._names, self._install, self._budget = names, install, budget
        self._places = places or AnyPlace()
        self.reader: SnapshotReader | None = None  # of the restore that goes on, or that was installed
        self._asked_at = 0.0  # when somebody asked for it last

    @property
    def is_installing(self) -> bool:
        """Whether the event log has some of the restored rows, and not all of them."""
        return self.reader is not None and self.reader.is_installing

    def answer(self, request: Restore, now: float) -> Restored:
        """Begin, watch, install or cancel. RestoreRunning for a second client."""
        if request.step == "begin":
            self._begin(request, now)
        reader = self.reader
        if reader is None or reader.request.id != request.id:
            raise SnapshotUnknown(what="restore of", name=request.name or request.url)
        self._asked_at = now
        match request.step:
            case "begin" | "watch" if not reader.is_installing:
                return reader.reply()
            case "begin" | "watch" | "install":
                self._check(request)
                return reader.install(self._install)
            case "cancel":
                reader.cancel()
                self.reader = None
                return Restored(state="cancelled")
        raise InvalidRequest(
            reason=f"a restore has no step {request.step[:50]!r} (known: begin, watch, install, cancel)"
        )

    def advance(self, now: float) -> None:
        """Put in place, or drop, what was read for a client that asks no more."""
        reader, silent = self.reader, now - self._asked_at
        if reader is None or reader.installed or silent <= WATCHED_SECONDS:
            return
        if reader.is_installing and not self._tables_in_the_way(reader.request):
            with suppress(EmbershardError):  # the log has no room yet
                reader.install(self._install)
        elif silent > HELD_SECONDS:
            _log.warning(
                "the restore of %s is dropped: its client has not asked for it for %.0f s", reader.request.url,
                HELD_SECONDS,
            )  # fmt: skip
            reader.cancel()
            self.reader = None

    def extend(self, seconds: float) -> None:
        """Wait so many seconds longer, in which this process received nothing."""
        self._asked_at += seconds

    def table_names(self, number: int) -> list[str]:
        """The tables that a restore has read."""
        reader = self.reader
        return reader.table_names() if reader is not None and reader.request.id == number else []

    def _begin(self, request: Restore, now: float) -> None:
        if self.reader is not None:
            if self.reader.request.id == request.id:  # its first reply was lost
                return
            if not self.reader.has_ended and now - self._asked_at < WATCHED_SECONDS:
                raise RestoreRunning(name=self.reader.request.name or "none", seconds=WATCHED_SECONDS)
            self.reader.cancel()  # whoever wanted it would have ended it
            self.reader = None
        if request.name:
            check_name(request.name)
        self._places.check(request.url)
        self._check(request)
        self.reader = SnapshotReader(
            request, self._shard, self._placement, self._optimizers, self._budget, self._places
        )

    def _check(self, request: Restore) -> None:
        if names := self._tables_in_the_way(request):
            more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            raise TablesInTheWay(tables=", ".join(sorted(names)[:_NAMES_SHOWN]) + more)

    def _tables_in_the_way(self, request: Restore) -> Sequence[str]:
        installed = self.reader is not None and self.reader.installed
        return () if request.replace or installed else self._names()


class SnapshotReader:
    """Reads what belongs to one shard. Made, asked and ended on the apply thread."""

    def __init__(
        self,
        request: Restore,
        shard: int,
        placement: Placement,
        optimizers: OptimizerRegistry,
        budget: MemoryBudget | None,
        places: SnapshotPlaces,
    ) -> None:
        self.request, self._budget, self._places = request, budget, places
        self._shard, self._placement, self._optimizers = shard, placement, optimizers
        self._state = "reading"
        self._error: EmbershardError | None = None
        self._cancelled = threading.Event()
        self._rows = self._bytes = 0
        self._contents, self._unlogged = Contents(), UnloggedRows([])
        threading.Thread(target=self._run, name="restore", daemon=True).start()

    @property
    def installed(self) -> bool:
        """Whether what was read is in place."""
        return self._state == "installed"

    @property
    def is_installing(self) -> bool:
        """Whether it is to be put in place, and the event log has not all of its rows."""
        return self._state == "installing"

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes of it: it is in place, or failed."""
        return self.installed or self._error is not None

    def reply(self) -> Restored:
        """Return the progress of the restore; raises the error that ended it."""
        if self._error is not None:
            raise clipped(self._error)  # as another exception: it is raised more than once
        return Restored(state=self._state, rows=self._rows, bytes=self._bytes + self._unlogged.logged_bytes)

    def table_names(self) -> list[str]:
        """The tables that were read and are not in place yet."""
        return [table.spec.name for table in self._contents.tables]

    def install(self, put: Callable[[Contents, UnloggedRows], bool]) -> Restored:
        """Hand over what was read, as far as it is taken; again, as after a lost reply, nothing."""
        if self._state == "ready":
            self._unlogged, self._state = UnloggedRows(self._contents.tables), "installing"
        if self.is_installing and put(self._contents, self._unlogged):
            self._contents, self._unlogged, self._state = Contents(), UnloggedRows([]), "installed"
        reply = self.reply()
        if not (self.installed or self.is_installing):
            raise InvalidRequest(reason=f"the restore of {self.request.name!r} is {reply.state}, not ready")
        return reply

    def cancel(self) -> None:
        """Read no more, and let go of what was read."""
        self._cancelled.set()
        self._contents, self._unlogged = Contents(), UnloggedRows([])

    def _run(self) -> None:
        try:
            contents = self._read()
        except EmbershardError as error:
            self._error = error
        except Exception as error:
            _log.exception("a defect while reading a snapshot")
            self._error = SnapshotUnreadable(path=self.request.url, reason=f"{type(error).__name__}: {error}")
        else:
            if not self._cancelled.is_set():
                self._contents, self._state = contents, "ready"
        if self._error is not None:
            _log.error("restore of %s: %s", self.request.url, self._error)

    def _read(self) -> Contents:
        if not self.request.url:
            return Contents()
        stored = self._open()
        manifest = stored.manifest
        contents = Contents(lineage=self.request.id, flags=manifest.shards[0].table_flags())
        for blocks in manifest.tables.values():
            contents.tables.append(self._read_table(stored, blocks))
        self._rows = sum(table.num_rows for table in contents.tables)  # without those that newer ones replaced
        if manifest.num_shards == self._placement.num_shards:
            contents.workers.extend(manifest.shards[self._shard].workers)
        return contents

    def _open(self) -> StoredSnapshot:
        from embershard.proto.snapshot.stored import StoredSnapshot  # fsspec takes a while

        name = self.request.name
        storage = self._places.open(self.request.url, name)
        path = posixpath.join(name, MANIFEST)
        try:
            data = storage.read(path)
        except FileNotFoundError:
            reason = "no such file on the shard's machine; the folder must be one that all shards and workers share"
            raise SnapshotUnreadable(path=storage.at(path), reason=reason) from None
        if hashlib.sha256(data).hexdigest() != self.request.sha256:
            raise SnapshotDamaged(path=storage.at(path), reason="it is not the one that this restore began with")
        manifest = unpack_manifest(data, storage.at(path))
        return StoredSnapshot(storage, name, manifest, self.request.sha256, self._places.open)

    def _read_table(self, stored: StoredSnapshot, blocks: TableBlocks) -> Table:
        spec = blocks.spec
        table = Table(spec, self._optimizers.find(spec.optimizer), self._budget)
        if table.num_state != blocks.num_state:
            raise OtherOptimizer(
                path=stored.url,
                table=spec.name,
                got=blocks.num_state,
                optimizer=spec.optimizer.name,
                want=table.num_state,
            )
        for layers in stored.layers[spec.name]:
            for one, part in reversed(layers):
                if part.increment is not None:
                    table.remove(part.increment.removed)  # those of other shards are not here
                self._read_rows(table, one, part)
        return table

    def _read_rows(self, table: Table, stored: StoredSnapshot, blocks: TableBlocks) -> None:
        """Give a table those rows of the files that are this shard's."""
        from embershard.proto.snapshot.blocks import read_block

        space_key, buckets = np.uint64(table.spec.space_key), self._placement.shard_of == self._shard
        for file in blocks.files:
            own_buckets = buckets[file.first_bucket : file.last_bucket + 1]
            if self._cancelled.is_set() or not own_buckets.any():
                continue
            ids, rows, state = read_block(stored.storage, stored.folder, file, blocks)
            own = np.empty(len(ids), np.bool_)
            count = mark_own(ids, space_key, self._placement.shard_of, self._shard, own)
            if count < len(ids):
                if own_buckets.all():
                    where = f"{stored.url}/{file.path}"
                    raise SnapshotDamaged(path=where, reason="it holds ids of other buckets than the manifest says")
                ids, rows, state = ids[own], rows[own], state[own]
            table.restore(ids, rows, state)
            self._rows += count
            self._bytes += file.bytes
