"""Shards in this process that serve the stream transport, and raw connections to them."""

import pytest

from embershard.proto.messages import Declare, Declared
from harness.hostile_peers import NONE, Peer
from harness.served import ServedShard
from harness.shards import table


@pytest.fixture
def serve():
    servers = []

    def start(foreign=""):
        servers.append(ServedShard(foreign))
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
