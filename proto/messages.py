"""The messages of embershard.proto as frozen data over numpy arrays: what `Shard.handle` and the transports speak.

protobuf.py turns them into bytes and back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from embershard.proto.arrays import MAX_MESSAGE_BYTES, Array, Bytes, Floats, Ids
from embershard.proto.spec import TableSpec
from embershard.proto.wire import VERSION

PACKED = "packed"  # the codec of a push whose payload says itself how it is made (proto/codec/payload.py)
DELTA = "delta"  # the codec of a pull of what changed since: a payload of elements, or "" where that is all rows

# A shard puts a request that waits for other workers back so long before its deadline, or a quarter of its time, that
# the reply still arrives.
PUT_BACK_SECONDS = 0.5
READ_ONLY_WORKER = 65_535  # the last worker number, which no job of this size has: of who reads beside those that train


@dataclass(frozen=True, slots=True)
class Hello:
    """Ask a shard to describe itself."""

    worker: int = 0


@dataclass(frozen=True, slots=True)
class Greeting:
    """A shard's description of itself: its number, its placement and its version."""

    shard: int
    num_shards: int
    placement_epoch: int
    version: str
    instance: str
    max_message_bytes: int = MAX_MESSAGE_BYTES
    lineage: int = 0  # the same on all shards whose rows belong together; 0: none yet


@dataclass(frozen=True, slots=True)
class Declare:
    """Make sure that a table exists; with `load`, its creator loads the first values; a `dense` one is of layers.

    A shard of another `lineage` refuses (0: it does not compare). `begins_lineage`: see embershard.proto.
    """

    spec: TableSpec
    worker: int = 0
    load: bool = False
    dense: bool = False
    lineage: int = 0
    begins_lineage: bool = False


@dataclass(frozen=True, slots=True)
class Declared:
    """`created` by this call; `loading` while somebody still loads the first values."""

    created: bool
    loading: bool
    lineage: int = 0  # that the shard has now


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


@dataclass(frozen=True, slots=True)
class Loaded:
    """The reply to a load: how many rows were assigned."""

    rows: int


@dataclass(frozen=True, slots=True)
class TableIds:
    """The ids to read from one table; the shard keeps them under the number `route`, unless it is 0.

    `codec` is what the rows are wanted in: "" (float32), a values codec, or "delta", what changed since the version
    `since` (0: everything). Ids that ascend may travel `packed` in their place.
    """

    table: str
    ids: Ids  # (U,) unique
    route: int = 0
    codec: str = ""
    since: int = 0
    packed: Bytes | None = None  # (N,) what proto/codec/ids.py makes of `ids`


@dataclass(frozen=True, slots=True)
class Pull:
    """Read rows of several tables, once `required_clock` clocks are closed.

    Route numbers are those of the worker's incarnation (epoch).
    """

    placement_epoch: int
    tables: tuple[TableIds, ...]
    worker: int = 0
    epoch: int = 0
    required_clock: int = 0


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


@dataclass(frozen=True, slots=True)
class TableGradients:
    """Gradients of rows of one table: (U, dim), or flat (U * dim,) from bytes; with a `codec` a payload, (N,) uint8.

    With a `route` the ids are those that a pull left with the shard under this number, and do not travel again. Others
    may travel `packed`, if they ascend. `codec` is "" (float32), PACKED, or the name of a user-defined one. Rows that
    the worker had `held` back are like any others to a shard, which is not told. Unless ids are `unique` a shard sums
    the gradients of equal ones.
    """

    table: str
    ids: Ids  # (U,) unique
    gradients: Floats | Bytes
    lr_scale: float = 1.0
    route: int = 0
    codec: str = ""
    packed: Bytes | None = None  # (N,) what proto/codec/ids.py makes of `ids`
    held: bool = False
    unique: bool = True


@dataclass(frozen=True, slots=True)
class Push:
    """Apply gradients, once per token.

    `last` is the worker's last message of the clock to this shard. A member's gradients count by `weight`, its number
    of samples, among those of its clock. `version` is that of the rows they were computed on, 0 where it is not known.
    A `difference` is added to the rows past the optimizer.
    """

    token: PushToken
    clock: int
    placement_epoch: int
    tables: tuple[TableGradients, ...]
    last: bool = True
    weight: float = 1.0
    version: int = 0
    difference: bool = False


@dataclass(frozen=True, slots=True)
class Pushed:
    """The reply to a push: how many rows were updated, and whether it was a repeat."""

    duplicate: bool
    applied: int
    skipped: int
    settings: int = 0  # grows when the shard's compression settings change
    coding_seconds: float = field(default=0.0, compare=False)  # that the shard took to decode it


@dataclass(frozen=True, slots=True)
class Join:
    """Become a member of the job: from `clock` on, the shard's clock waits for this worker's pushes.

    `staleness` 0: the gradients of a clock are gathered and applied once; k: a bound; -1: none. With
    `staleness_aware_lr` a push's learning rate is divided by the updates that its rows had missed. Nothing is closed
    before `workers` have joined. A higher `run` than any before ends the run that goes on here; 0 takes part in that
    one.
    """

    worker: int
    epoch: int
    clock: int
    staleness: int
    workers: int
    lease_ms: int
    staleness_aware_lr: bool = False
    run: int = 0


