"""The shard's side of the stream transport, with peers that do what they should not: raw sockets against a shard in
this process. Each gets a typed error or is dropped by its deadline, and others are served meanwhile."""

import asyncio
import errno
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace

import grpc
import numpy as np
import pytest

from embershard.proto import embershard_pb2 as pb
from embershard.proto import wire
from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.errors import ShardBusy
from embershard.proto.messages import SERVICE, Hello, Push, Pushed, PushToken, Rendezvous, Rows
from embershard.proto.wire import Feature
from embershard.ps.transport import grpc as transport_grpc
from embershard.ps.transport import pipe as pipe_module
from embershard.ps.transport import stream, stream_connection
from harness.eventually import eventually
from harness.hostile_peers import Peer, begun, connected, framed, pull, push
from harness.shards import join

WAITING = replace(pull(), epoch=1, required_clock=1)
HTTP2 = b"PRI * HTTP/2.0"


@pytest.fixture
def quick(monkeypatch):
    """Deadlines that a test can wait for."""
    monkeypatch.setattr(stream_connection, "HELLO_SECONDS", 0.3)
    for name, seconds in {"STALL": 0.3, "PRESSED": 0.1, "SWEEP": 0.05}.items():
        monkeypatch.setattr(stream, f"{name}_SECONDS", seconds)


def test_a_frame_cut_anywhere_changes_nothing_and_leaves_nothing_behind(connect, served):
    whole = framed(push(20_000))  # larger than what is received at once
    for cut in [1, 15, 31, 32, 40, 60, 200, 160_000, len(whole) - 1]:
        peer = connect()
        peer.send(whole[:cut])
        peer.sock.close()
    watcher = connect()
    assert eventually(lambda: served.connections == 2 and served.stream.receiving_bytes == 0)
    assert not watcher.ask(pull()).tables[0].any()


@pytest.mark.parametrize(
    ("request_", "by_loop"), [(push(1500), True), (push(5000), False), (pull(1500), True), (pull(5000), False)]
)
def test_a_request_that_is_small_for_its_kind_is_answered_without_the_apply_thread(
    connect, served, monkeypatch, request_, by_loop
):
    handle, threads = served.shard.handle, []
    monkeypatch.setattr(
        served.shard, "handle", lambda *given: (threads.append(threading.current_thread()), handle(*given))[1]
    )
    connect().ask(request_)
    assert (threads[-1] is served._thread) == by_loop


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("said", [b"", wire.MAGIC[:3], wire.MAGIC, wire.client_hello(Feature(0))[:15]])
def test_a_peer_that_does_not_finish_its_hello_is_dropped(served, said):
    peer = Peer(served.address, None)
    peer.send(said)
    assert peer.was_dropped()
    peer.sock.close()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("sent", [1, 31, 50, 150_000])
def test_a_frame_that_is_never_finished_is_dropped(connect, served, sent):
    peer, other = connect(), connect()
    peer.send(framed(push(20_000))[:sent])
    assert peer.was_dropped()
    assert served.stream.receiving_bytes == 0
    assert isinstance(other.ask(pull()), Rows)


@pytest.mark.usefixtures("quick")
def test_a_frame_that_drips_is_dropped(connect):
    peer = connect()

    def drip():
        for byte in framed(push(20_000))[:1000]:
            peer.send(bytes([byte]))
            time.sleep(0.02)

    with pytest.raises(ConnectionError):
        drip()


@pytest.mark.usefixtures("quick")
def test_a_peer_may_be_silent_between_calls_for_as_long_as_it_likes(connect):
    peer = connect()
    assert isinstance(peer.ask(pull()), Rows)
    time.sleep(0.6)
    assert isinstance(peer.ask(pull()), Rows)


def test_rows_are_not_made_for_a_peer_that_does_not_read(connect, served):
    """200 pulls of 8 MiB each: about UNSENT_BYTES of them are made, the others are told to come back."""
    slow, other = connect(receive_bytes=4096), connect()
    asking = threading.Thread(target=slow.ask_all, args=([pull(2000, "wide")] * 200,))
    asking.start()
    assert eventually(lambda: served.unsent_bytes() > stream_connection.UNSENT_BYTES)
    for _ in range(20):
        assert isinstance(other.ask(pull()), Rows)
        assert served.unsent_bytes() < 2 * stream_connection.UNSENT_BYTES + 2 * 2**23
    slow.sock.shutdown(socket.SHUT_RDWR)
    asking.join(20)
    slow.sock.close()
    assert eventually(lambda: served.unsent_bytes() == 0)


