"""The worker's side of the stream transport against shards that do what they should not: scripts over raw sockets."""

import asyncio
import gc
import os
import socket
import sys
import threading
import time
import tracemalloc
import weakref
from contextlib import closing, suppress
from datetime import timedelta
from functools import cached_property
from itertools import count

import numpy as np
import pytest

from embershard.proto import messages as m
from embershard.proto import wire
from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.errors import BadFrame, ClientClosed, NotAShard, UnknownTable, WrongDim, WrongVersion, to_wire
from embershard.proto.protobuf import head_bytes
from embershard.proto.routing import make_route
from embershard.proto.transport import io_thread, stream
from embershard.proto.transport.io_thread import connect_local
from embershard.proto.transport.stream import StreamTransport
from embershard.proto.transport.stream_connection import StreamConnection
from embershard.proto.transport.transport import Unreachable
from embershard.proto.wire import Feature, FrameReader, local_socket
from embershard.worker.client.client import Client
from harness.eventually import eventually
from harness.hostile_peers import Peer
from harness.shards import table

PATIENCE = timedelta(seconds=60)
SHORT = timedelta(seconds=0.3)
GREETING = m.Greeting(
    shard=0, num_shards=1, placement_epoch=1, version="", instance="one", max_message_bytes=64 * 2**20
)
DECLARED = m.Declared(created=True, loading=False)
PUSHED = m.Pushed(duplicate=False, applied=5, skipped=0)
HELLO = m.Hello()
UNKNOWN = UnknownTable(table="t", known="")


class Talk(Peer):
    """One connection of a script, which answers the worker's hello as it first sends or receives a frame."""

    features = Feature.CHECKSUM

    def __init__(self, sock):
        self.sock, self._frames = sock, []
        sock.settimeout(20)

    @cached_property
    def checksum(self) -> bool:
        answer, agreed = wire.server_hello(self.sock.recv(16, socket.MSG_WAITALL), self.features)
        self.sock.sendall(answer)
        return agreed.features == Feature.CHECKSUM

    @cached_property
    def _reader(self):
        place = lambda header: [np.empty(length, np.uint8).data for length in header.lengths]  # noqa: E731
        return FrameReader(MAX_MESSAGE_BYTES, place, checksum=self.checksum)

    def request(self) -> int:
        """The call number of the next request. ConnectionError where there is none."""
        frame = self.receive()
        if frame is None:
            raise ConnectionError("the worker has left")
        return frame.header.call

    def frame(self, call, reply) -> bytes:
        """A reply, or an error, to a call."""
        if isinstance(reply, Exception):
            return b"".join(wire.encode(m.ERROR_KIND, call, 0, to_wire(reply)[1], checksum=self.checksum))
        kind = m.KIND_OF[type(reply)]
        return b"".join(wire.encode(kind, call, 0, head_bytes(reply), m.arrays(reply), checksum=self.checksum))

    def answer(self, *replies) -> None:
        for reply in replies:
            self.send(self.frame(self.request(), reply))

    def until_left(self) -> None:
        with suppress(ConnectionError):
            while self.sock.recv(2**20):
                pass


