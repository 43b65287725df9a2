"""CTR models on Frappe and PERSIA's recipe on Adult, as their job files say, against plain torch.

The jobs have two shards and two asynchronous workers, but for Wide&Deep and Adult, which have one.

Each job of examples/ is trained with several seeds, and with the same seeds by torch_control.py, which is plain torch
in one process on the same files and with the same recipe, lazy rows included: Adam moves and decays the rows of a
batch. A job's mean must not be worse than the control's by more than the control's seeds differ among themselves, or
than the tolerance where that is more. One seed says nothing of how seeds differ: a job with one is allowed what the
seeds of another job differ at most. A second control (`--every-row`), which is not judged, moves and decays every row
at every step, as the published runs do: what the lazy rule costs.

Frappe is judged on the whole published validation file, on which the best epoch is chosen too. Beside it stands the
best epoch of the published training curve (reczoo/BARS), which was chosen in the same way on the same file, though its
train file had other negatives. The published test figures are context: that test file is not part of the data.
Adult: one epoch of 254 batches, judged on the test file; PERSIA's own test asserts AUC .89286.

The runs are left in runs/ctr: stopped and started again it goes on where it was. Remove that folder to begin anew, as
after a change of the code. Prints a table, then one JSON line; exits 1 below the bar. `bar_ctr.py frappe-fm` runs one
job, `--all` gives three seeds to every job.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from timing import finish, print_table
from train_job import Bounds, run_example

FOLDER = Path(__file__).resolve().parent.parent / "runs" / "ctr"
DEEP: Bounds = {"auc": (0.982, 1.0), "logloss": (0.0, 0.17)}
# absolute bounds, for bar_modes.py
BARS: dict[str, Bounds] = {
    "frappe-lr": {"auc": (0.93, 1.0)},
    "frappe-fm": {"auc": (0.957, 1.0)},
    "frappe-wide-deep": DEEP,
    "frappe-deepfm": DEEP,
    "frappe-dcn-v2": DEEP,
    "frappe-dlrm": DEEP,
    "adult": {"auc": (0.8909, 1.0)},
}
SEEDS = (1, 2, 3)
THREE_SEEDS = ("frappe-fm", "frappe-wide-deep", "frappe-deepfm", "frappe-dcn-v2", "adult")
TOLERANCES = {"auc": 0.0005, "logloss": 0.005}
Figures = Mapping[str, float]
# AUC and logloss of the published curve's best epoch on the validation file, and on the test file
PUBLISHED: dict[str, tuple[Figures, Figures]] = {
    "frappe-lr": ({"auc": 0.93773, "logloss": 0.30573}, {"auc": 0.9356, "logloss": 0.3076}),
    "frappe-fm": ({"auc": 0.96865, "logloss": 0.20260}, {"auc": 0.9671, "logloss": 0.2065}),
    "frappe-wide-deep": ({"auc": 0.98527, "logloss": 0.14195}, {"auc": 0.9841, "logloss": 0.1490}),
    "frappe-deepfm": ({"auc": 0.98517, "logloss": 0.14210}, {"auc": 0.9842, "logloss": 0.1482}),
    "frappe-dcn-v2": ({"auc": 0.98484, "logloss": 0.14880}, {"auc": 0.9845, "logloss": 0.1491}),
    "frappe-dlrm": ({"auc": 0.98519, "logloss": 0.13982}, {"auc": 0.9840, "logloss": 0.1444}),
    "adult": ({}, {"auc": 0.89286}),
}


@dataclass(frozen=True)
class Comparison:
    """One metric of one job: a value per seed, and the control's."""

    name: str
    metric: str
    ours: Sequence[float]
    control: Sequence[float]
    every_row: Sequence[float] = ()  # of the control that moves all rows at every step
    of_others: float = 0.0  # the largest difference between seeds of another job's control

    @property
    def difference(self) -> float:
        """Mean of the job less that of the control."""
        return mean(self.ours) - mean(self.control)

    @property
    def allowed(self) -> float:
        """How much worse than the control's the job's mean may be."""
        return max(TOLERANCES[self.metric], self.spread if len(self.control) > 1 else self.of_others)

    @property
    def spread(self) -> float:
        """By how much the control's seeds differ."""
        return max(self.control) - min(self.control)

    @property
    def holds(self) -> bool:
        """Whether the job is as good as plain torch, as far as the seeds can tell."""
        worse = self.difference if self.metric == "logloss" else -self.difference
        return worse <= self.allowed

    def row(self) -> list[object]:
        """A row of the table."""
        valid, test = (published.get(self.metric) for published in PUBLISHED[self.name])
        published = [("-" if value is None else f"{value:.5f}") for value in (valid, test)]
        seeds = len(self.ours)
        judged = "held" if self.holds else "MISSED"
        compared = [f"{self.difference:+.5f}", f"{self.allowed:.5f}", judged]
        return [
            self.name,
            self.metric,
            seeds,
            _spread(self.ours),
            _spread(self.control),
            *compared,
            _spread(self.every_row),
            *published,
        ]

    def figures(self) -> dict[str, object]:
        """What the JSON line says."""
        valid, test = (published.get(self.metric) for published in PUBLISHED[self.name])
        return {
            "ours": [round(value, 5) for value in self.ours],
            "control": [round(value, 5) for value in self.control],
            "every_row": [round(value, 5) for value in self.every_row],
            "difference": round(self.difference, 5),
            "allowed": round(self.allowed, 5),
            "holds": self.holds,
            "published_valid": valid,
            "published_test": test,
        }


