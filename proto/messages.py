"""The messages of embershard.proto as frozen data over numpy arrays, and their protobuf form.

`Shard.handle` and the carriers speak these; `pack` and `unpack` are the border to bytes. `unpack` is total: any
protobuf message gives a message or InvalidRequest. Arrays of an unpacked message are read-only views of its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message as Protobuf

from embershard.proto import embershard_pb2 as pb
from embershard.proto.errors import InvalidRequest
from embershard.proto.spec import Codec, Initializer, Optimizer, TableSpec

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
S = TypeVar("S", bound=np.generic)

# 64 MiB above gRPC's 4 MiB default: large enough to amortise a call, small enough to bound memory per connection.
MAX_MESSAGE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Hello:
    """Who are you?"""

    worker: int = 0


@dataclass(frozen=True, slots=True)
class Greeting:
    """A shard introduces itself."""

    shard: int
    num_shards: int
    placement_epoch: int
    version: str
    instance: str
    max_message_bytes: int = MAX_MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class Declare:
    """Make sure that a table exists; with `load`, its creator loads the first values."""

    spec: TableSpec
    worker: int = 0
    load: bool = False


@dataclass(frozen=True, slots=True)
class Declared:
    """`created` by this call; `loading` while somebody still loads the first values."""

    created: bool
    loading: bool


@dataclass(frozen=True, slots=True)
class Load:
    """Assign rows."""

    table: str
    placement_epoch: int
    ids: Ids  # (U,)
    rows: Floats  # (U, dim)
    worker: int = 0
    last: bool = True
    keep_state: bool = False


@dataclass(frozen=True, slots=True)
class Loaded:
    """Rows assigned."""

    rows: int


@dataclass(frozen=True, slots=True)
class TableIds:
    """The ids to read from one table."""

    table: str
    ids: Ids  # (U,) unique


@dataclass(frozen=True, slots=True)
class Pull:
    """Read rows of several tables."""

    placement_epoch: int
    tables: tuple[TableIds, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows read, a table each, in the order of the request.

    An array is (U, dim) from a shard in this process, and flat (U * dim,) after `unpack`, which does not know the dim.
    """

    tables: tuple[Floats, ...]


@dataclass(frozen=True, slots=True)
class PushToken:
    """What makes a push apply once (RIFL, Lee et al. 2015): see embershard.proto."""

    worker: int
    epoch: int
    seq: int
    first_incomplete: int


@dataclass(frozen=True, slots=True)
class TableGradients:
    """Gradients of rows of one table: (U, dim), or flat (U * dim,) after `unpack`."""

    table: str
    ids: Ids  # (U,) unique
    gradients: Floats
    lr_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Push:
    """Apply gradients, once per token."""

    token: PushToken
    clock: int
    placement_epoch: int
    tables: tuple[TableGradients, ...]


@dataclass(frozen=True, slots=True)
class Pushed:
    """What became of a push."""

    duplicate: bool
    applied: int
    skipped: int


@dataclass(frozen=True, slots=True)
class GetStatus:
    """How are you?"""


