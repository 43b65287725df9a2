"""The tables of a shard by name, and what a request says about them, checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from numba import types

from embershard.proto.arrays import Bytes, Floats, Ids
from embershard.proto.codec.name import CodecName
from embershard.proto.codec.payload import decode
from embershard.proto.codec.user_defined import CodecRegistry
from embershard.proto.compiled.jit import compiled
from embershard.proto.errors import (
    BadOptimizer,
    DamagedPayload,
    InvalidRequest,
    MessageTooLarge,
    NonFiniteValue,
    OtherRows,
    TableLoading,
    TableMismatch,
    TooManyTables,
    UnknownTable,
    WrongDim,
)
from embershard.proto.messages import (
    DELTA,
    PACKED,
    READ_ONLY_WORKER,
    Declare,
    Declared,
    Load,
    TableGradients,
    TableIds,
    TableStatus,
)
from embershard.proto.routing import BUCKET_SHIFT, Placement, make_route, mix64, sum_rows
from embershard.proto.spec import MAX_FLOAT32, TableSpec
from embershard.ps.memory import MemoryBudget
from embershard.ps.security.table_quotas import TableQuotas
from embershard.ps.table.checked import (
    PLAIN,
    BundleRead,
    Checked,
    CheckedBundle,
    CheckedGradients,
    CheckedRead,
    Members,
    Words,
    own_gradients,
)
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Applied, Table

# of a shard: each has an index of its own, and three ranges of addresses of the 65,530 of a process
MAX_TABLES = 20_000
# that are remembered, and members of all of them, 44 bytes each: which tables go together is of the peer's choice
_MOST_BUNDLES, _MOST_MEMBERS = 1024, 2**16
_NAMES_SHOWN = 20  # of the known tables, in an error that must fit gRPC's metadata


@dataclass(slots=True)
class Entry:
    """A table, who still loads its first values, and what its workers say of it."""

    table: Table
    space_keys: Words  # (1,)
    loader: int | None
    dense: bool = False
    codecs: tuple[str, str] = ("", "")  # push and pull, of the worker that declared it last
    num_rows: int = 0  # in the models of the workers of the job that goes on; 0: none of them has said it


@compiled(
    types.int64(
        types.Array(types.int64, 1, "C", readonly=True),
        types.Array(types.int64, 1, "C", readonly=True),
        types.uint64[::1],
        types.Array(types.uint16, 1, "C", readonly=True),
        types.int64,
    ),
    at_start=True,
)
def _first_foreign(ids: Ids, ends: Ids, space_keys: Words, shard_of: npt.NDArray[np.uint16], shard: int) -> int:
    """Position of the first id that another shard holds, -1 if there is none. ends: of each table's ids, (T,)."""
    begin = 0
    for t in range(ends.size):
        for i in range(begin, ends[t]):
            if shard_of[mix64(np.uint64(ids[i]), space_keys[t]) >> np.uint64(BUCKET_SHIFT)] != shard:
                return i
        begin = ends[t]
    return -1


