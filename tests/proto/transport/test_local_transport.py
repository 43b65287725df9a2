"""Several workers of one job in threads of this process."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest

from embershard.local_shards import InProcessShards
from embershard.proto import messages as m
from embershard.proto.errors import ClientClosed, ClockAhead
from embershard.proto.messages import Rendezvous
from embershard.proto.routing import make_route
from embershard.proto.transport.local import LocalTransport
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms
from harness.shards import gradients, join, push, table

TABLE = table("t", 4)
WORKERS = 3


def at_once(work, workers=WORKERS):
    with ThreadPoolExecutor(workers) as threads:
        for future in [threads.submit(work, worker) for worker in range(workers)]:
            future.result(60)


def gradient(worker, clock):
    return np.random.default_rng((worker, clock)).standard_normal((50, 4)).astype(np.float32)


@pytest.mark.parametrize("shards", [1, 2])
def test_synchronous_workers_in_threads_are_one_on_the_joint_batch(shards):
    together, alone = InProcessShards(shards), InProcessShards(shards)

    def client_of(shards, worker=0):
        client = Client(shards.transports(), worker=worker)
        client.declare(TABLE)
        return client, make_route(np.arange(50), TABLE.space_key, client.placement)

    def work(worker):
        client, route = client_of(together, worker)
        client.join(Terms(workers=WORKERS, staleness=0))
        rows = np.empty((50, 4), np.float32)
        for clock in range(20):
            client.pull([("t", route)], clock=clock)
            rows[:] = gradient(worker, clock)[route.ids]  # the same array every time
            client.push([("t", route, rows)], clock=clock)
        client.close()

    at_once(work)
    one, route = client_of(alone)
    for clock in range(20):
        mean = sum(gradient(worker, clock)[route.ids] for worker in range(WORKERS)) / np.float32(WORKERS)
        one.push([("t", route, mean)], clock=clock)
    got, _ = client_of(together)
    np.testing.assert_allclose(got.pull([("t", route)])[0], one.pull([("t", route)])[0], rtol=0, atol=1e-5)


def ask(transport, request, seconds=20.0):
    return transport.submit(request, timedelta(seconds=seconds)).result()


@pytest.fixture
def transport():
    (transport,) = InProcessShards(1).transports()
    ask(transport, join(0, workers=2))
    return transport


def test_a_ctrl_c_ends_no_request_halfway(monkeypatch):
    shards, handled = InProcessShards(1), []
    ((shard, _),) = shards._shards

    def handle(request):
        signal.raise_signal(signal.SIGINT)
        handled.append(request)

    monkeypatch.setattr(shard, "handle", handle)
    monkeypatch.setattr(shard, "when_may_leave", lambda end: end())
    (transport,) = shards.transports()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            ask(transport, rendezvous())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(handled) == 1


def rendezvous(worker=0, name="m"):
    return Rendezvous(worker, 1, name, np.full(1, worker, np.uint8))


def test_a_wait_ends_with_a_lease_though_nobody_asks_for_anything(transport):
    ask(transport, join(1, workers=2, lease_ms=100))
    assert ask(transport, rendezvous()).workers == (0,)


def test_a_wait_ends_at_its_deadline(transport):
    ask(transport, join(1, workers=2))
    with pytest.raises(ClockAhead, match="worker 1"):
        ask(transport, rendezvous(), 0.1)


def test_many_threads_may_wait_at_once(transport):
    for worker in range(1, 8):
        ask(transport, join(worker, workers=2))
    barrier = threading.Barrier(8)

    def meet(worker):
        for number in range(20):
            barrier.wait(20)
            met = ask(transport, rendezvous(worker, f"m{number}"))
            assert [part[0] for part in met.payloads] == list(range(8))

    at_once(meet, 8)


def test_a_push_that_waits_for_others_is_not_changed_with_its_callers_array(transport):
    ask(transport, join(1, workers=2))
    client = Client([transport], worker=9)
    client.declare(TABLE)
    rows = np.ones((1, 4), np.float32)
    for worker, value in ((0, 1.0), (1, 3.0)):
        rows[:] = value
        ask(transport, push(gradients([0], name="t", gradients=rows), worker=worker))
    route = make_route(np.array([0]), TABLE.space_key, client.placement)
    assert client.pull([("t", route)])[0].tolist() == [[-(1.0 + 3.0) / 2] * 4]


def test_rows_are_written_into_the_arrays_given_where_they_fit(make_shards):
    (shard,) = make_shards(1)
    shard.handle(m.Declare(table("items", 2)))
    shard.handle(m.Declare(table("other", 2)))
    ids = np.arange(3, dtype=np.int64)
    shard.handle(m.Load("items", 1, ids, np.ones((3, 2), np.float32)))
    wanted = m.Pull(1, (m.TableIds("items", ids), m.TableIds("other", ids, codec="fp16s")))
    fits = [np.zeros((3, 2), np.float32), np.zeros(15, np.uint8)]
    for into, is_same in [
        (fits, True),
        ([np.zeros((2, 3), np.float32).T, fits[1]], False),
        ([np.zeros((3, 2), np.float64), fits[1]], False),
        ([np.zeros((4, 2), np.float32), fits[1]], False),
        (fits[:1], False),
        ((), False),
    ]:
        reply = LocalTransport(shard.handle, "local").submit(wanted, timedelta(seconds=9), into).result()
        assert any(reply.tables[0] is array for array in into) == is_same
        assert reply.tables[0].tolist() == [[1, 1]] * 3
        assert reply.codecs == ("", "fp16s")


def test_a_closed_client_is_refused_as_over_a_network():
    client = Client(InProcessShards(2).transports(), worker=0)
    client.declare(TABLE)
    client.close()
    route = make_route(np.arange(9), TABLE.space_key, client.placement)
    with pytest.raises(ClientClosed):
        client.push([("t", route, np.ones((9, 4), np.float32))], clock=0)
    with pytest.raises(ClientClosed):
        client.pull([("t", route)])
