"""What `embershard worker` decides from a job and its place among the workers."""

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import typer

import embershard as es
from embershard.cli import worker as command
from embershard.cli.ranks import WorkerRanks
from embershard.cli.worker import _check_mode, _has_own_gpu, _Worker
from embershard.proto.errors import JobError
from embershard.proto.messages import Compress, TableCodecs
from harness.job import make_job


def ranks(workers, rank=0):
    return WorkerRanks(rank=rank, world_size=workers, local_rank=rank, local_world_size=workers)


@pytest.mark.parametrize(("gpus", "workers", "own"), [(0, 1, False), (0, 2, False), (1, 1, True), (1, 2, False)])
def test_nccl_is_for_workers_with_a_gpu_of_their_own_and_so_is_fsdp(monkeypatch, gpus, workers, own):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert _has_own_gpu(make_job("hybrid"), ranks(workers)) is own
    assert not _has_own_gpu(make_job("hybrid", train={"device": "cpu"}), ranks(workers))
    if gpus and not own:
        with pytest.raises(JobError, match=r"dense\.mode: 2 workers share 1 GPUs, and fsdp needs one for each"):
            _has_own_gpu(make_job(dense={"mode": "fsdp"}), ranks(workers))


@pytest.mark.parametrize(
    ("strategy", "ps", "workers", "why"),
    [
        ("ps", None, 1, "strategy ps has shards: name them with --ps"),
        ("ddp", "127.0.0.1:7700", 1, "strategy ddp has no shards: --ps"),
        ("local", None, 2, "strategy local trains in one process, not in 2; use ddp"),
    ],
)
def test_a_worker_in_the_wrong_place_is_refused(strategy, ps, workers, why):
    with pytest.raises(typer.BadParameter, match=why):
        _check_mode(make_job(strategy), ps, workers)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_worker_prints_how_tables_travel_from_here_on(monkeypatch, capsys, rank):
    monkeypatch.setattr(command, "connect", lambda ps, **settings: es.local())
    worker = _Worker(job=make_job(), base=Path(), ps=None, ranks=ranks(2, rank), join_timeout=timedelta(seconds=1))
    with worker._connect("127.0.0.1:1") as session:
        module = es.Embedding(session.table(es.TableSpec(name="t", dim=2, optimizer=es.SGD(lr=1.0))))
        session.client.ask_all(Compress(revision=1, tables=(TableCodecs(table="t", push="int8"),)))
        module(torch.tensor([1])).sum().backward()
        session.step()
    line = "step 0: table t uses push=int8 pull=none, as set on the shards\n"
    assert capsys.readouterr().out == (line if rank == 0 else "")


STARTS = """
import sys
import embershard.cli.worker, embershard.worker.training.trainer
from embershard.worker.models.layers import table
assert table(7, 3, "meta").weight.requires_grad
print(*sys.modules)
"""


# of other modes, of the one worker that reports, of snapshots, of compiling
NOT_NEEDED = {
    "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy", "rich", "fsspec", "grpc", "pyarrow",
    "numba.np.arrayobj", "embershard.cli.up",
}  # fmt: skip


def test_a_worker_starts_without_what_only_others_need():
    loaded = subprocess.check_output([sys.executable, "-c", STARTS], text=True, timeout=250).split()
    assert NOT_NEEDED & set(loaded) == set()
    assert [name for name in loaded if name.startswith("embershard.ps.")] == []
