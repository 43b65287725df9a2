"""Runs the job files of examples/ through `embershard train`, as a user would, and reads their result."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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


def run_example(name: str, *words: str) -> Outcome:
    """Train examples/NAME.yaml; its best evaluation, on the split `test`. SystemExit where it fails."""
    print(f"== {name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "embershard.cli", "train", str(EXAMPLES / f"{name}.yaml"), "--output", folder]
        done = subprocess.run([*command, *words], check=False)
        if done.returncode:
            raise SystemExit(f"{name} ended with exit code {done.returncode}")
        records = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
    result = records[-1]
    return Outcome(
        name=name,
        figures=result["figures"]["test"],
        seconds=result["seconds"],
        samples_per_second=result["samples_per_second"],
        wait_share=result["wait_share"],
        best_epoch=result["best_epoch"],
    )
