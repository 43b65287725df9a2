"""A job is started again after one of its shards was killed and came back empty."""

import json
import os
import re
import signal
from datetime import timedelta

import pytest
import torch
from torch import nn

import embershard as es
from embershard.deploy.supervisor import LocalShards, RestartPolicy
from embershard.proto.errors import RowsLost
from embershard.worker.session.session import Session
from harness.processes import run_command

pytestmark = pytest.mark.integration

IDS = torch.arange(1000)
JOB = """\
model: {name: lr}
data: {reader: clicks, samples: 200}
embedding: {optimizer: {name: sgd, lr: 0.1}}
train: {batch_size: 10, epochs: 1}
"""


def begin(addresses: list[str]) -> tuple[Session, nn.Module]:
    session = es.connect(addresses, timeout=timedelta(seconds=100))
    try:
        model = nn.Sequential(nn.EmbeddingBag(1000, 4, mode="sum"), nn.Linear(4, 300))
        model = es.wrap(model, session, optimizer=es.SGD(lr=0.01), initializer=es.Constant(value=0.0))
    except BaseException:
        session.close()
        raise
    return session, model


def train(session: Session, model: nn.Module) -> None:
    for _ in range(3):
        (model(IDS[:, None]) - 1).pow(2).mean().backward()
        session.step()


def trained_rows(model: nn.Module) -> int:
    return int((model[0].table.pull(IDS) != 0).any(1).sum())


def test_a_job_does_not_go_on_with_a_shard_that_lost_its_rows_until_they_are_restored(tmp_path):
    policy = RestartPolicy(first_pause=timedelta(seconds=0.1))
    with LocalShards(2, restart=policy) as shards:
        where = ",".join(shards.addresses)
        session, model = begin(shards.addresses)
        with session:
            train(session, model)
        session, model = begin(shards.addresses)  # a second start finds all rows
        with session:
            assert trained_rows(model) == len(IDS)
        taken = run_command("snapshot", where, str(tmp_path / "snapshots"))
        assert taken.returncode == 0, taken.stderr

        os.kill(shards.pids[1], signal.SIGKILL)
        with pytest.raises(RowsLost) as caught:
            begin(shards.addresses)
        assert caught.value.fields["lost"] == f"shard 1 at {shards.addresses[1]}"
        (tmp_path / "job.yaml").write_text(JOB)
        job = run_command("train", str(tmp_path / "job.yaml"), "--ps", where, "--output", str(tmp_path / "out"))
        assert job.returncode == 1
        assert "--resume latest" in job.stderr
        again = run_command("snapshot", where, str(tmp_path / "snapshots"))
        assert again.returncode == 1
        shown = " ".join(run_command("status", where).stdout.split())
        assert re.search("shard 1 lost its rows [0-9]+ minutes? ago", shown)
        (_, empty) = json.loads(run_command("status", where, "--json").stdout)["shards"]
        assert not empty["status"]["tables"]

        restored = run_command("restore", str(tmp_path / "snapshots"), where, "--replace")
        assert restored.returncode == 0, restored.stderr
        session, model = begin(shards.addresses)
        with session:
            assert trained_rows(model) == len(IDS)
            train(session, model)
        assert "lost" not in run_command("status", where).stdout
