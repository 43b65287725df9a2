"""The share of a step's time in which the GPU works.

From torch.profiler's trace: the union of all kernels, copies and fills. NVML's utilisation, which nvidia-smi shows,
says in how many of its sampling periods some kernel ran at all: one of a microsecond counts as a whole period.
The profiler slows the host down and not the kernels, so the time that the GPU works is taken from a few profiled steps
and the time of a step from those that were measured without it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_WORK = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}


def busy_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds in which a GPU works for `work`; on a CPU those inside torch's operations. RuntimeError without any."""
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    kinds = _WORK[device.type]
    spans = [(float(it["ts"]), float(it["ts"]) + float(it["dur"])) for it in events if it.get("cat") in kinds]
    if not spans:
        raise RuntimeError(f"the profiler saw nothing of {', '.join(kinds)}: it may not be allowed to")
    return covered(spans) / 1e6


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
