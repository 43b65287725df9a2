"""SASRec, SimpleX, two towers and MMoE, as job files on two shards, against published figures and plain torch.

SASRec on Amazon Video Games by its authors' protocol, chosen on valid and judged on test (published .7410 / .5360), and
beside it, over three seeds of 20 epochs, the same recipe in plain torch (torch_sasrec.py): the job's mean must not be
worse than the control's by more than the control's seeds differ, or .01 where that is more. SimpleX and two towers on
Gowalla, all items ranked (published .1872 / .1557 and .1754 / .1473). MMoE on Adult, five seeds: the mean AUC of each
label must not be more than .001 below that of the same model trained on this label alone; each of the three has the
learning rate that was best for it on a tenth of the training file that it did not train on. No job may take an hour.

The runs are left in runs/models: stopped and started again it continues with the first run that has not ended.
`--only sasrec` runs one of them. `--long` trains longer against higher bars and prints the hours; a run that was
stopped continues from its latest evaluation. Prints a table, then one JSON line; exits 1 below the bar.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean

from timing import finish, load, print_table
from train_job import Outcome, run_example

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
FOLDER = Path(__file__).resolve().parent.parent / "runs" / "models"
SEEDS = (1, 2, 3, 4, 5)
LABELS = ("income", "never_married")
RATES = (0.001, 0.002, 0.004, 0.008)  # of Adam, from which MMoE and its tasks alone choose
GOWALLA_STEPS = 1582  # of each of two workers, in an epoch with batches of 256
HOUR = 3600.0  # seconds that a job may take, but for the long ones
WORSE = 0.001  # AUC of a label of MMoE below that of its own model
EARLY = 20  # epochs of the comparison with plain torch, which is cheap enough for several seeds
SAME = 0.01  # HR and NDCG of SASRec below those of plain torch, where seeds differ less
Row = tuple[object, ...]


class Bar:
    """Rows of the table and what is below the bar."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.failures: list[str] = []
        self.figures: dict[str, object] = {}

    def in_time(self, job: Outcome) -> None:
        """Judge the time of a job."""
        if job.seconds > HOUR:
            self.failures.append(f"{job.name}: it took {job.seconds:.0f} s, more than {HOUR:.0f}")

    def at_least(self, name: str, metric: str, value: float, least: float, published: str, seconds: float) -> None:
        """Judge one figure of one run."""
        held = value >= least
        hours, word = f"{seconds / 3600:.2f}", "held" if held else "MISSED"
        self.rows.append((name, metric, f"{value:.4f}", f"{least:.4f}", published, hours, word))
        self.figures[f"{name} {metric}"] = round(value, 5)
        self.failures += [] if held else [f"{name}: {metric} is {value:.4f}, below {least}"]


def sasrec(bar: Bar, folder: Path, *, long: bool, seeds: int) -> None:
    """SASRec against its bar; and its mean over seeds after a fifth of the epochs against plain torch."""
    epochs, bounds = (400, (0.73, 0.53)) if long else (100, (0.70, 0.49))
    place = folder / f"sasrec{'-long' * long}"
    outcome = run_example("sasrec", "--set", f"train.epochs={epochs}", folder=place, split="test", resumes=long)
    for metric, least, published in zip(("hr@10", "ndcg@10"), bounds, (".7410", ".5360"), strict=True):
        bar.at_least("sasrec", metric, outcome.figures[metric], least, published, outcome.seconds)
    if long:
        return
    bar.in_time(outcome)
    ours, control = [], []
    for seed in SEEDS[:seeds]:
        words = ("--set", f"train.epochs={EARLY}", "--set", f"train.seed={seed}")
        name = f"sasrec-{EARLY}-{seed}"
        ours.append(run_example("sasrec", *words, folder=folder / name, split="test"))
        control.append(_plain_sasrec(folder / f"{name}.torch.json", seed, EARLY))
    for metric in ("hr@10", "ndcg@10"):
        plain = [figures[metric] for figures in control]
        allowed = max(SAME, max(plain) - min(plain))
        own = mean(outcome.figures[metric] for outcome in ours)
        seconds = sum(outcome.seconds for outcome in ours)
        name = f"sasrec, {EARLY} epochs, {seeds} seeds"
        bar.at_least(name, metric, own, mean(plain) - allowed, f"torch {mean(plain):.4f}", seconds)


