"""A worker that trains on two shards, one of which loses a lease, refuses or falls silent at a message of one push."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest

import embershard as es
from embershard.proto.errors import InvalidRequest
from embershard.proto.messages import Push, Reply, Request
from embershard.proto.routing import Placement, make_route
from embershard.proto.transport.local import LocalTransport
from embershard.proto.transport.transport import Unreachable
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Membership, Terms

NUM_IDS, DIM, FAULTY_CLOCK, STEPS = 400, 16, 2, 5
SPEC = es.TableSpec(name="t", dim=DIM, optimizer=es.SGD(lr=1.0), initializer=es.Constant())
LEASE = timedelta(hours=1)  # that no beat renews while a test runs


class Faulty:
    """A shard that takes small messages, and to which something happens at one message of one clock."""

    def __init__(self, number: int) -> None:
        self.shard = Shard(number, Placement.even(2), OptimizerRegistry(), max_message_bytes=2**13)
        self.at_last = self.at_first = self.after_first = self.after_last = nothing
        self.late = 0.0  # seconds that have passed for this shard alone
        self.taken: list[Push] = []

    def handle(self, request: Request) -> Reply:
        if not isinstance(request, Push) or request.clock != FAULTY_CLOCK:
            return self._handle(request)
        is_first = not any(push.clock == FAULTY_CLOCK for push in self.taken)
        (self.at_last if request.last else self.at_first if is_first else nothing)(self)
        reply = self._handle(request)
        self.taken.append(request)
        (self.after_last if request.last else self.after_first if is_first else nothing)(self)
        return reply

    def _handle(self, request: Request) -> Reply:
        return self.shard.handle(request, time.monotonic() + self.late)


def nothing(faulty: Faulty) -> None:
    pass


def lose_lease(faulty: Faulty) -> None:
    faulty.late += 2 * LEASE.total_seconds()
    faulty.shard.advance(time.monotonic() + faulty.late)


def refuse(faulty: Faulty) -> None:
    raise InvalidRequest(reason="not today")


def be_silent(faulty: Faulty) -> None:
    raise Unreachable("nobody answers")


class Once:
    """Something that happens once, in the order given."""

    def __init__(self, *events: Callable[[Faulty], None]) -> None:
        self._events, self._done = events, False

    def __call__(self, faulty: Faulty) -> None:
        if not self._done:
            self._done = True
            for event in self._events:
                event(faulty)


class Training:
    """One member that pushes to two shards, the second of them faulty."""

    def __init__(self, codec: str, staleness: int, timeout: timedelta) -> None:
        self.faulty = Faulty(1)
        handles = [Faulty(0).handle, self.faulty.handle]
        self.client = Client([LocalTransport(handle, "local") for handle in handles], timeout=timeout)
        self.client.compressor.settings = es.Compression(push=codec, warmup_steps=1)
        self.member: Membership = self.client.join(Terms(workers=1, staleness=staleness, lease=LEASE))
        self.client.declare(SPEC)
        self.pushed = np.zeros((NUM_IDS, DIM))
        self.clock = 0

    def step(self) -> None:
        rows = np.random.default_rng(self.clock).standard_normal((NUM_IDS, DIM)).astype(np.float32)
        route = make_route(np.arange(NUM_IDS), SPEC.space_key, self.client.placement)
        ordered = np.empty_like(rows)
        ordered[route.index] = rows
        self.pushed += rows
        clock = max(self.clock, self.member.first)
        self.clock = clock + 1
        self.client.push([("t", route, ordered)], clock=clock)

    def run(self, error: type[Exception] | None = None) -> None:
        """Some steps, of which the faulty one may raise."""
        while self.clock < FAULTY_CLOCK + STEPS:
            if error is not None and self.clock == FAULTY_CLOCK:
                with pytest.raises(error):
                    self.step()
                self.check()
            else:
                self.step()
        self.check()

    def check(self) -> None:
        """What was applied and what is held add up to what was pushed, but for what still waits to be sent."""
        if any(self.client._pushes._waiting):
            return
        route = make_route(np.arange(NUM_IDS), SPEC.space_key, self.client.placement)
        (rows,) = self.client.pull([("t", route)])
        total, held = -rows[route.index].astype(np.float64), self.client.compressor.held("t")
        total[held.ids] += held.rows.astype(np.float64) * held.rates[:, None]
        assert np.linalg.norm(total - self.pushed) <= 1e-5 * np.linalg.norm(self.pushed)
