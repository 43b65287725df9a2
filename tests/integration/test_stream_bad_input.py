"""A shard's process under peers that do what they should not: its memory stays bounded, and others are served."""

import resource
import socket
import struct
from contextlib import closing, suppress
from datetime import timedelta

import numpy as np
import psutil
import pytest

from embershard.proto import wire
from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.messages import SERVICE, Pull, TableIds
from embershard.proto.protobuf import dumps
from embershard.proto.routing import make_route
from embershard.proto.spec import SGD, Constant, TableSpec
from embershard.proto.transport.stream import StreamTransport
from embershard.worker.client.client import Client
from harness.hostile_peers import NONE, Peer, begun, connected, framed, pull
from harness.served import shard_process

pytestmark = pytest.mark.integration

MIB = 2**20
TABLE = TableSpec(name="wide", dim=1024, optimizer=SGD(lr=1.0), initializer=Constant(value=0.0))
PULL = pull(8000, "wide")  # 64 KiB that ask for 31 MiB
STRANGERS = [b"", b"E", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b"PRI * HTTP/2.0"]


class Served:
    """A shard's process, and a client that others must not hold up."""

    def __init__(self, shard):
        self.shard = shard
        self.process = psutil.Process(shard.popen.pid)
        self.client = Client([StreamTransport(shard.address)], timeout=timedelta(seconds=100))
        self.client.declare(TABLE)
        self.route = make_route(np.arange(10), TABLE.space_key, self.client.placement)
        self.pushed = 0
        self.works()
        self.memory = self.process.memory_info().rss

    def works(self):
        """Others are served."""
        self.client.push([("wide", self.route, np.ones((10, 1024), np.float32))], clock=self.pushed)
        self.pushed += 1
        (rows,) = self.client.pull([("wide", self.route)])
        assert (rows == -self.pushed).all()

    def grown(self):
        """Bytes of memory beyond those of the beginning."""
        return self.process.memory_info().rss - self.memory


@pytest.fixture
def served():
    with shard_process() as process:
        shard = Served(process)
        with closing(shard.client):
            yield shard


@pytest.fixture
def connect(served):
    peers = []

    def peer(features=NONE, receive_bytes=0):
        peers.append(Peer(served.shard.address, features, receive_bytes))
        return peers[-1]

    yield peer
    for one in peers:
        one.sock.close()


def test_thousands_of_frames_that_only_begin_take_little_memory(served, connect):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(served.shard.popen.pid, resource.RLIMIT_NOFILE, (hard, hard))
    count = min(2000, soft - 200)
    for _ in range(count):
        connect().send(begun(MAX_MESSAGE_BYTES) + bytes(1000))
    served.works()
    announced = count * MAX_MESSAGE_BYTES
    assert served.grown() < count * (wire.SCRATCH_BYTES + 16 * 2**10) + 64 * MIB < announced // 100


def test_peers_that_ask_and_do_not_read_have_no_rows_made(served, connect):
    """40 peers ask for 62 GiB."""
    for _ in range(40):
        peer = connect(receive_bytes=4096)
        peer.sock.settimeout(0.05)
        peer.ask_all([PULL] * 50)
    before = served.client.status()[0].requests
    served.works()
    assert served.client.status()[0].requests > before
    assert served.grown() < 1024 * MIB


def test_strangers_of_any_kind_hold_nobody_up(served, connect):
    rng = np.random.default_rng(0)
    for i in range(80):
        peer = connect(NONE if i % 4 < 2 else None)
        damaged = bytearray(framed(PULL, 1))
        damaged[rng.integers(len(damaged))] ^= 255
        with suppress(ConnectionError):
            peer.send([damaged[: rng.integers(len(damaged))], rng.bytes(5000), *2 * [STRANGERS[i % 5]]][i % 4])
        if i % 10 == 0:
            peer.sock.shutdown(socket.SHUT_WR)
        served.works()
    assert served.grown() < 128 * MIB


def test_a_grpc_client_that_does_not_read_its_replies_takes_bounded_memory(served):
    """Flow control reaches through to gRPC: its windows bound what waits for one connection."""
    fields = {
        ":method": "POST", ":scheme": "http", ":path": f"/{SERVICE}/Pull", ":authority": "x",
        "te": "trailers", "content-type": "application/grpc",
    }  # fmt: skip
    block = b"".join(bytes([0, len(k)]) + k.encode() + bytes([len(v)]) + v.encode() for k, v in fields.items())
    message = dumps(Pull(1, (TableIds("wide", np.arange(1000, dtype=np.int64)),)))
    body = b"\0" + struct.pack(">I", len(message)) + message

    def frame(content, kind, stream):
        return struct.pack(">I", len(content))[1:] + kind + struct.pack(">I", stream) + content

    with connected(served.shard.address, receive_bytes=4096) as sock:
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(b"", b"\x04\x00", 0))
        for stream in range(1, 200, 2):
            with suppress(OSError):
                sock.sendall(frame(block, b"\x01\x04", stream) + frame(body, b"\x00\x01", stream))
            if stream % 20 == 1:
                served.works()
        # 100 replies of 4 MiB, which gRPC itself keeps for its streams, some of them twice: as protobuf and as bytes
        assert served.grown() < 1024 * MIB
    served.works()
