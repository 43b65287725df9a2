"""The times that `embershard train` started a job again: what was lost by it, and how long it took."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from embershard.worker.reporting.log import FILE_NAME


@dataclass(slots=True)
class Recovery:
    """One restart of a job from its latest checkpoint."""

    reason: str  # how the attempt before it ended
    checkpoint: str | None  # None: from the beginning
    step: int  # of the checkpoint
    lost_steps: int  # of the first worker after the checkpoint, as its log shows them: up to a second of steps more
    seconds: float | None = None  # from the end of the attempt until the workers train again; None until they do


class Recoveries:
    """The restarts of one job. They are told to `say`, and written to the log of the run in `folder`."""

    def __init__(self, folder: Path, say: Callable[[str], object]) -> None:
        self.made: list[Recovery] = []
        self._log, self._say = folder / FILE_NAME, say
        self._read = self._size()  # bytes of the log of attempts that have ended
        self._stopped = 0.0  # time.monotonic() of the end of the last attempt

    def stop(self) -> None:
        """The present attempt is over; its processes are still to be ended."""
        self._stopped = time.monotonic()

    def begin(self, reason: str, checkpoint: str | None, step: int) -> None:
        """The next attempt goes on from a checkpoint; all processes of the one before it have ended."""
        steps = [int(record["step"]) for record in self._new_records() if record.get("record") in ("train", "eval")]
        self._read = self._size()
        self.made.append(Recovery(reason, checkpoint, step, max(0, max(steps, default=step) - step)))
        where = "the beginning" if checkpoint is None else f"checkpoint {checkpoint}"
        self._say(
            f"{reason}. The job continues from {where}: about {self.made[-1].lost_steps} steps after step {step} are "
            "lost"
        )

    def look(self) -> None:
        """See whether the workers of the present attempt train by now."""
        if self.made and self.made[-1].seconds is None and self._size() > self._read:
            recovery = self.made[-1]
            recovery.seconds = round(time.monotonic() - self._stopped, 3)
            line = {"record": "recovery", "time": round(time.time(), 3), **asdict(recovery)}
            with self._log.open("a", encoding="utf-8") as log:
                log.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._say(f"the workers train again, {recovery.seconds:.1f} s after that")

    def summary(self) -> str:
        """Return what the job lost in all, as text; empty where it was never started again."""
        if not self.made:
            return ""
        times = "once" if len(self.made) == 1 else f"{len(self.made)} times"
        lost, seconds = sum(one.lost_steps for one in self.made), sum(one.seconds or 0.0 for one in self.made)
        return (
            f"the job was started again {times}: about {lost} steps were trained twice, and {seconds:.1f} s passed "
            "before workers trained again"
        )

    def _size(self) -> int:
        return self._log.stat().st_size if self._log.exists() else 0

    def _new_records(self) -> list[dict[str, Any]]:
        """The records of the attempt that has just ended; its last line may be half written."""
        if not self._log.exists():
            return []
        with self._log.open("rb") as log:
            log.seek(self._read)
            lines = log.read().splitlines()
        found = []
        for line in lines:
            try:
                found.append(dict(json.loads(line)))
            except ValueError:
                continue
        return found
