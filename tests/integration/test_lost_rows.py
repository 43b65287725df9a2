"""A job is started again after one of its shards was killed and came back empty."""

import json
import os
import re
import signal
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch import nn

import embershard as es
from embershard.deploy.supervisor import LocalShards, RestartPolicy
from embershard.proto.errors import RowsLost
from harness.processes import run_command

pytestmark = pytest.mark.integration

IDS = torch.arange(1000)
JOB = """\
model: {name: lr}
data: {reader: clicks, samples: 200}
embedding: {optimizer: {name: sgd, lr: 0.1}}
train: {batch_size: 10, epochs: 1}
"""


@contextmanager
def begin(addresses):
    """A session, its model, and how many rows differ from their first value."""
    with es.connect(addresses, timeout=timedelta(seconds=100)) as session:
        model = nn.Sequential(nn.EmbeddingBag(1000, 4, mode="sum"), nn.Linear(4, 300))
        model = es.wrap(model, session, optimizer=es.SGD(lr=0.01), initializer=es.Constant(value=0.0))
        yield session, model, int((model[0].table.pull(IDS) != 0).any(1).sum())


def train(session, model):
    for _ in range(3):
        (model(IDS[:, None]) - 1).pow(2).mean().backward()
        session.step()


def test_a_job_does_not_go_on_with_a_shard_that_lost_its_rows_until_they_are_restored(tmp_path):
    def run(*words, code=0):
        done = run_command(*words, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    (tmp_path / "job.yaml").write_text(JOB)
    with LocalShards(2, restart=RestartPolicy(first_pause=timedelta(seconds=0.1))) as shards:
        where = ",".join(shards.addresses)
        with begin(shards.addresses) as (session, model, _):
            train(session, model)
        with begin(shards.addresses) as (_, _, trained):  # a second start finds all rows
            assert trained == len(IDS)
        run("snapshot", where, "snapshots")

        os.kill(shards.pids[1], signal.SIGKILL)
        with pytest.raises(RowsLost) as caught, begin(shards.addresses):
            pass
        assert caught.value.fields["lost"] == f"shard 1 at {shards.addresses[1]}"
        assert "--resume latest" in run("train", "job.yaml", "--ps", where, "--output", "out", code=1)
        run("snapshot", where, "snapshots", code=1)
        assert re.search("shard 1 lost its rows [0-9]+ minutes? ago", " ".join(run("status", where).split()))
        (_, empty) = json.loads(run("status", where, "--json"))["shards"]
        assert not empty["status"]["tables"]

        run("restore", "snapshots", where, "--replace")
        with begin(shards.addresses) as (session, model, trained):
            assert trained == len(IDS)
            train(session, model)
        assert "lost" not in run("status", where)
