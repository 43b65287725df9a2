"""Bytes by direction and part, against what the sockets counted."""

from __future__ import annotations

import numpy as np
import pytest

from embershard.proto.messages import (
    Declare,
    Declared,
    Hello,
    Pull,
    Push,
    Pushed,
    PushToken,
    Reply,
    Request,
    Rows,
    TableGradients,
    TableIds,
    arrays,
)
from embershard.proto.protobuf import head_bytes
from embershard.proto.routing import make_route
from embershard.proto.spec import SGD, TableSpec
from embershard.proto.wire import frame_bytes
from embershard.worker.client.byte_counts import ByteCount, ByteCounter, BytePart
from embershard.worker.client.client import Client

ITEMS = TableSpec(name="items", dim=16, optimizer=SGD(lr=1.0))
LAYERS = TableSpec(name="layers", dim=1024, optimizer=SGD(lr=1.0))


class Answered:
    """A call that is over."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def result(self) -> Reply:
        raise AssertionError


@pytest.fixture
def volume():
    volume = ByteCounter()
    volume.count(Declare(ITEMS), Declared(created=True, loading=False), Answered(0))
    volume.count(Declare(LAYERS, dense=True), Declared(created=True, loading=False), Answered(0))
    return volume


def ids(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int64)


def test_a_pull_counts_ids_rows_and_frames(volume):
    pull = Pull(1, (TableIds("items", ids(5)), TableIds("layers", ids(2), packed=np.zeros(3, np.uint8))))
    rows = Rows((np.zeros((5, 16), np.float32), np.zeros(100, np.uint8)), codecs=("", "int8"))
    volume.count(pull, rows, Answered(1000))
    parts = volume.parts(1000)
    assert parts[BytePart("pull", "ids", "items")] == ByteCount(40, 40, 1)
    assert parts[BytePart("pull", "ids", "layers")] == ByteCount(3, 16, 1)
    assert parts[BytePart("pull", "rows", "items")] == ByteCount(320, 320, 1)
    assert parts[BytePart("pull", "dense", "layers")] == ByteCount(100, 2 * 4096, 1)
    assert parts[BytePart("pull", "other")].wire == 1000 - 40 - 3 - 320 - 100


def test_a_push_by_a_route_counts_no_ids(volume):
    parts = (
        TableGradients("items", ids(5), np.zeros(70, np.uint8), route=3, codec="packed"),
        TableGradients("layers", ids(1), np.zeros((1, 1024), np.float32)),
    )
    volume.count(Push(PushToken(0, 1, 1, 1), 0, 1, parts), Pushed(False, 6, 0), Answered(5000))
    found = volume.parts(5000)
    assert found[BytePart("push", "rows", "items")] == ByteCount(70, 5 * 64, 1)
    assert BytePart("push", "ids", "items") not in found
    assert found[BytePart("push", "ids", "layers")] == ByteCount(8, 8, 1)
    assert found[BytePart("push", "dense", "layers")] == ByteCount(4096, 4096, 1)


def test_rows_that_a_codec_had_held_back_would_not_travel_again_without_it(volume):
    parts = (
        TableGradients("items", ids(5), np.zeros(70, np.uint8), route=3, codec="packed"),
        TableGradients(
            "items", ids(2), np.zeros(30, np.uint8), codec="packed", packed=np.zeros(4, np.uint8), held=True
        ),
    )
    volume.count(Push(PushToken(0, 1, 1, 1), 0, 1, parts), Pushed(False, 7, 0), Answered(500))
    found = volume.parts(500)
    assert found[BytePart("push", "rows", "items")] == ByteCount(70, 5 * 64, 1)
    assert found[BytePart("push", "held", "items")] == ByteCount(34, 0, 1, held=2)
    assert BytePart("push", "ids", "items") not in found


@pytest.mark.parametrize("request_", [Hello(), Declare(ITEMS)])
def test_what_is_neither_push_nor_pull_is_other(volume, request_):
    volume.count(request_, Declared(created=False, loading=False), Answered(77))
    assert volume.parts(77) == {BytePart("other", "other"): ByteCount(77, 77, 3)}


def test_parts_add_up_to_what_the_sockets_counted(make_session):
    client = make_session(2).client
    client.declare(ITEMS)
    client.declare(LAYERS, dense=True)
    route = make_route(ids(50), ITEMS.space_key, client.placement)
    layers = make_route(ids(9), LAYERS.space_key, client.placement)
    rows, dense = client.pull([("items", route), ("layers", layers)], keep=True)
    client.push([("items", route, rows), ("layers", layers, dense)], clock=0)
    stats = client.stats
    assert sum(moved.wire for moved in stats.volume.values()) == stats.sent_bytes + stats.received_bytes
    for direction in ("pull", "push"):
        assert stats.volume[BytePart(direction, "rows", "items")].wire == 50 * 64  # type: ignore[arg-type]
        assert stats.volume[BytePart(direction, "dense", "layers")].wire == 9 * 4096  # type: ignore[arg-type]
    assert stats.volume[BytePart("other", "other")].wire == 0


def frames(message: Request | Reply) -> int:
    """What is not in its arrays."""
    return frame_bytes(len(head_bytes(message)), [0] * len(arrays(message)))


def test_over_sockets_only_frames_and_hellos_are_beside_the_arrays(stream_shard):
    client = Client.connect([stream_shard])
    try:
        client.declare(ITEMS)
        before = client.stats
        assert before.volume[BytePart("other", "other")].wire == before.sent_bytes + before.received_bytes
        route = make_route(ids(50), ITEMS.space_key, client.placement)
        (rows,) = client.pull([("items", route)])
        client.push([("items", route, rows)], clock=0)
        stats = client.stats
    finally:
        client.close()
    assert sum(moved.wire for moved in stats.volume.values()) == stats.sent_bytes + stats.received_bytes
    assert stats.volume[BytePart("other", "other")] == before.volume[BytePart("other", "other")]
    pull = Pull(client.placement.epoch, (TableIds("items", route.ids),), 0, client.epoch)
    assert stats.volume[BytePart("pull", "other")].wire == frames(pull) + frames(Rows((rows,), version=0))
    token = PushToken(0, client.epoch, 1, 1)
    push = Push(token, 0, client.placement.epoch, (TableGradients("items", route.ids, rows),))
    assert stats.volume[BytePart("push", "other")].wire == frames(push) + frames(Pushed(False, 50, 0))
    assert (
        stats.volume[BytePart("push", "ids", "items")]
        == stats.volume[BytePart("pull", "ids", "items")]
        == ByteCount(400, 400, 1)
    )


def test_a_refused_call_is_left_to_other(make_session):
    client = make_session(1).client
    client.declare(ITEMS)
    client._specs["none"] = TableSpec(name="none", dim=4, optimizer=SGD(lr=1.0))
    route = make_route(ids(5), ITEMS.space_key, client.placement)
    with pytest.raises(Exception, match="no table 'none'"):
        client.pull([("none", route)])
    stats = client.stats
    assert stats.sent_bytes == 40
    # of Hello and Declare, which took no bytes
    assert stats.volume == {BytePart("other", "other"): ByteCount(40, 40, 2)}
