"""A run that is killed whole, at any moment, goes on from its last checkpoint to the bits of one that was not."""

import json
import os
import shlex
import signal
from contextlib import closing

import numpy as np
import psutil
import pytest
import torch

import embershard as es
from embershard.cli import local_job
from embershard.deploy.supervisor import LocalShards, RestartPolicy, ShardSettings
from embershard.proto.snapshot.stored import open_snapshot
from embershard.worker.checkpoint import checkpoint as checkpoints
from embershard.worker.checkpoint.checkpoint import SNAPSHOT, Checkpoint
from embershard.worker.checkpoint.snapshots import take_snapshot
from embershard.worker.client.client import Client
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.job.load import load_job
from embershard.worker.training.trainer import Trainer
from harness.eventually import eventually
from harness.processes import said

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


@pytest.fixture(autouse=True)
def _one_thread_elsewhere(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The last checkpoint of a run that nothing has interrupted."""
    return uninterrupted(tmp_path_factory.mktemp("uninterrupted") / "whole")


def await_checkpoint(process, folder):
    assert eventually(lambda: (folder / "checkpoint.json").exists() or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0]


def tables(path):
    """Table -> ids, rows and optimizer states, by id."""
    found = {}
    stored = open_snapshot(str(path), SNAPSHOT)
    for name in stored.manifest.tables:
        parts = [np.concatenate(part) for part in zip(*stored.read_table(name), strict=True)]
        found[name] = [part[np.argsort(parts[0])] for part in parts]
    return found


def assert_same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def uninterrupted(folder):
    """The same job in this process; its last checkpoint."""
    folder.mkdir()
    (folder / "job.yaml").write_text(JOB)
    job = load_job(folder / "job.yaml", [f"checkpoint.folder={folder}", "data.loader_processes=0"])
    with es.local() as session:
        Trainer(job, job.data.open(folder, job.train.seed), session, WorkerGroup()).run()
    return folder / "step-000000160"


@pytest.mark.parametrize("durability", [pytest.param("memory", marks=pytest.mark.long), "log"])
def test_a_run_that_was_killed_ends_with_the_bits_of_one_that_was_not(start, tmp_path, whole, durability):
    job = f"{JOB}durability: {durability}\n"
    first, log = start(job), tmp_path / "out" / "log.jsonl"
    await_checkpoint(first, tmp_path / "checkpoints" / "step-000000040")
    for process in [*psutil.Process(first.pid).children(recursive=True), first]:  # children would end without it
        process.kill()
    first.wait()
    records = log.read_text().splitlines()
    assert not any(json.loads(line)["record"] == "result" for line in records)

    text = said(start(job, "--set", "train.batch_size=64", "--resume", "latest"), 1)
    assert "is of another job: train.batch_size is 64 here and 128 there; use the job" in text
    assert bool(list((tmp_path / "out").glob("shard-logs-*"))) == (durability == "log")
    text = said(start(job, "--resume", "latest"))
    assert not list((tmp_path / "out").glob("shard-logs-*"))  # of the run that was killed, either
    last = [tmp_path / "checkpoints" / "step-000000160", whole]
    one, other = map(tables, last)
    assert one.keys() == {"embedding", "dense"}
    assert_same(one, other)
    checkpoints = [Checkpoint.open(str(path)) for path in last]
    states = [checkpoint.worker(0) for checkpoint in checkpoints]
    for part in ("buffers", "budget"):
        assert_same(states[0][part], states[1][part])
    assert_same(*(state["random"]["torch"] for state in states))  # nothing seeds the others
    assert_same(*(checkpoint.shared()["report"]["best"]["figures"] for checkpoint in checkpoints))

    lines = log.read_text().splitlines()
    assert lines[: len(records)] == records  # it goes on
    assert json.loads(lines[len(records)])["resumed_step"] == int(text.split("resumed at step ")[1].split()[0])
    assert json.loads(lines[-1])["steps"] == 160


@pytest.mark.long
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_job_and_its_shards_that_were_killed_whole_go_on_from_log_and_checkpoint(start, tmp_path, workers):
    words = ("--workers", workers, "--set", "train.staleness=0", "--set", "data.loader_processes=0")
    logs = ShardSettings(durability="log", log_dir=tmp_path / "logs")
    with LocalShards(1, logs) as shards:
        training = start(JOB, *words, "--ps", shards.addresses[0])
        await_checkpoint(training, tmp_path / "checkpoints" / "step-000000040")
        for process in [*psutil.Process(training.pid).children(recursive=True), training]:
            process.kill()
        os.kill(shards.pids[0], signal.SIGKILL)
        training.wait()
    with LocalShards(1, logs) as shards:
        with es.connect(shards.addresses) as session:
            (status,) = session.client.status()
            assert status.term == 2
            assert status.clock >= 40  # it has more than the checkpoint, which `--resume` takes back
        said(start(JOB, *words, "--ps", shards.addresses[0], "--resume", "latest"))
    got = tables(tmp_path / "checkpoints" / "step-000000160")
    undisturbed = ("--set", f"checkpoint.folder={tmp_path / 'undisturbed'}")
    said(start(JOB, *words, *undisturbed))
    assert_same(got, tables(tmp_path / "undisturbed" / "step-000000160"))


@pytest.mark.parametrize("role", ["ps", "worker"])
def test_a_job_whose_shard_or_worker_is_killed_ends_by_itself_with_the_bits_of_one_that_was_not(
    start, tmp_path, whole, role
):
    training, log = start(JOB), tmp_path / "out" / "log.jsonl"
    await_checkpoint(training, tmp_path / "checkpoints" / "step-000000040")
    (victim,) = [child for child in psutil.Process(training.pid).children() if role in child.cmdline()]
    victim.kill()
    text = said(training)
    assert_same(*map(tables, (tmp_path / "checkpoints" / "step-000000160", whole)))
    records = [json.loads(line) for line in log.read_text().splitlines()]
    configs = [record["resumed_step"] for record in records if record["record"] == "config"]
    (recovery,) = [record for record in records if record["record"] == "recovery"]
    assert configs == [None, recovery["step"]]
    assert recovery["step"] >= 40
    assert recovery["checkpoint"].endswith(f"step-{recovery['step']:09d}")
    assert recovery["seconds"] > 0
    assert f"{recovery['lost_steps']} steps were trained twice" in text
    assert records[-1]["record"] == "result"
    assert records[-1]["steps"] == 160


def test_a_job_whose_shard_has_a_log_goes_on_in_the_same_attempt_once_that_is_back(start, tmp_path, whole):
    training = start(JOB, "--set", "durability=log")
    await_checkpoint(training, tmp_path / "checkpoints" / "step-000000040")
    (victim,) = [child for child in psutil.Process(training.pid).children() if "ps" in child.cmdline()]
    victim.kill()
    text = said(training)
    assert "serves again" in text
    assert_same(*map(tables, (tmp_path / "checkpoints" / "step-000000160", whole)))
    records = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [record["record"] for record in records].count("config") == 1
    assert records[-1]["steps"] == 160
    assert not list((tmp_path / "out").glob("shard-logs-*"))


@pytest.mark.parametrize("mode", [pytest.param("ddp", marks=pytest.mark.long), "fsdp"])
def test_synchronous_workers_with_dense_weights_of_their_own_resume_to_the_same_bits(start, tmp_path, mode):
    sets = (f"dense.mode={mode}", "train.staleness=0", "checkpoint.keep=9", "train.steps=40", "data.loader_processes=0")
    words = ("--workers", "2", *(word for one in sets for word in ("--set", one)))
    said(start(JOB, *words))
    said(start(JOB, *words, "--resume", "checkpoints/step-000000020"))
    last = [tmp_path / "checkpoints" / name for name in ("step-000000040", "step-000000040-2")]
    assert_same(*(tables(path)["embedding"] for path in last))
    assert_same(*(Checkpoint.open(str(path)).shared()["local_weights"] for path in last))


def test_a_job_on_shards_that_run_already_restores_its_checkpoint_once_a_shard_that_died_is_back(start, tmp_path):
    with LocalShards(2, restart=RestartPolicy()) as shards:
        training = start(JOB, "--ps", ",".join(shards.addresses), "--set", "train.staleness=0")
        await_checkpoint(training, tmp_path / "checkpoints" / "step-000000020")
        os.kill(shards.pids[1], signal.SIGKILL)
        text = said(training)
    records = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [record["record"] for record in records].count("recovery") == 1
    assert "waiting up to 300 s" in text
    assert (tmp_path / "checkpoints" / "step-000000160").exists()


def test_a_job_that_does_not_recover_by_itself_says_how_to_go_on_from_its_checkpoint(start, tmp_path):
    never = ("--set", "train.recover=false")
    with LocalShards(2, restart=RestartPolicy()) as shards:
        training = start(JOB, "--ps", ",".join(shards.addresses), *never, "--set", "train.steps=4000")
        await_checkpoint(training, tmp_path / "checkpoints" / "step-000000020")
        os.kill(shards.pids[1], signal.SIGKILL)
        (command,) = [line for line in said(training, 1).splitlines() if line.endswith("--resume latest")]
        words = shlex.split(command.partition("embershard train job.yaml ")[2])
        assert words[-4:-2] == ["--set", "train.steps=4000"]
        steps = max(int(path.name.split("-")[1]) for path in (tmp_path / "checkpoints").glob("step-*")) + 20
        again = start(JOB, *words[2:], "--set", f"train.steps={steps}")  # without start's own --output
        assert "resumed at step" in said(again)


def test_resuming_asks_before_the_tables_of_another_job_are_lost(start):
    said(start(JOB, "--set", "train.steps=40"))
    with LocalShards(1) as shards, es.connect(shards.addresses) as session:
        session.client.declare(es.TableSpec(name="embedding", dim=8, optimizer=es.SGD(lr=0.1)))
        resume = ("--set", "train.steps=60", "--resume", "checkpoints/step-000000020", "--ps", shards.addresses[0])
        assert "--replace" in said(start(JOB, *resume), 1)
        said(start(JOB, *resume, "--replace"))


def test_a_shard_that_loses_its_rows_while_a_checkpoint_is_restored_is_restored_with_the_others_again(
    whole, monkeypatch, tmp_path
):
    checkpoint, restore_shards, restores = Checkpoint.open(str(whole)), checkpoints.restore_shards, []

    def restore(client, *args, **words):
        restores.append(client)
        if len(restores) == 1:
            restore_shards(client, *args, **words)
            os.kill(shards.pids[1], signal.SIGKILL)
        restore_shards(client, *args, **words)

    monkeypatch.setattr(checkpoints, "restore_shards", restore)
    with LocalShards(2, restart=RestartPolicy(), report=lambda line: None) as shards:
        ps = ",".join(shards.addresses)
        local_job._meet_shards(ps, checkpoint, replace=False)
        with closing(Client.connect(ps)) as client:
            take_snapshot(client, str(tmp_path), SNAPSHOT)
    assert len(restores) == 2
    got, want = tables(tmp_path), tables(whole)
    assert list(got) == list(want)
    for name, parts in want.items():
        for one, other in zip(got[name], parts, strict=True):
            np.testing.assert_array_equal(one, other, name)