class Scripted:
    """A listener that gives the n-th connection to the n-th script, and the last one to all others."""

    def __init__(self, listener, *scripts):
        self.listener, self.connections, self.ended, self.failures = listener, 0, 0, []
        self._scripts = scripts
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        name = listener.getsockname()
        self.address = f"unix:{name}" if isinstance(name, str) else f"tcp://{name[0]}:{name[1]}"

    def _accept(self):
        with suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                script = self._scripts[min(self.connections, len(self._scripts) - 1)]
                self.connections += 1
                self._threads.append(threading.Thread(target=self._run, args=(script, sock)))
                self._threads[-1].start()

    def _run(self, script, sock):
        with sock:
            try:
                script(Talk(sock))
            except ConnectionError:
                pass  # the worker leaves when it wants to
            except BaseException as error:
                self.failures.append(error)
        self.ended += 1

    def stop(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self._threads:
            thread.join(20)
        assert not self.failures


@pytest.fixture
def scripted():
    started = []

    def start(*scripts, listener=None):
        started.append(Scripted(listener or socket.create_server(("127.0.0.1", 0)), *scripts))
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def connect(scripted):
    """A transport to a shard that follows scripts."""
    transports = []

    def to(*scripts, checksum=False, listener=None):
        server = scripted(*scripts, listener=listener)
        transports.append(StreamTransport(server.address, checksum=checksum))
        transports[-1].server = server
        return transports[-1]

    yield to
    for transport in transports:
        transport.close()


@pytest.fixture
def late():
    """Set when a deadline has passed."""
    return threading.Event()


@pytest.fixture(params=["tcp", "unix"])
def listener(request, tmp_path):
    return socket.create_server(("127.0.0.1", 0)) if request.param == "tcp" else unix_listener(str(tmp_path / "socket"))


def unix_listener(name):
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(name)
    sock.listen()
    return sock


def polite(talk):
    """A shard that greets whoever asks anything."""
    while True:
        talk.answer(GREETING)


def ask(transport):
    return transport.submit(HELLO, PATIENCE).result()


def unanswered(transport, request=HELLO, into=()):
    """A request meets its deadline, which is soon."""
    with pytest.raises(Unreachable, match="no answer"):
        transport.submit(request, SHORT, into).result()


def pull(num_rows=4) -> m.Pull:
    return m.Pull(1, (m.TableIds("items", np.arange(num_rows, dtype=np.int64)),))


def rows(value, num_rows=4) -> m.Rows:
    return m.Rows((np.full((num_rows, 2), value, np.float32),))


def blank(num_rows=4):
    return np.full((num_rows, 2), -7, np.float32)


def stays(array):
    """Nobody writes into an array that is the caller's again."""
    array[...] = 42
    for _ in range(10):
        time.sleep(0.02)
        assert (array == 42).all()


def flipped(talk):
    assert talk.checksum
    reply = bytearray(talk.frame(1, rows(2)))
    reply[-1] ^= 1
    talk.send(bytes(reply))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (lambda talk: talk.send(b"HTTP/1.1 400 Bad Request\r\n\r\nwhat was that?"), "the magic of a frame"),
        (lambda talk: talk.send(talk.frame(1, rows(1))[:40]), "the connection broke"),
        (lambda talk: talk.send(talk.frame(0, BadFrame(what="a", got="b", want="c"))), "a is b, not c"),
        (lambda talk: talk.send(b"EMBF\x02\x84\x01\x00" + bytes(12) + b"\1\0\0\5" + bytes(8)), "size of the buf"),
        (lambda talk: None, "the connection broke"),
        (flipped, "the checksum of the buffers"),
    ],
    ids=["garbage", "half a frame", "an error of call 0", "over the limit", "nothing", "a flipped byte"],
)
def test_a_broken_stream_ends_its_calls_and_the_next_call_connects_again(connect, script, words):
    def broken(talk):
        assert talk.request() == 1
        script(talk)

    transport = connect(broken, polite, checksum=script is flipped)
    with pytest.raises(Unreachable, match=words):
        transport.submit(pull(), PATIENCE, [blank()]).result()
    assert ask(transport) == GREETING


def test_a_shard_that_ends_the_connection_while_a_request_is_sent_is_heard(connect, listener):
    def refusing(talk):
        assert talk.checksum is not None  # hello
        talk.sock.recv(1000)
        talk.send(talk.frame(0, BadFrame(what="the size", got="b", want="c")))
        talk.sock.shutdown(socket.SHUT_RDWR)

    transport = connect(refusing, listener=listener)
    large = m.Load("items", 1, np.arange(4_000_000), np.zeros((4_000_000, 4), np.float32), 0)
    with pytest.raises(Unreachable, match="the size is b, not c"):
        transport.submit(large, PATIENCE).result()


