"""The shard's side of the stream transport, with peers that do what they should not: raw sockets against a shard in
this
process. Each gets a typed error or is dropped by its deadline, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar
from zlib import crc32

import grpc
import numpy as np
import pytest
import uvloop
from grpc_health.v1 import health

from embershard.proto import embershard_pb2 as pb
from embershard.proto import spec, wire
from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.errors import (
    BadFrame,
    ClockAhead,
    EmbershardError,
    InvalidRequest,
    MessageTooLarge,
    ShardBusy,
    UnknownTable,
    WrongDim,
    WrongPlacement,
    from_wire,
)
from embershard.proto.messages import (
    ERROR_KIND,
    KIND_OF,
    REPLY_KINDS,
    SERVICE,
    Declare,
    Declared,
    Greeting,
    Hello,
    Join,
    Joined,
    Load,
    Pull,
    Push,
    Pushed,
    PushToken,
    Rendezvous,
    Reply,
    Request,
    Rows,
    TableGradients,
    TableIds,
    arrays,
)
from embershard.proto.protobuf import head_bytes, read
from embershard.proto.routing import Placement
from embershard.proto.wire import Feature, Frame, FrameReader
from embershard.ps.apply_thread import ApplyThread
from embershard.ps.dispatch import Dispatch
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.transport import grpc as transport_grpc
from embershard.ps.transport import stream
from embershard.ps.transport.grpc import ShardService, make_server
from embershard.ps.transport.stream import StreamServer

TABLE = spec.TableSpec(name="items", dim=4, optimizer=spec.SGD(lr=1.0), initializer=spec.Constant(value=0.0))
WIDE = spec.TableSpec(name="wide", dim=1024, optimizer=spec.SGD(lr=1.0), initializer=spec.Constant(value=0.0))
IDS = np.arange(3, dtype=np.int64)
NONE = Feature(0)
T = TypeVar("T")


class Served:
    """A shard on a loop and thread of its own, at a TCP port."""

    def __init__(self, foreign: str = "") -> None:
        self.loop = uvloop.new_event_loop()
        self.loop.set_exception_handler(lambda _, context: self.defects.append(context))
        self.defects: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.dispatch = Dispatch(Shard(0, Placement.even(1), OptimizerRegistry()), ApplyThread())
        self.sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.address = self.sock.getsockname()
        self.stream = self.run(self._start(foreign))
        self.run(self._listen())

    async def _start(self, foreign: str) -> StreamServer:
        return StreamServer(self.dispatch, foreign)

    async def _listen(self) -> None:
        self._listener = await self.loop.create_server(self.stream.protocol, sock=self.sock)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def on_loop(self, work: Callable[[], T]) -> T:
        async def call() -> T:
            return work()

        return self.run(call())

    @property
    def connections(self) -> int:
        return len(self.stream.connections)

    def unsent_bytes(self) -> int:
        return self.on_loop(lambda: sum(c.unsent_bytes for c in self.stream.connections))

    def stop(self) -> None:
        self.on_loop(self._listener.close)
        self.run(self.stream.close(0.0))
        self.run(asyncio.sleep(0.01))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(20)
        self.loop.close()
        assert not self.defects


class Peer:
    """A raw connection."""

    def __init__(self, served: Served, features: Feature | None = NONE, receive_bytes: int = 0) -> None:
        self.sock = socket.socket()
        if receive_bytes:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.sock.settimeout(60)
        self.sock.connect(served.address)
        if features is not None:
            self.sock.sendall(wire.client_hello(features))
            assert wire.read_server_hello(self.sock.recv(16, socket.MSG_WAITALL)).features == features
        self._frames: list[Frame] = []
        self._reader = FrameReader(
            MAX_MESSAGE_BYTES,
            lambda header: [np.empty(length, np.uint8).data for length in header.lengths],
            checksum=features == Feature.CHECKSUM,
        )

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def receive(self) -> Frame | None:
        """The next frame; None where the connection ends instead."""
        while not self._frames:
            try:
                got = self.sock.recv_into(self._reader.buffer())
            except ConnectionError:
                got = 0
            if not got:
                return None
            self._frames += self._reader.received(got)
        return self._frames.pop(0)

    def reply(self) -> Reply:
        """The next frame's reply, or its error."""
        frame = self.receive()
        assert frame is not None, "the connection has ended"
        if frame.header.kind == ERROR_KIND:
            raise from_wire(frame.header.head, "")
        return read(REPLY_KINDS[frame.header.kind], frame.header.head, frame.buffers)

    def ask(self, request: Request) -> Reply:
        self.send(framed(request))
        return self.reply()

    def was_dropped(self) -> bool:
        """Whether the connection ends, after an error frame at most."""
        try:
            while self.receive() is not None:
                pass
        except TimeoutError:
            return False
        return True


