"""The shard: one state machine from a request to its reply, that knows no carrier, no socket and no thread.

It is not safe for use by several threads, but for `greeting` and `status`, which may be read at any time. Requests are
checked here, once; what lies below relies on it.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from numba import types

from embershard.proto.errors import (
    InvalidRequest,
    MessageTooLarge,
    NonFiniteValue,
    TableFull,
    TableLoading,
    TableMismatch,
    UnknownRoute,
    UnknownTable,
    WrongDim,
    WrongPlacement,
)
from embershard.proto.jit import compiled
from embershard.proto.messages import (
    MAX_MESSAGE_BYTES,
    Declare,
    Declared,
    Floats,
    GetStatus,
    Greeting,
    Hello,
    Ids,
    Load,
    Loaded,
    Pull,
    Push,
    Pushed,
    PushToken,
    Reply,
    Request,
    Rows,
    ShardStatus,
    TableGradients,
    TableStatus,
)
from embershard.proto.routing import BUCKET_SHIFT, Placement, mix64
from embershard.ps.dedup import Dedup
from embershard.ps.optim import OptimizerRegistry
from embershard.ps.routes import RouteMemory
from embershard.ps.table import Table

_NAMES_SHOWN = 20  # of the known tables, in an error that must fit gRPC's metadata
_ENTRY_BYTES = 16  # what protobuf adds to one table's rows, at most


@dataclass(slots=True)
class _Entry:
    """A table and who still loads its first values."""

    table: Table
    space_key: np.uint64
    loader: int | None


@compiled(
    types.int64(
        types.Array(types.int64, 1, "C", readonly=True),
        types.uint64,
        types.Array(types.uint16, 1, "C", readonly=True),
        types.int64,
    )
)
def _first_foreign(ids: Ids, space_key: np.uint64, shard_of: npt.NDArray[np.uint16], shard: int) -> int:
    """Position of the first id that another shard holds, -1 if there is none."""
    for i in range(ids.size):
        if shard_of[mix64(np.uint64(ids[i]), space_key) >> np.uint64(BUCKET_SHIFT)] != shard:
            return i
    return -1


class Shard:
    """One shard's part of every table.

    `instance` is random at each start, so that a client notices a shard that lost its rows.
    """

    def __init__(
        self,
        index: int,
        placement: Placement,
        optimizers: OptimizerRegistry,
        *,
        version: str = "",
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        if not 0 <= index < placement.num_shards:
            raise ValueError(f"shard must be 0..{placement.num_shards - 1} of {placement.num_shards}, got {index}")
        self.greeting = Greeting(
            shard=index,
            num_shards=placement.num_shards,
            placement_epoch=placement.epoch,
            version=version,
            instance=secrets.token_hex(8),
            max_message_bytes=max_message_bytes,
        )
        self._placement = placement
        self._optimizers = optimizers
        self._tables: dict[str, _Entry] = {}
        self._dedup = Dedup()
        self._routes = RouteMemory()
        self._started = time.monotonic()
        self._requests = 0
        self._pulled_rows = 0
        self._pushed_rows = 0
        self._duplicate_pushes = 0
        self._skipped_rows = 0

    def handle(self, request: Request) -> Reply:
        """The reply to a request, or an EmbershardError that says why there is none; nothing was changed then.

        Two faults come too late for that: a user's row function that raises, and ids made to collide that fill an index
        page. What the push had applied before stays, and it is not known as applied.
        """
        self._requests += 1
        match request:
            case Pull():
                return self._pull(request)
            case Push():
                return self._push(request)
            case Load():
                return self._load(request)
            case Declare():
                return self._declare(request)
            case Hello():
                return self.greeting
            case GetStatus():
                return self.status()
            case _:
                raise InvalidRequest(reason=f"this shard cannot {type(request).__name__} yet")

    def status(self) -> ShardStatus:
        """Sizes and counters. They are read, never changed, so that health does not wait behind the pushes."""
        entries = tuple(self._tables.values())
        return ShardStatus(
            shard=self.greeting.shard,
            num_shards=self.greeting.num_shards,
            placement_epoch=self.greeting.placement_epoch,
            version=self.greeting.version,
            instance=self.greeting.instance,
            uptime_seconds=time.monotonic() - self._started,
            resident_bytes=_resident_bytes(),
            requests=self._requests,
            pulled_rows=self._pulled_rows,
            pushed_rows=self._pushed_rows,
            duplicate_pushes=self._duplicate_pushes,
            skipped_rows=self._skipped_rows,
            queued_bytes=0,
            tables=tuple(_table_status(entry) for entry in entries),
        )

    def _declare(self, request: Declare) -> Declared:
        """Create the table or compare it.

        A table created with `load` is closed to pulls and pushes until its loader sends the last Load. If the loader
        dies, it stays closed, for half of its first values may be missing: the same worker declares again with `load`
        and is told to load from the start, as after a reply that was lost.
        """
        spec, loader = request.spec, request.worker if request.load else None
        entry = self._tables.get(spec.name)
        if entry is None:
            table = Table(spec, self._optimizers.find(spec.optimizer))
            self._tables[spec.name] = _Entry(table, np.uint64(spec.space_key), loader)
            return Declared(created=True, loading=request.load)
        if difference := entry.table.spec.difference(spec):
            raise TableMismatch(table=spec.name, difference=difference)
        again = loader is not None and entry.loader == loader
        return Declared(created=again, loading=entry.loader is not None)

    def _load(self, request: Load) -> Loaded:
        """Assign rows. The last word wins: a client sends `last` after all other parts were answered."""
        self._check_placement(request.placement_epoch)
        entry = self._entry(request.table)
        if entry.loader not in (None, request.worker):
            raise TableLoading(table=request.table, worker=entry.loader)
        self._check_ids(entry, request.ids)
        rows = _matrix(entry, request.ids, "rows", request.rows)
        if not np.isfinite(rows).all():
            count = int(rows.size - np.count_nonzero(np.isfinite(rows)))
            raise NonFiniteValue(table=request.table, what="rows to load", count=count)
        entry.table.load(request.ids, rows, keep_state=request.keep_state)
        if request.last:
            entry.loader = None
        return Loaded(rows=len(request.ids))

    def _pull(self, request: Pull) -> Rows:
        self._check_placement(request.placement_epoch)
        parts = []
        reply_bytes = 0
        for part in request.tables:
            entry = self._open_entry(part.table)
            self._check_ids(entry, part.ids)
            parts.append((entry.table, part.ids))
            reply_bytes += _ENTRY_BYTES + 4 * len(part.ids) * entry.table.spec.dim
        if reply_bytes > self.greeting.max_message_bytes:  # before memory is taken: ids are small, their rows are not
            raise MessageTooLarge(got=reply_bytes, limit=self.greeting.max_message_bytes)
        rows = Rows(tuple(table.gather(ids) for table, ids in parts))
        self._pulled_rows += sum(len(ids) for _, ids in parts)
        for part in request.tables:
            if part.route:
                self._routes.keep(request.worker, request.epoch, part.route, part.table, part.ids)
        return rows

    def _push(self, request: Push) -> Pushed:
        """Apply a push once. All of it is checked before any of it is applied."""
        self._check_placement(request.placement_epoch)
        if found := self._dedup.find(request.token):
            self._duplicate_pushes += 1
            return found
        parts = [(part, *self._check_gradients(part, request.token)) for part in request.tables]
        _check_room([(table, len(ids)) for _, table, ids, _ in parts])
        applied = skipped = 0
        for part, table, ids, gradients in parts:
            done = table.apply(ids, gradients, part.lr_scale)
            applied += done.rows
            skipped += done.skipped
            self._routes.forget(request.token.worker, part.route)
        reply = Pushed(duplicate=False, applied=applied, skipped=skipped)
        self._dedup.record(request.token, reply)
        self._pushed_rows += applied
        self._skipped_rows += skipped
        return reply

    def _check_gradients(self, part: TableGradients, token: PushToken) -> tuple[Table, Ids, Floats]:
        entry = self._open_entry(part.table)
        if part.route:  # the pull that left them has checked them
            kept = self._routes.find(token.worker, token.epoch, part.route, part.table)
            if kept is None:
                raise UnknownRoute(worker=token.worker, route=part.route, table=part.table)
            ids = kept
        else:
            ids = part.ids
            self._check_ids(entry, ids)
        gradients = _matrix(entry, ids, "gradients", part.gradients)
        if not (math.isfinite(part.lr_scale) and part.lr_scale >= 0):
            raise InvalidRequest(reason=f"table {part.table!r}: lr_scale must be finite and >= 0, got {part.lr_scale}")
        return entry.table, ids, gradients

    def _check_placement(self, epoch: int) -> None:
        if epoch != self._placement.epoch:
            raise WrongPlacement(got=epoch, want=self._placement.epoch)

    def _entry(self, name: str) -> _Entry:
        entry = self._tables.get(name)
        if entry is None:
            known = sorted(self._tables)
            more = f" and {len(known) - _NAMES_SHOWN} more" if len(known) > _NAMES_SHOWN else ""
            raise UnknownTable(table=name, known=(", ".join(known[:_NAMES_SHOWN]) or "none") + more)
        return entry

    def _open_entry(self, name: str) -> _Entry:
        entry = self._entry(name)
        if entry.loader is not None:
            raise TableLoading(table=name, worker=entry.loader)
        return entry

    def _check_ids(self, entry: _Entry, ids: Ids) -> None:
        """Shape, and that every id belongs here.

        A row that another id space or placement led here would never be found again. The check costs about 1 ns
        per id, the memory access of a row 50 to 100.
        """
        name = entry.table.spec.name
        if ids.dtype != np.int64 or ids.ndim != 1 or not ids.flags.c_contiguous:
            raise InvalidRequest(reason=f"table {name!r}: ids must be (U,) int64, got {ids.shape} {ids.dtype}")
        foreign = _first_foreign(ids, entry.space_key, self._placement.shard_of, self.greeting.shard)
        if foreign >= 0:
            space = entry.table.spec.id_space or name
            raise InvalidRequest(
                reason=f"table {name!r}: id {ids[foreign]} does not belong to shard {self.greeting.shard}; "
                f"route it with the id space {space!r}"
            )


def _matrix(entry: _Entry, ids: Ids, what: str, values: Floats) -> Floats:
    """Values as (U, dim): they come flat from the wire."""
    spec = entry.table.spec
    want = len(ids) * spec.dim
    if values.size != want or (values.ndim > 1 and values.shape != (len(ids), spec.dim)):
        raise WrongDim(table=spec.name, what=what, got=values.size, ids=len(ids), dim=spec.dim, want=want)
    if values.dtype != np.float32 or not values.flags.c_contiguous:
        raise InvalidRequest(reason=f"table {spec.name!r}: {what} must be float32 in C order, got {values.dtype}")
    return values.reshape(len(ids), spec.dim)


def _check_room(parts: list[tuple[Table, int]]) -> None:
    """TableFull where a table could not take all ids as new rows: half of a push would be applied by then."""
    wanted: dict[str, int] = {}
    for table, count in parts:
        name = table.spec.name
        wanted[name] = wanted.get(name, 0) + count
        if table.num_rows + wanted[name] > table.capacity:
            raise TableFull(table=name, rows=table.num_rows, capacity=table.capacity, ids=wanted[name])


def _table_status(entry: _Entry) -> TableStatus:
    table = entry.table
    return TableStatus(
        name=table.spec.name,
        dim=table.spec.dim,
        rows=table.num_rows,
        bytes=table.nbytes,
        optimizer=table.spec.optimizer.name,
        loading=entry.loader is not None,
    )


def _resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
