"""Carries the costs that bench/scale.py measured on one machine to a cluster: what each part of it does per step.

Reads scale.json and prints the tables of docs/scaling.md, as Markdown. Measured: CPU per message, per row and per byte
of a worker and of a shard, by least squares over the pulls and pushes of the curve `messages`, and the price of a row
in a table far larger than the caches. Assumed: everything else, and every assumption is an option.

A step lasts as long as its busiest part, since prefetch overlaps them all. What a part does in a step grows with

    worker's CPU    2 S messages + R rows + their bytes                            S shards, W workers,
    worker's link   rows and dense weights down, ids and gradients up              R unique rows per step and worker
    shard's CPU     W x (2 messages + R / S rows x imbalance + their bytes)
    shard's link    W x bytes / S x shards per machine
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from embershard.benchmark.ids import ZipfIds
from embershard.benchmark.settings import FIELDS, NUM_DENSE, Train
from embershard.proto.routing import Placement, make_route
from embershard.worker.models.ctr.dlrm import DLRM
from embershard.worker.models.recommender import num_dense_parameters

ID_BYTES, FLOAT_BYTES = 8, 4
_FILLED = 10**6  # rows of the tables that the fit's points were measured with


@dataclass(frozen=True)
class Price:
    """CPU of one side, fitted: us per message, ns per row that is pulled and pushed, ns per KB of it."""

    message_us: float
    row_ns: float
    kb_ns: float
    error: float  # of the fit: median of |fitted / measured - 1|

    def ms(self, messages: float, rows: float, num_bytes: float) -> float:
        return (self.message_us * 1e3 * messages + self.row_ns * rows + self.kb_ns * num_bytes / 1e3) / 1e6


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What is assumed of a cluster and of the work of a step."""

    shards: int = 64
    workers: int = 256
    gbit: float = 25.0  # of every machine's link, each way
    shards_per_machine: int = 8
    batch: int = 2048
    dim: int = 64
    compute_ms: float = 10.0  # forward and backward of 2,048 samples, on a GPU
    dense: bool = True  # dense weights on the shards; False: workers reduce their gradients among themselves
    cached: float = 0.0  # share of the rows that a worker need not pull
    row_bytes: float = 1.0  # of rows and gradients, to float32's


def fit(points: Sequence[Mapping[str, Any]], key: str) -> Price:
    """Least squares of relative errors: a message's price shows in small steps, a byte's in large ones."""
    work = []
    for point in points:
        rows, dim = point["rows_per_step"], point["settings"]["dim"]
        moved = rows * (ID_BYTES + 2 * FLOAT_BYTES * dim)
        work.append([2 * point["settings"]["shards"] * 1e3, rows, moved / 1e3])
    matrix, ns = np.array(work), np.array([point[key] for point in points]) * 1e6
    scaled = matrix / ns[:, None]
    active = [0, 1, 2]
    while True:  # a price is not below zero: what would be is left out
        solution = np.linalg.lstsq(scaled[:, active], np.ones(len(ns)), rcond=None)[0]
        if (solution >= 0).all():
            break
        active.pop(int(np.argmin(solution)))
    prices = np.zeros(3)
    prices[active] = solution
    message_us, row_ns, kb_ns = (float(price) for price in prices)
    return Price(message_us, row_ns, kb_ns, error=float(np.median(np.abs(scaled @ prices - 1))))


