"""What the route of a large batch takes whose ids all belong to one table: scattered by hash first, and not.

Ids of 26 features of 10 million values each, Zipf 1.15, and uniform ones; two shards, one thread. Ids are scattered
from 2^18 on. CPU time, medians; memory that was freed is used again, as in a worker.
"""

from __future__ import annotations

import argparse

import numpy as np

from embershard.proto import routing
from embershard.worker.device import keep_freed_memory
from timing import finish, machine, median, print_table, thread_seconds

FEATURES, VALUES = 26, 10_000_000


def make_ids(count: int, kind: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    if kind == "uniform":
        return rng.integers(0, FEATURES * VALUES, count)
    return (rng.zipf(1.15, count) % VALUES + np.arange(count) % FEATURES * VALUES).astype(np.int64)


def seconds(ids: np.ndarray, rounds: int) -> tuple[float, float]:
    """Of the plain way and of the other one, in turn."""
    placement, ways = routing.Placement.even(2), (list[float](), list[float]())
    for _ in range(rounds + 1):
        for way, many in zip(ways, (2**62, 0), strict=True):
            routing._MANY = many
            way.append(thread_seconds(lambda: routing.make_route(ids, 7, placement)))
    return median(ways[0][1:]), median(ways[1][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    keep_freed_memory()
    rows, ratios = [], {}
    for count in (2**16, 2**18, 2**19, 65536 * FEATURES, 2**22):
        for kind in ("Zipf", "uniform"):
            plain, scattered = seconds(make_ids(count, kind), args.rounds)
            ratios[f"{count} {kind}"] = ratio = round(plain / scattered, 2)
            rows.append((f"{count:,}", kind, f"{1e3 * plain:.2f}", f"{1e3 * scattered:.2f}", ratio))
    print_table(("ids", "values", "plain, ms", "scattered, ms", "ratio"), rows)
    large = {name: ratio for name, ratio in ratios.items() if int(name.split()[0]) >= 2**19}
    failures = [f"{name}: {ratio}x" for name, ratio in large.items() if ratio < 1]
    finish({"machine": machine(), "bench": "route", "ratios": ratios}, failures)


main()
