"""Bytes by direction and part, against what the sockets counted."""

from types import SimpleNamespace

import numpy as np
import pytest

from embershard.proto.codec.name import CodecName
from embershard.proto.errors import UnknownTable
from embershard.proto.messages import (
    Declare,
    Declared,
    Hello,
    Pull,
    Push,
    Pushed,
    PushToken,
    Rows,
    TableGradients,
    TableIds,
    arrays,
)
from embershard.proto.protobuf import head_bytes
from embershard.proto.routing import ascending, even_ids, make_route
from embershard.proto.spec import SGD, Adagrad, Adam, Constant, TableSpec
from embershard.proto.wire import frame_bytes
from embershard.worker.client.byte_counts import ByteCount, ByteCounter, BytePart
from embershard.worker.client.client import Client
from embershard.worker.compression.low_rank import DenseLayout, ParameterSlice
from embershard.worker.compression.settings import Compression
from embershard.worker.strategy.predicted_bytes import break_even, predict_volumes

ITEMS = TableSpec(name="items", dim=32, optimizer=SGD(lr=1.0))
LAYERS = TableSpec(name="layers", dim=1024, optimizer=SGD(lr=1.0))
OTHER, TOKEN = BytePart("other", "other"), PushToken(0, 1, 1, 1)


def ids(count):
    return np.arange(count, dtype=np.int64)


def payload(count):
    return np.zeros(count, np.uint8)


BY_ROUTE = TableGradients("items", ids(5), payload(70), route=3, codec="packed")
HELD = TableGradients("items", ids(2), payload(30), codec="packed", packed=payload(4), is_residual=True)
PULL = Pull(1, (TableIds("items", ids(5)), TableIds("layers", ids(2), packed=payload(3))))
DECLARED = Declared(created=False, loading=False)
COUNTED = [
    (
        PULL,
        Rows((np.zeros((5, 32), np.float32), payload(100)), codecs=("", "int8")),
        {
            ("pull", "ids", "items"): ByteCount(40, 40, 1),
            ("pull", "ids", "layers"): ByteCount(3, 16, 1),
            ("pull", "rows", "items"): ByteCount(640, 640, 1),
            ("pull", "dense", "layers"): ByteCount(100, 2 * 4096, 1),
        },
    ),
    (
        Push(TOKEN, 0, 1, (BY_ROUTE, TableGradients("layers", ids(1), np.zeros((1, 1024), np.float32)))),
        Pushed(False, 6, 0),
        {  # no ids of those that a route names
            ("push", "rows", "items"): ByteCount(70, 5 * 128, 1),
            ("push", "ids", "layers"): ByteCount(8, 8, 1),
            ("push", "dense", "layers"): ByteCount(4096, 4096, 1),
        },
    ),
    (
        Push(TOKEN, 0, 1, (BY_ROUTE, HELD)),
        Pushed(False, 7, 0),
        {  # rows that a codec had held back would not travel again without it
            ("push", "rows", "items"): ByteCount(70, 5 * 128, 1),
            ("push", "residual", "items"): ByteCount(34, 0, 1, residual=2),
        },
    ),
    (Hello(), DECLARED, {}),
    (Declare(ITEMS), DECLARED, {}),
]


@pytest.mark.parametrize(("request_", "reply", "want"), COUNTED)
def test_a_call_is_counted_by_its_parts_and_the_rest_is_other(request_, reply, want):
    volume = ByteCounter()
    for declare in (Declare(ITEMS), Declare(LAYERS, dense=True)):
        volume.count(declare, DECLARED, SimpleNamespace(num_bytes=0))
    volume.count(request_, reply, SimpleNamespace(num_bytes=5000))
    parts = volume.parts(5000)
    direction = next(iter(want), ("other",))[0]
    assert parts.pop(BytePart(direction, "other")).wire == 5000 - sum(count.wire for count in want.values())
    parts.pop(OTHER, None)
    assert parts == {BytePart(*part): count for part, count in want.items()}


