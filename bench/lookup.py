"""A lookup, forward and backward, over rows that are here: ours against torch's own, interleaved.

2,048 x 26 ids, as DLRM reads them, of 15,000 different ones; the bits of the gradients are compared too.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from embershard.worker.embedding import _Lookup
from timing import finish, median, print_table, thread_seconds

IDS, ROUNDS = (2048, 26), 40
DIMS = (16, 64, 128)


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
        leaves = {name: weights.clone().requires_grad_() for name in ("embershard", "torch")}
        works = {
            "embershard": lambda leaf=leaves["embershard"], g=gradient: _Lookup.apply(leaf, index).backward(g),
            "torch": lambda leaf=leaves["torch"], g=gradient: F.embedding(index, leaf).backward(g),
        }
        times: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(ROUNDS):
            for name, work in works.items():
                leaves[name].grad = None
                times[name].append(1000 * thread_seconds(work))
        ours, theirs = median(times["embershard"]), median(times["torch"])
        if not torch.equal(*(leaf.grad for leaf in leaves.values())):  # type: ignore[arg-type]
            failures.append(f"dim {dim}: other bits than torch's")
        table.append([f"dim {dim}, ms", ours, theirs, theirs / ours])
        results[f"dim{dim}"] = {"embershard_ms": ours, "torch_ms": theirs, "ratio": theirs / ours}
    print_table(["", "embershard", "torch", "torch / embershard"], table)
    finish({"bench": "lookup", "rows": rows, **results}, failures)


if __name__ == "__main__":
    main()
