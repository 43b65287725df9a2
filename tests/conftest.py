"""What all tests need."""

import gc
import os
import signal
import threading
from collections import defaultdict

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as make does; before torch is imported

import pytest
import torch
from hypothesis import settings

from embershard.proto.routing import Placement
from embershard.proto.transport.local import SharedTransport
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.worker.client.client import Client
from embershard.worker.session.session import Session
from harness import warm_start
from harness.served import ServedShard
from harness.wires import Wires

# A shell that runs the tests in the background has them, and every process they start, ignore Ctrl-C; nohup has them
# ignore a hangup.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# An example that took long says how busy the machine is, not that a claim is false.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

warm_start.install()
gc.disable()  # until the tests are collected: what is imported stays


def pytest_runtest_setup(item):
    """A test about starting starts interpreters; for others, the fixtures of modules included, processes start warm."""
    warm_start.WarmPopen.cold = item.get_closest_marker("cold_start") is not None


# files of ten seconds and more begin first: at the end, one core would work alone
LONGEST = {
    *("test_kill", "test_train_command", "test_strategies", "test_recover", "test_resume", "test_scaling"),
    *("test_elastic", "test_slurm", "test_supervisor", "test_dash", "test_rpc_transport"),
    *("test_export", "test_simulation", "test_elastic_training", "test_kinds_of_models", "test_app", "test_checkpoint"),
    *("test_prefetch", "test_top", "test_stream", "test_compare_report", "test_trainer", "test_serving"),
}


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem not in LONGEST)


def pytest_collection_finish():
    """Garbage is searched for in what tests make, and not in the modules: a search of them takes half a second."""
    gc.freeze()
    gc.set_threshold(5000)  # a search of all that tests have left takes a tenth of a second
    gc.enable()


def pytest_sessionfinish():
    """Nothing outlives the tests, however they end."""
    warm_start.kill_all()


def pytest_addoption(parser):
    parser.addoption("--gpu-rehearsal", action="store_true", help="run the tests marked cuda on the CPU")


@pytest.fixture
def gpu(request):
    """Where a test marked cuda computes; in a rehearsal it is the CPU, so that its own lines have run somewhere."""
    if request.config.getoption("--gpu-rehearsal"):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # torch.manual_seed formats the stack for each kind of device that is not there: a millisecond per test
        torch.default_generator.manual_seed(0)


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
