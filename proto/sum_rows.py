"""Sum the gradients of equal ids: the way back from a batch's positions to a Route's rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from embershard.proto.compiled.jit import compiled
from embershard.proto.routing import Ids

Floats = npt.NDArray[np.float32]


def sum_rows(index: Ids, rows: Floats, num_rows: int) -> Floats:
    """(num_rows, dim) float32: the sum of all rows[i] with index[i] == u, added in the order of i.

    index: (N,) int64, each at least 0 and below num_rows, as Route.index. rows: (N, dim) float32, C-ordered.
    The bits are those of torch's index_add_ (bench/kernels.py compares the time).
    """
    out = np.zeros((num_rows, rows.shape[1]), np.float32)
    _sum_rows(index, rows, out)
    return out


@compiled(
    types.void(
        types.Array(types.int64, 1, "C", readonly=True),
        types.Array(types.float32, 2, "C", readonly=True),
        types.float32[:, ::1],
    )
)
def _sum_rows(index: Ids, rows: Floats, out: Floats) -> None:
    for i in range(index.size):
        u = np.uint64(index[i])  # unsigned: no test for negative ones
        for j in range(np.uint64(rows.shape[1])):
            out[u, j] += rows[i, j]