class Model:
    """Busy milliseconds of every part of a cluster."""

    def __init__(self, measured: Mapping[str, Any], resident: int) -> None:
        points = [p for name, curve in measured["curves"].items() if name.startswith("messages") for p in curve]
        # a shard with a core to itself, as in a cluster: eight on two cores cost each other their caches
        alone = [point for point in points if point["settings"]["shards"] == 1]
        self.worker = fit([point for point in points if point["settings"]["workers"] == 1], "worker_cpu_ms")
        self.shard = fit(alone, "shard_cpu_ms")
        curve = {int(rows): figures for rows, figures in measured["rows"]["curve"].items()}
        large = min(curve, key=lambda rows: abs(rows - resident))
        small = min(curve, key=lambda rows: abs(rows - _FILLED))
        self.far_ns = sum(curve[large][side] - curve[small][side] for side in ("pull_ns", "push_ns"))
        self.source = ZipfIds(Train().rows // FIELDS, Train().skew)
        self.dense_bytes = FLOAT_BYTES * num_dense_parameters(DLRM(FIELDS, FIELDS, 64, NUM_DENSE, device="meta"))
        self.routes: dict[tuple[int, int], tuple[int, float]] = {}

    def routed(self, batch: int, shards: int) -> tuple[int, float]:
        """Unique rows of a batch, and the fullest shard's share of them to the mean: the routes that training makes."""
        if (batch, shards) not in self.routes:
            ids = self.source.draw(np.random.default_rng(0), (batch, FIELDS)) + np.arange(FIELDS) * (
                Train().rows // FIELDS
            )
            route = make_route(ids.reshape(-1), 1, Placement.even(shards))
            counts = np.diff(route.splits)
            self.routes[batch, shards] = len(route.ids), float(counts.max() / counts.mean())
        return self.routes[batch, shards]

    def busy(self, c: Cluster) -> dict[str, float]:
        """Milliseconds per step, by part."""
        rows, imbalance = self.routed(c.batch, c.shards)
        dense = self.dense_bytes if c.dense else 0
        floats = rows * c.dim * FLOAT_BYTES * c.row_bytes
        down = floats * (1 - c.cached) + dense
        up = rows * ID_BYTES + floats + dense
        moved = down + up
        fullest = rows * (1 - c.cached / 2) / c.shards * imbalance  # half of a row's price is its pull
        served = self.shard.ms(2, fullest, moved / c.shards) + self.far_ns * fullest / 1e6
        byte_ms = 8 / (c.gbit * 1e9) * 1e3
        return {
            "worker's compute": c.compute_ms * c.batch / 2048,
            "worker's CPU": self.worker.ms(2 * c.shards, rows, moved),
            "worker's link": max(down, up) * byte_ms,
            "shard's CPU": served * c.workers,
            "shard's link": max(down, up) * byte_ms * c.workers / c.shards * min(c.shards_per_machine, c.shards),
        }


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def print_prices(model: Model, measured: Mapping[str, Any]) -> None:
    print(f"Prices ({measured['curves']['messages'][0]['conditions']['machine']}):\n")
    table(
        ["CPU", "per message", "per row pulled and pushed", "per KB", "median error of the fit"],
        [
            [side, f"{p.message_us:.0f} us", f"{p.row_ns:.0f} ns", f"{p.kb_ns:.0f} ns", f"{p.error:.0%}"]
            for side, p in (("worker", model.worker), ("shard", model.shard))
        ],
    )
    print(f"A row of a table of the assumed size costs the shard {model.far_ns:.0f} ns more.\n")


def print_check(model: Model, measured: Mapping[str, Any]) -> None:
    """The prices come from pull and push alone; training, over Unix sockets, was measured apart from it."""
    print("CPU of all shards per training step of one worker, measured and by these prices:\n")
    rows = []
    for point in measured["curves"]["shards"]:
        shards, moved = point["settings"]["shards"], point["mb_per_second"] * 1e6 / point["steps_per_second"]
        priced = model.shard.ms(2 * shards, point["rows_per_step"], moved)
        found = point["shard_cpu_ms"]
        rows.append([f"{shards}", f"{found:.1f} ms", f"{priced:.1f} ms", f"{found / priced:.1f}"])
    table(["shards", "measured", "priced", "ratio"], rows)


def print_busy(model: Model, base: Cluster) -> None:
    print("Busy milliseconds per step of one worker; the step lasts as long as the largest:\n")
    rows = []
    for shards, workers in ((8, 32), (16, 64), (32, 128), (64, 64), (64, 256), (64, 1024), (256, 256), (256, 1024)):
        cluster = replace(base, shards=shards, workers=workers)
        busy = model.busy(cluster)
        first = max(busy, key=lambda part: busy[part])
        speed = workers * cluster.batch / busy[first] / 1e3
        figures = [f"**{ms:.1f}**" if part == first else f"{ms:.1f}" for part, ms in busy.items()]
        rows.append([f"{shards}", f"{workers}", *figures, f"{speed:.1f} M"])
    table(["shards", "workers", *model.busy(base), "samples/s"], rows)


def print_limits(model: Model, base: Cluster) -> None:
    print("Workers that the shards keep up with, by what a worker computes per step:\n")
    rows = []
    for shards in (8, 16, 32, 64, 128, 256):
        for compute in (base.compute_ms, 7 * base.compute_ms):
            one = model.busy(replace(base, shards=shards, workers=1))
            served, link, own = one["shard's CPU"], one["shard's link"], one["worker's CPU"]
            keeps = "yes" if own <= compute else "no"
            figures = [f"{served * 1e3:.0f}", f"{compute / served:.0f}", f"{compute / link:.0f}"]
            rows.append([f"{shards}", f"{compute:.0f}", *figures, f"{own:.1f} ({keeps})"])
    header = ["shards", "compute, ms", "a shard's us per worker and step", "by the shard's CPU", "by the shard's link"]
    table([*header, "worker's CPU, ms (within its compute)"], rows)


def print_remedies(model: Model, base: Cluster) -> None:
    print(f"What changes it, at {base.shards} shards and {base.workers} workers:\n")
    remedies = {
        "as above": base,
        "twice the shards": replace(base, shards=2 * base.shards),
        "batch x 4": replace(base, batch=4 * base.batch),
        "half of the rows from a cache in the worker": replace(base, cached=0.5),
        "rows and gradients in 8 bits": replace(base, row_bytes=0.25),
        "dense weights by all-reduce": replace(base, dense=False),
        "batch x 4, dense by all-reduce": replace(base, batch=4 * base.batch, dense=False),
        "batch x 4, dense by all-reduce, 8 bits": replace(base, batch=4 * base.batch, dense=False, row_bytes=0.25),
    }
    rows = []
    for name, cluster in remedies.items():
        busy = model.busy(cluster)
        first = max(busy, key=lambda part: busy[part])
        speed = cluster.workers * cluster.batch / busy[first] / 1e3
        rows.append([name, *(f"**{ms:.1f}**" if part == first else f"{ms:.1f}" for part, ms in busy.items()),
                     f"{speed:.1f} M"])  # fmt: skip
    table(["", *model.busy(base), "samples/s"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, nargs="?", default=Path("runs/scale/scale.json"))
    parser.add_argument("--resident", type=int, default=10**8, help="rows of each shard")
    for name, value in vars(Cluster()).items():
        if not isinstance(value, bool):
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = vars(parser.parse_args())
    measured = json.loads(args.pop("measured").read_text())
    model = Model(measured, args.pop("resident"))
    base = Cluster(**args)
    rows, imbalance = model.routed(base.batch, base.shards)
    print_prices(model, measured)
    print_check(model, measured)
    ids = base.batch * FIELDS
    print(
        f"{base.batch:,} samples hold {ids:,} ids, {rows:,} unique ({rows / ids:.0%}); of {base.shards} shards the "
        f"fullest gets {imbalance:.2f}x the mean. Dense weights: {model.dense_bytes / 1e6:.1f} MB.\n"
    )
    print_busy(model, base)
    print_limits(model, base)
    print_remedies(model, base)


if __name__ == "__main__":
    main()
