"""Pull and push of one table without a network, against torch's index ops and against copying memory.

Ten million rows are resident on either side: ours under 64-bit ids in a hash index, torch's in dense tensors where the
id is the row number, so that torch has no lookup to do at all. One thread. Each figure is the CPU time of that thread,
in ms per million rows, the median of interleaved repeats.

pull   the unique ids of a batch: Table.gather          | torch.index_select
push   a batch of ids with duplicates and a gradient for each, Adagrad:
       make_route + sum_rows of the duplicates          | torch.unique + index_add_ of the duplicates
       + Table.apply (insert, check, update in one)     | + the same update of the rows in index ops
       torch's update is written twice: `plain` as in most hand-written trainers (index_copy_ the state, index_add_ the
       step with alpha=-lr), `tuned` as fast as we could make it (the step is scaled before index_add_).
copy   the floor: copying the same bytes in order, rows once for a pull, rows and state once for a push.

Our arena asks for huge pages and torch's allocator by default does not; THP_MEM_ALLOC_ENABLE=1 makes torch ask for
them too, which is worth seeing beside the default (the bars are for the default).

Bars: pull within 1.3x of torch.index_select; push at least 3x faster than the faster of torch's two ways.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from embershard.proto.routing import Placement, make_route, sum_rows
from embershard.proto.spec import Adagrad, TableSpec, Uniform
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Table
from timing import finish, load, machine, median, print_table, thread_seconds

LR, EPS = 0.05, 1e-10
PULL_BAR, PUSH_BAR = 1.3, 3.0
BATCHES = 4  # per repeat and side, so that no side finds its own last rows in the caches
PRIME = 2654435761  # over every number of rows here: spreads the hot ids over the table


class Sides:
    """The same rows twice, and the work of either side on one batch."""

    def __init__(self, num_rows: int, dim: int, batch: int) -> None:
        self.dim, self.num_rows, self.batch = dim, num_rows, batch
        self.spec = TableSpec(name="bench", dim=dim, optimizer=Adagrad(lr=LR, eps=EPS), initializer=Uniform())
        self.table = Table(self.spec, OptimizerRegistry().find(self.spec.optimizer))
        self.placement = Placement.even(1)
        self.weights = torch.empty(num_rows, dim)
        self.state = torch.zeros(num_rows, dim)
        self.gradients = torch.from_numpy(np.random.default_rng(1).standard_normal((batch, dim), np.float32) * 0.01)
        self.out = torch.empty(batch, dim)
        self.large = np.ones((8 * batch, 2 * dim), np.float32)  # to copy from and to, far over the caches
        self.copies = np.ones((8 * batch, 2 * dim), np.float32)
        order = np.random.default_rng(2).permutation(num_rows)
        nothing = np.zeros((1 << 18, dim), np.float32)
        for start in range(0, num_rows, 1 << 18):
            ids = order[start : start + (1 << 18)]
            self.table.apply(ids, nothing[: len(ids)])
            self.weights[torch.from_numpy(ids)] = torch.from_numpy(self.table.gather(ids))

    def pull(self, ids: np.ndarray) -> None:
        self.table.gather(ids, self.out.numpy()[: len(ids)])

    def torch_pull(self, ids: np.ndarray) -> None:
        torch.index_select(self.weights, 0, torch.from_numpy(ids), out=self.out[: len(ids)])

    def push(self, ids: np.ndarray) -> None:
        route = make_route(ids, self.spec.space_key, self.placement)
        self.table.apply(route.ids, sum_rows(route.index, self.gradients.numpy(), len(route.ids)))

    def torch_push(self, ids: np.ndarray, tuned: bool) -> None:
        unique, inverse = torch.unique(torch.from_numpy(ids), return_inverse=True)
        grads = torch.zeros(len(unique), self.dim).index_add_(0, inverse, self.gradients)
        state = self.state.index_select(0, unique).addcmul_(grads, grads)
        self.state.index_copy_(0, unique, state)
        step = grads.div_(state.sqrt_().add_(EPS))
        if tuned:
            self.weights.index_add_(0, unique, step.mul_(-LR))
        else:
            self.weights.index_add_(0, unique, step, alpha=-LR)

    def copy(self, count: int, width: int, part: int) -> None:
        start = part % 8 * self.batch
        np.copyto(self.copies[start : start + count, :width], self.large[start : start + count, :width])

    def difference(self) -> float:
        """Largest difference of a weight between the sides; both have done the same pushes only if this is small."""
        ids = np.arange(0, self.num_rows, max(1, self.num_rows // 100_000))
        return float((torch.from_numpy(self.table.gather(ids)) - self.weights[torch.from_numpy(ids)]).abs().max())


def draw(kind: str, rng: np.random.Generator, num_rows: int, batch: int) -> np.ndarray:
    """A batch's ids: uniform, or Zipf with exponent 1.2."""
    if kind == "uniform":
        return rng.integers(0, num_rows, batch)
    return rng.zipf(1.2, batch) % num_rows * PRIME % num_rows


