"""What restoring rows costs a table, against applying gradients to as many, in one run.

Rows of random 64-bit ids come in blocks, as a file of a snapshot or of a log's base has them, in random order:

new        into an empty table: restore (weights and state) | apply (Adagrad), which creates the rows
filling    into an empty table that is told their number, as a recovery tells it: its index is made for them at once,
           and another thread takes their memory, which is not counted here
existing   onto rows that are there, in another order: restore | apply
copy       the floor: copying as many bytes, rows and states, in order

CPU time of this thread in ns per row, medians of interleaved repeats. Bar: restore within 1.1x of apply for either.
"""

from __future__ import annotations

import argparse

import numpy as np

from embershard.proto.spec import Adagrad, TableSpec, Uniform
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Table
from timing import finish, load, machine, median, print_table, thread_seconds

BAR = 1.1


class Rows:
    """Ids, weights and states in blocks."""

    def __init__(self, count: int, dim: int, block: int) -> None:
        rng = np.random.default_rng(1)
        self.count, self.dim, self.block = count, dim, block
        self.ids = np.unique(rng.integers(-(2**63), 2**63 - 1, count, np.int64))
        rng.shuffle(self.ids)
        self.other_order = rng.permutation(self.ids)
        self.values = rng.standard_normal((block, dim), np.float32)
        self.spec = TableSpec(name="rows", dim=dim, optimizer=Adagrad(lr=0.05), initializer=Uniform())
        self.copies = np.empty((2 * block, dim), np.float32)

    def table(self) -> Table:
        return Table(self.spec, OptimizerRegistry().find(self.spec.optimizer))

    def restore(self, table: Table, order: np.ndarray) -> None:
        for start in range(0, len(order), self.block):
            ids = order[start : start + self.block]
            table.restore(ids, self.values[: len(ids)], self.values[: len(ids)])

    def fill(self, table: Table, order: np.ndarray) -> None:
        with table.filling(len(order)):
            self.restore(table, order)

    def apply(self, table: Table, order: np.ndarray) -> None:
        for start in range(0, len(order), self.block):
            ids = order[start : start + self.block]
            table.apply(ids, self.values[: len(ids)])

    def copy(self) -> None:
        for _ in range(0, len(self.ids), self.block):
            self.copies[: self.block] = self.values
            self.copies[self.block :] = self.values


def measure(rows: Rows, repeats: int) -> dict[str, float]:
    """Median ns per row of every side."""
    seconds: dict[str, list[float]] = {}
    for _ in range(repeats):
        restored, filled, applied = rows.table(), rows.table(), rows.table()
        for name, work in (
            ("restore new", lambda: rows.restore(restored, rows.ids)),  # noqa: B023
            ("restore filling", lambda: rows.fill(filled, rows.ids)),  # noqa: B023
            ("apply new", lambda: rows.apply(applied, rows.ids)),  # noqa: B023
            ("restore existing", lambda: rows.restore(applied, rows.other_order)),  # noqa: B023
            ("apply existing", lambda: rows.apply(restored, rows.other_order)),  # noqa: B023
            ("copy", rows.copy),
        ):
            seconds.setdefault(name, []).append(thread_seconds(work) / len(rows.ids) * 1e9)
        assert restored.num_rows == filled.num_rows == applied.num_rows == len(rows.ids)
    return {name: round(median(values), 1) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--block", type=int, default=262_144)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(f"{machine()}; {load()}; {args.rows:,} rows, blocks of {args.block:,}; ns per row")
    lines, results, failures = [], {}, []
    for dim in args.dims:
        found = measure(Rows(args.rows, dim, args.block), args.repeats)
        for kind, other in (("new", "new"), ("filling", "new"), ("existing", "existing")):
            ratio = found[f"restore {kind}"] / found[f"apply {other}"]
            lines.append([f"dim {dim} {kind}", found[f"restore {kind}"], found[f"apply {other}"], ratio, found["copy"]])
            if ratio > BAR:
                failures.append(f"dim {dim}, {kind}: {ratio:.2f}x apply, the bar is {BAR}x")
        results[f"dim{dim}"] = found
    print_table(["", "restore", "apply", "restore / apply", "copy"], lines)
    finish({"bench": "restore", "rows": args.rows, "block": args.block, "load": load(), **results}, failures)


if __name__ == "__main__":
    main()
