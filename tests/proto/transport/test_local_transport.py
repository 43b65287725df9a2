"""Several workers of one job in threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest

from embershard.local_shards import InProcessShards
from embershard.proto import spec
from embershard.proto.errors import ClockAhead
from embershard.proto.messages import Join, Push, PushToken, Rendezvous, TableGradients
from embershard.proto.routing import make_route
from embershard.proto.transport.local import LocalTransport
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms

TABLE = spec.TableSpec(name="t", dim=4, optimizer=spec.SGD(lr=0.5), initializer=spec.Constant(value=1.0))
IDS = np.arange(50, dtype=np.int64)
WORKERS = 3


def at_once(work: Callable[[int], object], workers: int = WORKERS) -> None:
    with ThreadPoolExecutor(workers) as threads:
        for future in [threads.submit(work, worker) for worker in range(workers)]:
            future.result(60)


def gradient(worker: int, clock: int) -> np.ndarray:
    return np.random.default_rng((worker, clock)).standard_normal((len(IDS), 4)).astype(np.float32)


@pytest.mark.parametrize("shards", [1, 2])
def test_synchronous_workers_in_threads_are_one_on_the_joint_batch(shards):
    together, one = InProcessShards(shards), Client(InProcessShards(shards).transports())

    def work(worker):
        client = Client(together.transports(), worker=worker)
        client.join(Terms(workers=WORKERS, staleness=0))
        client.declare(TABLE)
        route = make_route(IDS, TABLE.space_key, client.placement)
        rows = np.empty((len(IDS), 4), np.float32)
        for clock in range(20):
            client.pull([("t", route)], clock=clock)
            rows[:] = gradient(worker, clock)[route.ids]  # the same array every time
            client.push([("t", route, rows)], clock=clock)
        client.close()

    at_once(work)
    one.declare(TABLE)
    route = make_route(IDS, TABLE.space_key, one.placement)
    for clock in range(20):
        mean = sum(gradient(worker, clock)[route.ids] for worker in range(WORKERS)) / np.float32(WORKERS)
        one.push([("t", route, mean)], clock=clock)
    got = Client(together.transports())
    got.declare(TABLE)
    np.testing.assert_allclose(got.pull([("t", route)])[0], one.pull([("t", route)])[0], rtol=0, atol=1e-5)


@pytest.fixture
def transport():
    (transport,) = InProcessShards(1).transports()
    for worker in range(2):
        join(transport, worker, workers=2)
    return transport


def join(transport: LocalTransport, worker: int, workers: int, lease_ms: int = 60_000) -> None:
    transport.submit(
        Join(worker=worker, epoch=1, clock=0, staleness=0, workers=workers, lease_ms=lease_ms), timedelta(seconds=1)
    ).result()


def test_a_wait_ends_with_a_lease_though_nobody_asks_for_anything():
    (transport,) = InProcessShards(1).transports()
    join(transport, 0, workers=2)
    join(transport, 1, workers=2, lease_ms=100)
    met = transport.submit(Rendezvous(0, 1, "m", np.zeros(1, np.uint8)), timedelta(seconds=20)).result()
    assert met.workers == (0,)  # type: ignore[union-attr]


def test_a_wait_ends_at_its_deadline(transport):
    with pytest.raises(ClockAhead, match="worker 1"):
        transport.submit(Rendezvous(0, 1, "m", np.zeros(1, np.uint8)), timedelta(seconds=0.1)).result()


def test_many_threads_may_wait_at_once(transport):
    for worker in range(2, 8):
        join(transport, worker, workers=2)
    barrier = threading.Barrier(8)

    def meet(worker):
        for number in range(20):
            barrier.wait(20)
            request = Rendezvous(worker, 1, f"m{number}", np.full(1, worker, np.uint8))
            met = transport.submit(request, timedelta(seconds=20)).result()
            assert [part[0] for part in met.payloads] == list(range(8))  # type: ignore[union-attr]

    at_once(meet, 8)


def test_a_push_that_waits_for_others_is_not_changed_with_its_callers_array(transport):
    client = Client([transport], worker=9)
    client.declare(TABLE)
    route = make_route(IDS[:1], TABLE.space_key, client.placement)
    rows = np.ones((1, 4), np.float32)
    for worker, value in ((0, 1.0), (1, 3.0)):
        rows[:] = value
        push = Push(PushToken(worker, 1, 1, 1), 0, 1, (TableGradients("t", route.ids, rows),))
        transport.submit(push, timedelta(seconds=1)).result()
    assert client.pull([("t", route)])[0].tolist() == [[1.0 - 0.5 * (1.0 + 3.0) / 2] * 4]
