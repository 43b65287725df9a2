"""Commands that start processes, and how they are ended from outside."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, NoReturn

import typer

# of commands that others start; 0: of no process
ParentPidOption = Annotated[
    int, typer.Option("--parent-pid", hidden=True, help="End when this process, our parent, ends.")
]


def is_ignored(number: int) -> bool:
    """Whether whoever started this process has it ignore a signal, as nohup does SIGHUP."""
    return signal.getsignal(number) == signal.SIG_IGN


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP (but for nohup's) unwind, so that no process is left behind."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    asked = [signal.SIGTERM] if is_ignored(signal.SIGHUP) else [signal.SIGTERM, signal.SIGHUP]
    previous = {number: signal.signal(number, end) for number in asked}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


_interrupts: list[int] = []  # each Ctrl-C since `note_interrupts`


def note_interrupts() -> None:
    """Have `check_interrupt` know of every Ctrl-C from here on, unless it is ignored or handled in another way."""
    _interrupts.clear()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def check_interrupt() -> None:
    """KeyboardInterrupt after a Ctrl-C that was raised in code of a library, and that this code did not pass on."""
    if _interrupts:
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    _interrupts.append(number)
    raise KeyboardInterrupt


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


_watched: set[int] = set()  # parents


def end_with_parent(parent_pid: int, end: Callable[[], object] = _terminate) -> None:
    """End this process as SIGTERM does, or by `end`, once its parent, asked twice a second, is gone. 0: it has none.

    The first call for a parent counts.
    """

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(0.5)
        end()

    if parent_pid and parent_pid not in _watched:
        _watched.add(parent_pid)
        threading.Thread(target=watch, name="parent", daemon=True).start()
