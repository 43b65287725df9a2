"""What was not sent of each id's gradients: rows that wait for a later push, as many as fit.

A row is held with its age (the pushes that it is of), the factor on the learning rate by which its gradients count, and
for dgc its momentum. Where there is no room for another row, one that was not met for long gives way, and is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from embershard.proto.jit import called, compiled, inlined
from embershard.proto.routing import Ids, mix64

Floats = npt.NDArray[np.float32]
Marks = npt.NDArray[np.uint8]
Slots = tuple[Ids, Floats, Floats, Floats, Floats, Ids, Marks]

_SMALLEST = 256  # rows
_FREE = -1  # a cell without a slot
_TOP, _NUM_FREE, _HAND, _NOW = range(4)  # of `numbers`

_LARGEST = np.finfo(np.float32).max

_U = np.uint64
_0, _1 = _U(0), _U(1)


class Held(NamedTuple):
    """Rows with their ages and rates."""

    ids: Ids  # (R,)
    rows: Floats  # (R, dim)
    ages: Floats  # (R,) pushes that each row is of
    rates: Floats  # (R,) factors on the learning rate

    def some(self, which: slice | npt.NDArray[np.bool_]) -> Held:
        """Some of the rows."""
        return Held(self.ids[which], self.rows[which], self.ages[which], self.rates[which])

    def scaled(self, rate: float) -> Held:
        """The same as it counts by one rate, in the order of ids, to be sent."""
        order = np.argsort(self.ids)
        rows = self.rows * (self.rates / np.float32(rate))[:, None]
        rates = np.full(len(order), rate, np.float32)
        return Held(self.ids[order], rows[order], np.maximum(self.ages, 1)[order], rates)


class Residuals:
    """Rows by id, at most `capacity` of them (None: any number); `momentum` keeps a second row beside each."""

    def __init__(self, dim: int, capacity: int | None, *, momentum: bool = False) -> None:
        self.dim, self.capacity, self.momentum = dim, capacity, momentum
        self._numbers = np.array([0, 0, 0, 1], np.int64)  # slots in use or free, free ones, the hand, this push
        self._free = np.empty(0, np.int64)  # slots below the top that hold nothing
        self._slots = self._made(0)
        self._cells = np.full(2 * _SMALLEST, _FREE, np.int64)  # open addressing, at most half full: the slot of an id

    def __len__(self) -> int:
        """Rows held."""
        return int(self._numbers[_TOP] - self._numbers[_NUM_FREE])

    def find(self, ids: Ids) -> Ids:
        """The slot of each id ((U,) int64, unique), -1 where it has none; they stay with their ids until `keep`."""
        self._numbers[_NOW] += 1
        slots = np.empty(len(ids), np.int64)
        _find(ids, self._cells, self._slots[0], self._slots[5], int(self._numbers[_NOW]), slots)
        return slots

    def add_to(self, slots: Ids, rows: Floats, ages: Floats, rate: float, momenta: Floats | None = None) -> None:
        """Add what is held to rows ((U, dim)) that count by `rate`, and to ages; copy momenta ((U, dim)), if wanted."""
        _add(slots, self._slots, np.float32(rate), rows, ages, rows[:, :0] if momenta is None else momenta)

    def keep(
        self, ids: Ids, slots: Ids, rows: Floats, ages: Floats, rate: float, momenta: Floats | None = None
    ) -> Held:
        """Hold these rows ((U, dim)) in place of what `slots`, from `find`, held; what had to give way, with its rates.

        A row of zeros takes no room. One that overflowed is not held: what was sent of it is not finite either, and the
        shard that skips it counts it.
        """
        momenta = np.zeros((len(ids), self.dim if self.momentum else 0), np.float32) if momenta is None else momenta
        capacity = np.iinfo(np.int64).max if self.capacity is None else self.capacity
        new = int(np.count_nonzero(slots < 0))
        self._reserve(int(self._numbers[_TOP]) + new)
        most = min(len(ids), max(0, len(self) + new - capacity))
        gone = Held(
            np.empty(most, np.int64), np.empty((most, self.dim), np.float32),
            np.empty(most, np.float32), np.empty(most, np.float32),
        )  # fmt: skip
        count = _keep(
            ids, slots, rows, ages, np.float32(rate), momenta,
            self._numbers, self._free, self._slots, self._cells, capacity, gone,
        )  # fmt: skip
        return gone.some(slice(count))

    def give_back(self, held: Held, rate: float) -> None:
        """Hold rows that were on their way as well, above the capacity if need be."""
        slots = self.find(held.ids)
        rows, ages = held.rows.copy(), np.zeros(len(held.ids), np.float32)
        momenta = np.zeros((len(rows), self.dim if self.momentum else 0), np.float32)
        self.add_to(slots, rows, ages, rate, momenta)
        capacity, self.capacity = self.capacity, None
        try:
            self.keep(held.ids, slots, rows, np.maximum(ages, held.ages), rate, momenta)
        finally:
            self.capacity = capacity

    def forget(self, ids: Ids) -> None:
        """Hold nothing of these ids ((U,) int64, unique) any more."""
        slots = self.find(ids)
        there = slots >= 0
        nothing = np.zeros((int(np.count_nonzero(there)), self.dim), np.float32)
        self.keep(ids[there], slots[there], nothing, np.zeros(len(nothing), np.float32), 1.0)

    def held(self) -> Held:
        """All of it, by slot."""
        live = self._live()
        ids, rows, _, ages, rates, _, _ = self._slots
        return Held(ids[live], rows[live], ages[live], rates[live])

    def with_momentum(self, momentum: bool) -> Residuals:
        """The same rows, with momenta of zero, or without them."""
        if momentum == self.momentum:
            return self
        other, held = Residuals(self.dim, self.capacity, momentum=momentum), self.held()
        for rate in np.unique(held.rates):
            some = held.rates == rate
            other.give_back(held.some(some), float(rate))
        return other

    def state_dict(self) -> Mapping[str, object]:
        """All of it, so that what comes later gives way to the same rows."""
        top, num_free = int(self._numbers[_TOP]), int(self._numbers[_NUM_FREE])
        ids, rows, momenta, ages, rates, _, recent = (array[:top].copy() for array in self._slots)
        return {
            "ids": ids, "rows": rows, "momenta": momenta, "ages": ages, "rates": rates, "recent": recent,
            "free": self._free[:num_free].copy(), "hand": int(self._numbers[_HAND]),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Hold what a state of the same dim holds, and nothing else. ValueError where it is another's."""
        arrays = [np.asarray(state[name]) for name in ("ids", "rows", "momenta", "ages", "rates", "recent", "free")]
        ids, rows, momenta, ages, rates, recent, free = arrays
        top, hand = len(ids), int(str(state["hand"]))
        if rows.shape != (top, self.dim) or momenta.shape[1:] not in ((0,), (self.dim,)):
            raise ValueError(f"residuals of {rows.shape[1:]} floats, not {self.dim}")
        self.momentum = momenta.shape[1] > 0
        self._numbers[:] = 0, 0, 0, 1
        self._slots = self._made(0)
        self._reserve(top)
        saved = (ids, rows, momenta, ages, rates, np.zeros(top), recent)
        for mine, array in zip(self._arrays(), saved, strict=True):
            mine[:top] = array
        self._free[: len(free)] = free
        self._slots[5][free] = -1
        self._numbers[:] = top, len(free), hand, 1
        self._index()

    def _live(self) -> Ids:
        top, num_free = int(self._numbers[_TOP]), int(self._numbers[_NUM_FREE])
        return np.delete(np.arange(top), self._free[:num_free])

    def _arrays(self) -> list[npt.NDArray[Any]]:
        return list(self._slots)

    def _made(self, size: int) -> Slots:
        momentum = self.dim if self.momentum else 0
        return (
            np.zeros(size, np.int64),
            np.zeros((size, self.dim), np.float32),
            np.zeros((size, momentum), np.float32),
            np.zeros(size, np.float32),
            np.zeros(size, np.float32),
            np.zeros(size, np.int64),  # when a slot was met last, -1 for one that holds nothing
            np.zeros(size, np.uint8),  # whether it was met since the hand came by
        )

    def _reserve(self, size: int) -> None:
        """Have room for `size` slots, as far as the capacity goes."""
        if self.capacity is not None:
            size = min(size, max(self.capacity, int(self._numbers[_TOP])))
        if size <= len(self._free):
            return
        grown = max(_SMALLEST, 1 << (size - 1).bit_length())
        before, self._slots = self._arrays(), self._made(grown)
        for new, old in zip(self._arrays(), before, strict=True):
            new[: len(old)] = old
        self._free = np.concatenate([self._free, np.empty(grown - len(self._free), np.int64)])
        self._cells = np.full(2 * grown, _FREE, np.int64)
        self._index()

    def _index(self) -> None:
        self._cells[:] = _FREE
        live = self._live()
        _insert_all(self._slots[0][live], live, self._cells)


