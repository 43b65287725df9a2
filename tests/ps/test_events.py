"""An event's bytes give the event again, whatever its kind."""

import dataclasses

import numpy as np
import pytest

from embershard.proto import spec
from embershard.proto.codec.ids import encode_ids
from embershard.proto.errors import InvalidRequest, MessageTooLarge
from embershard.proto.messages import (
    Compress,
    Declare,
    Leave,
    Load,
    PushToken,
    Rendezvous,
    TableCodecs,
    TableGradients,
    TakeSplit,
)
from embershard.proto.wire import Frame, FrameReader
from embershard.ps.events import Expired, PushEvent, Settled, decode_event, encode_event
from harness.events import again
from harness.held_log import HeldLog
from harness.shards import gradients, ids_of, join, make_shard, push, table

IDS, ROWS = ids_of(1, 5, 2**40), np.arange(9, dtype=np.float32).reshape(3, 3)
PAYLOAD = np.arange(17, dtype=np.uint8)
EVENTS = [
    PushEvent(push(gradients((3, 1)), last=False, weight=2.5, version=9, difference=True, clock=4)),
    PushEvent(push(TableGradients("t", IDS, PAYLOAD, 0.5, codec="packed", packed=encode_ids(IDS), unique=False))),
    PushEvent(push()),
    Load("t", 1, IDS, ROWS, 3, last=False, keep_state=True, token=PushToken(3, 2, 7, 5)),
    Load("t", 1, IDS[:0], ROWS[:0]),
    Declare(table(optimizer=spec.Adam(lr=0.5)), 3, load=True, dense=True, lineage=2**64 - 1, begins_lineage=True),
    Compress(revision=3, tables=[TableCodecs(table="t", push="int8")]),
    join(2, epoch=2**63 - 1, clock=3, staleness=-1, run=5),
    Leave(worker=1, epoch=2, pause=True),
    Rendezvous(1, 2, "name", PAYLOAD, want_payloads=False, participants=(1, 2)),
    TakeSplit(worker=1, epoch=2, data_epoch=3, num_splits=4, done=-1),
    Expired(65_535, 2**64 - 1),
    Settled(1, 2**64 - 1, 2**63),
]


def plain(value):
    """A value without arrays, whose shapes do not travel."""
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.tobytes()
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if dataclasses.is_dataclass(value):
        return type(value), [plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return value


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_is_the_same_after_its_frame(event):
    assert plain(again(event)) == plain(event)


def test_a_push_by_route_numbers_is_written_with_its_ids():
    parts = [TableGradients("t", IDS[:0], ROWS, route=7), gradients((3,))]
    found = again(PushEvent(push(*parts), (IDS, None)))
    assert [(part.route, part.ids.tolist()) for part in found.push.tables] == [(0, IDS.tolist()), (0, [3])]
    assert found.ids == ()


@pytest.mark.parametrize("kind", [0, 1, 4, 6, 0x40, 0x83, 0xFF])
def test_a_frame_of_another_kind_is_no_event(kind):
    event = encode_event(Expired(1, 2))
    reader = FrameReader(100, lambda _: [], checksum=False)
    data = b"".join(map(bytes, event))
    reader.buffer()[: len(data)] = data
    (frame,) = reader.received(len(data))
    with pytest.raises(InvalidRequest):
        decode_event(Frame(frame.header._replace(kind=kind), ()))


@pytest.mark.parametrize(
    "request_",
    [
        push(*[gradients((1,))] * 2049),
        Rendezvous(0, 1, "name", PAYLOAD, participants=tuple(range(10**6))),
    ],
    ids=["push", "rendezvous"],
)
def test_what_no_frame_can_hold_is_refused_before_it_changes_anything(request_):
    shard = make_shard(table(), log=HeldLog())
    shard.handle(join())
    before = len(shard._log.events)
    with pytest.raises((InvalidRequest, MessageTooLarge)):
        shard.handle(request_)
    assert {type(event) for event in shard._log.events[before:]} <= {Settled}
    assert shard.status().pushed_rows == 0
