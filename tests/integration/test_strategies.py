"""Two real workers in every strategy that is synchronous: together they are one process on the joint batch.

As a program this file is one of them: `test_strategies.py STRATEGY MODE PS FILE FIELDS`. FIELDS are those of the
section `train`, as JSON; those of `sections` are sections of the job; `nan_at` is the number of a sample with a NaN;
with `weighed` samples have weights; `tested` is the number of samples to test on.
"""

import json
import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch

import embershard as es
from embershard.deploy.supervisor import LocalShards
from embershard.worker.checkpoint.checkpoint import best_checkpoint
from embershard.worker.client.worker_group import ShardGroup, WorkerGroup
from embershard.worker.data.batch import RowsDataset, Schema
from embershard.worker.data.shuffle import permutation
from embershard.worker.strategy.torch_only import TorchStrategy
from embershard.worker.training.trainer import Trainer
from harness.clicks import NUM_IDS, D, click_job, click_rows
from harness.processes import said

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


BATCH = 40  # of all workers
DATA_SEED = 3
ABOUT_DATA = ("nan_at", "weighed", "tested")
SAMPLES = 1001  # the first worker has one batch more than the second


def job(strategy, mode, workers, **train):
    sections = {"data": {"ids": "global"}, "dense": {"optimizer": {"name": "adam", "lr": 0.01}}, "workers": workers}
    if strategy in ("ps", "hybrid"):
        sections["dense"]["mode"] = mode
        train = {"staleness": 0, **train}
    sections["evaluate"] = {"batch_size": 50}  # the first worker has one of these more, too
    sections |= {"model": {"bottom": [8], "hidden": [8, 4]}, **train.pop("sections", {})}
    own = {"batch_size": BATCH // workers, "device": "cpu", "linear": "torch"}
    return click_job("dlrm", strategy, **sections, train={**own, **train})


def train(job, session, group, *, nan_at=None, weighed=False, tested=301):
    """The figures that were reached, and every weight."""
    torch.set_num_threads(1)
    samples = click_rows(SAMPLES, 1)
    if nan_at is not None:
        samples.dense[nan_at, 0] = np.nan
    if weighed:
        samples = replace(samples, weights=np.random.default_rng(4).exponential(size=SAMPLES).astype(np.float32) ** 3)
    splits = {"train": samples, "test": click_rows(tested, 2)}
    data = RowsDataset(Schema(tuple("abc"), D, NUM_IDS), splits, where="made up", seed=DATA_SEED)
    trainer = Trainer(job, data, session, group)
    result = trainer.run()
    found = {metric: np.array(value) for metric, value in result.figures["test"].items()}
    found["samples trained"] = np.array(result.samples)
    found["steps left out"] = np.array(result.skipped_steps)
    if result.best_weights.restored:
        assert trainer._evaluator.evaluate() == result.figures
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


def run_two(strategy, mode, file, **fields):
    """What two workers reach together, over two fresh shards where the strategy has some."""
    with LocalShards(2) if strategy != "ddp" else nullcontext() as shards, socket.socket() as reserved:
        ps = ",".join(shards.addresses) if shards else ""
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # nobody else is given the port
        reserved.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserved.getsockname()[1]), "WORLD_SIZE": "2"}
        meeting |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        line = [sys.executable, __file__, strategy, mode, ps, str(file), json.dumps(fields)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        workers = [
            subprocess.Popen(line, env={**os.environ, **meeting, "RANK": str(rank)}, **pipes) for rank in range(2)
        ]
        try:
            said(workers[0])
        except AssertionError as error:  # which may be about a worker that ended before it
            workers[1].kill()
            raise AssertionError(f"{error}\nworker 1:\n{workers[1].communicate()[0]}") from None
        else:
            said(workers[1])
        finally:
            for worker in workers:
                worker.kill()
    with np.load(file, allow_pickle=False) as found:
        return dict(found)


def assert_equal_but_for_rounding(found, want):
    assert found.keys() == want.keys()
    assert int(found["samples trained"]) % SAMPLES == 0  # none twice, though one worker has a batch more
    for name, values in want.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=2e-5, err_msg=name)


ADAMW = {"name": "adamw", "lr": 0.05, "weight_decay": 0.1}  # moves a row whose gradient is 0, too
TABLE = {"dim": 4, "optimizer": ADAMW, "initializer": {"name": "normal", "std": 0.1}}


@pytest.mark.parametrize(
    ("strategy", "mode", "fields"),
    [
        ("ddp", "", {}),
        ("ddp", "", {"accumulate": 2, "clip_norm": 0.05, "non_finite": "skip"}),
        ("ddp", "", {"sections": {"embedding": TABLE}}),  # rows that one worker alone read
        pytest.param("ps", "ps", {}, marks=pytest.mark.long),
        pytest.param("ps", "ps", {"accumulate": 3}, marks=pytest.mark.long),
        ("ps", "ps", {"accumulate": 3, "weighed": True}),
        pytest.param("ddp", "", {"weighed": True}, marks=pytest.mark.long),
        pytest.param("hybrid", "ddp", {"weighed": True}, marks=pytest.mark.long),
        ("ps", "fsdp", {}),
        ("ps", "fsdp", {"sections": {"model": {"class": "harness.models:BiasedModel"}}, "accumulate": 2}),
        ("ps", "fsdp", {"epochs": 1, "tested": 1}),  # the second worker has none of them
        ("hybrid", "ddp", {}),
        pytest.param("hybrid", "ddp", {"accumulate": 3}, marks=pytest.mark.long),
        ("hybrid", "ddp", {"sections": {"freeze": ["bottom", "top", "output"]}}),  # all dense weights
    ],
    ids=str,
)
def test_two_synchronous_workers_are_one_process(tmp_path, strategy, mode, fields):
    own = dict(fields)
    about_data = {name: own.pop(name) for name in ABOUT_DATA if name in own}
    if strategy == "ddp":
        want = train(job("local", "", workers=1, **own), None, WorkerGroup(), **about_data)
    else:
        with es.local() as session:
            want = train(job("ps", "ps", workers=1, **own), session, WorkerGroup(), **about_data)
    assert_equal_but_for_rounding(run_two(strategy, mode, tmp_path / "found.npz", **fields), want)


