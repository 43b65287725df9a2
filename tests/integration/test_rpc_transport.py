"""What is special about the transport over torch.distributed.rpc; what it shares with the others is in the contract."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, cast

import pytest
import torch

import embershard as es
from embershard.proto.errors import BadAddress, CannotListen, NotAShard
from embershard.proto.messages import Hello
from embershard.proto.transport.torch_rpc import RpcTransport, _outcome
from embershard.proto.transport.transport import Unreachable
from embershard.ps.dispatch import Dispatch
from embershard.ps.transport.torch_rpc import RpcServer

pytestmark = pytest.mark.integration

SECONDS = timedelta(seconds=60)
ELSEWHERE = "198.51.100.1"  # an address that is nobody's (RFC 5737)


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    popen = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    try:
        yield popen
    finally:
        popen.kill()
        popen.communicate(timeout=60)


@pytest.fixture(scope="module")
def addresses():
    """Two shards over rpc."""
    with ExitStack() as stack:
        shards = []
        for shard in ("0", "1"):
            arguments = ("--shard", shard, "--of", "2", "--listen", "127.0.0.1:0", "--rpc", "localhost:0")
            shards.append(stack.enter_context(process("-m", "embershard.cli", "ps", *arguments)))
        ready = [json.loads(cast(Any, shard.stdout).readline()) for shard in shards]
        yield ",".join(f"rpc://{shard['rpc']}" for shard in ready)


def start(host: str, *, executes_pickles: bool = False) -> RpcServer:
    nothing = cast(Dispatch, None)
    return asyncio.run(RpcServer.start(nothing, host, 0, executes_pickles=executes_pickles))


def test_a_shard_does_not_leave_loopback_unless_told():
    with pytest.raises(CannotListen, match="--rpc-executes-pickles"):
        start(ELSEWHERE)


def test_a_shard_says_which_address_it_can_take():
    with pytest.raises(CannotListen, match="name the IPv4 address"):
        start(ELSEWHERE, executes_pickles=True)


def test_a_worker_does_not_leave_loopback_unless_told():
    transport = RpcTransport(f"rpc://{ELSEWHERE}:7800")
    with pytest.raises(BadAddress, match=f"rpc-executes-pickles://{ELSEWHERE}:7800"):
        transport.submit(Hello(), SECONDS).result()


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ("RPCErr:1:RPC ran for more than set timeout (300 ms) and will now be marked with an error", Unreachable),
        ("ECONNREFUSED: connection refused (this error originated at uv/connection_impl.cc:62)", Unreachable),
        ("On WorkerInfo(id=0, name=x):\nRuntimeError('no shard is served by this process')", NotAShard),
    ],
)
def test_what_torch_says_has_a_meaning(said, means):
    failed: torch.futures.Future[Any] = torch.futures.Future()
    failed.set_exception(RuntimeError(said))
    outcome = _outcome(failed, "rpc://here")
    assert isinstance(outcome, means)
    assert "originated" not in str(outcome)


PUSHING = """
import sys, torch, embershard as es
from embershard.proto.spec import TableSpec, SGD
session = es.connect(sys.argv[1], worker=7)
table = session.table(TableSpec(name="killed", dim=4, optimizer=SGD(lr=1.0)))
print("ready", flush=True)
while True:
    table.pull(torch.arange(1000))
"""


def test_a_worker_that_is_killed_holds_up_nobody(addresses):
    with process("-c", PUSHING, addresses) as worker:
        assert cast(Any, worker.stdout).readline() == "ready\n"
    with es.connect(addresses, timeout=SECONDS) as session, process("-c", PUSHING, addresses) as late:
        assert len(session.client.status()) == 2
        assert cast(Any, late.stdout).readline() == "ready\n"


OWN_GROUP = """
import sys, torch, torch.distributed.rpc as rpc, embershard as es
from embershard.proto.spec import TableSpec, SGD, Constant
rpc.init_rpc("mine", rank=0, world_size=1, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
    init_method="file://" + sys.argv[2]))
with es.connect(sys.argv[1], worker=8) as session:
    table = session.table(TableSpec(name="own", dim=4, optimizer=SGD(lr=1.0), initializer=Constant(value=2.0)))
    print(table.pull(torch.arange(6)).sum().item(), rpc.rpc_sync("mine", torch.add, (1, 1)))
rpc.shutdown()
"""


def test_the_address_that_says_what_it_means_is_taken(addresses):
    with es.connect(addresses.replace("rpc://", "rpc-executes-pickles://"), timeout=SECONDS) as session:
        assert [status.shard for status in session.client.status()] == [0, 1]


def test_a_user_with_an_rpc_group_of_their_own_keeps_it(addresses, tmp_path):
    with process("-c", OWN_GROUP, addresses, str(tmp_path / "store")) as worker:
        out, err = worker.communicate(timeout=250)
    assert (worker.returncode, out) == (0, "48.0 2\n"), err


def test_a_host_that_cannot_be_is_said_at_every_call():
    transport = RpcTransport("rpc-executes-pickles://a..b:7800")
    for _ in range(2):
        with pytest.raises(Unreachable, match="label"):
            transport.submit(Hello(), SECONDS).result()
    transport.close()
