"""How long a shard spends on one kind of work, request by request."""

from __future__ import annotations

import time
from types import TracebackType


class Stopwatch:
    """Adds up the time of every `with stopwatch:` in `seconds`; its owner resets it. For one thread, not reentrant."""

    def __init__(self) -> None:
        self.seconds = self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += time.perf_counter() - self._start
