"""How fast one worker trains, and for what share of the time it waits for shards."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from embershard.worker.client.byte_counts import ByteCount, ByteCounts, BytePart
from embershard.worker.client.connections import ClientStats
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.reporting.records import Interval, StepBytes

INTERVAL_SECONDS = 1.0


class Waiting(Protocol):
    """Who counts what training waits for: a session, or a strategy."""

    @property
    def stats(self) -> ClientStats:
        """Counters since the session began."""


class Throughput:
    """Counts samples, losses and seconds of training; evaluations, between pause and resume, do not count."""

    def __init__(self, waiting: Waiting, world_size: int) -> None:
        self._waiting, self._world_size = waiting, world_size
        self._start = time.perf_counter()
        self.samples = 0  # of this worker
        self.trained = 0.0  # seconds
        self.waited = 0.0  # seconds of these, for shards
        self._mark = self._waited_at = 0.0  # at the last look, while training
        self._new_samples = self._new_counted = 0
        self._new_loss = 0.0
        self._new_trained = self._new_waited = 0.0
        self._cached_at = (0, 0)  # hits and lookups at the last look
        self._new_hits = self._new_lookups = 0
        self._steps = self._steps_at = 0  # of this process, and the number of the last one at the last look
        self.moved: dict[BytePart, ByteCount] = {}  # in these
        self._moved_at: ByteCounts = {}  # at the last look
        self._workers = world_size  # that train
        self._counts: dict[int, int] = {}  # samples of each worker, of those that were lost too, when they met last
        self._met_at = 0  # samples of this worker then

    def agree(self, group: WorkerGroup) -> None:
        """Learn how far the others are; every worker must call it."""
        counts = group.retry_on_membership_change(lambda: group.collect(np.array([self.samples])))
        self._counts.update((worker, max(int(part[0]), self._counts.get(worker, 0))) for worker, part in counts.items())
        self._workers, self._met_at = len(counts), self.samples

    def state_dict(self) -> Mapping[str, float]:
        """Return the counters, for a checkpoint. Call it while no step runs."""
        return {
            "all_samples": self.all_samples,
            "trained": self.trained,
            "waited": self.waited,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from there, maybe with another number of workers."""
        self.samples = round(state["all_samples"] / self._world_size)
        self._counts = dict.fromkeys(range(self._world_size), self.samples)
        self._met_at = self.samples
        self.trained, self.waited = state["trained"], state["waited"]
        self._start = time.perf_counter() - state["seconds"]

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._start

    @property
    def began(self) -> float:
        """When that was: seconds since 1970, by which workers that come later count too."""
        return time.time() - self.seconds

    @began.setter
    def began(self, moment: float) -> None:
        self._start = time.perf_counter() - max(0.0, time.time() - moment)

    @property
    def all_samples(self) -> int:
        """Of all workers, the others taken to be as fast as this one since they met."""
        return sum(self._counts.values()) + (self.samples - self._met_at) * self._workers

    @property
    def has_news(self) -> bool:
        """Whether there were steps since the last interval."""
        return self._new_samples > 0

    def resume(self, step: int) -> None:
        """Training goes on behind a step."""
        stats = self._waiting.stats
        self._mark, self._waited_at = time.perf_counter(), stats.wait_seconds
        self._cached_at = stats.cache_hits, stats.cache_lookups
        self._steps_at, self._moved_at = step, stats.volume

    def pause(self, step: int) -> None:
        """Whether training pauses after a step."""
        self._look(step)

    def bytes_per_step(self, expected: Mapping[BytePart, float]) -> list[StepBytes]:
        """Return the bytes per training step of this worker, by direction and part, over all tables."""
        steps = max(1, self._steps)
        groups: dict[tuple[str, str], list[BytePart]] = {}
        for part in sorted(self.moved):
            groups.setdefault((part.direction, part.kind), []).append(part)
        return [
            StepBytes(
                *names,
                wire=sum(self.moved[part].wire for part in parts) / steps,
                raw=sum(self.moved[part].raw for part in parts) / steps,
                predicted=sum(expected[part] for part in parts) / steps if expected.keys() >= set(parts) else None,
            )
            for names, parts in groups.items()
        ]

    def add(self, samples: int, loss: float) -> None:
        """A step of this many samples."""
        self.samples += samples
        self._new_samples += samples
        if math.isfinite(loss):  # else the step was left out
            self._new_loss += loss * samples
            self._new_counted += samples

    def due(self) -> bool:
        """Whether it is time for an interval."""
        return time.perf_counter() - self._mark >= INTERVAL_SECONDS

    def interval(self, step: int, epoch: int, lr_scale: float) -> Interval:
        """Return the figures of the time since the last call."""
        self._look(step)
        result = Interval(
            step=step,
            epoch=epoch,
            samples=self.all_samples,
            seconds=self.seconds,
            loss=self._new_loss / self._new_counted if self._new_counted else math.nan,
            samples_per_second=self._new_samples * self._workers / self._new_trained,
            wait_share=self._new_waited / self._new_trained,
            lr_scale=lr_scale,
            cached_share=self._new_hits / self._new_lookups if self._new_lookups else None,
        )
        self._new_hits = self._new_lookups = 0
        self._new_samples = self._new_counted = 0
        self._new_loss = 0.0
        self._new_trained = self._new_waited = 0.0
        return result

    def _look(self, step: int) -> None:
        stats = self._waiting.stats
        now, waited = time.perf_counter(), stats.wait_seconds
        self._new_trained += now - self._mark
        self._new_waited += waited - self._waited_at
        self.trained += now - self._mark
        self.waited += waited - self._waited_at
        self._mark, self._waited_at = now, waited
        hits, lookups = self._cached_at
        self._new_hits += stats.cache_hits - hits
        self._new_lookups += stats.cache_lookups - lookups
        self._cached_at = stats.cache_hits, stats.cache_lookups
        self._steps += step - self._steps_at
        for key, moved in stats.volume.items():
            self.moved[key] = self.moved.get(key, ByteCount()).plus(moved.minus(self._moved_at.get(key, ByteCount())))
        self._steps_at, self._moved_at = step, stats.volume
