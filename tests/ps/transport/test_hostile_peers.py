"""What a shard answers to peers that do what no client of ours does: a typed error, or the end of the connection.

The shard is in this process, and in one of its own."""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest

from embershard.proto import spec, wire
from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.errors import (
    BadFrame,
    InvalidRequest,
    MessageTooLarge,
    ShardBusy,
    TableMismatch,
    UnknownTable,
    WrongDim,
    WrongPlacement,
    from_wire,
)
from embershard.proto.messages import (
    ERROR_KIND,
    KIND_OF,
    Declare,
    Declared,
    Greeting,
    Hello,
    Load,
    Pull,
    Push,
    Pushed,
    Rows,
    TableGradients,
    TableIds,
)
from embershard.proto.protobuf import head_bytes
from embershard.proto.wire import Feature
from harness.hostile_peers import NONE, Peer, connected, framed, pull, push, with_field
from harness.raises import raises
from harness.served import ServedShard, shard_process

IDS = np.arange(3, dtype=np.int64)
Connect = Callable[..., Peer]
_numbers = count(1)


def table(name: str, dim: int = 4) -> spec.TableSpec:
    return spec.TableSpec(name=name, dim=dim, optimizer=spec.SGD(lr=1.0), initializer=spec.Constant(value=0.0))


@pytest.fixture(scope="module", params=["in this process", pytest.param("in its own", marks=pytest.mark.integration)])
def address(request):
    """Where a shard listens that knows two tables."""
    if request.param == "in this process":
        shard = ServedShard()
        declare(shard.address)
        yield shard.address
        shard.stop()
    else:
        with shard_process() as process:
            declare(process.address)
            yield process.address


def declare(address: str) -> None:
    peer = Peer(address)
    for made in (table("items"), table("wide", 1024)):
        assert peer.ask(Declare(made)) == Declared(created=True, loading=False)
    peer.sock.close()


@pytest.fixture
def connect(address):
    peers: list[Peer] = []

    def peer(features=NONE, receive_bytes=0):
        peers.append(Peer(address, features, receive_bytes))
        return peers[-1]

    yield peer
    for one in peers:
        one.sock.close()


@pytest.fixture
def first_push(connect):
    """The first push of its worker, into a table of its own."""
    made, number = table(f"t{next(_numbers)}"), next(_numbers)
    assert connect().ask(Declare(made)) == Declared(created=True, loading=False)
    return push(table=made.name, worker=number)


def rows_of(peer: Peer, of: Push) -> list[float]:
    reply = peer.ask(pull(table=of.tables[0].table))
    assert isinstance(reply, Rows)
    return reply.tables[0].ravel().tolist()


@pytest.mark.parametrize(
    ("frame", "what"),
    [
        (with_field(framed(push()), 0, b"EMBG"), "the magic of a frame"),
        (with_field(framed(push()), 4, b"\x01"), "the version of a frame"),
        (with_field(framed(push()), 6, b"\x01\x10"), "the number of buffers"),
        (with_field(framed(push()), 16, struct.pack("<I", 2**20 + 1)), "the size of the head"),
        (with_field(framed(push()), 20, struct.pack("<I", MAX_MESSAGE_BYTES + 1)), "the size of the buffers"),
        (with_field(framed(push()), 20, struct.pack("<I", 71)), "the sum of the buffers' lengths"),
        (with_field(framed(push()), 24, b"\x01"), "the checksum of buffers that have none"),
        (with_field(framed(push()), 28, bytes(4)), "the checksum of a frame's start"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "the magic of a frame"),
    ],
    ids=["magic", "version", "buffers", "head", "limit", "lengths", "bulk checksum", "start checksum", "other text"],
)
def test_a_wrong_frame_is_named_under_call_0_and_ends_the_connection(connect, frame, what):
    peer, other = connect(), connect()
    peer.send(frame)
    answer = peer.receive()
    assert answer is not None
    assert (answer.header.kind, answer.header.call) == (ERROR_KIND, 0)
    error = from_wire(answer.header.head, "")
    assert isinstance(error, BadFrame)
    assert error.fields["what"] == what
    assert peer.was_dropped()
    assert isinstance(other.ask(pull()), Rows)


@pytest.mark.parametrize(
    ("request_", "error", "fields"),
    [
        (pull(table="nowhere"), UnknownTable, {"table": "nowhere", "known": re.compile("items")}),
        (push(table="nowhere"), UnknownTable, {"table": "nowhere"}),
        (pull(table="x" * (2**20 - 100)), UnknownTable, {}),
        (push(dim=3), WrongDim, {"got": 9, "ids": 3, "dim": 4, "want": 12}),
        (Load("items", 1, IDS, np.ones((3, 5), np.float32)), WrongDim, {"got": 15, "want": 12}),
        (Declare(table("items", 5)), TableMismatch, {"difference": "dim: 4, not 5"}),
        (Pull(9, (TableIds("items", IDS),)), WrongPlacement, {"got": 9, "want": 1}),
        (
            Push(push().token, 0, 7, (TableGradients("items", IDS, np.ones((3, 4), np.float32)),)),
            WrongPlacement,
            {"got": 7, "want": 1},
        ),
        (push(seq=0), InvalidRequest, {"reason": re.compile("pushes count from 1")}),
        (pull(num_rows=20_000, table="wide"), MessageTooLarge, {}),
    ],
    ids=[
        "table",
        "table of a push",
        "table of 1 MiB",
        "dim",
        "dim of a load",
        "declaration",
        "epoch",
        "epoch of a push",
        "token",
        "reply over the limit",
    ],
)
def test_a_refused_request_changes_nothing_and_the_next_is_served(connect, request_, error, fields):
    peer = connect()
    with raises(error, **fields):
        peer.ask(request_)
    rows = peer.ask(pull())
    assert isinstance(rows, Rows)
    assert not rows.tables[0].any()


