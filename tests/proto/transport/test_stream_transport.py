"""The worker's side of the stream transport against shards that do what they should not: scripts over raw sockets."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import count

import numpy as np
import pytest

from embershard.proto import wire
from embershard.proto.arrays import MAX_MESSAGE_BYTES, Floats
from embershard.proto.errors import (
    BadFrame,
    ClientClosed,
    NotAShard,
    ShardUnavailable,
    UnknownTable,
    WrongDim,
    WrongVersion,
    to_wire,
)
from embershard.proto.messages import (
    ERROR_KIND,
    KIND_OF,
    Declared,
    Greeting,
    Hello,
    Pull,
    Push,
    Pushed,
    PushToken,
    Rendezvous,
    RendezvousResult,
    Reply,
    Rows,
    TableGradients,
    TableIds,
    arrays,
)
from embershard.proto.protobuf import head_bytes
from embershard.proto.routing import make_route
from embershard.proto.spec import SGD, TableSpec
from embershard.proto.transport import stream
from embershard.proto.transport.io_thread import connect_local
from embershard.proto.transport.stream import StreamTransport
from embershard.proto.transport.transport import Unreachable
from embershard.proto.wire import Feature, Frame, FrameReader, local_socket
from embershard.worker.client.client import Client

PATIENCE = timedelta(seconds=60)
SHORT = timedelta(seconds=0.3)
GREETING = Greeting(shard=0, num_shards=1, placement_epoch=1, version="", instance="one", max_message_bytes=64 * 2**20)


class Talk:
    """One connection of a script."""

    def __init__(self, sock: socket.socket, features: Feature = Feature.CHECKSUM) -> None:
        self.sock = sock
        sock.settimeout(20)
        answer, agreed = wire.server_hello(sock.recv(16, socket.MSG_WAITALL), features)
        assert agreed is not None
        self.checksum = agreed.features == Feature.CHECKSUM
        self.sock.sendall(answer)
        self._frames: list[Frame] = []
        self._reader = FrameReader(
            MAX_MESSAGE_BYTES,
            lambda header: [np.empty(length, np.uint8).data for length in header.lengths],
            checksum=self.checksum,
        )

    def request(self) -> int:
        """The call number of the next request. ConnectionError where there is none."""
        while not self._frames:
            got = self.sock.recv_into(self._reader.buffer())
            if not got:
                raise ConnectionError("the worker has left")
            self._frames += self._reader.received(got)
        return self._frames.pop(0).header.call

    def reply(self, call: int, reply: Reply) -> bytes:
        kind = KIND_OF[type(reply)]
        return b"".join(wire.encode(kind, call, 0, head_bytes(reply), arrays(reply), checksum=self.checksum))

    def error(self, call: int, error: Exception) -> bytes:
        assert isinstance(error, BadFrame | UnknownTable)
        return b"".join(wire.encode(ERROR_KIND, call, 0, to_wire(error)[1], checksum=self.checksum))

    def send(self, *data: bytes) -> None:
        self.sock.sendall(b"".join(data))

    def answer(self, reply: Reply) -> None:
        self.send(self.reply(self.request(), reply))

    def ended(self) -> None:
        """Wait until the worker closes the connection."""
        with suppress(ConnectionError):
            while self.sock.recv(2**20):
                pass


Script = Callable[[socket.socket], None]


class Scripted:
    """A listener that gives the n-th connection to the n-th script, and the last one to all others."""

    def __init__(self, listener: socket.socket, *scripts: Script) -> None:
        self.listener = listener
        self.connections = 0
        self.failures: list[BaseException] = []
        self._scripts = scripts
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    @property
    def address(self) -> str:
        name = self.listener.getsockname()
        return f"unix:{name}" if isinstance(name, str) else f"tcp://{name[0]}:{name[1]}"

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                script = self._scripts[min(self.connections, len(self._scripts) - 1)]
                self.connections += 1
                thread = threading.Thread(target=self._run, args=(script, sock))
                thread.start()
                self._threads.append(thread)

    def _run(self, script: Script, sock: socket.socket) -> None:
        with sock:
            try:
                script(sock)
            except ConnectionError:
                pass  # the worker leaves when it wants to
            except BaseException as error:
                self.failures.append(error)

    def stop(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in [self._accepting, *self._threads]:
            thread.join(20)
        assert not self.failures


@pytest.fixture
def scripted():
    started: list[Scripted] = []

    def start(*scripts, listener=None):
        started.append(Scripted(listener or socket.create_server(("127.0.0.1", 0)), *scripts))
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def connect(scripted):
    """A transport to a shard that follows scripts."""
    transports: list[StreamTransport] = []

    def to(*scripts, checksum=False):
        transports.append(StreamTransport(scripted(*scripts).address, checksum=checksum))
        return transports[-1]

    yield to
    for transport in transports:
        transport.close()


Connect = Callable[..., StreamTransport]


def polite(sock: socket.socket) -> None:
    """A shard that greets whoever asks anything."""
    talk = Talk(sock)
    while True:
        talk.answer(GREETING)


def ask(transport: StreamTransport, timeout: timedelta = PATIENCE) -> Reply:
    return transport.submit(Hello(), timeout).result()


def pull(num_rows: int = 4) -> Pull:
    return Pull(1, (TableIds("items", np.arange(num_rows, dtype=np.int64)),))


def rows(value: float, num_rows: int = 4) -> Rows:
    return Rows((np.full((num_rows, 2), value, np.float32),))


def blank(num_rows: int = 4) -> Floats:
    return np.full((num_rows, 2), -7, np.float32)


def stays(array: Floats) -> None:
    """Nobody writes into an array that is the caller's again."""
    array[...] = 42
    for _ in range(10):
        time.sleep(0.02)
        assert (array == 42).all()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (lambda talk: talk.send(b"HTTP/1.1 400 Bad Request\r\n\r\nwhat was that?"), "the magic of a frame"),
        (lambda talk: talk.send(talk.reply(1, rows(1))[:40]), "the connection broke"),
        (lambda talk: talk.send(talk.error(0, BadFrame(what="a", got="b", want="c"))), "a is b, not c"),
        (
            lambda talk: talk.send(b"EMBF\x02\x84\x01\x00" + bytes(12) + b"\x01\x00\x00\x05" + bytes(8)),
            "size of the buf",
        ),
        (lambda talk: None, "the connection broke"),
    ],
    ids=["garbage", "half a frame", "an error of call 0", "over the limit", "nothing"],
)
def test_a_broken_stream_ends_its_calls_and_the_next_call_connects_again(connect, script, words):
    def broken(sock):
        talk = Talk(sock)
        talk.request()
        script(talk)

    transport = connect(broken, polite)
    with pytest.raises(Unreachable, match=words):
        transport.submit(pull(), PATIENCE, [blank()]).result()
    assert ask(transport) == GREETING


