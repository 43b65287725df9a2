"""Fixtures of all tests, and the libraries that tests run with."""

import threading
from collections import defaultdict

import pytest
import torch
from hypothesis import settings

from embershard.proto.routing import Placement
from embershard.proto.transport.local import SharedTransport
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.worker.client.client import Client
from embershard.worker.session.session import Session
from harness.served import ServedShard
from harness.wires import Wires

# An example that took long says how busy the machine is, not that a claim is false.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


@pytest.fixture
def gpu(request):
    """Where a test marked cuda computes; in a rehearsal it is the CPU, so that its own lines have run somewhere."""
    if request.config.getoption("--gpu-rehearsal"):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


def _seed():
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # torch.manual_seed formats the stack for each kind of device that is not there: a millisecond per test
        torch.default_generator.manual_seed(0)


def pytest_collectstart(collector):
    """Models that a file makes while it is imported have the same weights in every run."""
    _seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """A test and its fixtures draw the same numbers in every run, whichever tests came before."""
    _seed()


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def make_shards():
    """n fresh shards of one placement."""
    return lambda n, **settings: [Shard(i, Placement.even(n), OptimizerRegistry(), **settings) for i in range(n)]


@pytest.fixture
def make_session(make_shards):
    """A session with n fresh shards in this process, or with given ones; a shard serves one thread at a time."""
    moved = defaultdict(threading.Condition)

    def make(n=2, shards=None, worker=0):
        served = shards or make_shards(n)
        transports = [SharedTransport(s, f"local/{i}", moved[s]) for i, s in enumerate(served)]
        return Session(Client(transports, worker=worker))

    return make


@pytest.fixture
def make_wires(make_shards):
    """Wires to n fresh shards in this process, or to given ones; the members among their sessions leave at the end."""
    made = []

    def make(n=2, shards=None, now=None, **settings):
        made.append(Wires(shards or make_shards(n, **settings), now))
        return made[-1]

    yield make
    for wires in made:
        wires.close()


@pytest.fixture
def stream_shard():
    """The address of a shard in this process that serves the stream transport."""
    shard = ServedShard()
    yield shard.address
    shard.stop()
