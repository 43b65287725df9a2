"""The number of workers of a job, while it trains: measured, decided (deploy/scaling.py), and written to its log."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from embershard.deploy.scaling import Measured, Resize, Scaling, ScalingPolicy
from embershard.deploy.workers import LocalWorkers
from embershard.proto.errors import EmbershardError
from embershard.proto.messages import ShardStatus
from embershard.proto.security.tls import TLS
from embershard.worker.job.job import Job
from embershard.worker.reporting.log import FILE_NAME
from embershard.worker.reporting.worker_record import worker_records

if TYPE_CHECKING:
    from embershard.worker.client.client import Client

WINDOW_SECONDS = 30.0  # of a measurement
_LOOK_SECONDS = 1.0
_FEWEST = 3  # records of each worker in a measurement, which it writes about every second
_TIMEOUT = timedelta(seconds=5)

Record = Mapping[str, object]


def parse_workers(text: str | None) -> tuple[int, int] | None:
    """The least and the most of "2-8", or of "4". BadParameter where it is neither."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        reason = f"{text!r} is no number of workers; write 4, or 2-8 for at least 2 and at most 8"
        raise typer.BadParameter(reason, param_hint="--workers")
    return least, most


def check_scales(job: Job, least: int, most: int) -> None:
    """BadParameter where this job cannot begin with `least` workers and have up to `most` while it trains."""
    problem = ""
    if least >= most:
        problem = "" if least == most else "it begins with more than there may be"
    elif not job.elastic(most):
        problem = f"dense.mode {job.dense_mode}" if job.has_shards else f"strategy {job.strategy}"
        problem = f"{problem} ties all workers together: use strategy ps"
    elif job.train.bound == 0 or job.train.local_steps:
        problem = f"with train.staleness {job.train.staleness} a step depends on their number: use off, or a bound"
    elif job.data.splits is None:
        problem = "each worker's share of the data depends on it: set data.splits to auto, and train.epochs"
    elif job.train.lr_schedule.name in ("linear", "cosine"):
        problem = f"train.lr_schedule {job.train.lr_schedule.name} needs to know how many steps each worker makes"
    if problem:
        raise typer.BadParameter(f"a job cannot have {least} to {most} workers: {problem}")


class WorkerScaling:
    """Changes the number of workers of one attempt of a job; `look` is called again and again while they train.

    `folder` is the run's, where workers write how fast they are. Each change is told to `say`.
    """

    def __init__(
        self, policy: ScalingPolicy, folder: Path, shards: str, tls: TLS | None, say: Callable[[str], object]
    ) -> None:
        self._scaling = Scaling(policy)
        self._folder, self._say = folder, say
        self._shards, self._tls = shards, tls
        self._client: Client | None = None
        self._due = 0.0  # time.monotonic() of the next look
        self._window: _MeasuringWindow | None = None

    def close(self) -> None:
        """Close the connections to the shards."""
        if self._client is not None:
            self._client.close()

    def look(self, workers: LocalWorkers) -> None:
        """See how the workers do, and have another number of them where that pays."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _LOOK_SECONDS
        records = worker_records(self._folder)
        if self._window is None or self._window.ranks != workers.ranks:
            self._window = _MeasuringWindow(workers.ranks, records)
        self._window.take(records)
        if not self._window.is_due(now):
            return
        statuses = self._statuses()
        measured = self._window.end(now, statuses)
        if measured is not None and (resize := self._scaling.on(measured)) is not None:
            self._resize(workers, measured, resize)

    def _resize(self, workers: LocalWorkers, measured: Measured, resize: Resize) -> None:
        self._say(f"workers: {measured.workers} -> {resize.workers}: {resize.reason}")
        line = {
            "record": "workers",
            "time": round(time.time(), 3),
            "before": measured.workers,
            "workers": resize.workers,
            "reason": resize.reason,
        }
        with (self._folder / FILE_NAME).open("a", encoding="utf-8") as log:
            log.write(json.dumps(line, separators=(",", ":")) + "\n")
        workers.resize(resize.workers)

    def _statuses(self) -> Sequence[ShardStatus]:
        """What the shards say of themselves; nothing where one of them does not answer now."""
        try:
            from embershard.worker.client.client import Client  # numba takes a while

            self._client = self._client or Client.connect(self._shards, timeout=_TIMEOUT, tls=self._tls)
            return self._client.status()
        except EmbershardError:
            return ()


class _MeasuringWindow:
    """A while in which the same workers train: it begins once each of them does."""

    def __init__(self, ranks: tuple[int, ...], records: Mapping[int, Record]) -> None:
        self.ranks = ranks
        self._times = {rank: record.get("time") for rank, record in records.items()}  # of those taken
        self._taken: dict[int, list[Record]] = {rank: [] for rank in ranks}
        self._began: float | None = None
        self._statuses: Sequence[ShardStatus] = ()

    def take(self, records: Mapping[int, Record]) -> None:
        """Take those that are new."""
        for rank, record in records.items():
            if rank in self._taken and record.get("time") != self._times.get(rank):
                self._times[rank] = record.get("time")
                self._taken[rank].append(record)

    def is_due(self, now: float) -> bool:
        """Whether it may begin, or end."""
        fewest = min(map(len, self._taken.values()), default=0)
        return fewest > 0 if self._began is None else now - self._began >= WINDOW_SECONDS and fewest >= _FEWEST

    def end(self, now: float, statuses: Sequence[ShardStatus]) -> Measured | None:
        """Return what was measured since the last call; None at first, or if a shard is away or restarted."""
        before, taken = self._statuses, self._taken
        self._statuses, self._began = statuses, now if statuses else None
        self._taken = {rank: [] for rank in self.ranks}
        if [one.instance for one in before] != [one.instance for one in statuses] or not statuses:
            return None
        rates = [_mean(_number(one.get("samples_per_second")) for one in records) for records in taken.values()]
        waits = [_mean(map(_waits, records)) for records in taken.values()]
        busy = max(
            (new.apply_busy_seconds - old.apply_busy_seconds) / max(new.uptime_seconds - old.uptime_seconds, 1e-9)
            for old, new in zip(before, statuses, strict=True)
        )
        return Measured(len(self.ranks), sum(rates), busy, _mean(waits))


def _waits(record: Record) -> float:
    """The share of its time that a worker waited for shards and other workers; not for data, which is its own work."""
    waits = record.get("waits")
    return _number(waits.get("shards")) + _number(waits.get("workers")) if isinstance(waits, Mapping) else 0.0


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / max(1, len(found))


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