def frames(message):
    """What is not in its arrays."""
    return frame_bytes(len(head_bytes(message)), [0] * len(arrays(message)))


def test_over_sockets_parts_add_up_and_only_frames_and_hellos_are_beside_the_arrays(stream_shard):
    client = Client.connect([stream_shard])
    client.declare(ITEMS)
    before = client.stats
    assert before.volume[OTHER].wire == before.sent_bytes + before.received_bytes
    route = make_route(ids(50), ITEMS.space_key, client.placement)
    (rows,) = client.pull([("items", route)])
    client.push([("items", route, rows)], clock=0)
    with pytest.raises(UnknownTable):
        client.pull([("none", route)])
    stats = client.stats
    client.close()
    assert sum(moved.wire for moved in stats.volume.values()) == stats.sent_bytes + stats.received_bytes
    assert stats.volume[OTHER] == before.volume[OTHER]
    pull = Pull(client.placement.epoch, (TableIds("items", route.ids),), 0, client.epoch)
    push = Push(
        PushToken(0, client.epoch, 1, 1), 0, client.placement.epoch, (TableGradients("items", route.ids, rows),)
    )
    assert stats.volume[BytePart("pull", "other")].wire == frames(pull) + frames(Rows((rows,), version=0))
    assert stats.volume[BytePart("push", "other")].wire == frames(push) + frames(Pushed(False, 50, 0))
    for direction in ("pull", "push"):
        assert stats.volume[BytePart(direction, "ids", "items")] == ByteCount(400, 400, 1)
        assert stats.volume[BytePart(direction, "rows", "items")].wire == 50 * 128


STEPS = 6
PLACES = [ParameterSlice(0, (160, 128)), ParameterSlice(20, (100,)), ParameterSlice(21, (64, 300))]
LAYOUT = DenseLayout(even_ids(40, LAYERS.space_key), PLACES)
ROWS, DENSE, GAVE_WAY = (
    BytePart("push", kind, table) for kind, table in (("rows", "items"), ("dense", "layers"), ("residual", "items"))
)
HEADS = [BytePart("push", "other"), BytePart("pull", "other")]


@pytest.fixture
def moved_by(stream_shard):
    """Make what some steps move, and what is expected of them."""

    def make(push, pull, dense_push=None):
        client = Client.connect([stream_shard])
        client.declare(ITEMS)
        client.declare(LAYERS, dense=True)
        client.compressor.settings = Compression(warmup_steps=1)
        client.compressor.lay_out("layers", LAYOUT)
        for table, codec in (("items", push), ("layers", dense_push or push)):
            client.compressor.choose(table, CodecName.parse(codec), CodecName.parse(pull))
        before, rng = client.stats, np.random.default_rng(0)
        layers = make_route(LAYOUT.ids, LAYERS.space_key, client.placement)
        for clock in range(STEPS):
            ids = rng.choice(100_000, 3_000, replace=False)
            reads = [("items", ascending(make_route(ids, ITEMS.space_key, client.placement))), ("layers", layers)]
            rows = client.pull(reads, keep=clock % 2 == 0)
            gradients = [rng.standard_normal(part.shape, np.float32) for part in rows]
            client.push([(*read, part) for read, part in zip(reads, gradients, strict=True)], clock=clock)
        stats = client.stats
        moved = {part: moved.minus(before.volume.get(part, ByteCount())) for part, moved in stats.volume.items()}
        expected = predict_volumes(moved, client)
        # of what was moved before and not since nothing is expected
        assert predict_volumes({part: ByteCount() for part in moved}, client) == dict.fromkeys(HEADS, 0.0)
        num_bytes = stats.sent_bytes + stats.received_bytes - before.sent_bytes - before.received_bytes
        assert sum(part.wire for part in moved.values()) == num_bytes
        client.close()
        return moved, expected

    return make


