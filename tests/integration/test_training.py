"""A wrapped model over real shard processes: equal to torch, and honest about processes that die or stop."""

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import embershard as es
from embershard.deploy.supervisor import LocalShards, ShardSettings
from embershard.proto.errors import UnknownOptimizer
from harness.models import BagModel, random_pairs
from harness.processes import paused
from harness.raises import raises

pytestmark = pytest.mark.integration

BENCH = Path(__file__).resolve().parents[2] / "bench"
BATCHES = random_pairs(20, 64, 500, seed=3)


def train(model, end_step, batches=BATCHES):
    """Train it; the losses."""
    losses = []
    for ids, targets in batches:
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids), targets)
        loss.backward()
        end_step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def shards():
    with LocalShards(2) as running:
        yield running


@pytest.fixture
def model():
    return BagModel(500, 8, hidden=64)


def test_training_over_two_processes_has_torchs_loss_curve(shards, model):
    with es.connect(shards.addresses) as session:
        wrapped = es.wrap(copy.deepcopy(model), session, optimizer=es.SGD(lr=0.3), prefix="curve/")
        ours = train(wrapped, session.step)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    theirs = train(model, lambda: (optimizer.step(), optimizer.zero_grad()))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_user_defined_row_optimizer_trains_in_shards_started_with_it(shards, model, monkeypatch):
    optimizer = es.Custom(function="signum:signum", lr=0.01, settings={"beta": 0.9})
    told = {"shard": re.compile("shard . at 127"), "optimizer": "signum:signum"}
    with es.connect(shards.addresses) as session, raises(UnknownOptimizer, **told):
        es.wrap(copy.deepcopy(model), session, optimizer=optimizer, prefix="custom/")
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCH)])
    with LocalShards(1, ShardSettings(imports=["signum"])) as own, es.connect(own.addresses) as session:
        losses = train(es.wrap(copy.deepcopy(model), session, optimizer=optimizer), session.step)
    with es.local(1, imports=["signum"]) as session:
        assert losses == train(es.wrap(model, session, optimizer=optimizer), session.step)


# begins to train when it is sent a line
WORKER = """
import sys, torch, embershard as es
from datetime import timedelta
terms = {"workers": 2, "staleness": 0, "lease": timedelta(seconds=2), "wait_timeout": timedelta(minutes=1)}
with es.connect(sys.argv[1], worker=int(sys.argv[2]), timeout=timedelta(minutes=1), **terms) as session:
    module = es.Embedding(session.table(es.TableSpec(name="evicted", dim=4, optimizer=es.SGD(lr=1.0))))
    print("begins", flush=True)
    sys.stdin.readline()
    for _ in range(30):
        module(torch.arange(10)).sum().backward()
        session.step()
    print(session.stats.lost_leases)
"""


def test_a_worker_that_stands_still_is_left_behind_and_comes_back(shards):
    line = [sys.executable, "-c", WORKER, ",".join(shards.addresses)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*line, "0"], **pipes) as here, subprocess.Popen([*line, "1"], **pipes) as stopped:
        try:
            assert here.stdout.readline() == stopped.stdout.readline() == "begins\n"
            with paused(stopped.pid):  # before the first of its steps
                here.communicate("\n", timeout=250)  # it goes on after a lease
            lost, _ = stopped.communicate("\n", timeout=250)
        finally:
            here.kill()
            stopped.kill()
    assert (here.returncode, stopped.returncode) == (0, 0)
    assert int(lost) >= 1
