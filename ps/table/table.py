"""One table of a shard: rows by 64-bit id, and the optimizer's state beside each."""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from embershard.proto.arrays import Floats, Ids
from embershard.proto.compiled.intrinsics import ROW_FUNCTION, address_of
from embershard.proto.compiled.jit import compiled, load
from embershard.proto.errors import BadOptimizer, InvalidRequest, NoAddressSpace, WrongDim
from embershard.proto.optim.user_defined import RowOptimizer
from embershard.proto.routing import BUCKET_SHIFT, NUM_BUCKETS
from embershard.proto.spec import Custom, TableSpec
from embershard.ps.memory import Charge, MemoryBudget
from embershard.ps.table import kernels
from embershard.ps.table.arena import Arena
from embershard.ps.table.changes import MOST_MARKS, ChangeTracker, ImageMark
from embershard.ps.table.frozen import CopyOnWriteRows
from embershard.ps.table.hash_index import (
    HEADER,
    MAY_REUSE,
    NUM_ENTRIES,
    NUM_FREE,
    NUM_PAGES,
    NUM_ROWS,
    NUM_SLOTS,
    PAGE_CELLS,
    PAGE_LIMIT,
    RESERVED,
    HashIndex,
)
from embershard.ps.table.initial_values import initializer_code

S = TypeVar("S", bound=np.generic)

MAX_ROWS = 2**32 - 2  # a cell has 32 bits for the slot
# Address space for the rows of a new table, and by how much it grows: ten thousand tables fit into 47 bits of
# addresses, and a table of a TiB has moved seven times.
_FIRST_BYTES = 1 << 28
_SMALLEST_BYTES = 1 << 20  # where the system refuses more
_GROWTH = 4
_PAGE_ROWS = 128  # rows that an index page holds at the very least, over many pages
_PAGE_BYTES = PAGE_CELLS * 8 + 4
_BUCKET_BITS = 64 - BUCKET_SHIFT
_NO_BITS = np.empty(0, np.uint8)
_NO_RATES = np.zeros(3)


@compiled(ROW_FUNCTION)
def _add(row: Floats, state: Floats, grad: Floats, hyper: npt.NDArray[np.float64]) -> None:
    for j in range(row.size):
        row[j] += grad[j]


_ADD_ADDRESS = address_of(_add)


class Applied(NamedTuple):
    """The result of a push: rows updated, and rows skipped because their gradient was not finite."""

    rows: int
    skipped: int