def join_both(peer):
    for worker in range(2):
        peer.ask(join(worker, workers=2))


def clock_0(worker: int) -> Push:
    return Push(PushToken(worker, 1, 1, 1), 0, 1, ())


def test_rows_are_not_made_for_a_peer_that_left_while_it_waited(connect, served):
    peer, other, apply = connect(), connect(), served.dispatch._apply
    join_both(other)
    peer.send(framed(WAITING))
    assert eventually(lambda: len(apply._parked) == 1)
    made, before = served.stream.made_bytes, served.connections
    peer.sock.close()
    assert eventually(lambda: served.connections == before - 1)
    for worker in range(2):
        other.ask(clock_0(worker))
    assert eventually(lambda: not apply._parked and apply.queued_bytes == 0)
    assert served.stream.made_bytes == made


def test_a_worker_whose_request_still_arrives_keeps_its_lease(connect, served):
    """On a slow link it may take longer than the lease, and the heartbeats behind it with it."""
    slow, other = connect(), connect()
    slow.ask(join(workers=2, lease_ms=1000))
    other.ask(join(1, workers=2))
    slow.send(begun(8 + 1000))
    for _ in range(13):
        time.sleep(0.1)
        slow.send(b"x")
    members = lambda: [member.worker for member in served.dispatch.status().members]  # noqa: E731
    assert members() == [0, 1]
    assert eventually(lambda: members() == [1])


def test_what_a_peer_waited_for_and_does_not_read_counts_as_unsent(connect, served):
    slow, other = connect(receive_bytes=4096), connect()
    join_both(other)
    said = Rendezvous(0, 1, "a meeting", np.zeros(2**24, np.uint8))
    slow.send(framed(said))
    slow.send(framed(replace(pull(2000, "wide"), epoch=1, required_clock=1)))
    assert eventually(lambda: len(served.dispatch._apply._parked) == 2)
    other.send(framed(replace(said, worker=1)))
    for worker in range(2):
        other.ask(clock_0(worker))
    assert eventually(lambda: served.unsent_bytes() > 2**25)
    assert served.stream.made_bytes > 2**26 + 8_000_000


def test_a_peer_whose_machine_is_gone_is_noticed_by_the_system(connect, served):
    (connection,) = served.stream.connections
    sock = connection._transport.get_extra_info("socket")
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 60


def test_many_slow_readers_share_one_bound(connect, served, monkeypatch):
    monkeypatch.setattr(stream, "ALL_UNSENT_BYTES", 2**26)
    others, apply = set(served.stream.connections), served.dispatch._apply
    for _ in range(20):
        connect(receive_bytes=4096).ask_all([pull(1000, "wide")] * 3)  # 240 MiB, and no connection at its own bound
    of_slow = lambda: served.stream.connections - others  # noqa: E731
    assert eventually(lambda: apply.queued_bytes == 0 and all(c._received > 3 * 8000 for c in of_slow()))
    assert connect().ask(push()) == Pushed(duplicate=False, applied=3, skipped=0)
    assert 2**25 < served.unsent_bytes() < 2**26 + 2 * 2**22


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("asks_on", [False, True])
def test_a_peer_that_reads_nothing_is_dropped(connect, served, asks_on):
    slow, other = connect(receive_bytes=4096), connect()
    slow.send(framed(pull(8000, "wide")))
    with suppress(OSError):
        while asks_on and served.connections > 2:
            slow.send(framed(Hello()))
            time.sleep(0.05)
    assert eventually(lambda: served.connections == 2)
    assert isinstance(other.ask(pull()), Rows)


def test_a_peer_that_half_closes_has_its_push_applied_once_and_is_let_go(connect, served):
    peer, other = connect(), connect()
    peer.send(framed(push()))
    peer.sock.shutdown(socket.SHUT_WR)
    assert peer.was_dropped()
    assert eventually(lambda: served.connections == 2)
    assert other.ask(push()) == Pushed(duplicate=True, applied=3, skipped=0)


