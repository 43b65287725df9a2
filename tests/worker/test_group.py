"""Workers that meet over gloo: two real processes, and the world of one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed

from embershard.proto.errors import WorkersApart
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


LOSER = """
import os
from datetime import timedelta
from embershard.worker.group import WorkerGroup

rank = int(os.environ["RANK"])
group = WorkerGroup.join(rank, 2, timedelta(seconds=60))
if rank == 1:
    os._exit(3)
group.barrier()
"""


def run_two(program: str) -> list[tuple[int, str]]:
    """Exit code and stderr of two workers that run a program."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2"}
    peers = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **meeting, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [(peer.returncode, errors) for peer in peers for _, errors in [peer.communicate(timeout=90)]]
    finally:
        for peer in peers:
            peer.kill()


def test_two_processes_gather_decide_and_broadcast() -> None:
    for code, errors in run_two(PEER):
        assert code == 0, errors


def test_a_worker_whose_peer_dies_says_that_it_lost_another_worker() -> None:
    (code, errors), _ = run_two(LOSER)
    assert code == 1
    assert "WorkerLost: worker 0 of 2 lost another worker: " in errors


def test_a_rank_that_does_not_come_or_comes_twice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    with pytest.raises(WorkersApart, match=r"worker 1 of 3 .*: worker 0, 2 did not come in time; give all workers"):
        WorkerGroup.join(1, 3, timedelta(seconds=1))
    with pytest.raises(WorkersApart, match="another process is worker 1 already"):
        WorkerGroup.join(1, 3, timedelta(seconds=1))


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
