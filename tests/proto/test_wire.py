"""The frames of the stream transport: docs/wire.md, checked byte by byte."""

import random
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.proto import errors, messages, protobuf, wire
from embershard.proto.errors import BadFrame, InvalidRequest, MessageTooLarge, WrongVersion
from embershard.proto.wire import Agreed, Feature, FrameReader, Header
from harness.hostile_peers import with_field

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "wire.md").read_text()
EXAMPLES = {name: bytes.fromhex(text) for name, text in re.findall(r"```hex ([\w ]+)\n(.*?)```", PAGE, re.DOTALL)}
LIMIT = 2**20

PULL = messages.Pull(1, (messages.TableIds("t", np.array([1, 2])),))
ROWS = messages.Rows((np.array([[0.5, -1], [2, 0]], np.float32),))
_, UNKNOWN_TABLE = errors.to_wire(errors.UnknownTable(table="t", known=""))


def fresh(header):
    return [np.empty(length, np.uint8).data for length in header.lengths]


def reader(place=fresh, *, limit=LIMIT, checksum=False):
    return FrameReader(limit, place, checksum=checksum)


def feed(into, data, sizes=lambda: 2**30):
    """Receive `data` as a socket does: at most sizes() bytes a call, and never more than buffer() holds."""
    frames, pos = [], 0
    while pos < len(data):
        room = into.buffer()
        n = min(len(room), sizes(), len(data) - pos)
        assert n, "no room to receive into"
        room[:n] = data[pos : pos + n]
        frames += into.received(n)
        pos += n
    return frames


def frame(head=b"", buffers=(), *, call=7, checksum=False) -> bytes:
    return b"".join(wire.encode(4, call, 2000, head, buffers, checksum=checksum))


def contents(frames):
    return [(header, [bytes(buffer) for buffer in buffers]) for header, buffers in frames]


def test_the_hellos_are_the_bytes_of_the_page():
    hello = wire.client_hello(Feature(0))
    assert hello == EXAMPLES["client hello"]
    assert wire.server_hello(hello, Feature.CHECKSUM) == (EXAMPLES["server hello"], Agreed(2, Feature(0)))
    assert len(hello) == wire.HELLO_BYTES == 16


@pytest.mark.parametrize(
    ("name", "kind", "timeout_ms", "head", "bulk"),
    [
        ("pull", 4, 2000, protobuf.head_bytes(PULL), messages.arrays(PULL)),
        ("pull with checksum", 4, 2000, protobuf.head_bytes(PULL), messages.arrays(PULL)),
        ("rows", 132, 0, protobuf.head_bytes(ROWS), messages.arrays(ROWS)),
        ("error", 255, 0, UNKNOWN_TABLE, []),
    ],
)
def test_a_frame_is_the_bytes_of_the_page(name, kind, timeout_ms, head, bulk):
    checksum = name.endswith("checksum")
    assert b"".join(wire.encode(kind, 7, timeout_ms, head, bulk, checksum=checksum)) == EXAMPLES[name]
    lengths = tuple(array.nbytes for array in bulk)
    assert contents(feed(reader(checksum=checksum), EXAMPLES[name])) == [
        (Header(kind, 7, timeout_ms, head, lengths), [array.tobytes() for array in bulk])
    ]


def test_the_page_names_the_kinds_of_all_messages():
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (\d+) \| (\w+) \|$", PAGE, re.MULTILINE)
    names = {int(kind): name for row in rows for kind, name in (row[:2], row[2:])}
    for message, kind in messages.KIND_OF.items():
        form = protobuf._FORMS[message][0] if message in protobuf._FORMS else message
        assert names[kind] == form.DESCRIPTOR.name
    assert len(names) == len(messages.KIND_OF)
    assert f"| {messages.ERROR_KIND} | error" in PAGE


def hello(lowest, highest, features=0) -> bytes:
    return struct.pack("<8sHHI", wire.MAGIC, lowest, highest, features)


@pytest.mark.parametrize(
    ("wanted", "supported", "agreed"),
    [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 1), (0xFFFFFFFF, 1, 1), (0xFFFFFFFE, 1, 0)],
)
def test_both_sides_agree_on_the_features_that_both_name(wanted, supported, agreed):
    answer, server_side = wire.server_hello(hello(1, 9, wanted), Feature(supported))
    assert server_side == wire.read_server_hello(answer) == Agreed(2, Feature(agreed))


@pytest.mark.parametrize(("lowest", "highest"), [(0, 0), (1, 1), (3, 3), (3, 65535), (2, 0), (9, 2)])
def test_without_a_common_version_the_answer_says_which_ones_there_are(lowest, highest):
    answer, agreed = wire.server_hello(hello(lowest, highest, 1), Feature.CHECKSUM)
    assert agreed is None
    assert answer == hello(wire.OLDEST_VERSION, wire.VERSION)


