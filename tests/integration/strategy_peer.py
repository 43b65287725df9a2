"""One worker of a small job, as a process of test_strategies.py: `strategy_peer.py STRATEGY MODE PS FILE [TRAIN]`.

TRAIN are fields of the section `train`, as JSON. Those of `sections` are sections of the job, and `nan_at` is the
number of a sample with a NaN.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

from embershard.worker.client.worker_group import ShardGroup, WorkerGroup
from embershard.worker.data.batch import RowsDataset, Samples, Schema
from embershard.worker.job.job import Job
from embershard.worker.session.connect import connect
from embershard.worker.session.session import Session
from embershard.worker.strategy.torch_only import TorchStrategy
from embershard.worker.training.trainer import Trainer

F, PER_FIELD, D = 3, 20, 2
BATCH = 40  # of all workers
DATA_SEED = 3
SAMPLES = 1001  # the first worker has one batch more than the second


def rows(count: int, seed: int) -> Samples:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, PER_FIELD, (count, F)) + np.arange(F) * PER_FIELD
    effects = np.random.default_rng(0).normal(0, 2, F * PER_FIELD)
    labels = (rng.random(count) < 1 / (1 + np.exp(-effects[ids].sum(1)))).astype(np.float32)
    return Samples(ids, rng.random((count, D), np.float32), labels)


def dataset(nan_at: int | None = None) -> RowsDataset:
    schema = Schema(tuple("abc"), D, F * PER_FIELD)
    samples = rows(SAMPLES, 1)
    if nan_at is not None:
        samples.dense[nan_at, 0] = np.nan
    return RowsDataset(schema, {"train": samples, "test": rows(301, 2)}, where="made up", seed=DATA_SEED)


def job(strategy: str, mode: str, workers: int, **train: object) -> Job:
    values: dict[str, object] = {
        "strategy": strategy,
        "model": {"name": "dlrm", "bottom": [8], "hidden": [8, 4]},
        "data": {"reader": "ctr_csv", "train": "t.csv", "ids": "global"},
        "embedding": {
            "dim": 4,
            "optimizer": {"name": "adagrad", "lr": 0.05},
            "initializer": {"name": "normal", "std": 0.1},
        },
        "dense": {"optimizer": {"name": "adam", "lr": 0.01}},
        "train": {"batch_size": BATCH // workers, "seed": 5, "epochs": 2, "device": "cpu", "linear": "torch"},
        "evaluate": {"batch_size": 50},  # the first worker has one of these more, too
        "workers": workers,
    }
    if strategy in ("ps", "hybrid"):
        values["dense"] = {"optimizer": {"name": "adam", "lr": 0.01}, "mode": mode}
        train = {"staleness": 0, **train}
    values |= train.pop("sections", {})
    values["train"] = {**values["train"], **train}
    return Job.model_validate(values)


def train(job: Job, session: Session | None, group: WorkerGroup, *, nan_at: int | None = None) -> dict[str, np.ndarray]:
    """The figures that were reached, and every weight."""
    torch.set_num_threads(1)
    trainer = Trainer(job, dataset(nan_at), session, group)
    result = trainer.run()
    found = {metric: np.array(value) for metric, value in result.figures["test"].items()}
    found["samples trained"] = np.array(result.samples)
    found["steps left out"] = np.array(result.skipped_steps)
    if session is not None:
        module = trainer.model.embedding
        found["embedding.weight"] = module.table.pull(torch.arange(F * PER_FIELD)).numpy()
        session.read_dense()
    strategy = trainer.strategy
    weights: object = dict(trainer.model.named_parameters())
    if strategy.local_weights is not None:
        state = strategy.local_weights.state_dict()
        strategy.local_weights.load_state_dict(state)
        torch.testing.assert_close(strategy.local_weights.state_dict(), state, rtol=0, atol=0)  # sharded or not
        weights = state["weights"]
    found |= {name: weight.detach().numpy() for name, weight in weights.items()}
    assert isinstance(strategy, TorchStrategy) == (session is None)
    return found


def main() -> None:
    strategy, mode, ps, file, *fields = sys.argv[1:]
    rank = int(os.environ["RANK"])
    chosen = json.loads(fields[0] if fields else "{}")
    nan_at = chosen.pop("nan_at", None)
    settings = job(strategy, mode, workers=2, **chosen)
    session = connect(ps, worker=rank, workers=2, staleness=0) if ps else None
    if settings.all_reduces:
        group = WorkerGroup.join(rank, 2, timedelta(seconds=60))
    else:
        group = ShardGroup(session.client, rank, 2)
    with group:
        found = train(settings, session, group, nan_at=nan_at)
        if rank == 0:
            np.savez(Path(file), **found)
        group.barrier()
        if session is not None:
            session.close()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads outlive their group


if __name__ == "__main__":
    main()