@pytest.mark.parametrize(
    ("push", "pull", "dense_push"),
    [
        ("none", "none", None),
        ("fp16s", "fp16s", None),
        ("int8", "int8", None),
        ("bf16", "none", None),
        ("none", "bf16", None),
        ("topk:0.01", "int8", None),
        ("fp16s", "none", "powersgd:2"),
        ("fp16s", "none", "powersgd:4+fp16s"),
        ("fp16s", "none", "powersgd:1+int8"),
    ],
)
def test_predicted_bytes_are_within_one_percent_of_those_on_the_socket(moved_by, push, pull, dense_push):
    moved, expected = moved_by(push, pull, dense_push)
    assert sum(expected.values()) == pytest.approx(sum(part.wire for part in moved.values()), rel=0.01)
    assert moved.keys() - expected.keys() == {BytePart("other", "other")}
    if dense_push:
        assert expected[DENSE] == moved[DENSE].wire < moved[DENSE].raw / 4


@pytest.mark.parametrize(("push", "pull"), [("int8", "int8"), ("topk:0.01", "fp16s")])
def test_what_replies_say_of_coding_is_foreseen(moved_by, push, pull):
    # the numbers of the first steps have fewer digits than is expected
    off = [[e[part] - m[part].wire for part in HEADS] for m, e in (moved_by("none", "none"), moved_by(push, pull))]
    assert off[1] == pytest.approx(off[0], abs=2 * STEPS)


@pytest.mark.parametrize("push", ["topk:0.1+fp16s", "rows:0.1+int8", "randomk:0.05", "dgc:0.02"])
def test_what_a_selection_sends_is_foreseen_too(moved_by, push):
    moved, expected = moved_by(push, "none")
    for part in (ROWS, DENSE):
        assert expected[part] == pytest.approx(moved[part].wire, rel=0.25)  # a threshold keeps its count within that


@pytest.mark.parametrize("push", ["none", "fp16s", "topk:0.02", "rows:0.3"])
@pytest.mark.parametrize(
    "optimizer", [SGD(lr=1.0), SGD(lr=1.0, momentum=0.9), Adam(lr=0.1)], ids=["sgd", "momentum", "adam"]
)
def test_changes_of_dense_weights_are_foreseen_unless_momentum_makes_them(make_session, push, optimizer):
    """The parameters of a small model fill a part of their blocks, and padding never changes."""
    table = TableSpec(name="small", dim=1024, optimizer=optimizer, initializer=Constant())
    places = [
        ParameterSlice(0, (48, 64)),
        ParameterSlice(3, (400,)),
        ParameterSlice(4, (16, 20)),
        ParameterSlice(5, (16,)),
    ]
    layout = DenseLayout(even_ids(20, table.space_key), [*places, ParameterSlice(6, (56, 250))])
    client = make_session(2).client
    client.declare(table, dense=True)
    client.compressor.lay_out("small", layout)
    client.compressor.choose("small", CodecName.parse(push), CodecName.parse("delta"))
    route, rng = make_route(layout.ids, table.space_key, client.placement), np.random.default_rng(0)
    filled = dict(zip(layout.ids.tolist(), layout.filled(1024), strict=True))
    padding = np.arange(1024) >= np.array([filled[id_] for id_ in route.ids.tolist()])[:, None]
    before = {}
    for clock in range(40):
        if clock == 4:  # the first pulls have all rows
            before = client.stats.volume
        (rows,) = client.pull([("small", route)])
        gradients = rng.standard_normal(rows.shape, np.float32)
        gradients[padding] = 0
        client.push([("small", route, gradients)], clock=clock)
    part = BytePart("pull", "dense", "small")
    moved = client.stats.volume[part].minus(before[part])
    expected = predict_volumes({part: moved}, client)
    if push.startswith("topk") and optimizer != SGD(lr=1.0):
        assert part not in expected
    else:
        assert expected[part] == pytest.approx(moved.wire, rel=0.1)


