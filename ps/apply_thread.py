"""What touches a shard's tables, one request after the other: a thread, and the bounded queue in front of it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import Empty
from typing import Any, Generic, Protocol, TypeVar

from embershard.proto.clock import SYSTEM_CLOCK, SystemClock
from embershard.proto.errors import ClockAhead, LogStalled, ShardBusy, ShuttingDown
from embershard.proto.messages import PUT_BACK_SECONDS
from embershard.ps.monitoring.counters import Counters

T = TypeVar("T")

# Several of the largest messages, or about a second of apply work; the requests' own bound is for tiny ones. It is
# twice the members where that is more: each has a pull and a push under way at most.
QUEUE_BYTES = 256 * 2**20
QUEUE_REQUESTS = 1024

_MIN_RETRY_MS, _MAX_RETRY_MS = 5, 1000
_SMOOTHING = 0.1  # weight of the newest request in the mean duration
_TICK_SECONDS = 0.25  # between looks at the time, while nothing else happens
_MOST_QUICK = 32  # requests that one more has done before itself by its own thread
_QUICK_SECONDS = 0.001  # for which quick work waits for other quick work to end, before it is queued
# After a longer time between two looks, leases are extended by the rest of it: this process was stopped, perhaps with
# their requests in its sockets.
_STEP_SECONDS = 1.0

_CLOSED, _LOOK = object(), object()  # what the thread is told: that nothing follows; that there may be work

_log = logging.getLogger(__name__)


class Watched(Protocol):
    """The state that parked requests wait for, and the work that is due at a time."""

    @property
    def generation(self) -> int:
        """Grows with whatever may let a parked request be answered."""
        ...

    @property
    def num_members(self) -> int:
        """The workers that are members of the job."""
        ...

    def advance(self, now: float) -> None:
        """Every request that arrived before `now` has been handled."""
        ...

    def extend_leases(self, seconds: float) -> None:
        """Extend all leases by `seconds`, in which this process received nothing."""
        ...

    def when_may_leave(self, end: Callable[[], None], refuse: Callable[[LogStalled], None]) -> None:
        """Call `end` once the answer to the request that was handled last may leave: at once, or later, anywhere.

        It is `refuse` that is called where that takes as long as somebody needs to make room.
        """
        ...


@dataclass(slots=True)
class _Job(Generic[T]):
    """A request on its way to the tables."""

    work: Callable[[], T]
    num_bytes: int
    deadline: float  # after which nobody waits for it
    arrived: float
    is_quick: Callable[[], bool] | None = None  # asked once nothing else runs; None: it may take long
    future: Future[T] = field(default_factory=Future)
    is_held: bool = False  # its answer waits to be released, and its bytes count for that long

    @property
    def due(self) -> float:
        """When it is put back, if it is parked."""
        return self.deadline - min(PUT_BACK_SECONDS, (self.deadline - self.arrived) / 4)


class ApplyThread:
    """Runs work one after the other, in the order of its arrival. `submit` may be called from any thread.

    `run_now` is for quick work: where nothing runs and nothing long waits, the calling thread does it itself, and what
    quick work waits before it, which saves two switches of threads.

    Work whose deadline passed in the queue, or whose future was cancelled, is dropped before it starts. At least one
    job is taken, however large: the bounds say how much may wait.

    An answer is released when the state says so (`Watched.when_may_leave`), which may be after other work was done, and
    in another thread, or replaced by an error; `release` ends each. Bytes of work whose answer waits for that count as
    queued.

    Work that raises ClockAhead is parked: it is tried again when what it may wait for (`watch`) has moved, and fails
    with its error shortly before its deadline. Parked work is out of the queue, whose bounds hold for it apart: it
    never keeps out the work that it waits for. What does not fit fails with its error at once.
    """

    def __init__(
        self,
        *,
        max_bytes: int = QUEUE_BYTES,
        max_requests: int = QUEUE_REQUESTS,
        clock: SystemClock = SYSTEM_CLOCK,
        counters: Counters | None = None,
    ) -> None:
        if max_bytes < 1 or max_requests < 1:
            raise ValueError(f"the queue must hold at least 1 byte and 1 request, got {max_bytes} and {max_requests}")
        self._max_bytes = max_bytes
        self._max_requests = max_requests
        self._clock = clock
        self.counters = Counters() if counters is None else counters  # of the queue and the busy time: of the thread
        self._lock = clock.lock()  # of the sizes of the queue, never held while work runs
        self._working = clock.lock()  # held by the thread that touches the tables
        self._runs_long = False  # whether it may hold it for long
        self._waiting: deque[_Job[Any]] = deque()  # guarded by _lock
        self._signals = clock.queue()
        self._queued_bytes = 0
        self._queued_requests = 0
        self._held_bytes = 0  # of requests whose answers wait to be released
        self._mean_seconds = 0.001
        self._closed = False
        self.arrived = 0.0  # when the work that runs was submitted
        # from here on: of the thread that holds _working
        self._watched: Watched | None = None
        self._parked: list[_Job[Any]] = []
        self._parked_bytes = 0
        self._first_due = float("inf")
        self._seen_generation = 0
        self._looked = clock.now()
        self._thread = clock.spawn("apply", self._run)

    @property
    def queued_bytes(self) -> int:
        """Bytes of the requests accepted and not yet handled."""
        return self._queued_bytes + self._parked_bytes + self._held_bytes

    @property
    def idle_seconds(self) -> float:
        """Return the seconds since the thread last looked at its queue, as it always does unless a request hangs."""
        return 0.0 if self._closed else self._clock.now() - self._looked

    @property
    def _most_requests(self) -> int:
        """Requests that may be queued, and as many parked."""
        return max(self._max_requests, 0 if self._watched is None else 2 * self._watched.num_members)

    def watch(self, watched: Watched) -> None:
        """Try parked work again when this has moved, and let its time pass."""
        self._watched = watched

    def submit(
        self, work: Callable[[], T], num_bytes: int, deadline: float, is_quick: Callable[[], bool] | None = None
    ) -> Future[T]:
        """Queue work that holds `num_bytes`; ShardBusy where the queue is full, ShuttingDown once it is closed.

        Work that `is_quick` may be done by a thread that calls `run_now`.
        """
        job: _Job[T] = _Job(work, num_bytes, deadline, self._clock.now(), is_quick=is_quick)
        with self._lock:
            if self._closed:
                raise ShuttingDown()
            waiting = self._queued_bytes + self._held_bytes
            if (self._queued_requests or self._held_bytes) and (
                self._queued_requests >= self._most_requests or waiting + num_bytes > self._max_bytes
            ):
                self.counters.rejected["queue"] += 1
                raise ShardBusy(queued_bytes=waiting, retry_after_ms=self._retry_after_ms())
            self._queued_bytes += num_bytes
            self._queued_requests += 1
            self._waiting.append(job)
            self._signals.put(_LOOK)
        return job.future

    def run_now(
        self, work: Callable[[], T], num_bytes: int, deadline: float, is_quick: Callable[[], bool] = lambda: True
    ) -> Future[T] | None:
        """Do quick work in this thread and return its future; None where it is not quick, or other work comes first."""
        if self._runs_long or not self._working.acquire(timeout=_QUICK_SECONDS):
            return None
        try:
            if not self._run_quick() or not is_quick():
                return None
            now = self._now()  # only now: no lease has ended by this time that the work would have kept
            job: _Job[T] = _Job(work, num_bytes, deadline, now)
            parked = self._parked
            self._do(job, now)
            self.counters.queue.add(0.0)
            self._note_busy(self._clock.now() - now)
            if self._parked is not parked or (parked and self._generation != self._seen_generation):
                self._signals.put(_LOOK)
        finally:
            self._working.release()
        return job.future

    def _run_quick(self) -> bool:
        """Do the quick work that waits; False where other work waits, or much, or no more is taken."""
        for _ in range(_MOST_QUICK):
            with self._lock:
                job = self._waiting[0] if self._waiting else None
                if self._closed or job is None:
                    return not self._closed
            if job.is_quick is None or not job.is_quick():
                return False
            with self._lock:
                self._waiting.popleft()  # the same: who takes from it works, as we do
            self._run_waiting(job)
        return False

    def close(self) -> None:
        """Take nothing more; what was accepted is still done, but for what is parked."""
        with self._lock:
            if not self._closed:
                self._closed = self.counters.draining = True
                self._signals.put(_CLOSED)

    def join(self, timeout: float) -> bool:
        """Wait for what was accepted, at most `timeout` seconds; whether it is done."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _retry_after_ms(self) -> int:
        """About when half of the queue is done."""
        wait_ms = 1000 * self._mean_seconds * self._queued_requests / 2
        return int(min(max(wait_ms, _MIN_RETRY_MS), _MAX_RETRY_MS))

    def _run(self) -> None:
        while True:
            try:
                signal = self._signals.get(timeout=max(0.0, min(_TICK_SECONDS, self._first_due - self._clock.now())))
            except Empty:
                signal = None
            with self._working:
                if signal is _CLOSED:  # the signal of each accepted job came before
                    break
                with self._lock:
                    job = self._waiting.popleft() if self._waiting else None
                self._runs_long = job is None or job.is_quick is None or not job.is_quick()
                if job is not None:
                    self._run_waiting(job)
                elif signal is None:
                    self._pass_time(self._now())
                if self._parked:
                    self._runs_long = True
                    self._try_parked()
                self._runs_long = False
        for job in self._parked:
            self.release(job, None, ShuttingDown())

    def _run_waiting(self, job: _Job[Any]) -> None:
        started = self._now()
        self.counters.queue.add(started - job.arrived)
        self._do(job, started)
        with self._lock:
            self._note_busy(self._clock.now() - started)
            self._queued_bytes -= job.num_bytes
            self._queued_requests -= 1

    def _note_busy(self, seconds: float) -> None:
        """Count the time of a job."""
        self.counters.busy_seconds += seconds
        self._mean_seconds += _SMOOTHING * (seconds - self._mean_seconds)

    def _now(self) -> float:
        """The time."""
        now = self._clock.now()
        stopped = now - self._looked - _STEP_SECONDS
        self._looked = now
        if stopped > 0 and self._watched is not None:
            self._watched.extend_leases(stopped)
        return now

    def _pass_time(self, now: float) -> None:
        """The queue was empty at this time."""
        if self._watched is None:
            return
        try:
            self._watched.advance(now)
        except Exception:  # of an update that the end of a lease let happen: it has no caller
            _log.exception("while time passed")

    def _do(self, job: _Job[Any], now: float) -> None:
        if now > job.deadline:
            job.future.cancel()
        if not job.future.set_running_or_notify_cancel():
            return
        error = self._try(job)
        if error is None:
            return
        full = self._parked_bytes + job.num_bytes > self._max_bytes or len(self._parked) >= self._most_requests
        if self._parked and full:
            self._answer(job, None, error)
            return
        self._park([*self._parked, job])

    def _try(self, job: _Job[Any]) -> ClockAhead | None:
        """Do the work; the error of what cannot be done yet."""
        self.arrived = job.arrived
        try:
            result = job.work()
        except ClockAhead as error:
            return error
        except BaseException as error:  # whatever it is, it belongs to the caller, and the thread goes on
            self._answer(job, None, error)
        else:
            self._answer(job, result, None)
        return None

    def _answer(self, job: _Job[Any], result: Any, error: BaseException | None) -> None:
        """Release the answer of work that was done now, or see to it that it is released."""
        if self._watched is None:
            self.release(job, result, error)
            return
        self._watched.when_may_leave(partial(self.release, job, result, error), partial(self.release, job, None))
        if not job.future.done():
            with self._lock:
                if not job.future.done():
                    job.is_held = True
                    self._held_bytes += job.num_bytes

    def release(self, job: _Job[Any], result: Any, error: BaseException | None) -> None:
        """End the work: its future has the result, or the error; called once for each, by any thread."""
        if error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(result)
        with self._lock:  # after its future is done: see _answer
            if job.is_held:
                self._held_bytes -= job.num_bytes

    def _park(self, jobs: list[_Job[Any]]) -> None:
        self._parked = jobs
        self._parked_bytes = sum(job.num_bytes for job in jobs)
        self._first_due = min((job.due for job in jobs), default=float("inf"))

    def _try_parked(self) -> None:
        """Answer the parked work that may be answered now, and put back what is due."""
        now = self._clock.now()
        if self._generation == self._seen_generation and now < self._first_due:
            return
        while self._generation != self._seen_generation or now >= self._first_due:
            self._seen_generation = self._generation
            left = []
            for job in self._parked:
                error = self._try(job)
                if error is not None and now >= job.due:
                    self._answer(job, None, error)
                elif error is not None:
                    left.append(job)
            self._park(left)
        self.counters.busy_seconds += self._clock.now() - now

    @property
    def _generation(self) -> int:
        return 0 if self._watched is None else self._watched.generation
