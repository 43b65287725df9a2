"""Ids numbered in the order in which they first come, without a limit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from embershard.proto.arrays import Ids
from embershard.proto.compiled.jit import compiled
from embershard.proto.routing import mix64

Cells = npt.NDArray[np.int64]

_FREE = -1
_SMALLEST = 1024  # cells


class IdIndex:
    """id -> number, 0 to len - 1."""

    def __init__(self) -> None:
        self._ids = np.empty(_SMALLEST // 2, np.int64)  # by number
        self._cells = np.full(_SMALLEST, _FREE, np.int64)  # open addressing: the number of an id, or _FREE
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> Ids:
        """(len,) int64, by number."""
        return self._ids[: self._count]

    def numbers(self, ids: Ids) -> Ids:
        """The number of each id ((U,) int64); an id that is new gets the next one."""
        needed = self._count + len(ids)
        if needed > len(self._ids):
            size = 1 << (2 * needed - 1).bit_length()  # at most half full
            self._ids = np.concatenate([self.ids, np.empty(size // 2 - self._count, np.int64)])
            self._cells = np.full(size, _FREE, np.int64)
            _number(self.ids.copy(), 0, self._ids, self._cells, np.empty(self._count, np.int64))
        numbers = np.empty(len(ids), np.int64)
        self._count = _number(ids, self._count, self._ids, self._cells, numbers)
        return numbers


@compiled(
    types.int64(
        types.Array(types.int64, 1, "C", readonly=True),
        types.int64,
        types.int64[::1],
        types.int64[::1],
        types.int64[::1],
    )
)
def _number(ids: Ids, count: int, known: Ids, cells: Cells, numbers: Ids) -> int:
    """Fill `numbers`; how many ids there are now."""
    mask = np.uint64(cells.size - 1)
    for i in range(ids.size):
        cell = mix64(np.uint64(ids[i]), np.uint64(0)) & mask
        while cells[cell] >= 0 and known[cells[cell]] != ids[i]:
            cell = (cell + np.uint64(1)) & mask
        if cells[cell] < 0:
            cells[cell] = count
            known[count] = ids[i]
            count += 1
        numbers[i] = cells[cell]
    return count
