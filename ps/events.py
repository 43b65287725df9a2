"""The events of a shard: each change of its state is one, and the same events in the same order give the same state.

Requests that change the state are events as they came, but for a push, whose ids have to stand in it. The other events
are made by the shard itself (ps/shard.py): nothing else that it does on its own, as by the time, changes the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import msgpack
import numpy as np

from embershard.proto.arrays import Floats, Ids
from embershard.proto.errors import InvalidRequest, LogStalled
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
from embershard.proto.protobuf import head_bytes, read, read_floats, read_ids
from embershard.proto.snapshot.manifest import WorkerWindow
from embershard.proto.spec import TableSpec
from embershard.proto.wire import MAX_BUFFERS, Frame, encode
from embershard.ps.coordination.outcome import Outcome
from embershard.ps.restore import Contents


class PushEvent(NamedTuple):
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
class Term:
    """A process has begun to serve these rows: term 1 with none, each later one after a recovery."""

    term: int


@dataclass(frozen=True, slots=True)
class RestoredRows:
    """Some rows of a snapshot, with their states; they count with the TablesRestored of the same lineage.

    Only a log needs them: the shard has the tables at once.
    """

    lineage: int
    spec: TableSpec
    ids: Ids
    rows: Floats
    state: Floats


@dataclass(frozen=True, slots=True)
class TablesRestored:
    """The tables of a snapshot took the place of those that were here; from a log, they are in RestoredRows."""

    contents: Contents


Event = (
    PushEvent | Load | Declare | Compress | Join | Leave | Rendezvous | TakeSplit | Expired | Settled | Term
    | RestoredRows | TablesRestored
)  # fmt: skip

# Kinds of the frames of events: those of requests are the requests' (docs/wire.md), the others' have bit 6 set; their
# heads are those of a heartbeat, and of a push without tables. A log outlives the version that wrote it.
EXPIRED, SETTLED, TERM, RESTORED_ROWS, RESTORED = range(0x41, 0x46)
_OWN_KINDS: dict[type, int] = {
    Expired: EXPIRED,
    Settled: SETTLED,
    Term: TERM,
    RestoredRows: RESTORED_ROWS,
    TablesRestored: RESTORED,
}
_KINDS: dict[type, int] = {**KIND_OF, PushEvent: KIND_OF[Push], **_OWN_KINDS}
_REQUESTS = (Load, Declare, Compress, Join, Leave, Rendezvous, TakeSplit)


def encode_event(event: Event) -> list[bytes | memoryview]:
    """The pieces of an event's frame (docs/wire.md), without a checksum of its arrays, which are not copied.

    A push is written as one that brings all of its ids, restored tables without their rows.
    """
    match event:
        case Expired():
            head = head_bytes(Heartbeat(worker=event.worker, epoch=event.epoch))
            return encode(EXPIRED, 0, 0, head, checksum=False)
        case Settled():
            token = PushToken(event.worker, event.epoch, event.seq, 0)
            return encode(SETTLED, 0, 0, head_bytes(Push(token, 0, 0, ())), checksum=False)
        case Term():
            return encode(TERM, 0, 0, head_bytes(Heartbeat(worker=0, epoch=event.term)), checksum=False)
        case RestoredRows():
            head = head_bytes(Declare(event.spec, lineage=event.lineage))
            parts_of_rows = [np.ascontiguousarray(array).data for array in (event.ids, event.rows, event.state)]
            return encode(RESTORED_ROWS, 0, 0, head, parts_of_rows, checksum=False)
        case TablesRestored(contents):
            workers = [[one.worker, one.epoch, one.first_incomplete, one.replies] for one in contents.workers]
            plain = {"lineage": contents.lineage, "workers": workers, "flags": contents.flags}
            return encode(RESTORED, 0, 0, b"", [msgpack.packb(plain)], checksum=False)
        case PushEvent():
            message: Message = _whole(event) if event.ids else event.push
        case _:
            message = event
    bulk = [np.ascontiguousarray(array).data for array in arrays(message)]
    return encode(KIND_OF[type(message)], 0, 0, head_bytes(message), bulk, checksum=False)


def applied(event: Event) -> Event:
    """The event with the gradients that were applied, where those that came may have changed since."""
    if not isinstance(event, PushEvent) or all([part.copy is None for part in event.push.tables]):
        return event
    return PushEvent(_whole(event))


def _whole(event: PushEvent) -> Push:
    """The push as one that brings all of its ids, and the gradients that were applied."""
    parts = []
    for number, part in enumerate(event.push.tables):
        ids = event.ids[number] if event.ids else None
        gradients = part.gradients if part.copy is None else part.copy
        if ids is not None:
            part = replace(part, ids=ids, route=0, packed=None, gradients=gradients)
        elif gradients is not part.gradients:
            part = replace(part, gradients=gradients)
        parts.append(part)
    return replace(event.push, tables=tuple(parts))


def check_size(event: Event) -> None:
    """InvalidRequest or MessageTooLarge where an event's frame would be over the limits of frames; gRPC has others."""
    if isinstance(event, PushEvent):
        if (count := len(event.push.tables)) > MAX_BUFFERS // 2:  # ids and gradients of each; their names are short
            raise InvalidRequest(reason=f"a push of {count} tables; send at most {MAX_BUFFERS // 2} per call")
    elif not isinstance(event, TablesRestored):
        encode_event(event)