def _plain_sasrec(path: Path, seed: int, epochs: int) -> Mapping[str, float]:
    """Figures on test of a run of torch_sasrec.py, or of the one that is there. SystemExit where it fails."""
    if not path.exists():
        print(f"== sasrec, seed {seed}, in plain torch", flush=True)
        command = [sys.executable, str(Path(__file__).with_name("torch_sasrec.py"))]
        command += ["--seed", str(seed), "--epochs", str(epochs), "--output", str(path)]
        done = subprocess.run(command, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise SystemExit(f"sasrec in plain torch ended with exit code {done.returncode}")
    found: Mapping[str, float] = json.loads(path.read_text())["test"]
    return found


def simplex(bar: Bar, folder: Path, *, long: bool, seeds: int) -> None:
    """SimpleX on Gowalla."""
    words = (*_falling(epochs=18, fall=13), "--set", "data.history=50") if long else ()
    outcome = run_example("simplex", *words, folder=folder / f"simplex{'-long' * long}", resumes=long)
    if not long:
        bar.in_time(outcome)
    _gowalla(bar, outcome, (0.183, 0.151) if long else (0.165, 0.137), (".1872", ".1557"))


def two_tower(bar: Bar, folder: Path, *, long: bool, seeds: int) -> None:
    """Two towers on Gowalla."""
    words = _falling(epochs=60, fall=48) if long else ()
    outcome = run_example("gowalla", *words, folder=folder / f"two-tower{'-long' * long}", resumes=long)
    if not long:
        bar.in_time(outcome)
    _gowalla(bar, outcome, (0.175, 0.147) if long else (0.165, 0.138), (".1754", ".1473"))


def _falling(epochs: int, fall: int) -> tuple[str, ...]:
    """Settings of a run whose learning rate is divided by ten at epoch `fall`, as in the authors' recipe."""
    schedule = (("name", "step"), ("every", fall * GOWALLA_STEPS), ("factor", 0.1))
    settings = (f"train.epochs={epochs}", *(f"train.lr_schedule.{field}={value}" for field, value in schedule))
    return tuple(word for setting in settings for word in ("--set", setting))


def _gowalla(bar: Bar, outcome: Outcome, bounds: tuple[float, float], published: tuple[str, str]) -> None:
    for metric, least, figure in zip(("recall@20", "ndcg@20"), bounds, published, strict=True):
        bar.at_least(outcome.name, metric, outcome.figures[metric], least, figure, outcome.seconds)


def mmoe(bar: Bar, folder: Path, *, long: bool, seeds: int) -> None:
    """MMoE with two labels against the same model with each of them alone."""
    files = _held_out(folder)
    both = _tuned_mmoe(bar, folder, LABELS, files)
    for label in LABELS:
        alone = _tuned_mmoe(bar, folder, (label,), files)
        single = mean(job.figures["auc"] for job in alone)
        joint = mean(job.figures[f"auc:{label}"] for job in both)
        seconds = sum(job.seconds for job in (*both, *alone))
        bar.at_least("mmoe", f"auc:{label}", joint, single - WORSE, f"alone {single:.4f}", seconds)


def _tuned_mmoe(bar: Bar, folder: Path, labels: Sequence[str], files: Sequence[str]) -> list[Outcome]:
    """Runs of MMoE with these labels, one per seed, at the learning rate that is best on held-out rows."""
    label_words, name = ("--set", f"data.labels=[{','.join(labels)}]"), f"mmoe-{'-'.join(labels)}"

    def job(place: str, rate: float, *words: str) -> Outcome:
        own = ("--set", f"embedding.optimizer.lr={rate}", *label_words, *words)
        outcome = run_example("mmoe", *own, folder=folder / f"{name}-{place}")
        bar.in_time(outcome)
        return outcome

    held_out = {rate: job(f"valid-{rate}", rate, *files).figures["auc"] for rate in RATES}
    rate = max(held_out, key=lambda rate: held_out[rate])
    print(f"{name}: AUC on held-out rows by learning rate: {held_out}; {rate} is chosen", flush=True)
    return [job(f"{rate}-{seed}", rate, "--set", f"train.seed={seed}") for seed in SEEDS]


def _held_out(folder: Path) -> Sequence[str]:
    """The words of a job that trains on nine tenths of Adult's training file and is judged on every tenth line."""
    lines = (DATA / "adult" / "adult.data").read_text().splitlines(keepends=True)
    parts = {"train": [line for n, line in enumerate(lines) if n % 10], "test": lines[::10]}
    words = []
    for part, its in parts.items():
        (folder / f"adult-{part}.data").write_text("".join(its))
        words += ["--set", f"data.{part}=adult-{part}.data"]
    return (*words, "--set", f"data.root={folder.resolve()}")


BARS: Mapping[str, Callable[..., None]] = {"sasrec": sasrec, "simplex": simplex, "two_tower": two_tower, "mmoe": mmoe}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=BARS, help="one of them; may be repeated")
    parser.add_argument("--long", action="store_true", help="longer runs against higher bars (hours)")
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, 6), help="of SASRec beside plain torch")
    parser.add_argument("--output", type=Path, default=FOLDER, help="where the runs are left (runs/models)")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    bar = Bar()
    for name in args.only or (name for name in BARS if not (args.long and name == "mmoe")):
        BARS[name](bar, args.output, long=args.long, seeds=args.seeds)
    print_table(("job", "metric", "reached", "bar", "published", "hours", ""), bar.rows)
    finish({"bench": "models", "long": args.long, "load": load(), "figures": bar.figures}, bar.failures)


if __name__ == "__main__":
    main()
