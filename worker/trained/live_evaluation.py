"""Evaluation while training goes on: a process of its own scores what the shards hold, and holds nobody up."""

from __future__ import annotations

from pathlib import Path

from embershard.proto.errors import JobError
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.job.job import Job
from embershard.worker.models.user_defined import forward_of
from embershard.worker.session.session import Session
from embershard.worker.strategy.shards import ShardStrategy
from embershard.worker.trained.reading import ReadOnlySession
from embershard.worker.training.evaluate import Evaluator, Figures, metrics_of
from embershard.worker.training.trainer import build_model, device_of


class LiveEvaluator:
    """Scores a job's model with the weights that the shards have at the time, as one who is no member of the job.

    The workers need not stop for it, so that rows of one evaluation may be some steps apart. The data's paths start at
    `base`. JobError where the shards do not hold all of the model, or the job has nothing to evaluate on; NotTrained
    where nobody has begun to train it, TableMismatch where the shards hold another model.
    """

    def __init__(self, job: Job, session: Session, base: Path) -> None:
        if not job.has_shards or job.dense_mode != "ps":
            reason = "the dense weights are in the workers; evaluate a checkpoint, or train with dense.mode ps"
            raise JobError(where="dense.mode", reason=reason)
        dataset = job.data.open(base, job.train.seed)
        if not dataset.splits:
            raise JobError(
                where="data", reason="there is nothing to evaluate on: name a file in data.valid or data.test"
            )
        model = build_model(job, dataset)
        if any(buffer.numel() for buffer in model.buffers() if buffer.is_floating_point()):
            reason = "the running statistics of batch norm are in the workers; read the figures of the run itself"
            raise JobError(where="model", reason=reason)
        device = device_of(job)
        self._session = ReadOnlySession(session.client)
        strategy = ShardStrategy(job, model, self._session, device)
        self._evaluator = Evaluator(
            strategy.model,
            dataset,
            strategy,
            WorkerGroup(),
            forward=forward_of(model, job.model.name),
            metrics=metrics_of(job),
            batch_size=job.evaluate.batch_size,
            device=device,
        )

    def evaluate(self) -> tuple[int, dict[str, Figures]]:
        """The first clock that is not closed (0 where the workers share none), and split -> metric -> value."""
        clock = max(status.clock for status in self._session.client.status())
        return clock, self._evaluator.evaluate()
