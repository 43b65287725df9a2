"""Made-up clicks, jobs that train on them, and an observer that keeps what it is told."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from embershard.worker.data.batch import RowsDataset, Samples, Schema
from embershard.worker.job.job import Job
from embershard.worker.reporting.records import Evaluation, Interval, RunPlan, RunResult
from harness.job import make_job

F, PER_FIELD, D = 3, 20, 2
NUM_IDS = F * PER_FIELD
STANDING = {"optimizer": {"name": "sgd", "lr": 0.0}}  # an embedding section by which no row changes


def click_rows(count: int, seed: int) -> Samples:
    """Clicks that a linear model of the ids explains."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, PER_FIELD, (count, F)) + np.arange(F) * PER_FIELD
    effects = np.random.default_rng(0).normal(0, 2, NUM_IDS)
    labels = (rng.random(count) < 1 / (1 + np.exp(-effects[ids].sum(1)))).astype(np.float32)
    return Samples(ids, rng.random((count, D), np.float32), labels)


def click_data(num_ids: int | None = NUM_IDS, **counts: int) -> RowsDataset:
    """Splits of so many samples each, such as train=700, valid=200."""
    parts = {name: click_rows(count, seed) for seed, (name, count) in enumerate(counts.items(), start=1)}
    return RowsDataset(Schema(tuple("abc"), D, num_ids), parts, where="made up", seed=3)


def click_job(name: str = "fm", strategy: str = "ps", **sections: object) -> Job:
    """A job that learns these clicks, of two epochs where `train` says nothing else."""
    own, model = dict(sections.pop("train", {})), sections.pop("model", {})  # type: ignore[call-overload]
    length = {} if {"epochs", "steps", "samples"} & set(own) else {"epochs": 2}
    embedding = {"optimizer": {"name": "adagrad", "lr": 0.1}, "initializer": {"name": "normal", "std": 0.01}}
    return make_job(
        strategy,
        **{"model": model if "class" in model else {"name": name, **model}, "embedding": embedding, **sections},  # type: ignore[dict-item]
        train={"batch_size": 100, "seed": 5, **length, **own},
    )


@dataclasses.dataclass
class Notes:
    """An observer that writes down what it is told."""

    plan: RunPlan | None = None
    intervals: list[Interval] = dataclasses.field(default_factory=list)
    begun: list[int] = dataclasses.field(default_factory=list)  # evaluations, by how many were done before
    evaluations: list[Evaluation] = dataclasses.field(default_factory=list)
    result: RunResult | None = None

    def started(self, plan: RunPlan) -> None:
        self.plan = plan

    def trained(self, interval: Interval) -> None:
        self.intervals.append(interval)

    def evaluating(self) -> None:
        self.begun.append(len(self.evaluations))

    def evaluated(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)

    def finished(self, result: RunResult) -> None:
        self.result = result

    def close(self) -> None:
        pass


def copied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters as they are now."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}