def framed(request: Request, call: int = 7, *, checksum: bool = False, timeout_ms: int = 20_000) -> bytes:
    bulk = [np.ascontiguousarray(array).data for array in arrays(request)]
    kind = KIND_OF[type(request)]
    return b"".join(wire.encode(kind, call, timeout_ms, head_bytes(request), bulk, checksum=checksum))


def push(num_rows: int = 3, dim: int = 4, table: str = "items", seq: int = 1) -> Push:
    ids = np.arange(num_rows, dtype=np.int64)
    return Push(PushToken(0, 1, seq, 1), 0, 1, (TableGradients(table, ids, np.ones((num_rows, dim), np.float32)),))


def pull(num_rows: int = 3, table: str = "items") -> Pull:
    return Pull(1, (TableIds(table, np.arange(num_rows, dtype=np.int64)),))


def begun(bulk_bytes: int, call: int = 1) -> bytes:
    """The start of a push, without what it announces."""
    head = head_bytes(push())
    lengths = struct.pack("<2I", 8, bulk_bytes - 8)
    start = struct.pack("<4sBBHIIIII", b"EMBF", wire.VERSION, KIND_OF[Push], 2, call, 20_000, len(head), bulk_bytes, 0)
    return start + crc32(lengths + head, crc32(start)).to_bytes(4, "little") + lengths + head


def with_field(data: bytes, offset: int, value: bytes) -> bytes:
    """A frame with another value at an offset of its prefix, and the checksum that fits it."""
    changed = bytearray(data)
    changed[offset : offset + len(value)] = value
    if offset < 28:
        buffers, head = struct.unpack_from("<H", data, 6)[0], struct.unpack_from("<I", data, 16)[0]
        start = bytes(changed[32 : 32 + 4 * buffers + head])
        changed[28:32] = crc32(start, crc32(bytes(changed[:28]))).to_bytes(4, "little")
    return bytes(changed)