def test_a_reply_of_another_kind_is_no_shards(connect):
    def script(sock):
        talk = Talk(sock)
        talk.answer(Declared(created=True, loading=False))
        talk.answer(rows(1))
        talk.answer(GREETING)

    transport = connect(script)
    for _ in range(2):
        with pytest.raises(NotAShard, match="its reply is of kind"):
            ask(transport)
    assert ask(transport) == GREETING


def test_an_error_nobody_knows_and_a_head_that_is_no_reply_are_typed_errors(connect):
    def script(sock):
        talk = Talk(sock)
        talk.send(*wire.encode(ERROR_KIND, talk.request(), 0, b"\xff not json", checksum=False))
        talk.send(*wire.encode(KIND_OF[Greeting], talk.request(), 0, b"\xff\xff", checksum=False))
        talk.send(talk.error(talk.request(), UnknownTable(table="t", known="")))
        talk.answer(GREETING)

    transport = connect(script)
    for words in ("an error this version does not know", "no Greeting message", "no table 't' here"):
        with pytest.raises(Exception, match=words):
            ask(transport)
    assert ask(transport) == GREETING


def test_a_reply_to_a_call_that_nobody_made_is_dropped(connect):
    def script(sock):
        talk = Talk(sock)
        call = talk.request()
        talk.send(talk.reply(call + 1, rows(1, 100_000)), talk.reply(call + 2, GREETING), talk.reply(call, GREETING))
        talk.ended()

    assert ask(connect(script)) == GREETING


