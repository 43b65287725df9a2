"""Ctrl-C at any moment, once or again and again: exit code 130, no traceback, no process left behind.

Ctrl-C while training is in test_train_command.py.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import embershard
from harness.eventually import PATIENCE, eventually
from harness.processes import EMBERSHARD, marked, words

pytestmark = [pytest.mark.integration, pytest.mark.cold_start, pytest.mark.timeout(600)]

JOB = """\
model: {name: lr}
data: {reader: clicks, eval_samples: 1000}
embedding: {optimizer: {name: sgd, lr: 0.1}}
train: {batch_size: 64, samples: 1_000_000_000}
"""
TRAIN = ("train", "job.yaml", "--output", "out", "--shards", "1")
UP = ("up", "--shards", "2", "--base-port", "0")
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


class Terminal:
    """A command as a terminal runs it: in a group of its own, which Ctrl-C reaches as a whole."""

    def __init__(self, line, cwd):
        self.mark = str(cwd)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        env = {**os.environ, "EMBERSHARD_TEST_RUN": self.mark}
        self.popen = subprocess.Popen(line, cwd=cwd, env=env, start_new_session=True, **pipes)

    def interrupt(self, *, group=True):
        """Ctrl-C; or, not to the whole group, what another program sends."""
        if self.popen.poll() is None:
            (os.killpg if group else os.kill)(self.popen.pid, signal.SIGINT)

    def ends(self):
        """It must end as interrupted, without waiting for its processes and without words about defects."""
        _, err = self.popen.communicate(timeout=PATIENCE)
        assert self.popen.returncode == 130, err
        assert "Traceback" not in err
        assert "did not end within" not in err
        assert eventually(lambda: not marked(self.mark))  # one that was just born sees soon that its parent is gone

    def started(self, count):
        """So many processes that the command started, once they are there."""
        found = []

        def all_there():
            assert self.popen.poll() is None
            # by their words: one that is still a copy of its parent would hold the parent up
            found[:] = [process for process in marked(self.mark) if "--parent-pid" in words(process)]
            return len(found) >= count

        assert eventually(all_there)
        return found


def test_little_is_imported_before_an_interrupt_is_caught():
    line = "import sys; import embershard.cli; sys.exit('typing' in sys.modules)"
    where = {**os.environ, "PYTHONPATH": str(Path(embershard.__file__).parents[1])}  # -S leaves installed packages out
    assert subprocess.run([sys.executable, "-S", "-c", line], env=where, check=False).returncode == 0


@pytest.fixture
def start(tmp_path):
    """Starts `embershard` with some words, or any other line; nothing outlives the test."""
    (tmp_path / "job.yaml").write_text(JOB)
    started = []

    def begin(*words, program=""):
        line = [sys.executable, "-c", program] if program else [*EMBERSHARD, *words]
        started.append(Terminal(line, tmp_path))
        return started[-1]

    yield begin
    for process in marked(str(tmp_path)):
        process.kill()
    for terminal in started:
        terminal.popen.communicate()


def test_ctrl_c_during_the_imports_shows_no_traceback(start):
    terminal = start(program=DURING_IMPORTS)
    assert terminal.popen.communicate(timeout=PATIENCE) == ("", "")
    assert terminal.popen.returncode == 130


@pytest.mark.parametrize(
    ("line", "count", "group"),
    [(TRAIN, 0, True), (TRAIN, 1, False), (TRAIN, 2, True), (UP, 1, True)],
    ids=["at once", "a shard, sent to the parent alone", "a worker", "a shard of up"],
)
def test_ctrl_c_while_a_command_starts_leaves_nothing_behind(start, tmp_path, line, count, group):
    terminal = start(*line)
    assert line is UP or eventually((tmp_path / "out").exists)  # the job was read, and comes next
    terminal.started(count)
    terminal.interrupt(group=group)
    terminal.ends()


def suspend(processes):
    """Pause processes, so that they cannot end when they are asked to."""
    for process in processes:
        process.suspend()
    # a busy machine takes its time; what is sent before is still delivered
    assert eventually(lambda: all(process.status() == psutil.STATUS_STOPPED for process in processes))


def asked_to_end(process):
    """Whether SIGTERM waits for it."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (pending,) = (line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd:"))
    return bool(int(pending, 16) & 1 << (signal.SIGTERM - 1))


def test_a_second_ctrl_c_does_not_wait_for_shards_and_leaves_none(start):
    terminal = start(*UP)
    assert any("Ctrl-C ends them" in line for line in terminal.popen.stdout)
    shards = terminal.started(2)
    suspend(shards)
    terminal.interrupt()
    assert eventually(lambda: all(map(asked_to_end, shards)))
    time.sleep(0.5)
    assert terminal.popen.poll() is None  # it waits: shards may have accepted something
    terminal.interrupt()
    terminal.ends()


def imports_torch(process):
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()


def test_ctrl_c_again_and_again_ends_a_job_whose_processes_do_not_answer(start):
    terminal = start(*TRAIN, "--workers", "2")
    shard, *workers = sorted(terminal.started(3), key=lambda process: "worker" in words(process))
    assert eventually(lambda: all(map(imports_torch, workers)))  # the parent knows them all by now
    suspend([shard, *workers])
    terminal.interrupt()
    assert eventually(lambda: all(map(asked_to_end, workers)))
    terminal.interrupt()  # do not wait for the workers
    assert eventually(lambda: asked_to_end(shard))
    terminal.interrupt()  # nor for the shard
    terminal.ends()
