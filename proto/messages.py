"""The messages of embershard.proto: what `Shard.handle` and the transports speak.

Those with arrays, and those of every step, are frozen data over numpy arrays; protobuf.py turns them into bytes and
back. The others are protobuf's own classes. Nobody changes a message once it was sent: within one process the receiver
is given the very object.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from google.protobuf.message import Message as Protobuf

from embershard.proto import embershard_pb2 as pb
from embershard.proto.arrays import Array, Bytes, Floats, Ids
from embershard.proto.spec import TableSpec
from embershard.proto.wire import VERSION

PACKED = "packed"  # the codec of a push whose payload says itself how it is made (proto/codec/payload.py)
DELTA = "delta"  # the codec of a pull of what changed since: a payload of elements, or "" where that is all rows

# A shard puts a request that waits for other workers back so long before its deadline, or a quarter of its time, that
# the reply still arrives.
PUT_BACK_SECONDS = 0.5
READ_ONLY_WORKER = 65_535  # the last worker number, which no job of this size has: of who reads beside those that train

MAX_MEMBERS = 2048  # of a bundle: as many tables as a message has room for without one
TableKey = str | tuple[str, ...]  # a table, or the members of a bundle

Hello = pb.HelloRequest
Greeting = pb.Greeting
Declared = pb.Declared
Join = pb.JoinRequest
Joined = pb.Joined
Leave = pb.LeaveRequest
LeaveAck = pb.LeaveAck
Heartbeat = pb.HeartbeatRequest
HeartbeatAck = pb.HeartbeatAck
TakeSplit = pb.TakeSplitRequest
Split = pb.Split
TableCodecs = pb.TableCodecs
Compress = pb.CompressRequest
Compressed = pb.Compressed
Snapshot = pb.SnapshotRequest
Snapshotted = pb.Snapshotted
Restore = pb.RestoreRequest
Restored = pb.Restored
GetStatus = pb.StatusRequest
TableStatus = pb.TableStatus
MemberStatus = pb.MemberStatus
ShardStatus = pb.ShardStatus


@dataclass(frozen=True, slots=True)
class Declare:
    """Make sure that a table exists; with `load`, its creator loads the first values; a `dense` one is of layers.

    A shard of another `lineage` refuses, and while a job goes on, one to which another worker gave another `num_rows`
    (0: it does not compare). `begins_lineage`: see embershard.proto.
    """

    spec: TableSpec
    worker: int = 0
    load: bool = False
    dense: bool = False
    lineage: int = 0
    begins_lineage: bool = False
    num_rows: int = 0


@dataclass(frozen=True, slots=True)
class PushToken:
    """The number by which a shard applies a push or a load once (RIFL, Lee et al. 2015): see embershard.proto."""

    worker: int
    epoch: int
    seq: int
    first_incomplete: int


@dataclass(frozen=True, slots=True)
class Load:
    """Assign rows, once per token; without a token a load that is repeated is applied again."""

    table: str
    placement_epoch: int
    ids: Ids  # (U,)
    rows: Floats  # (U, dim)
    worker: int = 0
    last: bool = True
    keep_state: bool = False
    token: PushToken | None = None  # of the same worker
    term: int = 0  # as in Pull


@dataclass(frozen=True, slots=True)
class Loaded:
    """The reply to a load: how many rows were assigned."""

    rows: int


@dataclass(frozen=True, slots=True)
class TableIds:
    """The ids to read from one table; the shard keeps them under the number `route`, unless it is 0.

    `codec` is what the rows are wanted in: "" (float32), a values codec, or "delta", what changed since the version
    `since` (0: everything). Ids that ascend may travel `packed` in their place.

    With `members` it is of a bundle: tables of one dim, whose ids, and rows, lie one table's behind the other's,
    `counts` of each. `table` is "" then, which no shard has, and there is no codec.
    """

    table: str
    ids: Ids  # (U,) unique
    route: int = 0
    codec: str = ""
    since: int = 0
    packed: Bytes | None = None  # (N,) what proto/codec/ids.py makes of `ids`
    members: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()
    # (U * dim,) memory for the rows, if they come as float32: a shard that can writes them there. It does not travel.
    into: Floats | None = field(default=None, compare=False)

    @property
    def key(self) -> TableKey:
        """The table, or the members of a bundle."""
        return self.members or self.table


@dataclass(frozen=True, slots=True)
class Pull:
    """Read rows of several tables, once `required_clock` clocks are closed.

    Route numbers are those of the worker's incarnation (epoch). `term` is the Greeting's of the process that it is
    meant for: another one refuses it (OtherTerm), since its sender may have pushes for it first. 0: any.
    """

    placement_epoch: int
    tables: tuple[TableIds, ...]
    worker: int = 0
    epoch: int = 0
    required_clock: int = 0
    term: int = 0
    trace: bytes = b""  # see embershard.proto


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows read, a table each, in the order of the request.

    An array is (U, dim) from a shard in this process, and flat (U * dim,) from bytes, which do not tell the dim; where
    its codec is not "", it is a payload, (N,) uint8.
    """

    tables: tuple[Floats | Bytes, ...]
    version: int = 0  # updates that the shard had applied
    codecs: tuple[str, ...] = ()  # of each table, as in TableIds; (): all are float32
    settings: int = 0  # grows when the shard's compression settings change
    coding_seconds: float = field(default=0.0, compare=False)  # that the shard took to encode them
    held_seconds: float = field(default=0.0, compare=False)  # that the request waited for other workers' clocks
    acknowledged: int = 0  # as in Pushed, of the worker that pulled


