"""One worker of test_synchronous.py, as a process: `python sync_peer.py PS RANK WORKERS STALENESS FILE LEASE`.

It begins to train when it is sent a line.
"""

import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import nn

import embershard as es
from embershard.worker.session.session import Session

ROWS, BATCH, STEPS = 100, 24, 30
Batches = list[tuple[torch.Tensor, torch.Tensor]]


class Model(nn.Module):
    """An embedding and a tower."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(ROWS, 4)
        self.tower = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))

    def embedding_inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"rows": ids}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tower(self.rows(ids).flatten(1))
        return out.squeeze(1)


def build() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def joint_batches(steps: int = STEPS) -> Batches:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(ROWS, (steps, BATCH, 3), generator=generator)
    return [(part, (part.sum(1) % 3).float()) for part in ids]


def train(model: nn.Module, session: Session, data: Batches) -> list[np.ndarray]:
    """Every weight afterwards."""
    for ids, target in session.prefetch(data):
        (model(ids) - target).square().mean().backward()
        session.step(weight=len(ids))
    session.refresh()
    with torch.no_grad():
        model(data[0][0])
        return [model.rows.table.pull(torch.arange(ROWS)).numpy(), *(p.detach().numpy() for p in model.parameters())]


def main(ps: str, rank: int, workers: int, staleness: int, out: Path, lease: timedelta) -> None:
    """Train this worker's share of every joint batch, an uneven one."""
    torch.set_num_threads(1)
    first = BATCH - (workers - 1) * 4  # the others have 4 samples each
    share = slice(0, first) if rank == 0 else slice(first + 4 * (rank - 1), first + 4 * rank)
    settings = {"workers": workers, "staleness": staleness, "lease": lease}
    with es.connect(
        ps, worker=rank, timeout=timedelta(seconds=60), wait_timeout=timedelta(minutes=1), **settings
    ) as session:
        model = es.wrap(build(), session, optimizer=es.Adam(lr=0.01))
        print("begins", flush=True)
        sys.stdin.readline()
        weights = train(model, session, [(ids[share], target[share]) for ids, target in joint_batches()])
        np.savez(out, *weights)
        print(f"lost {session.stats.lost_leases}", flush=True)


if __name__ == "__main__":
    address, *numbers, file, seconds = sys.argv[1:]
    main(address, *map(int, numbers), Path(file), timedelta(seconds=float(seconds)))
