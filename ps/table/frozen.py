"""The rows of a table as they were at one moment, read by another thread while pushes go on.

Nothing is copied at that moment. From then on a push that is the first to change a row copies the old one aside, and
the reader takes each row from its copy or, unchanged, from the table. One lock orders the two; the reader holds it for
a slice of rows at a time. It relies on slots: a row never changes its own, and none is given to another id.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from embershard.proto.arrays import Floats, Ids
from embershard.proto.routing import NUM_BUCKETS
from embershard.ps.table import frozen_kernels
from embershard.ps.table.arena import Arena
from embershard.ps.table.frozen_kernels import Slots
from embershard.ps.table.hash_index import HEADER, NUM_ROWS, HashIndex

_SLICE_BYTES = 2**19  # of records read under the lock: for about as long as a small push takes


class RowBlock(NamedTuple):
    """Some rows."""

    ids: Ids  # (n,)
    rows: Floats  # (n, dim)
    state: Floats  # (n, num_state)


class CopyOnWriteRows:
    """`keep` belongs to the thread that writes the table, everything else to the one that reads.

    OSError where the system refuses address space for copies of all rows.
    """

    def __init__(self, store: HashIndex) -> None:
        self.num_rows = int(store.counters[NUM_ROWS])
        self.dim, self.num_state = int(store.dim), int(store.fresh.size)
        self._store = store
        self._places = np.zeros(self.num_rows, np.uint32)
        floats = self.num_rows * (self.dim + self.num_state)
        # address space for all; memory is taken by what is copied
        self._kept = Arena(4 * floats).take(np.float32, floats) if floats else np.empty(0, np.float32)
        self._count = np.zeros(1, np.int64)
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # whoever waits for the lock holds it: the next slice does not come first

    @property
    def num_kept(self) -> int:
        """Rows that were copied."""
        return int(self._count[0])

    def keep(self, ids: Ids) -> None:
        """Before the rows of ids ((U,) int64) are changed."""
        with self._turn, self._lock:
            frozen_kernels.keep_records(self._store, ids, self._places, self._kept, self._count)

    def by_bucket(self) -> tuple[Slots, Ids]:
        """(slots (num_rows,), starts (4097,)): the slots of bucket b are slots[starts[b]:starts[b + 1]]."""
        slots, starts = np.empty(self.num_rows, np.uint32), np.zeros(NUM_BUCKETS + 1, np.int64)
        frozen_kernels.sort_by_bucket(self._store, slots, starts)
        return slots, starts

    def block(self, count: int) -> RowBlock:
        """Memory for so many rows."""
        rows, state = np.empty((count, self.dim), np.float32), np.empty((count, self.num_state), np.float32)
        return RowBlock(np.empty(count, np.int64), rows, state)

    def read(self, slots: Slots, into: RowBlock) -> RowBlock:
        """The rows of slots ((n,) uint32), each read once only, in the first places of a block."""
        count = len(slots)
        ids, rows, state = into.ids[:count], into.rows[:count], into.state[:count]
        step = max(1, _SLICE_BYTES // (4 * (HEADER + self.dim + self.num_state)))
        for start in range(0, count, step):
            part = slice(start, start + step)
            with self._turn:
                self._lock.acquire()
            try:
                frozen_kernels.read_records(
                    self._store, slots[part], self._places, self._kept, ids[part], rows[part], state[part]
                )
            finally:
                self._lock.release()
        return RowBlock(ids, rows, state)
