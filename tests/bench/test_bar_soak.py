"""bench/bar_soak.py finds what grows, and pushes that are lost or doubled."""

import importlib
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from embershard.local_shards import InProcessShards
from embershard.worker.client.client import Client

BENCH = Path(__file__).resolve().parents[2] / "bench"
MIB = 2**20


@pytest.fixture
def bar_soak(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("bar_soak")


@pytest.mark.parametrize(("more", "failures"), [((0, 0, 0), 0), ((40 * MIB, 0, 0), 1), ((0, 2, 5), 2)])
def test_a_process_may_not_grow_in_the_later_half(bar_soak, more, failures):
    watch = bar_soak.Watch("worker", lambda: 0)
    first = 100 * MIB, 10, 30
    for number in range(50):
        watch.looks.append(first if number < 30 else tuple(a + b for a, b in zip(first, more, strict=True)))
    assert len(watch.judge()[1]) == failures


def test_a_process_that_was_hardly_seen_is_not_judged_to_be_flat(bar_soak):
    assert bar_soak.Watch("worker", lambda: 0).judge()[1]


def test_the_folder_may_rise_to_each_base_and_fall_but_not_grow(bar_soak):
    rows, wave = 100 * MIB, [900 * MIB + step % 10 * 20 * MIB for step in range(50)]
    assert not bar_soak.FolderWatch(Path(), list(wave)).judge(rows)[1]
    assert bar_soak.FolderWatch(Path(), [size + step * 30 * MIB for step, size in enumerate(wave)]).judge(rows)[1]
    assert bar_soak.FolderWatch(Path(), [size + 3000 * MIB for size in wave]).judge(rows)[1]
    assert bar_soak.FolderWatch(Path()).judge(rows)[1]


@pytest.mark.parametrize("mode", ["asynchronous", "bounded", "synchronous"])
def test_a_push_that_is_lost_or_doubled_makes_wrong_sums(bar_soak, mode, monkeypatch):
    monkeypatch.setattr(bar_soak, "NUM_IDS", 500)
    monkeypatch.setattr(bar_soak, "BATCH", 50)
    monkeypatch.setattr(bar_soak.SumPusher, "num_ids", 500)
    shards = InProcessShards(2)
    with ExitStack() as stack:
        clients = [stack.enter_context(closing(Client(shards.transports(), worker=rank))) for rank in range(2)]
        job = bar_soak.Job(clients, mode, bar_soak.SumPusher)
        for pusher in job.pushers:
            pusher.last = 6  # before they start: they may be beyond it when `finish` is called
        job.start()
        _, rows = job.finish(6)
        assert not bar_soak.wrong_sums(job, rows)
        job.pushers[0].pushed["plain"][3] += 1  # one more than the shards have
        assert len(bar_soak.wrong_sums(job, rows)) == 1