def test_dense_weights_on_shards_and_in_two_workers_have_the_same_bits(tmp_path):
    schedule = {"lr_schedule": {"name": "linear"}}
    one, other = (run_two(*how, tmp_path / "found.npz", **schedule) for how in (("ps", "ps"), ("hybrid", "ddp")))
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(other[name], values, err_msg=name)


def test_a_nan_that_one_worker_meets_leaves_the_step_out_on_all(tmp_path):
    fields = {"non_finite": "skip", "nan_at": SAMPLES // 2}
    # where weights are sharded, a norm is a collective
    one, other = (run_two(*how, tmp_path / "found.npz", **fields) for how in (("hybrid", "ddp"), ("ps", "fsdp")))
    epochs, workers = 2, 2
    assert int(one["steps left out"]) == epochs * workers
    assert_equal_but_for_rounding(other, one)


@pytest.mark.parametrize(
    ("strategy", "mode"), [("ddp", ""), pytest.param("hybrid", "ddp", marks=pytest.mark.long)]
)  # which scale losses, and gradients
def test_a_nan_in_a_workers_last_batch_leaves_out_no_step_of_the_others(tmp_path, strategy, mode):
    last = int(permutation(SAMPLES, DATA_SEED, 0)[SAMPLES - 2])  # of the second worker, who has a batch less
    found = run_two(strategy, mode, tmp_path / "found.npz", non_finite="skip", epochs=1, nan_at=last)
    assert int(found["steps left out"]) == 2  # one, by both


def test_a_part_that_one_workers_batch_leaves_out_of_fsdp_is_named(tmp_path):
    branching = {"model": {"class": "harness.models:BranchingModel"}}
    with pytest.raises(AssertionError, match=r"a batch left seldom\.weight, seldom\.bias without a gradient"):
        run_two("ps", "fsdp", tmp_path / "found.npz", sections=branching)


JOB = """\
model: {name: dlrm, bottom: [8], hidden: [8]}
data: {reader: ctr_csv, train: clicks.csv, valid: clicks.csv, numeric: [x], ids: global, num_ids: 40}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.05}}
train: {batch_size: 64, epochs: 1, threads: 1}
workers: 2
shards: 2
"""


@pytest.mark.parametrize(
    ("sets", "want"),
    [
        (["strategy=local"], "1 worker on cpu, no shards"),
        (["strategy=ddp"], "2 workers on cpu, no shards"),
        (["strategy=hybrid", "train.staleness=4"], "2 workers on cpu, 2 shards"),
        (["train.staleness=local(2)"], "2 workers on cpu, 2 shards"),
    ],
    ids=str,
)
def test_one_job_trains_in_every_strategy(start, tmp_path, sets, want):
    lines = [f"{i % 3 == 0:d},{i % 20},{20 + i % 7},{i % 11}" for i in range(500)]
    (tmp_path / "clicks.csv").write_text("\n".join(["label,user,item,x", *lines, ""]))
    text = said(start(JOB, *(word for assignment in sets for word in ("--set", assignment))))
    assert want in text
    assert "valid AUC" in text


def main():
    strategy, mode, ps, file, fields = sys.argv[1:]
    rank = int(os.environ["RANK"])
    chosen = json.loads(fields)
    about_data = {name: chosen.pop(name) for name in ABOUT_DATA if name in chosen}
    settings = job(strategy, mode, workers=2, **chosen)
    session = es.connect(ps, worker=rank, workers=2, staleness=0) if ps else None
    joins = WorkerGroup.join(rank, 2, timedelta(seconds=60)) if settings.all_reduces else None
    with joins or ShardGroup(session.client, rank, 2) as group:
        found = train(settings, session, group, **about_data)
        if rank == 0:
            np.savez(file, **found)
        group.barrier()
        if session is not None:
            session.close()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads outlive their group


@pytest.mark.parametrize(
    ("strategy", "mode"),
    [
        ("ddp", ""),
        pytest.param("ps", "fsdp", marks=pytest.mark.long),
        pytest.param("hybrid", "ddp", marks=pytest.mark.long),
    ],
)
def test_both_workers_end_with_the_best_weights(tmp_path, strategy, mode):
    first_is_best = {"early_stop": {"patience": 9, "min_delta": 100.0}}
    kept = {"checkpoint": {"folder": str(tmp_path / "kept"), "keep": 1}}
    found = run_two(strategy, mode, tmp_path / "found.npz", **first_is_best, sections=kept)
    best = best_checkpoint(str(tmp_path / "kept"))
    assert best.manifest.step == 26
    for name, weight in best.shared()["local_weights"]["weights"].items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


if __name__ == "__main__":
    main()