class Table:
    """Rows of one dim by id, within a budget of memory. One thread at a time; calls release the GIL.

    TableFull where the budget has no room for an empty table, NoAddressSpace where the system refuses addresses.
    """

    def __init__(self, spec: TableSpec, optimizer: RowOptimizer, budget: MemoryBudget | None = None) -> None:
        self.spec = spec
        params = optimizer.params(spec.optimizer)
        self._hyper = np.array([*params.values(), 1.0])  # (settings + 1,) float64, params() order, then the age
        self._rates = np.array([params["lr"], params["clip_value"], params["clip_norm"]])
        self.may_raise = isinstance(spec.optimizer, Custom)  # a user's function, in the middle of an update
        self._update = optimizer.compiled  # kept: the kernels hold its address
        # what kernels read to apply gradients, and to add differences; and where
        self._words = np.empty((2, kernels.TABLE_WORDS), np.int64)
        self.addresses, self._add_addresses = (np.array([words.ctypes.data]) for words in self._words)
        self._fresh = optimizer.initial(spec.dim, params)
        self._stride = (HEADER + spec.dim + len(self._fresh) + 1) // 2 * 2
        self.budget = MemoryBudget() if budget is None else budget
        self._charge = Charge(self.budget)
        self._index_key = np.uint64(secrets.randbits(64))
        self._counters = np.zeros(7, np.int64)
        self._counters[[NUM_PAGES, NUM_ENTRIES, MAY_REUSE]] = 1  # page 0 and the directory entry that leads to it
        self._dirty: Arena | None = None  # HashIndex.dirty, once an image wants the rows that changed since another
        self._marks: dict[str, list[ImageMark]] = {}  # by reader, the oldest first
        self._removed: list[Ids] = []  # since the bits were looked at
        self._free: npt.NDArray[np.uint32] = np.empty(0, np.uint32)  # HashIndex.free
        self._opened: HashIndex
        self.pulled_rows = self.pushed_rows = self.skipped_rows = 0  # counted by those who pull and push
        self._frozen: tuple[CopyOnWriteRows, ...] = ()  # while snapshots and bases read
        self._frozen_lock = threading.Lock()
        self.changes: ChangeTracker | None = None  # once somebody wants to know
        load(kernels.gather)  # not in the first pull, which would take ten times as long as the next
        self._reserve_first()
        self.budget.check(spec.name, self.nbytes)
        self.charge()

    @property
    def _store(self) -> HashIndex:
        """The arrays as they lie now."""
        return self._opened

    @_store.setter
    def _store(self, store: HashIndex) -> None:
        self._opened = store
        self._words[0] = kernels.table_words(store, self._hyper, self._rates, address_of(self._update))
        self._words[1] = kernels.table_words(store, self._hyper, _NO_RATES, _ADD_ADDRESS)

    @property
    def is_watched(self) -> bool:
        """Whether somebody wants rows as they were before they change."""
        return bool(self._frozen) or self.changes is not None

    @property
    def num_rows(self) -> int:
        """The number of rows that exist."""
        return int(self._counters[NUM_ROWS])

    @property
    def num_slots(self) -> int:
        """The number of rows that there is memory for: those that exist, and the places of removed ones."""
        return int(self._counters[NUM_SLOTS])

    @property
    def capacity(self) -> int:
        """Slots that there is address space for."""
        return int(self._store.ids.size * 2 // self._stride)

    @property
    def num_state(self) -> int:
        """Floats of optimizer state per row."""
        return len(self._fresh)

    @property
    def most_growth(self) -> int:
        """Bytes that a new row takes at most, a page of the index of its own included; see `growth`."""
        return self._stride * 4 + 2 * (_PAGE_BYTES + 64)

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use: records, index, a row's first state, and what is known of changes."""
        pages, entries = int(self._counters[NUM_PAGES]), int(self._counters[NUM_ENTRIES])
        index = pages * _PAGE_BYTES + entries * 4 + self._store.root.nbytes
        changes = 0 if self.changes is None else self.changes.nbytes
        bits = sum(map(len, self._marks.values()), self._dirty is not None) * _bit_bytes(self.num_slots)
        return self.num_slots * self._stride * 4 + self._free.nbytes + self._fresh.nbytes + index + changes + bits

    def growth(self, new_rows: int) -> int:
        """Bytes that so many new rows take at most, their part of the index included."""
        pages = min(new_rows, int(self._counters[NUM_PAGES])) + new_rows // _PAGE_ROWS
        free = 0 if self._frozen else int(self._counters[NUM_FREE])
        return max(0, new_rows - free) * self._stride * 4 + pages * (_PAGE_BYTES + 64)

    def count_missing(self, ids: Ids) -> int:
        """Count the ids ((U,) int64) that have no row; equal ones count again."""
        return int(kernels.count_missing(self._store, ids))

    def charge(self) -> None:
        """Count what is in use now in the budget."""
        nbytes = self.nbytes
        if nbytes != self._charge.nbytes:
            self._charge.set(nbytes)

    def gather(self, ids: Ids, out: Floats | None = None) -> Floats:
        """Weights of ids ((U,) int64), first values where an id has no row; (U, dim) float32, into `out` if given."""
        flat = _array(ids, np.int64, self.spec.name, "the ids")
        if out is None:
            out = np.empty((len(flat), self.spec.dim), np.float32)
        self._check(flat, out, "the output rows")
        kernels.gather(self.addresses, np.array([len(flat)]), flat, out)
        return out

    def apply(
        self,
        ids: Ids,
        gradients: Floats,
        lr_scale: float = 1.0,
        ages: Floats | None = None,
        *,
        copy: Floats | None = None,
        has_room: bool = False,
    ) -> Applied:
        """Update the rows of ids ((U,) int64) with gradients ((U, dim) float32), creating those that do not exist.

        Equal ids are applied one after the other. lr_scale multiplies the learning rate of this call. ages, (U,)
        float32, are whole numbers: the pushes whose gradients are summed in each row; without them, one. A row whose
        gradient has a NaN or Inf is skipped, and is not created. WrongDim when the shapes do not fit. TableFull when
        the budget has no room for the new rows; nothing is applied then. With `has_room` the caller has seen to it.
        Gradients that are read-only may change meanwhile, as in memory that another process writes: each row is copied
        before it is checked, to `copy` ((U, dim) float32) where there is one, which has what was applied then.
        """
        gradients = _array(gradients, np.float32, self.spec.name, "the gradients")
        if self.may_raise:  # a user's function may also write to its gradient, of which a log needs what came
            gradients = gradients.view()
            gradients.flags.writeable = False
        rows = kernels.pushed(gradients, copy, ages)
        return self._update_rows(ids, rows, "the gradients", self.addresses, lr_scale, has_room=has_room)

    def add(self, ids: Ids, differences: Floats, *, copy: Floats | None = None, has_room: bool = False) -> Applied:
        """Add differences ((U, dim) float32) to the rows of ids ((U,) int64), past the optimizer and its state.

        Rows that do not exist are created. NaN, Inf, `copy` and errors as in `apply`.
        """
        rows = kernels.pushed(_array(differences, np.float32, self.spec.name, "the differences"), copy)
        return self._update_rows(ids, rows, "the differences", self._add_addresses, has_room=has_room)

    def _update_rows(
        self,
        ids: Ids,
        pushed: kernels.Pushed,
        what: str,
        addresses: Ids,
        lr_scale: float = 1.0,
        *,
        has_room: bool,
    ) -> Applied:
        flat = _array(ids, np.int64, self.spec.name, "the ids")
        self._check(flat, pushed[0], what)
        self._before_write(flat, has_room=has_room)
        before = None if self.changes is None else self.gather(flat)
        skipped, created = np.zeros((2, 1), np.int64)
        end = kernels.apply(addresses, np.array([len(flat)]), flat, pushed, lr_scale, (skipped, created))
        self.charge()
        self._record(flat, before)
        if end == kernels.OPTIMIZER_RAISED:
            reason = f"it raised an exception in table {self.spec.name!r}; a row function must not raise"
            raise BadOptimizer(optimizer=self.spec.optimizer.name, reason=reason)
        self._check_index(end)
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
        self.charge()
        self._record(flat, before)
        self._check_index(end)

    def records(self, ids: Ids) -> tuple[Floats, Floats]:
        """Copies of the weights ((U, dim)) and states ((U, num_state)) of ids; the first ones without a row."""
        rows, state = np.empty((len(ids), self.spec.dim), np.float32), np.empty((len(ids), self.num_state), np.float32)
        kernels.copy_records(self._store, ids, rows, state)
        return rows, state

    def restore(self, ids: Ids, rows: Floats, state: Floats) -> None:
        """Give ids ((U,) int64) these weights ((U, dim) float32) and states ((U, num_state) float32).

        TableFull when the budget has no room for the new rows.
        """
        self._before_write(ids)
        end = kernels.restore(self._store, ids, rows, state)
        self.charge()
        self._check_index(end)

    def remove(self, ids: Ids) -> int:
        """Remove the rows of ids ((U,) int64), and their states; how many there were.

        They read as their first values again. Their memory is used again by new rows, not while a snapshot reads.
        """
        ids = _array(ids, np.int64, self.spec.name, "the ids")
        if (count := int(self._counters[NUM_FREE]) + len(ids)) > self._free.size:
            free = np.empty(max(count, 2 * self._free.size), np.uint32)
            free[: self._free.size] = self._free
            self._free, self._store = free, self._store._replace(free=free)
        self._keep_aside(ids)
        before = None if self.changes is None else self.gather(ids)
        removed = int(kernels.remove(self._store, ids))
        if self._marks:
            self._removed.append(ids.copy())
        self.charge()
        self._record(ids, before)
        return removed

    def mark(self, reader: str, name: object) -> None:
        """Note from here on which rows change, for a reader that takes an image of this moment by this name.

        The last MOST_MARKS of a reader are kept: one image may fail, and the next goes on from the one before.
        """
        if self._dirty is None:
            self._dirty = Arena(_bit_bytes(self.capacity))
            self._store = self._store._replace(dirty=self._dirty.array(np.uint8))
        else:
            self._collect()
        marks = self._marks.setdefault(reader, [])
        marks.append(ImageMark(name))
        del marks[:-MOST_MARKS]

    def changed_since(self, reader: str, name: object) -> ImageMark | None:
        """Return the rows that changed since a reader took the image of this name; None where it is not known."""
        marks = self._marks.get(reader, [])
        first = next((at for at in reversed(range(len(marks))) if marks[at].name == name), None)
        if first is None:
            return None
        self._collect()
        changed = ImageMark(name)
        for mark in marks[first:]:
            changed.add(mark.bits, mark.removed)
        return changed

    def _collect(self) -> None:
        """Have all readers know what has changed until now."""
        bits = self._store.dirty[: _bit_bytes(self.num_slots)]
        for marks in self._marks.values():
            marks[-1].add(bits, self._removed)
        bits[:] = 0
        self._removed = []

    def freeze(self) -> CopyOnWriteRows:
        """The rows as they are now, for one other thread to read while this one goes on, until `thaw`.

        Several may read, each the rows of its own moment.

        OSError where the system refuses the address space for copies, MemoryError where the budget has no room.
        """
        frozen = CopyOnWriteRows(self._store, np.uint64(self.spec.space_key), self.budget)
        with self._frozen_lock:
            self._frozen = (*self._frozen, frozen)
            self._counters[MAY_REUSE] = False
        return frozen

    def thaw(self, frozen: CopyOnWriteRows) -> None:
        """Copy rows for this reader no more; any thread may say so."""
        with self._frozen_lock:
            self._frozen = tuple(one for one in self._frozen if one is not frozen)
            self._counters[MAY_REUSE] = not self._frozen

    def scan(self, block: int = 65_536) -> Iterator[tuple[Ids, Floats, Floats]]:
        """Copies of (ids, weights (n, dim), state (n, num_state)) in blocks of slots, in slot order."""
        first, last = HEADER + self.spec.dim, HEADER + self.spec.dim + len(self._fresh)
        free = self._free[: int(self._counters[NUM_FREE])]
        for start in range(0, self.num_slots, block):
            records = self._store.floats[: self.capacity * self._stride].reshape(-1, self._stride)
            ids = self._store.ids[: self.capacity * (self._stride // 2)].reshape(-1, self._stride // 2)
            slots = np.arange(start, min(start + block, self.num_slots))
            part = slots[np.isin(slots, free, invert=True)] if free.size else slice(start, slots.size + start)
            yield ids[part, 0].copy(), records[part, HEADER:first].copy(), records[part, first:last].copy()

    def _check(self, ids: Ids, rows: Floats, what: str) -> None:
        if ids.ndim != 1 or rows.shape != (len(ids), self.spec.dim):
            dim = self.spec.dim
            raise WrongDim(table=self.spec.name, what=what, got=rows.size, ids=ids.size, dim=dim, want=ids.size * dim)

    def _before_write(self, ids: Ids, *, has_room: bool = False) -> None:
        """Make room for ids, as far as they are new, and copy aside the rows that a snapshot has yet to read.

        TableFull, unless the caller has seen that the budget `has_room`; NoAddressSpace.
        """
        # quick: as if all were new
        if not has_room and self.growth(len(ids)) > self.budget.limit - self.budget.used:
            self.budget.check(self.spec.name, self.growth(self.count_missing(ids)))
        self.reserve_for(ids)
        self._keep_aside(ids)

    def _keep_aside(self, ids: Ids) -> None:
        """Copy the rows aside that a snapshot has yet to read, before they change."""
        for frozen in self._frozen:
            if not frozen.keep(ids):
                frozen.give_up()  # rather than the push: training goes on, and the snapshot is taken again
                self.thaw(frozen)

    def _record(self, ids: Ids, before: Floats | None) -> None:
        if self.changes is not None and before is not None:
            self.changes.record(ids, before, self.gather(ids))
            if self.changes.idle:
                self.changes = None

    def _check_index(self, end: int) -> None:
        # more pages are reserved than ids that nobody chose by the key could fill
        assert end == kernels.DONE, f"the index of table {self.spec.name!r} is full at {self.num_rows} rows"

    def reserve(self, new_rows: int) -> None:
        """Have address space for so many more rows; NoAddressSpace where the system, or a table, has no more."""
        num_slots, capacity = self.num_slots + new_rows, self.capacity
        if num_slots <= self._counters[RESERVED]:  # an earlier call had addresses and huge pages for them
            return
        self._records.use_huge_pages(num_slots * self._stride * 4)
        self._cells.use_huge_pages((int(self._counters[NUM_PAGES]) + new_rows // _PAGE_ROWS) * PAGE_CELLS * 8)
        if num_slots <= capacity:
            self._counters[RESERVED] = num_slots
            return
        if num_slots > MAX_ROWS:
            raise self._no_address_space(new_rows, f"a table has at most {MAX_ROWS} rows")
        try:
            self._grow(min(_GROWTH * capacity, MAX_ROWS) if num_slots <= _GROWTH * capacity else num_slots)
        except OSError:
            try:
                self._grow(num_slots)
            except OSError as error:
                raise self._no_address_space(new_rows, str(error)) from error

    def reserve_for(self, ids: Ids) -> None:
        """Have address space for those of ids ((U,) int64) that have no row yet; see `reserve`."""
        try:
            self.reserve(len(ids))  # quick: as if all were new
        except NoAddressSpace:
            self.reserve(self.count_missing(ids))

    def filling(self, new_rows: int) -> AbstractContextManager[None]:
        """While so many new rows are restored in this context, take their memory in a thread. NoAddressSpace."""
        self.reserve(new_rows)
        if not self.num_slots:
            self._spread_index(new_rows)
        row_bytes = self._stride * 4
        first = self.num_slots * row_bytes
        return self._records.populating(first, first + new_rows * row_bytes, lambda: self.num_slots * row_bytes)

    def _spread_index(self, num_rows: int) -> None:
        """Give an empty table the index pages of so many rows: splitting full ones takes a third of a restore."""
        depth = max(0, math.ceil(math.log2(max(1, num_rows) / PAGE_LIMIT)))
        pages = np.arange(1 << depth, dtype=np.uint32)
        bits = max(0, depth - _BUCKET_BITS)  # of the fingerprint, that lead from a bucket to a page
        first = np.arange(NUM_BUCKETS, dtype=np.uint64) << np.uint64(bits) >> np.uint64(max(0, _BUCKET_BITS - depth))
        self._store.root[:] = first << np.uint64(8) | np.uint64(bits)
        self._store.directory[: len(pages)] = pages
        self._store.fill[: len(pages)] = depth << 16
        self._counters[[NUM_PAGES, NUM_ENTRIES]] = len(pages)

    def _reserve_first(self) -> None:
        """Reserve address space for a new table: the usual, or what the system grants."""
        nbytes = _FIRST_BYTES
        while True:
            capacity = max(1, nbytes // (self._stride * 4))
            pages, entries = _index_size(capacity)
            try:
                self._records = Arena(capacity * self._stride * 4)
                self._cells = Arena(pages * PAGE_CELLS * 8)
                self._directory = Arena(4 * (pages + entries) + 8 * NUM_BUCKETS)
            except OSError as error:
                if nbytes <= _SMALLEST_BYTES:
                    raise self._no_address_space(capacity, str(error)) from error
                nbytes //= 4
                continue
            self._store = self._open(pages, entries)
            return

    def _grow(self, capacity: int) -> None:
        """Move to where there are addresses for so many rows, unless the system refuses: OSError."""
        pages, entries = _index_size(capacity)
        directory = Arena(4 * (pages + entries) + 8 * NUM_BUCKETS)
        frozen = self._frozen
        with ExitStack() as readers:
            for one in frozen:
                readers.enter_context(one.moving())
            before = self._store
            try:
                if self._dirty is not None:
                    self._dirty.grow(_bit_bytes(capacity))
                self._cells.grow(pages * PAGE_CELLS * 8)
                self._records.grow(capacity * self._stride * 4)
            except OSError:  # the cells may have moved
                self._store = self._open(before.fill.size, before.directory.size)
                for one in frozen:
                    one.moved_to(self._store)
                raise
            self._directory = directory
            self._store = self._open(pages, entries)
            used = slice(int(self._counters[NUM_PAGES])), slice(int(self._counters[NUM_ENTRIES]))
            self._store.root[:] = before.root
            self._store.fill[used[0]] = before.fill[used[0]]
            self._store.directory[used[1]] = before.directory[used[1]]
            for one in frozen:
                one.moved_to(self._store)

    def _open(self, pages: int, entries: int) -> HashIndex:
        """The arrays as they lie now."""
        floats, small = self._records.array(np.float32), self._directory.array(np.uint32)
        kind, bounds = initializer_code(self.spec.initializer)
        return HashIndex(
            floats=floats,
            ids=floats.view(np.int64),
            root=small[: 2 * NUM_BUCKETS].view(np.uint64),
            directory=small[2 * NUM_BUCKETS : 2 * NUM_BUCKETS + entries],
            fill=small[2 * NUM_BUCKETS + entries : 2 * NUM_BUCKETS + entries + pages],
            cells=self._cells.array(np.uint64),
            free=self._free,
            dirty=_NO_BITS if self._dirty is None else self._dirty.array(np.uint8),
            counters=self._counters,
            fresh=self._fresh,
            bounds=bounds,
            index_key=self._index_key,
            row_seed=np.uint64(self.spec.row_seed),
            stride=np.uint64(self._stride),
            dim=np.uint64(self.spec.dim),
            initializer=np.uint64(kind),
        )

    def _no_address_space(self, new_rows: int, reason: str) -> NoAddressSpace:
        return NoAddressSpace(table=self.spec.name, rows=self.num_rows, new_rows=new_rows, reason=reason)


def _bit_bytes(slots: int) -> int:
    return -(-slots // 8)


def _index_size(capacity: int) -> tuple[int, int]:
    """Pages and directory entries for so many rows, directories that were outgrown included."""
    pages = capacity // _PAGE_ROWS + 2 * NUM_BUCKETS
    return pages, 16 * pages


def _array(array: npt.NDArray[S], dtype: type[S], table: str, what: str) -> npt.NDArray[S]:
    """The array as the kernels take it, C-ordered and aligned; a copy only if it is not. InvalidRequest: its dtype."""
    if array.dtype != dtype:
        raise InvalidRequest(reason=f"table {table!r}: {what} must be {np.dtype(dtype).name}, got {array.dtype.name}")
    if array.flags.c_contiguous and array.flags.aligned:  # nearly always, and sooner seen here than by numpy
        return array
    return np.require(array, requirements=["C", "A"])