@pytest.mark.parametrize("got", [Rows(()), rows(1, 3), rows(1, 5), Rows((*rows(1).tables, *rows(1).tables))])
def test_rows_of_a_wrong_size_do_not_reach_the_callers_memory(connect, got):
    transport = connect(lambda sock: Talk(sock).answer(got))
    into = blank()
    reply = transport.submit(pull(), PATIENCE, [into]).result()
    assert isinstance(reply, Rows)
    assert [len(table) for table in reply.tables] == [table.size for table in got.tables]
    assert (into == -7).all()


@pytest.mark.parametrize(("got", "error"), [(Rows(()), NotAShard), (rows(1, 3), WrongDim)])
def test_a_client_says_what_is_wrong_with_rows_of_a_wrong_size(connect, got, error):
    def script(sock):
        talk = Talk(sock)
        for reply in (GREETING, GREETING, Declared(created=True, loading=False), got):
            talk.answer(reply)
        talk.ended()

    client = Client([connect(script)], timeout=PATIENCE)
    spec = TableSpec(name="items", dim=2, optimizer=SGD(lr=1.0))
    client.declare(spec)
    with pytest.raises(error):
        client.pull([("items", make_route(np.arange(4), spec.space_key, client.placement))])


def test_a_client_of_a_shard_that_breaks_every_call_ends_by_its_deadline(connect):
    def script(sock):
        talk = Talk(sock)
        talk.request()
        talk.send(b"x" * 100)

    with pytest.raises(ShardUnavailable):
        Client([connect(script)], timeout=timedelta(seconds=0.5))


def test_a_reply_after_its_deadline_is_dropped_and_the_connection_goes_on(connect):
    late = threading.Event()

    def script(sock):
        talk = Talk(sock)
        first = talk.request()
        talk.send(talk.reply(99, GREETING))  # the shard lives
        late.wait(20)
        talk.send(talk.reply(first, rows(1)))
        talk.answer(GREETING)

    transport = connect(script)
    into = blank()
    with pytest.raises(Unreachable, match="no answer"):
        transport.submit(pull(), SHORT, [into]).result()
    late.set()
    assert ask(transport) == GREETING
    stays(into)


@pytest.mark.parametrize("before", [b"", b"a reply"], ids=["alone", "behind another reply"])
@pytest.mark.parametrize("num_rows", [4, 100_000])
def test_a_reply_that_is_arriving_at_its_deadline_stops_there(connect, before, num_rows):
    late = threading.Event()

    def script(sock):
        talk = Talk(sock)
        talk.answer(GREETING)
        first, second = talk.request(), talk.request()
        reply = talk.reply(second, rows(1, num_rows))
        talk.send(talk.reply(first, GREETING) if before else b"", reply[:-16])
        late.wait(20)
        talk.send(reply[-16:])
        talk.ended()

    transport = connect(script, polite)
    into = blank(num_rows)
    assert ask(transport) == GREETING  # it is connected
    other = transport.submit(Hello(), PATIENCE)
    with pytest.raises(Unreachable, match="no answer"):
        transport.submit(pull(num_rows), SHORT, [into]).result()
    late.set()
    stays(into)
    if before:
        assert other.result() == GREETING
    assert ask(transport) == GREETING


@pytest.mark.parametrize("first", ["rows", "error"])
@pytest.mark.parametrize("part", [-16, None], ids=["a part of it", "all of it"])
def test_a_second_reply_to_a_call_is_not_written_anywhere(connect, first, part):
    done = threading.Event()

    def script(sock):
        talk = Talk(sock)
        call = talk.request()
        error = talk.error(call, UnknownTable(table="t", known=""))
        second = talk.reply(call, rows(2))
        talk.send(talk.reply(call, rows(1)) if first == "rows" else error, second[:part])
        done.wait(20)
        if part is not None:
            talk.send(second[part:])
        talk.ended()

    transport = connect(script, polite)
    into = blank()
    with suppress(Unreachable):
        reply = transport.submit(pull(), PATIENCE, [into]).result()
        assert isinstance(reply, Rows)
        assert (reply.tables[0] == 1).all()
    done.set()
    stays(into)


