"""The `embershard` command as a process of its own, what it starts, and the end of all of it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from harness import warm_start
from harness.eventually import PATIENCE, eventually

EMBERSHARD = (sys.executable, "-m", "embershard.cli")


def run_command(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """The command, run to its end."""
    return subprocess.run([*EMBERSHARD, *words], capture_output=True, text=True, timeout=PATIENCE, **options)


def said(process: subprocess.Popen[str], code: int = 0) -> str:
    """What a command has printed by its end, which must have this exit code."""
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, text
    assert "Traceback" not in text
    return text


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """Stop a child of this process (SIGSTOP) for as long as the block takes."""
    os.kill(pid, signal.SIGSTOP)
    try:
        # its threads run on until the signal reaches them: on a busy machine long enough to answer
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def descendants(pid: int) -> list[psutil.Process]:
    """All that a process and its children have started and that lives, but for what the tests' warm starts need."""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if lives(child) and warm_start.NAME not in words(child)]


def words(process: psutil.Process) -> list[str]:
    """A process's command line; empty where it has ended meanwhile."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def marked(mark: str) -> list[psutil.Process]:
    """The living processes with a mark in their environment or among their words, whoever their parent is now."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if lives(process) and mark in " ".join([*process.cmdline(), *process.environ().values()]):
                found.append(process)
    return found


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_end(processes: list[psutil.Process]) -> bool:
    """Soon: a loader ends when it sees that its worker has."""
    return eventually(lambda: not any(map(lives, processes)))
