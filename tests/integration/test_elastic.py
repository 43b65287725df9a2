"""Workers that are killed while they train, and come back: some of a job's, in the modes that survive it, or all."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from embershard.deploy.supervisor import LocalShards
from harness.eventually import PATIENCE

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

EPOCH = 24_000
JOB = f"""\
model: {{name: dlrm, bottom: [16], hidden: [16]}}
data: {{reader: clicks, samples: {EPOCH}, eval_samples: 2000, loader_processes: 0}}
embedding: {{dim: 4, optimizer: {{name: adagrad, lr: 0.05}}}}
train: {{batch_size: 64, epochs: 3, lease: 2}}
workers: 3
shards: 1
"""
SPLITS = ("--set", "data.splits=24")
Start = Callable[..., subprocess.Popen[str]]


def worker(process: subprocess.Popen[str], number: int) -> psutil.Process:
    """The worker of a number."""
    for child in psutil.Process(process.pid).children():
        if "worker" in child.cmdline() and child.environ()["RANK"] == str(number):
            return child
    raise AssertionError(f"no worker {number}")


def until_the_first_epoch_ends(process: subprocess.Popen[str]) -> str:
    """What the command says until then."""
    said = ""
    for line in process.stdout:
        said += line
        if "valid: AUC" in line:
            break
    return said


def kill_after_the_first_epoch(process: subprocess.Popen[str], number: int) -> str:
    """Kill -9; all that the command says."""
    said = until_the_first_epoch_ends(process)
    worker(process, number).kill()
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said + text
    return said + text


def records(folder: Path, name: str = "out") -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / name / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("staleness", ["off", "0"])
def test_the_next_worker_reports_where_the_first_is_killed(start, tmp_path, staleness):
    said = kill_after_the_first_epoch(start(JOB, *SPLITS, "--set", f"train.staleness={staleness}"), 0)
    assert "worker 0 ended (SIGKILL); training goes on with the others" in said
    assert "worker 1 reports from here on" in said
    assert "lost workers: 1 of 3: worker 0 (SIGKILL)" in said
    log = records(tmp_path)
    assert [r["record"] for r in log if r["record"] != "train"] == [
        "config",
        "eval",
        "takeover",
        "eval",
        "eval",
        "result",
    ]
    assert [r["epoch"] for r in log if r["record"] == "eval"] == [1, 2, 3]
    assert all(r["figures"]["valid"]["samples"] == 2000 for r in log if r["record"] == "eval")
    result = log[-1]
    assert result["expired_leases"] == 1
    assert result["samples"] >= 2 * EPOCH  # what the lost one trained on since the last evaluation is not known


def test_workers_with_equal_shares_end_without_the_one_that_is_killed(start, tmp_path):
    said = kill_after_the_first_epoch(start(JOB, "--set", "train.staleness=2"), 2)
    assert "worker 2 ended (SIGKILL); training goes on with the others" in said
    log = records(tmp_path)
    assert [r["record"] for r in log if r["record"] != "train"] == ["config", "eval", "eval", "eval", "result"]
    assert log[-1]["samples"] == 3 * EPOCH - 2 * EPOCH // 3  # its shares of the last two epochs are missing


@pytest.mark.cold_start  # so that a lease of 2 s ends meanwhile
def test_a_worker_that_is_started_again_joins_late(start, tmp_path):
    words = ("--set", "train.restart_workers=1", "--set", "train.epochs=6", "--set", "train.staleness=0")
    said = kill_after_the_first_epoch(start(JOB, *SPLITS, *words), 0)
    assert "worker 0 ended (SIGKILL) and was started again" in said
    assert "worker 1 reports from here on" in said
    assert "lost workers: 1 of 3" in said
    assert [r["epoch"] for r in records(tmp_path) if r["record"] == "eval"] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "out" / "worker-0.log").read_text().count("Traceback") == 0


def test_a_whole_job_that_is_killed_and_started_again_makes_all_its_steps(start, tmp_path):
    samples = EPOCH // 2
    with LocalShards(2) as shards:
        # the leases of the killed workers outlive the test
        words = ("--ps", ",".join(shards.addresses), "--workers", "2", "--set", "train.staleness=0")
        words += ("--set", "train.lease=1000", "--set", f"data.samples={samples}")
        first = start(JOB, *words)
        until_the_first_epoch_ends(first)
        supervisor = psutil.Process(first.pid)
        for process in (supervisor, *supervisor.children()):
            process.kill()
        first.communicate(timeout=PATIENCE)
        again = start(JOB, *words, "--output", str(tmp_path / "again"))
        said, _ = again.communicate(timeout=PATIENCE)
        assert again.returncode == 0, said
        assert shards.failure is None
    assert "result" not in [record["record"] for record in records(tmp_path)]
    log = records(tmp_path, "again")
    steps = -(-samples // 2 // 64)  # of an epoch
    assert [r["step"] for r in log if r["record"] == "eval"] == [steps, 2 * steps, 3 * steps]
    assert (log[-1]["steps"], log[-1]["samples"], log[-1]["epochs"]) == (3 * steps, 3 * samples, 3)
