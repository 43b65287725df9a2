"""The worker's side of shared memory: what it gives to a shard, and what it does with it when no answer comes."""

import gc
import socket
import struct
import threading
from contextlib import suppress
from datetime import timedelta

import numpy as np
import pytest

from embershard.proto import messages as m
from embershard.proto import shared_memory, wire
from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.errors import NotAShard, UnknownTable, to_wire
from embershard.proto.protobuf import head_bytes, read
from embershard.proto.shared_memory import SharedHeap, SharedMemory
from embershard.proto.transport import stream, stream_connection
from embershard.proto.transport.emulated_link import EmulatedLink
from embershard.proto.transport.io_thread import io_loop
from embershard.proto.transport.stream import StreamTransport
from embershard.proto.transport.transport import Unreachable
from embershard.proto.wire import IN_FRAME, Feature, FrameReader
from harness.eventually import eventually
from harness.raises import raises

PATIENCE, SHORT = timedelta(seconds=60), timedelta(seconds=0.3)
ROWS, DIM = 512, 32
IDS = np.arange(ROWS, dtype=np.int64)
PULL = m.Pull(1, (m.TableIds("items", IDS),))


class Shard:
    """Connections to a Unix socket whose first requests `answer` answers; with the memory that came with the hello."""

    def __init__(self, path, answer, shares):
        self.address, self.files, self.frames = f"unix:{path}", [], []  # descriptors, and frames that have come
        self._answer, self._shares = answer, shares
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        with suppress(OSError):
            while True:
                self._threads.append(threading.Thread(target=self._serve, args=(self._listener.accept()[0],)))
                self._threads[-1].start()

    def _serve(self, sock):
        self.sock = sock
        with sock, suppress(ConnectionError):
            hello, ancillary, _, _ = sock.recvmsg(16, socket.CMSG_LEN(4))
            memory = None
            for _, _, data in ancillary:
                self.files += struct.unpack("i", data)
                memory = SharedMemory(self.files[-1], shared_memory.HEAP_BYTES)
            answer, agreed = wire.server_hello(hello, Feature.SHARED_MEMORY if self._shares else Feature(0))
            sock.sendall(answer)
            place = lambda header: [  # noqa: E731
                np.empty(length, np.uint8).data if offset == IN_FRAME else memory.view(offset, length)
                for length, offset in zip(header.lengths, header.offsets or [IN_FRAME] * 9, strict=False)
            ]
            reader = FrameReader(MAX_MESSAGE_BYTES, place, checksum=False, has_memory=bool(agreed.features))
            while count := sock.recv_into(reader.buffer()):
                for frame in reader.received(count):
                    self.frames.append(frame)
                    if (data := self._answer(frame)) is not None:
                        sock.sendall(data)

    def stop(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(20)


@pytest.fixture(autouse=True)
def _small_arrays(monkeypatch):
    """Arrays of 32 KiB lie in shared memory, too."""
    monkeypatch.setattr(shared_memory, "SHARED_FROM_BYTES", 2**15)
    monkeypatch.setattr(stream, "SHARED_FROM_BYTES", 2**15)


@pytest.fixture
def heap(monkeypatch):
    """The heap of this process, which is a new one."""
    made = SharedHeap()
    monkeypatch.setattr(shared_memory, "_heap", made)
    return made


@pytest.fixture
def connect(heap, tmp_path):
    """A transport to a shard that answers like this."""
    started = []

    def to(answer, *, shares=True, link=None):
        shard = Shard(str(tmp_path / "shard"), answer, shares)
        started.append((StreamTransport(shard.address, link=link), shard))
        return started[-1]

    yield to
    for transport, shard in started:
        transport.close()
        shard.stop()


def rows_at(frame, offset, value=7.0):
    """A reply whose rows lie at an offset, where they are written."""
    view = np.frombuffer(frame.buffers[-1], np.float32)
    view[...] = value
    data = wire.encode(132, frame.header.call, 0, b"", [view.data], checksum=False, offsets=[offset])
    return b"".join(data)


def written(frame):
    return rows_at(frame, frame.header.offsets[-1])


def error(frame):
    head = to_wire(UnknownTable(table="items", known=""))[1]
    return b"".join(wire.encode(m.ERROR_KIND, frame.header.call, 0, head, checksum=False))


def greeted(frame):
    greeting = m.Greeting(shard=0, num_shards=1, placement_epoch=1, instance="one", max_message_bytes=2**26)
    return b"".join(wire.encode(129, frame.header.call, 0, head_bytes(greeting), checksum=False))


def nothing(frame):
    return None


def test_a_shard_writes_rows_into_the_array_that_was_given(connect, heap):
    transport, shard = connect(written)
    out = heap.floats(ROWS, DIM)
    reply = transport.submit(PULL, PATIENCE, [out]).result()
    assert reply.tables[0] is out
    assert (out == 7).all()
    assert shard.frames[0].header.bulk_bytes == IDS.nbytes
    assert transport.received_bytes >= out.nbytes
    assert transport.sent_bytes < IDS.nbytes + 200


def push(rows):
    return m.Push(m.PushToken(0, 1, 1, 1), 0, 1, (m.TableGradients("items", IDS, rows),))


def pushed(frame):
    pushed = m.Pushed(duplicate=False, applied=ROWS, skipped=0)
    return b"".join(wire.encode(133, frame.header.call, 0, head_bytes(pushed), checksum=False))


@pytest.mark.parametrize("is_there", [True, False])
def test_gradients_are_read_where_they_lie_or_in_a_copy(connect, heap, is_there):
    transport, shard = connect(pushed)
    rows = heap.floats(ROWS, DIM) if is_there else np.empty((ROWS, DIM), np.float32)
    rows.fill(5)
    transport.submit(push(rows), PATIENCE).result()
    header, buffers = shard.frames[0]
    assert header.bulk_bytes == IDS.nbytes
    assert (header.offsets[1] == heap.offset_of(rows)) == is_there
    assert (read(m.Push, header.head, buffers).tables[0].gradients == 5).all()
    assert transport.sent_bytes > rows.nbytes


def test_a_shard_that_shares_no_memory_gets_all_over_the_socket(connect, heap):
    transport, shard = connect(pushed, shares=False)
    transport.submit(push(heap.floats(ROWS, DIM)), PATIENCE).result()
    assert shard.frames[0].header.lengths == (IDS.nbytes, 4 * ROWS * DIM)
    assert shard.frames[0].header.offsets == ()


@pytest.mark.parametrize("ends", ["connection", "close"])
@pytest.mark.parametrize("kind", ["pull", "push"])
def test_memory_of_a_call_without_an_answer_is_not_used_again(connect, heap, ends, kind):
    transport, shard = connect(nothing)
    rows = heap.floats(ROWS, DIM) if kind == "pull" else np.ones((ROWS, DIM), np.float32)
    request, into = (PULL, [rows]) if kind == "pull" else (push(rows), [])
    call = transport.submit(request, PATIENCE, into)
    assert eventually(lambda: shard.frames)
    if ends == "connection":
        shard._answer = lambda frame: b"x" * 100
        transport.submit(m.Hello(), PATIENCE)
    else:
        transport.close()
    with pytest.raises((Unreachable, NotAShard)):
        call.result()
    assert eventually(lambda: heap.abandoned_bytes == 4 * ROWS * DIM)
    place = shard.frames[0].header.offsets[-1]
    del call, into, rows, request
    gc.collect()
    assert heap.offset_of(heap.floats(ROWS, DIM)) != place


@pytest.mark.parametrize("answer", [written, error])
def test_memory_of_a_late_answer_is_used_again_once_it_has_come(connect, heap, answer):
    """Not before: until then the shard may write there."""
    late = []  # a pull
    transport, shard = connect(lambda frame: greeted(frame) if frame.header.kind == 1 else late.append(frame))
    rows = heap.floats(ROWS, DIM)
    place = heap.offset_of(rows)
    call = transport.submit(PULL, SHORT, [rows])
    transport.submit(m.Hello(), PATIENCE).result()  # so that the connection is not thought to be dead
    with pytest.raises(Unreachable):
        call.result()
    del call, rows
    gc.collect()
    assert heap.offset_of(heap.floats(ROWS, DIM)) != place
    shard.sock.sendall(answer(late[0]))
    assert eventually(lambda: not transport._connection._late)
    gc.collect()
    assert heap.offset_of(heap.floats(ROWS, DIM)) == place
    assert heap.abandoned_bytes == 0


def test_a_shard_of_another_user_is_given_nothing(connect, heap, monkeypatch):
    monkeypatch.setattr(stream_connection, "peer_credentials", lambda _: (1, 12345))
    transport, shard = connect(pushed)
    transport.submit(push(heap.floats(ROWS, DIM)), PATIENCE).result()
    assert shard.files == []
    assert shard.frames[0].header.bulk_bytes > 4 * ROWS * DIM


def test_an_emulated_link_has_to_carry_the_rows(connect, heap):
    transport, shard = connect(pushed, link=EmulatedLink(10**9, io_loop()))
    transport.submit(push(heap.floats(ROWS, DIM)), PATIENCE).result()
    assert shard.files == []


def test_memory_for_more_tables_than_a_frame_has_room_for_is_not_named(connect, heap):
    transport, shard = connect(error)
    out = [heap.floats(ROWS, DIM)[:256] for _ in range(2)] * 1100
    wanted = m.Pull(1, tuple(m.TableIds("items", IDS[:256]) for _ in out))
    with raises(UnknownTable, table="items"):
        transport.submit(wanted, PATIENCE, out).result()
    assert len(shard.frames[0].header.lengths) == 2200


def test_memory_of_a_call_with_an_error_is_used_again(connect, heap):
    transport, _ = connect(error)
    rows = heap.floats(ROWS, DIM)
    with raises(UnknownTable, table="items"):
        transport.submit(PULL, PATIENCE, [rows]).result()
    place = heap.offset_of(rows)
    del rows
    gc.collect()
    assert heap.abandoned_bytes == 0
    assert heap.offset_of(heap.floats(ROWS, DIM)) == place


def test_rows_elsewhere_than_they_may_lie_are_no_answer(connect, heap):
    transport, _ = connect(lambda frame: rows_at(frame, frame.header.offsets[-1] + 4))
    with pytest.raises((NotAShard, Unreachable), match="outside the memory given for it"):
        transport.submit(PULL, PATIENCE, [heap.floats(ROWS, DIM)]).result()


def test_rows_in_memory_that_nobody_gave_are_no_answer(connect, heap):
    def answer(frame):
        data = wire.encode(132, frame.header.call, 0, b"", [np.ones(4, np.float32).data], checksum=False, offsets=[0])
        return b"".join(data)

    transport, _ = connect(answer)
    with pytest.raises((NotAShard, Unreachable), match="outside the memory given for it"):
        transport.submit(PULL, PATIENCE, [np.empty((ROWS, DIM), np.float32)]).result()


def test_a_full_heap_leaves_the_rest_to_the_socket(connect, heap):
    transport, shard = connect(pushed)
    held = heap.floats(heap.nbytes // 4)
    transport.submit(push(np.ones((ROWS, DIM), np.float32)), PATIENCE).result()
    assert held is not None
    assert shard.frames[0].header.offsets == (IN_FRAME, IN_FRAME)
    assert shard.frames[0].header.bulk_bytes == IDS.nbytes + 4 * ROWS * DIM
