"""Devices: what a new thread begins with, and (on a machine that has one) inputs that lie elsewhere than the model."""

import os
import platform
import subprocess
import sys
import threading

import pytest
import torch

import embershard as es
from embershard.worker.device import with_current_gpu


@pytest.fixture
def current(monkeypatch):
    """Thread -> the GPU that it chose, on a machine whose main thread chose the fourth."""
    chosen = {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: chosen.update({threading.current_thread().name: gpu}))
    return chosen


def test_without_a_gpu_in_use_none_is_chosen():
    assert with_current_gpu(print) is print


def test_a_loader_that_is_read_ahead_has_the_gpu_of_the_training_thread(current):
    seen = []

    def loader():
        for number in range(2):
            seen.append(dict(current))
            yield torch.tensor([number])

    with es.local() as session:
        module = es.Embedding(session.table(es.TableSpec(name="t", dim=2, optimizer=es.SGD(lr=1.0))))
        for ids in session.prefetch(loader(), inputs=lambda ids: {"t": ids}):
            module(ids).sum().backward()
            session.step()
    assert seen
    assert all(3 in chosen.values() for chosen in seen)


STEPS = """
import resource, torch
from embershard.worker.device import keep_freed_memory
def step():
    return [torch.ones(2**19) for _ in range(8)]  # 2 MiB each
def faults():
    for number in range(13):
        if number == 3:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
returned = faults()
keep_freed_memory()
print(returned, faults())
"""


@pytest.mark.cold_start  # with a heap of its own
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_kept_memory_has_no_page_faults_in_the_next_step():
    # fixed at its default: glibc raises it as blocks are freed, and then the heap's layout decides who faults
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**17)}
    command = [sys.executable, "-c", STEPS]
    returned, kept = subprocess.run(command, check=True, capture_output=True, timeout=250, env=env).stdout.split()
    assert 10 * int(kept) < int(returned)  # not zero: newer versions of glibc split blocks that are kept
