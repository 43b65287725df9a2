"""bench/cluster: the simulator's parts against what can be computed without it."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import pytest

CLUSTER = Path(__file__).resolve().parents[2] / "bench" / "cluster"
MODULES = ("state", "prices", "events", "simulate", "failures")
MS = 1e-3


@pytest.fixture(scope="module")
def bench():
    """Its modules, whose events run as Python: compiling them takes longer than these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CLUSTER))
        importlib.import_module("prices")  # with embershard's own functions, which are compiled
        patch.setattr(numba.config, "DISABLE_JIT", True)
        modules = SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
        patch.setattr(numba.config, "DISABLE_JIT", False)
        yield modules
        for name in MODULES:
            sys.modules.pop(name)


@pytest.fixture
def prices(bench):
    """Round prices, and rows that are the same on all shards."""
    return SimpleNamespace(
        worker=bench.prices.Price(call_us=100, message_us=50, row_ns=6, kb_ns=150),
        shard=bench.prices.Price(message_us=90, row_ns=30, kb_ns=240),
        pull_share=0.3, far_pull_ns=0.0, far_push_ns=0.0, service_jitter=0.0,
        routed=lambda batch, shards: np.full(shards, 9.0 * batch / shards),
    )  # fmt: skip


def make_work(bench, **changes):
    """One worker and one shard that answers in no time, without links."""
    shards = changes.get("shards", 1)
    workers = changes.get("workers", 1)
    none = np.zeros((2, shards))
    usual = {
        "workers": workers, "shards": shards, "unseen": 0, "share": np.ones(shards), "staleness": -1, "prefetch": -1,
        "steps": 3, "goal": 10**9, "warmup": 0, "queue": 1024, "cores": 0.0, "latency": 0.0, "call": 0.0, "send": none,
        "receive": none, "upload": none, "download": none, "service": none, "apply": np.zeros(shards), "wake": 0.0,
        "refusal": 0.0, "compute": np.zeros(workers), "compute_sigma": 0.0, "service_sigma": 0.0,
        "machine": np.zeros(shards, np.int64), "fails": np.zeros(shards, np.bool_), "fail_at": -1.0, "back_at": 0.0,
        "noticed_at": 0.0, "lost_worker": -1, "lease": 0.0, "until": np.inf,
    }  # fmt: skip
    return bench.state.Work(**{**usual, **changes})


def run(bench, work, starts=None):
    state = bench.state.make_state(work, max(work.steps, 1000))
    bench.events.simulate_events(work, state, np.zeros(work.workers) if starts is None else starts, 0)
    return state


def test_two_workers_take_turns_at_one_shard_as_on_paper(bench):
    work = make_work(
        bench, workers=2, send=np.full((2, 1), MS), receive=np.full((2, 1), MS), service=np.full((2, 1), 10 * MS)
    )
    ends = run(bench, work).ends
    # the shard is never idle from 1 ms on, and turns to the other worker every 10 ms; a step is a pull and a push
    assert ends[0, :3] == pytest.approx([32 * MS, 72 * MS, 112 * MS])
    assert ends[1, :3] == pytest.approx([42 * MS, 82 * MS, 122 * MS])


def test_a_queue_is_that_of_theory_for_random_arrivals_and_constant_work(bench):
    simulated, arrivals, load, service = 4000, 20_000, 0.7, MS
    starts = np.random.default_rng(1).exponential(service / load, arrivals).cumsum()
    pulls = np.array([[service], [0.0]])
    state = run(bench, make_work(bench, workers=simulated, steps=1, service=pulls), starts[:simulated])
    free, lindley = 0.0, []
    for start in starts:
        # pushes take no time, but wait for the pulls before them
        free = max(free, start) + service
        lindley.append(free - start)
    assert state.took[0, :, 0] == pytest.approx(lindley[:simulated])
    assert np.mean(lindley) - service == pytest.approx(load * service / (2 * (1 - load)), rel=0.1)  # M/D/1


def test_every_message_is_handled_once_however_often_it_was_refused(bench):
    service = np.full((2, 2), MS)
    work = make_work(bench, workers=20, shards=2, machine=np.zeros(2, np.int64), service=service, queue=3, steps=4)
    state = run(bench, work)
    sent, handled, refused = state.counts[[bench.events.SENT_COUNT, bench.events.HANDLED_COUNT,
                                           bench.events.REFUSED_COUNT]]  # fmt: skip
    assert refused > 0
    assert sent == handled + refused
    assert handled == 20 * 2 * 2 * 4
    assert (state.done[bench.events.ACKNOWLEDGED] == 4).all()
    assert not state.queued.any()


def test_threads_share_cores_equally(bench):
    work = make_work(bench, workers=3, compute=np.full(3, 10 * MS), cores=2.0)
    assert run(bench, work).ends[:, :3] == pytest.approx(np.tile([15 * MS, 30 * MS, 45 * MS], (3, 1)))


def test_a_message_waits_for_the_link_that_shards_of_a_machine_share(bench):
    link = np.array([[0.0, 0.0], [5 * MS, 5 * MS]])  # pushes
    work = make_work(bench, shards=2, machine=np.zeros(2, np.int64), upload=link, steps=1)
    # the second one is whole at the worker's end of the link after 10 ms, begins there at 5, and ends at 10
    assert run(bench, work).ends[0, 0] == pytest.approx(10 * MS)


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_worker_is_further_ahead_of_a_slow_one_than_the_bound(bench, staleness):
    compute = np.array([MS, MS, 5 * MS])
    work = make_work(bench, workers=3, compute=compute, staleness=staleness, prefetch=staleness, steps=20)
    ends = run(bench, work).ends[:, :20]
    slow = ends[2]
    for step in range(staleness + 1, 20):
        # a step reads rows that show the slow worker's step of `staleness + 1` before
        assert (ends[:2, step] > slow[step - staleness - 1]).all()
    assert ends[:, -1].max() == pytest.approx(20 * 5 * MS)


