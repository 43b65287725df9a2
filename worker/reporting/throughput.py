"""How fast one worker trains, and for what share of the time it waits for shards, other workers and data."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, TypeVar

import numpy as np

from embershard.proto.timing import span
from embershard.worker.client.byte_counts import ByteCount, ByteCounts, BytePart
from embershard.worker.client.connections import ClientStats
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.reporting.records import Interval, StepBytes

INTERVAL_SECONDS = 1.0
_NOBODY = -1  # whose samples are those that a resumed run cannot divide evenly among its workers

T = TypeVar("T")


class Waiting(Protocol):
    """Counts the seconds that training waits for shards: a session, or a strategy."""

    @property
    def stats(self) -> ClientStats:
        """Counters since the session began."""


@dataclass(frozen=True, slots=True)
class Waited:
    """Seconds that training waited, by what it waited for (docs/training/staleness.md, "What a run waits for")."""

    shards: float = 0.0
    workers: float = 0.0
    data: float = 0.0

    @property
    def total(self) -> float:
        """Seconds, whatever was waited for."""
        return self.shards + self.workers + self.data

    def plus(self, other: Waited, factor: float = 1.0) -> Waited:
        """Add another one, `factor` times."""
        return Waited(
            self.shards + factor * other.shards, self.workers + factor * other.workers, self.data + factor * other.data
        )


class Throughput:
    """Counts samples, losses and seconds of training; evaluations, between pause and resume, do not count."""

    def __init__(self, waiting: Waiting, world_size: int) -> None:
        self._waiting, self._world_size = waiting, world_size
        self._start = time.perf_counter()
        self.samples = 0  # of this worker
        self.trained = 0.0  # seconds
        self.waited = Waited()  # of these
        self._mark = 0.0  # at the last look, while training
        self._waited_at = Waited()  # likewise
        self._read_seconds = 0.0  # in which the training thread itself made batches
        self._thread = threading.get_ident()  # that trains
        self._new_samples = self._new_counted = 0
        self._new_loss = 0.0
        self._new_trained, self._new_waited = 0.0, Waited()
        self._cached_at = (0, 0)  # hits and lookups at the last look
        self._new_hits = self._new_lookups = 0
        self._steps = self._steps_at = 0  # of this process, and the number of the last one at the last look
        self.moved: dict[BytePart, ByteCount] = {}  # in these
        self._moved_at: ByteCounts = {}  # at the last look
        self.workers = world_size  # that train now, by which the samples of the others are told
        self.last: Interval | None = None  # that was reported
        self._counts: dict[int, int] = {}  # samples of each worker, of those that were lost too, when they met last
        self._met_at = 0  # samples of this worker then
        self._others = 0  # samples of the others since then, taken to be as fast as this one

    def agree(self, group: WorkerGroup, known: Mapping[int, int] = MappingProxyType({})) -> None:
        """Learn how far the others are, `known` where they have left; every worker must call it."""
        counts = group.retry_on_membership_change(lambda: group.collect(np.array([self.samples])))
        samples = {**known, **{worker: int(part[0]) for worker, part in counts.items()}}
        self._counts.update((worker, max(count, self._counts.get(worker, 0))) for worker, count in samples.items())
        self.workers, self._met_at, self._others = len(counts), self.samples, 0

    def state_dict(self) -> Mapping[str, float]:
        """Return the counters, for a checkpoint. Call it while no step runs."""
        return {
            "all_samples": self.all_samples,
            "trained": self.trained,
            "waited": self.waited.total,
            "waited_for_workers": self.waited.workers,
            "waited_for_data": self.waited.data,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state that `state_dict` returned, maybe with another number of workers."""
        self.samples, rest = divmod(int(state["all_samples"]), self._world_size)
        self._counts = {**dict.fromkeys(range(self._world_size), self.samples), _NOBODY: rest}
        self._met_at = self.samples
        workers, data = state["waited_for_workers"], state["waited_for_data"]
        self.trained, self.waited = state["trained"], Waited(state["waited"] - workers - data, workers, data)
        self._start = time.perf_counter() - state["seconds"]

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._start

    @property
    def began(self) -> float:
        """Start of the measurement, seconds since 1970; workers that join later take it over."""
        return time.time() - self.seconds

    @began.setter
    def began(self, moment: float) -> None:
        self._start = time.perf_counter() - max(0.0, time.time() - moment)

    @property
    def all_samples(self) -> int:
        """Samples of all workers, the others taken to be as fast as this one since their counts were exchanged."""
        others = self._others + self._new_samples * (self.workers - 1)
        return sum(self._counts.values()) + self.samples - self._met_at + others

    @property
    def has_news(self) -> bool:
        """Whether there were steps since the last interval."""
        return self._new_samples > 0

    def resume(self, step: int) -> None:
        """Count from here on: training goes on after `step`."""
        stats, self._thread = self._waiting.stats, threading.get_ident()
        self._mark, self._waited_at = time.perf_counter(), self._waits(stats)
        self._cached_at = stats.cache_hits, stats.cache_lookups
        self._steps_at, self._moved_at = step, stats.volume

    def pause(self, step: int) -> None:
        """Count the time until now: training pauses after `step`."""
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

    def timed(self, batches: Iterator[T]) -> Iterator[T]:
        """The batches; the time that each took is a part of the step, and a wait where this thread trains."""
        while True:
            start = time.perf_counter()
            with span("data"):
                batch = next(batches, None)
            if threading.get_ident() == self._thread:  # else `session.prefetch` knows how long training waited for it
                self._read_seconds += time.perf_counter() - start
            if batch is None:
                return
            yield batch

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
            samples_per_second=self._new_samples * self.workers / self._new_trained,
            wait_share=self._new_waited.total / self._new_trained,
            wait_shards=self._new_waited.shards / self._new_trained,
            wait_workers=self._new_waited.workers / self._new_trained,
            wait_data=self._new_waited.data / self._new_trained,
            lr_scale=lr_scale,
            cached_share=self._new_hits / self._new_lookups if self._new_lookups else None,
        )
        self._others += self._new_samples * (self.workers - 1)
        self._new_hits = self._new_lookups = 0
        self._new_samples = self._new_counted = 0
        self._new_loss = 0.0
        self._new_trained, self._new_waited = 0.0, Waited()
        self.last = result
        return result

    def _waits(self, stats: ClientStats) -> Waited:
        workers, data = stats.workers_wait_seconds, stats.data_wait_seconds
        return Waited(stats.wait_seconds - workers - data, workers, data + self._read_seconds)

    def _look(self, step: int) -> None:
        stats = self._waiting.stats
        now, waited = time.perf_counter(), self._waits(stats)
        new = waited.plus(self._waited_at, -1.0)
        self._new_trained += now - self._mark
        self._new_waited = self._new_waited.plus(new)
        self.trained += now - self._mark
        self.waited = self.waited.plus(new)
        self._mark, self._waited_at = now, waited
        hits, lookups = self._cached_at
        self._new_hits += stats.cache_hits - hits
        self._new_lookups += stats.cache_lookups - lookups
        self._cached_at = stats.cache_hits, stats.cache_lookups
        self._steps += step - self._steps_at
        for key, moved in stats.volume.items():
            self.moved[key] = self.moved.get(key, ByteCount()).plus(moved.minus(self._moved_at.get(key, ByteCount())))
        self._steps_at, self._moved_at = step, stats.volume
