"""A table grows from nothing to 20 million rows of dim 16 while it is pulled from: the worst single pull and push.

Each round pushes a batch of new rows, then pulls as many rows that exist (one in eight of them unseen). Nothing may
stop the table: the index is split a page at a time and records never move. The other side is a dense tensor that grows
as arrays do, by copying itself into one twice as large, and whose worst push is that copy.

Times are wall times, since a stall is a wait; the CPU time of the worst call stands beside it, to tell a stall of the
table from one of the machine. The compiled code is loaded before, by another table.

Bar: no pull takes more than 8 times the CPU time of the median. One that does is repeated at once, with the same ids.
If it changed nothing of the table, the repeat does the same work; if it took no page fault either, and the repeat is
within the bar, then it waited for memory that the table had mapped and this system held, but that the host of this
virtual machine had taken away. Such pulls are counted apart.
"""

from __future__ import annotations

import argparse
import resource
import time
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from embershard.proto.spec import Adagrad, TableSpec, Uniform
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Table
from timing import finish, machine, print_table

DIM = 16
PULL_BAR = 8.0  # worst to median: a pull may meet cold caches, but no rehash and no new memory
SETTLED = 16  # calls whose median says what a call takes
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


class SlowPull(NamedTuple):
    """A pull over the bar, and its repeat."""

    rows: int
    cpu_ms: float
    did_more: bool  # than read: it changed the table, or had pages mapped
    repeat_cpu_ms: float


class Pulls(Requests):
    """All pulls, how many did more than read, and those over the bar."""

    def __init__(self) -> None:
        super().__init__()
        self.did_more = 0
        self.slow: list[SlowPull] = []


def what_changes(table: Table) -> tuple[object, ...]:
    """The arrays and counters of a table, and the page faults of this thread so far."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return id(table._store), table._counters.tobytes(), usage.ru_minflt, usage.ru_majflt


def new_table(name: str) -> Table:
    spec = TableSpec(name=name, dim=DIM, optimizer=Adagrad(lr=0.05), initializer=Uniform())
    return Table(spec, OptimizerRegistry().find(spec.optimizer))


def of_host(slow: list[SlowPull], limit: float) -> list[SlowPull]:
    """Those that took so long because the memory that they read was not there."""
    return [pull for pull in slow if pull.cpu_ms > limit and not pull.did_more and pull.repeat_cpu_ms <= limit]


def ids_of(numbers: np.ndarray) -> np.ndarray:
    return (numbers.astype(np.uint64) * np.uint64(GOLDEN)).view(np.int64)


def grow(rows: int, batch: int) -> tuple[Pulls, Requests, Requests]:
    """Push and pull until there are so many rows, and grow a dense tensor: pulls, pushes, and those of the tensor."""
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((batch, DIM), np.float32)
    warm = new_table("warm")
    warm.apply(np.arange(batch), gradients)
    out = warm.gather(np.arange(batch))
    table = new_table("growth")
    dense, used = torch.zeros(batch, 2 * DIM), 0
    pull, push, dense_push = Pulls(), Requests(), Requests()
    for start in range(0, rows, batch):
        ids = ids_of(np.arange(start, start + batch))
        with push:
            table.apply(ids, gradients)
        ids = ids_of(rng.integers(0, start + batch + (start + batch) // 7, batch))
        before = what_changes(table)
        with pull:
            table.gather(ids, out)
        did_more = what_changes(table) != before
        pull.did_more += did_more
        if len(pull.cpu) > SETTLED and pull.cpu[-1] > PULL_BAR * np.median(pull.cpu):
            begin = time.thread_time()
            table.gather(ids, out)
            pull.slow.append(SlowPull(table.num_rows, pull.cpu[-1], did_more, (time.thread_time() - begin) * 1e3))
        with dense_push:
            if used == len(dense):
                grown = torch.zeros(2 * len(dense), 2 * DIM)
                grown[:used] = dense
                dense = grown
            dense[used : used + batch, :DIM] = torch.from_numpy(gradients)
            dense[used : used + batch, DIM:] = torch.from_numpy(gradients)
            used += batch
    return pull, push, dense_push


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--batch", type=int, default=16_384)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pull, push, dense_push = grow(args.rows, args.batch)
    rows = len(pull.wall) * args.batch
    print(f"{machine()}; 0 to {rows:,} rows of dim {DIM}, {len(pull.wall):,} pushes and pulls of {args.batch:,} ids")
    sides = {"pull": pull, "push": push, "push, dense and doubling": dense_push}
    figures: dict[str, dict[str, float]] = {name: calls.summary() for name, calls in sides.items()}
    print_table(["", *figures["pull"]], [[name, *found.values()] for name, found in figures.items()])
    print(f"{pull.did_more} pulls changed the table or had a page mapped")
    median = float(np.median(pull.cpu))
    host = of_host(pull.slow, PULL_BAR * median)
    taken_away = {one.cpu_ms for one in host}
    own = max(ms for ms in pull.cpu if ms not in taken_away) / median
    print(f"worst pull to median, CPU: {own:.2f}, at most {PULL_BAR}; {len(host)} over the bar for the host's memory")
    for one in host:
        print(f"at {one.rows:,} rows {one.cpu_ms:.2f} ms, reading alone; its repeat {one.repeat_cpu_ms:.2f} ms")
    figures["pull"] |= {"own_worst_to_median_cpu": round(own, 3), "over_for_host": len(host), "did_more": pull.did_more}
    figures["dense_push"] = figures.pop("push, dense and doubling")
    failures = [f"worst pull {own:.1f}x the median's CPU, at most {PULL_BAR}x"] if own > PULL_BAR else []
    by_size = pull.by_size(args.batch)
    finish({"bench": "growth", "rows": rows, "batch": args.batch, **figures, "pull_by_size": by_size}, failures)


if __name__ == "__main__":
    main()