def test_asynchronous_workers_do_not_wait_for_a_slow_one(bench):
    work = make_work(bench, workers=2, compute=np.array([MS, 5 * MS]), prefetch=2, steps=20)
    assert run(bench, work).ends[:, 19] == pytest.approx([20 * MS, 100 * MS])


def test_without_queues_a_step_is_the_sum_of_its_parts(bench, prices):
    c = bench.simulate.Cluster(
        shards=1, workers=1, shards_per_machine=1, prefetch=-1, compute_jitter=0.0, latency_us=30, gbit=25, dim=16
    )
    found = bench.simulate.simulate(c, prices, steps=5, warmup=2)
    busy = bench.simulate.busy_ms(c, prices, prices.routed(c.batch, 1))
    work = bench.simulate.make_work(c, prices, prices.routed(c.batch, 1), steps=0, goal=0, warmup=0)
    links = float(work.upload.sum() + work.download.sum()) * 1e3
    alone = busy["worker's compute"] + busy["worker's CPU"] + busy["shard's CPU"] + 4 * 0.03
    assert found.p50_ms == pytest.approx(alone + links)


@pytest.mark.parametrize(("shards", "workers", "first"), [(4, 1, "worker's compute"), (4, 24, "shard's link")])
def test_the_busiest_part_alone_says_the_speed_where_all_parts_overlap(bench, prices, shards, workers, first):
    c = bench.simulate.Cluster(shards=shards, workers=workers, shards_per_machine=4, compute_jitter=0.0)
    found = bench.simulate.simulate(c, prices, steps=80)
    busy = bench.simulate.busy_ms(c, prices, prices.routed(c.batch, shards))
    assert max(busy, key=busy.get) == found.first == first
    assert found.samples_per_second == pytest.approx(workers * c.batch / max(busy.values()) * 1e3, rel=0.02)


@pytest.mark.long
def test_a_sample_of_shards_gives_the_speed_of_all(bench, prices):
    c = bench.simulate.Cluster(shards=24, workers=30, shards_per_machine=2)
    every = bench.simulate.simulate(c, prices, steps=40)
    sampled = bench.simulate.simulate(c, prices, sampled=8, steps=40)
    assert sampled.samples_per_second == pytest.approx(every.samples_per_second, rel=0.05)
    assert sampled.p50_ms == pytest.approx(every.p50_ms, rel=0.05)


def test_a_shard_that_is_away_costs_that_time(bench, prices):
    c = bench.simulate.Cluster(shards=4, workers=8, shards_per_machine=4, prefetch=0)
    failure = bench.simulate.Failure(at=2.0, shards=1, away=5.0)
    cost = bench.failures.simulated(c, prices, "a shard", failure)
    assert 4.9 < cost.lost_s < 6.2  # a client asks again once a second


@pytest.mark.parametrize(("staleness", "lost"), [(-1, 20 / 4), (0, 10 + 10 / 4)])
def test_a_lost_worker_costs_the_others_its_lease_only_where_they_wait_for_it(bench, prices, staleness, lost):
    c = bench.simulate.Cluster(shards=2, workers=4, shards_per_machine=1, compute_ms=50, dim=16)
    failure = bench.simulate.Failure(at=2.0, worker=True, lease=10.0, away=20.0)
    cost = bench.failures.simulated(bench.failures.in_mode(c, staleness), prices, "a worker", failure)
    assert cost.lost_s == pytest.approx(lost, rel=0.05)


def test_a_fit_finds_the_prices_that_made_the_figures(bench):
    def point(shards, ids, dim, workers=1, idle=1.0):
        moved = ids * (8 + 8 * dim)
        shard_ms = 2 * (0.09 + 0.04 * idle) + (30 * ids + 240 * moved / 1e3) / 1e6
        return {
            "settings": {"shards": shards, "workers": workers, "dim": dim, "work": "ps"},
            "rows_per_step": ids,
            "worker_cpu_ms": 2 * (0.1 + 0.05 * shards) + (6 * ids + 150 * moved / 1e3) / 1e6,
            "shard_cpu_ms": shard_ms,
            "steps_per_second": 1e3 * (1 - idle) / shard_ms,
        }

    sizes = [(256, 16), (4096, 16), (65_536, 16), (4096, 64)]
    worker = bench.prices.fit_worker([point(shards, *size) for shards in (1, 2, 8) for size in sizes])
    assert [worker.call_us, worker.message_us, worker.row_ns, worker.kb_ns] == pytest.approx([100, 50, 6, 150])
    busy = [point(1, *size, workers=4, idle=0.5) for size in sizes]
    shard = bench.prices.fit_shard([point(1, *size) for size in sizes] + busy)
    assert [shard.message_us, shard.wake_us, shard.row_ns, shard.kb_ns] == pytest.approx([90, 40, 30, 240])


def test_slow_workers_hold_up_all_only_in_step(bench, prices):
    c = bench.simulate.Cluster(shards=2, workers=10, shards_per_machine=1, slow_share=0.1, slow_factor=3.0)
    speeds = [
        bench.simulate.simulate(replace(bench.failures.in_mode(c, staleness)), prices).samples_per_second
        for staleness in (-1, 0)
    ]
    assert speeds[0] > 2 * speeds[1]
