"""Estimates over paired seeds: intervals, ratios, and where two cost curves cross."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtrit  # of scipy.stats, which takes longer to load, t.ppf is this

from embershard.compare.results import Estimate

CONFIDENCE = 0.95


def estimate(values: Sequence[float]) -> Estimate:
    """Estimate the mean of one value per seed with its 95 % interval by Student's t; one value has no interval."""
    array = np.asarray(values, np.float64)
    mean = float(array.mean())
    if len(array) < 2:
        return Estimate(mean=mean, low=None, high=None, seeds=1)
    standard_error = float(array.std(ddof=1)) / math.sqrt(len(array))
    half = float(stdtrit(len(array) - 1, (1 + CONFIDENCE) / 2)) * standard_error
    return Estimate(mean=mean, low=mean - half, high=mean + half, seeds=len(array))


def ratio(values: Sequence[float]) -> Estimate:
    """Estimate the geometric mean of one ratio per pair of runs; its 95 % interval is that of the logarithms."""
    logs = estimate(np.log(np.asarray(values, np.float64)).tolist())
    low, high = (None if bound is None else math.exp(bound) for bound in (logs.low, logs.high))
    return Estimate(mean=math.exp(logs.mean), low=low, high=high, seeds=logs.seeds)


def pairs(values: Mapping[int, float], others: Mapping[int, float]) -> list[tuple[float, float]]:
    """Pair the values of the seeds that both mappings have, in order of seeds."""
    return [(values[seed], others[seed]) for seed in sorted(values.keys() & others.keys())]


@dataclass(frozen=True, slots=True)
class Crossing:
    """The bandwidth below which one way of sending costs less than another."""

    says: Literal["value", "always", "never", "unknown"]
    bits_per_second: float | None = None


def crossing_by_formula(saved_bytes: float, added_seconds: float) -> Crossing:
    """Compute W* = bytes saved / seconds of encoding and decoding, both per step, in bits per second."""
    if saved_bytes <= 0:
        return Crossing("never")
    if added_seconds <= 0:
        return Crossing("always")
    return Crossing("value", 8 * saved_bytes / added_seconds)


def crossing_by_measurement(costs: Mapping[float, tuple[float, float]]) -> Crossing:
    """Find the bandwidth at which two ways of sending cost the same.

    costs: bits per second (inf: no limit) -> seconds (of one, of the other) for the same work.
    A step is compute plus bytes / bandwidth, so the difference is taken to be straight in 1 / bandwidth between two
    measured links; there infinity is a point like any other.
    """
    if len(costs) < 2:
        return Crossing("unknown")
    points = sorted((1 / bits, one - other) for bits, (one, other) in costs.items())  # fast links first
    signs = [difference < 0 for _, difference in points]
    if all(signs) or not any(signs):
        return Crossing("always" if all(signs) else "never")
    changes = [(before, after) for before, after in itertools.pairwise(points) if (before[1] < 0) != (after[1] < 0)]
    (x0, d0), (x1, d1) = changes[0]
    if len(changes) > 1 or d0 < 0:  # noise, or nothing that bytes could explain
        return Crossing("unknown")
    x = x0 + (x1 - x0) * d0 / (d0 - d1)
    return Crossing("value", 1 / x) if x > 0 else Crossing("always")


def crossing_interval(differences: Mapping[float, Sequence[float]]) -> tuple[float, float] | None:
    """Compute the 95 % interval of crossing_by_measurement's value, in bits per second (Fieller 1954).

    It holds the bandwidths at which the mean difference is not shown to differ from 0.
    differences: bits per second -> seconds that one costs more than the other, a value per seed, two or more of them,
    the same seeds everywhere.

    A bound that lies beyond the measured links is 0 or infinity. None where the means do not cross.
    """
    links = sorted((1 / bits, np.asarray(values, np.float64)) for bits, values in differences.items())
    costs = {1 / x if x else math.inf: (float(values.mean()), 0.0) for x, values in links}
    crossing = crossing_by_measurement(costs).bits_per_second
    if crossing is None:
        return None
    seeds = len(links[0][1])
    bound = float(stdtrit(seeds - 1, (1 + CONFIDENCE) / 2)) ** 2 / seeds
    edges = []
    for (x0, at), (x1, to) in itertools.pairwise(links):
        # mean(s)^2 = bound * variance(s) of the line from `at` (s = 0) to `to` (s = 1)
        (v0, c), (_, v1) = np.cov(at, to - at)
        m0, m1 = at.mean(), (to - at).mean()
        roots = np.roots([m1**2 - bound * v1, 2 * (m0 * m1 - bound * c), m0**2 - bound * v0])
        edges += [x0 + (x1 - x0) * float(root.real) for root in roots if abs(root.imag) < 1e-6 and 0 <= root.real <= 1]
    fastest, slowest = (values.mean() ** 2 > bound * values.var(ddof=1) for _, values in (links[0], links[-1]))
    high = 1 / min(edges, default=1 / crossing) if fastest else math.inf
    return 1 / max(edges, default=1 / crossing) if slowest else 0.0, high
