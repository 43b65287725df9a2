"""The time, threads and random numbers that waits, leases and retries go by; a simulation has its own."""

from __future__ import annotations

import os
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol


class ClockLock(AbstractContextManager[bool], Protocol):
    """A lock, as threading.Lock and RLock are."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it; without `blocking`, only if nobody has it, else within `timeout` seconds. Whether it was taken."""
        ...

    def release(self) -> None:
        """Release the lock, so that another thread can acquire it."""
        ...


class ClockEvent(Protocol):
    """Something that happens once, until it is cleared."""

    def is_set(self) -> bool:
        """Whether the event was set, and not cleared since."""
        ...

    def set(self) -> None:
        """Have it happen: whoever waits goes on."""
        ...

    def clear(self) -> None:
        """Clear the event: `wait` blocks again until it is set."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it, at most so many seconds; whether it has happened."""
        ...


class ClockThread(Protocol):
    """A thread that was started."""

    def is_alive(self) -> bool:
        """Whether the thread has not ended yet."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most so many seconds."""
        ...


class SystemClock:
    """Use the time, threads and random numbers of this machine; a simulation puts others in their place."""

    now = staticmethod(time.monotonic)  # seconds; only moves on
    since_1970 = staticmethod(time.time)  # seconds
    sleep = staticmethod(time.sleep)
    # not of the generator that a user's loop draws from, and may seed with one number on all workers
    uniform = staticmethod(random.SystemRandom().uniform)
    random_bits = staticmethod(secrets.randbits)  # that nobody can guess

    def lock(self) -> ClockLock:
        """A lock that its holder cannot take again."""
        return threading.Lock()

    def rlock(self) -> ClockLock:
        """A lock that its holder can take again."""
        return threading.RLock()

    def event(self) -> ClockEvent:
        """An event that has not happened."""
        return threading.Event()

    def queue(self) -> SimpleQueue[Any]:
        """An empty queue between threads."""
        return SimpleQueue()

    def spawn(self, name: str, work: Callable[[], None], *, nice: int = 0) -> ClockThread:
        """Run `work` in a thread, which ends with the process; with `nice` it leaves cores to other threads."""
        thread = threading.Thread(target=partial(_run_nicely, work, nice) if nice else work, name=name, daemon=True)
        thread.start()
        return thread


SYSTEM_CLOCK = SystemClock()


def _run_nicely(work: Callable[[], None], nice: int) -> None:
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
    work()