class Tables:
    """Name -> table of shard `shard` of a placement; `coding` runs while payloads are decoded."""

    def __init__(
        self,
        shard: int,
        placement: Placement,
        optimizers: OptimizerRegistry,
        coding: AbstractContextManager[None],
        codecs: CodecRegistry | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        self.budget = MemoryBudget() if budget is None else budget
        self._shard = shard
        self._placement = placement
        self._optimizers = optimizers
        self._codecs = codecs or CodecRegistry()
        self._coding = coding
        self._entries: dict[str, Entry] = {}
        self._bundles: dict[tuple[str, ...], Members] = {}
        self._num_members = 0  # of all of these
        self.revision = 0  # grows whenever there are other tables
        self.quotas: TableQuotas | None = None  # of whom a request comes from, while it is handled

    def status(self) -> tuple[TableStatus, ...]:
        """Sizes; may be read by any thread."""
        return tuple(map(_table_status, tuple(self._entries.values())))

    def names(self) -> list[str]:
        """Return the names of all tables."""
        return list(self._entries)

    def table(self, name: str) -> Table:
        """A table that is here."""
        return self._entries[name].table

    def all(self) -> tuple[Table, ...]:
        """All tables, those that are loading too."""
        return tuple(entry.table for entry in self._entries.values())

    def have_rows(self) -> bool:
        """Whether any table has a row."""
        return any(entry.table.num_rows for entry in self._entries.values())

    def opened(self) -> tuple[Table, ...]:
        """All tables; TableLoading while one has not all of its first values."""
        return tuple(self.open_entry(name).table for name in self._entries)

    def flags(self) -> list[list[Any]]:
        """Return the state of the tables beside their rows, in plain values."""
        return [[name, one.loader, one.dense, list(one.codecs)] for name, one in self._entries.items()]

    def restore(self, tables: Sequence[Table], flags: Sequence[Sequence[Any]]) -> None:
        """Have these tables and no others, with these flags."""
        found = {table.spec.name: table for table in tables}
        self._entries = {
            name: Entry(found[name], _space_keys(found[name].spec), loader, dense, (codecs[0], codecs[1]))
            for name, loader, dense, codecs in flags
        }
        self._changed()

    def replace(
        self, tables: Sequence[Table], flags: Mapping[str, tuple[bool, tuple[str, str]]] = MappingProxyType({})
    ) -> None:
        """Have these tables, and no others. flags: by table, whether it is dense, and its codecs, where it is known."""
        self._entries = {
            table.spec.name: Entry(table, _space_keys(table.spec), None, *flags.get(table.spec.name, (False, ("", ""))))
            for table in tables
        }
        self._changed()

    def _changed(self) -> None:
        """There are other tables from here on."""
        self.revision += 1
        self._forget_bundles()

    def _forget_bundles(self) -> None:
        self._bundles.clear()
        self._num_members = 0

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def declare(self, request: Declare, *, job_goes_on: bool) -> tuple[Declared, bool]:
        """Create the table or compare it; and whether anything changed. TooManyTables, TableFull, TableQuotaExceeded.

        While a job goes on, its workers must have the same number of rows; a later job's model may have more.

        A table created with `load` is closed to pulls and pushes until its loader sends the last Load. If the loader
        dies, it stays closed, for half of its first values may be missing: the same worker declares again with `load`
        and is told to load from the start, as after a reply that was lost.
        """
        spec, loader = request.spec, request.worker if request.load else None
        for codec in (spec.push_codec, spec.pull_codec):
            self.check_codec(codec)
        codecs = (str(spec.push_codec), str(spec.pull_codec))
        entry = self._entries.get(spec.name)
        if entry is None:
            optimizer = self._optimizers.find(spec.optimizer)
            if len(self._entries) >= MAX_TABLES:
                raise TooManyTables(table=spec.name, limit=MAX_TABLES)
            table = Table(spec, optimizer, self.budget)
            if self.quotas is not None:
                self.quotas.check_table(self, table)
            self._changed()
            self._entries[spec.name] = Entry(table, _space_keys(spec), loader, request.dense, codecs, request.num_rows)
            return Declared(created=True, loading=request.load), True
        if difference := entry.table.spec.difference(spec):
            raise TableMismatch(table=spec.name, difference=difference)
        if job_goes_on and 0 not in (entry.num_rows, request.num_rows) and entry.num_rows != request.num_rows:
            raise OtherRows(table=spec.name, want=entry.num_rows, got=request.num_rows)
        before = entry.dense, entry.codecs, entry.num_rows
        entry.dense = entry.dense or request.dense
        if request.worker != READ_ONLY_WORKER:
            entry.codecs, entry.num_rows = codecs, request.num_rows or entry.num_rows
        again = loader is not None and entry.loader == loader
        changed = before != (entry.dense, entry.codecs, entry.num_rows)
        return Declared(created=again, loading=entry.loader is not None), changed

    def only_compares(self, request: Declare) -> bool:
        """Whether `declare` would change nothing; it may raise TableMismatch, and changes nothing then."""
        entry, spec = self._entries.get(request.spec.name), request.spec
        if entry is None or request.load or (request.dense and not entry.dense):
            return False
        if request.worker == READ_ONLY_WORKER:
            return True
        tells_rows = request.num_rows not in (0, entry.num_rows)
        return not tells_rows and entry.codecs == (str(spec.push_codec), str(spec.pull_codec))

    def begin_job(self) -> None:
        """Forget what the workers of the job before said of their models."""
        for entry in self._entries.values():
            entry.num_rows = 0

    def check_codec(self, codec: CodecName) -> None:
        """UnknownCodec where this shard cannot read or write what a codec makes of values."""
        self._codecs.find(codec.values)

    def load(self, request: Load) -> int:
        """Assign rows; how many. The last word wins: a client sends `last` after all other parts were answered."""
        entry = self.entry(request.table)
        if entry.loader not in (None, request.worker):
            raise TableLoading(table=request.table, worker=entry.loader)
        self.check_ids(entry, request.ids)
        rows = _matrix(entry.table.spec, request.ids, "rows", request.rows)
        if not np.isfinite(rows).all():
            count = int(rows.size - np.count_nonzero(np.isfinite(rows)))
            raise NonFiniteValue(table=request.table, what="rows to load", count=count)
        entry.table.load(request.ids, rows, keep_state=request.keep_state)
        if request.last:
            entry.loader = None
        return len(request.ids)

    def entry(self, name: str) -> Entry:
        """A table that was declared; UnknownTable."""
        entry = self._entries.get(name)
        if entry is None:
            known = sorted(self._entries)
            more = f" and {len(known) - _NAMES_SHOWN} more" if len(known) > _NAMES_SHOWN else ""
            raise UnknownTable(table=name, known=(", ".join(known[:_NAMES_SHOWN]) or "none") + more)
        return entry

    def num_floats(self, part: TableIds) -> int:
        """How many floats the rows of a part have; 0 where its table is not here."""
        entry = self._entries.get(part.members[0] if part.members else part.table)
        return 0 if entry is None else len(part.ids) * entry.table.spec.dim

    def open_entry(self, name: str) -> Entry:
        """A table that has its first values; UnknownTable, TableLoading."""
        entry = self.entry(name)
        if entry.loader is not None:
            raise TableLoading(table=name, worker=entry.loader)
        return entry

    def check_ids(self, entry: Entry, ids: Ids) -> None:
        """Shape, and that every id belongs here.

        A row that another id space or placement led here would never be found again. The check costs about 1 ns
        per id, the memory access of a row 50 to 100.
        """
        _check_form(ids, entry.table.spec.name)
        self._check_place(ids, np.array([len(ids)]), entry.space_keys, (entry.table,))

    def _check_place(self, ids: Ids, ends: Ids, space_keys: Words, tables: Sequence[Table]) -> None:
        foreign = _first_foreign(ids, ends, space_keys, self._placement.shard_of, self._shard)
        if foreign >= 0:
            spec = tables[int(np.searchsorted(ends, foreign, "right"))].spec
            raise InvalidRequest(
                reason=f"table {spec.name!r}: id {ids[foreign]} does not belong to shard {self._shard}; "
                f"route it with the id space {spec.id_space or spec.name!r}"
            )

    def members(self, names: tuple[str, ...]) -> Members:
        """The tables of a bundle. UnknownTable, TableLoading; InvalidRequest where they have several dims."""
        found = self._bundles.get(names)
        if found is None:
            tables = [self.open_entry(name).table for name in names]
            if len(set(names)) < len(names):
                raise InvalidRequest(reason=f"a bundle of {len(names)} tables names one twice")
            if len(dims := {table.spec.dim for table in tables}) != 1:
                raise InvalidRequest(reason=f"a bundle of tables of dims {sorted(dims)}; they must have one")
            if len(self._bundles) >= _MOST_BUNDLES or self._num_members + len(names) > _MOST_MEMBERS:
                self._forget_bundles()
            self._num_members += len(names)
            found = Members.of(tables)
            # by the tables' own names, not the message's; a table that has its first values keeps them
            self._bundles[tuple([table.spec.name for table in tables])] = found
        return found

    def check_open(self, part: TableGradients) -> None:
        """UnknownTable or TableLoading where a table of it is not here, or has not all of its first values."""
        _ = self.members(part.members) if part.members else self.open_entry(part.table)

    def _ends(self, part: TableIds | TableGradients, ids: Ids) -> Ids:
        """Where each table's ids of a bundle end. InvalidRequest where they are not as many as its counts say."""
        ends = np.cumsum(np.array(part.counts, np.int64))
        if len(part.counts) != len(part.members) or min(part.counts) < 0 or ends[-1] != len(ids):
            said = f"{len(part.counts)} counts say {sum(part.counts)} ids, and it has {len(ids)}"
            raise InvalidRequest(
                reason=f"a bundle of {len(part.members)} tables, {part.members[0]!r} the first: {said}"
            )
        return ends

    def check_read(self, part: TableIds) -> CheckedRead | BundleRead:
        """Check a read; UnknownCodec where it is wanted in a form that this shard cannot write."""
        if part.members:
            members, ids = self.members(part.members), part.ids
            _check_form(ids, part.members[0])
            ends = self._ends(part, ids)
            self._check_place(ids, ends, members.space_keys, members.tables)
            return BundleRead(members, part.counts, ends, ids, part.into)
        entry = self.open_entry(part.table)
        self.check_ids(entry, part.ids)
        if part.codec == DELTA:
            return CheckedRead(entry.table, part.ids, PLAIN, part.since)
        codec = self._codecs.find(part.codec) if part.codec else PLAIN
        return CheckedRead(entry.table, part.ids, codec, into=part.into)

    def _check_bundle(self, part: TableGradients, kept: Ids | None) -> Checked:
        members = self.members(part.members)
        if not part.unique:
            reason = f"a bundle, {part.members[0]!r} the first, must have unique_ids: its equal ids are not summed"
            raise InvalidRequest(reason=reason)
        ids = part.ids if kept is None else kept
        if kept is None:
            _check_form(ids, part.members[0])
        ends = self._ends(part, ids)
        if kept is None:
            self._check_place(ids, ends, members.space_keys, members.tables)
        spec = members.tables[0].spec
        gradients = _matrix(spec, ids, "gradients", cast(Floats, part.gradients))
        copy = None if part.copy is None else part.copy.reshape(gradients.shape)
        return CheckedBundle(members, part.counts, ends, ids, gradients, part.lr_scale, copy)

    def check_gradients(self, part: TableGradients, kept: Ids | None, room: int) -> Checked:
        """Gradients that fit their table, decompressed; their ids are those `kept` from a pull, which has checked them.

        kept: None where they came with the gradients. room: bytes that they may take, decompressed; MessageTooLarge.
        """
        if not 0 <= part.lr_scale <= MAX_FLOAT32:
            name = part.table or part.members[0]
            what = f"lr_scale must be finite in float32 and >= 0, got {part.lr_scale}"
            raise InvalidRequest(reason=f"table {name!r}: {what}")
        if part.members:
            return self._check_bundle(part, kept)
        entry = self.open_entry(part.table)
        if kept is None:
            self.check_ids(entry, part.ids)
        ids = part.ids if kept is None else kept
        if not part.codec:
            gradients = _matrix(entry.table.spec, ids, "gradients", cast(Floats, part.gradients))
            copy = None if part.copy is None else part.copy.reshape(gradients.shape)
            return _summed(CheckedGradients(entry.table, ids, gradients, part.lr_scale, copy=copy), unique=part.unique)
        if part.codec != PACKED and ":" not in part.codec:  # the name of a values codec, as a pull has it
            raise InvalidRequest(
                reason=f"table {part.table!r}: a push has no codec {part.codec[:50]!r}; send float32 without a codec, "
                f"or a payload, which names its values codec itself, with codec {PACKED!r} (docs/payloads.md)"
            )
        dim = entry.table.spec.dim
        if (size := 4 * len(ids) * dim) > room:  # before memory is taken: a payload is small, its rows are not
            raise MessageTooLarge(got=size, limit=room)
        name = "" if part.codec == PACKED else part.codec
        try:
            with self._coding:
                rows = decode(cast(Bytes, part.gradients), len(ids), dim, self._codecs.find, name)
        except DamagedPayload as error:
            reason = f"gradients of {len(ids)} ids of table {part.table!r}: {error.fields['reason']}"
            raise DamagedPayload(codec=error.fields["codec"], reason=reason) from None
        ids = ids if rows.positions is None else ids[rows.positions]
        checked = CheckedGradients(entry.table, ids, rows.rows, part.lr_scale, rows.ages)
        return _summed(checked, unique=part.unique)


def _summed(part: CheckedGradients, *, unique: bool) -> CheckedGradients:
    """The gradients with those of equal ids summed.

    A worker's ids are unique: to look for equal ones would take 1 to 7 % of the time of its push.
    """
    if unique:
        return part
    route = make_route(part.ids, 0, Placement.even(1))
    if len(route.ids) == len(part.ids):
        return part
    rows = sum_rows(route.index, np.ascontiguousarray(own_gradients(part)), len(route.ids))
    ages = None if part.ages is None else np.bincount(route.index, part.ages).astype(np.float32)
    return part._replace(ids=route.ids, gradients=rows, ages=ages, copy=None)


def single_tables(parts: Sequence[Checked]) -> list[CheckedGradients]:
    """The gradients of one table each."""
    return [one for part in parts for one in ([part] if isinstance(part, CheckedGradients) else part.split())]


def _apply(part: CheckedGradients, difference: bool, divisor: float) -> Applied:
    """Apply gradients, at the learning rate over `divisor`, or add them as differences to the rows.

    Whether there is memory was decided when they came (see Pushes): what was accepted is applied, in a replay too.
    """
    if difference:
        return part.table.add(part.ids, part.gradients, copy=part.copy, has_room=True)
    rate = part.lr_scale / divisor
    return part.table.apply(part.ids, part.gradients, rate, part.ages, copy=part.copy, has_room=True)


def apply_parts(parts: Sequence[tuple[Checked, bool]], divisor: float = 1.0, *, count: bool = True) -> Applied:
    """Apply all parts or none: gradients, at the learning rate over `divisor`, or (where a part is True) differences.

    Their tables `count` the rows, unless that was done when they came.

    BadOptimizer where a user's row function raises; rows and states are then as they were, and rows that the push
    created have their first values.
    """
    bundles = [part for part, difference in parts if isinstance(part, CheckedBundle) and not difference]
    bundles = [part for part in bundles if part.takes_one_call()]
    rest = [(part, difference) for part, difference in parts if not any(part is bundle for bundle in bundles)]
    single = [(one, difference) for part, difference in rest for one in single_tables([part])]
    may_raise = [(part, difference) for part, difference in single if part.table.may_raise]
    before = [(part.table, part.ids, *part.table.records(part.ids)) for part, _ in may_raise]
    if may_raise:  # first: after them nothing raises
        single = [*may_raise, *((part, difference) for part, difference in single if not part.table.may_raise)]
    try:
        done = [(part, _apply(part, difference, divisor)) for part, difference in single]
    except BadOptimizer:
        for table, ids, weights, state in reversed(before):  # two parts may have an id in common
            table.restore(ids, weights, state)
        raise
    if count:
        for part, applied in done:
            part.table.pushed_rows += applied.rows
            part.table.skipped_rows += applied.skipped
    results = [applied for _, applied in done]
    results += [part.apply(divisor, count=count) for part in bundles]
    return Applied(sum(one.rows for one in results), sum(one.skipped for one in results))


def _space_keys(spec: TableSpec) -> Words:
    return np.array([spec.space_key], np.uint64)


def _check_form(ids: Ids, name: str) -> None:
    if ids.dtype != np.int64 or ids.ndim != 1 or not ids.flags.c_contiguous:
        raise InvalidRequest(reason=f"table {name!r}: ids must be (U,) int64, got {ids.shape} {ids.dtype}")


def _matrix(spec: TableSpec, ids: Ids, what: str, values: Floats) -> Floats:
    """Values as (U, dim): they come flat from the wire."""
    want = len(ids) * spec.dim
    if values.size != want or (values.ndim > 1 and values.shape != (len(ids), spec.dim)):
        raise WrongDim(table=spec.name, what=what, got=values.size, ids=len(ids), dim=spec.dim, want=want)
    if values.dtype != np.float32 or not values.flags.c_contiguous:
        raise InvalidRequest(reason=f"table {spec.name!r}: {what} must be float32 in C order, got {values.dtype}")
    return values.reshape(len(ids), spec.dim)


def _table_status(entry: Entry) -> TableStatus:
    table = entry.table
    return TableStatus(
        name=table.spec.name,
        dim=table.spec.dim,
        rows=table.num_rows,
        bytes=table.nbytes,
        optimizer=table.spec.optimizer.name,
        loading=entry.loader is not None,
        push_codec=entry.codecs[0],
        pull_codec=entry.codecs[1],
        pulled_rows=table.pulled_rows,
        pushed_rows=table.pushed_rows,
        skipped_rows=table.skipped_rows,
    )
