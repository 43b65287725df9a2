"""A histogram of durations in plain ints: cheap enough for every request and every step."""

from __future__ import annotations

# seconds: 50 us, 100 us, ... 1.6 s; what took longer is counted apart
BOUNDS: tuple[float, ...] = tuple(50e-6 * 2**n for n in range(16))
_PER_SECOND: float = 1 / BOUNDS[0]
_LAST = len(BOUNDS)


class DurationHistogram:
    """Counts of durations by BOUNDS, the last one of what took longer; one thread adds, any may read."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (_LAST + 1)
        self.sum = 0.0  # seconds

    def add(self, seconds: float) -> None:
        """Count a duration, in seconds."""
        bucket = int(seconds * _PER_SECOND).bit_length()
        self.counts[bucket if bucket < _LAST else _LAST] += 1
        self.sum += seconds

    @property
    def count(self) -> int:
        """The number of durations that were counted."""
        return sum(self.counts)


def quantile(counts: list[int], share: float) -> float:
    """About which duration, in seconds, a `share` of them did not exceed; 0 without any.

    Within a bucket they are taken to be spread evenly, and the longest to be as long as the last bound.
    """
    rank, below = share * sum(counts), 0
    for number, count in enumerate(counts[:_LAST]):
        if count and below + count >= rank:
            lowest = BOUNDS[number - 1] if number else 0.0
            return lowest + (BOUNDS[number] - lowest) * (rank - below) / count
        below += count
    return BOUNDS[-1] if sum(counts) else 0.0