def test_a_request_that_is_still_being_sent_at_its_deadline_is_never_completed(connect):
    """Its arrays are the caller's again: what follows would be other bytes."""
    deadline, arrived = threading.Event(), []

    def script(sock):
        talk = Talk(sock)
        for _ in range(10):  # it lives, and does not read
            talk.send(talk.reply(99, GREETING))
            time.sleep(0.05)
        deadline.wait(20)
        with suppress(ConnectionError):
            arrived.append(talk.request())

    transport = connect(script, polite)
    ids = np.arange(4_000_000, dtype=np.int64)
    with pytest.raises(Unreachable, match="no answer"):
        transport.submit(Pull(1, (TableIds("items", ids),)), SHORT).result()
    ids[...] = -1
    deadline.set()
    assert ask(transport) == GREETING
    assert not arrived


def test_call_numbers_begin_again_behind_the_last_one(connect):
    calls: list[int] = []

    def script(sock):
        talk = Talk(sock)
        for _ in range(4):
            calls.append(talk.request())
            talk.send(talk.reply(calls[-1], GREETING))

    transport = connect(script)
    transport._numbers = count(2**32 - 2)
    for _ in range(4):
        assert ask(transport) == GREETING
    assert calls == [2**32 - 2, 2**32 - 1, 1, 2]  # 0 is nobody's


def test_a_flipped_byte_of_the_rows_is_noticed_with_checksum(connect):
    def script(sock):
        talk = Talk(sock)
        assert talk.checksum
        talk.answer(rows(1))
        reply = bytearray(talk.reply(talk.request(), rows(2)))
        reply[-1] ^= 1
        talk.send(bytes(reply))
        talk.ended()

    transport = connect(script, polite, checksum=True)
    into = blank()
    transport.submit(pull(), PATIENCE, [into]).result()
    assert (into == 1).all()
    with pytest.raises(Unreachable, match="the checksum of the buffers"):
        transport.submit(pull(), PATIENCE, [into]).result()
    assert ask(transport) == GREETING


def test_a_checksum_is_not_forced_on_a_shard_that_has_none(connect):
    def script(sock):
        talk = Talk(sock, Feature(0))
        talk.answer(rows(1))

    reply = connect(script, checksum=True).submit(pull(), PATIENCE).result()
    assert isinstance(reply, Rows)


def test_a_peer_that_takes_connections_and_says_nothing_is_left(connect, monkeypatch):
    left = threading.Event()

    def silent(sock):
        sock.settimeout(20)
        while sock.recv(100):
            pass
        left.set()

    transport = connect(silent, polite)
    with monkeypatch.context() as patch:
        patch.setattr(stream, "CONNECT_SECONDS", 0.2)
        with pytest.raises(Unreachable, match="says nothing"):
            ask(transport)
    assert left.wait(20), "its connection stays open"
    assert ask(transport) == GREETING


def test_a_shard_that_leaves_right_after_its_hello_is_tried_again(connect):
    transport = connect(*[lambda sock: Talk(sock) and None] * 3, polite)
    for _ in range(3):
        with pytest.raises(Unreachable):
            ask(transport)
    assert ask(transport) == GREETING


def test_closing_ends_a_connection_that_is_being_made(connect):
    left, there = threading.Event(), threading.Event()

    def silent(sock):
        sock.settimeout(20)
        there.set()
        while sock.recv(100):
            pass
        left.set()

    transport = connect(silent)
    call = transport.submit(Hello(), PATIENCE)
    assert there.wait(20)
    transport.close()
    with pytest.raises(Unreachable, match="closed by this worker"):
        call.result()
    assert left.wait(20)


