"""Processes that lead a session of their own, and the end of all that runs in it.

A user's module may start processes, which outlive the one that imported it. They are in its session, unless they began
one of their own. A session is ended while its leader, alive or not yet waited for, keeps its number from being given to
another process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_ROUNDS = 20  # in which all that a session's processes start meanwhile is found
_POLL_SECONDS = 0.05


def start_each(starts: Iterable[Callable[[], object]]) -> None:
    """Call functions that each start a process and record it. After an interrupt no process is left unrecorded.

    They run in another thread: Python raises KeyboardInterrupt in the main thread alone, and this waits for
    the function that an interrupt meets.
    """
    with ThreadPoolExecutor(1) as starter:
        starter.submit(int).result()  # an interrupt that meets the thread's own start would not wait for it
        for start in starts:
            starter.submit(start).result()


def wait_for_end(process: subprocess.Popen[Any]) -> int:
    """Wait for a session's leader, without limit, and end all that it left in its session; its exit code."""
    if hasattr(os, "waitid"):
        with contextlib.suppress(ChildProcessError):  # another thread waited for it, and ended the rest
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            _kill(process.pid)
    return process.wait()


def poll(process: subprocess.Popen[Any]) -> int | None:
    """As `process.poll()` of a session's leader; where it has ended, all that it left in its session is ended first."""
    if process.returncode is None and has_ended(process):
        _kill(process.pid)
    return process.poll()


def has_ended(process: subprocess.Popen[Any]) -> bool:
    """Whether a child has ended; it is not waited for, and keeps its number."""
    if process.returncode is not None:
        return True
    if not hasattr(os, "waitid"):  # macOS, until Python 3.13
        return process.poll() is not None
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # another thread waits for it, too
        return True


def wait(process: subprocess.Popen[Any], seconds: float) -> bool:
    """Wait for a session's leader; whether it ended in time, and with it its session."""
    end = time.monotonic() + seconds
    while poll(process) is None:
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def kill(process: subprocess.Popen[Any]) -> None:
    """End a session's leader and all that is in its session, at once."""
    if process.returncode is None:
        process.kill()
        _kill(process.pid)
    process.wait()


def kill_own() -> None:
    """End this process, and all that is in its session where it leads one."""
    if os.getsid(0) == os.getpid():
        _kill_others(os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)


def members(leader: int) -> list[int]:
    """The processes of a session that still run, but for its leader; empty where the system does not tell."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = entry.read_text(errors="replace").rpartition(")")[2].split()[:4]
            if int(session) == leader and state not in "ZX" and int(entry.parent.name) != leader:
                found.append(int(entry.parent.name))
    return found


def _kill(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM of a group that has ended
        os.killpg(leader, signal.SIGKILL)
    _kill_others(leader)


def _kill_others(leader: int) -> None:
    """Kill the session's processes, those of other groups and those that they start meanwhile too."""
    for _ in range(_ROUNDS):
        found = members(leader)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.001)