@pytest.mark.parametrize(("lowest", "highest"), [(1, 1), (3, 3), (3, 5), (0, 0), (2, 3)])
def test_a_client_refuses_a_version_that_it_does_not_speak(lowest, highest):
    with pytest.raises(WrongVersion) as refused:
        wire.read_server_hello(hello(lowest, highest))
    own = {"own_lowest": wire.OLDEST_VERSION, "own_highest": wire.VERSION}
    assert refused.value.fields == {"lowest": lowest, "highest": highest, **own}


def test_what_is_no_hello_is_named():
    for read, data, got in [
        (wire.read_server_hello, b"HTTP/1.1 400 Bad", "b'HTTP/1.1', not b'EMBSHRD"),
        (wire.read_server_hello, hello(2, 2, 17), "features agreed on is 0x11"),
        (lambda data: wire.server_hello(data, Feature(0)), b"PRI * HTTP/2.0\r\n", "start of the connection"),
    ]:
        with pytest.raises(BadFrame, match=got):
            read(data)


def test_one_receive_may_take_a_large_buffer_into_its_own_memory():
    place, data = np.zeros(4 * wire.SCRATCH_BYTES, np.uint8), frame(b"head", [bytes(4 * wire.SCRATCH_BYTES)])
    receiving = reader(lambda _: [place.data])
    assert feed(receiving, data[: len(data) - place.nbytes + 5]) == []
    room = np.frombuffer(receiving.buffer(), np.uint8)
    assert np.shares_memory(room, place)
    assert len(room) == place.nbytes - 5


@pytest.mark.parametrize("checksum", [False, True])
def test_a_frame_cut_at_any_byte_arrives_whole(checksum):
    data = frame(b"head", [b"", b"abc", b"", b"defgh", b""], checksum=checksum) + frame(b"x", checksum=checksum)
    want = contents(feed(reader(checksum=checksum), data))
    assert [head for (_, _, _, head, _, _), _ in want] == [b"head", b"x"]
    for cut in range(1, len(data)):
        receiving = reader(checksum=checksum)
        frames = feed(receiving, data[:cut])
        assert receiving.in_frame == (cut != len(data) - wire.PREFIX_BYTES - 1)
        assert contents(frames + feed(receiving, data[cut:])) == want
    assert contents(feed(reader(checksum=checksum), data, lambda: 1)) == want


def test_a_buffer_in_shared_memory_does_not_travel():
    memory, offsets = np.arange(200, dtype=np.uint8), (wire.IN_FRAME, 16, wire.IN_FRAME, 100)
    buffers = [b"abc", memory[16:24].data, b"defgh", memory[100:200].data]
    encoded = b"".join(wire.encode(4, 7, 2000, b"head", buffers, checksum=True, offsets=offsets))
    assert len(encoded) == wire.PREFIX_BYTES + 8 * 4 + 4 + 8
    data = encoded + b"".join(wire.encode(4, 7, 2000, b"x", checksum=True, offsets=()))

    def place(header):
        assert (header.uses_memory, header.bulk_bytes) == (True, 8)
        return [
            np.empty(length, np.uint8).data if offset == wire.IN_FRAME else memory[offset : offset + length].data
            for length, offset in zip(header.lengths, header.offsets, strict=True)
        ]

    header = Header(4, 7, 2000, b"head", (3, 8, 5, 100), offsets)
    want = [(header, [bytes(buffer) for buffer in buffers]), (Header(4, 7, 2000, b"x", ()), [])]
    for cut in range(len(data)):
        receiving = FrameReader(LIMIT, place, checksum=True, has_memory=True)
        assert contents(feed(receiving, data[:cut]) + feed(receiving, data[cut:])) == want
    assert memory.tolist() == list(range(200))