def eventually(claim: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not claim():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    servers: list[Served] = []

    def start(foreign: str = "") -> Served:
        servers.append(Served(foreign))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve()


@pytest.fixture
def connect(served: Served) -> Iterator[Callable[..., Peer]]:
    """Peers of the shard, which knows two tables."""
    peers: list[Peer] = []

    def peer(features: Feature | None = NONE, receive_bytes: int = 0) -> Peer:
        peers.append(Peer(served, features, receive_bytes))
        return peers[-1]

    first = peer()
    assert first.ask(Declare(TABLE)) == Declared(created=True, loading=False)
    assert first.ask(Declare(WIDE)) == Declared(created=True, loading=False)
    yield peer
    for one in peers:
        one.sock.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that a test can wait for."""
    monkeypatch.setattr(stream, "HELLO_SECONDS", 0.5)
    monkeypatch.setattr(stream, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(stream, "PRESSED_SECONDS", 0.1)
    monkeypatch.setattr(stream, "SWEEP_SECONDS", 0.05)


Connect = Callable[..., Peer]


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (with_field(framed(push()), 0, b"EMBG"), "the magic of a frame"),
        (with_field(framed(push()), 4, b"\x01"), "the version of a frame is 1"),
        (with_field(framed(push()), 6, b"\x01\x10"), "the number of buffers is 4097"),
        (with_field(framed(push()), 16, struct.pack("<I", 2**20 + 1)), "the size of the head"),
        (with_field(framed(push()), 20, struct.pack("<I", MAX_MESSAGE_BYTES + 1)), "the size of the buffers"),
        (with_field(framed(push()), 20, struct.pack("<I", 71)), "the sum of the buffers' lengths is 72, not 71"),
        (with_field(framed(push()), 24, b"\x01"), "the checksum of buffers that have none"),
        (with_field(framed(push()), 28, bytes(4)), "the checksum of a frame's start"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "the magic of a frame"),
    ],
    ids=["magic", "version", "buffers", "head", "limit", "lengths", "bulk checksum", "start checksum", "other text"],
)
def test_a_wrong_frame_is_named_under_call_0_and_ends_the_connection(connect: Connect, frame: bytes, words: str):
    peer, other = connect(), connect()
    peer.send(frame)
    answer = peer.receive()
    assert answer is not None
    assert (answer.header.kind, answer.header.call) == (ERROR_KIND, 0)
    error = from_wire(answer.header.head, "")
    assert isinstance(error, BadFrame)
    assert words in str(error)
    assert peer.was_dropped()
    assert isinstance(other.ask(pull()), Rows)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (pull(table="nowhere"), UnknownTable),
        (push(table="nowhere"), UnknownTable),
        (push(dim=3), WrongDim),
        (Load("items", 1, IDS, np.ones((3, 5), np.float32)), WrongDim),
        (Pull(9, (TableIds("items", IDS),)), WrongPlacement),
        (pull(num_rows=20_000, table="wide"), MessageTooLarge),
    ],
    ids=["table", "table of a push", "dim", "dim of a load", "placement", "reply over the limit"],
)
def test_a_request_that_makes_no_sense_fails_alone(connect: Connect, request_: Request, error: type[EmbershardError]):
    peer = connect()
    with pytest.raises(error):
        peer.ask(request_)
    assert isinstance(peer.ask(Hello()), Greeting)


@pytest.mark.parametrize(
    "frame",
    [
        wire.encode(77, 7, 1000, b"", [], checksum=False),
        wire.encode(77, 7, 1000, b"", [bytes(100)], checksum=False),
        wire.encode(KIND_OF[Rows], 7, 1000, b"", [bytes(100)], checksum=False),
        wire.encode(KIND_OF[Pull], 7, 1000, b"\xff\xff\xff", [bytes(8)], checksum=False),
        wire.encode(KIND_OF[Pull], 7, 1000, head_bytes(pull()), [], checksum=False),
        wire.encode(KIND_OF[Pull], 7, 1000, head_bytes(pull()), [bytes(8), bytes(8)], checksum=False),
        wire.encode(KIND_OF[Pull], 7, 1000, head_bytes(pull()), [bytes(7)], checksum=False),
        wire.encode(KIND_OF[Push], 7, 1000, head_bytes(push()), [bytes(8)], checksum=False),
    ],
    ids=[
        "kind",
        "kind with arrays",
        "a reply",
        "head",
        "too few arrays",
        "too many arrays",
        "half an id",
        "no gradients",
    ],
)
def test_a_frame_that_is_no_request_is_answered_by_an_error_of_its_call(connect: Connect, frame: list[bytes]):
    peer = connect()
    peer.send(b"".join(frame))
    answer = peer.receive()
    assert answer is not None
    assert (answer.header.kind, answer.header.call) == (ERROR_KIND, 7)
    assert isinstance(from_wire(answer.header.head, ""), InvalidRequest)
    assert isinstance(peer.ask(Hello()), Greeting)


def test_a_frame_cut_anywhere_changes_nothing_and_leaves_nothing_behind(connect: Connect, served: Served):
    whole = framed(push(20_000))  # larger than what is received at once
    cuts = [1, 15, 31, 32, 40, 60, 200, 160_000, len(whole) - 1]
    for cut in cuts:
        peer = connect()
        peer.send(whole[:cut])
        peer.sock.close()
    watcher = connect()
    assert eventually(lambda: served.connections == 2 and served.stream.receiving_bytes == 0)
    reply = watcher.ask(pull())
    assert isinstance(reply, Rows)
    assert not reply.tables[0].any()


def test_a_frame_in_single_bytes_is_understood(connect: Connect):
    peer = connect()
    for byte in framed(push()):
        peer.send(bytes([byte]))
    assert peer.reply() == Pushed(duplicate=False, applied=3, skipped=0)


def test_a_peer_that_speaks_no_common_version_is_told_which_ones_there_are(served: Served):
    peer = Peer(served, None)
    peer.send(struct.pack("<8sHHI", wire.MAGIC, 7, 9, 0))
    assert struct.unpack("<8sHHI", peer.sock.recv(16)) == (wire.MAGIC, wire.OLDEST_VERSION, wire.VERSION, 0)
    assert peer.sock.recv(1) == b""
    peer.sock.close()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("said", [b"", wire.MAGIC[:3], wire.MAGIC, wire.client_hello(Feature(0))[:15]])
def test_a_peer_that_does_not_finish_its_hello_is_dropped(served: Served, said: bytes):
    peer = Peer(served, None)
    peer.send(said)
    assert peer.was_dropped()
    peer.sock.close()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("sent", [1, 31, 50, 150_000])
def test_a_frame_that_is_never_finished_is_dropped(connect: Connect, served: Served, sent: int):
    peer, other = connect(), connect()
    peer.send(framed(push(20_000))[:sent])
    assert peer.was_dropped()
    assert served.stream.receiving_bytes == 0
    assert isinstance(other.ask(pull()), Rows)


@pytest.mark.usefixtures("quick")
def test_a_frame_that_drips_is_dropped(connect: Connect):
    peer = connect()
    peer.sock.settimeout(0.02)
    data = iter(framed(push(20_000)))
    end = time.monotonic() + 15
    dropped = False
    while not dropped and time.monotonic() < end:
        try:
            peer.send(bytes([next(data)]))
            dropped = peer.sock.recv(1) == b""
        except TimeoutError:
            pass
        except ConnectionError:
            dropped = True
    assert dropped


@pytest.mark.usefixtures("quick")
def test_a_peer_may_be_silent_between_calls_for_as_long_as_it_likes(connect: Connect):
    peer = connect()
    assert isinstance(peer.ask(pull()), Rows)
    time.sleep(1.0)
    assert isinstance(peer.ask(pull()), Rows)


def test_rows_are_not_made_for_a_peer_that_does_not_read(connect: Connect, served: Served):
    """200 pulls of 8 MiB each: about UNSENT_BYTES of them are made, the others are told to come back."""
    slow, other = connect(receive_bytes=4096), connect()
    asking = threading.Thread(target=_ask_all, args=(slow, [pull(2000, "wide")] * 200))
    asking.start()
    assert eventually(lambda: served.unsent_bytes() > stream.UNSENT_BYTES)
    for _ in range(20):
        assert isinstance(other.ask(pull()), Rows)
        assert served.unsent_bytes() < 2 * stream.UNSENT_BYTES + 2 * 2**23
    slow.sock.shutdown(socket.SHUT_RDWR)
    asking.join(20)
    slow.sock.close()
    assert eventually(lambda: served.unsent_bytes() == 0)


def joined(peer: Peer, workers: int) -> None:
    for worker in range(workers):
        assert peer.ask(Join(worker, 1, 0, 0, workers, 60_000)) == Joined(
            True, 0, worker == workers - 1, tuple(range(worker + 1))
        )


def clock_0(worker: int) -> Push:
    return Push(PushToken(worker, 1, 1, 1), 0, 1, ())


def test_a_pull_that_waits_holds_nobody_up(connect: Connect):
    peer, other = connect(), connect()
    joined(other, 2)
    peer.send(framed(replace(pull(), epoch=1, required_clock=1), call=1))
    peer.send(framed(clock_0(0), call=2))
    assert isinstance(peer.reply(), Pushed)
    other.ask(clock_0(1))
    frame = peer.receive()
    assert frame is not None
    assert (frame.header.call, frame.header.kind) == (1, KIND_OF[Rows])


def test_a_pull_that_waits_in_vain_is_put_back_before_its_deadline(connect: Connect):
    peer = connect()
    joined(peer, 2)
    peer.send(framed(replace(pull(), epoch=1, required_clock=1), timeout_ms=1000))
    with pytest.raises(ClockAhead, match="worker 0, 1"):
        peer.reply()


def test_rows_are_not_made_for_a_peer_that_left_while_it_waited(connect: Connect, served: Served):
    peer, other = connect(), connect()
    joined(other, 2)
    peer.send(framed(replace(pull(), epoch=1, required_clock=1)))
    apply = served.dispatch._apply
    assert eventually(lambda: len(apply._parked) == 1)
    made, before = served.stream.made_bytes, served.connections
    peer.sock.close()
    assert eventually(lambda: served.connections == before - 1)
    for worker in range(2):
        other.ask(clock_0(worker))
    assert eventually(lambda: not apply._parked and apply.queued_bytes == 0)
    assert served.stream.made_bytes == made


def test_a_worker_whose_request_still_arrives_keeps_its_lease(connect: Connect, served: Served):
    """On a slow link it may take longer than the lease, and the beats behind it with it."""
    slow, other = connect(), connect()
    assert isinstance(slow.ask(Join(0, 1, 0, 0, 2, 2000)), Joined)
    other.ask(Join(1, 1, 0, 0, 2, 60_000))
    slow.send(begun(8 + 1000))
    for _ in range(25):
        time.sleep(0.1)
        slow.send(b"x")
    members = lambda: [member.worker for member in served.dispatch.status().members]  # noqa: E731
    assert members() == [0, 1]
    assert eventually(lambda: members() == [1])


def test_what_a_peer_waited_for_and_does_not_read_counts_as_unsent(connect: Connect, served: Served):
    slow, other = connect(receive_bytes=4096), connect()
    joined(other, 2)
    said = Rendezvous(0, 1, "a meeting", np.zeros(2**24, np.uint8))
    slow.send(framed(said))
    slow.send(framed(replace(pull(2000, "wide"), epoch=1, required_clock=1)))
    assert eventually(lambda: len(served.dispatch._apply._parked) == 2)
    other.send(framed(replace(said, worker=1)))
    for worker in range(2):
        other.ask(clock_0(worker))
    assert eventually(lambda: served.unsent_bytes() > 2**25)
    assert served.stream.made_bytes > 2**26 + 8_000_000


def test_a_peer_whose_machine_is_gone_is_noticed_by_the_system(connect: Connect, served: Served):
    connect()
    socks = [connection._transport.get_extra_info("socket") for connection in served.stream.connections]
    assert [sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for sock in socks] == [1, 1]


def _ask_all(peer: Peer, requests: list[Pull]) -> None:
    with suppress(OSError):
        for call, request in enumerate(requests):
            peer.send(framed(request, call))


def test_a_peer_that_reads_late_gets_every_answer(connect: Connect):
    late = connect(receive_bytes=4096)
    asking = threading.Thread(target=_ask_all, args=(late, [pull(2000, "wide")] * 30))
    asking.start()
    time.sleep(0.3)
    calls = set()
    while len(calls) < 30:
        frame = late.receive()
        assert frame is not None
        calls.add(frame.header.call)
        if frame.header.kind == ERROR_KIND:
            assert isinstance(from_wire(frame.header.head, ""), ShardBusy)
    asking.join(20)


def test_many_slow_readers_share_one_bound(connect: Connect, served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "ALL_UNSENT_BYTES", 2**26)
    others = set(served.stream.connections)
    slow = [connect(receive_bytes=4096) for _ in range(20)]
    of_slow = lambda: served.stream.connections - others  # noqa: E731
    for peer in slow:
        _ask_all(peer, [pull(1000, "wide")] * 3)  # 240 MiB, and no connection at its own bound
    apply = served.dispatch._apply
    assert eventually(lambda: apply.queued_bytes == 0 and all(c._received > 3 * 8000 for c in of_slow()))
    assert connect().ask(push()) == Pushed(duplicate=False, applied=3, skipped=0)
    assert 2**25 < served.unsent_bytes() < 2**26 + 2 * 2**22


@pytest.mark.usefixtures("quick")
def test_a_peer_that_reads_nothing_is_dropped(connect: Connect, served: Served):
    slow, other = connect(receive_bytes=4096), connect()
    slow.send(framed(pull(8000, "wide")))
    assert eventually(lambda: served.connections == 2)
    assert isinstance(other.ask(pull()), Rows)


@pytest.mark.usefixtures("quick")
def test_a_peer_that_reads_nothing_and_asks_on_is_dropped_too(connect: Connect, served: Served):
    slow = connect(receive_bytes=4096)
    slow.send(framed(pull(8000, "wide")))
    with suppress(OSError):
        while served.connections > 1:
            slow.send(framed(Hello()))
            time.sleep(0.05)
    assert slow.was_dropped()


def test_a_peer_that_half_closes_has_its_push_applied_once_and_is_let_go(connect: Connect, served: Served):
    peer, other = connect(), connect()
    peer.send(framed(push()))
    peer.sock.shutdown(socket.SHUT_WR)
    assert peer.was_dropped()
    assert eventually(lambda: served.connections == 2)
    again = other.ask(push())
    assert again == Pushed(duplicate=True, applied=3, skipped=0)


@pytest.mark.usefixtures("quick")
def test_frames_that_only_begin_hold_others_up_for_a_moment(connect: Connect, served: Served):
    """Small calls go on at once; large ones once those who do not go on were dropped."""
    stream_limit = stream.RECEIVING_BYTES
    lazy = [connect() for _ in range(20)]
    for peer in lazy:
        peer.send(begun(MAX_MESSAGE_BYTES))
    other = connect()
    assert eventually(lambda: served.stream.receiving_bytes == stream_limit)
    assert isinstance(other.ask(pull()), Rows)
    with pytest.raises(ShardBusy) as caught:
        other.ask(push(20_000))
    assert caught.value.fields["queued_bytes"] == stream_limit

    def accepted() -> bool:
        try:
            return isinstance(other.ask(push(20_000)), Pushed)
        except ShardBusy:
            return False

    assert eventually(accepted)
    assert served.stream.receiving_bytes <= stream_limit


def test_a_flipped_byte_of_the_arrays_is_noticed_with_checksum(connect: Connect):
    peer = connect(Feature.CHECKSUM)
    data = bytearray(framed(push(), checksum=True))
    peer.send(data)
    assert peer.reply() == Pushed(duplicate=False, applied=3, skipped=0)
    data[-1] ^= 1
    peer.send(data)
    with pytest.raises(BadFrame, match="checksum of the buffers"):
        peer.reply()
    assert peer.was_dropped()


def test_replies_have_a_checksum_where_it_was_agreed_on(connect: Connect):
    peer = connect(Feature.CHECKSUM)
    peer.send(framed(push(), checksum=True))
    peer.reply()
    peer.send(framed(pull(), checksum=True))
    frame = peer.receive()  # its reader checks it
    assert frame is not None
    assert bytes(frame.buffers[0]) == np.full(12, -1, np.float32).tobytes()


def test_a_request_whose_caller_no_longer_waits_gets_no_reply(connect: Connect, served: Served):
    peer = connect()
    hold, entered = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        hold.wait(20)

    apply = served.dispatch._apply
    apply.submit(work, 0, time.monotonic() + 20)
    entered.wait(20)
    peer.send(framed(pull(), call=1, timeout_ms=1))
    peer.send(framed(pull(), call=2))
    assert eventually(lambda: apply.queued_bytes > 30)
    time.sleep(0.01)
    hold.set()
    frame = peer.receive()
    assert frame is not None
    assert frame.header.call == 2


class Foreign:
    """Something at a Unix socket that is no stream server: it does `talk` with the one connection it takes."""

    def __init__(self, path: str, talk: Callable[[socket.socket], None]) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._talk = talk
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        sock, _ = self._listener.accept()
        self._listener.close()
        with sock, suppress(OSError):
            sock.settimeout(20)
            self._talk(sock)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def grpc_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A gRPC server's private socket; its shard is another than the stream's."""
    options = dict(transport_grpc.SERVER_OPTIONS)
    assert options["grpc.server_handshake_timeout_ms"] <= 10_000
    shorter = {**options, "grpc.server_handshake_timeout_ms": 300}
    monkeypatch.setattr(transport_grpc, "SERVER_OPTIONS", list(shorter.items()))
    path = f"\0embershard-test-{os.getpid()}"
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> grpc.aio.Server:
        dispatch = Dispatch(Shard(0, Placement.even(1), OptimizerRegistry()), ApplyThread())
        server = make_server(ShardService(dispatch), health.aio.HealthServicer())
        server.add_insecure_port(f"unix-abstract:{path[1:]}")
        await server.start()
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    yield path
    asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    loop.close()


def test_grpc_at_the_same_port_is_passed_on_and_leaves_nothing_behind(serve: Callable[..., Served], grpc_path: str):
    served = serve(grpc_path)

    def call() -> bytes:
        with grpc.insecure_channel(
            "{}:{}".format(*served.address), options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            return channel.unary_unary(f"/{SERVICE}/Hello")(b"", timeout=20)  # type: ignore[no-any-return]

    assert pb.Greeting.FromString(call()).num_shards == 1
    before = open_descriptors()
    for _ in range(10):
        call()
    assert eventually(lambda: open_descriptors() <= before)
    assert served.connections == 0


def test_a_connection_to_grpc_that_says_nothing_is_closed(serve: Callable[..., Served], grpc_path: str):
    served = serve(grpc_path)
    with socket.create_connection(served.address) as peer:
        peer.settimeout(60)
        peer.sendall(b"PRI")  # of gRPC's first line
        peer.sendall(b" * HT")
        while peer.recv(1024):
            pass
    assert eventually(lambda: served.stream.open_connections == 0)


def test_connections_over_the_limit_are_refused_and_those_passed_on_count(
    serve: Callable[..., Served], grpc_path: str, monkeypatch: pytest.MonkeyPatch
):
    served = serve(grpc_path)
    monkeypatch.setattr(served.stream, "max_connections", 2)
    with socket.create_connection(served.address) as foreign:
        foreign.sendall(b"PRI * HTTP/2.0")
        assert eventually(lambda: served.stream.open_connections == 1)
        peer = Peer(served)
        with socket.create_connection(served.address) as third:
            third.settimeout(60)
            with suppress(ConnectionResetError):
                assert third.recv(1) == b""
        peer.sock.close()
        assert eventually(lambda: served.stream.open_connections == 1)
        Peer(served).sock.close()
    assert eventually(lambda: served.stream.open_connections == 0)


def test_what_is_passed_on_is_read_no_faster_than_the_other_side_reads(serve: Callable[..., Served], tmp_path: Any):
    sent = 0

    def talk(sock: socket.socket) -> None:
        nonlocal sent
        sock.recv(100)
        while sent < 2**26:
            sent += sock.send(bytes(2**16))

    foreign = Foreign(f"{tmp_path}/grpc", talk)
    peer = Peer(serve(foreign.path), None, receive_bytes=4096)
    peer.send(b"PRI * HTTP/2.0")
    last = -1
    while sent != last or not sent:
        last = sent
        time.sleep(0.1)
    assert sent < 2**24
    while sent < 2**26:
        peer.sock.recv(2**20)
    peer.sock.close()
    foreign.thread.join(20)


@pytest.mark.parametrize("first", ["peer", "foreign"])
def test_when_one_end_of_a_pipe_leaves_the_other_is_told(serve: Callable[..., Served], tmp_path: Any, first: str):
    heard: list[bytes] = []

    def talk(sock: socket.socket) -> None:
        heard.append(sock.recv(3, socket.MSG_WAITALL))
        if first == "peer":
            heard.append(sock.recv(1))
        sock.sendall(b"farewell")

    foreign = Foreign(f"{tmp_path}/grpc", talk)
    before = open_descriptors()
    served = serve(foreign.path)
    at_rest = open_descriptors()
    peer = Peer(served, None)
    peer.send(b"PRI")
    if first == "peer":
        peer.sock.shutdown(socket.SHUT_WR)
    assert peer.sock.recv(8, socket.MSG_WAITALL) == b"farewell"
    assert peer.sock.recv(1) == b""
    foreign.thread.join(20)
    assert heard == [b"PRI", b""][: len(heard)]
    peer.sock.close()
    assert eventually(lambda: open_descriptors() <= max(before, at_rest - 1))  # less the foreign listener


def test_a_peer_with_another_protocol_is_dropped_where_nobody_speaks_it(served: Served):
    peer = Peer(served, None)
    peer.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert peer.was_dropped()
    peer.sock.close()


def test_a_foreign_server_that_is_gone_ends_the_connection(serve: Callable[..., Served], tmp_path: Any):
    peer = Peer(serve(f"{tmp_path}/nobody"), None)
    peer.send(b"PRI * HTTP/2.0")
    assert peer.was_dropped()
    peer.sock.close()


def test_closing_sends_what_waits_to_be_read(connect: Connect, served: Served):
    peer = connect(receive_bytes=4096)
    peer.send(framed(pull(8000, "wide")))
    assert eventually(lambda: served.unsent_bytes() > 2**24)
    ending = asyncio.run_coroutine_threadsafe(served.stream.close(20.0), served.loop)
    assert isinstance(peer.reply(), Rows)
    assert peer.was_dropped()
    ending.result(20)


def test_what_arrived_is_not_counted_as_arriving_however_frames_share_a_read(served: Served, connect: Connect):
    peer = connect()
    two = framed(pull(1000), call=1) + framed(pull(2000), call=2)
    third = framed(pull(3000), call=3)
    peer.send(two + third[:5000])
    assert [len(reply.tables[0]) for reply in (peer.reply(), peer.reply()) if isinstance(reply, Rows)] == [4000, 8000]
    assert eventually(lambda: served.stream.receiving_bytes == 24_000)
    peer.send(third[5000:])
    assert isinstance(peer.reply(), Rows)
    assert served.stream.receiving_bytes == 0
    peer.send(two + third[:5000])
    peer.sock.close()
    assert eventually(lambda: served.connections == 1)
    assert served.stream.receiving_bytes == 0


def test_an_error_that_quotes_a_whole_message_is_still_said(connect: Connect):
    with pytest.raises(UnknownTable):
        connect().ask(pull(table="x" * (2**20 - 100)))
