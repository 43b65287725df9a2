"""Short runs of bench/bar_soak.py: kills, stops, cuts and, as root, full disks and losses of power of real shards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.eventually import PATIENCE

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "bar_soak.py"


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_mixed_faults_lose_nothing(tmp_path, mode):
    done = run(tmp_path, "--only", "soak", "--minutes", "0.5", "--mode", mode)
    assert sum(done["soak"]["faults"].values()) > 0
    assert done["left_out"] == [] or os.geteuid() != 0


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a disk takes root")
def test_a_full_disk_and_losses_of_power_are_noticed(tmp_path):
    assert run(tmp_path, "--only", "full")["full"]["pulls_meanwhile"] > 0
    assert run(tmp_path, "--only", "power")["power"]["told"]["MemoryLost"] > 0


def run(folder, *words):
    """The last line of the bar, which must have passed."""
    command = [sys.executable, str(SCRIPT), "--folder", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