@pytest.mark.parametrize("rows", [2_000, 100_000])
@pytest.mark.parametrize("codec", ["topk:0.02", "rows:0.1"])
def test_ages_and_rows_that_gave_way_are_foreseen(make_session, codec, rows):
    table = TableSpec(name="aged", dim=16, optimizer=Adagrad(lr=0.1))
    client = make_session(2).client
    client.compressor.settings = Compression(residual_rows=rows)
    client.declare(table)
    client.compressor.choose("aged", CodecName.parse(codec), CodecName.parse("int8"))
    rng = np.random.default_rng(0)
    for clock in range(30):  # hot ids and rare ones; a few rows learn much
        ids = np.unique(rng.zipf(1.3, 3_000) % 50_000)
        route = ascending(make_route(ids, table.space_key, client.placement))
        (read,) = client.pull([("aged", route)])
        steep = np.exp(2 * rng.standard_normal((len(read), 1)))
        client.push([("aged", route, (steep * rng.standard_normal(read.shape)).astype(np.float32))], clock=clock)
    moved = client.stats.volume
    expected = predict_volumes(moved, client)
    held = BytePart("push", "residual", "aged")
    assert (held in moved) == (rows < 100_000)
    coded = [part for part in moved if part.table and part.kind != "other"]
    assert sum(expected[part] for part in coded) == pytest.approx(sum(moved[part].wire for part in coded), rel=0.01)
    if held in moved:
        assert expected[held] == pytest.approx(moved[held].wire, rel=0.03)


@pytest.mark.parametrize("codec", ["rows:0.1", "rows:0.5+int8", "topk:0.01", "topk:0.1+fp16s", "randomk:0.02"])
@pytest.mark.parametrize("most", [6, 30])
@pytest.mark.parametrize("optimizer", [SGD(lr=1.0), Adagrad(lr=0.1)], ids=["sgd", "adagrad"])
def test_messages_of_a_few_rows_are_foreseen(make_session, codec, most, optimizer):
    """Of 5 rows rows:0.1 sends one, of 15 two: which part it sends of all depends on the sizes of the messages."""
    client, dim = make_session(2).client, 16
    table = TableSpec(name="items", dim=dim, optimizer=optimizer)
    client.declare(table)
    client.compressor.choose("items", CodecName.parse(codec))
    rng = np.random.default_rng(0)
    for clock in range(60):
        ids = rng.choice(500, rng.integers(1, most), replace=False)
        route = ascending(make_route(ids, table.space_key, client.placement))
        client.push([("items", route, rng.standard_normal((len(ids), dim), np.float32))], clock=clock)
    moved = client.stats.volume
    assert predict_volumes(moved, client)[ROWS] == pytest.approx(moved[ROWS].wire, rel=0.03)


def test_what_waited_as_its_codec_was_replaced_is_foreseen(make_session):
    client = make_session(2).client
    client.declare(ITEMS)
    client.compressor.choose("items", CodecName.parse("topk:0.02"))
    rng = np.random.default_rng(0)
    route = ascending(make_route(np.arange(3_000), ITEMS.space_key, client.placement))
    for clock in range(4):
        if clock == 3:
            client.compressor.choose("items", CodecName.parse("none"))
        client.push([("items", route, rng.standard_normal((3_000, ITEMS.dim), np.float32))], clock=clock)
    moved = client.stats.volume
    assert (moved[GAVE_WAY].residual, moved[GAVE_WAY].raw, moved[ROWS].raw) == (3_000, 0, 4 * 3_000 * 4 * ITEMS.dim)
    assert predict_volumes(moved, client)[GAVE_WAY] == pytest.approx(moved[GAVE_WAY].wire, rel=0.02)


def test_a_codec_breaks_even_where_it_saves_as_much_time_as_it_takes():
    assert break_even(1_000_000, 250_000, 0.006) == pytest.approx(1e9)
    assert break_even(1_000_000, 250_000, 0.0) is None
