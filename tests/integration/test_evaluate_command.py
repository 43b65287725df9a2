"""`embershard evaluate` beside real shards and workers."""

import contextlib
import json
import signal
import subprocess
from collections.abc import Sequence

import pytest

from embershard.deploy.supervisor import LocalShards
from embershard.worker.client.client import Client
from harness.eventually import PATIENCE, eventually
from harness.processes import EMBERSHARD, run_command

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

JOB = """\
model: {name: dlrm, bottom: [16], hidden: [16]}
data: {reader: clicks, eval_samples: 3000, loader_processes: 0}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.05}}
train: {batch_size: 256, samples: 5_000}
"""


def await_clock(addresses: Sequence[str], clock: int) -> None:
    with contextlib.closing(Client.connect(addresses)) as client:
        assert eventually(lambda: client.status()[0].clock >= clock), "nobody trains"


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def test_it_scores_what_a_run_has_left_on_the_shards_and_creates_nothing(job, tmp_path):
    with LocalShards(2) as shards:
        ps = ",".join(shards.addresses)
        early = run_command("evaluate", str(job), "--ps", ps)
        assert early.returncode == 1
        assert "no table 'embedding" in early.stderr
        with contextlib.closing(Client.connect(shards.addresses)) as client:
            assert not any(status.tables for status in client.status())
        trained = run_command("train", str(job), "--ps", ps, "--output", str(tmp_path / "out"))
        assert trained.returncode == 0, trained.stderr
        found = run_command("evaluate", str(job), "--ps", ps)
        assert found.returncode == 0, found.stderr
    records = [json.loads(line) for line in (tmp_path / "out/log.jsonl").read_text().splitlines()]
    result = next(record for record in records if record["record"] == "result")
    figures = json.loads(found.stdout)
    for split, its in result["figures"].items():
        assert figures[split] == pytest.approx(its, rel=1e-6)


def test_workers_train_on_while_it_scores(job, tmp_path):
    forever = [str(job), "--output", str(tmp_path / "out"), "--set", "train.samples=1_000_000_000"]
    with LocalShards(1) as shards, (tmp_path / "said").open("w") as said:
        ps = ["--ps", shards.addresses[0]]
        words = [*EMBERSHARD, "train", *forever, *ps, "--set", "train.staleness=0", "--workers", "2"]
        trainer = subprocess.Popen(words, stdout=said, stderr=said)
        evaluator = None
        try:
            await_clock(shards.addresses, 3)
            evaluator = subprocess.Popen(
                [*EMBERSHARD, "evaluate", str(job), *ps, "--every", "0.1"], stdout=subprocess.PIPE, text=True
            )
            first, *_ = scores = [json.loads(evaluator.stdout.readline())]
            while scores[-1]["clock"] == first["clock"]:  # nothing says how far they come in between
                scores.append(json.loads(evaluator.stdout.readline()))
            assert scores[-1]["clock"] > first["clock"] > 0
            assert first["valid"]["samples"] == 3000
            evaluator.send_signal(signal.SIGINT)
            assert evaluator.wait(PATIENCE) == 130
            assert trainer.poll() is None
        finally:
            for process in (trainer, evaluator):
                if process is not None:
                    process.terminate()
                    process.communicate(timeout=PATIENCE)