def test_a_connection_that_has_ended_is_free_without_a_collection(connect, listener):
    leave = threading.Event()

    def leaving(talk):
        talk.answer(GREETING)
        leave.wait(20)

    transport = connect(leaving, polite, listener=listener)
    gc.disable()
    try:
        assert ask(transport) == GREETING
        ended = weakref.ref(transport._connection)
        leave.set()
        assert eventually(lambda: ended() is None)
    finally:
        gc.enable()


def test_the_connections_of_a_client_that_nobody_has_and_nobody_closed_end(connect):
    left = threading.Event()

    def script(talk):
        talk.answer(GREETING)
        with suppress(ConnectionError):
            talk.request()
        left.set()

    client = Client([connect(script)], timeout=PATIENCE)
    assert not left.wait(0.2)
    del client
    gc.collect()
    assert left.wait(20)


def test_a_transport_that_nobody_has_answers_the_calls_under_way_before_it_closes(connect):
    go = threading.Event()

    def script(talk):
        talk.answer(GREETING)
        call = talk.request()
        go.wait(20)
        talk.send(talk.frame(call, GREETING))

    transport = connect(script)
    assert ask(transport) == GREETING
    under_way = transport.submit(HELLO, PATIENCE)
    transport.release()
    time.sleep(0.3)
    assert not transport.closed
    go.set()
    assert under_way.result() == GREETING
    assert eventually(lambda: transport.closed)


def test_what_is_no_reply_to_its_call_is_an_error_or_dropped_and_the_connection_goes_on(connect):
    def script(talk):
        talk.answer(DECLARED, rows(1))
        talk.send(b"".join(wire.encode(m.ERROR_KIND, talk.request(), 0, b"\xff not json", checksum=False)))
        talk.send(b"".join(wire.encode(m.KIND_OF[m.Greeting], talk.request(), 0, b"\xff\xff", checksum=False)))
        talk.answer(UNKNOWN)
        call = talk.request()
        talk.send(talk.frame(call + 1, rows(1, 100_000)) + talk.frame(call + 2, GREETING))  # to nobody's calls
        talk.send(talk.frame(call, GREETING))

    transport = connect(script)
    for words in (*["its reply is of kind"] * 2, "an error that this", "no Greeting message", "no table 't' here"):
        with pytest.raises(Exception, match=words):
            ask(transport)
    assert ask(transport) == GREETING


@pytest.mark.parametrize("got", [m.Rows(()), rows(1, 3), rows(1, 5), m.Rows(rows(1).tables * 2)])
def test_rows_of_a_wrong_size_do_not_reach_the_callers_memory(connect, got):
    transport, into = connect(lambda talk: talk.answer(got)), blank()
    reply = transport.submit(pull(), PATIENCE, [into]).result()
    assert [len(part) for part in reply.tables] == [part.size for part in got.tables]
    assert (into == -7).all()


@pytest.mark.parametrize(("got", "error"), [(m.Rows(()), NotAShard), (rows(1, 3), WrongDim)])
def test_a_client_says_what_is_wrong_with_rows_of_a_wrong_size(connect, got, error):
    client = Client([connect(lambda talk: talk.answer(GREETING, GREETING, DECLARED, got))], timeout=PATIENCE)
    spec = table(dim=2)
    client.declare(spec)
    with pytest.raises(error):
        client.pull([("items", make_route(np.arange(4), spec.space_key, client.placement))])


def test_a_reply_after_its_deadline_is_dropped_and_the_connection_goes_on(connect, late):
    def script(talk):
        first = talk.request()
        talk.send(talk.frame(99, GREETING))  # the shard lives
        late.wait(20)
        talk.send(talk.frame(first, rows(1)))
        talk.answer(GREETING)

    transport, into = connect(script), blank()
    unanswered(transport, pull(), [into])
    late.set()
    assert ask(transport) == GREETING
    stays(into)


