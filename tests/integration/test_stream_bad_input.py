"""A shard's process under peers that do what they should not: its memory stays bounded, and others are served."""

import resource
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import grpc
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
from harness.eventually import eventually
from harness.hostile_peers import NONE, Peer, begun, connected, framed
from harness.served import ShardProcess, shard_process

pytestmark = pytest.mark.integration

MIB = 2**20
TABLE = TableSpec(name="wide", dim=1024, optimizer=SGD(lr=1.0), initializer=Constant(value=0.0))
PULL = Pull(1, (TableIds("wide", np.arange(8000, dtype=np.int64)),))  # 64 KiB that ask for 31 MiB


STRANGERS = [b"", b"E", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b"PRI * HTTP/2.0"]
Connect = Callable[..., Peer]


class Served:
    """A shard's process, and a client that others must not hold up."""

    def __init__(self, shard: ShardProcess) -> None:
        self.shard = shard
        self.process = psutil.Process(shard.popen.pid)
        self.client = Client([StreamTransport(shard.address)], timeout=timedelta(seconds=100))
        self.client.declare(TABLE)
        self.route = make_route(np.arange(10), TABLE.space_key, self.client.placement)
        self.pushed = 0
        self.works()
        self.memory = self.resident()

    def resident(self) -> int:
        return int(self.process.memory_info().rss)

    def works(self) -> None:
        """Others are served."""
        gradients = np.ones((10, 1024), np.float32)
        self.client.push([("wide", self.route, gradients)], clock=self.pushed)
        self.pushed += 1
        (rows,) = self.client.pull([("wide", self.route)])
        assert (rows == -self.pushed).all()

    def grown(self) -> int:
        """Bytes of memory beyond those of the beginning."""
        return self.resident() - self.memory


@pytest.fixture
def served():
    with shard_process() as process:
        shard = Served(process)
        yield shard
        shard.client.close()


@pytest.fixture
def connect(served):
    peers: list[Peer] = []

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


def test_silent_and_talkative_strangers_hold_nobody_up(served, connect):
    rng = np.random.default_rng(0)
    for i in range(60):
        peer = connect(None if i % 3 else NONE)
        with suppress(ConnectionError):
            peer.send(STRANGERS[i % 5] if i % 3 else rng.bytes(5000))
        if i % 10 == 0:
            peer.sock.shutdown(socket.SHUT_WR)
        served.works()
    assert served.grown() < 64 * MIB


def test_a_grpc_client_that_does_not_read_its_replies_takes_bounded_memory(served):
    """Flow control reaches through to gRPC: its windows bound what waits for one connection."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    sock = connected(served.shard.address, receive_bytes=4096)
    sock.sendall(preface)
    path = f"/{SERVICE}/Pull".encode()
    fields = [
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x"),
        (b"te", b"trailers"), (b"content-type", b"application/grpc"),
    ]  # fmt: skip
    block = b"".join(bytes([0, len(k)]) + k + bytes([len(v)]) + v for k, v in fields)
    message = dumps(Pull(1, (TableIds("wide", np.arange(1000, dtype=np.int64)),)))
    body = b"\0" + struct.pack(">I", len(message)) + message
    for stream in range(1, 200, 2):
        start = struct.pack(">I", len(block))[1:] + bytes([1, 4]) + struct.pack(">I", stream)
        data = struct.pack(">I", len(body))[1:] + bytes([0, 1]) + struct.pack(">I", stream)
        try:
            sock.sendall(start + block + data + body)
        except OSError:
            break
        if stream % 20 == 1:
            served.works()
    # 100 replies of 4 MiB, which gRPC itself keeps for its streams, some of them twice: as protobuf and as bytes
    assert served.grown() < 1024 * MIB
    sock.close()
    served.works()


def test_a_grpc_client_that_leaves_mid_call_leaves_nothing_behind(served):
    with grpc.insecure_channel(served.shard.address) as channel:
        channel.unary_unary(f"/{SERVICE}/Hello")(b"", timeout=20)
    assert eventually(lambda: served.process.num_fds() > 0)
    before = served.process.num_fds()
    for _ in range(20):
        channel = grpc.insecure_channel(served.shard.address, options=[("grpc.use_local_subchannel_pool", 1)])
        calls = [channel.unary_unary(f"/{SERVICE}/Pull").future(dumps(PULL), timeout=20) for _ in range(3)]
        time.sleep(0.01)
        channel.close()
        del calls
    served.works()
    assert eventually(lambda: served.process.num_fds() <= before)


def test_a_client_on_the_same_machine_comes_over_the_unix_socket(served):
    """The shard's process has one more Unix connection per client, and no TCP connection."""

    def connections(kind):
        return sum(c.status in ("ESTABLISHED", "NONE") for c in served.process.net_connections(kind))

    tcp, unix = connections("tcp"), connections("unix")
    client = Client([StreamTransport(served.shard.address)], worker=1)
    assert (connections("tcp"), connections("unix")) == (tcp, unix + 1)
    over_tcp = Client([StreamTransport(f"tcp://{served.shard.address}")], worker=2)
    assert (connections("tcp"), connections("unix")) == (tcp + 1, unix + 1)
    client.close()
    over_tcp.close()


def test_clients_are_served_while_strangers_come_and_go(served):
    stop = threading.Event()

    def strangers():
        rng = np.random.default_rng(1)
        while not stop.is_set():
            with suppress(OSError), Peer(served.shard.address).sock as sock:
                whole = bytearray(framed(PULL, 1))
                whole[rng.integers(len(whole))] ^= 255
                sock.sendall(whole[: rng.integers(len(whole))])

    thread = threading.Thread(target=strangers)
    thread.start()
    try:
        for _ in range(200):
            served.works()
    finally:
        stop.set()
        thread.join(20)
    assert served.grown() < 128 * MIB
