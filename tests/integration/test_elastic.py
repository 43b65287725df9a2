"""Workers that are killed while they train, and come back: some of a job's, in the modes that survive it, or all."""

import json

import psutil
import pytest

from embershard.deploy.supervisor import LocalShards
from harness.processes import said

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
SPLITS = ("--set", "data.splits=24", "--set")


def until_the_first_epoch_ends(process):
    assert any("valid: AUC" in line for line in process.stdout)


def kill_after_the_first_epoch(process, number):
    """Kill -9 to the worker of a number; all that the command says from then on."""
    until_the_first_epoch_ends(process)
    workers = [child for child in psutil.Process(process.pid).children() if "worker" in child.cmdline()]
    (victim,) = (child for child in workers if child.environ()["RANK"] == str(number))
    victim.kill()
    return said(process)


def records(folder, kind=None):
    """Those of the log of one kind, or all but the intervals."""
    found = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [r for r in found if r["record"] == kind or (kind is None and r["record"] != "train")]


@pytest.mark.parametrize("staleness", ["off", pytest.param("0", marks=pytest.mark.long)])
def test_the_next_worker_reports_where_the_first_is_killed(start, tmp_path, staleness):
    text = kill_after_the_first_epoch(start(JOB, *SPLITS, f"train.staleness={staleness}"), 0)
    assert "worker 0 ended (SIGKILL); the others continue training" in text
    assert "worker 1 reports from here on" in text
    assert "lost workers: 1 of 3: worker 0 (SIGKILL)" in text
    log = records(tmp_path / "out")
    assert [r["record"] for r in log] == ["config", "eval", "takeover", "eval", "eval", "result"]
    assert [(r["epoch"], r["figures"]["valid"]["samples"]) for r in log if r["record"] == "eval"] == [
        (1, 2000), (2, 2000), (3, 2000),
    ]  # fmt: skip
    assert log[-1]["expired_leases"] == 1
    assert log[-1]["samples"] >= 2 * EPOCH  # what the lost one trained on since the last evaluation is not known


@pytest.mark.long
@pytest.mark.cold_start  # so that a lease of 2 s ends meanwhile
def test_a_worker_that_is_started_again_joins_late(start, tmp_path):
    words = ("train.restart_workers=1", "--set", "train.epochs=6", "--set", "train.staleness=0")
    text = kill_after_the_first_epoch(start(JOB, *SPLITS, *words), 0)
    assert "worker 0 ended (SIGKILL) and was restarted" in text
    assert "worker 1 reports from here on" in text
    assert "lost workers: 1 of 3" in text
    assert [r["epoch"] for r in records(tmp_path / "out", "eval")] == [1, 2, 3, 4, 5, 6]
    assert "Traceback" not in (tmp_path / "out" / "worker-0.log").read_text()


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
        first.wait()
        said(start(JOB, *words, "--output", "again"))
        assert shards.failure is None
    assert not records(tmp_path / "out", "result")
    steps = -(-samples // 2 // 64)  # of an epoch
    assert [r["step"] for r in records(tmp_path / "again", "eval")] == [steps, 2 * steps, 3 * steps]
    (result,) = records(tmp_path / "again", "result")
    assert (result["steps"], result["samples"], result["epochs"]) == (3 * steps, 3 * samples, 3)
