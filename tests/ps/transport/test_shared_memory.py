"""What a shard does with the memory of its peers, and with what these say of it."""

import fcntl
import gc
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from embershard.proto import shared_memory
from embershard.proto.errors import BadFrame, InvalidRequest, ShuttingDown
from embershard.proto.errors import from_wire as error_from
from embershard.proto.messages import Declare, Load, Pull, Pushed, Rows, TableGradients, TableIds
from embershard.proto.routing import Placement
from embershard.proto.shared_memory import HEAP_BYTES, SharedHeap
from embershard.proto.wire import IN_FRAME
from embershard.ps.events import PushEvent
from embershard.ps.security.peers import Peer
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.transport import stream_connection
from harness.eventually import eventually
from harness.held_log import HeldLog
from harness.hostile_peers import push
from harness.memory_peer import MemoryPeer
from harness.shards import join, table

ROWS, DIM = 512, 32
IDS = np.arange(ROWS, dtype=np.int64)
WANTED = Pull(1, (TableIds("items", IDS),))
APPLIED = Pushed(duplicate=False, applied=ROWS, skipped=0)


@pytest.fixture(autouse=True)
def _small_arrays(monkeypatch):
    """Arrays of 32 KiB lie in shared memory, too."""
    monkeypatch.setattr(shared_memory, "SHARED_FROM_BYTES", 2**15)


@pytest.fixture
def memory():
    """The shard's budget, by default a part of the machine's memory."""


@pytest.fixture
def served(serve, memory):
    return serve(shard=Shard(0, Placement.even(1), OptimizerRegistry(), memory=memory))


@pytest.fixture
def path(served, tmp_path):
    """The Unix socket of a shard with a table."""
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(tmp_path / "shard"))
    sock.listen(100)
    listener = served.run(served.loop.create_unix_server(served.stream.protocol, sock=sock))
    served.shard.handle(Declare(table("items", DIM)))
    yield str(tmp_path / "shard")
    served.on_loop(listener.close)


@pytest.fixture
def connect(path):
    peers = []

    def peer(file=None):
        peers.append(MemoryPeer(path, file))
        return peers[-1]

    yield peer
    for one in peers:
        one.sock.close()


def gradients(peer, value=1.0, seq=1, worker=0):
    """A push of gradients that lie in shared memory, and these."""
    rows = peer.floats(ROWS, DIM, value=value)
    return replace(push(seq=seq, worker=worker), tables=(TableGradients("items", IDS, rows),)), rows


def ask(peer, request, rooms=(), offsets=()):
    peer.send(peer.framed(request, rooms, offsets))
    return peer.reply()


def test_rows_and_gradients_do_not_travel(served, connect):
    peer = connect()
    assert peer.shares
    request, rows = gradients(peer, 3)
    assert len(peer.framed(request)) < 8 * ROWS + 200
    assert ask(peer, request) == APPLIED
    room = peer.floats(ROWS, DIM, value=np.nan)
    peer.send(peer.framed(WANTED, (room,)))
    frame = peer.receive()
    assert frame.header.offsets == (peer.offset(room),)
    assert frame.header.bulk_bytes == 0
    assert (room == -3).all()
    counted = served.stream.counters
    assert counted.sent_bytes > room.nbytes
    assert counted.received_bytes > rows.nbytes


def test_gradients_up_to_a_size_are_applied_by_the_thread_that_reads(served, connect, monkeypatch):
    threads, handle = [], served.shard.handle

    def noted(*given, **more):
        threads.append(threading.current_thread())
        return handle(*given, **more)

    monkeypatch.setattr(served.shard, "handle", noted)
    peer, seqs = connect(), count(1)
    request, rows = gradients(peer)

    def is_read_and_applied():  # by one thread, if the other does not happen to look at the time
        assert ask(peer, replace(push(seq=next(seqs)), tables=request.tables)) == APPLIED
        return threads[-1] is served._thread

    assert eventually(is_read_and_applied)
    monkeypatch.setattr(stream_connection, "AT_ONCE_SHARED_BYTES", rows.nbytes - 1)
    assert not is_read_and_applied()


def test_rows_travel_where_they_do_not_fit_their_room_or_have_none(served, connect):
    peer = connect()
    served.shard.handle(Declare(table("other", 1)))
    both = Pull(1, (TableIds("items", IDS), TableIds("other", IDS)))
    for room in (peer.floats(ROWS, DIM + 1), peer.floats(ROWS, DIM)[:-1]):
        reply = ask(peer, both, (room, np.empty(0, np.float32)))
        assert isinstance(reply, Rows)
        assert [rows.size for rows in reply.tables] == [ROWS * DIM, ROWS]
        assert not room.any()


