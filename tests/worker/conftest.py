from collections.abc import Callable

import pytest
import torch

from embershard.proto.routing import Placement
from embershard.ps.optim import OptimizerRegistry
from embershard.ps.shard import Shard
from embershard.worker.carriers.local import LocalCarrier
from embershard.worker.client import Client
from embershard.worker.session import Session


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def make_shards() -> Callable[..., list[Shard]]:
    """n fresh shards of one placement."""
    return lambda n, **settings: [Shard(i, Placement.even(n), OptimizerRegistry(), **settings) for i in range(n)]


@pytest.fixture
def make_session(make_shards: Callable[..., list[Shard]]) -> Callable[..., Session]:
    """A session with n fresh shards in this process, or with given ones."""

    def make(n: int = 2, shards: list[Shard] | None = None, worker: int = 0) -> Session:
        carriers = [LocalCarrier(s.handle, f"local/{i}") for i, s in enumerate(shards or make_shards(n))]
        return Session(Client(carriers, worker=worker))

    return make