@pytest.mark.parametrize(
    "frame",
    [
        wire.encode(77, 7, 60_000, b"", [], checksum=False),
        wire.encode(77, 7, 60_000, b"", [bytes(100)], checksum=False),
        wire.encode(KIND_OF[Rows], 7, 60_000, b"", [bytes(100)], checksum=False),
        wire.encode(KIND_OF[Pull], 7, 60_000, b"\xff\xff\xff", [bytes(8)], checksum=False),
        wire.encode(KIND_OF[Pull], 7, 60_000, head_bytes(pull()), [], checksum=False),
        wire.encode(KIND_OF[Pull], 7, 60_000, head_bytes(pull()), [bytes(8), bytes(8)], checksum=False),
        wire.encode(KIND_OF[Pull], 7, 60_000, head_bytes(pull()), [bytes(7)], checksum=False),
        wire.encode(KIND_OF[Push], 7, 60_000, head_bytes(push()), [bytes(8)], checksum=False),
    ],
    ids=["kind", "kind with arrays", "reply", "head", "too few arrays", "too many", "half an id", "no gradients"],
)
def test_a_frame_that_is_no_request_is_answered_by_an_error_of_its_call(connect, frame):
    peer = connect()
    peer.send(b"".join(frame))
    answer = peer.receive()
    assert answer is not None
    assert (answer.header.kind, answer.header.call) == (ERROR_KIND, 7)
    assert isinstance(from_wire(answer.header.head, ""), InvalidRequest)
    assert isinstance(peer.ask(Hello()), Greeting)


def test_a_frame_cut_anywhere_changes_nothing(connect, first_push):
    whole = framed(first_push)
    for cut in (1, 15, 31, 32, 40, 60, len(whole) - 1):
        peer = connect()
        peer.send(whole[:cut])
        peer.sock.close()
    assert not any(rows_of(connect(), first_push))


def test_a_frame_in_single_bytes_is_understood(connect, first_push):
    peer = connect()
    for byte in framed(first_push):
        peer.send(bytes([byte]))
    assert peer.reply() == Pushed(duplicate=False, applied=3, skipped=0)


def test_gradients_that_are_not_finite_are_counted_and_the_rest_is_applied(connect, first_push):
    gradients = first_push.tables[0].gradients.reshape(3, 4)
    gradients[0, 1], gradients[2, 2] = np.nan, -np.inf
    peer = connect()
    assert peer.ask(first_push) == Pushed(duplicate=False, applied=1, skipped=2)
    assert rows_of(peer, first_push) == [0.0] * 4 + [-1.0] * 4 + [0.0] * 4


def test_a_peer_that_speaks_no_common_version_is_told_which_ones_there_are(address):
    with connected(address) as sock:
        sock.sendall(struct.pack("<8sHHI", wire.MAGIC, 7, 9, 0))
        answer = struct.unpack("<8sHHI", sock.recv(16, socket.MSG_WAITALL))
        assert answer == (wire.MAGIC, wire.OLDEST_VERSION, wire.VERSION, 0)
        assert sock.recv(1) == b""


def test_a_peer_that_reads_late_gets_every_answer(connect):
    late = connect(receive_bytes=4096)
    asking = threading.Thread(target=late.ask_all, args=([pull(2000, "wide")] * 12,))  # of 8 MiB each
    asking.start()
    time.sleep(0.3)
    calls = set()
    while len(calls) < 12:
        frame = late.receive()
        assert frame is not None
        calls.add(frame.header.call)
        if frame.header.kind == ERROR_KIND:
            assert isinstance(from_wire(frame.header.head, ""), ShardBusy)
    asking.join(20)


def test_a_flipped_byte_of_the_arrays_is_noticed_with_checksum(connect, first_push):
    peer = connect(Feature.CHECKSUM)
    data = bytearray(framed(first_push, checksum=True))
    peer.send(data)
    assert peer.reply() == Pushed(duplicate=False, applied=3, skipped=0)
    data[-1] ^= 1
    peer.send(data)
    with pytest.raises(BadFrame, match="checksum of the buffers"):
        peer.reply()
    assert peer.was_dropped()


def test_replies_have_a_checksum_where_it_was_agreed_on(connect, first_push):
    peer = connect(Feature.CHECKSUM)
    peer.send(framed(first_push, checksum=True))
    peer.reply()
    peer.send(framed(pull(table=first_push.tables[0].table), checksum=True))
    frame = peer.receive()  # its reader checks it
    assert frame is not None
    assert bytes(frame.buffers[0]) == np.full(12, -1, np.float32).tobytes()
