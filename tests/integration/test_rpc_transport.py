"""What is special about the transport over torch.distributed.rpc; what it shares with the others is in the contract."""

import asyncio
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from urllib.parse import urlsplit

import pytest
import torch

import embershard as es
from embershard.proto.errors import BadAddress, CannotListen, NotAShard
from embershard.proto.messages import Hello
from embershard.proto.timing import Deadline
from embershard.proto.torch_rpc import QUESTION
from embershard.proto.transport.torch_rpc import RpcTransport, _outcome
from embershard.proto.transport.transport import Unreachable
from embershard.ps.transport.torch_rpc import RpcServer
from harness.served import shard_process

pytestmark = pytest.mark.integration

SECONDS = timedelta(seconds=60)
ELSEWHERE = "198.51.100.1"  # an address that is nobody's (RFC 5737)


@contextmanager
def program(code, *words):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, *words], **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def addresses():
    """Two shards over rpc."""
    with ExitStack() as stack:
        options = ("--rpc", "localhost:0", "--insecure-loopback")
        shards = [stack.enter_context(shard_process(*options, shard=shard, of=2)) for shard in range(2)]
        yield ",".join(f"rpc://{shard.ready['rpc']}" for shard in shards)


@pytest.mark.parametrize(("told", "remedy"), [(False, "--rpc-executes-pickles"), (True, "name the IPv4 address")])
def test_a_shard_does_not_leave_loopback_unless_told_and_says_which_address_it_can_take(told, remedy):
    with pytest.raises(CannotListen, match=remedy):
        asyncio.run(RpcServer.start(None, ELSEWHERE, 0, executes_pickles=told))


def test_a_worker_does_not_leave_loopback_unless_told():
    with pytest.raises(BadAddress, match=f"rpc-executes-pickles://{ELSEWHERE}:7800"):
        RpcTransport(f"rpc://{ELSEWHERE}:7800").submit(Hello(), SECONDS).result()


def test_a_host_that_cannot_be_is_said_at_every_call():
    transport = RpcTransport("rpc-executes-pickles://a..b:7800")
    for _ in range(2):
        with pytest.raises(Unreachable, match="label"):
            transport.submit(Hello(), SECONDS).result()
    transport.close()


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ("RPCErr:1:RPC ran for more than set timeout (300 ms) and will now be marked with an error", Unreachable),
        ("ECONNREFUSED: connection refused (this error originated at uv/connection_impl.cc:62)", Unreachable),
        ("On WorkerInfo(id=0, name=x):\nRuntimeError('no shard is served by this process')", NotAShard),
    ],
)
def test_what_torch_says_has_a_meaning(said, means):
    failed = torch.futures.Future()
    failed.set_exception(RuntimeError(said))
    outcome = _outcome(failed, "rpc://here")
    assert isinstance(outcome, means)
    assert "originated" not in str(outcome)


PULLING = """
import sys, torch, embershard as es
table = es.connect(sys.argv[1], worker=7).table(es.TableSpec(name="killed", dim=4, optimizer=es.SGD(lr=1.0)))
print("ready", flush=True)
while True:
    table.pull(torch.arange(1000))
"""


def test_a_worker_that_is_killed_holds_up_nobody(addresses):
    with program(PULLING, addresses) as worker:
        assert worker.stdout.readline() == "ready\n"
    told = addresses.replace("rpc://", "rpc-executes-pickles://")  # which is taken on loopback, too
    with es.connect(told, timeout=SECONDS) as session, program(PULLING, addresses) as late:
        assert [status.shard for status in session.client.status()] == [0, 1]
        assert late.stdout.readline() == "ready\n"


def _agent_of(address):
    """Where the agent of the shard at this address listens."""
    host, _, port = address.removeprefix("rpc://").rpartition(":")
    with socket.create_connection((host, int(port))) as asking:
        asking.sendall(QUESTION)
        url = asking.makefile().readline().split()[-1]
    return urlsplit(url).hostname, urlsplit(url).port


def test_a_connection_that_ends_before_it_says_anything_shuts_nobody_out(addresses):
    with es.connect(addresses, worker=9) as session:
        bag = torch.nn.EmbeddingBag(100, 4, mode="sum", _weight=torch.zeros(100, 4))
        model = es.wrap(bag, session, optimizer=es.SGD(lr=1.0), prefix="stray")
        for number in range(1, 3):  # the agent is started again each time
            agent = _agent_of(addresses.split(",")[0])
            socket.create_connection(agent).close()
            deadline = Deadline(SECONDS)
            while deadline.seconds > 0 and _takes_connections(agent):
                time.sleep(0.01)
            with program(PULLING, addresses) as late:
                assert late.stdout.readline() == "ready\n"
            model(torch.arange(100)[:, None]).sum().backward()
            session.step()
            assert model.state_dict()["weight"].unique().tolist() == [-number]  # each push was applied once


def _takes_connections(place):
    try:
        socket.create_connection(place).close()
    except OSError:
        return False
    return True


OWN_GROUP = """
import sys, torch, torch.distributed.rpc as rpc, embershard as es
rpc.init_rpc("mine", rank=0, world_size=1, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
    init_method="file://" + sys.argv[2]))
with es.connect(sys.argv[1], worker=8) as session:
    spec = es.TableSpec(name="own", dim=4, optimizer=es.SGD(lr=1.0), initializer=es.Constant(value=2.0))
    print(session.table(spec).pull(torch.arange(6)).sum().item(), rpc.rpc_sync("mine", torch.add, (1, 1)))
rpc.shutdown()
"""


def test_a_user_with_an_rpc_group_of_their_own_keeps_it(addresses, tmp_path):
    with program(OWN_GROUP, addresses, str(tmp_path / "store")) as worker:
        out, err = worker.communicate(timeout=250)
    assert (worker.returncode, out) == (0, "48.0 2\n"), err
