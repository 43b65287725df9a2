"""What the first worker tells of a run: the plan, how it goes, and what was reached."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from embershard.worker.data.batch import Dataset
from embershard.worker.group import WorkerGroup
from embershard.worker.job import Job
from embershard.worker.meter import Meter
from embershard.worker.records import Evaluation, Figures, Observer, Plan, Result
from embershard.worker.strategy.protocol import Strategy


@runtime_checkable
class Planted(Protocol):
    """Made-up data whose best reachable figures are known."""

    def best(self, split: str) -> dict[str, float]:
        """Metric -> the value that no model can beat."""


class Report:
    """Keeps what a run will be judged by, and tells the observers, of whom only the first worker has any."""

    def __init__(
        self,
        job: Job,
        dataset: Dataset,
        strategy: Strategy,
        group: WorkerGroup,
        meter: Meter,
        observers: Sequence[Observer],
    ) -> None:
        self._job, self._dataset, self._strategy, self._group = job, dataset, strategy, group
        self._meter = meter
        self._observers = observers if group.is_first else ()
        self._best: Evaluation | None = None

    def state_dict(self) -> Mapping[str, object]:
        """The best evaluation."""
        return {"best": None if self._best is None else dataclasses.asdict(self._best)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._best = None if state["best"] is None else Evaluation(**state["best"])

    @property
    def split(self) -> str | None:
        """The split that decides."""
        splits = self._dataset.splits
        return "valid" if "valid" in splits else splits[0] if splits else None

    def started(self, *, device: str, dense_parameters: int, total_samples: int | None) -> None:
        """The run begins."""
        job = self._job
        plan = Plan(
            job=job.model_dump(mode="json"),
            name=f"{job.model.name} on {job.data.reader}",
            workers=self._group.world_size,
            shards=self._strategy.num_shards,
            device=device,
            dense_parameters=dense_parameters,
            total_samples=total_samples,
            metric=job.metric,
            split=self.split,
        )
        for observer in self._observers:
            observer.started(plan)

    def trained(self, step: int, epoch: int, lr_scale: float) -> None:
        """Some steps were made."""
        if self._observers and self._meter.has_news:
            interval = self._meter.interval(step, epoch, lr_scale)
            for observer in self._observers:
                observer.trained(interval)

    def evaluating(self) -> None:
        """An evaluation begins."""
        for observer in self._observers:
            observer.evaluating()

    def evaluated(
        self, figures: Mapping[str, Figures], *, step: int, epoch: int, improved: bool, seconds: float
    ) -> None:
        """An evaluation is done, which took that many seconds."""
        if not self._group.is_first:
            return
        evaluation = Evaluation(
            step=step,
            epoch=epoch,
            samples=self._meter.all_samples,
            seconds=self._meter.seconds,
            figures=figures,
            improved=improved,
            evaluation_seconds=seconds,
        )
        if improved or self._best is None:
            self._best = evaluation
        for observer in self._observers:
            observer.evaluated(evaluation)

    def finished(self, *, step: int, epoch: int, stopped_early: bool, skipped_steps: int = 0) -> Result:
        """The run is over; this worker left `skipped_steps` out. Every worker must call it."""
        group, meter, best = self._group, self._meter, self._best
        samples, waited, trained = (group.sum(part) for part in (meter.samples, meter.waited, meter.trained))
        skipped = group.sum(self._strategy.stats.skipped_rows)
        train_seconds = trained / group.world_size
        result = Result(
            metric=self._job.metric,
            split=self.split,
            figures=best.figures if best else {},
            reachable=self._reachable() if group.is_first else {},
            best_epoch=best.epoch if best else epoch,
            best_step=best.step if best else step,
            stopped_early=stopped_early,
            epochs=epoch,
            steps=step,
            samples=round(samples),
            seconds=meter.seconds,
            train_seconds=train_seconds,
            samples_per_second=samples / train_seconds if train_seconds else 0.0,
            wait_share=waited / trained if trained else 0.0,
            skipped_rows=round(skipped),
            skipped_steps=round(group.sum(skipped_steps)),
            table_rows=self._strategy.table_rows() if group.is_first else {},
        )
        for observer in self._observers:
            observer.finished(result)
        return result

    def _reachable(self) -> dict[str, Figures]:
        dataset = self._dataset
        return {split: dataset.best(split) for split in dataset.splits} if isinstance(dataset, Planted) else {}
