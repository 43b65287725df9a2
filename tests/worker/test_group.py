"""Workers that meet over gloo: two real processes, and the world of one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch

from embershard.worker.group import WorkerGroup

PEER = """
import os
from datetime import timedelta
import numpy as np, torch
from embershard.worker.group import WorkerGroup

rank = int(os.environ["RANK"])
with WorkerGroup.join(rank, 2, timedelta(seconds=60)) as group:
    group.barrier()
    for dtype in (np.float32, np.float64, np.int64):
        mine = np.arange(3 * rank, dtype=dtype) + 2**53 * (dtype is np.int64)
        parts = group.gather(mine)
        assert len(parts) == (2 if rank == 0 else 0)
        if rank == 0:
            assert [len(part) for part in parts] == [0, 3] and parts[1].dtype == dtype
            assert parts[1].tolist() == (np.arange(3, dtype=dtype) + 2**53 * (dtype is np.int64)).tolist()
    assert group.sum(rank + 1.5) == 4.0
    assert group.any(rank == 1) and not group.any(False)
    assert group.decide(rank == 0, rank == 1) == (True, False)
    buffers = [torch.full((2, 2), float(rank)), torch.tensor(rank + 5), torch.full((2, 4), float(rank))[:, ::2]]
    group.broadcast(buffers)
    assert buffers[0].tolist() == [[0.0, 0.0], [0.0, 0.0]] and buffers[1].item() == 5
    assert buffers[2].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert group.is_first == (rank == 0)
"""


def test_two_processes_gather_decide_and_broadcast() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2"}
    peers = [
        subprocess.Popen(
            [sys.executable, "-c", PEER],
            env={**os.environ, **meeting, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for peer in peers:
            _, errors = peer.communicate(timeout=90)
            assert peer.returncode == 0, errors
    finally:
        for peer in peers:
            peer.kill()


def test_a_world_of_one_needs_no_network() -> None:
    with WorkerGroup.join(0, 1) as group:
        group.barrier()
        values = np.arange(3.0)
        assert group.gather(values)[0] is values
        assert group.sum(2.5) == 2.5
        assert group.decide(True, False) == (True, False)
        buffer = torch.ones(2)
        group.broadcast([buffer])
        assert group.is_first
        assert group.any(True)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="rank must be in"):
        WorkerGroup(rank, world_size)
