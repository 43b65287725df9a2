"""A model of many small tables: a step of it on our shards against torch with sparse gradients, in one process.

A hundred tables of 1,000 rows, dim 16, a batch of 256 ids each, Adagrad; as nn.Embedding, and as nn.EmbeddingBag over
bags of two. Torch updates by torch.optim.Adagrad, or by hand from the coalesced gradient; the faster of the two counts.
Ours is the loop that a user writes, over a shard in this process, and over two shard processes with
`session.prefetch` or without it, of which the faster counts.

All sides compute with one thread; blocks of steps of all sides are interleaved, and the medians of the rounds count, of
wall time and of the CPU time of all processes that take part. What it costs that there is one table more is the slope
between 1, 10 and 100 tables with one id each: it has the model's own slicing and concatenating in it, and torch's side
shows how much that is at most. Prints one JSON line; exits 1 below the bars.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from embershard.deploy.supervisor import LocalShards
from embershard.local_shards import local
from embershard.proto.spec import Adagrad
from embershard.worker.device import keep_freed_memory
from embershard.worker.nn.wrap import wrap
from embershard.worker.session.connect import connect
from embershard.worker.session.session import Session
from timing import cpu_seconds, finish, load, machine, median, print_table

TABLES, ROWS, DIM, BATCH, LR = 100, 1000, 16, 256, 0.05
SPEED_BAR = 1.2  # torch's step over ours
FIXED_BAR = 20e-6  # seconds per table and step
TORCH, BY_HAND, LOCAL, SERVED = "torch.optim, sparse", "torch by hand, sparse", "local shard", "2 shard processes"
PREFETCHED = "2 shard processes, prefetch"
KINDS = {"nn.Embedding": 0, "nn.EmbeddingBag of 2": 2}  # ids of a bag


class Model(nn.Module):
    """Every table's rows beside each other, and one linear layer."""

    def __init__(self, tables: int, bag: int, *, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        kind: Any = nn.EmbeddingBag if bag else nn.Embedding
        more = {"mode": "sum"} if bag else {}
        self.tables = nn.ModuleList(kind(ROWS, DIM, sparse=sparse, **more) for _ in range(tables))
        self.linear = nn.Linear(tables * DIM, 1)

    def embedding_inputs(self, ids: Tensor) -> dict[str, Tensor]:
        """The ids of each table: ids[:, i]."""
        return {f"tables.{i}": column for i, column in enumerate(ids.unbind(1))}

    def forward(self, ids: Tensor) -> Tensor:
        parts = [table(column) for table, column in zip(self.tables, ids.unbind(1), strict=True)]
        return self.linear(torch.cat(parts, 1))  # type: ignore[no-any-return]


def adagrad_by_hand(weights: Sequence[nn.Parameter]) -> Callable[[], None]:
    """Adagrad of the rows in each sparse gradient."""
    sums = [torch.zeros_like(weight) for weight in weights]

    @torch.no_grad()
    def step() -> None:
        for weight, total in zip(weights, sums, strict=True):
            assert weight.grad is not None
            gradient = weight.grad.coalesce()
            ids, values = gradient.indices()[0], gradient.values()
            squares = total.index_select(0, ids).addcmul_(values, values)
            total.index_copy_(0, ids, squares)
            # scaled before it is added: with alpha, index_add_ scales every row by itself
            weight.index_add_(0, ids, values.div_(squares.sqrt_().add_(1e-10)).mul_(-LR))
            weight.grad = None

    return step


class Block(NamedTuple):
    """Seconds of a step."""

    wall: float
    cpu: float


class Side:
    """One way to train the model."""

    def __init__(self, steps: Iterator[None], pids: Sequence[int] = ()) -> None:
        self._steps, self._pids = steps, [os.getpid(), *pids]

    def run(self, steps: int) -> Block:
        cpu, wall = cpu_seconds(self._pids), time.perf_counter()
        for _ in range(steps):
            next(self._steps)
        return Block((time.perf_counter() - wall) / steps, (cpu_seconds(self._pids) - cpu) / steps)


def batches(tables: int, batch: int, bag: int) -> Iterator[Tensor]:
    """The same few batches again and again: (batch, tables) ids, or (batch, tables, bag)."""
    draw = np.random.default_rng(0)
    shape = (batch, tables, bag) if bag else (batch, tables)
    kept = [torch.from_numpy(draw.integers(0, ROWS, shape)) for _ in range(8)]
    while True:
        yield from kept


def torch_steps(model: Model, data: Iterable[Tensor], *, by_hand: bool) -> Iterator[None]:
    weights = [table.weight for table in model.tables]
    update: Callable[[], object]
    update = adagrad_by_hand(weights) if by_hand else torch.optim.Adagrad(weights, lr=LR).step  # type: ignore[arg-type]
    dense = torch.optim.Adagrad(model.linear.parameters(), lr=LR)
    for ids in data:
        loss = model(ids).square().mean()
        loss.backward()
        update()
        dense.step()
        model.zero_grad()
        yield


def our_steps(model: nn.Module, session: Session, data: Iterator[Tensor]) -> Iterator[None]:
    for ids in data:
        loss = model(ids).square().mean()
        loss.backward()
        session.step()
        yield


def sides(stack: ExitStack, tables: int, batch: int, bag: int, shards: LocalShards) -> dict[str, Side]:
    """All sides, each with a model of its own."""

    def ours(session: Session, pids: Sequence[int] = (), *, prefetch: bool = False) -> Side:
        stack.enter_context(session)
        prefix = f"{tables}-{batch}-{bag}-{prefetch}/"
        model = wrap(Model(tables, bag), session, optimizer=Adagrad(lr=LR), prefix=prefix)
        data = batches(tables, batch, bag)
        steps = our_steps(model, session, session.prefetch(data, staleness=1) if prefetch else data)
        stack.callback(steps.close)  # type: ignore[attr-defined]
        return Side(steps, pids)

    def torchs(*, by_hand: bool) -> Side:
        model = Model(tables, bag, sparse=True)
        return Side(torch_steps(model, batches(tables, batch, bag), by_hand=by_hand))

    return {
        TORCH: torchs(by_hand=False),
        BY_HAND: torchs(by_hand=True),
        LOCAL: ours(local(shards=1)),
        SERVED: ours(connect(",".join(shards.addresses)), shards.pids),
        PREFETCHED: ours(connect(",".join(shards.addresses), worker=1), shards.pids, prefetch=True),
    }


def measure(tables: int, batch: int, bag: int, shards: LocalShards, args: argparse.Namespace) -> dict[str, Block]:
    """Medians over the rounds of every side's steps."""
    blocks: dict[str, list[Block]] = {}
    with ExitStack() as stack:
        named = list(sides(stack, tables, batch, bag, shards).items())
        for _, side in named:
            side.run(args.warmup)
        for number in range(args.rounds):
            for name, side in named[:: -1 if number % 2 else 1]:  # none always follows the same other one
                blocks.setdefault(name, []).append(side.run(args.steps))
    return {name: Block(*map(median, zip(*them, strict=True))) for name, them in blocks.items()}


def slope(by_tables: Mapping[int, float]) -> float:
    """Seconds that one table more takes, by least squares."""
    return float(np.polyfit(list(by_tables), list(by_tables.values()), 1)[0])


def compare(shards: LocalShards, args: argparse.Namespace, failures: list[str]) -> dict[str, Any]:
    """Steps of the model with all tables."""
    result: dict[str, Any] = {}
    for kind, bag in KINDS.items():
        found = measure(TABLES, BATCH, bag, shards, args)
        best = Block(*(min(found[name][i] for name in (TORCH, BY_HAND)) for i in range(2)))
        print(f"\n{TABLES} tables of {ROWS} rows, dim {DIM}, {kind}, batch {BATCH}")
        rows = [
            [name, 1e3 * its.wall, 1e3 * its.cpu, best.wall / its.wall, best.cpu / its.cpu]
            for name, its in found.items()
        ]
        print_table(["", "step, ms", "CPU, ms/step", "speed, of torch's best", "by CPU"], rows)
        for name, ways in ((LOCAL, [LOCAL]), (SERVED, [SERVED, PREFETCHED])):
            for what, its, theirs in (
                ("wall", min(found[way].wall for way in ways), best.wall),
                ("CPU", min(found[way].cpu for way in ways), best.cpu),
            ):
                ratio = theirs / its
                result[f"{kind}, {name}, {what}"] = round(ratio, 3)
                if ratio < SPEED_BAR:
                    failures.append(f"{kind}, {name}: {ratio:.2f}x of torch's best by {what} (bar {SPEED_BAR})")
    return result


def fixed_cost(shards: LocalShards, args: argparse.Namespace, failures: list[str]) -> dict[str, Any]:
    """What a table costs beside its rows."""
    counts = (1, 10, 100)
    found = {count: measure(count, 1, 0, shards, args) for count in counts}
    print("\nmicroseconds of CPU per step with one id per table, and for one table more")
    rows, result = [], {}
    for name in (TORCH, BY_HAND, LOCAL, SERVED, PREFETCHED):
        one_more = slope({count: its[name].cpu for count, its in found.items()})
        rows.append([name, *(round(1e6 * its[name].cpu) for its in found.values()), 1e6 * one_more])
        result[f"fixed cost, {name}, us"] = round(1e6 * one_more, 1)
        if name in (LOCAL, SERVED) and one_more > FIXED_BAR:
            failures.append(f"{name}: {1e6 * one_more:.0f} us per table and step (bar {1e6 * FIXED_BAR:.0f})")
    print_table(["", *(f"{count} tables" for count in counts), "one more"], rows)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="of a block")
    parser.add_argument("--warmup", type=int, default=10, help="steps of each side before the first round")
    parser.add_argument("--only", choices=["speed", "fixed"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as `embershard worker` does; for torch's sides, too
    print(f"{machine()}; {load()}")
    failures: list[str] = []
    result: dict[str, Any] = {"load_before": load()}
    with LocalShards(2) as shards:
        if args.only != "fixed":
            result |= compare(shards, args, failures)
        if args.only != "speed":
            result |= fixed_cost(shards, args, failures)
    finish({**result, "load_after": load()}, failures)


if __name__ == "__main__":
    main()
