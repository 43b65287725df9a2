"""A shard that is killed under load comes back from its log: no acknowledged push is lost, none counts twice."""

import os
import random
import signal
import threading
import time
from contextlib import ExitStack, closing, suppress
from datetime import timedelta

import numpy as np
import pytest

import embershard as es
from embershard.deploy.supervisor import LocalShards, RestartPolicy
from embershard.proto.errors import EmbershardError
from embershard.proto.messages import GetStatus, Push, PushToken, ShardStatus, TableGradients
from embershard.proto.routing import make_route
from embershard.proto.transport.addresses import transport_for
from embershard.proto.transport.transport import Unreachable
from harness.eventually import PATIENCE, eventually
from harness.shards import join, make_shard, rows

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

WORKERS, IDS, DIM = 2, 60, 4
SPEC = es.TableSpec(name="t", dim=DIM, optimizer=es.Adagrad(lr=0.1), initializer=es.Normal(std=0.1))
AGAIN = RestartPolicy(first_pause=timedelta(0), quick=timedelta(0))
TIMEOUT = timedelta(seconds=PATIENCE)


def ids_of_step(worker, step, synchronous):
    """In a synchronous job the workers share ids: the order in which they come does not matter then."""
    chooser = random.Random(f"{worker} {step}")
    first = 0 if synchronous else worker * IDS
    return np.array(sorted(chooser.sample(range(first, first + IDS), 20)), np.int64)


def gradients_of(worker, step, synchronous):
    shape = len(ids_of_step(worker, step, synchronous)), DIM
    return np.random.default_rng([worker, step]).standard_normal(shape).astype(np.float32)


class Pusher(threading.Thread):
    """A worker that pushes, step after step, until `last` says at which one it ends."""

    def __init__(self, session, worker, synchronous):
        super().__init__(daemon=True)
        self.session, self.worker, self.synchronous = session, worker, synchronous
        self.acknowledged, self.last, self.error = 0, 10**9, None

    def run(self):
        try:
            client = self.session.client
            while self.acknowledged < self.last:
                step = self.acknowledged
                ids = ids_of_step(self.worker, step, self.synchronous)
                route = make_route(ids, SPEC.space_key, client.placement)
                order = np.searchsorted(ids, route.ids)
                gradients = gradients_of(self.worker, step, self.synchronous)[order]
                client.pull([("t", route)], clock=step if self.synchronous else None)
                client.push([("t", route, gradients)], clock=step)
                self.acknowledged += 1
        except BaseException as error:
            self.error = error


def model(steps, synchronous):
    """The rows after these pushes of each worker, each applied once, by a shard that nothing happens to."""
    shard = make_shard(SPEC)
    if synchronous:
        for worker in range(WORKERS):
            shard.handle(join(worker, workers=WORKERS, lease_ms=10**9))
    for step in range(max(steps)):
        for worker in range(WORKERS):
            if step < steps[worker]:
                part = TableGradients(
                    "t", ids_of_step(worker, step, synchronous), gradients_of(worker, step, synchronous)
                )
                shard.handle(Push(PushToken(worker, 1, step + 1, step + 1), step, 1, (part,)))
    return rows(shard, *range(WORKERS * IDS), name="t")