def test_a_deadline_before_the_connection_is_there_ends_that_call_alone(connect):
    slow = threading.Event()

    def script(sock):
        slow.wait(20)
        polite(sock)

    transport = connect(script)
    hasty, patient = transport.submit(Hello(), SHORT), transport.submit(Hello(), PATIENCE)
    with pytest.raises(Unreachable, match="no answer"):
        hasty.result()
    slow.set()
    assert patient.result() == GREETING


@pytest.fixture(params=["tcp", "unix"])
def listener(request, tmp_path):
    if request.param == "tcp":
        return socket.create_server(("127.0.0.1", 0))
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(tmp_path / "socket"))
    sock.listen()
    return sock


def test_the_largest_messages_travel_without_a_copy_and_leave_nothing_behind(scripted, listener):
    num_rows = MAX_MESSAGE_BYTES // 16
    sent = np.random.default_rng(0).integers(0, 255, MAX_MESSAGE_BYTES, np.uint8).view(np.float32).reshape(-1, 4)
    received = np.zeros_like(sent)

    def script(sock):
        talk = Talk(sock)
        talk.request()
        peak = tracemalloc.get_traced_memory()[1]
        assert peak < 2 * MAX_MESSAGE_BYTES, "the script's own array, and no second one"
        talk.send(talk.reply(1, Pushed(duplicate=False, applied=num_rows, skipped=0)))
        call = talk.request()
        tracemalloc.reset_peak()
        for piece in wire.encode(KIND_OF[Rows], call, 0, b"", [sent], checksum=False):
            sock.sendall(piece)
        talk.ended()

    transport = StreamTransport(scripted(script, listener=listener).address)
    push = Push(PushToken(0, 1, 1, 1), 0, 1, (TableGradients("items", np.empty(0, np.int64), sent, route=5),))
    tracemalloc.start()
    try:
        assert transport.submit(push, PATIENCE).result() == Pushed(duplicate=False, applied=num_rows, skipped=0)
        reply = transport.submit(pull(), PATIENCE, [received]).result()
        assert tracemalloc.get_traced_memory()[1] < 1.5 * MAX_MESSAGE_BYTES
    finally:
        tracemalloc.stop()
    assert isinstance(reply, Rows)
    assert reply.tables[0] is received
    np.testing.assert_array_equal(received.view(np.uint8), sent.view(np.uint8))
    transport.close()


def test_nothing_of_a_call_is_kept_once_it_is_done(connect):
    def script(sock):
        talk = Talk(sock)
        talk.answer(rows(1))
        talk.answer(GREETING)
        talk.ended()

    transport = connect(script)
    ids, into = np.arange(4, dtype=np.int64), blank()
    kept = [weakref.ref(ids), weakref.ref(into)]
    transport.submit(Pull(1, (TableIds("items", ids),)), PATIENCE, [into]).result()
    ask(transport)
    del ids, into
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


def test_a_forked_child_is_told_to_connect_by_itself(connect):
    transport = connect(polite)
    assert ask(transport) == GREETING
    child = os.fork()
    if not child:
        status = 1
        with suppress(BaseException):
            try:
                transport.submit(Hello(), PATIENCE)
            except RuntimeError as error:
                own = StreamTransport(transport.address)
                status = 0 if "forked" in str(error) and ask(own) == GREETING else 2
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert ask(transport) == GREETING


def hears(scripted: Callable[..., Scripted], address: str, *listeners: socket.socket) -> list[int]:
    """The connections that each listener gets when a transport asks at `address`."""
    servers = [scripted(polite, listener=one) for one in listeners]
    transport = StreamTransport(address)
    assert ask(transport) == GREETING
    transport.close()
    return [server.connections for server in servers]


