"""Decide how many workers a job has, between a least and a most number: more while they pay. No clock, no I/O.

It is told what was measured while the same workers trained for a while, and answers with another number, or with
nothing (docs/training/workers.md, "As many workers as pay").
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ScalingPolicy:
    """When a job has one worker more, or one fewer.

    One more where the shards' apply threads are busy for less than `busy` of the time, and the last one that came
    raised the job's samples per second by more than `pays` of what a worker made before. One fewer where workers wait
    for shards or each other for more than `waits` of their time. After a number of workers has proved to be enough, no
    more are tried for `patience` measurements.
    """

    least: int
    most: int
    busy: float = 0.6
    pays: float = 0.5
    waits: float = 0.5
    patience: int = 20

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"the least number of workers must be 1..{self.most}, the most, got {self.least}")


@dataclass(frozen=True, slots=True)
class Measured:
    """A while in which the same workers trained."""

    workers: int
    samples_per_second: float  # of all workers
    busy: float  # share of the time, of the shard whose apply thread was the busiest
    waits: float  # share of the workers' time that they waited for shards or other workers


@dataclass(frozen=True, slots=True)
class Resize:
    """Have this many workers from now on, and why."""

    workers: int
    reason: str


class Scaling:
    """The number of workers of one job."""

    def __init__(self, policy: ScalingPolicy) -> None:
        self.policy = policy
        self._before: Measured | None = None
        self._asked = 0  # workers
        self._enough, self._left = policy.most, 0  # no more than these, for so many measurements

    def on(self, now: Measured) -> Resize | None:
        """Take note of a measurement; the number of workers to have, where it is another one."""
        policy, before = self.policy, self._before
        self._before, self._left = now, max(0, self._left - 1)
        if now.workers < self._asked:  # one found no place, or was lost
            self._stop_at(now.workers)
        gain = 1.0  # of the last worker that came, in those before it
        if before is not None and now.workers > before.workers:
            each = before.samples_per_second / before.workers
            gain = (now.samples_per_second - before.samples_per_second) / max(each, 1e-9)
            gain /= now.workers - before.workers
            if gain <= policy.pays:
                self._stop_at(now.workers)
        self._asked = now.workers
        if now.waits > policy.waits and now.workers > policy.least:
            self._stop_at(now.workers - 1)
            return self._resize(now.workers - 1, f"workers wait for {now.waits:.0%} of their time")
        if now.workers >= (self._enough if self._left else policy.most):
            return None
        if now.workers < policy.least:
            return self._resize(now.workers + 1, f"the job has at least {policy.least}")
        if now.busy < policy.busy and now.waits <= policy.waits:
            rate = f"{now.samples_per_second:,.0f} samples/s"
            reason = f"{rate}, shards are busy for {now.busy:.0%} of the time, workers wait for {now.waits:.0%}"
            return self._resize(now.workers + 1, reason)
        return None

    def _stop_at(self, workers: int) -> None:
        self._enough, self._left = workers, self.policy.patience

    def _resize(self, workers: int, reason: str) -> Resize:
        self._asked = workers
        return Resize(workers, reason)
