"""What one principal uses of a shard, held against its quotas."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from embershard.proto.errors import QuotaExceeded
from embershard.proto.messages import Load, Pull, Push, Request
from embershard.ps.security.access_file import Quotas

_BURST_SECONDS = 10.0  # of its rate that a principal may use at once
_RETRY_MS = 100


class Usage:
    """What a principal uses now. Rows are counted on the apply thread; the rest by any thread."""

    def __init__(self, who: str, quotas: Quotas, clock: Callable[[], float] = time.monotonic) -> None:
        self._who, self._quotas, self._clock = who, quotas, clock
        self._lock = threading.Lock()  # of connections and bytes
        self._connections = self._bytes = 0
        self._rows = _BURST_SECONDS * (quotas.rows_per_second or 0)  # that it may have at once
        self._at = clock()

    @property
    def is_limited(self) -> bool:
        """Whether there is anything to count for each request."""
        return self._quotas.rows_per_second is not None or self._quotas.bytes_in_flight is not None

    def connect(self, *, is_new: bool = True) -> None:
        """Count a connection; QuotaExceeded where it is new, and one too many."""
        with self._lock:
            limit = self._quotas.connections
            if is_new and limit is not None and self._connections >= limit:
                raise self._exceeded("connections", limit, self._connections + 1)
            self._connections += 1

    def disconnect(self) -> None:
        """A connection that was counted has ended."""
        with self._lock:
            self._connections -= 1

    def take_bytes(self, num_bytes: int) -> None:
        """Count the bytes of a request until `give_bytes`; QuotaExceeded beside others that use what there is."""
        with self._lock:
            limit = self._quotas.bytes_in_flight
            if limit is not None and self._bytes and self._bytes + num_bytes > limit:
                raise self._exceeded("bytes in flight", limit, self._bytes + num_bytes)
            self._bytes += num_bytes

    def give_bytes(self, num_bytes: int) -> None:
        """Count the bytes of a request no longer, as it is answered."""
        with self._lock:
            self._bytes -= num_bytes

    def take_rows(self, request: Request) -> int:
        """Count the rows of a request; how many. QuotaExceeded where they come too soon.

        A single request of more rows than fit is let through once nothing else was for long enough.
        """
        rate = self._quotas.rows_per_second
        rows = num_rows(request) if rate is not None else 0
        if not rows or rate is None:
            return 0
        now = self._clock()
        most = _BURST_SECONDS * rate
        self._rows, self._at = min(most, self._rows + (now - self._at) * rate), now
        missing = min(rows, most) - self._rows
        if missing > 0:
            seconds = missing / rate if rate else _BURST_SECONDS
            raise self._exceeded("rows a second", rate, rows, max(_RETRY_MS, int(1000 * seconds)))
        self._rows -= rows
        return rows

    def give_rows(self, rows: int) -> None:
        """A request was put back, and will come again."""
        self._rows += rows

    def _exceeded(self, what: str, limit: int, would: int, retry_after_ms: int = _RETRY_MS) -> QuotaExceeded:
        return QuotaExceeded(who=self._who, what=what, limit=limit, would=would, retry_after_ms=retry_after_ms)


def num_rows(request: Request) -> int:
    """The rows that a request names by their ids; a push that names those of a pull has none."""
    match request:
        case Pull() | Push():
            return sum(len(part.ids) for part in request.tables)
        case Load():
            return len(request.ids)
    return 0
