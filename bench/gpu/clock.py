"""When the parts of a step were done, on the device that does them."""

from __future__ import annotations

import time
from collections import defaultdict

import numpy as np
import torch

Milliseconds = tuple[float, float]  # p50, p99


def p50_p99(values: list[float]) -> Milliseconds:
    """The median and the 99th percentile, rounded."""
    p50, p99 = np.percentile(values, [50, 99])
    return round(float(p50), 3), round(float(p99), 3)


class Clock:
    """Marks between the parts of a step: events in a GPU's stream, without waiting for it; the time on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, torch.cuda.Event | float]] = []
        self.mark("")

    def mark(self, part: str) -> None:
        """The part ends that began with the last mark."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((part, event))
        else:
            self._marks.append((part, time.perf_counter()))

    def parts(self) -> dict[str, Milliseconds]:
        """Of each part and of a whole "step", which ends with its last part; once the device has done all of them."""
        times = [0.0]
        for (_, before), (_, after) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(before, float) or isinstance(after, float):
                assert isinstance(before, float)
                assert isinstance(after, float)
                times.append(times[-1] + (after - before) * 1e3)
            else:
                times.append(times[-1] + before.elapsed_time(after))
        found: dict[str, list[float]] = defaultdict(list)
        last, ends = self._marks[-1][0], [0.0]
        for number, (part, _) in enumerate(self._marks[1:], start=1):
            found[part].append(times[number] - times[number - 1])
            if part == last:
                ends.append(times[number])
        found["step"] = [float(step) for step in np.diff(ends)]
        return {part: p50_p99(values) for part, values in found.items()}
