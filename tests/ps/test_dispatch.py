"""Synchronous workers in threads over one shard's dispatch, with replies that get lost."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from embershard.proto import spec
from embershard.proto.messages import Heartbeat, Leave, Pull, Rendezvous, Rows, TableGradients, TableIds
from embershard.ps.apply_thread import ApplyThread
from embershard.ps.dispatch import Dispatch
from harness import shards
from harness.shards import join, make_shard, table

WORKERS, CLOCKS = 4, 12
IDS = np.arange(40)


class Served:
    def __init__(self) -> None:
        self.shard = make_shard(table("t", optimizer=spec.Adam(lr=0.1)))
        self.apply = ApplyThread()
        self._dispatch = Dispatch(self.shard, self.apply)

    def send(self, request):
        deadline = time.monotonic() + 100
        return self._dispatch.submit(type(request), lambda: request, lambda r: r, num_bytes=10, deadline=deadline)

    def ask(self, *requests):
        """The last one's reply."""
        return [self.send(request).result(100) for request in requests][-1]


def pull(worker=0, clock=0):
    return Pull(1, (TableIds("t", IDS),), worker, 1, required_clock=clock)


def push(worker, clock):
    """A worker's push of a clock, in two messages."""
    rows = np.random.default_rng((worker, clock)).standard_normal((len(IDS), 3)).astype(np.float32)
    seq, about = 2 * clock + 1, {"worker": worker, "clock": clock, "weight": float(worker + 1)}
    return [
        shards.push(TableGradients("t", IDS[at], rows[at]), seq=seq + half, first=seq, last=half == 1, **about)
        for half, at in enumerate((slice(0, 20), slice(20, 40)))
    ]


def rows_after(order):
    served = Served()
    served.ask(*(join(worker, workers=WORKERS) for worker in range(WORKERS)))

    def work(worker):
        rng = random.Random(f"{order} {worker}")
        for clock in range(CLOCKS):
            if rng.random() < 0.3:
                served.send(pull(worker, clock))  # its reply is lost
            assert isinstance(served.ask(pull(worker, clock)), Rows)
            time.sleep(rng.random() * 0.002)
            for message in push(worker, clock):
                for _ in range(rng.choice([1, 1, 2, 3])):
                    served.send(message)
                served.ask(message)
            if clock % 10 == 9:
                meet = Rendezvous(worker, 1, f"after {clock}", np.full(1, worker, np.uint8))
                served.send(meet)
                assert served.ask(meet).workers == tuple(range(WORKERS))
        served.ask(Leave(worker=worker, epoch=1))

    with ThreadPoolExecutor(WORKERS) as threads:
        list(threads.map(work, range(WORKERS), timeout=200))
    rows = served.ask(Pull(1, (TableIds("t", IDS),)))
    assert rows.version == CLOCKS
    return rows.tables[0].tobytes()


def test_synchronous_rows_have_the_same_bits_however_messages_arrive_and_are_repeated():
    assert rows_after("a") == rows_after("b")


def test_a_wait_ends_with_the_lease_of_the_one_waited_for():
    served = Served()
    served.ask(join(0, workers=2), join(1, workers=2, lease_ms=300), *push(0, 0))
    assert isinstance(served.ask(pull(clock=1)), Rows)
    assert served.shard.status().expired_leases == 1


def test_a_lease_does_not_run_while_requests_of_its_worker_wait_behind_others():
    served, lease, gate = Served(), 1.0, threading.Event()
    served.ask(*(join(worker, workers=2, staleness=-1, lease_ms=round(1000 * lease)) for worker in range(2)))
    served.apply.submit(lambda: gate.wait(60), 0, time.monotonic() + 60)
    begin, beats = time.monotonic(), []
    while time.monotonic() - begin < 1.5 * lease:
        time.sleep(0.1)
        beats += [served.send(Heartbeat(worker=worker, epoch=1)) for worker in range(2)]
    gate.set()
    for beat in beats:
        beat.result(20)
    assert served.shard.status().expired_leases == 0
