"""How good models get that travel compressed: DeepFM on Frappe and GMF on MovieLens-1M, 5 paired seeds of each.

`embershard compare` makes the runs, 45 of one to two minutes, in runs/codec-quality; stopped and started again it goes
on where it was. Every arm's mean paired difference from float32 has to be no worse than 0.0005 of AUC on Frappe,
and 0.003 of HR@10 and NDCG@10 on MovieLens. The mean alone decides. Beside it stand its 95 % interval and the
report's verdict by that interval, against the same margin but for `--quick`; a line names what passed or failed within
the noise of its seeds. MovieLens is trained by synchronous workers: asynchronous runs of one seed differ
by up to 0.01 among themselves, and the pairs would compare nothing.

Prints a table and one JSON line; exits 1 below the bar. `--quick` makes 7 short runs (2 seeds, 2 epochs or so), which
show that it works and judge nothing but a collapse.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from embershard.compare.analysis.conclusions import KEPT
from embershard.compare.results import Quality, Results, read_results
from timing import finish, print_table
from train_job import EXAMPLES

FOLDER = Path(__file__).resolve().parent.parent / "runs" / "codec-quality"


@dataclass(frozen=True)
class Bar:
    """One comparison and what its arms have to hold."""

    example: str
    arms: str
    margins: Mapping[str, float]  # metric -> the worst mean difference from the baseline that passes
    seeds: int = 5
    settings: tuple[str, ...] = ()


# two workers share the job's batch, and want the rate of one process
SYNCHRONOUS = ("train.staleness=0", "train.batch_size=4096", "embedding.optimizer.lr=0.03", "dense.optimizer.lr=0.03")
BARS = {
    "frappe": Bar("frappe-deepfm", "none,fp16s,bf16,int8,dgc:0.001", {"auc": 0.0005}),
    "ncf": Bar("ncf-gmf", "none,fp16s,bf16,int8", {"hr@10": 0.003, "ndcg@10": 0.003}, settings=SYNCHRONOUS),
}
QUICK = {
    "frappe": Bar("frappe-deepfm", "none,fp16s", {"auc": 0.02}, 2, ("train.epochs=3", "train.early_stop=null")),
    "ncf": Bar("ncf-gmf", "none,fp16s,int8", {"hr@10": 0.03, "ndcg@10": 0.03}, 1, ("train.epochs=2",)),
}


def compare(name: str, bar: Bar) -> Results:
    """Make the runs that are not there; what they came to. SystemExit where they could not be made."""
    folder = FOLDER / name
    command = [sys.executable, "-m", "embershard.cli", "compare", str(EXAMPLES / f"{bar.example}.yaml")]
    command += ["--arms", bar.arms, "--seeds", str(bar.seeds), "--output", str(folder)]
    command += [word for setting in bar.settings for word in ("--set", setting)]
    print(f"== {bar.example}: {bar.arms}", flush=True)
    code = subprocess.run(command, check=False).returncode
    if code:
        raise SystemExit(f"embershard compare ended with exit code {code}")
    return read_results(folder / "results.json")


def judge(bar: Bar, results: Results) -> Iterator[tuple[Quality, float, bool]]:
    """(Arm's figures, margin, whether it holds it) of every arm but the baseline."""
    for arm in results.arms[1:]:
        for metric, margin in bar.margins.items():
            found = [
                quality
                for quality in results.quality
                if (quality.arm, quality.against, quality.metric) == (arm.label, results.baseline, metric)
            ]
            if not found:
                raise SystemExit(f"{bar.example}: {arm.label} has no run that ended well: see {results.notes}")
            yield found[0], margin, found[0].difference.mean >= -margin


def figures_of(quality: Quality, margin: float, holds: bool) -> dict[str, object]:
    """What the JSON line says of one of an arm's metrics."""
    moved = quality.difference
    interval = None if moved.low is None or moved.high is None else [round(moved.low, 5), round(moved.high, 5)]
    return {
        "mean": round(quality.value.mean, 5),
        "difference": round(moved.mean, 5),
        "margin": margin,
        "holds": holds,
        "interval": interval,
        "verdict": quality.verdict,
        "seeds": moved.seeds,
    }


def row_of(label: str, quality: Quality, holds: bool) -> list[object]:
    """The same as a row of the table."""
    moved = quality.difference
    interval = "none" if moved.low is None else f"{moved.low:+.5f}..{moved.high:+.5f}"
    figures = f"{quality.value.mean:.5f}", f"{moved.mean:+.5f}", interval
    return [label, quality.metric, *figures, quality.verdict, "held" if holds else "MISSED"]


def is_noise(quality: Quality, margin: float, holds: bool) -> bool:
    """Whether what the mean says is not shown: with other seeds it might have been otherwise."""
    high = quality.difference.high
    return quality.verdict not in KEPT if holds else high is None or high >= -margin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short runs, which show that it works")
    parser.add_argument("--only", choices=list(BARS), help="one of the comparisons")
    args = parser.parse_args()
    rows: list[list[object]] = []
    failures: list[str] = []
    unsure: list[str] = []
    figures: dict[str, object] = {}
    for name, bar in (QUICK if args.quick else BARS).items():
        if args.only not in (None, name):
            continue
        results = compare(f"{name}-quick" if args.quick else name, bar)
        failures += [] if results.complete else [f"{bar.example}: some runs failed: {' '.join(results.notes)}"]
        for quality, margin, holds in judge(bar, results):
            label = f"{bar.example} {quality.arm}"
            rows.append(row_of(label, quality, holds))
            figures[f"{label} {quality.metric}"] = figures_of(quality, margin, holds)
            unsure += [f"{label} {quality.metric}"] if is_noise(quality, margin, holds) else []
            if not holds:
                worse = f"{quality.metric} is {-quality.difference.mean:.5f} worse than {quality.against}"
                failures.append(f"{label}: {worse}, not {margin}; by its interval it is {quality.verdict}")
    print_table(("job and arm", "metric", "mean", "difference", "95 % interval", "verdict", "bar"), rows)
    if unsure:
        print(f"decided by the mean, within the noise of the seeds: {', '.join(unsure)}")
    finish({"bar": "codec-quality", "quick": args.quick, "figures": figures}, failures)


if __name__ == "__main__":
    main()
