"""A run that is killed whole, at any moment, goes on from its last checkpoint to the bits of one that was not."""

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import embershard as es
from embershard.deploy.supervisor import LocalShards, RestartPolicy
from embershard.worker.checkpoint.checkpoint import SNAPSHOT, Checkpoint
from embershard.worker.checkpoint.snapshots import read_manifest, read_table
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.job.load import load_job
from embershard.worker.training.trainer import Trainer
from harness.eventually import eventually
from harness.processes import EMBERSHARD

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

JOB = """\
model: {name: dlrm, bottom: [8], hidden: [8], batch_norm: true, dropout: 0.2}
data: {reader: clicks, samples: 20_000, eval_samples: 1000, loader_processes: 1}
embedding: {dim: 4, optimizer: {name: adam, lr: 0.01}}
train: {batch_size: 128, steps: 160, threads: 1, lr_schedule: {name: linear, warmup_steps: 10}}
evaluate: {every: 40}
checkpoint: {folder: checkpoints, every: 20}
workers: 1
shards: 1
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start():
    """Starts a job in a folder; nothing outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(folder, *words, job=JOB):
        folder.mkdir(exist_ok=True)
        (folder / "job.yaml").write_text(job)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        line = [*EMBERSHARD, "train", "job.yaml", "--output", "out", *words]
        process = subprocess.Popen(
            line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        kill_all(process)


def kill_all(process: subprocess.Popen[str]) -> None:
    """SIGKILL to a command and all that it started, the command last: its children would end themselves without it."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
    process.wait()


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and output."""
    text, _ = process.communicate(timeout=250)
    return process.returncode, text


def kill_after(process: subprocess.Popen[str], checkpoint: Path) -> None:
    assert eventually(lambda: (checkpoint / "checkpoint.json").exists() or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0]
    kill_all(process)


def tables(path: Path) -> dict[str, list[np.ndarray]]:
    """Table -> ids, rows and optimizer states, by id."""
    found = {}
    for name in read_manifest(str(path), SNAPSHOT).tables:
        parts = [np.concatenate(part) for part in zip(*read_table(str(path), name, SNAPSHOT), strict=True)]
        order = np.argsort(parts[0])
        found[name] = [part[order] for part in parts]
    return found


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or one != one


def uninterrupted(folder: Path) -> Path:
    """The same job in this process; its last checkpoint."""
    folder.mkdir()
    (folder / "job.yaml").write_text(JOB)
    job = load_job(folder / "job.yaml", [f"checkpoint.folder={folder}", "data.loader_processes=0"])
    with es.local() as session:
        Trainer(job, job.data.open(folder, job.train.seed), session, WorkerGroup()).run()
    return folder / "step-000000160"


def test_a_run_that_was_killed_ends_with_the_bits_of_one_that_was_not(start, tmp_path):
    kill_after(start(tmp_path), tmp_path / "checkpoints" / "step-000000040")
    records = (tmp_path / "out" / "log.jsonl").read_text().splitlines()
    assert not any(json.loads(line)["record"] == "result" for line in records)

    code, text = end(start(tmp_path, "--set", "train.batch_size=64", "--resume", "latest"))
    assert code == 1
    assert "is of another job: train.batch_size is 64 here and 128 there; resume it with the job" in text
    code, text = end(start(tmp_path, "--resume", "latest"))
    assert code == 0, text
    assert "resumed at step" in text
    last = [tmp_path / "checkpoints" / "step-000000160", uninterrupted(tmp_path / "whole")]
    one, other = map(tables, last)
    assert one.keys() == other.keys() == {"embedding", "dense"}
    for name in one:
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(one[name], other[name], strict=True)), name
    checkpoints = [Checkpoint.open(str(path)) for path in last]
    states = [checkpoint.worker(0) or {} for checkpoint in checkpoints]
    for part in ("buffers", "budget"):
        assert same(states[0][part], states[1][part]), part
    assert same(*(state["random"]["torch"] for state in states))  # nothing seeds the others
    figures = [checkpoint.shared()["report"]["best"]["figures"] for checkpoint in checkpoints]
    assert same(*figures)

    log = (tmp_path / "out" / "log.jsonl").read_text().splitlines()
    assert log[: len(records)] == records  # it goes on
    assert json.loads(log[len(records)])["resumed_step"] == int(text.split("resumed at step ")[1].split()[0])
    assert json.loads(log[-1])["steps"] == 160


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_synchronous_workers_with_dense_weights_of_their_own_resume_to_the_same_bits(start, tmp_path, mode):
    own = ("--workers", "2", "--set", f"dense.mode={mode}", "--set", "train.staleness=0", "--set", "checkpoint.keep=9")
    short = ("--set", "train.steps=40", "--set", "data.loader_processes=0")
    code, text = end(start(tmp_path, *own, *short))
    assert code == 0, text
    code, text = end(start(tmp_path, *own, *short, "--resume", "checkpoints/step-000000020"))
    assert code == 0, text
    last = [tmp_path / "checkpoints" / name for name in ("step-000000040", "step-000000040-2")]
    one, other = map(tables, last)
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(one["embedding"], other["embedding"], strict=True))
    weights = [Checkpoint.open(str(path)).shared()["held"] for path in last]
    assert same(*weights)


def test_after_a_shard_died_resuming_restores_the_checkpoint_onto_the_running_shards(start, tmp_path):
    policy = RestartPolicy(first_pause=timedelta(seconds=0.1))
    with LocalShards(2, restart=policy) as shards:
        ps = ("--ps", ",".join(shards.addresses))
        training = start(tmp_path, *ps, "--set", "train.steps=4000")
        deadline = time.monotonic() + 250
        while not (tmp_path / "checkpoints" / "step-000000020" / "checkpoint.json").exists():
            assert time.monotonic() < deadline
            assert training.poll() is None, training.communicate()[0]
            time.sleep(0.01)
        os.kill(shards.pids[1], signal.SIGKILL)
        code, text = end(training)
        assert code == 1
        (command,) = [line for line in text.splitlines() if line.endswith("--resume latest")]
        words = shlex.split(command.partition("embershard train job.yaml ")[2])
        assert words[-4:-2] == ["--set", "train.steps=4000"]

        steps = max(int(path.name.split("-")[1]) for path in (tmp_path / "checkpoints").glob("step-*")) + 20
        code, text = end(start(tmp_path, *words[2:], "--set", f"train.steps={steps}"))  # without start's own --output
        assert code == 0, text
        assert "resumed at step" in text


def test_resuming_asks_before_the_tables_of_another_job_are_lost(start, tmp_path):
    code, text = end(start(tmp_path, "--set", "train.steps=40"))
    assert code == 0, text
    resume = ("--set", "train.steps=60", "--resume", "checkpoints/step-000000020")
    with LocalShards(1) as shards, es.connect(shards.addresses) as session:
        session.client.declare(es.TableSpec(name="embedding", dim=8, optimizer=es.SGD(lr=0.1)))
        ps = ("--ps", ",".join(shards.addresses))
        code, text = end(start(tmp_path, *ps, *resume))
        assert code == 1
        assert "--replace" in text
        code, text = end(start(tmp_path, *ps, *resume, "--replace"))
        assert code == 0, text
