"""Report a run: its plan, its progress and its result. The first worker that is alive reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

from embershard.proto.timing import split_now
from embershard.worker.client.worker_group import Evicted, WorkerGroup
from embershard.worker.data.batch import Dataset
from embershard.worker.job.job import Job
from embershard.worker.reporting.advice import first_warning, waiting_advice
from embershard.worker.reporting.records import (
    BestWeights,
    Evaluation,
    Figures,
    Observer,
    RunMode,
    RunPlan,
    RunResult,
    StepTime,
)
from embershard.worker.reporting.throughput import Throughput, Waited
from embershard.worker.reporting.worker_record import WorkerRecord
from embershard.worker.strategy.protocol import Strategy


class Planted(Protocol):
    """Made-up data whose best reachable figures are known."""

    def best(self, split: str) -> dict[str, float]:
        """Metric -> the value that no model can beat."""


Observers = Sequence[Observer] | Callable[[], Sequence[Observer]]  # where they are opened by whoever comes to need them


class Report:
    """Keeps what a run will be judged by, and tells the observers while it is this worker that reports."""

    def __init__(
        self,
        job: Job,
        dataset: Dataset,
        strategy: Strategy,
        group: WorkerGroup,
        meter: Throughput,
        observers: Observers,
        record: WorkerRecord | None = None,
    ) -> None:
        self._job, self._dataset, self._strategy, self._group = job, dataset, strategy, group
        self._meter = meter
        self._observers = observers
        self._record = record
        self._plan: RunPlan | None = None  # until it is told
        self._best: Evaluation | None = None
        self.last: Evaluation | None = None
        self._evaluations = 0
        self._warnings: list[str] = []

    def state_dict(self) -> Mapping[str, object]:
        """Return the best evaluation and how many there were, for a checkpoint."""
        best = None if self._best is None else dataclasses.asdict(self._best)
        return {"best": best, "evaluations": self._evaluations, "warnings": list(self._warnings)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the best evaluation from a checkpoint."""
        self._best = None if state["best"] is None else Evaluation(**state["best"])
        self._evaluations = state["evaluations"]
        self._warnings = list(state["warnings"])

    @property
    def split(self) -> str | None:
        """The split whose figures decide."""
        splits = self._dataset.splits
        return "valid" if "valid" in splits else splits[0] if splits else None

    def started(
        self,
        *,
        device: str,
        dense_parameters: int,
        total_samples: int | None,
        resumed_step: int | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        """The run begins, or goes on from a checkpoint."""
        job, strategy = self._job, self._strategy
        self._plan = RunPlan(
            job=job.model_dump(mode="json"),
            name=f"{job.model.name} on {job.data.reader}",
            workers=self._group.at_start,
            shards=strategy.num_shards,
            device=device,
            dense_parameters=dense_parameters,
            total_samples=total_samples,
            metric=job.metric,
            split=self.split,
            mode=self._mode(strategy.codecs() + (" at first" if self._job.changes_codecs else "")),
            resumed_step=resumed_step,
            warnings=warnings,
        )
        if self._group.is_first and not self._group.late:
            self._open(self._plan)

    def samples_known(self) -> Mapping[int, int]:
        """Samples of each worker, as it wrote last, of a job whose workers come and go; else nothing."""
        is_fixed = self._group.at_start == self._group.world_size
        return {} if is_fixed or self._record is None else self._record.samples()

    def trained(self, step: int, epoch: int, lr_scale: float) -> None:
        """Report the steps since the last report."""
        if self._meter.has_news:
            self._meter.workers = self._group.num_live
            interval = self._meter.interval(step, epoch, lr_scale)
            if self._record is not None:
                own = interval.samples_per_second / self._meter.workers
                self._record.write(interval, own, self._meter.bytes_per_step({}), self._meter.samples)
            for observer in self._active_observers(self._group.reports):
                observer.trained(interval)

    def evaluating(self) -> None:
        """Report that an evaluation begins."""
        for observer in self._active_observers(self._group.reports):
            observer.evaluating()

    def evaluated(
        self,
        figures: Mapping[str, Figures],
        *,
        step: int,
        epoch: int,
        improved: bool,
        seconds: float,
        reliability: Mapping[str, Sequence[tuple[float, float, int]]] = {},
    ) -> None:
        """An evaluation is done, which took that many seconds."""
        self._evaluations += 1
        warning = None
        if self._evaluations == 1 and self.split is not None:
            warning = first_warning(figures[self.split], self.split, step)
        self._warnings += [warning] if warning else []
        evaluation = Evaluation(
            step=step,
            epoch=epoch,
            samples=self._meter.all_samples,
            seconds=self._meter.seconds,
            figures=figures,
            improved=improved,
            evaluation_seconds=seconds,
            warnings=(warning,) if warning else (),
            reliability=reliability,
            reachable=self._reachable if self._group.is_first else {},
        )
        self.last = evaluation
        if improved or self._best is None:
            self._best = evaluation
        for observer in self._active_observers(self._group.is_first):  # as all of them agree
            observer.evaluated(evaluation)

    def finished(
        self,
        segment: int,
        *,
        step: int,
        epoch: int,
        stopped_early: bool,
        skipped_steps: int = 0,
        returned_splits: int = 0,
        at_end: Callable[[], BestWeights] = BestWeights,
    ) -> RunResult:
        """The run is over with a segment; this worker left `skipped_steps` out. Every worker must call it.

        `at_end` is called once all workers have ended, and says what has become of the best weights.
        """
        group, meter, best = self._group, self._meter, self._best
        waited = meter.waited
        counted = [waited.shards, waited.workers, waited.data, meter.trained]
        mine = np.array([*counted, self._strategy.stats.skipped_rows, skipped_steps])
        held: list[BestWeights] = []  # of one that ended without the others: nothing
        parts = self._of_workers(segment, mine, lambda: held.append(at_end()))
        *waits, trained, skipped, left_out = np.sum(parts, axis=0)
        shares = Waited(*(float(seconds / trained) for seconds in waits)) if trained else Waited()
        # the longest: one that was started again has counted since then only
        samples, train_seconds = meter.all_samples, float(max(part[3] for part in parts))
        result = RunResult(
            metric=self._job.metric,
            split=self.split,
            figures=best.figures if best else {},
            reachable=self._reachable if group.is_first else {},
            best_epoch=best.epoch if best else epoch,
            best_step=best.step if best else step,
            stopped_early=stopped_early,
            epochs=epoch,
            steps=step,
            samples=samples,
            seconds=meter.seconds,
            train_seconds=train_seconds,
            samples_per_second=samples / train_seconds if train_seconds else 0.0,
            wait_share=shares.total,
            wait_shards=shares.shards,
            wait_workers=shares.workers,
            wait_data=shares.data,
            mode=self._mode(self._strategy.codecs()),
            evaluations=self._evaluations,
            warnings=tuple(self._warnings),
            advice=waiting_advice(self._job, self._group.world_size, shares),
            skipped_rows=round(skipped),
            skipped_steps=round(left_out),
            expired_leases=self._strategy.expired_leases() if group.is_first else 0,
            returned_splits=returned_splits,
            staleness_seen=self._strategy.staleness_seen() if group.is_first else (),
            table_rows=self._strategy.table_rows() if group.is_first else {},
            bytes=meter.bytes_per_step(self._strategy.predicted(meter.moved)),
            step=_step_times(),
            best_weights=held[0] if held else BestWeights(),
        )
        for observer in self._active_observers(self._group.is_first):
            observer.finished(result)
        return result

    def _mode(self, codecs: str) -> RunMode:
        return mode_of(self._job, workers=self._group.at_start, shards=self._strategy.num_shards, codecs=codecs)

    def _of_workers(
        self, segment: int, mine: npt.NDArray[np.float64], at_end: Callable[[], None]
    ) -> list[npt.NDArray[np.float64]]:
        """Collect the arrays of all workers, in order; this one's own where the others have finished without it."""
        group = self._group
        try:
            group.end_segment(segment, last=True)
            at_end()
            self._meter.agree(group, self.samples_known())
            return list(group.retry_on_membership_change(lambda: group.collect(mine)).values())
        except Evicted:
            return [mine]

    def _active_observers(self, by_this: bool) -> Sequence[Observer]:
        """Whom to tell, if it is this worker that does."""
        if not by_this:
            return ()
        if self._plan is not None:
            self._open(dataclasses.replace(self._plan, reporter=self._group.rank))
        assert not callable(self._observers)
        return self._observers

    def _open(self, plan: RunPlan) -> None:
        self._plan = None
        self._observers = self._observers() if callable(self._observers) else self._observers
        for observer in self._observers:
            observer.started(plan)

    @cached_property
    def _reachable(self) -> dict[str, Figures]:
        dataset = self._dataset
        splits = dataset.splits
        return {split: dataset.best(split) for split in splits} if _is_planted(dataset) else {}


def mode_of(job: Job, *, workers: int, shards: int, codecs: str) -> RunMode:
    """The mode of a job that runs on so many workers and shards, with these codecs."""
    strategy: str = job.strategy
    staleness = prefetch = ""
    if job.has_shards:
        if job.dense_mode != "ps":
            strategy += f" (dense weights by {job.dense_mode})"
        prefetch = "off" if job.train.prefetch is None else str(job.train.prefetch)
        match job.train.staleness:
            case None:
                staleness = "unbounded (asynchronous)"
            case 0:
                staleness = "0 (synchronous)"
            case int(bound):
                staleness = f"at most {bound}"
            case str(local):
                staleness = local
    elif job.all_reduces:
        staleness = "0 (synchronous)"
    return RunMode(
        strategy=strategy, workers=workers, shards=shards, staleness=staleness, prefetch=prefetch, codecs=codecs
    )


def _is_planted(dataset: Dataset) -> TypeGuard[Planted]:
    return callable(getattr(dataset, "best", None))


def _step_times() -> list[StepTime]:
    """Where the time of the last steps went, if a Recorder is installed."""
    split = split_now()
    if split is None:
        return []
    groups = (({"step": split.step, **split.parts}, False), (split.overlapped, True))
    return [
        StepTime(name, part.p50_ms, part.p99_ms, part.mean_ms, overlapped)
        for parts, overlapped in groups
        for name, part in parts.items()
    ]
