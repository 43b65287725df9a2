"""What a cluster would do: a simulation of up to 1,000 shards and 10,000 workers, by what bench/scale.py measured.

Reads scale.json (docs/scaling.json, or what `make bar-scale` wrote) and prints the tables of docs/scaling.md, as
Markdown. Measured: CPU per call, per message, per row and per byte (prices.py). Assumed: everything else, and every
assumption is an option. Every shard and worker is simulated up to 100 x 1,000; of more shards a sample is (events.py),
and the two ways are compared at 100 x 1,000. Prints one JSON line; exits 1 where 100 x 1,000 and 1,000 x 10,000
together took more than 30 minutes of CPU. bar_cluster.py holds the simulation against real shards and workers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from failures import Cost, Recovery, failure_costs, in_mode, mode_name
from prices import Prices
from simulate import Cluster, Outcome, busy_ms, simulate

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from timing import finish

_EXACT_PAIRS = 100 * 1000  # of shards and workers; beyond that shards are sampled
PARTS = ("sizes", "sampling", "modes", "remedies", "failures", "capacity")
_SAMPLED, _FEW = 32, 16  # shards
_LINK = "shard's link"
_CPU_SECONDS = 30 * 60
SIZES = ((8, 32), (16, 64), (32, 128), (64, 64), (64, 256), (100, 1000), (256, 1000), (1000, 10_000))
LIMITS = {  # of a shard, by what uses them up
    "connections, one of each worker (`--connections`)": 10_000,
    "workers whose pulls' ids it keeps for their pushes": 4096,
    "workers in all": 65_536,
}


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Markdown."""
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(flush=True)


def run(c: Cluster, prices: Prices, sampled: int | None = None) -> Outcome:
    """Simulate a cluster, exactly where it is small enough."""
    if sampled is None:
        sampled = _SAMPLED if c.shards * c.workers > _EXACT_PAIRS else 0
    warmup, steps = (5, 10) if c.workers > 1000 else (6, 16)
    return simulate(c, prices, sampled=sampled, warmup=warmup, steps=steps)


def figures(found: Outcome) -> list[str]:
    """Speed, steps, and what is busy, the busiest in bold."""
    shares = [f"**{share:.0%}**" if part == found.first else f"{share:.0%}" for part, share in found.busy.items()]
    speed = f"{found.samples_per_second / 1e6:.2f} M"
    return [speed, f"{found.p50_ms:,.0f}", f"{found.p99_ms:,.0f}", *shares, f"{found.refused:.3f}"]


HEADER = ("samples/s", "step p50, ms", "p99, ms", "worker's compute", "worker's CPU", "worker's link", "shard's CPU",
          "shards' link", "refused per message")  # fmt: skip


def timed(name: str, seconds: dict[str, float], c: Cluster, prices: Prices, sampled: int | None = None) -> Outcome:
    """Simulate a cluster, and note the CPU time that it took."""
    start = time.process_time()
    found = run(c, prices, sampled)
    seconds[name] = round(time.process_time() - start, 1)
    return found


def sizes(base: Cluster, prices: Prices, seconds: dict[str, float]) -> Iterator[tuple[str, Outcome]]:
    """Clusters of every size."""
    simulate(base, prices, sampled=_FEW, steps=1, warmup=1)  # compiled before anything is timed
    for shards, workers in SIZES:
        name = f"{shards} x {workers:,}"
        yield name, timed(name, seconds, replace(base, shards=shards, workers=workers), prices)


