"""Checkpoints: what a folder holds, what a resumed run does with it, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from embershard.proto.errors import JobError
from embershard.worker.budget import Budget
from embershard.worker.checkpoint import (
    MANIFEST,
    SNAPSHOT,
    BadCheckpoint,
    Checkpoint,
    CheckpointFolder,
    CheckpointNotWritten,
    FolderInUse,
    OtherJob,
    find_checkpoint,
)
from embershard.worker.data.batch import Batch, Schema
from embershard.worker.data.rows import Rows, RowsDataset
from embershard.worker.group import WorkerGroup
from embershard.worker.job import Job
from embershard.worker.records import Evaluation, Interval, Plan, Result
from embershard.worker.resume import RandomNumbers
from embershard.worker.session import Session
from embershard.worker.snapshots import restore_snapshot
from embershard.worker.state_file import pack, unpack
from embershard.worker.trainer import Trainer

F, PER_FIELD, D = 3, 20, 2
MakeSession = Callable[..., Session]


def rows(count: int, seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, PER_FIELD, (count, F)) + np.arange(F) * PER_FIELD
    effects = np.random.default_rng(0).normal(0, 2, F * PER_FIELD)
    labels = (rng.random(count) < 1 / (1 + np.exp(-effects[ids].sum(1)))).astype(np.float32)
    return Rows(ids, rng.random((count, D), np.float32), labels)


def dataset(seed: int = 3) -> RowsDataset:
    parts = {"train": rows(700, 1), "valid": rows(200, 2)}
    return RowsDataset(Schema(tuple("abc"), D, F * PER_FIELD), parts, where="made up", seed=seed)


def job(folder: Path, **sections: object) -> Job:
    train = {"batch_size": 50, "seed": 5, "linear": "torch", **sections.pop("train", {"epochs": 4})}  # type: ignore[dict-item]
    return Job.model_validate(
        {
            "model": {"name": "deepfm", "hidden": [8], "batch_norm": True, "dropout": 0.3},
            "data": {"reader": "ctr_csv", "train": "t.csv"},
            "embedding": {"dim": 4, "optimizer": {"name": "adam", "lr": 0.01}},
            "checkpoint": {"folder": str(folder), "keep": 100},
            "train": train,
            **sections,
        }
    )


@dataclasses.dataclass
class Weights:
    """What a run ends with."""

    rows: torch.Tensor
    dense: dict[str, torch.Tensor]
    result: Result

    def same(self, other: Weights) -> bool:
        assert self.dense.keys() == other.dense.keys()
        dense = all(torch.equal(value, other.dense[name]) for name, value in self.dense.items())
        return dense and torch.equal(self.rows, other.rows)


def train(job: Job, session: Session | None, resume: Checkpoint | None = None, data: RowsDataset | None = None) -> Weights:
    if resume is not None and session is not None:
        restore_snapshot(session.client, resume.url, SNAPSHOT)
    trainer = Trainer(job, data or dataset(), session, WorkerGroup(), resume=resume)
    result = trainer.run()
    if session is not None:
        session.pull([], session.dense_weights)
        table = next(table for table in session.tables if table.spec.name == "embedding")
        found = table.pull(torch.arange(F * PER_FIELD))
    else:
        found = trainer.model.get_parameter("embedding.weight").detach().clone()
    return Weights(found, {name: value.clone() for name, value in trainer.model.state_dict().items()}, result)


def checkpoints(folder: Path) -> list[Checkpoint]:
    return [Checkpoint.open(str(path)) for path in sorted(folder.iterdir())]


@pytest.mark.parametrize(
    ("sections", "from_step"),
    [
        ({"train": {"epochs": 4}}, 28),
        ({"train": {"steps": 50}, "evaluate": {"every": 20}, "checkpoint": {"every": 15}}, 30),
        ({"train": {"epochs": 4, "lr_schedule": {"name": "plateau", "factor": 0.5}, "early_stop": {"patience": 2}}}, 28),
        ({"train": {"epochs": 3, "average": {"decay": 0.9}, "clip_norm": 0.1, "prefetch": None}}, 14),
        ({"train": {"epochs": 2}, "model": {"name": "two_tower"}}, 14),
    ],
    ids=["epochs", "in the middle of an epoch", "plateau", "average", "objective"],
)
def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_interrupted(
    make_session: MakeSession, tmp_path: Path, sections: dict[str, dict[str, object]], from_step: int
) -> None:
    if sections.get("model"):
        pytest.skip("TODO")
    folder = {"folder": str(tmp_path), "keep": 100, **sections.get("checkpoint", {})}
    trained = job(tmp_path, **{**sections, "checkpoint": folder})
    whole = train(trained, make_session(2))
    (found,) = (one for one in checkpoints(tmp_path) if one.manifest.step == from_step)
    torch.manual_seed(99)
    resumed = train(trained, make_session(2), found)
    assert resumed.same(whole)
    assert resumed.result.figures == whole.result.figures
    assert (resumed.result.steps, resumed.result.samples) == (whole.result.steps, whole.result.samples)
    assert resumed.result.best_step == whole.result.best_step


@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "sgd"])
def test_a_run_without_shards_resumes_to_the_same_bits(tmp_path: Path, optimizer: str) -> None:
    trained = job(
        tmp_path,
        strategy="local",
        embedding={"dim": 4, "optimizer": {"name": optimizer, "lr": 0.05}},
        dense={"optimizer": {"name": "adam", "lr": 0.01}},
    )
    whole = train(trained, None)
    found = checkpoints(tmp_path)[1]
    assert not found.manifest.snapshot
    assert train(trained, None, found).same(whole)
