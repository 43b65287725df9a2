"""Shards in the worker's own process: the same state machines, without a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from embershard.proto.messages import Reply, Request
from embershard.proto.routing import Placement
from embershard.ps.optim import OptimizerRegistry
from embershard.ps.shard import Shard
from embershard.worker.carriers.local import LocalCarrier
from embershard.worker.client import DEFAULT_TIMEOUT, Client
from embershard.worker.session import Session


def local(
    shards: int = 1, *, imports: Sequence[str] = (), worker: int = 0, timeout: timedelta = DEFAULT_TIMEOUT
) -> Session:
    """A session with `shards` fresh shards in this process, for tests, notebooks and what fits one machine.

    `imports` names the modules of user-defined row optimizers ("__main__" for those of a notebook).
    """
    placement = Placement.even(shards)
    optimizers = OptimizerRegistry(imports)
    handles = [_one_at_a_time(Shard(i, placement, optimizers)) for i in range(shards)]
    carriers = [LocalCarrier(handle, f"local/{i}") for i, handle in enumerate(handles)]
    return Session(Client(carriers, worker=worker, timeout=timeout))


def _one_at_a_time(shard: Shard) -> Callable[[Request], Reply]:
    """A shard's `handle` for callers in several threads."""
    lock = threading.Lock()

    def handle(request: Request) -> Reply:
        with lock:
            return shard.handle(request)

    return handle
