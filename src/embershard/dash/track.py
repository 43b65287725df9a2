"""Numbers over time in bounded memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from embershard.proto.arrays import Doubles

CAPACITY = 14_400  # points: the newest half, an hour of two a second, is never averaged


class Track:
    """Columns over time: the newest half of `capacity` as it came, before that the means of ever more points.

    So the beginning stays, and memory is bounded. Of columns in `peaks` the largest is kept. What was not known is NaN,
    and None in `columns`.
    """

    def __init__(self, names: Sequence[str], peaks: Collection[str] = (), capacity: int = CAPACITY) -> None:
        self.names = ("time", *names)
        self._peaks = np.array([name in peaks for name in self.names])
        self._values = np.full((capacity, len(self.names)), np.nan)
        self.points = 0
        self._coarse = 0  # of the points, the first ones: each the mean of this many
        self._per = 2

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

    def _thin(self) -> None:
        capacity, held = len(self._values), self._values
        spare = self.points - self._coarse - capacity // 2  # of the fine points
        if self._coarse + spare // self._per > capacity // 4:
            coarse = self._merged(held[: self._coarse], 2)
            self._per *= 2
        else:
            coarse = held[: self._coarse].copy()
        taken = spare - spare % self._per or spare
        new = self._merged(held[self._coarse : self._coarse + taken], min(self._per, taken))
        rest = held[self._coarse + taken : self.points].copy()
        self._coarse = len(coarse) + len(new)
        self.points = self._coarse + len(rest)
        held[: self.points] = np.concatenate([coarse, new, rest])

    def _merged(self, points: Doubles, per: int) -> Doubles:
        """One point for each `per` of them, at the time of its first."""
        groups = [points[i : i + per] for i in range(0, len(points), per)]
        return np.array([self._one(group) for group in groups]).reshape(-1, len(self.names))

    def _one(self, group: Doubles) -> Doubles:
        known = ~np.isnan(group)
        mean = np.where(known, group, 0.0).sum(0) / np.maximum(known.sum(0), 1)
        merged = np.where(self._peaks, np.fmax.reduce(group), np.where(known.any(0), mean, np.nan))
        merged[0] = group[0, 0]
        return merged


def _rounded(value: float, name: str) -> float:
    return round(value, 3) if name == "time" else float(f"{value:.5g}")