def measure(sides: Sides, kind: str, repeats: int) -> dict[str, float]:
    """Median ns per row (= ms per million rows) of every side."""
    rng = np.random.default_rng(3)
    seconds: dict[str, list[float]] = {}

    def timed(name: str, rows: int, work: Callable[[], object]) -> None:
        seconds.setdefault(name, []).append(thread_seconds(work) / rows * 1e9)

    for repeat in range(repeats + 1):
        batches = [draw(kind, rng, sides.num_rows, sides.batch) for _ in range(BATCHES)]
        pulls = [make_route(ids, sides.spec.space_key, sides.placement).ids for ids in batches]
        rows, ids = sum(map(len, pulls)), sum(map(len, batches))
        timed("pull", rows, lambda pulls=pulls: [sides.pull(p) for p in pulls])
        timed("torch pull", rows, lambda pulls=pulls: [sides.torch_pull(p) for p in pulls])
        timed("copy pull", rows, lambda p=pulls: [sides.copy(len(x), sides.dim, i) for i, x in enumerate(p)])
        timed("push", ids, lambda batches=batches: [sides.push(b) for b in batches])
        timed("copy push", ids, lambda p=pulls: [sides.copy(len(x), 2 * sides.dim, i) for i, x in enumerate(p)])
        timed("torch push", ids, lambda batches=batches: [sides.torch_push(b, False) for b in batches])
        batches = [draw(kind, rng, sides.num_rows, sides.batch) for _ in range(BATCHES)]
        timed("torch push tuned", ids, lambda batches=batches: [sides.torch_push(b, True) for b in batches])
        for b in batches:
            sides.push(b)  # the same pushes on both sides: they must agree at the end
        if repeat == 0:
            seconds.clear()  # warm-up
    return {name: median(values) for name, values in seconds.items()}


def rows_of(case: str, found: dict[str, float]) -> list[list[object]]:
    """The lines of the table for one case."""
    pull, push = found["pull"], found["push"]
    plain, tuned = found["torch push"], found["torch push tuned"]
    return [
        [f"pull {case}", pull, found["torch pull"], "", f"{pull / found['torch pull']:.2f}x its time",
         found["copy pull"], f"{pull / found['copy pull']:.1f}x"],
        [f"push {case}", push, plain, tuned, f"{plain / push:.1f}x, {tuned / push:.1f}x faster",
         found["copy push"], f"{push / found['copy push']:.1f}x"],
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=65_536)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}; {load()}; {args.rows:,} rows resident, batches of {args.batch:,} ids; ms per million rows")
    table: list[list[object]] = []
    results, failures = {}, []
    for dim in args.dims:
        start = time.perf_counter()
        sides = Sides(args.rows, dim, args.batch)
        print(f"dim {dim}: {args.rows:,} rows on both sides after {time.perf_counter() - start:.0f} s", flush=True)
        for kind in ("uniform", "zipf"):
            found = measure(sides, kind, args.repeats)
            pull = found["pull"] / found["torch pull"]
            plain, tuned = (found[way] / found["push"] for way in ("torch push", "torch push tuned"))
            push = min(plain, tuned)
            table += rows_of(f"dim {dim} {kind}", found)
            results[f"dim{dim}_{kind}"] = {
                **{name.replace(" ", "_"): round(value, 2) for name, value in found.items()},
                "pull_ratio": round(pull, 3),
                "push_speedup": round(push, 2),
                "push_speedup_plain": round(plain, 2),
                "push_speedup_tuned": round(tuned, 2),
            }
            if pull > PULL_BAR:
                failures.append(f"pull, dim {dim}, {kind}: {pull:.2f}x torch.index_select, the bar is {PULL_BAR}x")
            if push < PUSH_BAR:
                failures.append(
                    f"push, dim {dim}, {kind}: {push:.2f}x faster than torch's faster way, the bar is {PUSH_BAR}x"
                )
        difference = sides.difference()
        if not difference < 1e-4:
            failures.append(f"dim {dim}: weights differ from torch's by {difference}")
        del sides
    print_table(["", "embershard", "torch", "torch tuned", "embershard is", "copy", "of a copy"], table)
    finish({"bench": "kernels", "rows": args.rows, "batch": args.batch, **results}, failures)


if __name__ == "__main__":
    main()
