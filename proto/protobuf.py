"""The bytes of the messages.

A message is a head, which is its protobuf form without the arrays, and the arrays. `dumps` puts the arrays into the
head's bytes fields, as gRPC wants them; the `stream` transport sends them beside it. Reading is total: any bytes give a
message or InvalidRequest. Arrays of a message that was read are views of the bytes given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message as Protobuf

from embershard.proto import embershard_pb2 as pb
from embershard.proto.arrays import MAX_MESSAGE_BYTES, Array, Bytes, Floats, Ids
from embershard.proto.codec.ids import decode_ids
from embershard.proto.codec.name import CodecName
from embershard.proto.errors import InvalidRequest, MessageTooLarge
from embershard.proto.messages import (
    MAX_MEMBERS,
    METHODS,
    Declare,
    Load,
    Loaded,
    Message,
    Pull,
    Push,
    Pushed,
    PushToken,
    Rendezvous,
    RendezvousResult,
    Rows,
    TableGradients,
    TableIds,
    arrays,
)
from embershard.proto.spec import Initializer, Optimizer, TableSpec
from embershard.proto.wire import MAX_BUFFERS, MAX_HEAD_BYTES

S = TypeVar("S", bound=np.generic)
Buffer = bytes | memoryview


_IDS, _FLOATS = np.dtype("<i8"), np.dtype("<f4")


def to_bytes(array: Array) -> bytes:
    """A copy of the values."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def read_ids(data: Buffer, table: str) -> Ids:
    """(U,) int64, a view of the bytes."""
    return _array(data, _IDS, table, "ids")


def read_floats(data: Buffer, table: str) -> Floats:
    """(U * dim,) float32, a view of the bytes."""
    return _array(data, _FLOATS, table, "rows")


def read_values(data: Buffer, codec: str, table: str) -> Floats | Bytes:
    """As `read_floats`; with a codec its payload, (N,) uint8."""
    return np.frombuffer(data, np.uint8) if codec else read_floats(data, table)


class IdReader:
    """The ids of one message. Compressed ones take no more memory than uncompressed ones could."""

    def __init__(self) -> None:
        self._left = MAX_MESSAGE_BYTES // 8

    def read(self, data: Buffer, table: str, packed: bool) -> tuple[Ids, Bytes | None]:
        """The ids, and what they travelled as where they were compressed. DamagedPayload."""
        if not packed:
            return read_ids(data, table), None
        coded = np.frombuffer(data, np.uint8)
        ids = decode_ids(coded, self._left)
        self._left -= len(ids)
        return ids, coded


def _array(data: Buffer, dtype: np.dtype[S], table: str, what: str) -> npt.NDArray[S]:
    size = memoryview(data).nbytes
    if size % dtype.itemsize:
        raise InvalidRequest(reason=f"table {table!r}: {size} bytes of {what} are no whole number of {dtype.name}")
    return np.frombuffer(data, dtype)


def _pack_spec(spec: TableSpec) -> pb.TableSpec:
    settings = [pb.Optimizer.Setting(name=name, value=value) for name, value in spec.optimizer.params().items()]
    return pb.TableSpec(
        name=spec.name,
        dim=spec.dim,
        optimizer=pb.Optimizer(name=spec.optimizer.name, settings=settings),
        initializer=pb.Initializer(kind=spec.initializer.kind, params=spec.initializer.params()),
        id_space=spec.id_space,
        seed=spec.seed,
        push_codec=_codec_text(spec.push_codec),
        pull_codec=_codec_text(spec.pull_codec),
    )


def _unpack_spec(spec: pb.TableSpec) -> TableSpec:
    return TableSpec(
        name=spec.name,
        dim=spec.dim,
        optimizer=Optimizer.of(spec.optimizer.name, {s.name: s.value for s in spec.optimizer.settings}),
        initializer=Initializer.of(spec.initializer.kind, dict(spec.initializer.params)),
        id_space=spec.id_space,
        seed=spec.seed,
        push_codec=CodecName.parse(spec.push_codec or "none"),
        pull_codec=CodecName.parse(spec.pull_codec or "none"),
    )


def _codec_text(codec: CodecName) -> str:
    return "" if codec.is_plain else str(codec)


def _pack_declare(m: Declare) -> pb.DeclareRequest:
    return pb.DeclareRequest(
        spec=_pack_spec(m.spec),
        worker=m.worker,
        load=m.load,
        dense=m.dense,
        lineage=m.lineage,
        begins_lineage=m.begins_lineage,
        num_rows=m.num_rows,
    )


