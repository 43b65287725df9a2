"""A linear layer, forward and backward: by oneDNN (train.linear) against torch's own kernels, interleaved."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from embershard.worker.nn.onednn import onednn_is_faster, use_onednn
from timing import finish, median, print_table, thread_seconds

ROUNDS = 30
SHAPES = ((256, 64, 32), (2048, 13, 512), (2048, 512, 256), (2048, 256, 64), (2048, 256, 1), (4096, 400, 400))


def train(layer: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> None:
    layer(x).backward(gradient)


def main() -> None:
    torch.set_num_threads(1)
    results, table = {}, []
    for batch, width, out in SHAPES:
        layers = {"oneDNN": nn.Linear(width, out), "torch": nn.Linear(width, out)}
        use_onednn(layers["oneDNN"])
        x, gradient = torch.randn(batch, width, requires_grad=True), torch.randn(batch, out)
        times: dict[str, list[float]] = {name: [] for name in layers}
        for _ in range(ROUNDS):
            for name, layer in layers.items():
                layer.zero_grad()
                times[name].append(1000 * thread_seconds(partial(train, layer, x, gradient)))
        ours, theirs = median(times["oneDNN"]), median(times["torch"])
        name = f"{batch} x {width} -> {out}"
        table.append([name, ours, theirs, theirs / ours])
        results[name] = {"onednn_ms": ours, "torch_ms": theirs, "ratio": theirs / ours}
    print_table(["ms", "use_onednn", "torch", "torch / use_onednn"], table)
    large = [its["ratio"] for name, its in results.items() if its["torch_ms"] > 1]
    chosen = onednn_is_faster()
    wrong = (
        [f"{'slower' if chosen else 'faster'}: {min(large):.2f} to {max(large):.2f}"]
        if (min(large) > 1) != chosen
        else []
    )
    finish({"bench": "linear", "auto": "onednn" if chosen else "torch", "shapes": results}, wrong)


if __name__ == "__main__":
    main()
