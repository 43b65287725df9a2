"""A shard's process under peers that do what they should not: its memory stays bounded, and others are served."""

from __future__ import annotations

import json
import resource
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from zlib import crc32

import grpc
import numpy as np
import psutil
import pytest

from embershard.proto import wire
from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.messages import KIND_OF, SERVICE, Pull, Push, TableIds, arrays
from embershard.proto.protobuf import dumps, head_bytes
from embershard.proto.routing import make_route
from embershard.proto.spec import SGD, Constant, TableSpec
from embershard.proto.transport.stream import StreamTransport
from embershard.proto.wire import Feature
from embershard.worker.client.client import Client
from harness.eventually import eventually
from harness.processes import EMBERSHARD

pytestmark = pytest.mark.integration

MIB = 2**20
TABLE = TableSpec(name="wide", dim=1024, optimizer=SGD(lr=1.0), initializer=Constant(value=0.0))
PULL = Pull(1, (TableIds("wide", np.arange(8000, dtype=np.int64)),))  # 64 KiB that ask for 31 MiB


class Served:
    """A shard's process, and a client that others must not hold up."""

    def __init__(self) -> None:
        command = [*EMBERSHARD, "ps", "--shard", "0", "--of", "1", "--listen", "127.0.0.1:0"]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.popen.stdout is not None
        self.address: str = json.loads(self.popen.stdout.readline())["address"]
        self.process = psutil.Process(self.popen.pid)
        self.client = Client([StreamTransport(self.address)], timeout=timedelta(seconds=100))
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

    def peer(self, hello: bool = True, receive_bytes: int = 0) -> socket.socket:
        host, port = self.address.split(":")
        sock = socket.socket()
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(20)
        sock.connect((host, int(port)))
        if hello:
            sock.sendall(wire.client_hello(Feature(0)))
            sock.recv(16, socket.MSG_WAITALL)
        return sock

    def stop(self) -> None:
        self.client.close()
        self.popen.kill()
        self.popen.communicate(timeout=20)


@pytest.fixture
def served() -> Iterator[Served]:
    shard = Served()
    yield shard
    shard.stop()


@pytest.fixture
def peers() -> Iterator[list[socket.socket]]:
    found: list[socket.socket] = []
    yield found
    for sock in found:
        sock.close()


def begun(bulk_bytes: int) -> bytes:
    """The start of a push, and a little of what it announces."""
    lengths = struct.pack("<2I", 8, bulk_bytes - 8)
    start = struct.pack("<4sBBHIIIII", b"EMBF", wire.VERSION, KIND_OF[Push], 2, 1, 20_000, 0, bulk_bytes, 0)
    return start + crc32(lengths, crc32(start)).to_bytes(4, "little") + lengths + bytes(1000)


def framed(request: Pull, call: int) -> bytes:
    return b"".join(
        wire.encode(KIND_OF[Pull], call, 60_000, head_bytes(request), [a.data for a in arrays(request)], checksum=False)
    )


def test_thousands_of_frames_that_only_begin_take_little_memory(served: Served, peers: list[socket.socket]):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(served.popen.pid, resource.RLIMIT_NOFILE, (hard, hard))
    count = min(2000, soft - 200)
    for _ in range(count):
        peers.append(served.peer())
        peers[-1].sendall(begun(MAX_MESSAGE_BYTES))
    served.works()
    announced = count * MAX_MESSAGE_BYTES
    assert served.grown() < count * (wire.SCRATCH_BYTES + 16 * 2**10) + 64 * MIB < announced // 100


def test_peers_that_ask_and_do_not_read_have_no_rows_made(served: Served, peers: list[socket.socket]):
    """40 peers ask for 62 GiB."""
    for _ in range(40):
        peers.append(served.peer(receive_bytes=4096))
        with suppress(TimeoutError):
            peers[-1].settimeout(0.2)
            for call in range(50):
                peers[-1].sendall(framed(PULL, call))
    before = served.client.status()[0].requests
    served.works()
    assert served.client.status()[0].requests > before
    assert served.grown() < 1024 * MIB


def test_silent_and_talkative_strangers_hold_nobody_up(served: Served, peers: list[socket.socket]):
    rng = np.random.default_rng(0)
    for i in range(60):
        peers.append(served.peer(hello=i % 3 == 0))
        with suppress(ConnectionError):
            if i % 3:
                peers[-1].sendall([b"", b"E", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b"PRI * HTTP/2.0"][i % 5])
            else:
                peers[-1].sendall(rng.bytes(5000))
        if i % 10 == 0:
            peers[-1].shutdown(socket.SHUT_WR)
        served.works()
    assert served.grown() < 64 * MIB


def test_a_grpc_client_that_does_not_read_its_replies_takes_bounded_memory(served: Served):
    """Flow control reaches through to gRPC: its windows bound what waits for one connection."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    sock = served.peer(hello=False, receive_bytes=4096)
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


def test_a_grpc_client_that_leaves_mid_call_leaves_nothing_behind(served: Served):
    with grpc.insecure_channel(served.address) as channel:
        channel.unary_unary(f"/{SERVICE}/Hello")(b"", timeout=20)
    assert eventually(lambda: served.process.num_fds() > 0)
    before = served.process.num_fds()
    for _ in range(20):
        channel = grpc.insecure_channel(served.address, options=[("grpc.use_local_subchannel_pool", 1)])
        calls = [channel.unary_unary(f"/{SERVICE}/Pull").future(dumps(PULL), timeout=20) for _ in range(3)]
        time.sleep(0.01)
        channel.close()
        del calls
    served.works()
    assert eventually(lambda: served.process.num_fds() <= before)


def test_a_client_on_the_same_machine_comes_over_the_unix_socket(served: Served):
    """The shard's process has one more Unix connection per client, and no TCP connection."""

    def connections(kind: str) -> int:
        return sum(c.status in ("ESTABLISHED", "NONE") for c in served.process.net_connections(kind))

    tcp, unix = connections("tcp"), connections("unix")
    client = Client([StreamTransport(served.address)], worker=1)
    assert (connections("tcp"), connections("unix")) == (tcp, unix + 1)
    over_tcp = Client([StreamTransport(f"tcp://{served.address}")], worker=2)
    assert (connections("tcp"), connections("unix")) == (tcp + 1, unix + 1)
    client.close()
    over_tcp.close()


def test_clients_are_served_while_strangers_come_and_go(served: Served):
    stop = threading.Event()

    def strangers() -> None:
        rng = np.random.default_rng(1)
        while not stop.is_set():
            with suppress(OSError), served.peer() as sock:
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