def nothing_held(dim: int) -> Held:
    """No rows."""
    none = np.empty(0, np.float32)
    return Held(np.empty(0, np.int64), np.empty((0, dim), np.float32), none, none)


_IDS = types.Array(types.int64, 1, "C", readonly=True)
_ROWS = types.Array(types.float32, 2, "C", readonly=True)
_SLOTS = types.Tuple(
    (
        types.int64[::1], types.float32[:, ::1], types.float32[:, ::1], types.float32[::1], types.float32[::1],
        types.int64[::1], types.uint8[::1],
    )
)  # fmt: skip
_HELD = types.NamedTuple((types.int64[::1], types.float32[:, ::1], types.float32[::1], types.float32[::1]), Held)


@called
def _cell_of(id_: np.int64, cells: Ids, known: Ids) -> np.uint64:
    """The cell of an id, or the free one where it belongs."""
    mask = _U(cells.size - 1)
    cell = mix64(_U(id_), _0) & mask
    while cells[cell] >= 0 and known[cells[cell]] != id_:
        cell = (cell + _1) & mask
    return cell


@called
def _forget(id_: np.int64, cells: Ids, known: Ids) -> None:
    """Take an id out of the cells, and close the gap (Knuth, vol. 3, 6.4, algorithm R)."""
    mask = _U(cells.size - 1)
    gap = _cell_of(id_, cells, known)
    cell = gap
    while True:
        cell = (cell + _1) & mask
        if cells[cell] < 0:
            break
        home = mix64(_U(known[cells[cell]]), _0) & mask
        if ((cell - home) & mask) >= ((cell - gap) & mask):
            cells[gap] = cells[cell]
            gap = cell
    cells[gap] = -1


