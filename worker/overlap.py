"""Which ids of one route are in another."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from embershard.proto.arrays import Ids
from embershard.proto.compiled.jit import compiled
from embershard.proto.routing import mix64

Mask = npt.NDArray[np.bool_]


def overlap(ids: Ids, others: Ids) -> Mask:
    """(U,) bool: whether ids[u] is among `others`. Both int64, in any order; without sorting, and without the GIL."""
    found = np.empty(len(ids), np.bool_)
    _overlap(ids, others, found)
    return found


_IDS = types.Array(types.int64, 1, "C", readonly=True)


@compiled(types.void(_IDS, _IDS, types.boolean[::1]))
def _overlap(ids: Ids, others: Ids, found: Mask) -> None:
    size = 16
    while size < 2 * others.size:
        size *= 2
    cells = np.full(size, -1, np.int32)  # position of an id in `others`, -1 where free
    mask = np.uint64(size - 1)
    for i in range(others.size):
        cell = mix64(np.uint64(others[i]), np.uint64(0)) & mask
        while cells[cell] >= 0 and others[cells[cell]] != others[i]:
            cell = (cell + np.uint64(1)) & mask
        cells[cell] = i
    for u in range(ids.size):
        cell = mix64(np.uint64(ids[u]), np.uint64(0)) & mask
        while cells[cell] >= 0 and others[cells[cell]] != ids[u]:
            cell = (cell + np.uint64(1)) & mask
        found[u] = cells[cell] >= 0
