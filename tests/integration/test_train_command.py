"""`embershard train` and `embershard worker` as people run them: real shards, real workers, and every way to end."""

import contextlib
import json
import signal
import subprocess
import sys

import psutil
import pytest

from embershard.deploy.supervisor import LocalShards
from harness.eventually import PATIENCE
from harness.processes import EMBERSHARD, all_end, descendants

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

JOB = """\
model: {name: dlrm, bottom: [16], hidden: [16], batch_norm: true}
data: {reader: clicks, eval_samples: 3000, loader_processes: 0}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.05}}
train: {batch_size: 256, samples: 10_000}
evaluate: {every: 5000}
workers: 2
"""
FOREVER = JOB.replace("10_000", "10_000_000_000").replace("evaluate: {every: 5000}\n", "")
ALONE = ("--workers", "1", "--shards", "1")  # where it makes no difference: starting costs seconds


def children(process: subprocess.Popen[str], word: str) -> list[psutil.Process]:
    found = [child for child in psutil.Process(process.pid).children() if word in child.cmdline()]
    return sorted(found, key=lambda child: child.pid)


def until_training(process: subprocess.Popen[str]) -> None:
    for line in process.stdout:
        if "samples/s" in line:
            return
    raise AssertionError("it ended before it trained")


def family(process: subprocess.Popen[str], size: int = 4) -> list[psutil.Process]:
    found = descendants(process.pid)
    assert len(found) == size  # shards and workers
    return found


def test_a_job_trains_through_two_shards_and_two_workers(start, tmp_path):
    process = start(JOB)
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, text
    for part in ("dlrm on clicks: 2 workers on cpu, 2 shards", "valid AUC", "best reachable", "waiting for others"):
        assert part in text
    records = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [r["record"] for r in records if r["record"] != "train"] == ["config", "eval", "eval", "result"]
    result = records[-1]
    assert result["samples"] == 10_240
    assert result["figures"]["valid"]["samples"] == 3000
    assert result["table_rows"]["embedding"] > 1000


def test_a_job_with_mistakes_starts_nothing(start):
    process = start(JOB.replace("hidden", "hiden"), "--set", "train.epoch=1")
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "job.yaml:1: model.hiden: unknown field; did you mean hidden?" in text
    assert "--set train.epoch=1: train.epoch: unknown field; did you mean epochs?" in text
    assert "Traceback" not in text


LOADER = (*ALONE, "--set", "data.loader_processes=1")


@pytest.mark.parametrize(("number", "code", "words"), [(signal.SIGINT, 130, ()), (signal.SIGTERM, 143, LOADER)])
def test_an_interrupt_ends_everything(start, number, code, words):
    process = start(FOREVER, *words)
    until_training(process)
    everyone = family(process, 3 if words else 4)
    process.send_signal(number)
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, text
    assert "Traceback" not in text
    assert all_end(everyone)


def test_nothing_outlives_a_killed_command(start):
    process = start(FOREVER, *LOADER)
    until_training(process)
    everyone = family(process, 3)
    process.kill()
    assert all_end(everyone)


def test_a_loader_that_dies_ends_the_job_and_is_named(start):
    process = start(FOREVER, *LOADER)
    until_training(process)
    everyone = family(process, 3)
    (loader,) = (child for child in everyone if "embershard.worker.training.loader" in child.cmdline())
    loader.kill()
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert f"the data loader of worker 0 (process {loader.pid}) was ended by SIGKILL" in text
    assert "Traceback" not in text
    assert all_end(everyone)


def test_a_profile_says_where_the_time_of_a_step_goes(start, tmp_path):
    words = ("--profile", "--set", "train.samples=20000", "--set", "evaluate.every=20000")
    process = start(JOB, *LOADER, *words)
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, text
    assert "39 steps" in text  # 79 of the one worker, of which 40 warmed up or were traced
    split = json.loads((tmp_path / "out" / "profile.json").read_text())
    everything = {"data", "route", "encode", "send", "wait", "receive", "gather", "forward", "backward", "push"}
    assert everything <= split["parts"].keys() | split["overlapped"].keys()
    assert {"wait", "gather", "forward", "backward", "push", "other"} <= split["parts"].keys()
    assert sum(part["share"] for part in split["parts"].values()) == pytest.approx(1)
    assert "traceEvents" in json.loads((tmp_path / "out" / "trace.json").read_text())


def test_a_worker_that_dies_ends_a_job_that_all_reduces_and_is_named(start):
    process = start(FOREVER, "--set", "dense.mode=ddp")
    until_training(process)
    everyone = family(process)
    victim = children(process, "worker")[1]
    number = victim.environ()["RANK"]
    victim.kill()
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert f"error: worker {number} ended (SIGKILL)" in text
    assert all_end(everyone)


def test_a_worker_with_an_error_is_heard(start):
    process = start(JOB, *ALONE, "--set", "embedding.optimizer={name: sgd, lr: 1e30}")
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "the loss of step" in text
    assert "lower the learning rate" in text
    assert "Traceback" not in text


def test_running_shards_are_used_and_left_running(start, tmp_path):
    with LocalShards(2) as shards:
        process = start(JOB, "--ps", ",".join(shards.addresses), "--workers", "1")
        text, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, text
        assert "1 worker on cpu, 2 shards" in text
        assert shards.failure is None
        # torchrun gives each worker its place; --no-python runs the command as it is
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        torchrun += ["--no-python", *EMBERSHARD, "worker", str(tmp_path / "job.yaml"), "--set", "prefix=second/"]
        torchrun += ["--ps", ",".join(shards.addresses)]
        done = subprocess.run(torchrun, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stderr
        assert "2 workers on cpu, 2 shards" in done.stdout
        assert "table second/embedding" in done.stdout


def test_a_shard_that_dies_ends_the_job(start):
    process = start(FOREVER, *ALONE)
    until_training(process)
    shard = children(process, "ps")[0]
    with contextlib.suppress(psutil.NoSuchProcess):
        shard.kill()
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "shard 0" in text
