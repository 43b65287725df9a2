"""Where each worker of a run stands: `workers/N.json` in its folder, written anew about every second.

The panel shows it beside what the shards say (src/embershard/dash), and it tells how far workers came that have left. A
record has `worker`, `time` (seconds since 1970), `step`, `samples` and `samples_per_second` of this worker, `step_ms`,
`parts_ms` (mean of the last steps by the names of proto/timing.py; they add up to the step), `waits` (shares of its
time) and `bytes` (per step: StepBytes).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from embershard.proto.timing import recent_parts
from embershard.worker.reporting.records import Interval, StepBytes

FOLDER = "workers"
_LARGEST = 64 * 1024  # bytes of a record; one of ours has a thousand or two


class WorkerRecord:
    """Writes the record of one worker. A disk that refuses it does not disturb training."""

    def __init__(self, folder: Path, worker: int) -> None:
        self._folder = folder
        self._file = folder / FOLDER / f"{worker}.json"
        self._worker = worker
        self._step = 0

    def write(
        self, interval: Interval, samples_per_second: float, moved: Sequence[StepBytes], samples: int = 0
    ) -> None:
        """Replace the record by this one."""
        parts = recent_parts(max(1, interval.step - self._step))
        self._step = interval.step
        record = {
            "worker": self._worker,
            "time": round(time.time(), 3),
            "step": interval.step,
            "samples": samples,
            "samples_per_second": samples_per_second,
            "step_ms": sum(parts.values()) * 1e3,
            "parts_ms": {name: seconds * 1e3 for name, seconds in parts.items()},
            "waits": {name: getattr(interval, f"wait_{name}") for name in ("shards", "workers", "data")},
            "bytes": [dataclasses.asdict(part) for part in moved],
        }
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(exist_ok=True)
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps(record), encoding="utf-8")
            os.replace(new, self._file)

    def samples(self) -> dict[int, int]:
        """Samples by worker, of those that have written a record: on how many it had trained then."""
        records = worker_records(self._folder)
        return {worker: count for worker, one in records.items() if isinstance(count := one.get("samples"), int)}


def worker_records(folder: Path) -> dict[int, Mapping[str, object]]:
    """The records of a run by worker; those that cannot be read are left out."""
    found: dict[int, Mapping[str, object]] = {}
    for path in sorted((folder / FOLDER).glob("*.json")):
        try:
            with path.open("rb") as file:
                record = json.loads(file.read(_LARGEST))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("worker"), int):
            found[record["worker"]] = record
    return found
