"""`embershard evaluate` beside real shards and workers."""

import json
import signal
import subprocess
from contextlib import closing

import pytest

from embershard.deploy.supervisor import LocalShards
from embershard.worker.client.client import Client
from harness.eventually import PATIENCE, eventually
from harness.processes import EMBERSHARD, run_command, said

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

JOB = """\
model: {name: dlrm, bottom: [16], hidden: [16]}
data: {reader: clicks, eval_samples: 3000, loader_processes: 0}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.05}}
train: {batch_size: 256, samples: 5_000}
"""


def test_it_scores_what_a_run_has_left_on_the_shards_and_creates_nothing(start, tmp_path):
    with LocalShards(2) as shards, closing(Client.connect(shards.addresses)) as client:
        (tmp_path / "job.yaml").write_text(JOB)
        words = ("evaluate", str(tmp_path / "job.yaml"), "--ps", ",".join(shards.addresses))
        early = run_command(*words)
        assert early.returncode == 1
        assert "no table 'embedding" in early.stderr
        assert not any(status.tables for status in client.status())
        said(start(JOB, *words[2:]))
        found = run_command(*words)
        assert found.returncode == 0, found.stderr
    *_, result = (json.loads(line) for line in (tmp_path / "out/log.jsonl").read_text().splitlines())
    figures = json.loads(found.stdout)
    for split, its in result["figures"].items():
        assert figures[split] == pytest.approx(its, rel=1e-6)


def test_workers_train_on_while_it_scores(start, tmp_path):
    with LocalShards(1) as shards, closing(Client.connect(shards.addresses)) as client:
        ps = ("--ps", shards.addresses[0])
        forever = ("--set", "train.samples=1_000_000_000", "--set", "train.staleness=0", "--workers", "2")
        trainer = start(JOB, *forever, *ps)
        assert eventually(lambda: client.status()[0].clock >= 3), "nobody trains"
        line = [*EMBERSHARD, "evaluate", str(tmp_path / "job.yaml"), *ps, "--every", "0.1"]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as evaluator:
            first = last = json.loads(evaluator.stdout.readline())
            while last["clock"] == first["clock"]:  # nothing says how far they come in between
                last = json.loads(evaluator.stdout.readline())
            assert last["clock"] > first["clock"] > 0
            assert first["valid"]["samples"] == 3000
            evaluator.send_signal(signal.SIGINT)
            assert evaluator.wait(PATIENCE) == 130
        assert trainer.poll() is None
        trainer.terminate()
        trainer.communicate(timeout=PATIENCE)
