"""Shards in this process that serve the stream transport, or gRPC, and raw connections to them."""

import asyncio
import threading

import pytest
from grpc_health.v1 import health, health_pb2

from embershard.proto.messages import Declare, Declared
from embershard.ps.apply_thread import ApplyThread
from embershard.ps.dispatch import Dispatch
from embershard.ps.transport.grpc import ShardService, make_server
from harness.hostile_peers import NONE, Peer
from harness.served import ServedShard
from harness.shards import make_shard, table


@pytest.fixture
def serve():
    servers = []

    def start(foreign="", access=None, shard=None):
        servers.append(ServedShard(foreign, shard, access))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def served(serve):
    return serve()


@pytest.fixture
def connect(served):
    """Peers of the shard, which knows two tables."""
    peers = []

    def peer(features=NONE, receive_bytes=0):
        peers.append(Peer(served.address, features, receive_bytes))
        return peers[-1]

    first = peer()
    for made in (table("items", 4), table("wide", 1024)):
        assert first.ask(Declare(made)) == Declared(created=True, loading=False)
    yield peer
    for one in peers:
        one.sock.close()


class GrpcShard:
    """A shard with one table that serves gRPC on a loop and a thread of its own."""

    def __init__(self, address, access=None):
        self.access = access
        self.shard, self.apply = make_shard(table(dim=2), version="1.2.3"), ApplyThread()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = self._run(self._start(address))

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _start(self, address):
        healthy = health.aio.HealthServicer()
        await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
        server = make_server(ShardService(Dispatch(self.shard, self.apply, access=self.access)), healthy)
        self.address = f"127.0.0.1:{server.add_insecure_port(address)}"
        await server.start()
        return server

    @property
    def is_running(self):
        return not self._loop.is_closed()

    def stop(self):
        self.apply.close()
        self._run(self._server.stop(0))
        assert self.apply.join(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()


@pytest.fixture
def serve_grpc():
    servers = []

    def start(address="127.0.0.1:0", access=None):
        servers.append(GrpcShard(address, access))
        return servers[-1]

    yield start
    for server in servers:
        if server.is_running:
            server.stop()
