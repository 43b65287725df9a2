"""Ctrl-C at any moment, once or again and again: exit code 130, no traceback, no process left behind.

Ctrl-C while training, or while shards start, is in test_train_command.py and test_services.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.integration

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
            # as from a terminal, even where the tests run in the background
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def interrupt(self, *, group: bool = True) -> None:
        """Ctrl-C; or, not to the whole group, what another program sends."""
        if self.popen.poll() is None:
            (os.killpg if group else os.kill)(self.popen.pid, signal.SIGINT)

    def end(self, seconds: float = 30) -> tuple[int, str]:
        """Exit code and stderr."""
        _, err = self.popen.communicate(timeout=seconds)
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
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `embershard` with some words, or any other line; nothing outlives the test."""
    (tmp_path / "job.yaml").write_text(JOB)
    started: list[Terminal] = []

    def begin(*words: str, program: str = "") -> Terminal:
        what = ["-c", program] if program else ["-m", "embershard.cli", *words]
        started.append(Terminal([sys.executable, *what], tmp_path))
        return started[-1]

    yield begin
    for terminal in started:
        for process in terminal.family():
            process.kill()
        terminal.popen.communicate()


def test_ctrl_c_during_the_imports_shows_no_traceback(start: Start):
    assert start(program=DURING_IMPORTS).end() == (130, "")


@pytest.mark.parametrize(
    ("seconds", "group"),
    [(0.8, True), (2.5, False), (5.0, True)],
    ids=["at once", "shards, sent to the parent alone", "workers"],
)
def test_ctrl_c_while_a_job_starts_leaves_nothing_behind(start: Start, seconds: float, group: bool):
    terminal = start("train", "job.yaml", "--output", "out", "--shards", "1")
    time.sleep(seconds)
    terminal.interrupt(group=group)
    code, err = terminal.end()
    assert code == 130, err
    assert "Traceback" not in err
    assert not terminal.family()


def stop_all_but_parent(terminal: Terminal, count: int) -> None:
    """Pause the processes that a command started, so that they cannot end when they are asked to."""
    end = time.monotonic() + 60
    # by their words: one that is still a copy of its parent would hold the parent up
    while len(found := [process for process in terminal.family() if "--parent-pid" in process.cmdline()]) < count:
        assert time.monotonic() < end
        time.sleep(0.05)
    for process in found:
        process.suspend()


def test_a_second_ctrl_c_does_not_wait_for_shards_and_leaves_none(start: Start):
    terminal = start("up", "--shards", "2", "--base-port", "0")
    assert terminal.popen.stdout is not None
    while "Ctrl-C ends them" not in terminal.popen.stdout.readline():
        assert terminal.popen.poll() is None
    stop_all_but_parent(terminal, 2)
    terminal.interrupt()
    time.sleep(1)
    assert terminal.popen.poll() is None  # it waits: shards may have accepted something
    terminal.interrupt()
    code, err = terminal.end(10)
    assert code == 130, err
    assert "Traceback" not in err
    assert not terminal.family()


def test_ctrl_c_again_and_again_ends_a_job_whose_processes_do_not_answer(start: Start):
    terminal = start("train", "job.yaml", "--output", "out", "--workers", "2", "--shards", "1")
    stop_all_but_parent(terminal, 3)
    # end; do not wait for the workers; do not wait for the shard. On a busy machine two may fall into the same wait
    for _ in range(8):
        terminal.interrupt()
        time.sleep(1)
        if terminal.popen.poll() is not None:
            break
    code, err = terminal.end(10)
    assert code == 130, err
    assert "Traceback" not in err
    assert not terminal.family()