@pytest.mark.usefixtures("quick")
def test_frames_that_only_begin_hold_others_up_for_a_moment(connect, served):
    """Small calls go on at once; large ones once those who do not go on were dropped."""
    for _ in range(20):
        connect().send(begun(MAX_MESSAGE_BYTES))
    other = connect()
    assert eventually(lambda: served.stream.receiving_bytes == stream_connection.RECEIVING_BYTES)
    assert isinstance(other.ask(pull()), Rows)
    with pytest.raises(ShardBusy) as caught:
        other.ask(push(20_000))
    assert caught.value.fields["queued_bytes"] == stream_connection.RECEIVING_BYTES

    def accepted():
        with suppress(ShardBusy):
            return isinstance(other.ask(push(20_000)), Pushed)

    assert eventually(accepted)
    assert served.stream.receiving_bytes <= stream_connection.RECEIVING_BYTES


def test_a_request_whose_caller_no_longer_waits_gets_no_reply(connect, served):
    peer, apply = connect(), served.dispatch._apply
    hold, entered = threading.Event(), threading.Event()
    apply.submit(lambda: entered.set() or hold.wait(20), 0, time.monotonic() + 20)
    entered.wait(20)
    peer.send(framed(pull(), call=1, timeout_ms=1))
    peer.send(framed(pull(), call=2))
    assert eventually(lambda: apply.queued_bytes > 30)
    time.sleep(0.01)
    hold.set()
    assert peer.receive().header.call == 2


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def grpc_path(monkeypatch, serve_grpc):
    """A gRPC server's private socket; its shard is another than the stream's."""
    options = dict(transport_grpc.SERVER_OPTIONS)
    assert options["grpc.server_handshake_timeout_ms"] <= 10_000
    shorter = {**options, "grpc.server_handshake_timeout_ms": 300}
    monkeypatch.setattr(transport_grpc, "SERVER_OPTIONS", list(shorter.items()))
    serve_grpc(f"unix-abstract:embershard-test-{os.getpid()}")
    return f"\0embershard-test-{os.getpid()}"


