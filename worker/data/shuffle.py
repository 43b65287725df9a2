"""The order of an epoch's samples and each worker's share of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from embershard.proto.errors import JobError

Positions = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@lru_cache(maxsize=1)  # an epoch that is dealt out in parts is put into order once
def permutation(count: int, seed: int, epoch: int) -> Positions:
    """(count,) int32 or int64, read-only: a random order of 0..count-1 that (seed, epoch) alone decide."""
    order: Positions = np.arange(count, dtype=np.int32) if count < 2**31 else np.arange(count)
    np.random.default_rng((seed, epoch)).shuffle(order)
    order.flags.writeable = False
    return order


def check_share(rank: int, world_size: int, batch_size: int) -> None:
    """ValueError unless 0 <= rank < world_size and batch_size >= 1."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..world_size-1, got rank {rank} of {world_size}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")


def too_many_workers(where: str, count: int, world_size: int, what: str = "samples") -> JobError:
    """The error of more shares than data."""
    return JobError(
        where=where,
        reason=f"{count} {what} cannot be split over {world_size} workers; start fewer workers, or lower data.splits",
    )


def check_enough(where: str, count: int, world_size: int) -> None:
    """JobError if some worker's share of `count` samples would be empty."""
    if count < world_size:
        raise too_many_workers(where, count, world_size)


def batches(order: Positions, rank: int, world_size: int, batch_size: int) -> Iterator[Positions]:
    """Worker `rank`'s share of an order, batch by batch: positions rank, rank + world_size, ..."""
    share = order[rank::world_size]
    for start in range(0, len(share), batch_size):
        yield share[start : start + batch_size]
