"""How much memory this machine and its container have; shards, workers and the doctor ask the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
UNLIMITED = 1 << 60  # version 1 writes "no limit" as a number near 2^63


def usable_memory() -> int:
    """Bytes of memory that this process may use: the container's limit, or else the machine's memory."""
    return min(smallest_memory_limit() or physical_memory(), physical_memory())


def physical_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
