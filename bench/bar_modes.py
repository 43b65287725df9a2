"""The jobs of bar_ncf.py and bar_ctr.py in every mode: synchronous, bounded, asynchronous; dense on shards or by DDP.

Two shards, and the job's workers: two, but one for Adult, whose recipe is an order of batches. Synchronous ones share
the job's batch; the others take one each. Each mode has to hold the job's bar, and to come
within 0.003 of the synchronous result, above or below.

HR@10 of one NCF run moves by 0.004 to 0.005 with the seed, and about as much between two asynchronous runs of one seed.
NCF, LR, FM and Adult are run with three seeds: their means have to hold the bar, and a mode is apart from the
synchronous result where the paired differences show it: their mean is more than 0.003, to one side, by more than its
95 % interval to that side. The deep models on Frappe, of several minutes a run, have the one seed of their file: that
run is judged, and its noise is not known. Dense weights by DDP at staleness 0 have the bits of the synchronous ones,
and have to come to the very same figures: one seed is enough for that.

Pushes that pass each other act like momentum (Mitliagkas et al., "Asynchrony begets Momentum", 2016), and GMF's rate is
that of two asynchronous workers: one process, and so two synchronous ones, wants twice as much.

The 104 runs, three hours of them, are left in runs/modes: stopped and started again it goes on where it was.
Remove that folder to begin anew, as after a change of the code.

Prints a table of means and ranges, what was judged with how many seeds and what was not, and one JSON line; exits 1
below a bar. `--quick` runs three jobs with one seed each, and then allows a mode what a seed moves the metric by beside
the 0.003; `--only` and `--modes` name some.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev

from ruamel.yaml import YAML
from scipy import stats

import bar_ctr
import bar_ncf
from timing import finish, machine, print_table
from train_job import EXAMPLES, Bounds, Outcome, run_example

BARS: dict[str, Bounds] = {**bar_ncf.BARS, **bar_ctr.BARS}
QUICK = ("ncf-gmf", "frappe-lr", "adult")
TOLERANCE = 0.003
HEADER = ("job", "mode", "seeds", "quality", "samples/s", "waiting")
FOLDER = Path(__file__).resolve().parent.parent / "runs" / "modes"
FASTER = {"ncf-gmf": 2.0}  # rates at staleness 0, in those of two asynchronous workers
# of the others: the file's own
SPREAD = {"ncf-gmf": 0.005, "ncf-mlp": 0.005}  # of one run's metric, by its seed
SEEDS: dict[str, tuple[int, ...]] = dict.fromkeys(("ncf-gmf", "ncf-mlp", "frappe-lr", "frappe-fm", "adult"), (1, 2, 3))


@dataclass(frozen=True)
class Mode:
    """How workers and weights are kept together."""

    staleness: str
    dense: str

    def settings(self, name: str) -> list[str]:
        """Words for `embershard train` on an example."""
        job = YAML(typ="safe").load(EXAMPLES / f"{name}.yaml")
        sets = {"train.staleness": self.staleness, "dense.mode": self.dense}
        if self.staleness == "0":
            sets["train.batch_size"] = job["train"]["batch_size"] // job["workers"]
        if self.staleness == "0" and name in FASTER:
            sections = [section for section in ("embedding", "dense") if section in job]
            sets |= {f"{section}.optimizer.lr": FASTER[name] * job[section]["optimizer"]["lr"] for section in sections}
        return [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]


SYNCHRONOUS = Mode("0", "ps")
SAME = "sync-ddp"  # the same computation
MODES = {
    "sync": SYNCHRONOUS,
    "bound-4": Mode("4", "ps"),
    "async": Mode("off", "ps"),
    SAME: Mode("0", "ddp"),
    "bound-4-ddp": Mode("4", "ddp"),
    "async-ddp": Mode("off", "ddp"),
}


@dataclass(frozen=True)
class Runs:
    """One job in one mode: a run per seed."""

    outcomes: tuple[Outcome, ...]

    @property
    def mean(self) -> Outcome:
        """The first run, with the means of all for its figures."""
        names = self.outcomes[0].figures
        figures = {name: mean(outcome.figures[name] for outcome in self.outcomes) for name in names}
        speed = mean(outcome.samples_per_second for outcome in self.outcomes)
        return replace(self.outcomes[0], figures=figures, samples_per_second=speed)

    def quality(self, metric: str) -> str:
        """Mean of a metric and, of several runs, its range."""
        values = [outcome.figures[metric] for outcome in self.outcomes]
        spread = f" ({min(values):.4f}..{max(values):.4f})" if len(values) > 1 else ""
        return f"{metric} {mean(values):.4f}{spread}"

    def lower(self, reference: Runs, metric: str) -> list[float]:
        """How much lower than the reference each run is, seed by seed as far as this mode has them."""
        pairs = zip(reference.outcomes, self.outcomes, strict=False)
        return [theirs.figures[metric] - ours.figures[metric] for theirs, ours in pairs]

    def apart(self, reference: Runs, metric: str) -> tuple[float, float]:
        """How much lower than the reference in the mean, and how much of it may be chance (95 %, to its side)."""
        lower = self.lower(reference, metric)
        if len(lower) == 1:
            return lower[0], 0.0
        return mean(lower), float(stats.t.ppf(0.95, len(lower) - 1)) * stdev(lower) / len(lower) ** 0.5


def failures(mode: str, runs: Runs, reference: Runs | None, bounds: Bounds, spread: float = 0.0) -> list[str]:
    """What a mode's runs miss."""
    found = [] if mode == SAME else [f"{mode}: {failure}" for failure in runs.mean.failures(bounds)]
    if reference is None:
        return found
    for metric in bounds:
        lower, chance = runs.apart(reference, metric)
        chance = max(chance, spread)
        if mode == SAME and any(runs.lower(reference, metric)):
            found.append(f"{mode}: {runs.mean.name}: {metric} differs from the synchronous result: {lower:.6f} lower")
        elif metric != "logloss" and abs(lower) - chance > TOLERANCE:  # the best epoch is chosen by AUC
            name = runs.mean.name
            found.append(f"{mode}: {name}: {metric} is {lower:+.4f} (+-{chance:.4f}) below the synchronous result")
    return found


