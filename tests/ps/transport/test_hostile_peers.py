"""What a shard answers to frames that no client of ours sends: a typed error, or the end of the connection."""

import re
import socket
import struct
import threading
import time

import numpy as np
import pytest

from embershard.proto import wire
from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.errors import BadFrame, InvalidRequest, MessageTooLarge, ShardBusy, UnknownTable, WrongDim
from embershard.proto.errors import from_wire as error_from
from embershard.proto.messages import (
    ERROR_KIND,
    KIND_OF,
    Declare,
    GetStatus,
    Greeting,
    Hello,
    Load,
    Pull,
    Push,
    Pushed,
    Rendezvous,
    Rows,
    ShardStatus,
)
from embershard.proto.protobuf import head_bytes
from embershard.proto.wire import Feature
from embershard.ps.monitoring.log_lines import PER_MINUTE
from harness.eventually import eventually
from harness.hostile_peers import connected, framed, pull, push, with_field
from harness.shards import table

APPLIED = Pushed(duplicate=False, applied=3, skipped=0)


def error_of_call(peer, call):
    frame = peer.receive()
    assert (frame.header.kind, frame.header.call) == (ERROR_KIND, call)
    return error_from(frame.header.head, "")


@pytest.mark.parametrize(
    ("frame", "what"),
    [
        (with_field(framed(push()), 20, struct.pack("<I", MAX_MESSAGE_BYTES + 1)), "the size of the buffers"),
        (with_field(framed(push()), 24, b"\x01"), "the checksum of buffers that have none"),
        (with_field(framed(push()), 28, bytes(4)), "the checksum of a frame's start"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "the magic of a frame"),
    ],
)
def test_a_wrong_frame_is_named_under_call_0_and_ends_the_connection(connect, frame, what):
    peer, other = connect(), connect()
    peer.send(frame)
    error = error_of_call(peer, 0)
    assert isinstance(error, BadFrame)
    assert error.fields["what"] == what
    assert peer.was_dropped()
    assert isinstance(other.ask(pull()), Rows)


def test_peers_that_send_wrong_frames_over_and_over_do_not_fill_the_log(connect, caplog):
    for _ in range(3 * PER_MINUTE):
        peer = connect()
        peer.send(with_field(framed(push()), 28, bytes(4)))
        assert peer.was_dropped()
    assert 1 <= caplog.text.count("dropping the connection") <= 2 * PER_MINUTE  # a minute may end meanwhile


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        (pull(table="x" * (2**20 - 100)), UnknownTable),
        (push(dim=3), WrongDim),
        (Load("items", 1, np.arange(3), np.ones((3, 5), np.float32)), WrongDim),
        (pull(num_rows=20_000, table="wide"), MessageTooLarge),
    ],
    ids=["a table of 1 MiB", "push", "load", "reply over the limit"],
)
def test_a_refused_request_changes_nothing_and_the_next_is_served(connect, refused, error):
    peer = connect()
    with pytest.raises(error):
        peer.ask(refused)
    assert not peer.ask(pull()).tables[0].any()


@pytest.mark.parametrize(
    ("kind", "head", "buffers"),
    [
        (77, b"", []),
        (77, b"", [bytes(100)]),
        (KIND_OF[Rows], b"", [bytes(100)]),
        (KIND_OF[Pull], b"\xff\xff\xff", [bytes(8)]),
        (KIND_OF[Pull], head_bytes(pull()), [bytes(7)]),
        (KIND_OF[Push], head_bytes(push()), [bytes(8)]),
    ],
    ids=["kind", "kind with arrays", "reply", "head", "half an id", "too few arrays"],
)
def test_a_frame_that_is_no_request_is_answered_by_an_error_of_its_call(connect, kind, head, buffers):
    peer = connect()
    peer.send(b"".join(wire.encode(kind, 7, 60_000, head, buffers, checksum=False)))
    assert isinstance(error_of_call(peer, 7), InvalidRequest)
    assert isinstance(peer.ask(Hello()), Greeting)


@pytest.mark.parametrize(
    ("request_", "buffers", "want"),
    [
        (pull(), [], 1),
        (Load("items", 1, np.arange(3), np.ones((3, 4), np.float32)), [bytes(8)], 2),
        (Rendezvous(worker=0, epoch=1, name="r", payload=np.zeros(1, np.uint8)), [], 1),
        (Hello(), [bytes(8)], 0),
        (Declare(table("items", 4)), [b""], 0),
    ],
)
def test_a_frame_with_another_number_of_arrays_is_told_both(connect, request_, buffers, want):
    peer, head = connect(), head_bytes(request_)
    peer.send(b"".join(wire.encode(KIND_OF[type(request_)], 7, 60_000, head, buffers, checksum=False)))
    assert re.search(rf"with {len(buffers)} arrays, not {want}", error_of_call(peer, 7).fields["reason"])


def test_a_peer_that_sends_thousands_of_requests_at_once_does_not_keep_others_waiting(served, connect):
    many, other = connect(), connect()
    answer, answered = served.dispatch.status, []

    def slowly():
        answered.append(time.sleep(0.001))
        return answer()

    served.dispatch.status = slowly
    many.send(framed(GetStatus()) * 2000)
    assert eventually(lambda: answered)
    assert isinstance(other.ask(Hello()), Greeting)
    assert len(answered) < 2000
    for _ in range(2000):
        assert isinstance(many.reply(), ShardStatus)


def test_a_frame_in_single_bytes_is_understood(connect):
    peer = connect()
    for byte in framed(push()):
        peer.send(bytes([byte]))
    assert peer.reply() == APPLIED


def test_a_peer_that_speaks_no_common_version_is_told_which_ones_there_are(served):
    with connected(served.address) as sock:
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
        calls.add(frame.header.call)
        if frame.header.kind == ERROR_KIND:
            assert isinstance(error_from(frame.header.head, ""), ShardBusy)
    asking.join(20)


def test_arrays_have_a_checksum_both_ways_where_it_was_agreed_on_and_a_flipped_byte_is_noticed(connect):
    peer, data = connect(Feature.CHECKSUM), bytearray(framed(push(), checksum=True))
    peer.send(data)
    assert peer.reply() == APPLIED
    peer.send(framed(pull(), checksum=True))
    assert bytes(peer.receive().buffers[0]) == np.full(12, -1, np.float32).tobytes()  # its reader checks it
    data[-1] ^= 1
    peer.send(data)
    with pytest.raises(BadFrame, match="checksum of the buffers"):
        peer.reply()
    assert peer.was_dropped()