@dataclass(frozen=True, slots=True)
class Joined:
    """No `member` where the shard's clock is beyond the one asked for; `started` once all expected ones had joined."""

    member: bool
    clock: int
    started: bool
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave the job; with `pause` stay a member that no clock waits for, but a rendezvous does."""

    worker: int
    epoch: int
    pause: bool = False


@dataclass(frozen=True, slots=True)
class LeaveAck:
    """The worker left, or is paused."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The request that renews a worker's lease."""

    worker: int
    epoch: int


@dataclass(frozen=True, slots=True)
class HeartbeatAck:
    """The reply to a heartbeat: the lease is renewed."""

    clock: int
    members: tuple[int, ...]


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
    """Who took part, ascending, and their payloads for those who want them."""

    workers: tuple[int, ...]
    payloads: tuple[Bytes, ...]


@dataclass(frozen=True, slots=True)
class TakeSplit:
    """The next of `num_splits` parts of pass `data_epoch` over the data; `done` is the one just finished, or -1."""

    worker: int
    epoch: int
    data_epoch: int
    num_splits: int
    done: int = -1


@dataclass(frozen=True, slots=True)
class Split:
    """A part to train on, or -1 where every part is finished; `returned` of them were dealt a second time."""

    index: int
    returned: int


@dataclass(frozen=True, slots=True)
class TableCodecs:
    """How a table is to travel, as codec texts; "": as its workers say themselves."""

    table: str
    push: str = ""
    pull: str = ""


@dataclass(frozen=True, slots=True)
class Compress:
    """Have the workers switch these tables, under a revision above the shard's; revision 0 only checks and asks.

    A direction that is "" stays as it was said before. Without tables all that was said before is forgotten, unless
    members of a job are there: so begins a worker that trains alone, and never joins.
    """

    revision: int = 0
    tables: tuple[TableCodecs, ...] = ()


@dataclass(frozen=True, slots=True)
class Compressed:
    """All that was said of the tables of this job until this revision, which only grows; 0: nothing ever was."""

    revision: int
    tables: tuple[TableCodecs, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Write this shard's part of a snapshot, at once or when `at_clock` clocks are closed.

    `step` is "begin", "watch" (how far is it?) or "cancel".
    """

    url: str
    name: str
    id: int
    at_clock: int = 0
    step: str = "begin"


@dataclass(frozen=True, slots=True)
class Snapshotted:
    """How far a shard's part is: `state` is "waiting", "writing", "done", "cancelling" or "cancelled".

    `clock` is the first one that was not closed. Once done, `path` is the list of its files, and `sha256` (hex) that
    list's digest.
    """

    state: str
    clock: int = 0
    rows: int = 0
    total_rows: int = 0
    bytes: int = 0
    files: int = 0
    path: str = ""
    sha256: str = ""
    stall_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Restore:
    """Read what belongs to this shard from a snapshot whose manifest has this digest (hex).

    `step` is "begin", "watch" (how far is it?), "install" (put what was read in place) or "cancel".
    """

    url: str
    name: str
    id: int
    sha256: str
    replace: bool = False
    step: str = "begin"


@dataclass(frozen=True, slots=True)
class Restored:
    """How far it is: `state` is "reading", "ready", "installed" or "cancelled"; rows are those that belong here."""

    state: str
    rows: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class GetStatus:
    """Ask a shard for its state."""


@dataclass(frozen=True, slots=True)
class TableStatus:
    """One table of a shard."""

    name: str
    dim: int
    rows: int
    bytes: int
    optimizer: str
    loading: bool
    push_codec: str = ""  # of the worker that declared it last
    pull_codec: str = ""


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One worker of the job, as a shard sees it: the next clock that it will push, and what is left of its lease."""

    worker: int
    clock: int
    paused: bool
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard; counters run from its start.

    `clock` is the first that is not closed; `staleness_seen[n]` are pushes whose rows had missed n updates (the last
    number: so many or more).
    """

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
    clock: int = 0
    staleness: int = -1
    members: tuple[MemberStatus, ...] = ()
    staleness_seen: tuple[int, ...] = ()
    expired_leases: int = 0
    rendezvous: str = ""  # name of the last one that was completed
    failed_update: str = ""  # the first error of this job's updates, empty without one
    used_bytes: int = 0  # of the memory budget: rows, index, copies for a snapshot, updates that wait
    budget_bytes: int = 0
    lineage: int = 0  # as in Greeting


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


def _ids(part: TableIds | TableGradients) -> Ids | Bytes:
    return part.ids if part.packed is None else part.packed


def bulk_bytes(message: Message) -> int:
    """Bytes of the arrays of a message: what a queue or a limit counts."""
    return sum(array.nbytes for array in arrays(message))