HEADER = (
    *("job", "metric", "seeds", "embershard", "plain torch", "difference", "allowed", "bar"),
    *("torch, every row", "published valid", "published test"),
)


def _spread(values: Sequence[float]) -> str:
    """Mean, and the range where there are several values."""
    spread = f" ({min(values):.5f}..{max(values):.5f})" if len(values) > 1 else ""
    return f"{mean(values):.5f}{spread}" if values else "-"


def seeds_of(name: str, *, every: bool) -> tuple[int, ...]:
    """The seeds of a job."""
    return SEEDS if every or name in THREE_SEEDS else SEEDS[:1]


def run_control(name: str, seed: int, rows: str, folder: Path) -> Figures:
    """Figures of a run of torch_control.py, or of the one that is there. SystemExit where it fails."""
    path = folder / f"{name}-{seed}.{rows}.json"
    if not path.exists():
        print(f"== {name}, seed {seed}, in plain torch, {rows} rows", flush=True)
        command = [sys.executable, str(Path(__file__).with_name("torch_control.py")), name]
        command += ["--seed", str(seed), "--rows", rows, "--output", str(path)]
        log = path.with_suffix(".log")
        with log.open("w") as file:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, check=False, env=environment, stdout=file, stderr=subprocess.STDOUT)
        if done.returncode:
            raise SystemExit(f"{name}, seed {seed}, in plain torch ended with exit code {done.returncode}: see {log}")
    found: Figures = json.loads(path.read_text())
    return found


def run(names: Sequence[str], *, every: bool, every_row: bool, folder: Path) -> list[Comparison]:
    """Make the runs that are not there, a seed of every job before the next one, and compare them."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = [(name, seed) for seed in SEEDS for name in names if seed in seeds_of(name, every=every)]
    ours: dict[str, list[Figures]] = {name: [] for name in names}
    control: dict[str, dict[str, list[Figures]]] = {name: {"batch": [], "all": []} for name in names}
    controls = [(name, seed, rows) for rows in ("batch", "all")[: 1 + every_row] for name, seed in runs]
    # a control takes one core, a job those that are left
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        found = pool.map(lambda one: run_control(*one, folder), controls)
        for name, seed in runs:
            words = ("--set", f"train.seed={seed}")
            ours[name].append(run_example(name, *words, folder=folder / f"{name}-{seed}").figures)
        for (name, _, rows), figures in zip(controls, found, strict=True):
            control[name][rows].append(figures)
    compared = [
        Comparison(
            name,
            metric,
            [one[metric] for one in ours[name]],
            [one[metric] for one in control[name]["batch"]],
            [one[metric] for one in control[name]["all"]],
        )
        for name in names
        for metric in TOLERANCES
    ]
    largest = {metric: max(one.spread for one in compared if one.metric == metric) for metric in TOLERANCES}
    return [replace(one, of_others=largest[one.metric]) for one in compared]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="job", help=f"some of: {', '.join(BARS)}")
    parser.add_argument("--all", action="store_true", help="three seeds of every job (three hours on two cores)")
    parser.add_argument("--every-row", action="store_true", help="the second control too (half an hour more)")
    parser.add_argument("--output", type=Path, default=FOLDER, help="where the runs are left (runs/ctr)")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in BARS]
    if unknown:
        parser.error(f"no job {', '.join(unknown)}; known: {', '.join(BARS)}")
    compared = run(args.names or list(BARS), every=args.all, every_row=args.every_row, folder=args.output)
    print_table(HEADER, [one.row() for one in compared])
    failures = [
        f"{one.name}: {one.metric} is {abs(one.difference):.5f} worse than plain torch, allowed {one.allowed:.5f}"
        for one in compared
        if not one.holds
    ]
    figures = {f"{one.name} {one.metric}": one.figures() for one in compared}
    finish(
        {"bench": "ctr", "workers": "2 asynchronous (adult, frappe-wide-deep: 1)", "shards": 2, "figures": figures},
        failures,
    )


if __name__ == "__main__":
    main()
