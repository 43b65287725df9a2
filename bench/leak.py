"""Memory stays flat: 10^5 small steps over the `stream` transport with everything on that keeps something.

Two shards and one worker, each a process of its own: three tables, prefetch (staleness 1, routes named), a cache of
hot rows, and ids from a fixed set, so that no table grows. Resident memory, threads and open descriptors of each
process are looked at 200 times. After the first tenth, which warms up, neither the last look may lie above the first
one, nor the later half of the looks above the earlier half, by more than 1 % + 4 MiB, one thread or two descriptors.

Prints one JSON line; exits 1 below the bar.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence

import numpy as np
import psutil
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import embershard as es
from embershard.deploy.supervisor import LocalShards
from timing import finish, machine, print_table

BATCH, FIELDS, ROWS, NUM_DENSE, LOOKS = 64, 2, 2000, 4, 200
SHARE, SLACK_BYTES, SLACK_THREADS, SLACK_FILES = 0.01, 4 * 2**20, 1, 2
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Model(nn.Module):
    """Three tables of different dims, a bag among them."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(ROWS, 16), nn.Embedding(ROWS, 8)
        self.words = nn.EmbeddingBag(ROWS, 4, mode="sum")
        self.top = nn.Linear(FIELDS * 24 + 4 + NUM_DENSE, 1)

    def embedding_inputs(self, ids: torch.Tensor, dense: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"users": ids, "items": ids, "words": ids}

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        found = [self.users(ids).flatten(1), self.items(ids).flatten(1), self.words(ids), dense]
        logits: torch.Tensor = self.top(torch.cat(found, 1)).squeeze(1)
        return logits


def batches(steps: int) -> Iterator[Batch]:
    """Fresh ones each step, as of a loader."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        ids = torch.from_numpy(rng.integers(0, ROWS, (BATCH, FIELDS)))
        dense = torch.from_numpy(rng.standard_normal((BATCH, NUM_DENSE), np.float32))
        yield ids, dense, (ids.sum(1) % 2).float()


class Watch:
    """One process, looked at again and again."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self._process = psutil.Process(pid)
        self._looks: list[tuple[int, int, int]] = []  # bytes, threads, descriptors

    def look(self) -> None:
        self._looks.append(
            (self._process.memory_info().rss, self._process.num_threads(), self._process.num_fds()),
        )

    def judge(self) -> tuple[list[object], dict[str, object], list[str]]:
        """A row of the table, figures, and what grew."""
        looks = np.array(self._looks[len(self._looks) // 10 :], np.float64)
        first, last, most = looks[0], looks[-1], looks.max(0)
        allowed = np.array([SHARE * first[0] + SLACK_BYTES, SLACK_THREADS, SLACK_FILES])
        half = len(looks) // 2
        grown = np.max([np.median(looks[half:], 0) - np.median(looks[:half], 0), last - first], 0)
        failures = [
            f"{self.name}: {what} grew by {by:.0f} from {start:.0f}, {most:.0f} is allowed"
            for what, by, start, most in zip(("bytes", "threads", "descriptors"), grown, first, allowed, strict=True)
            if by > most
        ]
        mib = [round(value / 2**20, 1) for value in (first[0], last[0], most[0])]
        row: list[object] = [
            self.name,
            *mib,
            *(f"{a:.0f} -> {b:.0f}" for a, b in zip(first[1:], last[1:], strict=True)),
        ]
        figures: dict[str, object] = {
            "mib": mib,
            "grown_mib": round(float(grown[0]) / 2**20, 2),
            "threads": [int(first[1]), int(last[1])],
            "descriptors": [int(first[2]), int(last[2])],
        }
        return row, figures, failures


def train(steps: int, addresses: Sequence[str], watches: list[Watch]) -> float:
    """Train, and look at the processes meanwhile; steps per second."""
    start = time.perf_counter()
    with es.connect(addresses) as session:
        session.cache_rows(ROWS // 4, staleness=2)
        model = es.wrap(Model(), session, optimizer=es.Adagrad(lr=0.01))
        for step, (ids, dense, labels) in enumerate(session.prefetch(batches(steps), staleness=1)):
            binary_cross_entropy_with_logits(model(ids, dense), labels).backward()
            session.step()
            if (step + 1) % max(1, steps // LOOKS) == 0:
                for watch in watches:
                    watch.look()
    return steps / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    print(machine(), flush=True)
    with LocalShards(2) as shards:
        watches = [Watch("worker", os.getpid()), *(Watch(f"shard {i}", pid) for i, pid in enumerate(shards.pids))]
        speed = train(steps, shards.addresses, watches)
    rows, failures, result = [], [], {}
    for watch in watches:
        row, figures, grown = watch.judge()
        rows.append(row)
        result[watch.name] = figures
        failures += grown
    print_table(["", "MiB first", "last", "most", "threads", "descriptors"], rows)
    print(f"{speed:.0f} steps/s")
    finish({"bar": "leak", "steps": steps, "steps_per_s": round(speed, 1), "processes": result}, failures)


if __name__ == "__main__":
    main()