@inlined
def _copy(source: Floats, i: int, target: Floats, k: int) -> None:
    """Row i to row k; numba makes views of slices, which cost more than short rows."""
    for j in range(source.shape[1]):
        target[k, j] = source[i, j]


@called
def _victim(slots: Slots, numbers: Ids) -> int:
    """The next slot to give way: not of this push, and not met since the hand came by last; -1 where none is."""
    last, recent = slots[5], slots[6]
    top = numbers[_TOP]
    for _ in range(2 * top):
        slot: int = numbers[_HAND]
        numbers[_HAND] = slot + 1 if slot + 1 < top else 0
        if last[slot] == numbers[_NOW] or last[slot] < 0:
            continue
        if recent[slot] == 0:
            return slot
        recent[slot] = 0
    return -1


@compiled(types.void(_IDS, types.int64[::1], types.int64[::1], types.int64[::1], types.int64, types.int64[::1]))
def _find(ids: Ids, cells: Ids, known: Ids, last: Ids, now: int, slots: Ids) -> None:
    for i in range(ids.size):
        slot = cells[_cell_of(ids[i], cells, known)]
        slots[i] = slot
        if slot >= 0:
            last[slot] = now


@compiled(types.void(_IDS, _IDS, types.int64[::1]))
def _insert_all(ids: Ids, slots: Ids, cells: Ids) -> None:
    mask = _U(cells.size - 1)
    for i in range(ids.size):
        cell = mix64(_U(ids[i]), _0) & mask
        while cells[cell] >= 0:
            cell = (cell + _1) & mask
        cells[cell] = slots[i]


