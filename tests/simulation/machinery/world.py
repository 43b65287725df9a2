"""One thread's worth of machines: processes whose threads are greenlets, and a time that moves from event to event.

A greenlet runs until it waits, so nothing is concurrent but what waits. All that happens comes from the numbers of one
seed; `trace` is a checksum of it.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from queue import Empty
from typing import Any

from greenlet import greenlet

from embershard.proto.clock import SystemClock

BIRTH = 1_700_000_000.0  # seconds since 1970 at which a simulation begins


class ProcessEnded(BaseException):
    """Ends a greenlet whose process is gone."""


class Wrong(Exception):
    """The package broke a promise."""


class World:
    """The time, and what is due when."""

    def __init__(self, seed: object) -> None:
        self.random = random.Random(str(seed))
        self.now = 0.0
        self.wrong: list[str] = []
        self._due: list[tuple[float, int, Process | None, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._trace = hashlib.blake2b(digest_size=8)
        self.lines: list[str] | None = None  # of the trace, for people
        self.processes: list[Process] = []
        self.covered: Counter[str] = Counter()  # what happened how often

    def at(self, seconds: float, call: Callable[[], None], process: Process | None = None) -> None:
        """Call after so many seconds, if this process lives then; once it runs, if it is stopped."""
        heapq.heappush(self._due, (self.now + max(0.0, seconds), next(self._numbers), process, call))

    def run(self, until: Callable[[], bool], limit: float) -> bool:
        """Let time pass until then, at most to `limit`; whether it came."""
        while not until():
            if self.wrong or not self._due or self._due[0][0] > limit:
                return False
            self.now, _, process, call = heapq.heappop(self._due)
            if process is None or process.runs:
                call()
            elif process.is_stopped and not process.is_dead:
                process.held.append(call)
        return True

    def note(self, *what: object) -> None:
        """Something happened: a part of the trace."""
        line = f"{self.now:.6f} " + " ".join(map(str, what))
        self._trace.update(line.encode() + b"\n")
        if self.lines is not None:
            self.lines.append(line)

    def fail(self, what: str) -> None:
        """A promise was broken; the run ends."""
        self.note("WRONG", what)
        self.wrong.append(f"at {self.now:.3f} s: {what}")

    @property
    def trace(self) -> str:
        """A checksum of all that happened."""
        return self._trace.hexdigest()

    def end(self) -> None:
        """End all greenlets, so that none is ended later, within another simulation."""
        for process in self.processes:
            process.is_dead = True
        for process in self.processes:
            for thread in process.greenlets:
                for _ in range(100):
                    if thread.dead:
                        break
                    if not thread:  # it never began
                        break
                    thread.throw(ProcessEnded)


class Process:
    """A process: its greenlets, its clock, which drifts, and its random numbers."""

    def __init__(self, world: World, name: str, *, drift: float = 0.0) -> None:
        self.world, self.name = world, name
        self.rate = 1.0 + drift
        self.is_dead = self.is_stopped = False
        self.held: list[Callable[[], None]] = []  # what came due while it was stopped
        self.greenlets: list[greenlet] = []
        self.on_end: list[Callable[[], None]] = []
        self.clock = SimulatedClock(self)
        world.processes.append(self)

    @property
    def runs(self) -> bool:
        return not self.is_dead and not self.is_stopped

    def spawn(self, work: Callable[[], None]) -> greenlet:
        """Begin a thread."""

        def run() -> None:
            try:
                work()
            except ProcessEnded:
                pass

        thread = greenlet(run)
        self.greenlets.append(thread)
        self.world.at(self.jitter(), lambda: self.switch(thread), self)
        return thread

    def switch(self, thread: greenlet) -> None:
        """Have a thread go on, until it waits or ends. In the scheduler's greenlet only."""
        thread.parent = greenlet.getcurrent()
        thread.switch()

    def kill(self) -> None:
        """End it: none of its threads goes on."""
        self.is_dead = True
        for call in self.on_end:
            call()

    def stop(self) -> None:
        """SIGSTOP."""
        self.is_stopped = True

    def go_on(self) -> None:
        """SIGCONT."""
        self.is_stopped = False
        held, self.held = self.held, []
        for call in held:
            self.world.at(0.0, call, self)

    def jitter(self) -> float:
        """Seconds until a thread that may go on does."""
        random = self.world.random
        return random.random() * (2e-5 if random.random() < 0.9 else 2e-3)