def kind_of(event: Event) -> int:
    """The kind of an event's frame."""
    return _KINDS[type(event)]


def event_name(kind: int) -> str:
    """Return the name of a kind of events, for messages."""
    known = {own: event for event, own in _OWN_KINDS.items()} | REQUEST_KINDS
    return known[kind].__name__.removesuffix("Request") if kind in known else f"kind {kind}"


def decode_event(frame: Frame) -> Event:
    """The event of a frame; InvalidRequest where it is none. Its arrays are views of the frame's buffers."""
    kind, head = frame.header.kind, frame.header.head
    if kind == EXPIRED:
        found = read(Heartbeat, head, ())
        return Expired(found.worker, found.epoch)
    if kind == SETTLED:
        token = read(Push, head, ()).token
        return Settled(token.worker, token.epoch, token.seq)
    if kind == TERM:
        return Term(read(Heartbeat, head, ()).epoch)
    if kind == RESTORED_ROWS:
        return _restored_rows(frame)
    if kind == RESTORED:
        plain = msgpack.unpackb(frame.buffers[0])
        workers = [
            WorkerWindow(worker, epoch, first, tuple((seq, applied, skipped) for seq, applied, skipped in replies))
            for worker, epoch, first, replies in plain["workers"]
        ]
        flags = {name: (dense, (push, pull)) for name, (dense, (push, pull)) in plain["flags"].items()}
        return TablesRestored(Contents([], workers, plain["lineage"], flags))
    request = REQUEST_KINDS.get(kind)
    if request is Push:
        return PushEvent(read(Push, head, frame.buffers))
    if request in _REQUESTS:
        return read(request, head, frame.buffers)
    raise InvalidRequest(reason=f"an event's frame of kind {kind:#x}, which no version of this package writes")


def _restored_rows(frame: Frame) -> RestoredRows:
    declared, name = read(Declare, frame.header.head, ()), "restored"
    ids, rows, state = frame.buffers
    count = memoryview(ids).nbytes // 8
    parts = [read_floats(part, name).reshape(count, -1 if count else 0) for part in (rows, state)]
    return RestoredRows(declared.lineage, declared.spec, read_ids(ids, name), *parts)


class EventLog(Protocol):
    """Keeps the events of a shard, in order, so that its state can be made again after its process has ended."""

    def check_room(self, num_bytes: int) -> None:
        """Before a request changes anything: LogStalled, LogTooLong or ShardBusy where it has to come again later."""
        ...

    def append(self, event: Event, outcome: Outcome) -> int:
        """Take an event that has changed the state; its number (LSN), from 1. Nobody changes its arrays any more."""
        ...

    @property
    def safe_lsn(self) -> int:
        """The events up to this one are safe."""
        ...

    def when_safe(self, lsn: int, call: Callable[[], None], refuse: Callable[[LogStalled], None] | None = None) -> None:
        """Call this once the events up to `lsn` are safe, as the mode says: at once, or later from any thread.

        Where the log cannot be written meanwhile, `refuse` is called in its place, if there is one.
        """
        ...

    def fail(self, error: BaseException) -> None:
        """The state has changed, and the log may not have it: end the process, so that the next one recovers."""
        ...

    def status(self) -> tuple[str, int, int, float, str]:
        """The mode; bytes of the log, and of those not written yet; seconds that a recovery would take.

        Last, why it cannot be written; empty where it can.
        """
        ...
