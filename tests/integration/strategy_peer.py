"""One worker of a small job, as a process of test_strategies.py: `strategy_peer.py STRATEGY MODE PS FILE FIELDS`.

FIELDS are those of the section `train`, as JSON. Those of `sections` are sections of the job, and `nan_at` is the
number of a sample with a NaN.
"""

import json
import os
import sys
from datetime import timedelta

import numpy as np
import torch

from embershard.worker.client.worker_group import ShardGroup, WorkerGroup
from embershard.worker.data.batch import RowsDataset, Schema
from embershard.worker.session.connect import connect
from embershard.worker.strategy.torch_only import TorchStrategy
from embershard.worker.training.trainer import Trainer
from harness.clicks import NUM_IDS, D, click_rows
from harness.job import make_job

BATCH = 40  # of all workers
DATA_SEED = 3
SAMPLES = 1001  # the first worker has one batch more than the second


def job(strategy, mode, workers, **train):
    sections = {
        "model": {"name": "dlrm", "bottom": [8], "hidden": [8, 4]},
        "data": {"ids": "global"},
        "embedding": {
            "dim": 4,
            "optimizer": {"name": "adagrad", "lr": 0.05},
            "initializer": {"name": "normal", "std": 0.1},
        },
        "dense": {"optimizer": {"name": "adam", "lr": 0.01}},
        "evaluate": {"batch_size": 50},  # the first worker has one of these more, too
        "workers": workers,
    }
    if strategy in ("ps", "hybrid"):
        sections["dense"]["mode"] = mode
        train = {"staleness": 0, **train}
    sections |= train.pop("sections", {})
    own = {"batch_size": BATCH // workers, "seed": 5, "epochs": 2, "device": "cpu", "linear": "torch"}
    return make_job(strategy, **sections, train={**own, **train})


def train(job, session, group, *, nan_at=None):
    """The figures that were reached, and every weight."""
    torch.set_num_threads(1)
    samples = click_rows(SAMPLES, 1)
    if nan_at is not None:
        samples.dense[nan_at, 0] = np.nan
    splits = {"train": samples, "test": click_rows(301, 2)}
    data = RowsDataset(Schema(tuple("abc"), D, NUM_IDS), splits, where="made up", seed=DATA_SEED)
    trainer = Trainer(job, data, session, group)
    result = trainer.run()
    found = {metric: np.array(value) for metric, value in result.figures["test"].items()}
    found["samples trained"] = np.array(result.samples)
    found["steps left out"] = np.array(result.skipped_steps)
    if session is not None:
        found["embedding.weight"] = trainer.model.embedding.table.pull(torch.arange(NUM_IDS)).numpy()
        session.read_dense()
    strategy = trainer.strategy
    weights = dict(trainer.model.named_parameters())
    if strategy.local_weights is not None:
        state = strategy.local_weights.state_dict()
        strategy.local_weights.load_state_dict(state)
        torch.testing.assert_close(strategy.local_weights.state_dict(), state, rtol=0, atol=0)  # sharded or not
        weights = state["weights"]
    assert isinstance(strategy, TorchStrategy) == (session is None)
    return found | {name: weight.detach().numpy() for name, weight in weights.items()}


def main():
    strategy, mode, ps, file, fields = sys.argv[1:]
    rank = int(os.environ["RANK"])
    chosen = json.loads(fields)
    nan_at = chosen.pop("nan_at", None)
    settings = job(strategy, mode, workers=2, **chosen)
    session = connect(ps, worker=rank, workers=2, staleness=0) if ps else None
    joins = WorkerGroup.join(rank, 2, timedelta(seconds=60)) if settings.all_reduces else None
    with joins or ShardGroup(session.client, rank, 2) as group:
        found = train(settings, session, group, nan_at=nan_at)
        if rank == 0:
            np.savez(file, **found)
        group.barrier()
        if session is not None:
            session.close()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads outlive their group


if __name__ == "__main__":
    main()
