"""`embershard compare` as people run it: killed in the middle, started again, and reported."""

import json
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from embershard.compare.results import read_results
from harness.eventually import PATIENCE, eventually
from harness.processes import EMBERSHARD

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

JOB = """\
model: {name: dlrm, bottom: [8], hidden: [8]}
data: {reader: clicks, eval_samples: 1000, loader_processes: 0}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.05}}
train: {batch_size: 256, samples: 4_096}
workers: 1
shards: 1
"""


def family(mark: str) -> list[psutil.Process]:
    """Processes that have the folder of a test in their words."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if mark in " ".join(process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.fixture
def words(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    command = [*EMBERSHARD, "compare", str(tmp_path / "job.yaml"), "--seeds", "2"]
    yield [*command, "--output", str(tmp_path / "out")]
    for process in family(str(tmp_path)):
        process.kill()


def lines(tmp_path: Path) -> list[dict[str, object]]:
    path = tmp_path / "out" / "runs.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_killed_comparison_goes_on_where_it_was(words, tmp_path):
    words += ["--arms", "none,fp16s"]
    killed = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        assert eventually(lambda: lines(tmp_path) and len(family(str(tmp_path))) > 1)
    finally:
        killed.kill()
        killed.wait()
    assert eventually(lambda: not family(str(tmp_path)))  # its run, shards and workers end with it
    there = len(lines(tmp_path))
    done = subprocess.run(words, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{there} of 4 runs are there already" in done.stdout
    assert "4 of 4: none, seed 1, unlimited: auc" in done.stdout
    assert "report.html" in done.stdout
    found = lines(tmp_path)
    assert len(found) == len({(run["arm"], run["seed"]) for run in found}) == 4
    results = read_results(tmp_path / "out" / "results.json")
    assert results.complete
    assert all(run.ok and run.samples == 4096 and run.metrics["auc"] for run in results.runs)
    (verdict,) = results.verdicts
    assert verdict.difference.low is not None
    assert 1.5 < verdict.bytes_ratio < 3
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
    assert not family(str(tmp_path))


def test_ctrl_c_ends_everything_and_says_how_to_go_on(words, tmp_path):
    words += ["--arms", "strategy=ps,local", "--set", "train.samples=1_000_000_000"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log = tmp_path / "out" / "runs" / "quality-strategy_ps-seed0-unlimited" / "log.jsonl"
    assert eventually(log.exists)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, text
    assert "the same command goes on where it was: embershard compare" in text
    assert "Traceback" not in text
    assert not family(str(tmp_path))
    assert not lines(tmp_path)