def kill_under_load(folder, kills, synchronous, durability="log", seed=0):
    """Kill the shard at random moments while workers push; then compare it with the model."""
    chooser = random.Random(seed)
    with ExitStack() as stack:
        shards = stack.enter_context(
            LocalShards(1, restart=AGAIN, durability=durability, log_dir=folder, report=lambda line: None)
        )
        terms = {"workers": WORKERS, "staleness": 0} if synchronous else {}
        sessions = [
            stack.enter_context(es.connect(shards.addresses, worker=worker, timeout=TIMEOUT, **terms))
            for worker in range(WORKERS)
        ]
        sessions[0].client.declare(SPEC)
        sessions[1].client.declare(SPEC)
        pushers = [Pusher(session, worker, synchronous) for worker, session in enumerate(sessions)]
        for pusher in pushers:
            pusher.start()
        for _ in range(kills):
            before = [pusher.acknowledged for pusher in pushers]
            end = time.monotonic() + PATIENCE
            while any(one.acknowledged < count + 3 for one, count in zip(pushers, before, strict=True)):
                assert not any(pusher.error for pusher in pushers), [pusher.error for pusher in pushers]
                assert time.monotonic() < end, (before, [pusher.acknowledged for pusher in pushers])
                time.sleep(0.001)
            time.sleep(chooser.uniform(0, 0.3))
            os.kill(shards.pids[0], signal.SIGKILL)
        last = max(pusher.acknowledged for pusher in pushers) + 5
        for pusher in pushers:
            pusher.last = last
        for pusher in pushers:
            pusher.join(PATIENCE)
            assert pusher.error is None, pusher.error
            assert not pusher.is_alive()
        steps = [pusher.acknowledged for pusher in pushers]
        client = sessions[0].client
        route = make_route(np.arange(WORKERS * IDS), SPEC.space_key, client.placement)
        (got,) = client.pull([("t", route)], clock=last if synchronous else None)
        (status,) = client.connections.call_all(GetStatus())
    assert status.term == kills + 1
    assert status.pushed_rows == 20 * sum(steps)
    want = model(steps, synchronous)
    np.testing.assert_array_equal(got, want[route.ids])
    return steps


SLOW_CODEC = """
import time
import numpy as np
import embershard as es

def read(payload, rows, dim):
    time.sleep(0.02)
    return payload.view(np.float16).reshape(rows, dim).astype(np.float32)

@es.values_codec(decode=read, nbytes=lambda rows, dim: 2 * rows * dim)
def slow(rows, key):
    return rows.astype(np.float16)
"""


def test_a_recovery_that_takes_longer_than_a_call_is_waited_for_and_shown(tmp_path, monkeypatch):
    (tmp_path / "slow_codec.py").write_text(SLOW_CODEC)
    monkeypatch.syspath_prepend(tmp_path)
    imports, codec = ["slow_codec"], es.Compression(push="slow_codec:slow")
    logs = {"durability": "log", "log_dir": tmp_path / "log"}
    with (
        LocalShards(1, imports=imports, restart=AGAIN, report=lambda line: None, **logs) as shards,
        es.connect(shards.addresses, timeout=TIMEOUT, imports=imports, compression=codec) as session,
        closing(transport_for(shards.addresses[0])) as transport,
    ):
        client = session.client
        client.declare(SPEC)
        route = make_route(np.arange(IDS), SPEC.space_key, client.placement)
        for step in range(50):  # a second to decode
            client.push([("t", route, np.ones((IDS, DIM), np.float32))], clock=step)
        (want,), (before,) = client.pull([("t", route)]), client.status()
        client.timeout = timedelta(seconds=0.5)
        os.kill(shards.pids[0], signal.SIGKILL)

        def seen(recovering):
            with suppress(Unreachable, EmbershardError):
                reply = transport.submit(GetStatus(), TIMEOUT).result()
                assert isinstance(reply, ShardStatus)
                return reply if reply.recovering == recovering and reply.instance != before.instance else None

        assert eventually(lambda: (found := seen(True)) and 0 < found.recovered_bytes < found.log_bytes)
        (got,) = client.pull([("t", route)])
        np.testing.assert_array_equal(got, want)
        assert seen(False).recovery_seconds > 0.9  # its own took as long


@pytest.mark.parametrize("synchronous", [False, True], ids=["asynchronous", "synchronous"])
def test_five_kills_lose_and_double_nothing(tmp_path, synchronous):
    kill_under_load(tmp_path / "log", 5, synchronous)


@pytest.mark.long
@pytest.mark.parametrize("durability", ["log", "fsync"])
def test_fifty_kills_lose_and_double_nothing(tmp_path, durability):
    for seed in range(5):
        kill_under_load(tmp_path / f"log-{seed}", 5, bool(seed % 2), durability, seed)
