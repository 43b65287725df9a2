"""One hundred million rows of dim 16 with row-wise Adagrad: inserted by pushes, trained, and what a row then costs.

At 10^5, 10^6, 10^7 and 10^8 rows: bytes per row (all of it: record, index, empty cells), memory of the process, and
the cost of a pulled and of a pushed row, ids uniform over the rows that exist, beside torch.index_select on a dense
tensor with the same number of rows. One thread; figures are its CPU time, medians of interleaved repeats. Some rows are
watched: they are in every training push, and must end where the plain reference ends.

Bar: the table's process, without torch's tensor, stays under 20 GiB, and the watched rows are right.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from embershard.proto.spec import RowWiseAdagrad, TableSpec, Uniform
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.reference import ReferenceTable
from embershard.ps.table.table import Table
from timing import finish, machine, median, print_table, resident_bytes, thread_seconds

DIM, BATCH = 16, 65_536
LIMIT_BYTES = 20 << 30
WATCHED = 200
GOLDEN = 0x9E3779B97F4A7C15  # odd: a bijection of 64-bit numbers


def id_of(numbers: np.ndarray) -> np.ndarray:
    """(N,) int64 ids over the whole 64-bit range, one for each number."""
    return (numbers.astype(np.uint64) * np.uint64(GOLDEN)).view(np.int64)


class Run:
    """The table, the reference of its watched rows, and torch's dense tensor."""

    def __init__(self, num_rows: int) -> None:
        spec = TableSpec(name="rows", dim=DIM, optimizer=RowWiseAdagrad(lr=0.05), initializer=Uniform())
        optimizer = OptimizerRegistry().find(spec.optimizer)
        self.table, self.reference = Table(spec, optimizer), ReferenceTable(spec, optimizer)
        self.rng = np.random.default_rng(0)
        self.gradients = self.rng.standard_normal((BATCH, DIM), np.float32) * 0.01
        self.dense = torch.empty(num_rows, DIM)  # written, and so in memory, only as far as it is measured
        self.out = torch.zeros(BATCH, DIM)

    def insert(self, until: int) -> float:
        """Push rows until there are so many; seconds per row."""
        start, first = time.perf_counter(), self.table.num_rows
        for number in range(first, until, BATCH):
            ids = id_of(np.arange(number, min(number + BATCH, until)))
            self.table.apply(ids, self.gradients[: len(ids)])
            if number == 0:
                self.reference.apply(ids[:WATCHED], self.gradients[:WATCHED])
        return (time.perf_counter() - start) / (until - first)

    def measure(self, repeats: int) -> dict[str, float]:
        """Median ns per row of a pull, a push, and torch's index_select; each push trains the watched rows too."""
        count = self.table.num_rows
        self.dense[:count] = 0.5
        watched = id_of(np.arange(WATCHED))
        seconds: dict[str, list[float]] = {"pull": [], "push": [], "index_select": []}
        for _ in range(repeats):
            numbers = [self.rng.integers(WATCHED, count, BATCH) for _ in range(3)]
            pulled, pushed, rows = id_of(numbers[0]), id_of(numbers[1]), torch.from_numpy(numbers[2])
            pushed[:WATCHED] = watched
            seconds["pull"].append(thread_seconds(lambda: self.table.gather(pulled, self.out.numpy())))  # noqa: B023
            seconds["push"].append(thread_seconds(lambda: self.table.apply(pushed, self.gradients)))  # noqa: B023
            seconds["index_select"].append(
                thread_seconds(lambda: torch.index_select(self.dense, 0, rows, out=self.out))  # noqa: B023
            )
            self.reference.apply(watched, self.gradients[:WATCHED])
        return {name: median(values) / BATCH * 1e9 for name, values in seconds.items()}

    def error(self) -> float:
        """Largest difference of a watched row from the reference."""
        watched = id_of(np.arange(WATCHED))
        return float(np.abs(self.table.gather(watched) - self.reference.gather(watched)).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000_000, help="rows in the end (for a quick run: 1000000)")
    parser.add_argument("--repeats", type=int, default=21)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}; dim {DIM}, row-wise Adagrad, batches of {BATCH:,} ids", flush=True)
    before = resident_bytes()
    run = Run(args.rows)
    rows: list[list[object]] = []
    curve: dict[str, dict[str, float]] = {}
    sizes = [size for size in (10**5, 10**6, 10**7, 10**8) if size < args.rows] + [args.rows]
    dense_bytes = 0
    for size in sizes:
        insert = run.insert(size) * 1e9
        resident = resident_bytes() - dense_bytes
        found = run.measure(args.repeats)
        dense_bytes = size * DIM * 4
        per_row = run.table.nbytes / size
        curve[str(size)] = {
            **{f"{name}_ns": round(value, 1) for name, value in found.items()},
            "insert_ns": round(insert, 1),
            "bytes_per_row": round(per_row, 1),
            "resident_gib": round(resident / 2**30, 2),
        }
        rows.append([f"{size:,}", found["pull"], found["index_select"], found["push"], insert, per_row,
                     resident / 2**30])  # fmt: skip
        print(f"{size:,} rows: {per_row:.1f} bytes each, {resident / 2**30:.2f} GiB resident", flush=True)
    header = ["rows", "pull ns", "index_select ns", "push ns", "insert ns (wall)", "bytes/row", "GiB"]
    print_table(header, rows)
    failures = []
    if resident > LIMIT_BYTES:
        failures.append(f"{resident / 2**30:.1f} GiB resident, the bar is {LIMIT_BYTES >> 30} GiB")
    error = run.error()
    if not error < 1e-5:
        failures.append(f"watched rows differ from the reference by {error}")
    measured = (resident - before) / args.rows
    result = {"dim": DIM, "rows": args.rows, "measured_bytes_per_row": round(measured, 1), "watched_error": error}
    finish({"bench": "rows", **result, "curve": curve}, failures)


if __name__ == "__main__":
    main()
