"""Checks of the folder of the shards' logs: what it outlives, how fast its disk is, how much space it has."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import psutil

from embershard.doctor.case import Case
from embershard.doctor.check import Finding, check, fail, ok, size, warn
from embershard.doctor.folders import nearest
from embershard.ps.journal.disk import LocalDisk
from embershard.ps.journal.journal import GROUP_BYTES
from embershard.ps.journal.segments import NUM_SPARES, SEGMENT_BYTES

_IN_MEMORY = ("tmpfs", "ramfs")
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "glusterfs", "fuse.glusterfs", "fuse.sshfs")
_AT_ONCE = (1 + NUM_SPARES) * SEGMENT_BYTES  # of a shard, before it has logged anything
_SLOW_RATE = 100e6  # bytes per second
_SLOW_SYNC = 0.02  # seconds
_MEASURED_SECONDS = 1.0


@check(
    "log folder",
    asks="whether the shards' event logs can be written and locked in their folder, and survive a restart of the "
    "machine",
    remedy="choose a folder on a local disk (--log-dir, or the job's output)",
)
def log_folder(case: Case) -> Finding | None:
    """Check the folder's file system: one in memory ends with the machine, one in the network may lose locks."""
    if case.log_folder is None:
        return None
    there = nearest(case.log_folder)
    try:
        with tempfile.TemporaryDirectory(dir=there) as folder:
            LocalDisk().lock(Path(folder) / "LOCK").close()
    except OSError as error:
        return fail(f"{case.log_folder}: {error.strerror or error}")
    kind = _file_system(there)
    text = f"{case.log_folder}: {kind or 'an unknown file system'}"
    if kind in _IN_MEMORY:
        return warn(
            f"{text}, which is memory: a log there outlives its shard's process, and nothing else; a loss of power, or "
            "the end of the container, takes it, whatever --durability says. It takes as much memory as it has bytes"
        )
    if kind in _REMOTE:
        return warn(f"{text}, a network drive: where it loses a lock, the shard ends")
    return ok(text)


@check(
    "log space",
    asks="whether the disk of the shards' event logs has space for their first files",
    remedy="make space, or choose another folder: while the disk is full, the shards accept no pushes",
)
def log_space(case: Case) -> Finding | None:
    """Free space against the segment that is written and the spares that are made ahead."""
    if case.log_folder is None:
        return None
    free, wanted = shutil.disk_usage(nearest(case.log_folder)).free, case.shards * _AT_ONCE
    text = f"{case.log_folder}: {size(free)} free, {size(wanted)} taken at once by {case.shards} shards"
    if free < case.shards * SEGMENT_BYTES:
        return fail(text)
    return (warn if free < 4 * wanted else ok)(f"{text}; more with every push")


@check(
    "log disk",
    asks="how fast the disk of the shards' event logs is: bytes per second, and the time until a small record is on "
    "disk",
    remedy="use a local SSD; with `log` in place of `fsync` a push waits for the kernel only, not for the disk",
    seconds=15.0,
)
def log_disk(case: Case) -> Finding | None:
    """Writes and fdatasyncs as a shard makes them, over a file that was written before."""
    if case.log_folder is None:
        return None
    try:
        rate, seconds = measure_disk(nearest(case.log_folder))
    except OSError as error:
        return fail(f"{case.log_folder}: {error.strerror or error}")
    text = f"{rate / 1e6:,.0f} MB/s in groups of {size(GROUP_BYTES)}, {1000 * seconds:.2f} ms for 4 KiB (fdatasync)"
    return (warn if rate < _SLOW_RATE or seconds > _SLOW_SYNC else ok)(text)


CHECKS = (log_folder, log_space, log_disk)


def measure_disk(folder: Path, seconds: float = _MEASURED_SECONDS) -> tuple[float, float]:
    """Bytes per second of writing and syncing groups, and the median seconds of 4 KiB; for about twice `seconds`."""
    data = os.urandom(GROUP_BYTES)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        descriptor = file.fileno()
        for place in range(2):
            os.pwrite(descriptor, data, place * GROUP_BYTES)
        os.fdatasync(descriptor)
        began, groups = time.perf_counter(), 0
        while groups < 2 or time.perf_counter() - began < seconds:
            os.pwrite(descriptor, data, groups % 2 * GROUP_BYTES)
            os.fdatasync(descriptor)
            groups += 1
        rate = groups * GROUP_BYTES / (time.perf_counter() - began)
        began, times = time.perf_counter(), list[float]()
        while len(times) < 3 or time.perf_counter() - began < seconds:
            start = time.perf_counter()
            os.pwrite(descriptor, data[:4096], len(times) % 4096 * 4096)
            os.fdatasync(descriptor)
            times.append(time.perf_counter() - start)
    return rate, sorted(times)[len(times) // 2]


def _file_system(folder: Path) -> str:
    """The type of the file system that a folder is on; empty where the system does not say."""
    real = folder.resolve()
    kinds = {Path(one.mountpoint): one.fstype for one in psutil.disk_partitions(all=True)}
    return next((kinds[above] for above in (real, *real.parents) if above in kinds), "")
