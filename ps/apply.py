"""The one thread that touches a shard's tables, and the bounded queue in front of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from embershard.proto.errors import ShardBusy, ShuttingDown

T = TypeVar("T")

# Several of the largest messages, or about a second of apply work; the requests' own bound is for tiny ones.
QUEUE_BYTES = 256 * 2**20
QUEUE_REQUESTS = 1024

_MIN_RETRY_MS, _MAX_RETRY_MS = 5, 1000
_SMOOTHING = 0.1  # weight of the newest request in the mean duration


@dataclass(slots=True)
class _Job(Generic[T]):
    """A request on its way to the tables."""

    work: Callable[[], T]
    num_bytes: int
    deadline: float  # time.monotonic() after which nobody waits for it
    future: Future[T]


class ApplyThread:
    """Runs work one after the other, in the order of its arrival. `submit` may be called from any thread.

    Work whose deadline passed in the queue, or whose future was cancelled, is dropped before it starts. At least one
    job is taken, however large: the bounds say how much may wait.
    """

    def __init__(self, *, max_bytes: int = QUEUE_BYTES, max_requests: int = QUEUE_REQUESTS) -> None:
        if max_bytes < 1 or max_requests < 1:
            raise ValueError(f"the queue must hold at least 1 byte and 1 request, got {max_bytes} and {max_requests}")
        self._max_bytes = max_bytes
        self._max_requests = max_requests
        self._lock = threading.Lock()  # of the counters, never held while work runs
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._queued_bytes = 0
        self._queued_requests = 0
        self._mean_seconds = 0.001
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="apply", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        """Bytes of the requests accepted and not yet handled."""
        return self._queued_bytes

    def submit(self, work: Callable[[], T], num_bytes: int, deadline: float) -> Future[T]:
        """Queue work that holds `num_bytes`; ShardBusy where the queue is full, ShuttingDown once it is closed."""
        job: _Job[T] = _Job(work, num_bytes, deadline, Future())
        with self._lock:
            if self._closed:
                raise ShuttingDown()
            if self._queued_requests and (
                self._queued_requests >= self._max_requests or self._queued_bytes + num_bytes > self._max_bytes
            ):
                raise ShardBusy(queued_bytes=self._queued_bytes, retry_after_ms=self._retry_after_ms())
            self._queued_bytes += num_bytes
            self._queued_requests += 1
            self._jobs.put(job)
        return job.future

    def close(self) -> None:
        """Take nothing more; what was accepted is still done."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)

    def join(self, timeout: float) -> bool:
        """Wait for what was accepted, at most `timeout` seconds; whether it is done."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _retry_after_ms(self) -> int:
        """About when half of the queue is done."""
        wait_ms = 1000 * self._mean_seconds * self._queued_requests / 2
        return int(min(max(wait_ms, _MIN_RETRY_MS), _MAX_RETRY_MS))

    def _run(self) -> None:
        while job := self._jobs.get():
            started = time.monotonic()
            self._do(job, started)
            with self._lock:
                self._queued_bytes -= job.num_bytes
                self._queued_requests -= 1
                self._mean_seconds += _SMOOTHING * (time.monotonic() - started - self._mean_seconds)

    def _do(self, job: _Job[Any], now: float) -> None:
        if now > job.deadline:
            job.future.cancel()
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            job.future.set_result(job.work())
        except BaseException as error:  # whatever it is, it belongs to the caller, and the thread goes on
            job.future.set_exception(error)
