"""The events of a shard: each change of its state is one, and the same events in the same order give the same state.

Requests that change the state are events as they came, but for a push, whose ids have to stand in it. The other events
are made by the shard itself (ps/shard.py): nothing else that it does on its own, as by the time, changes the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from embershard.proto.arrays import Ids
from embershard.proto.errors import InvalidRequest
from embershard.proto.messages import (
    KIND_OF,
    REQUEST_KINDS,
    Compress,
    Declare,
    Heartbeat,
    Join,
    Leave,
    Load,
    Message,
    Push,
    PushToken,
    Rendezvous,
    TakeSplit,
    arrays,
)
from embershard.proto.protobuf import head_bytes, read
from embershard.proto.wire import MAX_BUFFERS, Frame, encode
from embershard.ps.coordination.outcome import Outcome

if TYPE_CHECKING:
    from embershard.ps.restore import Contents


@dataclass(frozen=True, slots=True)
class PushEvent:
    """A push that is no duplicate. `ids` has those of the parts that name them by a route number, None for the others.

    They are () where no part does. Pulls, which left the ids with the shard, are no events.
    """

    push: Push
    ids: tuple[Ids | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Expired:
    """The lease of a worker's incarnation ran out."""

    worker: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Settled:
    """A push or load was refused for good, and its worker counts on; seq 0: it is put off, and may come again."""

    worker: int
    epoch: int
    seq: int


@dataclass(frozen=True, slots=True)
class TablesRestored:
    """The tables of a snapshot took the place of those that were here."""

    contents: Contents


Event = (
    PushEvent | Load | Declare | Compress | Join | Leave | Rendezvous | TakeSplit | Expired | Settled | TablesRestored
)  # fmt: skip


LoggedEvent = PushEvent | Load | Declare | Compress | Join | Leave | Rendezvous | TakeSplit | Expired | Settled

# Kinds of the frames of events: those of requests are the requests' (docs/wire.md), the others' have bit 6 set; their
# heads are those of a heartbeat, and of a push without tables. A log outlives the version that wrote it.
EXPIRED, SETTLED = 0x41, 0x42
_REQUESTS = (Load, Declare, Compress, Join, Leave, Rendezvous, TakeSplit)


def encode_event(event: LoggedEvent) -> list[bytes | memoryview]:
    """The pieces of an event's frame (docs/wire.md), without a checksum of its arrays, which are not copied.

    A push is written as one that brings all of its ids. Tables that were restored are no such event: they are a file's.
    """
    match event:
        case Expired():
            head = head_bytes(Heartbeat(worker=event.worker, epoch=event.epoch))
            return encode(EXPIRED, 0, 0, head, checksum=False)
        case Settled():
            token = PushToken(event.worker, event.epoch, event.seq, 0)
            return encode(SETTLED, 0, 0, head_bytes(Push(token, 0, 0, ())), checksum=False)
        case PushEvent():
            message: Message = event.push
            if event.ids:
                parts = zip(event.push.tables, event.ids, strict=True)
                own = (part if ids is None else replace(part, ids=ids, route=0, packed=None) for part, ids in parts)
                message = replace(event.push, tables=tuple(own))
        case _:
            message = event
    bulk = [np.ascontiguousarray(array).data for array in arrays(message)]
    return encode(KIND_OF[type(message)], 0, 0, head_bytes(message), bulk, checksum=False)


def check_size(event: Event) -> None:
    """InvalidRequest or MessageTooLarge where an event's frame would be over the limits of frames; gRPC has others."""
    if isinstance(event, PushEvent):
        if (count := len(event.push.tables)) > MAX_BUFFERS // 2:  # ids and gradients of each; their names are short
            raise InvalidRequest(reason=f"a push of {count} tables; send at most {MAX_BUFFERS // 2} per call")
    elif not isinstance(event, TablesRestored):
        encode_event(event)


def decode_event(frame: Frame) -> LoggedEvent:
    """The event of a frame; InvalidRequest where it is none. Its arrays are views of the frame's buffers."""
    kind, head = frame.header.kind, frame.header.head
    if kind == EXPIRED:
        found = read(Heartbeat, head, ())
        return Expired(found.worker, found.epoch)
    if kind == SETTLED:
        token = read(Push, head, ()).token
        return Settled(token.worker, token.epoch, token.seq)
    request = REQUEST_KINDS.get(kind)
    if request is Push:
        return PushEvent(read(Push, head, frame.buffers))
    if request in _REQUESTS:
        return read(request, head, frame.buffers)
    raise InvalidRequest(reason=f"an event's frame of kind {kind:#x}, which no version of this package writes")


class EventLog(Protocol):
    """Keeps the events of a shard, in order, so that its state can be made again after its process has ended."""

    def append(self, event: Event, outcome: Outcome) -> int:
        """Take an event that has changed the state; its number (LSN), from 1. Nobody changes its arrays any more."""
        ...

    def when_safe(self, lsn: int, call: Callable[[], None]) -> None:
        """Call this once the events up to `lsn` will survive the process: at once, or later from any thread."""
        ...