class _Waiter:
    """A thread that waits, for at most so many seconds of its process's clock."""

    def __init__(self, process: Process, seconds: float | None) -> None:
        self.process, self.is_woken, self._is_over = process, False, False
        self.thread = greenlet.getcurrent()
        assert self.thread.parent is not None, "the scheduler itself cannot wait"
        if seconds is not None:  # time moves on meanwhile, as that of a machine does, also for a rest of 1e-16 s
            process.world.at(max(seconds, 1e-9) / process.rate, self._time_out, process)

    def wait(self) -> bool:
        """Whether it was woken, and not timed out."""
        self.thread.parent.switch()
        if self.process.is_dead:
            raise ProcessEnded
        return self.is_woken

    def wake(self) -> bool:
        """Have it go on; whether it still waits."""
        if self._is_over:
            return False
        self._is_over = self.is_woken = True
        self.process.world.at(self.process.jitter(), lambda: self.process.switch(self.thread), self.process)
        return True

    def _time_out(self) -> None:
        if not self._is_over:
            self._is_over = True
            self.process.switch(self.thread)


class SimulatedClock(SystemClock):
    """That of a process."""

    def __init__(self, process: Process) -> None:
        self._process, self._world = process, process.world
        self._began = self._world.now
        self._random = random.Random(self._world.random.getrandbits(64))

    def now(self) -> float:  # type: ignore[override]
        return 1000.0 + (self._world.now - self._began) * self._process.rate

    def since_1970(self) -> float:  # type: ignore[override]
        return BIRTH + self._world.now

    def sleep(self, seconds: float) -> None:  # type: ignore[override]
        if self._process.is_dead:
            raise ProcessEnded
        _Waiter(self._process, seconds).wait()

    def uniform(self, low: float, high: float) -> float:  # type: ignore[override]
        return self._random.uniform(low, high)

    def random_bits(self, bits: int) -> int:  # type: ignore[override]
        return self._random.getrandbits(bits)

    def lock(self) -> _Lock:
        return _Lock(self._process, again=False)

    def rlock(self) -> _Lock:
        return _Lock(self._process, again=True)

    def event(self) -> _Event:
        return _Event(self._process)

    def queue(self) -> Any:
        return _Queue(self._process)

    def spawn(self, name: str, work: Callable[[], None], *, nice: int = 0) -> _Thread:
        return _Thread(self._process, work)


class _Lock:
    def __init__(self, process: Process, *, again: bool) -> None:
        self._process, self._again = process, again
        self._owner: greenlet | None = None
        self._count = 0
        self._waiters: deque[_Waiter] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me, now = greenlet.getcurrent(), self._process.clock.now
        if self._owner is me and self._again:
            self._count += 1
            return True
        over = now() + timeout
        while self._owner is not None:
            left = None if timeout < 0 else over - now()
            if not blocking or (left is not None and left <= 0):
                return False
            waiter = _Waiter(self._process, left)
            self._waiters.append(waiter)
            waiter.wait()
        self._owner, self._count = me, 1
        return True

    def release(self) -> None:
        self._count -= 1
        if not self._count:
            self._owner = None
            while self._waiters and not self._waiters.popleft().wake():
                pass

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class _Event:
    def __init__(self, process: Process) -> None:
        self._process, self._is_set = process, False
        self._waiters: list[_Waiter] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.wake()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if self._process.is_dead:
            raise ProcessEnded
        if not self._is_set:
            waiter = _Waiter(self._process, timeout)
            self._waiters.append(waiter)
            waiter.wait()
        return self._is_set


class _Queue:
    def __init__(self, process: Process) -> None:
        self._process = process
        self._items: deque[Any] = deque()
        self._waiters: deque[_Waiter] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        while self._waiters and not self._waiters.popleft().wake():
            pass

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if self._process.is_dead:
            raise ProcessEnded
        if not self._items and block:
            waiter = _Waiter(self._process, timeout)
            self._waiters.append(waiter)
            waiter.wait()
        if not self._items:
            raise Empty
        return self._items.popleft()


class _Thread:
    def __init__(self, process: Process, work: Callable[[], None]) -> None:
        self._ended = _Event(process)
        self._thread = process.spawn(lambda: (work(), self._ended.set()))

    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)
