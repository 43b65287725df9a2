"""The training loop. One class drives one worker of many: the workers meet at evaluations and nowhere else."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from embershard.proto.errors import EmbershardError, JobError
from embershard.worker.budget import Budget
from embershard.worker.data.batch import Dataset
from embershard.worker.data.loader import LoaderProcess
from embershard.worker.evaluate import Evaluator, to_device
from embershard.worker.group import WorkerGroup
from embershard.worker.job import Job
from embershard.worker.meter import Meter
from embershard.worker.models.recommender import Recommender, num_dense_parameters
from embershard.worker.objective import objective_of
from embershard.worker.onednn import onednn_is_faster, use_onednn
from embershard.worker.records import Observer, Result
from embershard.worker.report import Report
from embershard.worker.schedule import Best, Schedule
from embershard.worker.session import Session
from embershard.worker.spans import span, step_ends, steps_begin
from embershard.worker.strategy.choice import choose_strategy
from embershard.worker.strategy.protocol import Numbered, Turn


class NonFiniteLoss(EmbershardError):
    """Training diverged."""

    template = (
        "worker {worker}: the loss of step {step} (epoch {epoch}) is {loss}; "
        "lower the learning rate, add warm-up steps, or look at the data for values without bounds"
    )


class Trainer:
    """Trains a job's model on this worker's share of the data until its budget or early stop.

    `session` is the connection to the shards, None for a strategy that has none.
    """

    def __init__(
        self,
        job: Job,
        dataset: Dataset,
        session: Session | None,
        group: WorkerGroup,
        observers: Sequence[Observer] = (),
        loader: LoaderProcess | None = None,
    ) -> None:
        self._job, self._dataset, self._group = job, dataset, group
        self.device = _device(job)
        model = _build(job, dataset)
        self._dense_parameters = num_dense_parameters(model)
        self.strategy = choose_strategy(job, model, session, self.device)
        self.model = self.strategy.model
        torch.manual_seed(job.train.seed + 1 + group.rank)  # dropout differs between workers
        self._objective = objective_of(self.model)
        self._evaluator = Evaluator(
            self.model,
            dataset,
            self.strategy,
            group,
            batch_size=job.evaluate.batch_size,
            top_k=job.top_k,
            device=self.device,
        )
        has_batch_norm = any(isinstance(m, nn.BatchNorm1d) for m in self.model.modules())
        # one sample has no variance
        self._budget = Budget(job, dataset, group, loader, smallest_batch=2 if has_batch_norm else 1)
        self._schedule = _schedule(job, self._budget)
        early_stop = job.train.early_stop
        self._best = Best(metric=job.metric, min_delta=early_stop.min_delta if early_stop else 0.0)
        self._meter = Meter(self.strategy, group.world_size)
        self._report = Report(job, dataset, self.strategy, group, self._meter, observers)
        self._epoch = self._step = 0

    def run(self) -> Result:
        """Train and evaluate in turn. NonFiniteLoss, or an error of the shards or the data, ends it."""
        self._report.started(
            device=str(self.device),
            dense_parameters=self._dense_parameters,
            total_samples=self._budget.total_samples,
        )
        stopped = False
        for batches in self._budget.segments():
            self._train(batches)
            stopped = self._judge()
            if stopped:
                break
        return self._report.finished(step=self._step, epoch=self._epoch, stopped_early=stopped)

    def _train(self, batches: Iterator[Numbered]) -> None:
        self._meter.resume()
        steps_begin()
        for turn in self.strategy.turns(_timed(batches)):
            self._epoch = turn.epoch + 1
            lr_scale = self._schedule.scale(self._step)
            loss = self._learn(turn, lr_scale)
            self._step += 1
            self._meter.add(turn.samples, loss)
            if self._meter.due():
                self._report.trained(self._step, self._epoch, lr_scale)
            step_ends()
        self._report.trained(self._step, self._epoch, self._schedule.scale(max(0, self._step - 1)))
        self._meter.pause()

    def _learn(self, turn: Turn, lr_scale: float) -> float:
        """One step; its mean loss."""
        with span("forward"):
            loss = self._objective(self.strategy.module, to_device(turn.batch, self.device))
        with span("backward"):
            (loss if turn.loss_scale == 1.0 else loss * turn.loss_scale).backward()  # type: ignore[no-untyped-call]
            value = loss.item()  # only now: it waits for a GPU, which has backward's work to do meanwhile
        if not math.isfinite(value):
            raise NonFiniteLoss(worker=self._group.rank, step=self._step + 1, epoch=self._epoch, loss=value)
        self.strategy.step(turn, lr_scale)
        return value

    def _judge(self) -> bool:
        """Evaluate; whether to stop."""
        if not self._dataset.splits:
            return False
        self._report.evaluating()
        start = time.perf_counter()
        self.strategy.rest()
        figures = self._evaluator.evaluate()
        improved, stop = self._decide(figures)
        self.strategy.resume()
        self._schedule.observe(improved)
        self._report.evaluated(
            figures, step=self._step, epoch=self._epoch, improved=improved, seconds=time.perf_counter() - start
        )
        return stop

    def _decide(self, figures: dict[str, dict[str, float]]) -> tuple[bool, bool]:
        """Whether an evaluation is the best, and whether it is the last; the first worker's word for all."""
        improved = stop = False
        if self._group.is_first:
            improved = self._best.observe(figures[self._report.split or ""][self._job.metric])
            early_stop = self._job.train.early_stop
            stop = early_stop is not None and self._best.worse_in_a_row >= early_stop.patience
        improved, stop = self._group.decide(improved, stop)
        return improved, stop


def _build(job: Job, dataset: Dataset) -> Recommender:
    """The model with its first dense weights, the same for all workers, and its tables on the meta device."""
    torch.manual_seed(job.train.seed)
    model = job.model.build(dataset.schema, job.dim, "meta")
    if job.train.linear == "onednn" or (job.train.linear == "auto" and onednn_is_faster()):
        use_onednn(model)
    return model


def _schedule(job: Job, budget: Budget) -> Schedule:
    section = job.train.lr_schedule
    total = budget.total_steps
    if section.name in ("linear", "cosine") and total is None:
        raise JobError(
            where="train.lr_schedule",
            reason=f"{section.name} needs the number of steps, which this data does not tell: use train.steps",
        )
    given = {key: value for key, value in section.model_dump(exclude={"name"}).items() if value is not None}
    return Schedule(shape=section.name, total_steps=total or 0, **given)


def _timed(batches: Iterator[Numbered]) -> Iterator[Numbered]:
    """The batches, and as a part of the step the time that each one took."""
    while True:
        with span("data"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _device(job: Job) -> torch.device:
    if job.train.device == "cuda" and not torch.cuda.is_available():
        raise JobError(where="train.device", reason="this machine has no CUDA device; use auto or cpu")
    wanted = job.train.device
    return torch.device("cuda" if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()) else "cpu")
