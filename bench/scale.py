"""How cost grows with the work: resident rows, shards, workers, batch, and a table that grows while it is read.

rows      bench/rows.py: ns of CPU per pulled and pushed row, 10^5 to 10^8 resident rows of dim 16, at their first touch
          and touched; the laws are of touched ones
growth    bench/growth.py: p99 and worst pull while a table grows to 20 million rows
messages  `embershard bench scale`: CPU of a pull and a push over TCP, by shards and ids per step
shards, workers, batch   the same command: training DLRM with every weight on the shards, staleness 2

Each curve has a law, in terms of CPU time where that can be, since other processes disturb it least. Writes scale.json,
scale.svg and rows.svg into --output; bench/cluster reads it and carries the costs to a cluster (docs/scaling.md).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from embershard.benchmark.picture import can_draw, draw_curves
from embershard.benchmark.report import curve_row, points_json, write_json
from embershard.benchmark.sweep import AnyResult, Axis, Points, Sweep, plan, run_sweep
from growth import PULL_BAR as GROWTH_BAR
from rows import PULL_BAR as ROW_BAR
from timing import finish

# 10^5 rows lie in the caches; at 10^8 the index and the row are a miss each, of the TLB too: 4.1x to 4.8x, and 3.2x for
# torch.index_select, which has no index. More would mean that the index got deeper.
ROWS_BAR = 6.0
# A request costs the same however many shards there are: per message, 8 shards against 1. On two cores eight shards
# and a worker share caches, hence not 1.
MESSAGE_BAR = 2.0
# A training step asks each of 8 shards for as much less, so that its CPU grows by 14 messages only.
SHARDS_BAR = 1.5
# On two cores two workers are faster than one, and four, who share the cores with two shards, not much slower than two.
WORKERS_BARS = {2: 1.2, 4: 0.85}
# Larger batches hold fewer unique rows per sample, and the same number of messages.
BATCH_BAR = 1.05
LARGER_DIM = 64  # beside 16
MANY = 4  # workers, beside one

Curves = Mapping[str, list[AnyResult]]


def other_bench(name: str, *words: str) -> dict[str, object]:
    """The JSON line of another script of this folder, which shows its table meanwhile."""
    command = [sys.executable, str(Path(__file__).with_name(name)), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            last = ""
            for last in process.stdout:
                if not last.startswith("{"):
                    print(last, end="", flush=True)
        except BaseException:
            process.kill()
            raise
    if not last.startswith("{"):
        raise SystemExit(f"bench/{name} ended with exit code {process.returncode}")
    result: dict[str, object] = json.loads(last)
    return result


def cpu_ms(result: AnyResult) -> float:
    """CPU of a step, worker and shards together."""
    assert result.shard_cpu_ms is not None
    return result.worker_cpu_ms + result.shard_cpu_ms


def per_message_us(result: AnyResult) -> float:
    """CPU of a message of a step that moves next to nothing: a pull and a push for every shard."""
    return cpu_ms(result) * 1e3 / (2 * result.settings.shards)


def laws(
    curves: Points, rows: Mapping[str, Mapping[str, float]], growth: Mapping[str, float]
) -> dict[str, list[float]]:
    """Each law's name: what was found, and what it may be at most."""
    sizes = sorted(rows, key=int)
    sides = {"pull": "pull_ns", "push": "push_ns"}
    found = {
        f"{side} of {int(sizes[-1]):,} rows to {int(sizes[0]):,}": [
            rows[sizes[-1]][key] / rows[sizes[0]][key],
            ROWS_BAR,
        ]
        for side, key in sides.items()
    }
    largest = rows[sizes[-1]]
    found[f"pull of {int(sizes[-1]):,} rows to torch.index_select"] = [
        largest["pull_ns"] / largest["index_select_ns"], ROW_BAR,
    ]  # fmt: skip
    found["worst pull of a growing table to its median, CPU"] = [growth["own_worst_to_median_cpu"], GROWTH_BAR]
    few = min(getattr(result.settings, "ids", 0) for result in curves["messages"])
    small = [result for result in curves["messages"] if getattr(result.settings, "ids", 0) == few]
    found[f"CPU per message, {small[-1].settings.shards} shards to 1"] = [
        per_message_us(small[-1]) / per_message_us(small[0]), MESSAGE_BAR,
    ]  # fmt: skip
    first, last = curves["shards"][0], curves["shards"][-1]
    found[f"CPU of a training step, {last.settings.shards} shards to 1"] = [cpu_ms(last) / cpu_ms(first), SHARDS_BAR]
    before = curves["workers"][0]
    for result in curves["workers"][1:]:
        count = result.settings.workers
        name = f"samples/s of {before.settings.workers} workers to {count}"
        found[name] = [before.samples_per_second / result.samples_per_second, 1 / WORKERS_BARS.get(count, 0.85)]
        before = result
    per_sample = [cpu_ms(result) * result.steps_per_second / result.samples_per_second for result in curves["batch"]]
    found["CPU of a sample, largest batch to smallest"] = [per_sample[-1] / per_sample[0], BATCH_BAR]
    return {name: [round(value, 3) for value in pair] for name, pair in found.items()}


