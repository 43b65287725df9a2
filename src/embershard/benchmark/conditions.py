"""Under which conditions a figure was measured."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from embershard.proto.user_modules import version_of

_PACKAGES = ("embershard", "torch", "numpy", "numba", "grpcio", "uvloop")


@dataclass(frozen=True, slots=True)
class MachineConditions:
    """The machine, how busy it was, and the versions."""

    machine: str
    cores: int
    memory_gib: int
    load_average: float  # of the last minute, when it began
    system: str
    python: str
    versions: dict[str, str]
    time: str

    @staticmethod
    def now() -> MachineConditions:
        """This machine, as it is."""
        return MachineConditions(
            machine=_processor(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            memory_gib=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30,
            load_average=round(os.getloadavg()[0], 2),
            system=f"{platform.system()} {platform.release()}",
            python=platform.python_version(),
            versions={name: found for name in _PACKAGES if (found := version_of(name)) != "unknown"},
            time=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        )

    def __str__(self) -> str:
        packages = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{self.machine}, {self.cores} cores, {self.memory_gib} GiB, load {self.load_average}; {self.system}, "
            f"Python {self.python}, {packages}"
        )


def process_seconds(pids: Iterable[int]) -> float | None:
    """CPU seconds of whole processes, all threads; None where the system does not tell (it does on Linux)."""
    try:
        # the clock of another process, as clock_getcpuclockid(3) makes it
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)
    except (OSError, AttributeError):
        return None


def busy_seconds() -> float | None:
    """CPU seconds that all processes of the machine used since it started; None where the system does not tell."""
    try:
        line = Path("/proc/stat").read_text().split("\n", 1)[0]
    except OSError:
        return None
    ticks = [int(word) for word in line.split()[1:]]
    return (sum(ticks[:3]) + sum(ticks[5:7])) / os.sysconf("SC_CLK_TCK")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor() or platform.machine()