def test_buffers_in_shared_memory_are_together_within_the_limit():
    data = b"".join(wire.encode(4, 7, 0, b"", [bytes(LIMIT // 2)] * 3, checksum=False, offsets=(0, 8, 16)))
    with pytest.raises(BadFrame, match="the size of buffers in shared memory"):
        feed(FrameReader(LIMIT, fresh, checksum=False, has_memory=True), data)


def test_many_frames_and_their_small_buffers_arrive_in_one_call():
    data = b"".join(frame(b"h" * i, [b"b" * i] * (i % 30), call=i) for i in range(60))
    receiving = reader()
    receiving.buffer()[: len(data)] = data
    assert contents(receiving.received(len(data))) == contents(feed(reader(), data, lambda: 1))
    assert not receiving.in_frame


@settings(max_examples=60, deadline=None)
@given(
    heads=st.lists(st.sampled_from([0, 1, 31, 5000, wire.SCRATCH_BYTES, 300_000]), min_size=1, max_size=4),
    lengths=st.lists(st.sampled_from([0, 1, 8, 4096, wire.SCRATCH_BYTES - 1, wire.SCRATCH_BYTES, 200_000]), max_size=4),
    step=st.sampled_from([777, 65536, 2**30]),
    checksum=st.booleans(),
    seed=st.integers(0, 99),
)
def test_frames_of_any_sizes_arrive_as_they_were_sent(heads, lengths, step, checksum, seed):
    rng = random.Random(seed)
    want, data = [], b""
    for call, head_bytes in enumerate(heads):
        head, bulk = rng.randbytes(head_bytes), [rng.randbytes(length) for length in lengths]
        want.append((Header(4, call, 2000, head, tuple(lengths)), bulk))
        data += frame(head, bulk, call=call, checksum=checksum)
    receiving = reader(checksum=checksum)
    assert contents(feed(receiving, data, lambda: rng.randint(1, step))) == want
    assert not receiving.in_frame


@pytest.mark.parametrize("length", [10, 3 * wire.SCRATCH_BYTES])
def test_a_frame_that_nobody_wants_is_read_and_dropped(length):
    data = frame(b"late", [b"x" * length]) + frame(b"next", [b"y"])
    frames = feed(reader(lambda header: None if header.head == b"late" else fresh(header)), data)
    assert [header.head for header, _ in frames] == [b"next"]


def test_a_large_head_leaves_no_large_scratch_behind():
    receiving = reader()
    feed(receiving, frame(b"h" * wire.MAX_HEAD_BYTES))
    assert len(receiving.buffer()) == wire.SCRATCH_BYTES


@pytest.mark.parametrize(
    ("offset", "layout", "value", "reason"),
    [
        (0, "4s", b"EMBE", "magic of a frame is b'EMBE', not b'EMBF'"),
        (4, "B", 1, "version of a frame is 1, not 2"),
        (4, "B", 3, "version of a frame is 3, not 2"),
        (6, "H", wire.MAX_BUFFERS + 1, "number of buffers is 4097, not at most 4096"),
        (16, "I", wire.MAX_HEAD_BYTES + 1, "size of the head is 1048577, not at most 1048576"),
        (20, "I", LIMIT + 1, "size of the buffers is 1048577, not at most 1048576"),
        (20, "I", 2**32 - 1, "size of the buffers is 4294967295"),
        (20, "I", 7, "sum of the buffers' lengths is 8, not 7"),
        (24, "I", 1, "checksum of buffers that have none is 0x00000001, not 0"),
        (32, "I", 9, "sum of the buffers' lengths is 9, not 8"),
        (32, "I", 2**32 - 1, "sum of the buffers' lengths is 4294967295, not 8"),
    ],
)
def test_a_frame_over_a_limit_is_refused_before_anything_is_reserved(offset, layout, value, reason):
    def place(_):
        raise AssertionError("place() was asked")

    with pytest.raises(BadFrame, match=re.escape(reason)):
        feed(reader(place), with_field(frame(b"head", [b"12345678"]), offset, struct.pack("<" + layout, value)))


def test_a_frame_at_its_limits_arrives():
    bulk = [b"x" * (LIMIT - 2 * wire.MAX_BUFFERS + 2)] + [b"yz"] * (wire.MAX_BUFFERS - 1)
    assert sum(map(len, bulk)) == LIMIT
    ((header, buffers),) = feed(reader(checksum=True), frame(b"h" * wire.MAX_HEAD_BYTES, bulk, checksum=True))
    assert header.head == b"h" * wire.MAX_HEAD_BYTES
    assert [bytes(buffer) for buffer in buffers] == bulk
    with pytest.raises(BadFrame, match="size of the buffers is 100, not at most 99"):
        feed(reader(limit=99), frame(b"", [b"x" * 100]))


def test_a_sender_keeps_the_limits():
    with pytest.raises(MessageTooLarge):
        frame(b"h" * (wire.MAX_HEAD_BYTES + 1))
    with pytest.raises(InvalidRequest, match="4097 arrays; send at most 4096"):
        frame(b"", [b""] * (wire.MAX_BUFFERS + 1))
    with pytest.raises(MessageTooLarge):
        frame(b"", [np.empty(2**31, np.uint8)] * 2)  # reserved, never touched


def test_a_flipped_byte_of_the_buffers_is_noticed_before_the_frame_is_handed_over():
    for lengths in ([8, 3], [3 * wire.SCRATCH_BYTES]):
        data = bytearray(frame(b"", [b"x" * length for length in lengths], checksum=True))
        for at in (1, 4, 11):
            data[-at] ^= 1
            with pytest.raises(BadFrame, match="checksum of the buffers"):
                feed(reader(checksum=True), bytes(data))
            data[-at] ^= 1
    with pytest.raises(BadFrame, match="checksum of the buffers"):
        feed(reader(checksum=True), frame(b"", [b"abc"]))  # without the one that was agreed on


def test_a_flipped_bit_in_the_start_of_a_frame_is_always_noticed():
    data = frame(b"head", [b"abcd", b"efgh"])
    start = len(data) - 8
    for bit in range(8 * start):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        receiving = reader()
        try:
            frames = feed(receiving, bytes(flipped))
        except BadFrame:
            continue
        # it announces more bytes than came: nothing is handed over, and what follows is found out
        assert frames == []
        assert receiving.in_frame
        with pytest.raises(BadFrame):
            feed(receiving, data * (2 * wire.MAX_HEAD_BYTES // len(data)))
