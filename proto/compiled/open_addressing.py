"""The search of the hash indexes by open addressing: cells that lead from an id to its position in an array."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embershard.proto.arrays import Ids
from embershard.proto.compiled.jit import inlined

Cells = npt.NDArray[np.int32] | npt.NDArray[np.int64]

FREE = -1  # a cell that leads nowhere

_U, _1 = np.uint64, np.uint64(1)


@inlined
def cell_of(id_: np.int64, h: np.uint64, cells: Cells, ids: Ids) -> np.uint64:
    """The cell that leads to an id with the hash `h`, or the free one where it belongs.

    cells: a power of two of them, one of them free at least; each is a position in `ids`, or FREE.
    """
    mask = _U(cells.size - 1)
    cell = h & mask
    while cells[cell] >= 0 and ids[_U(cells[cell])] != id_:
        cell = (cell + _1) & mask
    return cell
