"""The memory of rows that are held by id, and the compiled loops that find, add and keep them."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from numba import types

from embershard.proto.arrays import Floats, Ids
from embershard.proto.compiled.jit import called, compiled, inlined
from embershard.proto.compiled.open_addressing import FREE, cell_of
from embershard.proto.routing import mix64

Marks = npt.NDArray[np.uint8]
Counters = npt.NDArray[np.void]

_SMALLEST = 256  # slots
COUNTERS = np.dtype(
    [
        ("top", np.int64),  # slots in use or free
        ("num_free", np.int64),
        ("clock_hand", np.int64),  # the slot at which the next search for one to give way begins
        ("now", np.int64),  # the number of this push
    ]
)
_LARGEST = np.finfo(np.float32).max

_U = np.uint64
_0, _1 = _U(0), _U(1)


class ResidualRows(NamedTuple):
    """Rows with their ages and rates."""

    ids: Ids  # (R,)
    rows: Floats  # (R, dim)
    ages: Floats  # (R,) pushes that each row is of
    rates: Floats  # (R,) factors on the learning rate

    def some(self, which: slice | npt.NDArray[np.bool_]) -> ResidualRows:
        """Return the chosen rows, as residuals."""
        return ResidualRows(self.ids[which], self.rows[which], self.ages[which], self.rates[which])

    def scaled(self, rate: float) -> ResidualRows:
        """The same as it counts by one rate, in the order of ids, to be sent."""
        order = np.argsort(self.ids)
        rows = self.rows * (self.rates / np.float32(rate))[:, None]
        rates = np.full(len(order), rate, np.float32)
        return ResidualRows(self.ids[order], rows[order], np.maximum(self.ages, 1)[order], rates)


class ResidualMemory(NamedTuple):
    """The memory of what is held: rows by slot, the cells that lead from an id to its slot, and the free slots."""

    ids: Ids  # (S,)
    rows: Floats  # (S, dim)
    momenta: Floats  # (S, dim), or (S, 0) without
    ages: Floats  # (S,)
    rates: Floats  # (S,)
    last: Ids  # (S,) when a slot was met last, -1 for one that holds nothing
    recent: Marks  # (S,) whether it was met since the hand came by
    free: Ids  # (S,) slots below the top that hold nothing, `num_free` of them
    cells: Ids  # open addressing, at most half full: the slot of an id
    counters: Counters  # (1,) of COUNTERS

    @classmethod
    def made(cls, size: int, dim: int, momentum: int) -> ResidualMemory:
        """An empty one of at least `size` slots."""
        size = max(_SMALLEST, 1 << (size - 1).bit_length())
        return cls(
            ids=np.zeros(size, np.int64),
            rows=np.zeros((size, dim), np.float32),
            momenta=np.zeros((size, momentum), np.float32),
            ages=np.zeros(size, np.float32),
            rates=np.zeros(size, np.float32),
            last=np.zeros(size, np.int64),
            recent=np.zeros(size, np.uint8),
            free=np.zeros(size, np.int64),
            cells=np.full(2 * size, FREE, np.int64),
            counters=np.array([(0, 0, 0, 1)], COUNTERS),
        )

    def live(self) -> Ids:
        """The slots that hold a row."""
        return np.delete(np.arange(self.count("top")), self.free[: self.count("num_free")])

    def count(self, name: str) -> int:
        """Return one counter of the store: top, num_free, clock_hand or now."""
        return int(self.counters[0][name])

    def link(self) -> None:
        """Build the cells anew from the ids of the slots."""
        self.cells[:] = FREE
        _insert_all(self.live(), self)


def no_residual(dim: int) -> ResidualRows:
    """Return residuals without any row."""
    none = np.empty(0, np.float32)
    return ResidualRows(np.empty(0, np.int64), np.empty((0, dim), np.float32), none, none)


_IDS = types.Array(types.int64, 1, "C", readonly=True)
_AGES = types.Array(types.float32, 1, "C", readonly=True)
_ROWS = types.Array(types.float32, 2, "C", readonly=True)
_MEMORY = types.NamedTuple(
    (
        types.int64[::1], types.float32[:, ::1], types.float32[:, ::1], types.float32[::1], types.float32[::1],
        types.int64[::1], types.uint8[::1], types.int64[::1], types.int64[::1], numba.from_dtype(COUNTERS)[::1],
    ),
    ResidualMemory,
)  # fmt: skip
_HELD = types.NamedTuple(
    (types.int64[::1], types.float32[:, ::1], types.float32[::1], types.float32[::1]), ResidualRows
)


@called
def _cell_of(id_: np.int64, store: ResidualMemory) -> np.uint64:
    """The cell of an id, or the free one where it belongs."""
    return cell_of(id_, mix64(_U(id_), _0), store.cells, store.ids)


@called
def _unlink(id_: np.int64, store: ResidualMemory) -> None:
    """Take an id out of the cells, and close the gap (Knuth, vol. 3, 6.4, algorithm R)."""
    cells = store.cells
    mask = _U(cells.size - 1)
    gap = _cell_of(id_, store)
    cell = gap
    while True:
        cell = (cell + _1) & mask
        if cells[cell] < 0:
            break
        home = mix64(_U(store.ids[cells[cell]]), _0) & mask
        if ((cell - home) & mask) >= ((cell - gap) & mask):
            cells[gap] = cells[cell]
            gap = cell
    cells[gap] = FREE


@inlined
def _copy(source: Floats, i: int, target: Floats, k: int) -> None:
    """Row i to row k; numba makes views of slices, which cost more than short rows."""
    for j in range(source.shape[1]):
        target[k, j] = source[i, j]


@inlined
def _give(id_: np.int64, rows: Floats, i: int, age: np.float32, rate: np.float32, gone: ResidualRows, k: int) -> None:
    """Write row i of rows as the kth evicted one."""
    gone.ids[k], gone.ages[k], gone.rates[k] = id_, age, rate
    _copy(rows, i, gone.rows, k)


@inlined
def _worth_holding(rows: Floats, momenta: Floats, i: int) -> bool:
    """Whether row i is finite, and it or its momentum not zero."""
    empty, finite = True, True
    for j in range(rows.shape[1]):
        empty &= rows[i, j] == 0
        finite &= abs(rows[i, j]) <= _LARGEST
    for j in range(momenta.shape[1]):
        empty &= momenta[i, j] == 0
    return finite and not empty


@inlined
def _release(slot: int, store: ResidualMemory) -> None:
    """Free a slot."""
    _unlink(store.ids[slot], store)
    store.last[slot] = -1
    counters = store.counters[0]
    store.free[counters["num_free"]] = slot
    counters["num_free"] += 1


@inlined
def _vacant(store: ResidualMemory) -> int:
    """A slot that holds nothing."""
    counters = store.counters[0]
    if counters["num_free"] > 0:
        counters["num_free"] -= 1
        slot: int = store.free[counters["num_free"]]
        return slot
    counters["top"] += 1
    top: int = counters["top"] - 1
    return top


@called
def _evict_clock_hand(store: ResidualMemory) -> int:
    """The next slot to evict: not of this push, and not used since the clock hand passed it; -1 where none is."""
    last, recent, counters = store.last, store.recent, store.counters[0]
    top = counters["top"]
    for _ in range(2 * top):
        slot: int = counters["clock_hand"]
        counters["clock_hand"] = slot + 1 if slot + 1 < top else 0
        if last[slot] == counters["now"] or last[slot] < 0:
            continue
        if recent[slot] == 0:
            return slot
        recent[slot] = 0
    return -1


@inlined
def _take(slot: int, id_: np.int64, store: ResidualMemory) -> None:
    """Give a slot to an id."""
    store.ids[slot] = id_
    store.cells[_cell_of(id_, store)] = slot
    store.last[slot] = store.counters[0]["now"]
    store.recent[slot] = 0


@compiled(types.void(_IDS, _MEMORY, types.int64[::1]))
def find(ids: Ids, store: ResidualMemory, slots: Ids) -> None:
    """Write the slot of each id, -1 where it has none."""
    for i in range(ids.size):
        slot = store.cells[_cell_of(ids[i], store)]
        slots[i] = slot
        if slot >= 0:
            store.last[slot] = store.counters[0]["now"]


@compiled(types.void(_IDS, _MEMORY))
def _insert_all(slots: Ids, store: ResidualMemory) -> None:
    for slot in slots:
        store.cells[_cell_of(store.ids[slot], store)] = slot


@compiled(types.void(_IDS, _MEMORY, types.float32, types.float32[:, ::1], types.float32[::1], types.float32[:, ::1]))
def add(slots: Ids, store: ResidualMemory, rate: np.float32, rows: Floats, ages: Floats, momenta: Floats) -> None:
    """Add what is held to rows and ages, and copy momenta."""
    for i in range(slots.size):
        slot = slots[i]
        if slot < 0:
            continue
        factor = store.rates[slot] / rate
        for j in range(rows.shape[1]):
            rows[i, j] += factor * store.rows[slot, j]
        for j in range(momenta.shape[1]):
            momenta[i, j] = store.momenta[slot, j]
        ages[i] += store.ages[slot]


@compiled(types.int64(_IDS, _IDS, types.Tuple((_ROWS, _AGES, _ROWS)), types.float32, _MEMORY, types.int64, _HELD))
def keep(
    ids: Ids,
    slots: Ids,
    pushed: tuple[Floats, Floats, Floats],  # rows, ages, momenta
    rate: np.float32,
    store: ResidualMemory,
    capacity: int,
    gone: ResidualRows,
) -> int:
    """Hold rows, see Residuals.keep; return how many were evicted."""
    rows, ages, momenta = pushed
    count = 0
    for i in range(ids.size):
        slot = slots[i]
        if not _worth_holding(rows, momenta, i):
            if slot >= 0:
                _release(slot, store)
            continue
        if slot >= 0:
            store.recent[slot] = 1
        elif store.counters[0]["top"] - store.counters[0]["num_free"] < capacity:
            slot = _vacant(store)
            _take(slot, ids[i], store)
        else:
            slot = _evict_clock_hand(store)
            if slot < 0:  # a push of more rows than there is room for
                _give(ids[i], rows, i, ages[i], rate, gone, count)
                count += 1
                continue
            _give(store.ids[slot], store.rows, slot, store.ages[slot], store.rates[slot], gone, count)
            count += 1
            _unlink(store.ids[slot], store)
            _take(slot, ids[i], store)
        _copy(rows, i, store.rows, slot)
        _copy(momenta, i, store.momenta, slot)
        store.ages[slot], store.rates[slot] = ages[i], rate
    return count