def beside(ip: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(local_socket(ip, port))
    sock.listen()
    return sock


only_linux = pytest.mark.skipif(sys.platform != "linux", reason="abstract names are Linux's")


@only_linux
@pytest.mark.parametrize("ip", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("scheme", ["", "tcp://"])
def test_a_shard_on_this_machine_is_reached_over_its_unix_socket_unless_tcp_is_asked_for(scripted, ip, scheme):
    tcp = socket.create_server((ip, 0))
    port = tcp.getsockname()[1]
    got = hears(scripted, f"{scheme}localhost:{port}", tcp, beside(ip, port))
    assert got == ([1, 0] if scheme else [0, 1])


@only_linux
def test_a_proxy_on_another_port_is_not_passed_by(scripted):
    shard, proxy = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    local = beside("127.0.0.1", shard.getsockname()[1])
    assert hears(scripted, f"127.0.0.1:{proxy.getsockname()[1]}", proxy, shard, local) == [1, 0, 0]


@only_linux
def test_a_unix_socket_of_another_user_is_not_used(scripted, monkeypatch):
    tcp = socket.create_server(("127.0.0.1", 0))
    port = tcp.getsockname()[1]
    if os.getuid() == 0:
        os.seteuid(65534)
    try:
        squatted = beside("127.0.0.1", port)
    finally:
        os.seteuid(os.getuid())
    if os.getuid():
        monkeypatch.setattr(os, "getuid", lambda: 4321)
    assert connect_local(local_socket("127.0.0.1", port)) is None
    assert hears(scripted, f"127.0.0.1:{port}", tcp)[0] == 1
    squatted.close()


@pytest.mark.parametrize("host", ["10.0.0..1", "no-such-host.invalid"])
def test_a_host_that_cannot_be_is_said_at_every_call_and_at_once(host):
    transport = StreamTransport(f"{host}:7700")
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(Unreachable) as caught:
            transport.submit(Hello(), PATIENCE).result()
        assert "no answer" not in caught.value.reason
    assert time.monotonic() - start < PATIENCE.total_seconds()
    transport.close()


def test_what_waits_behind_a_large_request_does_not_end_the_connection(scripted, listener):
    """As a member's beat does: the bytes that arrive say that the shard is there."""

    def script(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        talk = Talk(sock)
        for _ in range(8):  # far longer than the beat's deadline
            talk._frames += talk._reader.received(sock.recv_into(talk._reader.buffer()[: 2**16]))
            time.sleep(0.1)
        talk.send(talk.reply(talk.request(), rows(1.0)), talk.reply(talk.request(), RendezvousResult((0,), (nothing,))))
        talk.answer(GREETING)

    transport = StreamTransport(scripted(script, polite, listener=listener).address)
    ids, nothing = np.arange(8_000_000, dtype=np.int64), np.empty(0, np.uint8)
    large = transport.submit(Pull(1, (TableIds("items", ids),)), PATIENCE)
    with pytest.raises(Unreachable, match="no answer"):
        transport.submit(Rendezvous(0, 1, "here", nothing), SHORT).result()
    assert isinstance(large.result(), Rows)
    assert ask(transport) == GREETING
    transport.close()


def test_a_connection_that_swallows_all_and_says_nothing_is_left(scripted, listener):
    over = threading.Event()

    def script(sock):
        Talk(sock).answer(GREETING)
        over.wait(20)

    transport = StreamTransport(scripted(script, polite, listener=listener).address)
    assert ask(transport) == GREETING
    with pytest.raises(Unreachable, match="no answer"):
        ask(transport, SHORT)
    assert ask(transport) == GREETING
    over.set()
    transport.close()


def test_a_client_that_was_closed_says_so_at_once(stream_shard):
    client = Client.connect([stream_shard], timeout=PATIENCE)
    client.close()
    start = time.monotonic()
    with pytest.raises(ClientClosed, match="this session was closed; connect again"):
        client.status()
    assert time.monotonic() - start < PATIENCE.total_seconds() / 2


def test_a_shard_of_version_1_is_told_from_something_else(connect):
    def old(sock):
        sock.recv(wire.HELLO_BYTES, socket.MSG_WAITALL)
        sock.sendall(bytes.fromhex("454d42534852440a 0100 0100 00000000"))  # its range, and it closes

    with pytest.raises(WrongVersion) as refused:
        ask(connect(old))
    own = {"own_lowest": wire.OLDEST_VERSION, "own_highest": wire.VERSION}
    assert refused.value.fields == {"lowest": 1, "highest": 1, **own}