def seeds_of(name: str, label: str, *, quick: bool = False) -> tuple[int | None, ...]:
    """The seeds of a job in a mode; None is the file's own."""
    return SEEDS.get(name, (None,))[: 1 if label == SAME or quick else None]


def judged(
    names: Iterable[str], modes: Iterable[str], *, quick: bool = False
) -> tuple[dict[str, dict[str, int]], list[str]]:
    """How many seeds each job is judged with, by mode; the jobs and modes of this bench that are not judged."""
    seeds = {name: {label: len(seeds_of(name, label, quick=quick)) for label in modes} for name in names}
    return seeds, [name for name in BARS if name not in seeds] + [label for label in MODES if label not in modes]


def run_once(name: str, label: str, mode: Mode, seed: int | None) -> Outcome:
    """One run, or what it came to before; no seed: the file's own."""
    words = [] if seed is None else ["--set", f"train.seed={seed}"]
    return run_example(name, *mode.settings(name), *words, folder=FOLDER / f"{name}-{label}-{seed or 'own'}")


def run(
    names: Sequence[str], modes: Mapping[str, Mode], *, quick: bool = False
) -> tuple[list[list[object]], list[str], dict[str, object]]:
    """Rows of the table, what is below a bar, and figures by job and mode."""
    rows: list[list[object]] = []
    missed: list[str] = []
    figures: dict[str, object] = {}
    for name in names:
        bounds = BARS[name]
        reference: Runs | None = None
        for label, mode in modes.items():
            runs = Runs(tuple(run_once(name, label, mode, seed) for seed in seeds_of(name, label, quick=quick)))
            reference = runs if mode == SYNCHRONOUS else reference
            missed += failures(label, runs, reference, bounds, SPREAD.get(name, 0.0) if quick else 0.0)
            outcome = runs.mean
            quality = ", ".join(runs.quality(metric) for metric in bounds)
            speed_and_waiting = f"{outcome.samples_per_second:,.0f}", outcome.wait_share
            rows.append([name, label, len(runs.outcomes), quality, *speed_and_waiting])
            print_table(HEADER, rows[-1:])
            speed = {
                "samples_per_second": round(outcome.samples_per_second),
                "wait_share": round(outcome.wait_share, 3),
                "seeds": {m: [round(o.figures[m], 4) for o in runs.outcomes] for m in bounds},
            }
            figures[f"{name} {label}"] = {**outcome.summary(tuple(bounds)), **speed}
    return rows, missed, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(BARS), help="these jobs")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), help="these modes, and the synchronous one")
    parser.add_argument("--quick", action="store_true", help=f"one seed, of the jobs {', '.join(QUICK)}")
    args = parser.parse_args()
    names = args.only or (QUICK if args.quick else list(BARS))
    modes = {label: mode for label, mode in MODES.items() if label in ("sync", *(args.modes or MODES))}
    rows, missed, figures = run(names, modes, quick=args.quick)
    print_table(HEADER, rows)
    seeds, left_out = judged(names, modes, quick=args.quick)
    print(f"judged: {len(seeds)} of {len(BARS)} jobs in {len(modes)} of {len(MODES)} modes, with the seeds above")
    print(f"not judged: {', '.join(left_out) or 'nothing'}")
    seen = {"judged_with_seeds": seeds, "not_judged": left_out}
    finish({"bench": "modes", "machine": machine(), "shards": 2, "figures": figures, **seen}, missed)


if __name__ == "__main__":
    main()
