"""The rows of a table as they were at one moment, read by another thread while pushes go on.

Nothing is copied at that moment. From then on a push that is the first to change a row copies the old one aside, and
the reader takes each row from its copy or, unchanged, from the table. One lock orders the two; the reader holds it for
a slice of rows at a time. It relies on slots: a row never changes its own, and none is given to another id meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from embershard.proto.arrays import Bytes, Floats, Ids
from embershard.proto.errors import SnapshotNotWritten
from embershard.proto.routing import NUM_BUCKETS
from embershard.ps.memory import Charge, MemoryBudget
from embershard.ps.table import frozen_kernels
from embershard.ps.table.arena import Arena
from embershard.ps.table.changes import ImageMark
from embershard.ps.table.frozen_kernels import Slots
from embershard.ps.table.hash_index import HEADER, NUM_FREE, NUM_ROWS, NUM_SLOTS, HashIndex

if TYPE_CHECKING:
    from embershard.ps.table.table import Table

_SLICE_BYTES = 2**19  # of records read under the lock: for about as long as a small push takes
_FEW = 2**18  # floats that need no mapping of their own
_SLOT_BYTES = 14  # per row: where its copy is, its bucket, its slot, and that in the buckets' order
_SLICE_IDS = 2**15  # ids looked at under the lock: as many rows far apart


class RowBlock(NamedTuple):
    """Some rows of a frozen table, with their ids and states."""

    ids: Ids  # (n,)
    rows: Floats  # (n, dim)
    state: Floats  # (n, num_state)


class FrozenTable(NamedTuple):
    """A table, its rows at a moment, and what of them has changed since an image before; None where it is not known."""

    table: Table
    rows: CopyOnWriteRows
    changed: ImageMark | None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in an image, with its id and state."""
        return 8 + 4 * (self.rows.dim + self.rows.num_state)

    @property
    def increment_bytes(self) -> int:
        """Bytes of the rows that an increment has: all of them where it is not known what changed."""
        return self.row_bytes * (self.rows.num_rows if self.changed is None else len(self.rows.slots(self.changed)))


