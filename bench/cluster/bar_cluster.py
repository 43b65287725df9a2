"""The simulation of a cluster is held against real shards and workers on this machine: within 25 % at each point.

Measures 1, 2, 4 and 8 shards with 1, 2, 4 and 8 workers each, pulls and pushes and DLRM, in interleaved rounds
(validate.py), and simulates the same laps by prices that it measures before. Prints the ratio of each point and one
JSON line; exits 1 where a ratio is beyond the bar.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from prices import Prices
from validate import BAR, Point, as_json, measure_all, measured_curves, simulate_all

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from timing import finish, load, print_table

_RESIDENT = 10**6  # about the rows of the tables that are measured here


def show(points: list[Point]) -> None:
    """A line for each point."""
    rows = [
        [
            f"{p.work}, {p.shards} shards, {p.workers} workers",
            f"{statistics.median(p.measured):,.0f}",
            f"{statistics.median(p.simulated):,.0f}",
            p.ratio,
            f"{min(p.measured):,.0f} to {max(p.measured):,.0f}",
            p.simulated_cpu_ms / statistics.median(p.cpu_ms),
            statistics.median(p.others),
        ]
        for p in points
    ]
    print_table(["", "measured/s", "simulated/s", "ratio", "rounds", "ratio of CPU", "others' cores"], rows)


def show_prices(prices: Prices) -> None:
    """What the simulation is made of."""
    for side, price in (("worker", prices.worker), ("shard", prices.shard)):
        print(
            f"{side}: {price.call_us:.0f} us a call, {price.message_us:.0f} us a message, {price.wake_us:.0f} to wake, "
            f"{price.row_ns:.0f} ns a row, {price.kb_ns:.0f} ns a KB, error of the fit {price.error:.0%}"
        )
    print(
        f"a step computes {prices.compute_ms:.1f} ms; a message costs {prices.cold_worker_us:.0f} and "
        f"{prices.cold_shard_us:.0f} us more beside training, {prices.crowded_worker_us:.0f} and "
        f"{prices.crowded_shard_us:.0f} us more where several workers, or shards, share the cores",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, nargs="?", default=Path("docs/scaling.json"), help="of bar-scale")
    parser.add_argument("--work", nargs="+", choices=("ps", "train"), default=("ps", "train"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calm", type=float, default=0.3, help="cores that others may keep busy when a lap begins")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds in all to wait for that, for each work")
    parser.add_argument("--prices", type=Path, help="validation.json of an earlier run whose prices are taken")
    parser.add_argument("--again", type=Path, help="validation.json of an earlier run: simulate it, measure nothing")
    parser.add_argument("--quick", action="store_true", help="half of the steps")
    parser.add_argument("--output", type=Path, default=Path("runs/cluster"))
    args = parser.parse_args()
    measured = json.loads(args.measured.read_text())
    jitter = Prices(measured).service_jitter  # percentiles of a busy machine tell of its other processes
    if args.again is None:
        earlier = None if args.prices is None else json.loads(args.prices.read_text())
        measured["curves"] = earlier["curves"] if earlier else measured_curves(3, args.calm, args.patience)
        points = measure_all(args.work, args.rounds, calm=args.calm, patience=args.patience, quick=args.quick)
    else:
        earlier = json.loads(args.again.read_text())
        measured["curves"], points = earlier["curves"], [Point(**point) for point in earlier["points"]]
    prices = Prices(measured, resident=_RESIDENT)
    prices.service_jitter = jitter
    show_prices(prices)
    levels = simulate_all(points, prices)
    show(points)
    args.output.mkdir(parents=True, exist_ok=True)
    found = {"points": [as_json(p) for p in points], "curves": measured["curves"]}
    (args.output / "validation.json").write_text(json.dumps(found) + "\n")
    off = [p for p in points if not 1 / (1 + BAR) <= p.ratio <= 1 + BAR]
    failures = [f"{p.work}, {p.shards} shards, {p.workers} workers: {p.ratio:.2f}" for p in off]
    levels = {work: round(level, 2) for work, level in levels.items()}
    ratios = {f"{p.work} {p.shards}x{p.workers}": round(p.ratio, 2) for p in points}
    finish({"bench": "cluster", "levels": levels, "ratios": ratios, "load": load()}, failures)


if __name__ == "__main__":
    main()
