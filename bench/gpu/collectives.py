"""Dense weights by DistributedDataParallel or FSDP2, rows on two shards: as many workers as GPUs, against one alone.

The backend is the one that `embershard worker` asks torch for: nccl for tensors of GPUs and gloo for those of the host.
nccl wants a GPU for each worker, so that one GPU has one worker: that runs every collective, with nobody to talk to.
Without a GPU there are two workers over gloo. Compared are the losses of each step, whose batch all workers share.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from part import report
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import embershard as es
from embershard.deploy.supervisor import LocalShards

IDS, DIM, DENSE, BATCH, STEPS = 4000, 16, 8, 512, 40
BOUND = 2e-3  # of a loss, relative: GPUs and collectives sum in orders of their own
REDUCED = 1 << 24  # floats of the all-reduce that is timed
LR = 0.02
WORKER_SECONDS = 240  # whoever runs this part may have less patience


class Net(nn.Module):
    """Rows of three ids and dense features through two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(IDS, DIM)
        self.tower = nn.Sequential(nn.Linear(3 * DIM + DENSE, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """Predictions (B,)."""
        out: torch.Tensor = self.tower(torch.cat([self.embedding(ids).flatten(1), dense], 1))
        return out.squeeze(1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None, session: es.Session, device: torch.device,
          rank: int, world: int) -> tuple[list[float], float]:  # fmt: skip
    """The joint losses, and steps/s of the second half."""
    losses, begun = [], 0.0
    rng = np.random.default_rng(1)
    for step in range(STEPS):
        ids, dense = rng.integers(0, IDS, (BATCH, 3)), rng.standard_normal((BATCH, DENSE), np.float32)
        mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        target = torch.from_numpy(dense[mine].sum(1) + (ids[mine, 0] % 2)).to(device)
        found = model(torch.from_numpy(ids[mine]), torch.from_numpy(dense[mine]).to(device))
        loss = (found - target).square().mean()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        session.step()
        joint = loss.detach().clone()
        if optimizer is not None:
            dist.all_reduce(joint)
        losses.append(joint.item() / (world if optimizer is not None else 1))
        begun = time.perf_counter() if step == STEPS // 2 else begun
    return losses, (STEPS - STEPS // 2 - 1) / (time.perf_counter() - begun)


def alone(start: Net, device: torch.device) -> list[float]:
    """The losses of one process, all weights on shards."""
    with es.local() as session:
        model = es.wrap(copy.deepcopy(start), session, optimizer=es.Adagrad(lr=LR)).to(device)
        return train(model, None, session, device, 0, 1)[0]


def together(start: Net, mode: str, addresses: str, device: torch.device, rank: int, world: int) -> None:
    """This worker's part; the first one reports."""
    joined = {"workers": world, "staleness": 0} if world > 1 else {}
    with es.connect(addresses, worker=rank, **joined) as session:  # type: ignore[arg-type]
        model: nn.Module = es.wrap(copy.deepcopy(start), session, optimizer=es.Adagrad(lr=LR), dense=mode).to(device)
        if mode == "ddp":
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(model.tower, mesh=init_device_mesh(device.type, (world,)))
        optimizer = torch.optim.Adagrad(model.parameters(), lr=LR, foreach=True)  # as torch chooses on a GPU
        losses, speed = train(model, optimizer, session, device, rank, world)
    seconds = all_reduce_seconds(device)
    if rank == 0:
        want = alone(start, device)
        found = max(abs(a - b) / b for a, b in zip(losses, want, strict=True))
        name = f"{mode}, {world} {'worker' if world == 1 else 'workers'}, {'nccl' if device.type == 'cuda' else 'gloo'}"
        gb_s = REDUCED * 4 / seconds / 1e9
        report(check=name, found=found, bound=BOUND, steps_per_s=speed, all_reduce_ms=seconds * 1e3)
        print(f"{name}: {losses[0]:.4f} to {losses[-1]:.4f}, {speed:.0f} steps/s, all-reduce of 64 MiB {gb_s:.1f} GB/s")
        assert losses[-1] < 0.7 * losses[0], "it learns nothing"
        assert found <= BOUND, f"the losses differ by {found:.3g}"


def all_reduce_seconds(device: torch.device) -> float:
    """Of one all-reduce of 64 MiB, the fastest of three."""
    values, best = torch.ones(REDUCED, device=device), float("inf")
    for _ in range(3):
        start = time.perf_counter()
        dist.all_reduce(values)
        values[0].item()  # waits for a GPU
        best = min(best, time.perf_counter() - start)
    return best


def work(arguments: argparse.Namespace) -> None:
    """One worker."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    device = torch.device(arguments.device, rank if arguments.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=WORKER_SECONDS)
    )
    torch.manual_seed(0)
    together(Net(), arguments.mode, arguments.addresses, device, rank, world)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads outlive their group


def main() -> None:
    """Start the shards and the workers; exit 1 where one fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mode", choices=["ddp", "fsdp"], required=True)
    parser.add_argument("--addresses", default="", help="of the shards; for the workers that this starts")
    arguments = parser.parse_args()
    if arguments.addresses:
        work(arguments)
    world = torch.cuda.device_count() if arguments.device == "cuda" else 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    meeting = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
    with LocalShards(2) as shards:
        command = [sys.executable, *sys.argv, "--addresses", ",".join(shards.addresses)]
        workers = [subprocess.Popen(command, env={**meeting, "RANK": str(rank)}) for rank in range(world)]
        try:
            codes = [worker.wait(WORKER_SECONDS) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    if any(codes):
        sys.exit(f"the workers ended with {json.dumps(codes)}")


if __name__ == "__main__":
    main()