@pytest.mark.parametrize("behind", [False, True], ids=["alone", "behind another reply"])
@pytest.mark.parametrize("num_rows", [4, 100_000])
def test_a_reply_that_is_arriving_at_its_deadline_stops_there(connect, late, behind, num_rows):
    def script(talk):
        talk.answer(GREETING)
        first, second = talk.request(), talk.request()
        reply = talk.frame(second, rows(1, num_rows))
        talk.send((talk.frame(first, GREETING) if behind else b"") + reply[:-16])
        late.wait(20)
        talk.send(reply[-16:])
        talk.until_left()

    transport, into = connect(script, polite), blank(num_rows)
    assert ask(transport) == GREETING  # it is connected
    other = transport.submit(HELLO, PATIENCE)
    unanswered(transport, pull(num_rows), [into])
    late.set()
    stays(into)
    if behind:
        assert other.result() == GREETING
    assert ask(transport) == GREETING


@pytest.mark.parametrize("first", [rows(1), UNKNOWN], ids=["rows", "error"])
@pytest.mark.parametrize("part", [-16, None], ids=["a part of it", "all of it"])
def test_a_second_reply_to_a_call_is_not_written_anywhere(connect, late, first, part):
    def script(talk):
        call = talk.request()
        second = talk.frame(call, rows(2))
        talk.send(talk.frame(call, first) + second[:part])
        late.wait(20)
        talk.send(second[part:] if part else b"")
        talk.until_left()

    transport, into = connect(script, polite), blank()
    with suppress(Unreachable):
        assert (transport.submit(pull(), PATIENCE, [into]).result().tables[0] == 1).all()
    late.set()
    stays(into)


def test_a_request_that_is_still_being_sent_at_its_deadline_is_never_completed(connect, late):
    """Its arrays are the caller's again: what follows would be other bytes."""
    arrived = []

    def script(talk):
        for _ in range(10):  # it lives, and does not read
            talk.send(talk.frame(99, GREETING))
            time.sleep(0.05)
        late.wait(20)
        with suppress(ConnectionError):
            arrived.append(talk.request())

    transport, ids = connect(script, polite), np.arange(4_000_000, dtype=np.int64)
    unanswered(transport, m.Pull(1, (m.TableIds("items", ids),)))
    ids[...] = -1
    late.set()
    assert ask(transport) == GREETING
    assert not arrived


def test_call_numbers_begin_again_behind_the_last_one(connect):
    calls = []

    def script(talk):
        for _ in range(4):
            calls.append(talk.request())
            talk.send(talk.frame(calls[-1], GREETING))

    transport = connect(script)
    transport._numbers = count(2**32 - 2)
    for _ in range(4):
        assert ask(transport) == GREETING
    assert calls == [2**32 - 2, 2**32 - 1, 1, 2]  # 0 is nobody's


def test_a_checksum_is_not_forced_on_a_shard_that_has_none(connect):
    def script(talk):
        talk.features = Feature(0)
        talk.answer(rows(1))

    assert (connect(script, checksum=True).submit(pull(), PATIENCE).result().tables[0] == 1).all()


def test_connections_that_end_at_the_hello_are_left_and_made_again(connect, monkeypatch):
    transport = connect(Talk.until_left, *[lambda talk: talk.checksum] * 3, polite)
    with monkeypatch.context() as patch:
        patch.setattr(stream, "CONNECT_SECONDS", 0.2)
        with pytest.raises(Unreachable, match="says nothing"):
            ask(transport)
    assert eventually(lambda: transport.server.ended == 1), "its connection stays open"
    for _ in range(3):
        with pytest.raises(Unreachable):
            ask(transport)
    assert ask(transport) == GREETING


def test_a_unix_socket_that_is_closed_before_its_connection_is_made_shares_no_memory():
    class Ended(asyncio.Transport):
        def __init__(self):
            with socket.socket(socket.AF_UNIX) as closed:
                super().__init__({"socket": closed})

        def write(self, data):
            """As transports that are closing do."""

    async def begin():
        with closing(StreamTransport("unix:/nowhere")) as owner:
            StreamConnection(owner).connection_made(Ended())

    asyncio.run(begin())