@compiled(types.void(_IDS, _SLOTS, types.float32, types.float32[:, ::1], types.float32[::1], types.float32[:, ::1]))
def _add(slots: Ids, held: Slots, rate: np.float32, rows: Floats, ages: Floats, momenta: Floats) -> None:
    for i in range(slots.size):
        slot = slots[i]
        if slot < 0:
            continue
        factor = held[4][slot] / rate
        for j in range(rows.shape[1]):
            rows[i, j] += factor * held[1][slot, j]
        for j in range(momenta.shape[1]):
            momenta[i, j] = held[2][slot, j]
        ages[i] += held[3][slot]


@compiled(
    types.int64(
        _IDS, _IDS, _ROWS, types.Array(types.float32, 1, "C", readonly=True), types.float32, _ROWS,
        types.int64[::1], types.int64[::1], _SLOTS, types.int64[::1], types.int64, _HELD,
    )
)  # fmt: skip
def _keep(
    ids: Ids,
    slots: Ids,
    rows: Floats,
    ages: Floats,
    rate: np.float32,
    momenta: Floats,
    numbers: Ids,
    free: Ids,
    held: Slots,
    cells: Ids,
    capacity: int,
    gone: Held,
) -> int:
    """Hold rows, see Residuals.keep; how many had to give way."""
    known, last, recent = held[0], held[5], held[6]
    count = 0
    for i in range(ids.size):
        empty, finite = True, True
        for j in range(rows.shape[1]):
            empty &= rows[i, j] == 0
            finite &= abs(rows[i, j]) <= _LARGEST
        for j in range(momenta.shape[1]):
            empty &= momenta[i, j] == 0
        slot = slots[i]
        if empty or not finite:
            if slot >= 0:
                _forget(ids[i], cells, known)
                last[slot] = -1
                free[numbers[_NUM_FREE]] = slot
                numbers[_NUM_FREE] += 1
            continue
        recent[max(slot, 0)] |= slot >= 0
        if slot < 0:
            if numbers[_TOP] - numbers[_NUM_FREE] < capacity:
                if numbers[_NUM_FREE] > 0:
                    numbers[_NUM_FREE] -= 1
                    slot = free[numbers[_NUM_FREE]]
                else:
                    slot = numbers[_TOP]
                    numbers[_TOP] += 1
            else:
                slot = _victim(held, numbers)
                if slot < 0:  # a push of more rows than there is room for
                    gone.ids[count], gone.ages[count], gone.rates[count] = ids[i], ages[i], rate
                    _copy(rows, i, gone.rows, count)
                    count += 1
                    continue
                gone.ids[count], gone.ages[count], gone.rates[count] = known[slot], held[3][slot], held[4][slot]
                _copy(held[1], slot, gone.rows, count)
                count += 1
                _forget(known[slot], cells, known)
            known[slot] = ids[i]
            cells[_cell_of(ids[i], cells, known)] = slot
            last[slot] = numbers[_NOW]
            recent[slot] = 0
        _copy(rows, i, held[1], slot)
        _copy(momenta, i, held[2], slot)
        held[3][slot], held[4][slot] = ages[i], rate
    return count
