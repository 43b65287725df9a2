"""What codecs were expected to send, against what was counted on the socket."""

import numpy as np
import pytest

from embershard.proto.codec.name import CodecName
from embershard.proto.routing import ascending, even_ids, make_route
from embershard.proto.spec import SGD, Adagrad, TableSpec
from embershard.worker.client.byte_counts import ByteCount, BytePart
from embershard.worker.client.client import Client
from embershard.worker.client.predicted_bytes import break_even, predict_volumes
from embershard.worker.compression.low_rank import DenseLayout, ParameterSlice
from embershard.worker.compression.settings import Compression

ITEMS = TableSpec(name="items", dim=32, optimizer=SGD(lr=1.0))
LAYERS = TableSpec(name="layers", dim=1024, optimizer=SGD(lr=1.0))
STEPS = 6
PLACES = [ParameterSlice(0, (160, 128)), ParameterSlice(20, (100,)), ParameterSlice(21, (64, 300))]
LAYOUT = DenseLayout(even_ids(40, LAYERS.space_key), PLACES)
ROWS, DENSE, HELD = (
    BytePart("push", kind, table) for kind, table in (("rows", "items"), ("dense", "layers"), ("held", "items"))
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
    held = BytePart("push", "held", "aged")
    assert (held in moved) == (rows < 100_000)
    coded = [part for part in moved if part.table and part.kind != "other"]
    assert sum(expected[part] for part in coded) == pytest.approx(sum(moved[part].wire for part in coded), rel=0.01)
    if held in moved:
        assert expected[held] == pytest.approx(moved[held].wire, rel=0.03)


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
    assert (moved[HELD].held, moved[HELD].raw, moved[ROWS].raw) == (3_000, 0, 4 * 3_000 * 4 * ITEMS.dim)
    assert predict_volumes(moved, client)[HELD] == pytest.approx(moved[HELD].wire, rel=0.02)


def test_a_codec_breaks_even_where_it_saves_as_much_time_as_it_takes():
    assert break_even(1_000_000, 250_000, 0.006) == pytest.approx(1e9)
    assert break_even(1_000_000, 250_000, 0.0) is None
