"""Where a training step spends its time: DLRM through shard processes over gRPC on this machine.

Prints one JSON line: milliseconds per step for route, pull, forward, backward, merge, push and what is left of step(),
and beside it the same model in one process with torch.optim.Adagrad over a dense nn.Embedding.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import embershard as es
from embershard.deploy.supervisor import LocalShards
from embershard.worker import reads as reads_module
from embershard.worker import session as session_module
from embershard.worker.models.dlrm import DLRM
from embershard.worker.models.recommender import num_dense_parameters
from embershard.worker.session import Session

FIELDS, DIM, NUM_DENSE, NUM_IDS = 26, 16, 13, 2_600_000


class Clock:
    """Seconds by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            with self.part(name):
                return function(*arguments, **keywords)

        return call


def batches(count: int, size: int, skew: float) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    rng = np.random.default_rng(0)
    per_field = NUM_IDS // FIELDS
    out = []
    for _ in range(count):
        ids = rng.zipf(skew, (size, FIELDS)) % per_field + np.arange(FIELDS) * per_field
        dense = torch.from_numpy(rng.normal(size=(size, NUM_DENSE)).astype(np.float32))
        out.append((torch.from_numpy(ids), dense, torch.from_numpy((rng.random(size) < 0.25).astype(np.float32))))
    return out


def build(device: str) -> DLRM:
    torch.manual_seed(0)
    return DLRM(NUM_IDS, FIELDS, DIM, NUM_DENSE, device=torch.device(device))


def remote_step(session: Session, data: list[tuple[torch.Tensor, ...]], warmup: int) -> tuple[dict[str, float], float]:
    model = es.wrap(build("meta"), session, optimizer=es.Adagrad(lr=0.05))
    clock = Clock()
    reads_module.make_routes = clock.timed("route", reads_module.make_routes)
    session_module.merge = clock.timed("merge", session_module.merge)
    session.client.pull = clock.timed("pull", session.client.pull)  # type: ignore[method-assign]
    session.client.push = clock.timed("push", session.client.push)  # type: ignore[method-assign]
    for index, (ids, dense, labels) in enumerate(data):
        if index == warmup:
            clock.seconds.clear()
            pulled, start = session.stats.pulled_rows, time.perf_counter()
        with clock.part("forward"):
            loss = binary_cross_entropy_with_logits(model(ids, dense), labels)
        with clock.part("backward"):
            loss.backward()
        with clock.part("step"):
            session.step()
    steps = len(data) - warmup
    split = {name: 1000 * seconds / steps for name, seconds in clock.seconds.items()}
    split["total"] = 1000 * (time.perf_counter() - start) / steps
    split["forward"] -= split["route"] + split["pull"]
    split["step_rest"] = split.pop("step") - split["push"] - split["merge"]
    return split, (session.stats.pulled_rows - pulled) / steps


def torch_step(data: list[tuple[torch.Tensor, ...]], warmup: int) -> float:
    model = build("cpu")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for index, (ids, dense, labels) in enumerate(data):
        if index == warmup:
            start = time.perf_counter()
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(ids, dense), labels).backward()
        optimizer.step()
    return 1000 * (time.perf_counter() - start) / (len(data) - warmup)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--skew", type=float, default=1.2)
    parser.add_argument("--local", action="store_true", help="shards in this process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warmup = 10
    data = batches(options.steps + warmup, options.batch, options.skew)
    if options.local:
        with es.local(options.shards) as session:
            split, rows = remote_step(session, data, warmup)
    else:
        with LocalShards(options.shards) as shards, es.connect(shards.addresses) as session:
            split, rows = remote_step(session, data, warmup)
    unique = float(np.mean([len(np.unique(ids.numpy())) for ids, _, _ in data[warmup:]]))
    figures = {
        "shards": options.shards, "batch": options.batch, "fields": FIELDS, "dim": DIM, "unique_ids": unique,
        "rows_pulled": rows, "dense_floats": num_dense_parameters(build("meta")),
        "ms": {name: round(value, 3) for name, value in sorted(split.items())},
        "torch_in_one_process_ms": round(torch_step(data[: warmup + 10], warmup), 3),
    }  # fmt: skip
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
