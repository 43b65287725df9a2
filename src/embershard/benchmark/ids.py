"""Ids by Zipf's law, the same ones for the same seed."""

from __future__ import annotations

import numpy as np

from embershard.proto.arrays import Ids
from embershard.worker.data.readers.clicks import spread_step, zipf_bins

_AT_ONE = 1e-6  # the law's integral has no closed form at exponent 1 itself; so near to it, nothing can tell


class ZipfIds:
    """Draws ids of 0..rows - 1, p(rank) ~ rank ** -skew (0: uniform); hot ids are spread over the id space."""

    def __init__(self, rows: int, skew: float) -> None:
        bins = zipf_bins(rows, skew + _AT_ONE if abs(skew - 1) < _AT_ONE else skew, 0.0, 0.0)
        self._starts, self._widths, self._until = bins.starts, bins.widths, np.cumsum(bins.probabilities)
        self._rows, self._step = rows, spread_step(rows)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Ids:
        """Draw ids (int64) of this shape."""
        at = np.searchsorted(self._until, rng.random(shape), side="right").clip(max=len(self._starts) - 1)
        ranks = self._starts[at] + (rng.random(shape) * self._widths[at]).astype(np.int64)
        return np.asarray(ranks * self._step % self._rows, np.int64)
