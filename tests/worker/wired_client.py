"""A client whose shards lose, refuse or forget pushes as they are told, and an account of what it pushed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import numpy.typing as npt

import embershard as es
from embershard.proto.arrays import Array, Floats
from embershard.proto.errors import EmbershardError, InvalidRequest, UnknownRoute
from embershard.proto.messages import Push, Reply, Request
from embershard.proto.routing import make_route
from embershard.proto.spec import TableSpec
from embershard.proto.transport.local import LocalTransport
from embershard.proto.transport.transport import Unreachable
from embershard.ps.shard import Shard
from embershard.worker.client.client import Client

DIM, NUM_IDS = 4, 50
SPEC = TableSpec(name="t", dim=DIM, optimizer=es.SGD(lr=1.0), initializer=es.Constant())
IDS = np.arange(NUM_IDS)


class Link(LocalTransport):
    """A shard that loses, after it was applied or before, or refuses, the pushes that it is told to."""

    def __init__(self, shard: Shard, address: str) -> None:
        super().__init__(shard.handle, address)
        self.lost_replies = self.refused = 0
        self.error: EmbershardError = InvalidRequest(reason="not today")
        self.forgets = False  # what a pull left there
        self.seen: list[Push] = []

    def submit(self, request: Request, timeout: timedelta, into: Sequence[Array] = ()):  # type: ignore[no-untyped-def]
        if isinstance(request, Push):
            self.seen.append(request)
            if self.refused:
                self.refused -= 1
                return _Failed(self.error)
            if self.forgets:
                self.forgets = False
                return _Failed(UnknownRoute(worker=0, route=1, table="t"))
            if self.lost_replies:
                self.lost_replies -= 1
                super().submit(request, timeout, into)
                raise Unreachable("the reply was lost")
        return super().submit(request, timeout, into)


class _Failed:
    num_bytes = 0

    def __init__(self, error: EmbershardError) -> None:
        self._error = error

    def result(self) -> Reply:
        raise self._error


class Wired:
    """A client with one table whose rows are 0 and show, with SGD of rate 1, minus what was applied."""

    def __init__(
        self, shards: list[Shard], push: str, spec: TableSpec = SPEC, worker: int = 0, **settings: object
    ) -> None:
        self.links = [Link(shard, f"local/{number}") for number, shard in enumerate(shards)]
        self.client = Client(self.links, worker=worker, timeout=timedelta(seconds=30))
        self.client.compressor.settings = es.Compression(push=push, **settings)  # type: ignore[arg-type]
        self.client.declare(spec)
        self.spec, self.clock = spec, 0
        self.pushed = np.zeros((NUM_IDS, spec.dim))

    def push(self, rows: Floats, ids: npt.NDArray[np.int64] = IDS, lr_scale: float = 1.0) -> None:
        route = make_route(ids, self.spec.space_key, self.client.placement)
        ordered = np.empty_like(rows)
        ordered[route.index] = rows
        self.pushed[ids] += np.where(np.isfinite(rows).all(1, keepdims=True), rows, 0).astype(np.float64) * lr_scale
        self.clock += 1
        self.client.push([("t", route, ordered)], clock=self.clock - 1, lr_scale=lr_scale)

    def applied(self) -> npt.NDArray[np.float64]:
        route = make_route(IDS, self.spec.space_key, self.client.placement)
        (rows,) = self.client.pull([("t", route)])
        return -rows[route.index].astype(np.float64)

    def held(self) -> npt.NDArray[np.float64]:
        rows, held = np.zeros_like(self.pushed), self.client.compressor.held("t")
        rows[held.ids] = held.rows.astype(np.float64) * held.rates[:, None]
        return rows

    def check(self) -> None:
        """What was applied and what is held add up to what was pushed."""
        np.testing.assert_allclose(self.applied() + self.held(), self.pushed, atol=1e-5 * np.abs(self.pushed).max())


def gradients(seed: int, count: int = NUM_IDS) -> Floats:
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)
