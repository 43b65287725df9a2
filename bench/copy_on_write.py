"""What a snapshot costs a shard: rows copied aside before they change, or a copy of the process by fork.

A table of dim 16 with Adagrad in this process, pushes of random ids. For either way: how long it pauses, what a
push costs before it, while the snapshot is open, and after it. For the fork the child only waits, as one that writes
does; the kernel copies a page of 4 KiB for the first change of each. CPU time of this thread, medians.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from embershard.proto.spec import Adagrad, TableSpec, Uniform
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Table
from timing import finish, machine, median, print_table, resident_bytes, thread_seconds

DIM = 16
TakeImage = Callable[[], AbstractContextManager[None]]


class Run:
    """The table, and pushes to it."""

    def __init__(self, num_rows: int, batch: int) -> None:
        spec = TableSpec(name="rows", dim=DIM, optimizer=Adagrad(lr=0.05), initializer=Uniform())
        self.table = Table(spec, OptimizerRegistry().find(spec.optimizer))
        self.rng = np.random.default_rng(0)
        self.num_rows, self.batch = num_rows, batch
        self.gradients = self.rng.standard_normal((batch, DIM), np.float32)
        for first in range(0, num_rows, batch):
            ids = np.arange(first, min(first + batch, num_rows))
            self.table.apply(ids, self.gradients[: len(ids)])

    def ns_per_row(self, work: Callable[[np.ndarray], object], repeats: int) -> float:
        seconds = []
        for _ in range(repeats):
            ids = self.rng.integers(0, self.num_rows, self.batch)
            seconds.append(thread_seconds(lambda: work(ids)))  # noqa: B023
        return median(seconds) / self.batch * 1e9

    def push(self, ids: np.ndarray) -> None:
        self.table.apply(ids, self.gradients)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        rows = self.table.freeze()
        yield
        self.table.thaw(rows)

    @contextmanager
    def forked(self) -> Iterator[None]:
        child = os.fork()
        if child == 0:
            while True:
                signal.pause()
        yield
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    def measure(self, take: TakeImage, repeats: int) -> dict[str, float]:
        before = self.ns_per_row(self.push, repeats), self.ns_per_row(self.table.gather, repeats)
        began, memory = time.perf_counter(), resident_bytes()
        with take():
            held = time.perf_counter() - began
            during = self.ns_per_row(self.push, repeats)
            grown = resident_bytes() - memory
        after = self.ns_per_row(self.push, repeats), self.ns_per_row(self.table.gather, repeats)
        return {
            "pause_ms": round(1000 * held, 2),
            "push_ns_before": round(before[0]),
            "push_ns_during": round(during),
            "push_ns_after": round(after[0]),
            "pull_ns_before": round(before[1]),
            "pull_ns_after": round(after[1]),
            "resident_mb_more": round(grown / 1e6),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--batch", type=int, default=16_384)
    parser.add_argument("--repeats", type=int, default=31)
    args = parser.parse_args()
    print(f"{machine()}; {args.rows:,} rows of dim {DIM}, Adagrad, pushes of {args.batch:,} ids", flush=True)
    run = Run(args.rows, args.batch)
    results = {
        "copied before change": run.measure(run.frozen, args.repeats),
        "fork": run.measure(run.forked, args.repeats),
    }
    names = list(results["fork"])
    print_table(["", *names], [[way, *(found[name] for name in names)] for way, found in results.items()])
    finish({"bench": "copy_on_write", "rows": args.rows, "batch": args.batch, **results}, [])


if __name__ == "__main__":
    main()
