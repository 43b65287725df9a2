"""Real commands, and nothing that they leave behind."""

import os
import subprocess

import psutil
import pytest

from harness.processes import EMBERSHARD


@pytest.fixture
def start(tmp_path):
    """Starts the command with a job file; whatever it leaves behind is ended, and counts as a failure."""
    started: list[subprocess.Popen[str]] = []

    def begin(text, *words, command="train"):
        job = tmp_path / "job.yaml"
        job.write_text(text)
        line = [*EMBERSHARD, command, str(job), "--output", str(tmp_path / "out"), *words]
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        started.append(process)
        return process

    yield begin
    left = []
    for process in started:
        process.kill()
        process.wait()
    for process in psutil.process_iter(["cmdline"]):
        if str(tmp_path) in " ".join(process.info["cmdline"] or []):
            left.append(" ".join(process.info["cmdline"]))
            process.kill()
    assert not left
