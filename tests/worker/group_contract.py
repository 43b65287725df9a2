"""What every group of workers does, however they meet."""

import numpy as np
import torch

from embershard.worker.client.worker_group import WorkerGroup


def take_part(group: WorkerGroup) -> None:
    """The part of worker 0 or 1 of two, who meet."""
    rank = group.rank
    group._piece = 16  # bytes at once
    assert group.join_segment({"best": 0.5 + rank}) == (0, {"best": 0.5})
    group.barrier()
    for dtype in (np.float32, np.float64, np.int64):
        parts = group.gather(np.arange(9 * rank, dtype=dtype) + 2**53 * (dtype is np.int64))
        assert len(parts) == (2 if rank == 0 else 0)
        if rank == 0:
            assert [len(part) for part in parts] == [0, 9]
            assert parts[1].dtype == dtype
            assert parts[1].tolist() == (np.arange(9, dtype=dtype) + 2**53 * (dtype is np.int64)).tolist()
    assert group.sum(rank + 1.5) == 4.0
    assert group.any(rank == 1)
    assert not group.any(False)
    assert group.decide(rank == 0, rank == 1) == (True, False)
    assert group.broadcast_json({"auc": 0.1 + rank, "split": ["valid"]}) == {"auc": 0.1, "split": ["valid"]}
    buffers = [torch.full((2, 2), float(rank)), torch.tensor(rank + 5), torch.full((2, 4), float(rank))[:, ::2]]
    group.broadcast(buffers)
    assert [buffer.tolist() for buffer in buffers] == [[[0.0, 0.0], [0.0, 0.0]], 5, [[0.0, 0.0], [0.0, 0.0]]]
    group.end_segment(0)
    assert group.share == (rank, 2)
    assert group.is_first == group.reports == (rank == 0)
    clocks: list[int] = []
    group.begin_segment(0, clocks.append, 7 + rank, {})
    assert clocks == [8]
