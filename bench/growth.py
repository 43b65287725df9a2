"""A table grows from nothing to 20 million rows of dim 16 while it is pulled from: the worst single pull and push.

Each round pushes a batch of new rows, then pulls as many rows that exist (one in eight of them unseen). Nothing may
stop the table: the index is split a page at a time and records never move. The other side is a dense tensor that grows
as arrays do, by copying itself into one twice as large, and whose worst push is that copy.

Times are wall times, since a stall is a wait; the CPU time of the worst call stands beside it, to tell a stall of the
table from one of the machine.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise

import numpy as np
import torch

from embershard.proto.spec import Adagrad, TableSpec, Uniform
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Table
from timing import finish, machine, print_table

DIM = 16
GOLDEN = 0x9E3779B97F4A7C15  # odd: a bijection of 64-bit numbers


class Requests:
    """Wall and CPU milliseconds of every call of one kind."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def __enter__(self) -> None:
        self._start = time.perf_counter(), time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.wall.append((time.perf_counter() - self._start[0]) * 1e3)
        self.cpu.append((time.thread_time() - self._start[1]) * 1e3)

    def by_size(self, batch: int) -> dict[str, dict[str, float]]:
        """What calls took while the table was about so large; each size is twice the one before."""
        stops = [16 << k for k in range(32) if 16 << k < len(self.wall)] + [len(self.wall)]
        curve = {}
        for start, stop in pairwise([0, *stops]):
            wall, cpu = self.wall[start:stop], self.cpu[start:stop]
            figures = {"p99_ms": np.quantile(wall, 0.99), "worst_ms": max(wall), "worst_cpu_ms": max(cpu)}
            curve[str(stop * batch)] = {name: round(float(value), 3) for name, value in figures.items()}
        return curve

    def summary(self) -> dict[str, float]:
        worst = int(np.argmax(self.wall))
        figures = {
            "median_ms": float(np.median(self.wall)),
            "p99_ms": float(np.quantile(self.wall, 0.99)),
            "worst_ms": self.wall[worst],
            "median_cpu_ms": float(np.median(self.cpu)),
            "worst_cpu_ms": max(self.cpu),
            "worst_to_median": self.wall[worst] / float(np.median(self.wall)),
        }
        return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--batch", type=int, default=16_384)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, batch = args.rows, args.batch
    spec = TableSpec(name="growth", dim=DIM, optimizer=Adagrad(lr=0.05), initializer=Uniform())
    table = Table(spec, OptimizerRegistry().find(spec.optimizer))
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((batch, DIM), np.float32)
    out = np.zeros((batch, DIM), np.float32)
    dense, used = torch.zeros(batch, 2 * DIM), 0
    push, pull, dense_push = Requests(), Requests(), Requests()

    def ids_of(numbers: np.ndarray) -> np.ndarray:
        return (numbers.astype(np.uint64) * np.uint64(GOLDEN)).view(np.int64)

    for start in range(0, rows, batch):
        ids = ids_of(np.arange(start, start + batch))
        with push:
            table.apply(ids, gradients)
        ids = ids_of(rng.integers(0, start + batch + (start + batch) // 7, batch))
        with pull:
            table.gather(ids, out)
        with dense_push:
            if used == len(dense):
                grown = torch.zeros(2 * len(dense), 2 * DIM)
                grown[:used] = dense
                dense = grown
            dense[used : used + batch, :DIM] = torch.from_numpy(gradients)
            dense[used : used + batch, DIM:] = torch.from_numpy(gradients)
            used += batch
    sides = {"pull": pull.summary(), "push": push.summary(), "push, dense and doubling": dense_push.summary()}
    print(
        f"{machine()}; 0 to {table.num_rows:,} rows of dim {DIM}, {len(pull.wall):,} pushes and pulls of {batch:,} ids"
    )
    print_table(["", *next(iter(sides.values()))], [[name, *figures.values()] for name, figures in sides.items()])
    keys = {name.split(",")[0] if "," not in name else "dense_push": figures for name, figures in sides.items()}
    finish({"bench": "growth", "rows": table.num_rows, "batch": batch, **keys, "pull_by_size": pull.by_size(batch)}, [])


if __name__ == "__main__":
    main()
