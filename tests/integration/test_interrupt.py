"""Ctrl-C at any moment, once or again and again: exit code 130, no traceback, no process left behind.

Ctrl-C while training, or while shards start, is in test_train_command.py and test_services.py.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from harness.eventually import PATIENCE, eventually
from harness.processes import EMBERSHARD, words

pytestmark = [pytest.mark.integration, pytest.mark.cold_start, pytest.mark.timeout(600)]

JOB = """\
model: {name: lr}
data: {reader: clicks, eval_samples: 1000}
embedding: {optimizer: {name: sgd, lr: 0.1}}
train: {batch_size: 64, samples: 1_000_000_000}
"""
MARK = "EMBERSHARD_TEST_RUN"
# Ctrl-C at a moment that a clock cannot hit: in the middle of the command's own imports
DURING_IMPORTS = """
import sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from embershard.cli import main
main()
"""

Start = Callable[..., "Terminal"]


class Terminal:
    """A command as a terminal runs it: in a group of its own, which Ctrl-C reaches as a whole."""

    def __init__(self, line: list[str], cwd: Path) -> None:
        self._mark = uuid.uuid4().hex
        self.popen = subprocess.Popen(
            line,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, MARK: self._mark},
            start_new_session=True,
        )

    def interrupt(self, *, group: bool = True) -> None:
        """Ctrl-C; or, not to the whole group, what another program sends."""
        if self.popen.poll() is None:
            (os.killpg if group else os.kill)(self.popen.pid, signal.SIGINT)

    def end(self) -> tuple[int, str]:
        """Exit code and stderr."""
        _, err = self.popen.communicate(timeout=PATIENCE)
        return self.popen.returncode, err

    def family(self) -> list[psutil.Process]:
        """Every process that came of it and lives, whoever is its parent now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def start(tmp_path):
    """Starts `embershard` with some words, or any other line; nothing outlives the test."""
    (tmp_path / "job.yaml").write_text(JOB)
    started: list[Terminal] = []

    def begin(*words, program=""):
        what = ["-c", program] if program else [*EMBERSHARD[1:], *words]
        started.append(Terminal([sys.executable, *what], tmp_path))
        return started[-1]

    yield begin
    for terminal in started:
        for process in terminal.family():
            process.kill()
        terminal.popen.communicate()


def test_ctrl_c_during_the_imports_shows_no_traceback(start):
    assert start(program=DURING_IMPORTS).end() == (130, "")


def started(terminal: Terminal, count: int) -> list[psutil.Process]:
    """So many processes that a command started, once they are there."""
    found: list[psutil.Process] = []

    def all_there():
        assert terminal.popen.poll() is None
        # by their words: one that is still a copy of its parent would hold the parent up
        found[:] = [process for process in terminal.family() if "--parent-pid" in words(process)]
        return len(found) >= count

    assert eventually(all_there)
    return found


@pytest.mark.parametrize(
    ("count", "group"),
    [(0, True), (1, False), (2, True)],
    ids=["at once", "a shard, sent to the parent alone", "a worker"],
)
def test_ctrl_c_while_a_job_starts_leaves_nothing_behind(start, tmp_path, count, group):
    terminal = start("train", "job.yaml", "--output", "out", "--shards", "1")
    assert eventually((tmp_path / "out").exists)  # the job was read, and comes next
    started(terminal, count)
    terminal.interrupt(group=group)
    code, err = terminal.end()
    assert code == 130, err
    assert "Traceback" not in err
    assert eventually(lambda: not terminal.family())  # one that was just born sees soon that its parent is gone


def suspend(processes: Sequence[psutil.Process]) -> None:
    """Pause processes, so that they cannot end when they are asked to."""
    for process in processes:
        process.suspend()
    # a busy machine takes its time; what is sent before is still delivered
    assert eventually(lambda: all(process.status() == psutil.STATUS_STOPPED for process in processes))


def asked_to_end(process: psutil.Process) -> bool:
    """Whether SIGTERM waits for it."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (pending,) = (line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd:"))
    return bool(int(pending, 16) & 1 << (signal.SIGTERM - 1))


def test_a_second_ctrl_c_does_not_wait_for_shards_and_leaves_none(start):
    terminal = start("up", "--shards", "2", "--base-port", "0")
    while "Ctrl-C ends them" not in terminal.popen.stdout.readline():
        assert terminal.popen.poll() is None
    shards = started(terminal, 2)
    suspend(shards)
    terminal.interrupt()
    assert eventually(lambda: all(map(asked_to_end, shards)))
    time.sleep(0.5)
    assert terminal.popen.poll() is None  # it waits: shards may have accepted something
    terminal.interrupt()
    code, err = terminal.end()
    assert code == 130, err
    assert "Traceback" not in err
    assert "did not end within" not in err  # it was not waited for
    assert not terminal.family()


def test_ctrl_c_again_and_again_ends_a_job_whose_processes_do_not_answer(start):
    terminal = start("train", "job.yaml", "--output", "out", "--workers", "2", "--shards", "1")
    shard, *workers = sorted(started(terminal, 3), key=lambda process: "worker" in words(process))
    assert eventually(lambda: all(map(imports_torch, workers)))  # the parent knows them all by now
    suspend([shard, *workers])
    terminal.interrupt()
    assert eventually(lambda: all(map(asked_to_end, workers)))
    terminal.interrupt()  # do not wait for the workers
    assert eventually(lambda: asked_to_end(shard))
    terminal.interrupt()  # nor for the shard
    code, err = terminal.end()
    assert code == 130, err
    assert "Traceback" not in err
    assert "did not end within" not in err  # it was not waited for
    assert not terminal.family()


def imports_torch(process: psutil.Process) -> bool:
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