def test_closing_ends_a_connection_that_is_being_made(connect):
    transport = connect(Talk.until_left)
    call = transport.submit(HELLO, PATIENCE)
    assert eventually(lambda: transport.server.connections == 1)
    transport.close()
    with pytest.raises(Unreachable, match="closed by this worker"):
        call.result()
    assert eventually(lambda: transport.server.ended == 1)


def test_a_deadline_before_the_connection_is_there_ends_that_call_alone(connect, late):
    transport = connect(lambda talk: late.wait(20) and polite(talk))
    patient = transport.submit(HELLO, PATIENCE)
    unanswered(transport)
    late.set()
    assert patient.result() == GREETING


def test_the_largest_messages_travel_without_a_copy_and_leave_nothing_behind(connect, listener):
    sent = np.random.default_rng(0).integers(0, 255, MAX_MESSAGE_BYTES, np.uint8).view(np.float32).reshape(-1, 4)
    received = np.zeros_like(sent)

    def script(talk):
        call = talk.request()
        assert tracemalloc.get_traced_memory()[1] < 2 * MAX_MESSAGE_BYTES, "the script's own array, and no second one"
        talk.send(talk.frame(call, PUSHED))
        call = talk.request()
        tracemalloc.reset_peak()
        for piece in wire.encode(m.KIND_OF[m.Rows], call, 0, b"", [sent], checksum=False):
            talk.send(piece)
        talk.until_left()

    transport = connect(script, listener=listener)
    push = m.Push(m.PushToken(0, 1, 1, 1), 0, 1, (m.TableGradients("items", np.empty(0, np.int64), sent, route=5),))
    tracemalloc.start()
    try:
        assert transport.submit(push, PATIENCE).result() == PUSHED
        reply = transport.submit(pull(), PATIENCE, [received]).result()
        assert tracemalloc.get_traced_memory()[1] < 1.5 * MAX_MESSAGE_BYTES
    finally:
        tracemalloc.stop()
    assert reply.tables[0] is received
    assert received.tobytes() == sent.tobytes()


def test_nothing_of_a_call_is_kept_once_it_is_done(connect):
    transport = connect(lambda talk: (talk.answer(rows(1), GREETING), talk.until_left()))
    ids, into = np.arange(4, dtype=np.int64), blank()
    kept = [weakref.ref(ids), weakref.ref(into)]
    transport.submit(m.Pull(1, (m.TableIds("items", ids),)), PATIENCE, [into]).result()
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
                transport.submit(HELLO, PATIENCE)
            except RuntimeError as error:
                own = StreamTransport(transport.address)
                status = 0 if "forked" in str(error) and ask(own) == GREETING else 2
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert ask(transport) == GREETING


def tcp_listener(ip="127.0.0.1"):
    sock = socket.create_server((ip, 0))
    return sock, sock.getsockname()[1]


def reach(address, server):
    """A transport at `address` talks to this server."""
    before = server.connections
    with closing(StreamTransport(address)) as transport:
        assert ask(transport) == GREETING
    assert server.connections == before + 1


only_linux = pytest.mark.skipif(sys.platform != "linux", reason="abstract names are Linux's")


@only_linux
@pytest.mark.parametrize("ip", ["127.0.0.1", "0.0.0.0"])
def test_a_shard_on_this_machine_is_reached_over_its_unix_socket_unless_tcp_or_a_proxy_is_asked_for(scripted, ip):
    (tcp, port), (proxy, other_port) = tcp_listener(ip), tcp_listener()
    local = scripted(polite, listener=unix_listener(local_socket(ip, port)))
    reach(f"tcp://localhost:{port}", scripted(polite, listener=tcp))
    reach(f"localhost:{port}", local)
    reach(f"127.0.0.1:{other_port}", scripted(polite, listener=proxy))