def _unpack_declare(p: pb.DeclareRequest, bulk: Sequence[Buffer]) -> Declare:
    _check_arrays("Declare", bulk, 0)
    return Declare(_unpack_spec(p.spec), p.worker, p.load, p.dense, p.lineage, p.begins_lineage, p.num_rows)


def _pack_load(m: Load) -> pb.LoadRequest:
    token = m.token or _NO_TOKEN
    return pb.LoadRequest(
        table=m.table,
        placement_epoch=m.placement_epoch,
        worker=m.worker,
        last=m.last,
        keep_state=m.keep_state,
        epoch=token.epoch,
        seq=token.seq,
        first_incomplete=token.first_incomplete,
        term=m.term,
    )


_NO_TOKEN = PushToken(worker=0, epoch=0, seq=0, first_incomplete=0)


def _unpack_load(p: pb.LoadRequest, bulk: Sequence[Buffer]) -> Load:
    _check_arrays("Load", bulk, 2)
    ids, rows = bulk
    return Load(
        p.table,
        p.placement_epoch,
        read_ids(ids, p.table),
        read_floats(rows, p.table),
        p.worker,
        p.last,
        p.keep_state,
        PushToken(p.worker, p.epoch, p.seq, p.first_incomplete) if p.seq else None,
        p.term,
    )


def _pack_pull(m: Pull) -> pb.PullRequest:
    tables = [
        pb.PullRequest.TableIds(
            table=part.table,
            route=part.route,
            codec=part.codec,
            since=part.since,
            packed_ids=part.packed is not None,
            members=part.members,
            counts=part.counts,
        )
        for part in m.tables
    ]
    return pb.PullRequest(
        placement_epoch=m.placement_epoch,
        tables=tables,
        worker=m.worker,
        epoch=m.epoch,
        required_clock=m.required_clock,
        term=m.term,
        trace=m.trace,
    )


def _unpack_pull(p: pb.PullRequest, bulk: Sequence[Buffer]) -> Pull:
    ids = IdReader()
    tables = []
    _check_arrays("Pull", bulk, len(p.tables))
    for part, data in zip(p.tables, bulk, strict=True):
        values, packed = ids.read(data, part.table, part.packed_ids)
        members, counts = _bundle_of(part) if part.members or part.counts else ((), ())
        tables.append(TableIds(part.table, values, part.route, part.codec, part.since, packed, members, counts))
    return Pull(p.placement_epoch, tuple(tables), p.worker, p.epoch, p.required_clock, p.term, p.trace)


def _pack_rows(m: Rows) -> pb.Rows:
    return pb.Rows(
        version=m.version,
        codecs=m.codecs,
        settings=m.settings,
        coding_seconds=m.coding_seconds,
        held_seconds=m.held_seconds,
        acknowledged=m.acknowledged,
    )


def _unpack_rows(p: pb.Rows, bulk: Sequence[Buffer]) -> Rows:
    codecs = tuple(p.codecs)
    if codecs and len(codecs) != len(bulk):
        raise ValueError(f"{len(codecs)} codecs for {len(bulk)} tables")
    tables = tuple(
        [
            read_values(part, codec, f"#{i}")
            for i, (part, codec) in enumerate(zip(bulk, codecs or repeat(""), strict=False))
        ]
    )
    return Rows(tables, p.version, codecs, p.settings, p.coding_seconds, p.held_seconds, p.acknowledged)


def _pack_push(m: Push) -> pb.PushRequest:
    tables = [
        pb.PushRequest.TableGradients(
            table=part.table,
            lr_scale=part.lr_scale,
            route=part.route,
            codec=part.codec,
            packed_ids=part.packed is not None and not part.route,
            unique_ids=part.unique,
            members=part.members,
            counts=part.counts,
        )
        for part in m.tables
    ]
    return pb.PushRequest(
        worker=m.token.worker,
        epoch=m.token.epoch,
        seq=m.token.seq,
        first_incomplete=m.token.first_incomplete,
        clock=m.clock,
        placement_epoch=m.placement_epoch,
        tables=tables,
        last=m.last,
        weight=m.weight,
        version=m.version,
        difference=m.difference,
        early=m.early,
        term=m.term,
        trace=m.trace,
    )


_NO_IDS = np.empty(0, np.int64)


