"""Routes by plain numpy, slow and short: what the kernels of proto/routing.py must give."""

from __future__ import annotations

import numpy as np

from embershard.proto.arrays import Ids, mix64
from embershard.proto.routing import BUCKET_SHIFT, Placement, Route


def make_route(ids: Ids, space_key: int, placement: Placement) -> Route:
    """The Route of `routing.make_route`, by sorting."""
    unique, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    shard = placement.shard_of[mix64(unique, space_key) >> np.uint64(BUCKET_SHIFT)]
    order = np.lexsort((first, shard))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    counts = np.bincount(shard, minlength=placement.shards[-1] + 1)
    splits = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    index = place[inverse.reshape(-1)].astype(np.int64)
    return Route(unique[order], splits, index, space_key=space_key, epoch=placement.epoch)