def draw_rows(rows: Mapping[str, Mapping[str, float]], growth: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Cost of a row by resident rows, and the worst pulls by the size of the growing table."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for key, name in (("pull_ns", "pull"), ("push_ns", "push"), ("index_select_ns", "torch.index_select")):
        left.plot([int(size) for size in rows], [figures[key] for figures in rows.values()], marker="o", label=name)
    left.set(xscale="log", ylim=(0, None), xlabel="resident rows", ylabel="ns of CPU per row")
    for key, name in (("p99_ms", "p99"), ("worst_ms", "worst"), ("worst_cpu_ms", "worst, CPU")):
        right.plot(
            [int(size) for size in growth], [figures[key] for figures in growth.values()], marker="o", label=name
        )
    right.set(xscale="log", ylim=(0, None), xlabel="rows of the growing table", ylabel="ms per pull of 16,384 ids")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/scale"))
    parser.add_argument("--rows", type=int, default=100_000_000, help="resident rows in the end; 10^8 take 16 GiB")
    parser.add_argument("--growth", type=int, default=20_000_000, help="rows of the growing table in the end")
    parser.add_argument("--steps", type=int, default=20, help="training steps per round and worker")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    rows = other_bench("rows.py", "--rows", str(args.rows))
    growth = other_bench("growth.py", "--rows", str(args.growth))

    def report(curve: str, result: AnyResult) -> None:
        print(f"{curve_row(curve, result)}; others: {result.other_cores or 0:.2f} cores", flush=True)

    axes = (Axis.MESSAGES, Axis.SHARDS, Axis.WORKERS, Axis.BATCH)
    curves = run_sweep(plan(Sweep(axes=axes, steps=args.steps)), report)
    # what bench/cluster needs beside: a row's bytes apart from the row, and a shard with several workers
    wide = Sweep(axes=(Axis.MESSAGES,), dim=LARGER_DIM, shards=(1, 4), ids=(4_096, 65_536), steps=args.steps)
    busy = [
        point.model_copy(update={"workers": MANY})
        for point in plan(Sweep(axes=(Axis.MESSAGES,), shards=(1,)))["messages"]
    ]
    beside = {
        f"messages of dim {LARGER_DIM}": run_sweep(plan(wide), report)["messages"],
        f"messages of {MANY} workers": run_sweep({"messages": busy}, report)["messages"],
    }
    found = laws(curves, rows["curve"], growth["pull"])  # type: ignore[arg-type]
    measured = {**points_json({**curves, **beside}), "rows": rows, "growth": growth}
    write_json({**measured, "laws": found}, args.output / "scale.json")
    if can_draw():
        draw_curves(curves, args.output / "scale.svg")
        draw_rows(rows["curve"], growth["pull_by_size"], args.output / "rows.svg")  # type: ignore[arg-type]
    else:
        print("no chart: it needs matplotlib")
    for name, (value, bar) in found.items():
        print(f"{name:<55}{value:>8.2f}  at most {bar:.2f}")
    print(f"written: {args.output}/scale.json")
    failures = [f"bench/{of['bench']}.py is below its bar" for of in (rows, growth) if not of["passed"]]
    failures += [f"{name}: {value:.2f}, at most {bar:.2f}" for name, (value, bar) in found.items() if not value <= bar]
    conditions = curves["shards"][0].conditions
    others = max(result.other_cores or 0.0 for results in curves.values() for result in results)
    finish(
        {"bench": "scale", "laws": found, "load": conditions.load_average, "other_cores": round(others, 2)}, failures
    )


if __name__ == "__main__":
    main()
