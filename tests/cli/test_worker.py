"""What `embershard worker` decides from a job and its place among the workers."""

import subprocess
import sys
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import typer

import embershard as es
from embershard.cli import worker as command
from embershard.cli.worker import WorkerRanks, _check_mode, _has_own_gpu
from embershard.proto.errors import JobError
from embershard.proto.messages import Compress, TableCodecs
from embershard.worker.job.job import Job
from harness.job import make_job


def job(**fields: object) -> Job:
    return make_job(**{"data": {"reader": "clicks"}, "train": {"batch_size": 8, "samples": 80}, **fields})


def place(workers: int) -> WorkerRanks:
    return WorkerRanks(0, workers, 0, workers, timedelta(seconds=1))


@pytest.mark.parametrize(("gpus", "workers", "own"), [(0, 1, False), (0, 2, False), (1, 1, True), (1, 2, False)])
def test_nccl_is_for_workers_with_a_gpu_of_their_own(monkeypatch, gpus, workers, own):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert _has_own_gpu(job(strategy="hybrid"), place(workers)) is own
    on_cpu = job(strategy="hybrid", train={"batch_size": 8, "samples": 80, "device": "cpu"})
    assert not _has_own_gpu(on_cpu, place(workers))


def test_fsdp_over_gpus_that_are_shared_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(JobError, match=r"dense\.mode: 2 workers share 1 GPUs, and fsdp needs one for each"):
        _has_own_gpu(job(dense={"mode": "fsdp"}), place(2))


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
        _check_mode(job(strategy=strategy), ps, workers)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_worker_prints_how_tables_travel_from_here_on(monkeypatch, capsys, rank):
    monkeypatch.setattr(command, "connect", lambda ps, **settings: es.local())
    with command._connect(job(), "127.0.0.1:1", replace(place(2), rank=rank), ()) as session:
        module = es.Embedding(session.table(es.TableSpec(name="t", dim=2, optimizer=es.SGD(lr=1.0))))
        session.client.ask_all(Compress(revision=1, tables=(TableCodecs(table="t", push="int8"),)))
        module(torch.tensor([1])).sum().backward()
        session.step()
    line = "step 0: table t travels as push=int8 pull=none, as the shards were told\n"
    assert capsys.readouterr().out == (line if rank == 0 else "")


def test_what_the_readers_have_compiled_is_loaded_without_scipy():
    code = """
import sys
from embershard.proto.compiled import jit
from embershard.worker.data import columns
from embershard.worker.data.readers import clicks, interactions
jit.compile_missing()
before = set(sys.modules)
for function in (clicks._draw_samples, columns._hash_texts, columns._hash_numbers, interactions._sample_negatives):
    jit.load(function)
print(len({"scipy.linalg", "numba.np.arraymath"} & (set(sys.modules) - before)))
"""
    for _ in range(2):  # the first may compile, which imports scipy
        run = subprocess.run([sys.executable, "-c", code], check=True, timeout=250, capture_output=True, text=True)
    assert run.stdout == "0\n"


def test_a_worker_starts_without_what_only_other_modes_need():
    code = """
import sys
import embershard.cli.worker, embershard.worker.training.trainer
from embershard.worker.models.layers import table
assert table(7, 3, "meta").weight.requires_grad
heavy = {"torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)
