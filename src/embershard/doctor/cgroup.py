"""The limits of a container on cores and memory: control groups of either version, as Linux shows them in files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60  # version 1 writes "no limit" as a number near 2^63


def usable_cores() -> float:
    """Cores that this process may keep busy: its affinity, and the container's share of the time."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(float(own), cpu_quota() or float(own))


def cpu_quota() -> float | None:
    """Cores' worth of time that the container may use; None without a limit."""
    quotas = []
    for folder in _folders("cpu"):
        words = _read(folder / "cpu.max").split() or [
            _read(folder / "cpu.cfs_quota_us"),
            _read(folder / "cpu.cfs_period_us"),
        ]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def memory_limit() -> tuple[int, int] | None:
    """Bytes that the container may use, and those of them that are left; None without a limit."""
    limits = []
    for folder in _folders("memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if not (limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED):
            continue
        limits.append((int(limit), max(0, int(limit) - int(used) + _cache(folder))))
    return min(limits, key=lambda pair: pair[1], default=None)


def smallest_memory_limit() -> int | None:
    """Bytes that the tightest of the groups allows; None without a limit."""
    texts = [_read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes") for folder in _folders("memory")]
    return min((int(text) for text in texts if text.isdigit() and int(text) < _UNLIMITED), default=None)


def _cache(folder: Path) -> int:
    """Bytes of files that the system drops when memory is wanted."""
    lines = [line.split() for line in _read(folder / "memory.stat").splitlines()]
    values = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
    return values.get("total_inactive_file", values.get("inactive_file", 0))


def _folders(controller: str) -> Iterator[Path]:
    """The groups that this process is in, from its own to the outermost: the limits of all of them hold."""
    for line in _read(MEMBERSHIP).splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            top = CGROUPS
        elif controller in controllers.split(","):
            top = CGROUPS / controller
        else:
            continue
        inner = top / path.lstrip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(top))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
