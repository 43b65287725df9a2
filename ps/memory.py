"""The memory that the tables of a shard may take, and who has how much of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

from embershard.proto.errors import TableFull

DEFAULT_SHARE = 0.8  # of the memory that there is; the rest is for messages, and for the process itself
CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
UNLIMITED = 1 << 60  # version 1 writes "no limit" as a number near 2^63


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


def usable_memory() -> int:
    """Bytes of memory that this process may use: the container's limit, or else the machine's memory."""
    return min(smallest_memory_limit() or physical_memory(), physical_memory())


def physical_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def resident_memory() -> int:
    """Bytes of memory that this process has; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def smallest_memory_limit() -> int | None:
    """Bytes that the tightest of the container's groups allows; None without a limit."""
    texts = [read(group / "memory.max") or read(group / "memory.limit_in_bytes") for group in cgroups("memory")]
    return min((int(text) for text in texts if text.isdigit() and int(text) < UNLIMITED), default=None)


def cgroups(controller: str) -> Iterator[Path]:
    """Folders of the control groups that this process is in, from its own outwards: the limits of all of them hold."""
    for line in read(MEMBERSHIP).splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            top = CGROUPS
        elif controller in controllers.split(","):
            top = CGROUPS / controller
        else:
            continue
        inner = top / path.lstrip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(top))


def read(file: Path) -> str:
    """The text of a small file of the system; empty where there is none."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