def _bundle_of(
    part: pb.PullRequest.TableIds | pb.PushRequest.TableGradients,
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The members and counts of a bundle. InvalidRequest where they do not go together, or with the rest."""
    members, counts = tuple(part.members), tuple(part.counts)
    if part.table or part.codec or part.packed_ids or len(members) != len(counts):
        raise InvalidRequest(
            reason=f"a bundle of {len(members)} tables with {len(counts)} counts, table {part.table!r} and codec "
            f"{part.codec!r}: it has a count for each, and neither a table, a codec nor packed ids"
        )
    if len(members) > MAX_MEMBERS:
        raise InvalidRequest(reason=f"a bundle of {len(members)} tables; send at most {MAX_MEMBERS} together")
    return members, counts


def _unpack_push(p: pb.PushRequest, bulk: Sequence[Buffer]) -> Push:
    left = iter(bulk)
    ids = IdReader()
    tables = []
    for part in p.tables:
        own, packed = (_NO_IDS, None) if part.route else ids.read(next(left), part.table, part.packed_ids)
        gradients = read_values(next(left), part.codec, part.table)
        scale = part.lr_scale if part.HasField("lr_scale") else 1.0
        bundle = _bundle_of(part) if part.members or part.counts else ((), ())
        made = TableGradients(
            part.table, own, gradients, scale, part.route, part.codec, packed, False, part.unique_ids, *bundle
        )
        tables.append(made)
    if next(left, None) is not None:
        raise ValueError("more arrays than its tables have")
    token = PushToken(p.worker, p.epoch, p.seq, p.first_incomplete)
    return Push(
        token,
        p.clock,
        p.placement_epoch,
        tuple(tables),
        p.last,
        p.weight,
        p.version,
        p.difference,
        early=p.early,
        term=p.term,
        trace=p.trace,
    )


def _pack_pushed(m: Pushed) -> pb.Pushed:
    return pb.Pushed(
        duplicate=m.duplicate,
        applied=m.applied,
        skipped=m.skipped,
        settings=m.settings,
        coding_seconds=m.coding_seconds,
        early=m.early,
        acknowledged=m.acknowledged,
    )


def _unpack_pushed(p: pb.Pushed, _: Sequence[Buffer]) -> Pushed:
    return Pushed(p.duplicate, p.applied, p.skipped, p.settings, p.coding_seconds, p.early, p.acknowledged)


def _pack_rendezvous(m: Rendezvous) -> pb.RendezvousRequest:
    return pb.RendezvousRequest(
        worker=m.worker, epoch=m.epoch, name=m.name, want_payloads=m.want_payloads, participants=m.participants
    )


def _unpack_rendezvous(p: pb.RendezvousRequest, bulk: Sequence[Buffer]) -> Rendezvous:
    _check_arrays("Rendezvous", bulk, 1)
    (payload,) = bulk
    return Rendezvous(
        p.worker, p.epoch, p.name, np.frombuffer(payload, np.uint8), p.want_payloads, tuple(p.participants)
    )


def _unpack_result(p: pb.RendezvousResult, bulk: Sequence[Buffer]) -> RendezvousResult:
    return RendezvousResult(tuple(p.workers), tuple(np.frombuffer(payload, np.uint8) for payload in bulk))


_FORMS: dict[type, tuple[type[Protobuf], Callable[..., Protobuf], Callable[..., Message]]] = {
    Declare: (pb.DeclareRequest, _pack_declare, _unpack_declare),
    Load: (pb.LoadRequest, _pack_load, _unpack_load),
    Loaded: (pb.Loaded, lambda m: pb.Loaded(rows=m.rows), lambda p, _: Loaded(p.rows)),
    Pull: (pb.PullRequest, _pack_pull, _unpack_pull),
    Rows: (pb.Rows, _pack_rows, _unpack_rows),
    Push: (pb.PushRequest, _pack_push, _unpack_push),
    Pushed: (pb.Pushed, _pack_pushed, _unpack_pushed),
    Rendezvous: (pb.RendezvousRequest, _pack_rendezvous, _unpack_rendezvous),
    RendezvousResult: (pb.RendezvousResult, lambda m: pb.RendezvousResult(workers=m.workers), _unpack_result),
}

M = TypeVar("M", bound=Message)


def head_bytes(message: Message) -> bytes:
    """The message without its arrays, serialised."""
    return _proto_of(message).SerializeToString()


def read(kind: type[M], head: bytes, bulk: Sequence[Buffer]) -> M:
    """The message of a head and its arrays' bytes. InvalidRequest where they are no such message."""
    proto = _parsed(kind, head)
    if any(_drain(proto)):
        raise InvalidRequest(reason=f"a {_name(kind)} message with arrays in its head; they travel beside it")
    return _built(kind, proto, bulk)


def dumps(message: Message) -> bytes:
    """Serialised protobuf form, arrays included."""
    proto = _proto_of(message)
    _fill(proto, [to_bytes(array) for array in arrays(message)])
    return proto.SerializeToString()


def loads(kind: type[M], data: bytes) -> M:
    """Message of serialised bytes, arrays included. InvalidRequest where they are no such message.

    MessageTooLarge, or InvalidRequest, for a request that no frame could hold: what it says beside its arrays, and the
    number of these, bound the work that it asks for.
    """
    proto = _parsed(kind, data)
    bulk = _drain(proto)
    if kind in METHODS:
        if len(bulk) > MAX_BUFFERS:
            raise InvalidRequest(reason=f"a message of {len(bulk)} arrays; send at most {MAX_BUFFERS} per call")
        # of an array itself, its tag and length are at most 8 bytes, and travel in no head
        if (head := len(data) - sum(map(len, bulk)) - 8 * len(bulk)) > MAX_HEAD_BYTES:
            raise MessageTooLarge(got=head, limit=MAX_HEAD_BYTES)
    return _built(kind, proto, bulk)


def _proto_of(message: Message) -> Protobuf:
    return message if isinstance(message, Protobuf) else _FORMS[type(message)][1](message)


def _parsed(kind: type[M], data: bytes) -> Protobuf:
    proto = kind() if issubclass(kind, Protobuf) else _FORMS[kind][0]()
    try:
        proto.ParseFromString(data)
    except Exception as error:  # protobuf's DecodeError class differs between its back ends
        raise InvalidRequest(reason=f"no {_name(kind)} message: {error}") from None
    return proto


def _built(kind: type[M], proto: Protobuf, bulk: Sequence[Buffer]) -> M:
    if isinstance(proto, kind):
        if kind in METHODS:  # a later shard's reply may have what this client does not know
            _check_arrays(_name(kind), bulk, 0)
        return proto
    try:
        message = _FORMS[kind][2](proto, bulk)
    except StopIteration:
        raise InvalidRequest(reason=f"a {_name(kind)} message with fewer arrays than its tables have") from None
    except ValueError as error:
        raise InvalidRequest(reason=str(error)) from None
    assert isinstance(message, kind)
    return message


def _check_arrays(name: str, bulk: Sequence[Buffer], want: int) -> None:
    if len(bulk) != want:
        raise InvalidRequest(reason=f"a {name} message with {len(bulk)} arrays, not {want}")


def _name(kind: type) -> str:
    return re.sub("Request$", "", kind.__name__)


def _fill(proto: Protobuf, bulk: Sequence[bytes]) -> None:
    """Put the arrays into the bytes fields, in the order of `arrays`."""
    if isinstance(proto, pb.Rows):
        proto.tables.extend(bulk)
    elif isinstance(proto, pb.LoadRequest):
        proto.ids, proto.rows = bulk
    elif isinstance(proto, pb.PullRequest):
        for ids, data in zip(proto.tables, bulk, strict=True):
            ids.ids = data
    elif isinstance(proto, pb.RendezvousRequest):
        (proto.payload,) = bulk
    elif isinstance(proto, pb.RendezvousResult):
        proto.payloads.extend(bulk)
    elif isinstance(proto, pb.PushRequest):
        left = iter(bulk)
        for part in proto.tables:
            if not part.route:
                part.ids = next(left)
            part.gradients = next(left)


def _drain(proto: Protobuf) -> list[bytes]:
    """The arrays of the bytes fields, in the order of `arrays`."""
    if isinstance(proto, pb.Rows):
        return list(proto.tables)
    if isinstance(proto, pb.LoadRequest):
        return [proto.ids, proto.rows]
    if isinstance(proto, pb.PullRequest):
        return [part.ids for part in proto.tables]
    if isinstance(proto, pb.RendezvousRequest):
        return [proto.payload]
    if isinstance(proto, pb.RendezvousResult):
        return list(proto.payloads)
    if isinstance(proto, pb.PushRequest):
        return [
            data for part in proto.tables for data in ((part.gradients,) if part.route else (part.ids, part.gradients))
        ]
    return []
