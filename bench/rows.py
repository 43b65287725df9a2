"""One hundred million rows of dim 16 with row-wise Adagrad: inserted by pushes, trained, and what a row then costs.

At 10^5, 10^6, 10^7 and 10^8 rows: bytes per row (all of it: record, index, empty cells), memory of the process, and
the cost of a pulled and of a pushed row, ids uniform over the rows that exist, beside torch.index_select on a dense
tensor with the same number of rows. One thread; figures are its CPU time, medians of interleaved repeats. Some rows are
watched: they are in every training push, and must end where the plain reference ends.

Each is measured twice. First as the rows lie after they were inserted ("first touch"): on a virtual machine whose host
takes away the memory that was not used for a while, that is mostly the host's work. Then after a byte of every 4 KiB of
the table and of torch's tensor was read ("touched"), which is the table's own cost.

Bar: the table's process, without torch's tensor, stays under 20 GiB, the watched rows are right, and of the most rows a
touched one takes at most 1.2 times as long to pull as by torch.index_select.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from embershard.proto.spec import RowWiseAdagrad, TableSpec, Uniform
from embershard.ps.table.hash_index import NUM_PAGES, PAGE_CELLS
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.reference import ReferenceTable
from embershard.ps.table.table import Table
from timing import finish, machine, median, print_table, resident_bytes, thread_seconds

DIM, BATCH = 16, 65_536
LIMIT_BYTES = 20 << 30
PULL_BAR = 1.2  # of torch.index_select, which has no index
WATCHED = 200
PAGE_BYTES = 4096
FIRST_REPEATS = 5  # more would touch much of a small table, and so measure what is measured next
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

    def touch(self) -> float:
        """Read a byte of each page of the table and of torch's tensor; ns of CPU per page."""
        store, count = self.table._store, self.table.num_rows
        used = store.floats[: count * int(store.stride)], store.cells[: int(store.counters[NUM_PAGES]) * PAGE_CELLS]
        pages = [array.view(np.uint8)[::PAGE_BYTES] for array in (*used, self.dense[:count].numpy().reshape(-1))]
        return sum(thread_seconds(page.sum) for page in pages) / sum(map(len, pages)) * 1e9

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
        run.dense[:size] = 0.5
        first, page, found = run.measure(FIRST_REPEATS), run.touch(), run.measure(args.repeats)
        dense_bytes = size * DIM * 4
        per_row = run.table.nbytes / size
        curve[str(size)] = {
            **{f"{name}_ns": round(value, 1) for name, value in found.items()},
            **{f"first_touch_{name}_ns": round(value, 1) for name, value in first.items()},
            "first_touch_page_ns": round(page, 1),
            "insert_ns": round(insert, 1),
            "bytes_per_row": round(per_row, 1),
            "resident_gib": round(resident / 2**30, 2),
        }
        both = [f"{first[name]:.1f}, {found[name]:.1f}" for name in ("pull", "index_select", "push")]
        rows.append([f"{size:,}", *both, page, insert, per_row, resident / 2**30])
        print(f"{size:,} rows: {per_row:.1f} bytes each, {resident / 2**30:.2f} GiB resident", flush=True)
    print("ns of CPU: at the first touch, touched")
    header = ["rows", "pull", "index_select", "push", "touch of a page", "insert (wall)", "bytes/row", "GiB"]
    print_table(header, rows)
    ratio = found["pull"] / found["index_select"]
    failures = []
    if ratio > PULL_BAR:
        failures.append(
            f"a pull of {args.rows:,} touched rows takes {ratio:.2f}x torch.index_select's, at most {PULL_BAR}x"
        )
    if resident > LIMIT_BYTES:
        failures.append(f"{resident / 2**30:.1f} GiB resident, the bar is {LIMIT_BYTES >> 30} GiB")
    error = run.error()
    if not error < 1e-5:
        failures.append(f"watched rows differ from the reference by {error}")
    measured = (resident - before) / args.rows
    result = {"dim": DIM, "rows": args.rows, "measured_bytes_per_row": round(measured, 1), "watched_error": error}
    result["pull_to_index_select"] = round(ratio, 2)
    finish({"bench": "rows", **result, "curve": curve}, failures)


if __name__ == "__main__":
    main()
