"""Checks of this machine: its clock, and its limits on memory, address space and open files."""

from __future__ import annotations

import os
import resource
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil

from embershard.doctor.case import Case
from embershard.doctor.check import Finding, check, fail, ok, size, warn
from embershard.proto.monitoring.memory import UNLIMITED, cgroups, physical_memory, read

PROC = Path("/proc")
SYS = Path("/sys")
DEV_SHM = Path("/dev/shm")

_LAST_SANE_YEAR = 2100
_FILES_OF_A_PROCESS = 256  # libraries, logs, pipes
_FILES_PER_PEER = 4  # a worker's stream, and its gRPC connection with both ends of the pipe behind it
_LITTLE_MEMORY = 2**30  # torch alone takes half of it
_NO_MEMORY = 2**28
_SMALL_DEV_SHM = 2**28


@check(
    "system time",
    asks="whether the system time is plausible: a worker's start time is its worker epoch, by which it replaces an "
    "earlier process",
    remedy="set the system time (timedatectl set-ntp true): a worker that restarts with an earlier time is refused as "
    "an old one",
)
def system_time(_: Case) -> Finding:
    """Compare the system time with the time of the installation."""
    now = datetime.now(UTC)
    installed = datetime.fromtimestamp(Path(__file__).stat().st_mtime, UTC)
    if (installed - now).total_seconds() > 86_400:
        return fail(f"it is {now:%Y-%m-%d %H:%M} UTC, before embershard was installed ({installed:%Y-%m-%d})")
    if now.year >= _LAST_SANE_YEAR:
        return fail(f"it is the year {now.year}")
    return ok(f"{now:%Y-%m-%d %H:%M:%S} UTC, {time.tzname[0]}")


@check(
    "open files",
    asks="whether a process may open as many files as it needs for all its peers",
    remedy="raise the limit (ulimit -n 65536, LimitNOFILE= in systemd, nofile in /etc/security/limits.conf)",
)
def open_files(case: Case) -> Finding:
    """RLIMIT_NOFILE against the connections of a shard to all workers, or of a worker to all shards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_OF_A_PROCESS + _FILES_PER_PEER * max(case.shards, case.workers)
    if soft == resource.RLIM_INFINITY:
        return ok("no limit")
    peers = f"{case.shards} shard{'s' * (case.shards != 1)} and {case.workers} worker{'s' * (case.workers != 1)}"
    text = f"{soft} (at most {hard}); about {needed} are needed for {peers}"
    return ok(text) if soft >= needed else fail(text)


@check(
    "memory",
    asks="whether memory is free, in addition to the tables of the shards on this machine",
    remedy="start the shards on more machines, or end other programs that use the memory",
)
def memory(case: Case) -> Finding:
    """Free memory against what the tables here hold: they grow, and a snapshot is written beside them."""
    free, limit = psutil.virtual_memory().available, memory_limit()
    free = min(free, limit[1]) if limit else free
    tables = sum(table.bytes for probe, status in case.statuses if probe.here for table in status.tables)
    text = f"{size(free)} free" + (f", tables here hold {size(tables)}" if tables else "")
    if free < _NO_MEMORY:
        return fail(text)
    return warn(text) if free < max(_LITTLE_MEMORY, tables // 5) else ok(text)


@check(
    "container",
    asks="whether a container's limits leave this process the cores and the memory that it sees",
    remedy="set train.threads to the cores of the limit, and give the container more memory than its tables take",
)
def container(_: Case) -> Finding | None:
    """Limits of control groups, which os.cpu_count and free memory do not show."""
    quota, limit = cpu_quota(), memory_limit()
    if quota is None and limit is None:
        return ok("no limit")
    cores = os.cpu_count() or 1
    parts = [f"{quota:.1f} of {cores} cores"] if quota is not None else []
    parts += [f"{size(limit[0])} of memory, {size(limit[1])} left"] if limit is not None else []
    tight = (quota is not None and quota < cores) or (limit is not None and limit[1] < _LITTLE_MEMORY)
    return (warn if tight else ok)(", ".join(parts))


@check(
    "address space",
    asks="whether the system lets a shard reserve room for its tables to grow into",
    remedy="lift `ulimit -v`, and set vm.overcommit_memory to 0 or 1 (sysctl)",
)
def address_space(_: Case) -> Finding:
    """RLIMIT_AS and the system's mode of overcommitting memory."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_AS)
    memory_bytes = physical_memory()
    if soft != resource.RLIM_INFINITY and soft < 2 * memory_bytes:
        return warn(f"ulimit -v is {size(soft)}; each table reserves about {size(memory_bytes)}, or what it can get")
    if read(PROC / "sys/vm/overcommit_memory") == "2":
        return warn("vm.overcommit_memory is 2: what is reserved counts as used, so tables have little room to grow")
    return ok("no limit")


