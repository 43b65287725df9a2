"""Synchronous workers in threads over one shard's dispatch, with replies that get lost."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from embershard.proto import spec
from embershard.proto.errors import ClockAhead
from embershard.proto.messages import (
    Declare,
    Heartbeat,
    Join,
    Leave,
    Pull,
    Push,
    PushToken,
    Rendezvous,
    RendezvousResult,
    Reply,
    Request,
    Rows,
    TableGradients,
    TableIds,
)
from embershard.proto.routing import Placement
from embershard.ps.apply_thread import ApplyThread
from embershard.ps.dispatch import Dispatch
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry

WORKERS, CLOCKS = 4, 30
IDS = np.arange(40, dtype=np.int64)
TABLE = spec.TableSpec(name="t", dim=3, optimizer=spec.Adam(lr=0.1), initializer=spec.Constant(value=0.0))


class Served:
    def __init__(self, **bounds: int) -> None:
        self.shard = Shard(0, Placement.even(1), OptimizerRegistry())
        self.apply = ApplyThread(**bounds)
        self._dispatch = Dispatch(self.shard, self.apply)

    def send(self, request: Request, seconds: float = 100.0) -> Future[Reply]:
        deadline = time.monotonic() + seconds
        return self._dispatch.submit(type(request), lambda: request, lambda r: r, num_bytes=10, deadline=deadline)

    def ask(self, request: Request, seconds: float = 100.0) -> Reply:
        return self.send(request, seconds).result(100)


def gradient(worker: int, clock: int) -> np.ndarray:
    return np.random.default_rng((worker, clock)).standard_normal((len(IDS), 3)).astype(np.float32)


def push(worker: int, clock: int) -> list[Push]:
    """A worker's push of a clock, in two messages."""
    rows, seq = gradient(worker, clock), 2 * clock + 1
    halves = (slice(0, 20), slice(20, 40))
    return [
        Push(
            PushToken(worker, 1, seq + half, seq),
            clock,
            1,
            (TableGradients("t", IDS[part], rows[part]),),
            last=half == 1,
            weight=float(worker + 1),
        )
        for half, part in enumerate(halves)
    ]


def rows_after(served: Served, order: str) -> bytes:
    for request in (
        Declare(TABLE),
        *(
            Join(worker=worker, epoch=1, clock=0, staleness=0, workers=WORKERS, lease_ms=60_000)
            for worker in range(WORKERS)
        ),
    ):
        served.ask(request)

    def work(worker):
        rng = random.Random(f"{order} {worker}")
        for clock in range(CLOCKS):
            pull = Pull(1, (TableIds("t", IDS),), worker, 1, required_clock=clock)
            if rng.random() < 0.3:
                served.send(pull)  # its reply is lost
            assert isinstance(served.ask(pull), Rows)
            time.sleep(rng.random() * 0.002)
            for message in push(worker, clock):
                for _ in range(rng.choice([1, 1, 2, 3])):
                    served.send(message)
                served.ask(message)
            if clock % 10 == 9:
                meet = Rendezvous(worker, 1, f"after {clock}", np.full(1, worker, np.uint8))
                served.send(meet)
                met = served.ask(meet)
                assert isinstance(met, RendezvousResult)
                assert met.workers == tuple(range(WORKERS))
        served.ask(Leave(worker=worker, epoch=1))

    with ThreadPoolExecutor(WORKERS) as threads:
        for future in [threads.submit(work, worker) for worker in range(WORKERS)]:
            future.result(100)
    rows = served.ask(Pull(1, (TableIds("t", IDS),)))
    assert isinstance(rows, Rows)
    assert rows.version == CLOCKS
    return rows.tables[0].tobytes()


@pytest.fixture
def served():
    return Served()


def test_synchronous_rows_have_the_same_bits_however_messages_arrive_and_are_repeated():
    runs = {rows_after(Served(), order) for order in "ab"}
    assert len(runs) == 1


def test_pulls_that_wait_do_not_keep_the_pushes_out_that_they_wait_for():
    """The queue has room for one request beside the one that runs."""
    served = Served(max_requests=2, max_bytes=20)
    served.ask(Declare(TABLE))
    for worker in range(2):
        served.ask(Join(worker=worker, epoch=1, clock=0, staleness=0, workers=2, lease_ms=60_000))
    waiting = []
    for _ in range(2):
        waiting.append(served.send(Pull(1, (TableIds("t", IDS),), 0, 1, required_clock=1)))
        served.ask(Pull(1, ()))
    with pytest.raises(ClockAhead):
        served.ask(Pull(1, (TableIds("t", IDS),), 0, 1, required_clock=1))
    for worker in range(2):
        for message in push(worker, 0):
            served.ask(message)
    for pull in waiting:
        assert isinstance(pull.result(20), Rows)


def test_a_wait_ends_with_the_lease_of_the_one_waited_for(served):
    served.ask(Declare(TABLE))
    served.ask(Join(worker=0, epoch=1, clock=0, staleness=0, workers=2, lease_ms=60_000))
    served.ask(Join(worker=1, epoch=1, clock=0, staleness=0, workers=2, lease_ms=300))
    for message in push(0, 0):
        served.ask(message)
    assert isinstance(served.ask(Pull(1, (TableIds("t", IDS),), 0, 1, required_clock=1)), Rows)
    assert served.shard.status().expired_leases == 1


def test_a_lease_does_not_run_while_requests_of_its_worker_wait_behind_others(served):
    served.ask(Declare(TABLE))
    lease = 1.0
    for worker in range(2):
        served.ask(Join(worker=worker, epoch=1, clock=0, staleness=-1, workers=2, lease_ms=round(1000 * lease)))
    gate = threading.Event()
    served.apply.submit(lambda: gate.wait(60), 0, time.monotonic() + 60)
    begin, beats = time.monotonic(), []
    while time.monotonic() - begin < 1.5 * lease:
        time.sleep(0.1)
        beats += [served.send(Heartbeat(worker=worker, epoch=1)) for worker in range(2)]
    gate.set()
    for beat in beats:
        beat.result(20)
    assert served.shard.status().expired_leases == 0
