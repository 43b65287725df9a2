"""Numbers over time in bounded memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

CAPACITY = 14_400  # points: the newest half, an hour of two a second, is never averaged


class Track:
    """Columns over time. Once it is full, the older half is averaged in pairs: the beginning stays, ever coarser.

    Of columns in `peaks` the larger of a pair is kept. What was not known is NaN, and None in `columns`.
    """

    def __init__(self, names: Sequence[str], peaks: Collection[str] = (), capacity: int = CAPACITY) -> None:
        self.names = ("time", *names)
        self._peaks = np.array([name in peaks for name in self.names])
        self._values = np.full((capacity, len(self.names)), np.nan)
        self.points = 0

    def add(self, time: float, values: Mapping[str, float | None]) -> None:
        """Add a point; a name that is missing, or None, was not known then."""
        if self.points == len(self._values):
            self._thin()
        row = [time, *(values.get(name) for name in self.names[1:])]
        self._values[self.points] = [np.nan if value is None else value for value in row]
        self.points += 1

    def columns(self) -> dict[str, list[float | None]]:
        """All points by column, oldest first; numbers have five digits, times milliseconds."""
        held = self._values[: self.points]
        return {
            name: [None if value != value else _rounded(value, name) for value in column]
            for name, column in zip(self.names, held.T.tolist(), strict=True)
        }

    def clear(self) -> None:
        """Forget all points."""
        self.points = 0

    def _thin(self) -> None:
        quarter = len(self._values) // 4
        pairs = self._values[: 2 * quarter].reshape(quarter, 2, -1)
        larger, known = np.fmax(pairs[:, 0], pairs[:, 1]), ~np.isnan(pairs)
        mean = np.where(known, pairs, 0.0).sum(1) / np.maximum(known.sum(1), 1)
        thinned = np.where(self._peaks, larger, np.where(known.any(1), mean, np.nan))
        rest = self._values[2 * quarter : self.points].copy()
        self._values[:quarter], self._values[quarter : quarter + len(rest)] = thinned, rest
        self.points = quarter + len(rest)


def _rounded(value: float, name: str) -> float:
    return round(value, 3) if name == "time" else float(f"{value:.5g}")