@check(
    "huge pages",
    asks="whether the rows of large tables may lie in huge pages",
    remedy="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: random rows of a large table are found faster",
)
def huge_pages(_: Case) -> Finding | None:
    """Transparent huge pages, which the shard asks for."""
    mode = read(SYS / "kernel/mm/transparent_hugepage/enabled")
    if not mode:
        return None
    chosen = mode.partition("[")[2].partition("]")[0]
    return warn("transparent huge pages are off (never)") if chosen == "never" else ok(f"transparent: {chosen}")


@check(
    "swap",
    asks="whether rows may have been swapped out: reading a row from disk takes a thousand times as long",
    remedy="free memory, then `swapoff -a && swapon -a`, or run shards where swap is off",
)
def swap(_: Case) -> Finding:
    """Swap that is in use."""
    found = psutil.swap_memory()
    text = f"{size(found.used)} of {size(found.total)} in use" if found.total else "there is none"
    return warn(text) if found.used > psutil.virtual_memory().total // 20 else ok(text)


@check(
    "/dev/shm",
    asks="whether it has room for the batches of torch's DataLoader workers, and for NCCL",
    remedy="give the container more (docker run --shm-size 1g), or use num_workers=0; the loader process of a job "
    "needs none",
)
def dev_shm(_: Case) -> Finding | None:
    """/dev/shm, of which a container often has 64 MiB."""
    if not DEV_SHM.is_dir():
        return None
    if not os.access(DEV_SHM, os.W_OK):
        return warn(f"{DEV_SHM} cannot be written")
    free = shutil.disk_usage(DEV_SHM).free
    return (warn if free < _SMALL_DEV_SHM else ok)(f"{size(free)} free")


CHECKS = (system_time, open_files, memory, container, address_space, huge_pages, swap, dev_shm)


def usable_cores() -> float:
    """Cores that this process may keep busy: its affinity, and the container's share of the time."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(float(own), cpu_quota() or float(own))


def cpu_quota() -> float | None:
    """Cores' worth of time that the container may use; None without a limit."""
    quotas = []
    for folder in cgroups("cpu"):
        words = read(folder / "cpu.max").split() or [
            read(folder / "cpu.cfs_quota_us"),
            read(folder / "cpu.cfs_period_us"),
        ]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def memory_limit() -> tuple[int, int] | None:
    """Bytes that the container may use, and those of them that are left; None without a limit."""
    limits = []
    for folder in cgroups("memory"):
        limit = read(folder / "memory.max") or read(folder / "memory.limit_in_bytes")
        used = read(folder / "memory.current") or read(folder / "memory.usage_in_bytes")
        if not (limit.isdigit() and used.isdigit() and int(limit) < UNLIMITED):
            continue
        limits.append((int(limit), max(0, int(limit) - int(used) + _cache(folder))))
    return min(limits, key=lambda pair: pair[1], default=None)


def _cache(folder: Path) -> int:
    """Bytes of files that the system drops when memory is wanted."""
    lines = [line.split() for line in read(folder / "memory.stat").splitlines()]
    values = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
    return values.get("total_inactive_file", values.get("inactive_file", 0))