@dataclass(frozen=True, slots=True)
class TableStatus:
    """One table of a shard."""

    name: str
    dim: int
    rows: int
    bytes: int
    optimizer: str
    loading: bool


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard; counters run from its start."""

    shard: int
    num_shards: int
    placement_epoch: int
    version: str
    instance: str
    uptime_seconds: float
    resident_bytes: int
    requests: int
    pulled_rows: int
    pushed_rows: int
    duplicate_pushes: int
    skipped_rows: int
    queued_bytes: int
    tables: tuple[TableStatus, ...]


Request = Hello | Declare | Load | Pull | Push | GetStatus
Reply = Greeting | Declared | Loaded | Rows | Pushed | ShardStatus
Message = Request | Reply

# request type -> (method of the gRPC service, reply type)
METHODS: dict[type[Request], tuple[str, type[Reply]]] = {
    Hello: ("Hello", Greeting),
    Declare: ("Declare", Declared),
    Load: ("Load", Loaded),
    Pull: ("Pull", Rows),
    Push: ("Push", Pushed),
    GetStatus: ("Status", ShardStatus),
}
SERVICE = "embershard.v1.Shard"


def bulk_bytes(message: Message) -> int:
    """Bytes of the arrays of a message: what a queue or a limit counts."""
    match message:
        case Pull(tables=ids):
            return sum(part.ids.nbytes for part in ids)
        case Push(tables=grads):
            return sum(part.ids.nbytes + part.gradients.nbytes for part in grads)
        case Rows(tables=rows):
            return sum(part.nbytes for part in rows)
        case Load():
            return message.ids.nbytes + message.rows.nbytes
        case _:
            return 0


def _ids_bytes(ids: Ids) -> bytes:
    return ids.astype("<i8", copy=False).tobytes()


def _floats_bytes(values: Floats) -> bytes:
    return values.astype("<f4", copy=False).tobytes()


def _ids(data: bytes, table: str) -> Ids:
    return _array(data, np.dtype("<i8"), table, "ids")


def _floats(data: bytes, table: str) -> Floats:
    return _array(data, np.dtype("<f4"), table, "rows")


def _array(data: bytes, dtype: np.dtype[S], table: str, what: str) -> npt.NDArray[S]:
    if len(data) % dtype.itemsize:
        raise InvalidRequest(reason=f"table {table!r}: {len(data)} bytes of {what} are no whole number of {dtype.name}")
    return np.frombuffer(data, dtype)


def _pack_codec(codec: Codec) -> pb.Codec:
    return pb.Codec(kind=codec.kind, params=codec.params())


def _pack_spec(spec: TableSpec) -> pb.TableSpec:
    settings = [pb.Optimizer.Setting(name=name, value=value) for name, value in spec.optimizer.params().items()]
    return pb.TableSpec(
        name=spec.name,
        dim=spec.dim,
        optimizer=pb.Optimizer(name=spec.optimizer.name, settings=settings),
        initializer=pb.Initializer(kind=spec.initializer.kind, params=spec.initializer.params()),
        id_space=spec.id_space,
        seed=spec.seed,
        push_codec=_pack_codec(spec.push_codec),
        pull_codec=_pack_codec(spec.pull_codec),
    )


def _unpack_spec(spec: pb.TableSpec) -> TableSpec:
    return TableSpec(
        name=spec.name,
        dim=spec.dim,
        optimizer=Optimizer.of(spec.optimizer.name, {s.name: s.value for s in spec.optimizer.settings}),
        initializer=Initializer.of(spec.initializer.kind, dict(spec.initializer.params)),
        id_space=spec.id_space,
        seed=spec.seed,
        push_codec=Codec.of(spec.push_codec.kind, dict(spec.push_codec.params)),
        pull_codec=Codec.of(spec.pull_codec.kind, dict(spec.pull_codec.params)),
    )


def _pack_declare(m: Declare) -> pb.DeclareRequest:
    return pb.DeclareRequest(spec=_pack_spec(m.spec), worker=m.worker, load=m.load)


def _unpack_declare(p: pb.DeclareRequest) -> Declare:
    return Declare(_unpack_spec(p.spec), p.worker, p.load)


def _pack_load(m: Load) -> pb.LoadRequest:
    return pb.LoadRequest(
        table=m.table,
        placement_epoch=m.placement_epoch,
        ids=_ids_bytes(m.ids),
        rows=_floats_bytes(m.rows),
        worker=m.worker,
        last=m.last,
        keep_state=m.keep_state,
    )


def _unpack_load(p: pb.LoadRequest) -> Load:
    ids, rows = _ids(p.ids, p.table), _floats(p.rows, p.table)
    return Load(p.table, p.placement_epoch, ids, rows, p.worker, p.last, p.keep_state)


def _pack_pull(m: Pull) -> pb.PullRequest:
    tables = [pb.PullRequest.TableIds(table=part.table, ids=_ids_bytes(part.ids)) for part in m.tables]
    return pb.PullRequest(placement_epoch=m.placement_epoch, tables=tables)


def _unpack_pull(p: pb.PullRequest) -> Pull:
    return Pull(p.placement_epoch, tuple(TableIds(part.table, _ids(part.ids, part.table)) for part in p.tables))


def _pack_rows(m: Rows) -> pb.Rows:
    return pb.Rows(tables=[_floats_bytes(part) for part in m.tables])


def _unpack_rows(p: pb.Rows) -> Rows:
    return Rows(tuple(_floats(part, f"#{i}") for i, part in enumerate(p.tables)))


def _pack_push(m: Push) -> pb.PushRequest:
    tables = [
        pb.PushRequest.TableGradients(
            table=part.table,
            ids=_ids_bytes(part.ids),
            gradients=_floats_bytes(part.gradients),
            lr_scale=part.lr_scale,
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
    )


def _unpack_push(p: pb.PushRequest) -> Push:
    token = PushToken(p.worker, p.epoch, p.seq, p.first_incomplete)
    tables = (
        TableGradients(part.table, _ids(part.ids, part.table), _floats(part.gradients, part.table), part.lr_scale)
        for part in p.tables
    )
    return Push(token, p.clock, p.placement_epoch, tuple(tables))


def _pack_status(m: ShardStatus) -> pb.ShardStatus:
    flat = {f.name: getattr(m, f.name) for f in fields(m) if f.name != "tables"}
    tables = [pb.TableStatus(**{f.name: getattr(t, f.name) for f in fields(t)}) for t in m.tables]
    return pb.ShardStatus(**flat, tables=tables)


def _unpack_status(p: pb.ShardStatus) -> ShardStatus:
    flat = {f.name: getattr(p, f.name) for f in fields(ShardStatus) if f.name != "tables"}
    tables = (TableStatus(**{f.name: getattr(t, f.name) for f in fields(TableStatus)}) for t in p.tables)
    return ShardStatus(**flat, tables=tuple(tables))


def _plain(message: type[Message], proto: type[Protobuf]) -> tuple[Callable[..., Protobuf], Callable[..., Message]]:
    """Converters of a message whose fields are numbers and strings of the same names."""
    names = [f.name for f in fields(message)]
    return (
        lambda m: proto(**{name: getattr(m, name) for name in names}),
        lambda p: message(**{name: getattr(p, name) for name in names}),
    )


_CODECS: dict[type, tuple[type[Protobuf], Callable[..., Protobuf], Callable[..., Message]]] = {
    Declare: (pb.DeclareRequest, _pack_declare, _unpack_declare),
    Load: (pb.LoadRequest, _pack_load, _unpack_load),
    Pull: (pb.PullRequest, _pack_pull, _unpack_pull),
    Rows: (pb.Rows, _pack_rows, _unpack_rows),
    Push: (pb.PushRequest, _pack_push, _unpack_push),
    ShardStatus: (pb.ShardStatus, _pack_status, _unpack_status),
    Hello: (pb.HelloRequest, *_plain(Hello, pb.HelloRequest)),
    Greeting: (pb.Greeting, *_plain(Greeting, pb.Greeting)),
    Declared: (pb.Declared, *_plain(Declared, pb.Declared)),
    Loaded: (pb.Loaded, *_plain(Loaded, pb.Loaded)),
    Pushed: (pb.Pushed, *_plain(Pushed, pb.Pushed)),
    GetStatus: (pb.StatusRequest, *_plain(GetStatus, pb.StatusRequest)),
}

M = TypeVar("M", bound=Message)


def pack(message: Message) -> Protobuf:
    """The protobuf form of a message."""
    return _CODECS[type(message)][1](message)


def unpack(kind: type[M], proto: Protobuf) -> M:
    """The message of a protobuf form. InvalidRequest where its content makes no sense."""
    try:
        message = _CODECS[kind][2](proto)
    except ValueError as error:
        raise InvalidRequest(reason=str(error)) from None
    assert isinstance(message, kind)
    return message


def dumps(message: Message) -> bytes:
    """Serialised protobuf form."""
    return pack(message).SerializeToString()


def loads(kind: type[M], data: bytes) -> M:
    """Message of serialised bytes. InvalidRequest where they are no such message."""
    proto = _CODECS[kind][0]()
    try:
        proto.ParseFromString(data)
    except Exception as error:  # protobuf's DecodeError class differs between its back ends
        raise InvalidRequest(reason=f"no {re.sub('Request$', '', kind.__name__)} message: {error}") from None
    return unpack(kind, proto)