@dataclass(frozen=True, slots=True)
class TableGradients:
    """Gradients of rows of one table: (U, dim), or flat (U * dim,) from bytes; with a `codec` a payload, (N,) uint8.

    With a `route` the ids are those that a pull left with the shard under this number, and do not travel again. Others
    may travel `packed`, if they ascend. `codec` is "" (float32), PACKED, or the name of a user-defined one. A shard
    does not learn which rows are a worker's residual (`is_residual`). Unless ids are `unique` a shard sums gradients of
    equal ones. `members` and `counts`: as in TableIds. `copy` is memory for as many floats as `gradients`, which then
    may change at any time: it has those that were applied, once the push is.
    """

    table: str
    ids: Ids  # (U,) unique
    gradients: Floats | Bytes
    lr_scale: float = 1.0
    route: int = 0
    codec: str = ""
    packed: Bytes | None = None  # (N,) what proto/codec/ids.py makes of `ids`
    is_residual: bool = False
    unique: bool = True
    members: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()
    copy: Floats | None = field(default=None, compare=False)  # it does not travel

    @property
    def key(self) -> TableKey:
        """The table, or the members of a bundle."""
        return self.members or self.table


@dataclass(frozen=True, slots=True)
class Push:
    """Apply gradients, once per token.

    `last` is the worker's last message of the clock to this shard. A member's gradients count by `weight`, its number
    of samples, among those of its clock. `version` is that of the rows they were computed on, 0 where it is not known.
    A `difference` is added to the rows past the optimizer. An `early` one may be answered before it is safe: its
    sender keeps it until it is acknowledged.
    """

    token: PushToken
    clock: int
    placement_epoch: int
    tables: tuple[TableGradients, ...]
    last: bool = True
    weight: float = 1.0
    version: int = 0
    difference: bool = False
    early: bool = False
    term: int = 0  # as in Pull
    trace: bytes = b""