class CopyOnWriteRows:
    """Rows as they were when this was made. `keep`, `moving` and `give_up` are for the thread that writes the table.

    space_key: of the routing, by whose buckets the rows are read. OSError where the system refuses address space for
    copies of all rows, MemoryError where the budget has no room for a snapshot.
    """

    def __init__(self, store: HashIndex, space_key: np.uint64, budget: MemoryBudget) -> None:
        self.num_rows, self._num_slots = int(store.counters[NUM_ROWS]), int(store.counters[NUM_SLOTS])
        self._free = store.free[: int(store.counters[NUM_FREE])].copy()  # the slots without a row
        self.dim, self.num_state = int(store.dim), int(store.fresh.size)
        self._store, self._space_key = store, space_key
        self._budget, self._charge = budget, Charge(budget)
        self._own_bytes = _SLOT_BYTES * self._num_slots
        if self._own_bytes > budget.left:
            raise MemoryError(f"{self._own_bytes} bytes; {budget.used} of the shard's {budget.limit} bytes are in use")
        self._charge.set(self._own_bytes)
        self._given_up = False
        self._places = np.zeros(self._num_slots, np.uint32)
        floats = self.num_rows * (self.dim + self.num_state)
        # address space for all; memory is taken by what is copied
        self._kept = Arena(4 * floats).array(np.float32) if floats > _FEW else np.empty(floats, np.float32)
        self._count = np.zeros(1, np.int64)
        self._lock = threading.Lock()
        self._fairness_lock = threading.Lock()  # whoever waits for the lock holds it: the next slice comes after it

    @property
    def num_kept(self) -> int:
        """The number of rows that were copied before a change."""
        return int(self._count[0])

    def keep(self, ids: Ids) -> bool:
        """Copy the rows of ids ((U,) int64), which are about to be changed; False where there is no memory for them."""
        row_bytes = 4 * (self.dim + self.num_state)
        if row_bytes * min(len(ids), self.num_rows - self.num_kept) > self._budget.left:
            return False
        with self._fairness_lock, self._lock:
            frozen_kernels.keep_records(self._store, ids, self._places, self._kept, self._count)
        self._charge.set(self._own_bytes + self.num_kept * row_bytes)
        return True

    def give_up(self) -> None:
        """Have the reader end with SnapshotNotWritten: rows are changed that were not copied."""
        with self._fairness_lock, self._lock:
            self._given_up = True

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Keep the reader away while the arrays move; `moved_to` says where they are, before the block ends."""
        with self._fairness_lock, self._lock:
            yield

    def moved_to(self, store: HashIndex) -> None:
        """Read these arrays from now on."""
        self._store = store

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._fairness_lock:
            self._lock.acquire()
        try:
            if self._given_up:
                reason = "the shard's memory budget has no room for copies of the rows that change meanwhile"
                raise SnapshotNotWritten(
                    path="the rows of this moment", reason=reason, remedy=SnapshotNotWritten.of_memory
                )

            yield
        finally:
            self._lock.release()

    def by_bucket(self) -> tuple[Slots, Ids]:
        """(slots (num_rows,), starts (4097,)): the slots of bucket b are slots[starts[b]:starts[b + 1]]."""
        slots = self.slots()
        ordered, starts = np.empty(len(slots), np.uint32), np.zeros(NUM_BUCKETS + 1, np.int64)
        frozen_kernels.sort_by_bucket(self.buckets(slots), slots, ordered, starts)
        return ordered, starts

    def buckets(self, slots: Slots) -> npt.NDArray[np.uint16]:
        """The routing's buckets of slots."""
        buckets = np.empty(len(slots), np.uint16)
        for start in range(0, len(slots), _SLICE_IDS):
            part = slice(start, start + _SLICE_IDS)
            with self._reading():
                frozen_kernels.find_buckets(self._store, self._space_key, slots[part], buckets[part])
        return buckets

    def slots(self, changed: ImageMark | None = None) -> Slots:
        """The slots that have rows, in their order; only those that were changed since an image."""
        if changed is None:
            slots = np.arange(self._num_slots, dtype=np.uint32)
        else:
            bits = np.unpackbits(changed.bits, bitorder="little")[: self._num_slots]
            slots = np.flatnonzero(bits.view(np.bool_)).astype(np.uint32)
        return slots[np.isin(slots, self._free, invert=True)] if self._free.size else slots

    def block(self, count: int, memory: Bytes | None = None) -> RowBlock:
        """Memory for so many rows, by default new; its arrays lie one behind the other."""
        row_bytes = 8 + 4 * (self.dim + self.num_state)
        memory = np.empty(count * row_bytes, np.uint8) if memory is None else memory[: count * row_bytes]
        ids, rows, state = np.split(memory, [8 * count, (8 + 4 * self.dim) * count])
        return RowBlock(
            ids.view(np.int64),
            rows.view(np.float32).reshape(count, self.dim),
            state.view(np.float32).reshape(count, self.num_state),
        )

    def bucket_range(self, ids: Ids) -> tuple[int, int]:
        """The lowest and the highest of the routing's buckets of ids ((n,) int64), one at least."""
        low, high = frozen_kernels.bucket_range(ids, self._space_key)
        return int(low), int(high)

    def read(self, slots: Slots, into: RowBlock) -> RowBlock:
        """The rows of slots ((n,) uint32), each read once only, in the first places of a block."""
        count = len(slots)
        ids, rows, state = into.ids[:count], into.rows[:count], into.state[:count]
        step = max(1, _SLICE_BYTES // (4 * (HEADER + self.dim + self.num_state)))
        for start in range(0, count, step):
            part = slice(start, start + step)
            with self._reading():
                frozen_kernels.read_records(
                    self._store, slots[part], self._places, self._kept, ids[part], rows[part], state[part]
                )
        return RowBlock(ids, rows, state)