def few(base: Cluster) -> Cluster:
    """The same cluster with as few workers as the shards keep up with."""
    return replace(base, workers=max(1, base.workers // 8))


def modes(base: Cluster, prices: Prices) -> Iterator[tuple[str, Outcome]]:
    """Every mode, with workers that are alike and with some that are slow."""
    for slow in (0.0, 0.05):
        for staleness in (-1, base.prefetch, 0):
            c = replace(in_mode(few(base), staleness), slow_share=slow)
            name = f"{mode_name(c)}, {slow:.0%} of the workers {c.slow_factor:.0f}x slower" if slow else mode_name(c)
            yield f"{c.shards} x {c.workers}, {name}", run(c, prices)


def remedies(base: Cluster, prices: Prices) -> Iterator[tuple[str, Outcome]]:
    """What changes the speed; by samples of the shards."""
    changes: dict[str, dict[str, Any]] = {
        "as above": {},
        "twice the shards": {"shards": 2 * base.shards},
        "half of the shards": {"shards": base.shards // 2},
        "one shard per machine": {"shards_per_machine": 1},
        "batch x 4": {"batch": 4 * base.batch},
        "half of the rows from a cache in the worker": {"cached": 0.5},
        "rows and gradients in 8 bits": {"row_bytes": 0.25},
        "dense weights by all-reduce": {"dense": False},
        "batch x 4, dense by all-reduce, 8 bits": {"batch": 4 * base.batch, "dense": False, "row_bytes": 0.25},
        "one client for 8 workers, batch x 8": {"batch": 8 * base.batch, "workers": base.workers // 8,
                                                "compute_ms": base.compute_ms / 8},
        "messages as dear as beside training on one CPU": {"cold": True},
    }  # fmt: skip
    for name, change in changes.items():
        yield name, run(replace(base, **change), prices, _FEW)


def sampling(base: Cluster, prices: Prices, seconds: dict[str, float]) -> Iterator[tuple[str, Outcome]]:
    """100 x 1,000 by samples of the shards, to be held against the line of `sizes`, which has all."""
    for sampled in (_FEW, _SAMPLED):
        name = f"100 x 1,000 by {sampled} shards"
        yield name, timed(name, seconds, replace(base, shards=100, workers=1000), prices, sampled)


def print_capacity(base: Cluster, prices: Prices) -> None:
    """Workers that the shards keep up with, without queues."""
    rows = []
    for shards in (8, 16, 32, 64, 128, 256, 1000):
        for compute in (base.compute_ms, 7 * base.compute_ms):
            c = replace(base, shards=shards, workers=1, compute_ms=compute)
            busy = busy_ms(c, prices, prices.routed(c.batch, shards))
            served, own = busy["shard's CPU"], busy["worker's CPU"]
            keeps = "yes" if own <= compute else "no"
            by = [f"{compute / served:.0f}", f"{compute / busy[_LINK]:.0f}"]
            rows.append([str(shards), f"{compute:.0f}", f"{served * 1e3:.0f}", *by, f"{own:.1f} ({keeps})"])
    header = ["shards", "compute, ms", "a shard's us per worker and step", "by the shard's CPU", "by the shards' links"]
    print_table([*header, "worker's CPU, ms (within its compute)"], rows)


def print_limits() -> None:
    """What the largest clusters use of what a shard takes."""
    rows = []
    for name, limit in LIMITS.items():
        used = [f"{workers:,}{' (over)' if workers > limit else ''}" for _, workers in SIZES[-4:]]
        rows.append([name, f"{limit:,}", *used])
    print_table(["of a shard", "limit", *(f"{s} x {w:,}" for s, w in SIZES[-4:])], rows)


def add_options(parser: argparse.ArgumentParser, defaults: object) -> None:
    """An option for every number of a dataclass."""
    for field in fields(defaults):  # type: ignore[arg-type]
        value = getattr(defaults, field.name)
        if not isinstance(value, bool):
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(value), default=value)


def chosen(kind: type, args: argparse.Namespace) -> Any:
    """A dataclass of the options that were given."""
    return kind(**{field.name: getattr(args, field.name) for field in fields(kind) if hasattr(args, field.name)})


def print_prices(prices: Prices) -> None:
    """What the simulation is made of."""
    rows = []
    for side, p, cold in (
        ("worker", prices.worker, prices.cold_worker_us),
        ("shard", prices.shard, prices.cold_shard_us),
    ):
        us = [f"{value:.0f} us" for value in (p.call_us, p.message_us, p.wake_us, cold)]
        rows.append([side, *us, f"{p.row_ns:.0f} ns", f"{p.kb_ns:.0f} ns", f"{p.error:.0%}"])
    header = ["CPU", "per call", "per message", "to wake up", "more beside training", "per row pulled and pushed"]
    print(f"Prices ({prices.machine}):\n")
    print_table([*header, "per KB", "median error of the fit"], rows)
    far = prices.far_pull_ns + prices.far_push_ns
    print(f"A row of a table of the assumed size costs the shard {far:.0f} ns more.\n", flush=True)


def print_costs(costs: Sequence[Cost]) -> None:
    """What each failure costs."""
    rows = [[c.what, c.mode, f"{c.away_s:.0f}", f"{c.lost_s:.1f}", f"{c.samples / 1e6:,.1f} M"] for c in costs]
    print_table(["what fails", "mode", "away, s", "work lost, s of the whole cluster", "samples"], rows)


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, default=Path("docs/scaling.json"), help="of bar-scale")
    parser.add_argument("--output", type=Path, default=Path("runs/cluster"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    add_options(parser, Cluster())
    add_options(parser, Recovery())
    return parser.parse_args()


def main() -> None:
    args = parse()
    base, recovery = chosen(Cluster, args), chosen(Recovery, args)
    prices = Prices(json.loads(args.measured.read_text()), recovery.resident)
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / "simulated.json"
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    seconds: dict[str, float] = {}
    parts = {"sizes": sizes(base, prices, seconds), "sampling": sampling(base, prices, seconds),
             "modes": modes(base, prices), "remedies": remedies(base, prices)}  # fmt: skip
    print_prices(prices)
    for name in args.only:
        print(f"{name} ({base.shards} shards x {base.workers} workers where nothing else is said):\n", flush=True)
        if name == "failures":
            costs = list(failure_costs(few(base), prices, recovery))
            kept[name] = [asdict(cost) for cost in costs]
            print_costs(costs)
        elif name == "capacity":
            print_capacity(base, prices)
            print_limits()
        else:
            outcomes = dict(parts[name])
            kept[name] = {k: {f: v for f, v in asdict(o).items() if f != "ends"} for k, o in outcomes.items()}
            print_table(["", *HEADER], [[what, *figures(outcome)] for what, outcome in outcomes.items()])
        kept["cpu_seconds"] = {**kept.get("cpu_seconds", {}), **seconds}
        path.write_text(json.dumps(kept, indent=1) + "\n")
    used = sum(kept["cpu_seconds"].get(name, 0.0) for name in ("100 x 1,000", "1000 x 10,000"))
    failures = [f"100 x 1,000 and 1,000 x 10,000 took {used:.0f} s of CPU"] if used > _CPU_SECONDS else []
    finish({"bench": "simulated cluster", "cpu_seconds": kept["cpu_seconds"]}, failures)


if __name__ == "__main__":
    main()
