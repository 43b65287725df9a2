"""Ranks by the Zipf-Mandelbrot law in constant time and little memory, however many ranks there are."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

from embershard.proto.arrays import Doubles

NUM_SLOTS = 4096  # 26 columns of them stay in the L2 cache
NUM_HEAD = 2048  # ranks with a bin of their own; behind them a bin spans at most 0.5 % of its rank per Criteo column

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Bins:
    """Ranks 0..n-1 in ranges, with each range's probability; inside a range ranks are drawn evenly."""

    starts: Ints  # (M,) first rank
    widths: Ints  # (M,) 1 for the head
    probabilities: Doubles  # (M,) sum to 1


def zipf_bins(cardinality: int, s: float, q: float, missing: float) -> Bins:
    """p(rank) ~ (rank + 1 + q)**-s for rank = 0, 1, ...; one rank stands for the missing value.

    That is the rank whose share the law puts nearest to `missing`; it gets exactly that share, and the others theirs
    of the rest. (The law was fitted with the missing value counted as one value.)
    """
    edges = np.arange(min(cardinality, NUM_SLOTS) + 1, dtype=np.int64)
    if cardinality > NUM_SLOTS:
        tail = np.geomspace(NUM_HEAD, cardinality, NUM_SLOTS - NUM_HEAD + 1)
        edges = np.unique(np.r_[edges[:NUM_HEAD], np.round(tail).astype(np.int64)])
    starts, widths = edges[:-1], np.diff(edges)
    mass = (starts + 1 + q) ** -s
    wide = widths > 1
    # the integral from half a rank before to half a rank behind: exact to 1e-7 where ranks are above 2,000
    low, high = starts[wide] + 0.5 + q, starts[wide] + widths[wide] + 0.5 + q
    mass[wide] = (low ** (1 - s) - high ** (1 - s)) / (s - 1)
    shares = mass / mass.sum()
    if missing:
        rank = int(np.argmin(np.abs(shares[~wide] - missing)))
        shares *= (1 - missing) / (1 - shares[rank])
        shares[rank] = missing
    return Bins(starts, widths, shares)


def alias_table(probabilities: Doubles, num_slots: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int32]]:
    """Walker's alias method (Vose 1991): slot k gives k below its 32-bit threshold, else its alias."""
    scaled = np.zeros(num_slots)
    scaled[: len(probabilities)] = probabilities * num_slots
    alias = np.arange(num_slots, dtype=np.int32)
    small = [k for k in range(num_slots) if scaled[k] < 1]
    large = [k for k in range(num_slots) if scaled[k] >= 1]
    while small and large:
        low, high = small.pop(), large[-1]
        alias[low] = high
        scaled[high] -= 1 - scaled[low]
        if scaled[high] < 1:
            small.append(large.pop())
    for k in small + large:  # 1 but for rounding
        scaled[k] = 1.0
    return np.minimum(scaled * 2.0**32, 2.0**32 - 1).astype(np.uint32), alias


def spread_step(cardinality: int) -> int:
    """A step near n's golden section and coprime to n: rank -> rank * step mod n spreads hot ids, one to one."""
    step = max(1, round(cardinality * 0.6180339887498949))
    while gcd(step, cardinality) != 1:
        step += 1
    return step
