"""What all tests need."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as make does; before torch is imported

import pytest
import torch
import uvloop
from hypothesis import settings

from embershard.proto.routing import Placement
from embershard.proto.transport.local import LocalTransport
from embershard.ps.apply_thread import ApplyThread
from embershard.ps.dispatch import Dispatch
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.transport.stream import StreamServer
from embershard.worker.client.client import Client
from embershard.worker.session.session import Session
from harness import warm_start

# A shell that runs the tests in the background has them, and every process they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# An example that took long says how busy the machine is, not that a claim is false.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

warm_start.install()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test about starting starts interpreters; for others, the fixtures of modules included, processes start warm."""
    warm_start.WarmPopen.cold = item.get_closest_marker("cold_start") is not None


def pytest_sessionfinish() -> None:
    """Nothing outlives the tests, however they end."""
    warm_start.kill_all()


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
        transports = [LocalTransport(s.handle, f"local/{i}") for i, s in enumerate(shards or make_shards(n))]
        return Session(Client(transports, worker=worker))

    return make


class Served:
    """A shard on a loop and a thread of its own."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.address = asyncio.run_coroutine_threadsafe(self._start(), self.loop).result(20)

    async def _start(self) -> str:
        self._server = StreamServer(Dispatch(Shard(0, Placement.even(1), OptimizerRegistry()), ApplyThread()))
        self._listener = await self.loop.create_server(self._server.protocol, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def _stop(self) -> None:
        self._listener.close()
        await self._server.close(0.0)
        await asyncio.sleep(0.01)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self.loop).result(20)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(20)
        self.loop.close()


@pytest.fixture
def stream_shard() -> Iterator[str]:
    """The address of a shard in this process that serves the stream transport."""
    shard = Served()
    yield shard.address
    shard.stop()
