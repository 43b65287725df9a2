"""What the benches of this folder share: interleaved timing, a table, and one JSON line last."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

_DISK_SECONDS = 0.2  # to measure each of two figures of a disk


def thread_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this thread that `work` takes: other processes on the machine count less than in wall time."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def wall_seconds(work: Callable[[], object]) -> float:
    """Wall seconds of `work`: what someone waits."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU seconds that processes have used, to the nanosecond (Linux): psutil knows hundredths of a second."""
    return sum(time.clock_gettime_ns((~pid << 3) | 2) for pid in pids) / 1e9


def median(values: Sequence[float]) -> float:
    """Middle value."""
    return statistics.median(values)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median: order statistics, by the normal approximation of the binomial's ranks."""
    ordered, count = sorted(values), len(values)
    low = max(0, int(count / 2 - 0.98 * count**0.5))
    return ordered[low], ordered[count - 1 - low]


def machine() -> str:
    """Processor, cores and memory, for the line that goes beside a figure.

    The family and the model of a processor say its generation, where a virtual machine names it "AMD EPYC" alone.
    """
    cpuinfo = Path("/proc/cpuinfo")
    first = cpuinfo.read_text().split("\n\n")[0] if cpuinfo.exists() else ""
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    model = found.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in found:
        model += f", family {found['cpu family']} model {found.get('model', '?')}"
    return f"{model}, {os.cpu_count()} cores, {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') >> 30} GiB"


def load() -> str:
    """How busy the machine is, for the line that goes beside a figure."""
    return f"load {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores in the last minute"


def disk(folder: Path | str | None = None) -> str:
    """File system, device and speed of a folder (None: that of temporary files), for the line beside a figure."""
    import psutil  # here, as the programs of peers use this file too

    from embershard.doctor.logs import measure_disk

    place = Path(folder or tempfile.gettempdir()).resolve()
    mounts = {Path(one.mountpoint): one for one in psutil.disk_partitions(all=True)}
    mount = next((mounts[above] for above in (place, *place.parents) if above in mounts), None)
    rate, seconds = measure_disk(place, _DISK_SECONDS)
    where = "unknown" if mount is None else f"{mount.fstype} on {mount.device}"
    return f"{where}: {rate / 1e6:.0f} MB/s in groups of 8 MiB, {1000 * seconds:.2f} ms for 4 KiB, with fdatasync"


def resident_bytes() -> int:
    """Memory of this process that is in use now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as they need to be, the first to the left."""
    cells = [[f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([row[0].ljust(widths[0]), *rest]) if first is not None else "", flush=True)


def finish(result: Mapping[str, object], failures: Sequence[str]) -> None:
    """Say what is below the bar, print the JSON line, and exit 1 if anything is."""
    for failure in failures:
        print(f"BELOW THE BAR: {failure}")
    print(json.dumps({"machine": machine(), **result, "passed": not failures}), flush=True)
    sys.exit(1 if failures else 0)
