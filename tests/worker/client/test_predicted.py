"""What codecs were expected to send, against what was counted on the socket."""

from __future__ import annotations

import numpy as np
import pytest

from embershard.proto.codec.name import CodecName
from embershard.proto.routing import ascending, even_ids, make_route
from embershard.proto.spec import SGD, Adagrad, TableSpec
from embershard.worker.client.byte_counts import ByteCount, ByteCounts, BytePart
from embershard.worker.client.client import Client
from embershard.worker.client.predicted_bytes import break_even, predict_volumes
from embershard.worker.compression.low_rank import DenseLayout, ParameterSlice
from embershard.worker.compression.settings import Compression

ITEMS = TableSpec(name="items", dim=32, optimizer=SGD(lr=1.0))
LAYERS = TableSpec(name="layers", dim=1024, optimizer=SGD(lr=1.0))
STEPS = 6


LAYOUT = DenseLayout(
    even_ids(40, LAYERS.space_key),
    [ParameterSlice(0, (160, 128)), ParameterSlice(20, (100,)), ParameterSlice(21, (64, 300))],
)


def moved_by(address: str, push: str, pull: str, dense_push: str | None = None) -> tuple[Client, ByteCounts, int]:
    """A client after some steps, what they moved, and the bytes of that on the socket."""
    client = Client.connect([address])
    client.declare(ITEMS)
    client.declare(LAYERS, dense=True)
    client.compressor.settings = Compression(warmup_steps=1)
    client.compressor.lay_out("layers", LAYOUT)
    for table, codec in (("items", push), ("layers", dense_push or push)):
        client.compressor.choose(table, CodecName.parse(codec), CodecName.parse(pull))
    before = client.stats
    rng = np.random.default_rng(0)
    layers = make_route(LAYOUT.ids, LAYERS.space_key, client.placement)
    for clock in range(STEPS):
        ids = rng.choice(100_000, 3_000, replace=False)
        reads = [("items", ascending(make_route(ids, ITEMS.space_key, client.placement))), ("layers", layers)]
        rows = client.pull(reads, keep=clock % 2 == 0)
        pushed = [(*read, rng.standard_normal(part.shape, np.float32)) for read, part in zip(reads, rows, strict=True)]
        client.push(pushed, clock=clock)
    stats = client.stats
    moved = {part: moved.minus(before.volume.get(part, ByteCount())) for part, moved in stats.volume.items()}
    num_bytes = stats.sent_bytes + stats.received_bytes - before.sent_bytes - before.received_bytes
    return client, moved, num_bytes


@pytest.mark.parametrize(
    ("push", "pull"),
    [("none", "none"), ("fp16s", "fp16s"), ("int8", "int8"), ("bf16", "none"), ("none", "bf16"), ("topk:0.01", "int8")],
)
def test_predicted_bytes_are_within_one_percent_of_those_on_the_socket(stream_shard, push, pull):
    client, moved, num_bytes = moved_by(stream_shard, push, pull)
    try:
        expected = predict_volumes(moved, client)
    finally:
        client.close()
    assert sum(part.wire for part in moved.values()) == num_bytes
    assert sum(expected.values()) == pytest.approx(num_bytes, rel=0.01)
    assert moved.keys() - expected.keys() == {BytePart("other", "other")}


def heads_off(address: str, push: str, pull: str) -> list[float]:
    """By how many bytes what is expected of heads differs from what is counted: pushes, pulls."""
    client, moved, _ = moved_by(address, push, pull)
    try:
        expected = predict_volumes(moved, client)
    finally:
        client.close()
    return [expected[part] - moved[part].wire for part in (BytePart("push", "other"), BytePart("pull", "other"))]


@pytest.mark.parametrize(("push", "pull"), [("int8", "int8"), ("topk:0.01", "fp16s")])
def test_what_replies_say_of_coding_is_foreseen(stream_shard, push, pull):
    plain = heads_off(stream_shard, "none", "none")  # the numbers of the first steps have fewer digits than is expected
    assert heads_off(stream_shard, push, pull) == pytest.approx(plain, abs=2 * STEPS)


def test_of_what_was_moved_before_and_not_since_nothing_is_expected(stream_shard):
    client, moved, _ = moved_by(stream_shard, "topk:0.1", "int8")
    try:
        expected = predict_volumes({part: ByteCount() for part in moved}, client)
    finally:
        client.close()
    assert expected == {BytePart("pull", "other"): 0.0, BytePart("push", "other"): 0.0}


@pytest.mark.parametrize("push", ["topk:0.1+fp16s", "rows:0.1+int8", "randomk:0.05", "dgc:0.02"])
def test_what_a_selection_sends_is_foreseen_too(stream_shard, push):
    client, moved, _ = moved_by(stream_shard, push, "none")
    try:
        expected = predict_volumes(moved, client)
    finally:
        client.close()
    for part in (BytePart("push", "rows", "items"), BytePart("push", "dense", "layers")):
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
    moved, held = client.stats.volume, BytePart("push", "held", "items")
    assert (moved[held].held, moved[held].raw) == (3_000, 0)
    assert moved[BytePart("push", "rows", "items")].raw == 4 * 3_000 * 4 * ITEMS.dim
    assert predict_volumes(moved, client)[held] == pytest.approx(moved[held].wire, rel=0.02)


@pytest.mark.parametrize("dense_push", ["powersgd:2", "powersgd:4+fp16s", "powersgd:1+int8"])
def test_the_bytes_of_factors_are_foreseen(stream_shard, dense_push):
    client, moved, num_bytes = moved_by(stream_shard, "fp16s", "none", dense_push)
    try:
        expected = predict_volumes(moved, client)
    finally:
        client.close()
    layers = BytePart("push", "dense", "layers")
    assert moved[layers].raw / moved[layers].wire > 4
    assert expected[layers] == moved[layers].wire
    assert sum(expected.values()) == pytest.approx(num_bytes, rel=0.01)


def test_a_codec_breaks_even_where_it_saves_as_much_time_as_it_takes():
    assert break_even(1_000_000, 250_000, 0.006) == pytest.approx(1e9)
    assert break_even(1_000_000, 250_000, 0.0) is None