def test_grpc_at_the_same_port_is_passed_on_and_leaves_nothing_behind(serve, grpc_path):
    served = serve(grpc_path)

    def call():
        address, options = served.address.removeprefix("tcp://"), [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(address, options=options) as channel:
            return channel.unary_unary(f"/{SERVICE}/Hello")(b"", timeout=20)

    assert pb.Greeting.FromString(call()).num_shards == 1
    before = open_descriptors()
    for _ in range(10):
        call()
    assert eventually(lambda: open_descriptors() <= before)
    assert served.connections == 0


def test_a_connection_to_grpc_that_says_nothing_is_closed(serve, grpc_path):
    served = serve(grpc_path)
    with connected(served.address) as peer:
        peer.sendall(HTTP2[:3])
        peer.sendall(HTTP2[3:9])
        while peer.recv(1024):
            pass
    assert eventually(lambda: served.stream.open_connections == 0)


def test_connections_over_the_limit_are_refused_and_those_passed_on_count(serve, grpc_path, monkeypatch):
    served = serve(grpc_path)
    monkeypatch.setattr(served.stream, "max_connections", 2)
    with connected(served.address) as foreign:
        foreign.sendall(HTTP2)
        assert eventually(lambda: served.stream.open_connections == 1)
        peer = Peer(served.address)
        with connected(served.address) as third, suppress(ConnectionError):
            third.sendall(wire.client_hello(Feature(0)))
            assert third.recv(1) == b""
        peer.sock.close()
        assert eventually(lambda: served.stream.open_connections == 1)
        Peer(served.address).sock.close()
    assert eventually(lambda: served.stream.open_connections == 0)


def test_connections_leave_some_of_the_files_that_the_process_may_open(serve, monkeypatch):
    served = serve()
    with connected(served.address) as first:
        assert eventually(lambda: served.connections == 1)
        monkeypatch.setattr(served.stream, "last_file", 0)
        with connected(served.address) as second, suppress(ConnectionError):
            assert second.recv(1) == b""
        first.sendall(wire.client_hello(Feature(0)))
        assert first.recv(1)
        assert served.stream.rejected["connections"] == 1


def test_a_connection_to_grpc_counts_as_three_files(serve, grpc_path, monkeypatch):
    served = serve(grpc_path)
    monkeypatch.setattr(served.stream, "first_file", served.stream.last_file - 5)
    with connected(served.address) as first:
        first.sendall(HTTP2)
        assert first.recv(1)
        with connected(served.address) as second, suppress(ConnectionError):
            second.sendall(HTTP2)
            assert second.recv(1) == b""
        assert served.stream.rejected["connections"] == 1


def test_a_connection_for_which_no_socket_can_be_made_is_not_passed_on(serve, grpc_path, monkeypatch):
    served = serve(grpc_path)

    def full(path, name):
        raise OSError(errno.EMFILE, "full")

    monkeypatch.setattr(pipe_module, "_connected", full)
    with connected(served.address) as peer, suppress(ConnectionError):
        peer.sendall(HTTP2)
        assert peer.recv(1) == b""
    assert eventually(lambda: served.stream.open_connections == 0)


@pytest.fixture
def pipe(serve, tmp_path):
    """A peer of something else than the stream, and the other end, at a Unix socket, that it is passed on to."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/grpc")
        listener.listen()
        peer = Peer(serve(f"{tmp_path}/grpc").address, None, receive_bytes=4096)
        peer.send(HTTP2)
        far, _ = listener.accept()
        with peer.sock, far:
            far.settimeout(20)
            assert far.recv(len(HTTP2), socket.MSG_WAITALL) == HTTP2
            yield peer.sock, far


def test_what_is_passed_on_is_read_no_faster_than_the_other_side_reads(pipe):
    near, far = pipe
    sent, stood_still = 0, 0
    far.setblocking(False)
    while stood_still < 3:  # tenths of a second
        try:
            sent += far.send(bytes(2**16))
            stood_still = 0
        except BlockingIOError:
            stood_still += 1
            time.sleep(0.1)
        assert sent < 2**24
    while sent < 2**25:
        near.recv(2**20)
        with suppress(BlockingIOError):
            sent += far.send(bytes(2**16))


@pytest.mark.parametrize("first", ["peer", "foreign"])
def test_when_one_end_of_a_pipe_leaves_the_other_is_told(pipe, first):
    (near, far), before = pipe, open_descriptors()
    if first == "peer":
        near.shutdown(socket.SHUT_WR)
        assert far.recv(1) == b""
    far.sendall(b"farewell")
    far.close()
    assert near.recv(9, socket.MSG_WAITALL) == b"farewell"  # and the end
    near.close()
    assert eventually(lambda: open_descriptors() <= before - 4)  # both ends, and the shard's two


@pytest.mark.parametrize("foreign", ["", "nobody"], ids=["no foreign server", "a foreign server that is gone"])
def test_a_peer_with_another_protocol_is_dropped_where_nobody_speaks_it(serve, tmp_path, foreign):
    peer = Peer(serve(foreign and f"{tmp_path}/{foreign}").address, None)
    peer.send(HTTP2 + b"\r\n\r\nSM\r\n\r\n")
    assert peer.was_dropped()
    peer.sock.close()


def test_closing_sends_what_waits_to_be_read(connect, served):
    peer = connect(receive_bytes=4096)
    peer.send(framed(pull(8000, "wide")))
    assert eventually(lambda: served.unsent_bytes() > 2**24)
    ending = asyncio.run_coroutine_threadsafe(served.stream.close(20.0), served.loop)
    assert isinstance(peer.reply(), Rows)
    assert peer.was_dropped()
    ending.result(20)


def test_what_arrived_is_not_counted_as_arriving_however_frames_share_a_read(served, connect):
    peer = connect()
    two, third = framed(pull(1000), call=1) + framed(pull(2000), call=2), framed(pull(3000), call=3)
    peer.send(two + third[:5000])
    assert [len(peer.reply().tables[0]) for _ in range(2)] == [4000, 8000]
    assert eventually(lambda: served.stream.receiving_bytes == 24_000)
    peer.send(third[5000:])
    assert isinstance(peer.reply(), Rows)
    assert served.stream.receiving_bytes == 0
    peer.send(two + third[:5000])
    peer.sock.close()
    assert eventually(lambda: served.connections == 1)
    assert served.stream.receiving_bytes == 0
