"""The training loop. One class drives one worker of many: the workers meet at evaluations and nowhere else."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from embershard.proto.errors import EmbershardError, JobError
from embershard.worker.data.batch import Batch, Dataset
from embershard.worker.data.loader import LoaderProcess
from embershard.worker.evaluate import Evaluator, to_device
from embershard.worker.group import WorkerGroup
from embershard.worker.job import Job
from embershard.worker.meter import Meter
from embershard.worker.models.recommender import Recommender, num_dense_parameters
from embershard.worker.objective import objective_of
from embershard.worker.onednn import onednn_is_faster, use_onednn
from embershard.worker.records import Evaluation, Figures, Observer, Plan, Result
from embershard.worker.schedule import Best, Schedule
from embershard.worker.session import Session
from embershard.worker.spans import span, step_ends, steps_begin
from embershard.worker.wrap import wrap

Numbered = tuple[int, Batch]  # with its epoch, from 0


class NonFiniteLoss(EmbershardError):
    """Training diverged."""

    template = (
        "worker {worker}: the loss of step {step} (epoch {epoch}) is {loss}; "
        "lower the learning rate, add warm-up steps, or look at the data for values without bounds"
    )


@runtime_checkable
class Planted(Protocol):
    """Made-up data whose best reachable figures are known."""

    def best(self, split: str) -> dict[str, float]:
        """Metric -> the value that no model can beat."""


class Trainer:
    """Trains a job's model on this worker's share of the data, through `session`, until its budget or early stop."""

    def __init__(
        self,
        job: Job,
        dataset: Dataset,
        session: Session,
        group: WorkerGroup,
        observers: Sequence[Observer] = (),
        loader: LoaderProcess | None = None,
    ) -> None:
        self._job, self._dataset, self._session, self._group = job, dataset, session, group
        self._observers = observers if group.is_first else ()
        self._loader = loader  # makes the batches, if there is one
        self.device = _device(job)
        torch.manual_seed(job.train.seed)  # the same first dense weights, whichever worker loads them
        self.model = job.model.build(dataset.schema, job.dim, "meta")
        self._dense_parameters = num_dense_parameters(self.model)
        if job.train.linear == "onednn" or (job.train.linear == "auto" and onednn_is_faster()):
            use_onednn(self.model)
        self._wrap()
        if job.embedding.cache is not None:
            session.cache_rows(job.embedding.cache.rows, job.embedding.cache.staleness)
        torch.manual_seed(job.train.seed + 1 + group.rank)  # dropout differs between workers
        self._objective = objective_of(self.model)
        self._has_batch_norm = any(isinstance(m, nn.BatchNorm1d) for m in self.model.modules())
        self._evaluator = Evaluator(
            self.model,
            dataset,
            session,
            group,
            batch_size=job.evaluate.batch_size,
            top_k=job.top_k,
            device=self.device,
        )
        self._schedule = self._make_schedule()
        early_stop = job.train.early_stop
        self._best = Best(metric=job.metric, min_delta=early_stop.min_delta if early_stop else 0.0)
        self._best_evaluation: Evaluation | None = None
        self._meter = Meter(session, group.world_size)
        self._epoch = self._step = 0
        self._stopped_early = False

    def run(self) -> Result:
        """Train and evaluate in turn. NonFiniteLoss, or an error of the shards or the data, ends it."""
        self._tell_plan()
        for batches in self._segments():
            self._train(batches)
            if self._judge():
                break
        return self._finish()

    def _train(self, batches: Iterator[Numbered]) -> None:
        self._meter.resume()
        steps_begin()
        for epoch, batch in self._with_rows(_timed(batches)):
            self._epoch = epoch + 1
            self._session.lr_scale = self._schedule.scale(self._step)
            with span("forward"):
                loss = self._objective(self.model, to_device(batch, self.device))
            with span("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
                value = loss.item()  # only now: it waits for a GPU, which has backward's work to do meanwhile
            if not math.isfinite(value):
                raise NonFiniteLoss(worker=self._group.rank, step=self._step + 1, epoch=self._epoch, loss=value)
            self._session.step()
            self._step += 1
            self._meter.add(len(batch), value)
            if self._meter.due():
                self._tell_interval()
            step_ends()
        self._tell_interval()
        self._meter.pause()

    def _with_rows(self, batches: Iterator[Numbered]) -> Iterator[Numbered]:
        """The batches, with their rows pulled ahead; its end is the end of all that is in flight."""
        staleness = self._job.train.prefetch
        if staleness is None:
            return batches
        # a loss may call the model in its own way, but on these ids
        return self._session.prefetch(
            batches, staleness=staleness, inputs=lambda item: self.model.embedding_inputs(item[1].ids)
        )

    def _segments(self) -> Iterator[Iterator[Numbered]]:
        """The batches up to each evaluation: as many epochs, or the same number of steps for every worker."""
        assert self._job.train.budget is not None
        unit, length = self._job.train.budget
        if unit == "epochs":
            every = self._job.evaluate.every or 1
            for first in range(0, length, every):
                yield chain.from_iterable(map(self._batches, range(first, min(first + every, length))))
            return
        stream = chain.from_iterable(map(self._batches, count()))
        steps, every = self._steps(length), self._steps(self._job.evaluate.every or length)
        for first in range(0, steps, every):
            yield islice(stream, min(every, steps - first))

    def _batches(self, epoch: int) -> Iterator[Numbered]:
        for batch in self._read(epoch):
            if len(batch) > 1 or not self._has_batch_norm:  # one sample has no variance
                yield epoch, batch

    def _read(self, epoch: int) -> Iterator[Batch]:
        if self._loader is not None:
            return self._loader.train(epoch)
        group = self._group
        return self._dataset.train(epoch, group.rank, group.world_size, self._job.train.batch_size)

    def _steps(self, length: int) -> int:
        """Steps of each worker for a number of steps or samples, as the job's budget counts."""
        if self._job.train.steps is not None:
            return length
        return math.ceil(length / (self._job.train.batch_size * self._group.world_size))

    def _judge(self) -> bool:
        """Evaluate; whether to stop."""
        if not self._dataset.splits:
            return False
        for observer in self._observers:
            observer.evaluating()
        start = time.perf_counter()
        figures = self._evaluator.evaluate()
        improved, stop = self._decide(figures)
        self._schedule.observe(improved)
        if self._group.is_first:
            evaluation = Evaluation(
                step=self._step,
                epoch=self._epoch,
                samples=self._meter.all_samples,
                seconds=self._meter.seconds,
                figures=figures,
                improved=improved,
                evaluation_seconds=time.perf_counter() - start,
            )
            if improved or self._best_evaluation is None:
                self._best_evaluation = evaluation
            for observer in self._observers:
                observer.evaluated(evaluation)
        self._stopped_early = stop
        return stop

    def _decide(self, figures: dict[str, dict[str, float]]) -> tuple[bool, bool]:
        """Whether an evaluation is the best, and whether it is the last; the first worker's word for all."""
        improved = stop = False
        if self._group.is_first:
            improved = self._best.observe(figures[self._split or ""][self._job.metric])
            early_stop = self._job.train.early_stop
            stop = early_stop is not None and self._best.worse_in_a_row >= early_stop.patience
        improved, stop = self._group.decide(improved, stop)
        return improved, stop

    def _finish(self) -> Result:
        best = self._best_evaluation
        totals = [self._group.sum(part) for part in (self._meter.samples, self._meter.waited, self._meter.trained)]
        skipped = self._group.sum(self._session.stats.skipped_rows)
        samples, waited, trained = totals
        train_seconds = trained / self._group.world_size
        result = Result(
            metric=self._job.metric,
            split=self._split,
            figures=best.figures if best else {},
            reachable=self._reachable() if self._group.is_first else {},
            best_epoch=best.epoch if best else self._epoch,
            best_step=best.step if best else self._step,
            stopped_early=self._stopped_early,
            epochs=self._epoch,
            steps=self._step,
            samples=round(samples),
            seconds=self._meter.seconds,
            train_seconds=train_seconds,
            samples_per_second=samples / train_seconds if train_seconds else 0.0,
            wait_share=waited / trained if trained else 0.0,
            skipped_rows=round(skipped),
            table_rows=_table_rows(self._session) if self._group.is_first else {},
        )
        for observer in self._observers:
            observer.finished(result)
        return result

    @property
    def _split(self) -> str | None:
        """The split that decides."""
        splits = self._dataset.splits
        return "valid" if "valid" in splits else splits[0] if splits else None

    def _wrap(self) -> None:
        job = self._job
        wrapped = wrap(
            self.model,
            self._session,
            optimizer=job.embedding.optimizer.build(),
            dense_optimizer=job.dense.optimizer.build() if job.dense.optimizer else None,
            initializer=job.embedding.initializer.build() if job.embedding.initializer else None,
            seed=job.train.seed,
            prefix=job.prefix,
        )
        assert isinstance(wrapped, Recommender)
        self.model = wrapped.to(self.device)

    def _make_schedule(self) -> Schedule:
        section = self._job.train.lr_schedule
        total = self._total_steps()
        if section.name in ("linear", "cosine") and total is None:
            raise JobError(
                where="train.lr_schedule",
                reason=f"{section.name} needs the number of steps, which this data does not tell: use train.steps",
            )
        given = {key: value for key, value in section.model_dump(exclude={"name"}).items() if value is not None}
        return Schedule(shape=section.name, total_steps=total or 0, **given)

    def _total_steps(self) -> int | None:
        assert self._job.train.budget is not None
        unit, length = self._job.train.budget
        if unit != "epochs":
            return self._steps(length)
        samples = self._dataset.num_samples("train")
        if samples is None:
            return None
        return length * math.ceil(samples / (self._job.train.batch_size * self._group.world_size))

    def _tell_plan(self) -> None:
        job = self._job
        steps, epoch_samples = self._total_steps(), self._dataset.num_samples("train")
        total = None if steps is None else steps * job.train.batch_size * self._group.world_size
        if job.train.epochs is not None and epoch_samples is not None:
            total = job.train.epochs * epoch_samples
        plan = Plan(
            job=job.model_dump(mode="json"),
            name=f"{job.model.name} on {job.data.reader}",
            workers=self._group.world_size,
            shards=self._session.client.num_shards,
            device=str(self.device),
            dense_parameters=self._dense_parameters,
            total_samples=total,
            metric=job.metric,
            split=self._split,
        )
        for observer in self._observers:
            observer.started(plan)

    def _tell_interval(self) -> None:
        if self._observers and self._meter.has_news:
            interval = self._meter.interval(self._step, self._epoch, self._session.lr_scale)
            for observer in self._observers:
                observer.trained(interval)

    def _reachable(self) -> dict[str, Figures]:
        dataset = self._dataset
        return {split: dataset.best(split) for split in dataset.splits} if isinstance(dataset, Planted) else {}


def _timed(batches: Iterator[Numbered]) -> Iterator[Numbered]:
    """The batches, and as a part of the step the time that each one took."""
    while True:
        with span("data"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _table_rows(session: Session) -> dict[str, int]:
    rows: dict[str, int] = {}
    for status in session.client.status():
        for table in status.tables:
            rows[table.name] = rows.get(table.name, 0) + table.rows
    return rows


def _device(job: Job) -> torch.device:
    if job.train.device == "cuda" and not torch.cuda.is_available():
        raise JobError(where="train.device", reason="this machine has no CUDA device; use auto or cpu")
    wanted = job.train.device
    return torch.device("cuda" if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()) else "cpu")
