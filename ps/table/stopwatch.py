"""How long a shard spends on one kind of work, request by request."""

from __future__ import annotations

import time
from types import TracebackType


class Stopwatch:
    """Adds up the time of every `with stopwatch:`, until somebody takes it. Not reentrant, and for one thread."""

    def __init__(self) -> None:
        self._seconds = self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._seconds += time.perf_counter() - self._start

    def restart(self) -> None:
        """Forget what nobody took."""
        self._seconds = 0.0

    def take(self) -> float:
        """Seconds since the last time that they were taken."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