@dataclass(frozen=True, slots=True)
class Pushed:
    """The reply to a push: how many rows were updated, and whether it was a repeat.

    An `early` one came before the push is safe. The worker's pushes that were answered are safe up to the seq
    `acknowledged` (0: nothing is said).
    """

    duplicate: bool
    applied: int
    skipped: int
    settings: int = 0  # grows when the shard's compression settings change
    coding_seconds: float = field(default=0.0, compare=False)  # that the shard took to decode it
    early: bool = False
    acknowledged: int = 0


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Exchange bytes with all other members; answered once all of them have called.

    A name is used once: a late caller of a rendezvous that is complete reads who took part. `participants` are the
    workers that are expected, as far as they are members; none: all members.
    """

    worker: int
    epoch: int
    name: str
    payload: Bytes  # (N,) uint8
    want_payloads: bool = True
    participants: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RendezvousResult:
    """List the workers that took part, ascending, with their payloads for those who asked."""

    workers: tuple[int, ...]
    payloads: tuple[Bytes, ...]


Request = (
    Hello | Declare | Load | Pull | Push | GetStatus | Join | Leave | Heartbeat | Rendezvous | TakeSplit | Snapshot
    | Restore | Compress
)  # fmt: skip
Reply = (
    Greeting | Declared | Loaded | Rows | Pushed | ShardStatus | Joined | LeaveAck | HeartbeatAck | RendezvousResult
    | Split | Snapshotted | Restored | Compressed
)  # fmt: skip
Message = Request | Reply

# request type -> (method of the gRPC service, reply type)
METHODS: dict[type[Request], tuple[str, type[Reply]]] = {
    Hello: ("Hello", Greeting),
    Declare: ("Declare", Declared),
    Load: ("Load", Loaded),
    Pull: ("Pull", Rows),
    Push: ("Push", Pushed),
    GetStatus: ("Status", ShardStatus),
    Join: ("Join", Joined),
    Leave: ("Leave", LeaveAck),
    Heartbeat: ("Heartbeat", HeartbeatAck),
    Rendezvous: ("Rendezvous", RendezvousResult),
    TakeSplit: ("TakeSplit", Split),
    Snapshot: ("Snapshot", Snapshotted),
    Restore: ("Restore", Restored),
    Compress: ("Compress", Compressed),
}
SERVICE = f"embershard.v{VERSION}.Shard"
OTHER_SERVICES = r"/embershard\.v(\d{1,5})\.Shard/"  # the start of the methods of all versions, as a pattern

# kinds of frames of the `stream` transport (docs/wire.md): a reply's is its request's with the highest bit set
REQUEST_KINDS: dict[int, type[Request]] = {number: kind for number, kind in enumerate(METHODS, start=1)}
REPLY_KINDS: dict[int, type[Reply]] = {number | 0x80: METHODS[kind][1] for number, kind in REQUEST_KINDS.items()}
KIND_OF: dict[type[Message], int] = {kind: number for number, kind in [*REQUEST_KINDS.items(), *REPLY_KINDS.items()]}
ERROR_KIND = 0xFF


M = TypeVar("M", bound=Message)


def replace(message: M, **fields: Any) -> M:
    """A copy of a message, of either sort, with other values in these fields."""
    if isinstance(message, Protobuf):
        return cast(M, type(message)(**({field.name: value for field, value in message.ListFields()} | fields)))
    return dataclasses.replace(message, **fields)


def arrays(message: Message) -> list[Array]:
    """The arrays of a message that travel, in the order in which they do."""
    match message:
        case Pull(tables=ids):
            return [_ids(part) for part in ids]
        case Push(tables=gradients):
            return [
                array
                for part in gradients
                for array in ((part.gradients,) if part.route else (_ids(part), part.gradients))
            ]
        case Rows(tables=rows):
            return list(rows)
        case Load():
            return [message.ids, message.rows]
        case Rendezvous():
            return [message.payload]
        case RendezvousResult():
            return list(message.payloads)
        case _:
            return []


def ids_by_table(parts: Iterable[TableIds | TableGradients]) -> Iterator[tuple[str, int]]:
    """Every table of these parts, and the number of its ids."""
    for part in parts:
        if part.members:
            yield from zip(part.members, part.counts, strict=True)
        else:
            yield part.table, len(part.ids)


def _ids(part: TableIds | TableGradients) -> Ids | Bytes:
    return part.ids if part.packed is None else part.packed


def bulk_bytes(message: Message) -> int:
    """Bytes of the arrays of a message: what a queue or a limit counts."""
    return sum(array.nbytes for array in arrays(message))
