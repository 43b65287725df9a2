"""A batch's rows in the order in which it uses them first."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numba import types
from torch import Tensor

from embershard.proto.arrays import Ids
from embershard.proto.compiled.jit import compiled


class FirstUse(NamedTuple):
    """Another numbering of rows: `order` are the old numbers by the new ones, and `rank` the new by the old."""

    numbers: Ids  # (N,) int64: the batch by new numbers
    order: Ids  # (num_rows,) int64; rows that are not used come last
    rank: Ids  # (num_rows,) int64


def by_first_use(index: Ids, num_rows: int) -> FirstUse:
    """Number rows as a batch uses them. index: (N,) int64, each at least 0 and below num_rows."""
    found = FirstUse(np.empty(index.size, np.int64), np.empty(num_rows, np.int64), np.full(num_rows, -1, np.int64))
    _renumber(index, *found)
    return found


def by_first_use_in_torch(index: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same of a tensor on any device; on a CPU many times slower."""
    positions = torch.arange(index.numel(), device=index.device)
    first = positions.new_full((num_rows,), index.numel()).scatter_reduce_(0, index, positions, "amin")
    order = first.argsort(stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(num_rows, device=index.device))
    return rank[index], order, rank


@compiled(
    types.void(types.Array(types.int64, 1, "C", readonly=True), types.int64[::1], types.int64[::1], types.int64[::1])
)
def _renumber(index: Ids, numbers: Ids, order: Ids, rank: Ids) -> None:
    count = 0
    for i in range(index.size):
        row = np.uint64(index[i])  # unsigned: no test for negative ones
        if rank[row] < 0:
            rank[row] = count
            order[count] = index[i]
            count += 1
        numbers[i] = rank[row]
    for unused in range(rank.size):
        if rank[unused] < 0:
            rank[unused] = count
            order[count] = unused
            count += 1
