"""Runs the job files of examples/ through `embershard train`, as a user would, and reads their result."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
Bounds = Mapping[str, tuple[float, float]]  # metric -> lowest and highest value that passes


@dataclass(frozen=True)
class Outcome:
    """What a job reached."""

    name: str
    figures: Mapping[str, float]
    seconds: float
    samples_per_second: float
    wait_share: float
    best_epoch: int

    def summary(self, metrics: Sequence[str]) -> dict[str, float]:
        """The figures for a bench's JSON line."""
        chosen = {metric: round(self.figures[metric], 5) for metric in metrics}
        return {**chosen, "best_epoch": self.best_epoch, "seconds": round(self.seconds, 1)}

    def failures(self, bounds: Bounds) -> list[str]:
        """What is outside its bounds."""
        return [
            f"{self.name}: {metric} {self.figures[metric]:.4f} is not in {low}..{high}"
            for metric, (low, high) in bounds.items()
            if not low <= self.figures[metric] <= high
        ]


def run_example(name: str, *words: str, folder: Path | None = None, split: str = "", resumes: bool = False) -> Outcome:
    """Train examples/NAME.yaml; its best evaluation, on `split` or the one that decides. SystemExit where it fails.

    folder: where the run is left; one that ended there before is not made again. With `resumes` one that was stopped
    there continues from its latest checkpoint, of which each evaluation writes one.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            return run_example(name, *words, folder=Path(temporary), split=split)
    found = _result(folder)
    if found is None:
        print(f"== {name}", flush=True)
        checkpoints = folder / "checkpoints"
        if resumes:
            words += ("--set", f"checkpoint.folder={checkpoints}")
        if resumes and any(checkpoints.glob("*/checkpoint.json")):
            words += ("--resume", "latest")
        else:
            shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "embershard.cli", "train", str(EXAMPLES / f"{name}.yaml")]
        done = subprocess.run([*command, "--output", str(folder), *words], check=False)
        found = _result(folder)
        if done.returncode or found is None:
            raise SystemExit(f"{name} ended with exit code {done.returncode}")
    return Outcome(
        name=name,
        figures=found["figures"][split or found["split"]],
        seconds=found["seconds"],
        samples_per_second=found["samples_per_second"],
        wait_share=found["wait_share"],
        best_epoch=found["best_epoch"],
    )


def _result(folder: Path) -> dict[str, Any] | None:
    """The last record of a run that ended well."""
    log = folder / "log.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    try:
        last: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    except ValueError:  # it was ended while it wrote
        return None
    return last if last.get("record") == "result" else None
