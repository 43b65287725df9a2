"""One worker of `bench ps`: pull, push, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle, islice

import numpy as np

from embershard.benchmark.ids import ZipfIds
from embershard.benchmark.settings import POOL, Lap, PullPush, TransportName
from embershard.local_shards import local
from embershard.proto.arrays import Ids
from embershard.proto.routing import make_route
from embershard.proto.security.tls import TLS
from embershard.proto.shared_memory import empty_floats
from embershard.proto.spec import OPTIMIZERS, TableSpec, Uniform
from embershard.worker.client.client import Client

_FILL = 1 << 16  # rows per message


class PullPushWorker:
    """Batches in memory, of which a step routes one, pulls its rows, and pushes a gradient for each of them."""

    def __init__(self, settings: PullPush, addresses: Sequence[str], rank: int) -> None:
        if settings.transport is TransportName.LOCAL:
            self._client = local(settings.shards).client
        else:
            self._client = Client.connect(addresses, worker=rank, tls=TLS(settings.tls) if settings.tls else None)
        optimizer = OPTIMIZERS[settings.optimizer](lr=0.01)
        name = f"bench/{settings.optimizer}-{settings.dim}"
        self._spec = TableSpec(name=name, dim=settings.dim, optimizer=optimizer, initializer=Uniform())
        self._client.declare(self._spec)
        if settings.fill and rank == 0:
            self._fill(settings.rows)
        rng = np.random.default_rng([settings.seed, rank])
        source = ZipfIds(settings.rows, settings.skew)
        self._batches = cycle([source.draw(rng, (settings.ids,)) for _ in range(POOL)])
        # where a step has them: in the memory that shards of this machine share, if they are
        self._gradients, self._rows = (empty_floats(settings.ids, settings.dim) for _ in range(2))
        self._gradients[...] = rng.standard_normal((settings.ids, settings.dim), np.float32) * 0.01
        self._clock = 0

    def run(self, steps: int) -> Lap:
        """Make `steps` steps and return their times."""
        before = self._client.stats
        parts: dict[str, list[float]] = {"route": [], "pull": [], "push": []}
        rows, ends = 0, []
        cpu, start = time.process_time(), time.monotonic()
        for ids in islice(self._batches, steps):
            rows += self._step(ids, parts)
            ends.append(time.monotonic())
        after = self._client.stats
        moved = after.sent_bytes + after.received_bytes - before.sent_bytes - before.received_bytes
        return Lap(start=start, ends=ends, cpu=time.process_time() - cpu, parts=parts, bytes=moved, rows=rows)

    def _step(self, ids: Ids, parts: dict[str, list[float]]) -> int:
        name, begin = self._spec.name, time.perf_counter()
        route = make_route(ids, self._spec.space_key, self._client.placement)
        routed, count = time.perf_counter(), len(route.ids)
        self._client.pull([(name, route)], [self._rows[:count]], keep=True)
        pulled = time.perf_counter()
        self._client.push([(name, route, self._gradients[:count])], clock=self._clock)
        self._clock += 1
        for part, seconds in zip(parts, (routed - begin, pulled - routed, time.perf_counter() - pulled), strict=True):
            parts[part].append(seconds)
        return count

    def _fill(self, rows: int) -> None:
        values = np.full((_FILL, self._spec.dim), 0.01, np.float32)
        for start in range(0, rows, _FILL):
            ids = np.arange(start, min(start + _FILL, rows), dtype=np.int64)
            route = make_route(ids, self._spec.space_key, self._client.placement)
            self._client.load(self._spec.name, route, values[: len(ids)])