@only_linux
def test_a_unix_socket_of_another_user_is_not_used(scripted, monkeypatch):
    tcp, port = tcp_listener()
    if os.getuid() == 0:
        os.seteuid(65534)
    try:
        squatted = unix_listener(local_socket("127.0.0.1", port))
    finally:
        os.seteuid(os.getuid())
    if os.getuid():
        monkeypatch.setattr(os, "getuid", lambda: 4321)
    assert connect_local(local_socket("127.0.0.1", port)) is None
    reach(f"127.0.0.1:{port}", scripted(polite, listener=tcp))
    squatted.close()


@only_linux
def test_a_shard_of_root_which_serves_no_other_user_at_its_unix_socket_is_asked_over_tcp(monkeypatch, scripted):
    tcp, port = tcp_listener()
    roots = unix_listener(local_socket("127.0.0.1", port))
    monkeypatch.setattr(io_thread, "peer_credentials", lambda sock: (1, 0))
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    reach(f"127.0.0.1:{port}", scripted(polite, listener=tcp))
    roots.close()


@pytest.mark.parametrize("host", ["10.0.0..1", "no-such-host.invalid"])
def test_a_host_that_cannot_be_is_said_at_every_call_and_at_once(host):
    transport = StreamTransport(f"{host}:7700")
    for _ in range(2):
        with pytest.raises(Unreachable) as caught:
            ask(transport)
        assert "no answer" not in caught.value.reason
    transport.close()


def test_what_waits_behind_a_large_request_does_not_end_the_connection(connect, listener):
    """As a member's heartbeat does: the bytes that arrive say that the shard is there."""
    ids, nothing = np.arange(8_000_000, dtype=np.int64), np.empty(0, np.uint8)

    def script(talk):
        talk.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        for _ in range(8):  # far longer than the deadline of the second request
            talk._frames += talk._reader.received(talk.sock.recv_into(talk._reader.buffer()[: 2**16]))
            time.sleep(0.1)
        talk.answer(rows(1.0), m.RendezvousResult((0,), (nothing,)), GREETING)

    transport = connect(script, polite, listener=listener)
    large = transport.submit(m.Pull(1, (m.TableIds("items", ids),)), PATIENCE)
    unanswered(transport, m.Rendezvous(0, 1, "here", nothing))
    assert isinstance(large.result(), m.Rows)
    assert ask(transport) == GREETING


def test_a_connection_that_swallows_all_and_says_nothing_is_left(connect, late, listener):
    transport = connect(lambda talk: (talk.answer(GREETING), late.wait(20)), polite, listener=listener)
    assert ask(transport) == GREETING
    unanswered(transport)
    assert ask(transport) == GREETING
    late.set()


def test_the_system_ends_a_connection_whose_other_end_is_gone_within_a_call(stream_shard):
    transport = StreamTransport(stream_shard)
    with closing(transport):
        transport.submit(HELLO, PATIENCE).result()
        sock = transport._connection._socket
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle, pause, probes = (sock.getsockopt(socket.IPPROTO_TCP, option) for option in options)
        assert idle + pause * probes <= 30
        assert 10_000 <= sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000


def test_a_client_that_was_closed_says_so_at_once(stream_shard):
    client = Client.connect([stream_shard], timeout=PATIENCE)
    client.close()
    start = time.monotonic()
    with pytest.raises(ClientClosed):
        client.status()
    assert time.monotonic() - start < PATIENCE.total_seconds() / 2


def test_a_shard_of_version_1_is_told_from_something_else(connect):
    def old(talk):
        talk.sock.recv(wire.HELLO_BYTES, socket.MSG_WAITALL)
        talk.send(bytes.fromhex("454d42534852440a 0100 0100 00000000"))  # its range, and it closes

    with pytest.raises(WrongVersion) as refused:
        ask(connect(old))
    own = {"own_lowest": wire.OLDEST_VERSION, "own_highest": wire.VERSION}
    assert refused.value.fields == {"lowest": 1, "highest": 1, **own}