def files():
    """Descriptors that are no memory which a shard can use."""
    unsealed = os.memfd_create("test")
    os.ftruncate(unsealed, 2**20)
    read_only, empty = SharedHeap(2**20), os.memfd_create("test", os.MFD_ALLOW_SEALING)
    large, growing = SharedHeap(2 * HEAP_BYTES), os.memfd_create("test", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(empty, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    os.ftruncate(growing, 2**20)
    fcntl.fcntl(growing, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    held = [read_only, large]
    view = os.open(f"/proc/self/fd/{read_only.file}", os.O_RDONLY)
    return {
        "a device": os.open(os.devnull, os.O_RDWR),
        "a file": os.open(__file__, os.O_RDONLY),
        "a pipe": os.pipe()[0],
        "not sealed": unsealed,
        "may shrink": growing,
        "empty": empty,
        "read only": view,
        "too large": large.file,
    }, held


def test_what_is_no_memory_or_may_vanish_is_not_mapped_and_the_socket_serves(served, connect):
    found, _held = files()
    for what, file in found.items():
        peer = connect(file)
        assert not peer.shares, what
        assert isinstance(ask(peer, WANTED), Rows)
    assert served.stream.counters.shared_bytes == 0


@pytest.mark.parametrize("memory", [2**22])
def test_memory_over_half_of_the_budget_is_not_mapped_until_others_have_left(served, connect, caplog):
    peers = [connect() for _ in range(3)]
    assert [peer.shares for peer in peers] == [True, True, False]
    (line,) = [line for line in caplog.messages if "share" in line]
    assert "1 MiB of memory, and 0 MiB are left of 2 (half of --memory" in line
    peers[0].sock.close()
    assert eventually(lambda: served.stream.counters.shared_bytes == 2**20)
    assert connect().shares


def test_memory_of_a_peer_that_has_left_is_unmapped(served, connect):
    peer = connect()
    assert times_mapped(peer.heap.file) == 2  # here, and by the shard, which runs in this process
    assert ask(peer, WANTED, (peer.floats(ROWS, DIM),))
    peer.sock.close()
    assert eventually(lambda: times_mapped(peer.heap.file) == 1 and served.stream.counters.shared_bytes == 0)


def times_mapped(file):
    gc.collect()
    inode = str(os.fstat(file).st_ino)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return sum(fields[4] == inode and "memfd:embershard" in fields[5] for fields in maps if len(fields) > 5)


def test_memory_that_comes_over_several_connections_is_mapped_once(served, connect):
    first = connect()
    others = [connect(first.heap.file) for _ in range(3)]
    assert all(peer.shares for peer in others)
    assert served.stream.counters.shared_bytes == 2**20
    first.sock.close()
    for peer in others[1:]:
        peer.sock.close()
    assert eventually(lambda: served.connections == 1)
    assert served.stream.counters.shared_bytes == 2**20
    others[0].sock.close()
    assert eventually(lambda: served.stream.counters.shared_bytes == 0)


def test_memory_before_a_stream_that_is_passed_on_is_not_kept(served, path):
    heap = SharedHeap(2**20)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        socket.send_fds(sock, [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], [heap.file])
        with suppress(ConnectionError):
            sock.recv(100)
        assert served.stream.counters.shared_bytes == 0


def test_a_python_that_was_built_without_seals_shares_nothing(served, connect, monkeypatch):
    peer = connect()
    monkeypatch.delattr(fcntl, "F_GET_SEALS")
    other = connect(peer.heap.file)
    assert not other.shares
    assert isinstance(ask(other, WANTED), Rows)


def test_a_request_that_nobody_waits_for_is_answered_nevertheless(served, connect):
    """So that its memory can be used again."""
    peer, gate = connect(), threading.Event()
    served.apply.submit(lambda: gate.wait(60), 0, float("inf"))
    rows = peer.floats(ROWS, DIM)
    peer.send(peer.framed(WANTED, (rows,), timeout_ms=100))
    time.sleep(0.3)
    gate.set()
    with pytest.raises(ShuttingDown):
        peer.reply()


def test_a_peer_that_is_not_admitted_is_never_read(served, path, monkeypatch):
    monkeypatch.setattr(stream_connection, "peer_of", lambda _: Peer("uid:12345", 12345))
    monkeypatch.setattr(stream_connection, "received_file", lambda _: pytest.fail("its file was received"))
    with pytest.raises(ConnectionError):
        MemoryPeer(path)
    assert served.stream.counters.shared_bytes == 0


@pytest.mark.parametrize("offset", [2**20 - 4, 2**20, 2**32 - 8, 2, 2**20 - ROWS * DIM * 4 + 4])
@pytest.mark.parametrize("kind", ["pull", "push"])
def test_a_place_outside_ends_the_connection(connect, kind, offset):
    peer = connect()
    request, rows = gradients(peer)
    if kind == "push":
        peer.send(peer.framed(request, offsets=(IN_FRAME, offset)))
    else:
        peer.send(peer.framed(WANTED, (rows,), (IN_FRAME, offset)))
    frame = peer.receive()
    error = error_from(frame.header.head, "")
    assert isinstance(error, BadFrame)
    assert error.fields["what"] == "a place in shared memory"
    assert peer.was_dropped()


def test_buffers_that_lie_in_one_place_do_not_multiply_what_a_message_holds(connect):
    """4,096 times the same MiB: no memory is taken for it."""
    peer = connect()
    rows = peer.floats(2**18 - 16)
    peer.send(peer.framed(WANTED, (rows,) * 4000, (IN_FRAME, *[0] * 4000)))
    error = error_from(peer.receive().header.head, "")
    assert error.fields["what"] == "the size of buffers in shared memory"


def test_nothing_but_gradients_and_rooms_may_lie_there(connect):
    peer = connect()
    rows = peer.floats(ROWS, DIM)
    ids = rows.reshape(-1)[: 2 * ROWS].view(np.int64)
    payload = rows.reshape(-1).view(np.uint8)
    request, _ = gradients(peer)
    for wrong, rooms in [
        (Pull(1, (TableIds("items", ids),)), (rows,)),
        (Pull(1, (TableIds("items", ids),)), ()),
        (WANTED, (rows, rows)),
        (Pull(1, (TableIds("items", IDS, packed=payload[:100]),)), (rows,)),
        (replace(request, tables=(TableGradients("items", ids, rows),)), ()),
        (replace(request, tables=(TableGradients("items", IDS, payload, codec="int8"),)), ()),
        (replace(request, tables=(TableGradients("items", IDS, rows, packed=payload[:100]),)), ()),
        (Load("items", 1, IDS, rows), ()),
    ]:
        with pytest.raises(InvalidRequest):
            ask(peer, wrong, rooms)
    assert ask(peer, request) == APPLIED  # the connection goes on


def test_gradients_that_wait_for_their_clock_are_those_that_were_pushed(served, connect):
    peers = [connect(), connect()]
    for worker in range(2):
        served.shard.handle(join(worker, workers=2))
    for worker, peer in enumerate(peers):
        request, rows = gradients(peer, value=1 + worker, worker=worker)
        ask(peer, request)
        rows.fill(1e6)
    room = peers[0].floats(ROWS, DIM)
    ask(peers[0], WANTED, (room,))
    assert (room == -1.5).all()


def test_rows_never_have_a_value_that_was_not_finite_when_it_was_checked(served, connect):
    peer, ended = connect(), threading.Event()
    _, rows = gradients(peer)

    def flip():
        while not ended.is_set():
            rows.fill(np.nan)
            rows.fill(1)

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        for seq in range(1, 300):
            ask(peer, replace(push(seq=seq), tables=(TableGradients("items", IDS, rows),)))
    finally:
        ended.set()
        thread.join()
    reply = ask(peer, WANTED)
    assert np.isfinite(reply.tables[0]).all()


class SafeLog(HeldLog):
    """Everything is safe at once."""

    def when_safe(self, lsn, call, refuse=None):
        call()


def test_a_log_has_the_bytes_that_were_applied(served, connect):
    log, peer, ended = SafeLog(), connect(), threading.Event()
    served.shard.log_to(log, 0)
    _, rows = gradients(peer)

    def scribble():
        value = 0.0
        while not ended.is_set():
            value += 1
            rows.fill(value)

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for seq in range(1, 60):
            ask(peer, replace(push(seq=seq), tables=(TableGradients("items", IDS, rows),)))
    finally:
        ended.set()
        thread.join()
    pushed = [event.push.tables[0].gradients for event in log.events if isinstance(event, PushEvent)]
    assert len(pushed) == 59
    summed = np.sum(pushed, axis=0, dtype=np.float64)
    np.testing.assert_allclose(ask(peer, WANTED).tables[0], -summed, rtol=1e-5)


def test_a_peer_that_scribbles_harms_nobody(served, connect):
    peer, other, ended = connect(), connect(), threading.Event()
    _, rows = gradients(peer)
    room = peer.floats(ROWS, DIM)
    noise = np.random.default_rng(0).integers(0, 256, rows.nbytes, np.uint8)

    def scribble():
        while not ended.is_set():
            for target in (rows, room):
                target.reshape(-1).view(np.uint8)[:] = noise

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for seq in range(1, 100):
            request = replace(push(seq=seq), tables=(TableGradients("items", IDS, rows),))
            reply = ask(peer, request)
            assert reply.applied + reply.skipped == ROWS
            assert isinstance(ask(peer, WANTED, (room,)), Rows)
    finally:
        ended.set()
        thread.join()
    assert isinstance(ask(other, WANTED), Rows)
    assert not served.defects
