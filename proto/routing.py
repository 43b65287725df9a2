"""From a batch's ids to shards: mix64, buckets, the placement and the Route.

Everything here is part of the contract: worker and shard must agree to the bit, so golden values are tested.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import types

from embershard.proto.jit import compiled

NUM_BUCKETS = 4096
BUCKET_SHIFT = 52  # high bits: the hash cells of a shard already use the low ones

Ids = npt.NDArray[np.int64]

_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@compiled(types.uint64(types.uint64, types.uint64), inline="always")
def mix64(x: np.uint64, key: np.uint64) -> np.uint64:
    """SplitMix64's finalizer (Steele et al. 2014) of `x ^ key`: a bijection of 64-bit x for every key."""
    z = x ^ key
    z = (z ^ (z >> np.uint64(30))) * _M1
    z = (z ^ (z >> np.uint64(27))) * _M2
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Placement:
    """Which shard holds each bucket; `epoch` changes whenever the map does."""

    epoch: int
    num_shards: int
    shard_of: npt.NDArray[np.uint16]  # (4096,)

    @staticmethod
    def even(num_shards: int, epoch: int = 1) -> Placement:
        """Contiguous, equal shares. ValueError unless 1 <= num_shards <= 4096."""
        if not 1 <= num_shards <= NUM_BUCKETS:
            raise ValueError(f"num_shards must be 1..{NUM_BUCKETS}, got {num_shards}")
        shard_of = (np.arange(NUM_BUCKETS) * num_shards // NUM_BUCKETS).astype(np.uint16)
        return Placement(epoch, num_shards, shard_of)


@dataclass(frozen=True, slots=True)
class Route:
    """One batch's ids of one id space, unique and grouped by shard.

    ids[splits[s]:splits[s + 1]] belong to shard s, in the order of their first occurrence.
    ids[index] is the flat input.
    """

    ids: Ids  # (U,) int64, unique
    splits: Ids  # (num_shards + 1,) int64
    index: Ids  # (N,) int64

    def slice_of(self, shard: int) -> slice:
        """Where this shard's ids (and rows) lie."""
        return slice(int(self.splits[shard]), int(self.splits[shard + 1]))


def make_route(ids: Ids, space_key: int, placement: Placement) -> Route:
    """Route of flat ids ((N,) int64, any order, duplicates welcome) in one pass and without sorting."""
    flat = np.ascontiguousarray(ids, dtype=np.int64).reshape(-1)
    unique, splits, index = _route(flat, np.uint64(space_key), placement.shard_of, placement.num_shards)
    return Route(unique, splits, index)


_ROUTE_SIGNATURE = types.UniTuple(types.int64[::1], 3)(
    types.Array(types.int64, 1, "C"),
    types.uint64,
    types.Array(types.uint16, 1, "C", readonly=False),
    types.int64,
)


@compiled(_ROUTE_SIGNATURE)
def _route(ids: Ids, key: np.uint64, shard_of: npt.NDArray[np.uint16], num_shards: int) -> tuple[Ids, Ids, Ids]:
    n = ids.size
    size = 16
    while size < 2 * n:
        size *= 2
    cells = np.full(size, -1, np.int32)  # position of an id in `unique`, -1 where free
    mask = np.uint64(size - 1)
    unique = np.empty(n, np.int64)
    owner = np.empty(n, np.uint16)
    index = np.empty(n, np.int64)
    splits = np.zeros(num_shards + 1, np.int64)
    count = 0
    for i in range(n):
        h = mix64(np.uint64(ids[i]), key)
        cell = h & mask
        while True:
            u = cells[cell]
            if u < 0:
                u = count
                cells[cell] = u
                unique[u] = ids[i]
                owner[u] = shard_of[h >> np.uint64(BUCKET_SHIFT)]
                splits[owner[u] + 1] += 1
                count += 1
                break
            if unique[u] == ids[i]:
                break
            cell = (cell + np.uint64(1)) & mask
        index[i] = u
    for s in range(num_shards):
        splits[s + 1] += splits[s]
    if num_shards == 1:
        return unique[:count].copy(), splits, index
    grouped = np.empty(count, np.int64)
    place = np.empty(count, np.int64)
    fill = splits[:num_shards].copy()
    for u in range(count):
        place[u] = fill[owner[u]]
        fill[owner[u]] += 1
        grouped[place[u]] = unique[u]
    for i in range(n):
        index[i] = place[index[i]]
    return grouped, splits, index
