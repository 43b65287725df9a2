"""A lookup, forward and backward, over rows that are here: ours against torch's own, interleaved.

2,048 x 26 ids, as DLRM reads them, of 15,000 different ones; the bits of the gradients are compared too.

And what comes before: `ids`, 13,312 ids of two shards put in ascending order for a codec, by digits against numpy's
argsort.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from embershard.proto.routing import Placement, Route, ascending, make_route
from embershard.worker.nn.embedding import _RowLookup
from timing import finish, median, print_table, thread_seconds

IDS, ROUNDS = (2048, 26), 40
DIMS = (16, 64, 128)
BATCH, RANGE = 13_312, 2_000_000


def paired(works: Mapping[str, Callable[[], object]]) -> list[float]:
    """Median ms of each."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            times[name].append(1000 * thread_seconds(work))
    return [median(found) for found in times.values()]


def by_argsort(route: Route) -> Route:
    order = np.concatenate([np.argsort(route.ids[a:b]) + a for a, b in pairwise(route.splits.tolist())])
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    ids, index = route.ids[order], places[route.index]
    return Route(ids, route.splits, index, space_key=route.space_key, epoch=route.epoch)


def before() -> dict[str, list[float]]:
    """[ours, theirs] of ordering."""
    route = make_route(np.random.default_rng(0).integers(0, RANGE, BATCH), 3, Placement.even(2))
    ids = {"embershard": lambda: ascending(route), "numpy": lambda: by_argsort(route)}
    return {"ids": paired(ids)}


def main() -> None:
    torch.set_num_threads(1)
    draw = np.random.default_rng(0)
    _, inverse = np.unique(draw.zipf(1.15, IDS) % 10**6, return_inverse=True)
    index = torch.from_numpy(inverse.reshape(IDS))
    rows, results = int(index.max()) + 1, {}
    table: list[list[object]] = []
    failures = []
    for dim in DIMS:
        weights = torch.from_numpy(draw.normal(size=(rows, dim)).astype(np.float32))
        gradient = torch.from_numpy(draw.normal(size=(*IDS, dim)).astype(np.float32))
        ours, theirs = (weights.clone().requires_grad_() for _ in range(2))

        def lookup(leaf: torch.Tensor = ours, g: torch.Tensor = gradient) -> None:
            leaf.grad = None
            _RowLookup.apply(leaf, index).backward(g)

        def by_torch(leaf: torch.Tensor = theirs, g: torch.Tensor = gradient) -> None:
            leaf.grad = None
            F.embedding(index, leaf).backward(g)

        results[f"dim {dim}"] = paired({"embershard": lookup, "torch": by_torch})
        if not torch.equal(ours.grad, theirs.grad):  # type: ignore[arg-type]
            failures.append(f"dim {dim}: other bits than torch's")
    results |= before()
    table += [[f"{name}, ms", ours, theirs, theirs / ours] for name, (ours, theirs) in results.items()]
    print_table(["", "embershard", "torch, numpy", "ratio"], table)
    figures = {
        name.replace(" ", ""): {"embershard_ms": ours, "other_ms": theirs, "ratio": theirs / ours}
        for name, (ours, theirs) in results.items()
    }
    finish({"bench": "lookup", "rows": rows, **figures}, failures)


if __name__ == "__main__":
    main()
