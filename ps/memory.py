"""The memory that the tables of a shard may take, and who has how much of it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from embershard.proto.errors import TableFull
from embershard.proto.monitoring.memory import usable_memory

DEFAULT_SHARE = 0.8  # of the memory that there is; the rest is for messages, and for the process itself


class MemoryBudget:
    """One budget for all tables of a shard: rows, index, copies for a snapshot, updates that wait for their clock.

    `limit` is in bytes, by default 80 % of the container's limit or else of the machine. Several threads may use it.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = int(DEFAULT_SHARE * usable_memory()) if limit is None else limit
        self.used = 0
        self._lock = threading.Lock()

    @property
    def left(self) -> int:
        """Bytes that may still be taken."""
        return max(0, self.limit - self.used)

    def check(self, table: str, asked: int) -> None:
        """TableFull where `table` asks for more bytes than are left."""
        if asked > self.left:
            raise TableFull(table=table, used_bytes=self.used, budget_bytes=self.limit, asked_bytes=asked)

    def add(self, nbytes: int) -> None:
        """Count bytes that were taken, or, below zero, given back."""
        with self._lock:
            self.used += nbytes


class Charge:
    """The bytes of a budget that one owner has; they are given back with it."""

    def __init__(self, budget: MemoryBudget) -> None:
        self.nbytes = 0
        self._budget = budget

    def set(self, nbytes: int) -> None:
        """Have so many bytes now; whether they are left is checked before they are taken."""
        if nbytes != self.nbytes:
            self._budget.add(nbytes - self.nbytes)
            self.nbytes = nbytes

    def __del__(self) -> None:
        self.set(0)


def resident_memory() -> int:
    """Bytes of memory that this process has; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
