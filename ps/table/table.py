"""One table of a shard: rows by 64-bit id, and the optimizer's state beside each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from embershard.proto.arrays import Floats, Ids
from embershard.proto.compiled.intrinsics import ROW_FUNCTION, address_of
from embershard.proto.compiled.jit import compiled
from embershard.proto.errors import BadOptimizer, EmbershardError, InvalidRequest, TableFull, WrongDim
from embershard.proto.optim.user_defined import RowOptimizer
from embershard.proto.routing import NUM_BUCKETS
from embershard.proto.spec import TableSpec
from embershard.ps.table import kernels
from embershard.ps.table.arena import Arena, physical_memory
from embershard.ps.table.changes import Changes
from embershard.ps.table.frozen import CopyOnWriteRows
from embershard.ps.table.frozen_kernels import restore_records
from embershard.ps.table.hash_index import HEADER, NUM_ENTRIES, NUM_PAGES, NUM_ROWS, PAGE_CELLS, HashIndex
from embershard.ps.table.initial_values import initializer_code

S = TypeVar("S", bound=np.generic)

MAX_ROWS = 2**32 - 2  # a cell has 32 bits for the slot
_SMALLEST = 1 << 20  # bytes of reservation that a table cannot do without
_PAGE_ROWS = 128  # rows that an index page holds at the very least, over many pages
_NO_CLIPS = np.zeros(2)
_NO_AGES = np.empty(0, np.float32)


@compiled(ROW_FUNCTION)
def _add(row: Floats, state: Floats, grad: Floats, hyper: npt.NDArray[np.float64]) -> None:
    for j in range(row.size):
        row[j] += grad[j]


_ADD_ADDRESS = address_of(_add)


class Applied(NamedTuple):
    """What a push did: rows updated, and rows left alone because their gradient was not finite."""

    rows: int
    skipped: int


class Table:
    """Rows of one dim by id. One thread at a time; calls release the GIL.

    reserve_bytes: address space for the rows, by default the machine's memory; nothing is used before it is needed.
    EmbershardError when the system refuses any reservation.
    """

    def __init__(self, spec: TableSpec, optimizer: RowOptimizer, reserve_bytes: int | None = None) -> None:
        self.spec = spec
        params = optimizer.params(spec.optimizer)
        self._hyper = np.array([*params.values(), 1.0])  # (settings + 1,) float64, params() order, then the age
        self._lr = params["lr"]
        self._clips = np.array([params["clip_value"], params["clip_norm"]])
        self._update = optimizer.compiled  # kept: the kernels hold its address
        self._update_address = address_of(self._update)
        self._fresh = optimizer.initial(spec.dim, params)
        self._stride = (HEADER + spec.dim + len(self._fresh) + 1) // 2 * 2
        self._store = self._reserve(physical_memory() if reserve_bytes is None else reserve_bytes)
        self._counters = self._store.counters
        self._frozen: CopyOnWriteRows | None = None  # while a snapshot reads
        self.changes: Changes | None = None  # once somebody wants to know

    @property
    def num_rows(self) -> int:
        """Rows that exist."""
        return int(self._counters[NUM_ROWS])

    @property
    def capacity(self) -> int:
        """Rows that there is address space for."""
        return self._store.ids.size * 2 // self._stride

    @property
    def num_state(self) -> int:
        """Floats of optimizer state per row."""
        return len(self._fresh)

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use: records, index, and what is known of changes."""
        pages, entries = int(self._counters[NUM_PAGES]), int(self._counters[NUM_ENTRIES])
        index = pages * (PAGE_CELLS * 8 + 4) + entries * 4 + self._store.root.nbytes
        changes = 0 if self.changes is None else self.changes.nbytes
        return self.num_rows * self._stride * 4 + index + changes

    def gather(self, ids: Ids, out: Floats | None = None) -> Floats:
        """Weights of ids ((U,) int64), first values where an id has no row; (U, dim) float32, into `out` if given."""
        flat = _array(ids, np.int64, self.spec.name, "the ids")
        if out is None:
            out = np.empty((len(flat), self.spec.dim), np.float32)
        self._check(flat, out, "the output rows")
        kernels.gather(self._store, flat, out)
        return out

    def apply(self, ids: Ids, gradients: Floats, lr_scale: float = 1.0, ages: Floats | None = None) -> Applied:
        """Update the rows of ids ((U,) int64) with gradients ((U, dim) float32), creating those that do not exist.

        Equal ids are applied one after the other. lr_scale multiplies the learning rate of this call. ages, (U,)
        float32, are whole numbers: the pushes whose gradients are summed in each row; without them, one. A row whose
        gradient has a NaN or Inf is skipped, and is not created. WrongDim when the shapes do not fit. TableFull when
        there is no room for that many new rows; nothing is applied then.
        """
        self._hyper[0], self._hyper[-1] = self._lr * lr_scale, 1.0
        ages = _NO_AGES if ages is None else ages
        return self._update_rows(ids, gradients, "the gradients", self._clips, self._update_address, ages)

    def add(self, ids: Ids, differences: Floats) -> Applied:
        """Add differences ((U, dim) float32) to the rows of ids ((U,) int64), past the optimizer and its state.

        Rows that do not exist are created. NaN, Inf and errors as in `apply`.
        """
        return self._update_rows(ids, differences, "the differences", _NO_CLIPS, _ADD_ADDRESS)

    def _update_rows(
        self,
        ids: Ids,
        rows: Floats,
        what: str,
        clips: npt.NDArray[np.float64],
        update: int,
        ages: Floats = _NO_AGES,
    ) -> Applied:
        flat = _array(ids, np.int64, self.spec.name, "the ids")
        rows = _array(rows, np.float32, self.spec.name, what)
        self._check(flat, rows, what)
        self._before_write(flat)
        before = None if self.changes is None else self.gather(flat)
        skipped = np.zeros(1, np.int64)
        pushed = rows, rows.view(np.int32), ages
        end = kernels.apply(self._store, flat, pushed, self._hyper, clips, update, skipped)
        self._record(flat, before)
        if end == kernels.OPTIMIZER_RAISED:
            reason = f"it raised an exception in table {self.spec.name!r}; a row function must not raise"
            raise BadOptimizer(optimizer=self.spec.optimizer.name, reason=reason)
        if end != kernels.DONE:
            raise self._full(len(flat))
        return Applied(len(flat) - int(skipped[0]), int(skipped[0]))

    def load(self, ids: Ids, rows: Floats, *, keep_state: bool = False) -> None:
        """Set the weights of ids ((U,) int64) to rows ((U, dim) float32), and their state to its first value.

        With `keep_state` rows that exist keep theirs.
        """
        flat = _array(ids, np.int64, self.spec.name, "the ids")
        rows = _array(rows, np.float32, self.spec.name, "the rows")
        self._check(flat, rows, "the rows")
        self._before_write(flat)
        before = None if self.changes is None else self.gather(flat)
        end = kernels.load(self._store, flat, rows, keep_state)
        self._record(flat, before)
        if end != kernels.DONE:
            raise self._full(len(flat))

    def restore(self, ids: Ids, rows: Floats, state: Floats) -> None:
        """Give ids ((U,) int64) these weights ((U, dim) float32) and states ((U, num_state) float32).

        TableFull when there is no room for that many new rows.
        """
        self._before_write(ids)
        if restore_records(self._store, ids, rows, state) != kernels.DONE:
            raise self._full(len(ids))

    def freeze(self) -> CopyOnWriteRows:
        """The rows as they are now, for one other thread to read while this one goes on, until `thaw`.

        OSError where the system refuses the address space for copies.
        """
        self._frozen = CopyOnWriteRows(self._store)
        return self._frozen

    def thaw(self, frozen: CopyOnWriteRows) -> None:
        """Copy rows for this reader no more; any thread may say so."""
        if self._frozen is frozen:
            self._frozen = None

    def scan(self, block: int = 65_536) -> Iterator[tuple[Ids, Floats, Floats]]:
        """Copies of (ids, weights (n, dim), state (n, num_state)) in blocks of slots, in slot order."""
        records = self._store.floats[: self.capacity * self._stride].reshape(-1, self._stride)
        ids = self._store.ids.reshape(-1)[: self.capacity * (self._stride // 2)].reshape(-1, self._stride // 2)
        first, last = HEADER + self.spec.dim, HEADER + self.spec.dim + len(self._fresh)
        for start in range(0, self.num_rows, block):
            part = slice(start, min(start + block, self.num_rows))
            yield ids[part, 0].copy(), records[part, HEADER:first].copy(), records[part, first:last].copy()

    def _check(self, ids: Ids, rows: Floats, what: str) -> None:
        if ids.ndim != 1 or rows.shape != (len(ids), self.spec.dim):
            dim = self.spec.dim
            raise WrongDim(table=self.spec.name, what=what, got=rows.size, ids=ids.size, dim=dim, want=ids.size * dim)

    def _before_write(self, ids: Ids) -> None:
        """TableFull where there is no room; rows that a snapshot has yet to read are copied aside."""
        if self.num_rows + len(ids) > self.capacity:
            raise self._full(len(ids))
        frozen = self._frozen
        if frozen is not None:
            frozen.keep(ids)

    def _record(self, ids: Ids, before: Floats | None) -> None:
        if self.changes is not None and before is not None:
            self.changes.record(ids, before, self.gather(ids))
            if self.changes.idle:
                self.changes = None

    def _full(self, count: int) -> TableFull:
        return TableFull(table=self.spec.name, rows=self.num_rows, capacity=self.capacity, ids=count)

    def _reserve(self, nbytes: int) -> HashIndex:
        """The largest store that the system grants, from `nbytes` of rows downwards."""
        while True:
            capacity = min(max(nbytes, _SMALLEST) // (self._stride * 4), MAX_ROWS)
            try:
                return self._make_store(capacity)
            except OSError as error:
                if nbytes <= _SMALLEST:
                    reason = f"table {self.spec.name!r}: cannot reserve {nbytes} bytes of address space ({error}); "
                    reason += "lift `ulimit -v`, or set vm.overcommit_memory to 0 or 1"
                    raise EmbershardError(reason=reason) from error
                nbytes //= 4

    def _make_store(self, capacity: int) -> HashIndex:
        pages = capacity // _PAGE_ROWS + 2 * NUM_BUCKETS
        entries = 16 * pages  # directories that were outgrown included
        records = Arena(capacity * self._stride * 4)
        floats = records.take(np.float32, capacity * self._stride, huge=True)
        index = Arena(NUM_BUCKETS * 8 + entries * 4 + pages * (4 + PAGE_CELLS * 8) + 4 * 4096)
        kind, bounds = initializer_code(self.spec.initializer)
        return HashIndex(
            floats=floats,
            ids=floats.view(np.int64),
            root=index.take(np.uint64, NUM_BUCKETS),
            directory=index.take(np.uint32, entries),
            fill=index.take(np.uint32, pages),
            cells=index.take(np.uint64, pages * PAGE_CELLS, huge=True),
            counters=np.array([0, 1, 1]),  # page 0 and the directory entry that leads to it
            fresh=self._fresh,
            bounds=bounds,
            space_key=np.uint64(self.spec.space_key),
            row_seed=np.uint64(self.spec.row_seed),
            stride=np.uint64(self._stride),
            dim=np.uint64(self.spec.dim),
            initializer=np.uint64(kind),
        )


def _array(array: npt.NDArray[S], dtype: type[S], table: str, what: str) -> npt.NDArray[S]:
    """The array as the kernels take it, C-ordered and aligned; a copy only if it is not. InvalidRequest: its dtype."""
    if array.dtype != dtype:
        raise InvalidRequest(reason=f"table {table!r}: {what} must be {np.dtype(dtype).name}, got {array.dtype.name}")
    return np.require(array, requirements=["C", "A"])
