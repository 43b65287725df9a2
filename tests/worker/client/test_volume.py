"""Bytes by direction and part, against what the sockets counted."""

from types import SimpleNamespace

import numpy as np
import pytest

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
from embershard.proto.routing import make_route
from embershard.proto.spec import SGD, TableSpec
from embershard.proto.wire import frame_bytes
from embershard.worker.client.byte_counts import ByteCount, ByteCounter, BytePart
from embershard.worker.client.client import Client

ITEMS = TableSpec(name="items", dim=16, optimizer=SGD(lr=1.0))
LAYERS = TableSpec(name="layers", dim=1024, optimizer=SGD(lr=1.0))
OTHER, TOKEN = BytePart("other", "other"), PushToken(0, 1, 1, 1)


def ids(count):
    return np.arange(count, dtype=np.int64)


def payload(count):
    return np.zeros(count, np.uint8)


BY_ROUTE = TableGradients("items", ids(5), payload(70), route=3, codec="packed")
HELD = TableGradients("items", ids(2), payload(30), codec="packed", packed=payload(4), held=True)
PULL = Pull(1, (TableIds("items", ids(5)), TableIds("layers", ids(2), packed=payload(3))))
DECLARED = Declared(created=False, loading=False)
COUNTED = [
    (
        PULL,
        Rows((np.zeros((5, 16), np.float32), payload(100)), codecs=("", "int8")),
        {
            ("pull", "ids", "items"): ByteCount(40, 40, 1),
            ("pull", "ids", "layers"): ByteCount(3, 16, 1),
            ("pull", "rows", "items"): ByteCount(320, 320, 1),
            ("pull", "dense", "layers"): ByteCount(100, 2 * 4096, 1),
        },
    ),
    (
        Push(TOKEN, 0, 1, (BY_ROUTE, TableGradients("layers", ids(1), np.zeros((1, 1024), np.float32)))),
        Pushed(False, 6, 0),
        {  # no ids of those that a route names
            ("push", "rows", "items"): ByteCount(70, 5 * 64, 1),
            ("push", "ids", "layers"): ByteCount(8, 8, 1),
            ("push", "dense", "layers"): ByteCount(4096, 4096, 1),
        },
    ),
    (
        Push(TOKEN, 0, 1, (BY_ROUTE, HELD)),
        Pushed(False, 7, 0),
        {  # rows that a codec had held back would not travel again without it
            ("push", "rows", "items"): ByteCount(70, 5 * 64, 1),
            ("push", "held", "items"): ByteCount(34, 0, 1, held=2),
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
        assert stats.volume[BytePart(direction, "rows", "items")].wire == 50 * 64
