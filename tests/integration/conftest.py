"""Real commands, and nothing that they leave behind."""

import os
import subprocess

import pytest

from harness.processes import EMBERSHARD, marked


@pytest.fixture
def start(tmp_path):
    """Starts a command on a job file in its folder; what is left of it is ended, and counts as a failure."""
    started: list[subprocess.Popen[str]] = []

    def begin(text, *words, command="train", **options):
        (tmp_path / "job.yaml").write_text(text)
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        line = [*EMBERSHARD, command, "job.yaml", "--output", "out", *words]
        mark = {"EMBERSHARD_TEST_RUN": str(tmp_path)}
        started.append(subprocess.Popen(line, cwd=tmp_path, env=environment | mark, **streams, **options))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()
    left = marked(str(tmp_path))
    for process in left:
        process.kill()
    assert not left
