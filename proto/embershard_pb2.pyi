from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: int
    def __init__(self, worker: _Optional[int] = ...) -> None: ...

class Greeting(_message.Message):
    __slots__ = ("shard", "num_shards", "placement_epoch", "version", "instance", "max_message_bytes", "lineage", "term", "bundles")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    BUNDLES_FIELD_NUMBER: _ClassVar[int]
    shard: int
    num_shards: int
    placement_epoch: int
    version: str
    instance: str
    max_message_bytes: int
    lineage: int
    term: int
    bundles: bool
    def __init__(self, shard: _Optional[int] = ..., num_shards: _Optional[int] = ..., placement_epoch: _Optional[int] = ..., version: _Optional[str] = ..., instance: _Optional[str] = ..., max_message_bytes: _Optional[int] = ..., lineage: _Optional[int] = ..., term: _Optional[int] = ..., bundles: _Optional[bool] = ...) -> None: ...

class Initializer(_message.Message):
    __slots__ = ("kind", "params")
    class ParamsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    params: _containers.ScalarMap[str, float]
    def __init__(self, kind: _Optional[str] = ..., params: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Optimizer(_message.Message):
    __slots__ = ("name", "settings")
    class Setting(_message.Message):
        __slots__ = ("name", "value")
        NAME_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        name: str
        value: float
        def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    settings: _containers.RepeatedCompositeFieldContainer[Optimizer.Setting]
    def __init__(self, name: _Optional[str] = ..., settings: _Optional[_Iterable[_Union[Optimizer.Setting, _Mapping]]] = ...) -> None: ...

class TableSpec(_message.Message):
    __slots__ = ("name", "dim", "optimizer", "initializer", "id_space", "seed", "push_codec", "pull_codec")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    ID_SPACE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PUSH_CODEC_FIELD_NUMBER: _ClassVar[int]
    PULL_CODEC_FIELD_NUMBER: _ClassVar[int]
    name: str
    dim: int
    optimizer: Optimizer
    initializer: Initializer
    id_space: str
    seed: int
    push_codec: str
    pull_codec: str
    def __init__(self, name: _Optional[str] = ..., dim: _Optional[int] = ..., optimizer: _Optional[_Union[Optimizer, _Mapping]] = ..., initializer: _Optional[_Union[Initializer, _Mapping]] = ..., id_space: _Optional[str] = ..., seed: _Optional[int] = ..., push_codec: _Optional[str] = ..., pull_codec: _Optional[str] = ...) -> None: ...

class DeclareRequest(_message.Message):
    __slots__ = ("spec", "worker", "load", "dense", "lineage", "begins_lineage", "num_rows")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    BEGINS_LINEAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    spec: TableSpec
    worker: int
    load: bool
    dense: bool
    lineage: int
    begins_lineage: bool
    num_rows: int
    def __init__(self, spec: _Optional[_Union[TableSpec, _Mapping]] = ..., worker: _Optional[int] = ..., load: _Optional[bool] = ..., dense: _Optional[bool] = ..., lineage: _Optional[int] = ..., begins_lineage: _Optional[bool] = ..., num_rows: _Optional[int] = ...) -> None: ...

class Declared(_message.Message):
    __slots__ = ("created", "loading", "lineage")
    CREATED_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    created: bool
    loading: bool
    lineage: int
    def __init__(self, created: _Optional[bool] = ..., loading: _Optional[bool] = ..., lineage: _Optional[int] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("table", "placement_epoch", "ids", "rows", "worker", "last", "keep_state", "epoch", "seq", "first_incomplete", "term")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    KEEP_STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    FIRST_INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    table: str
    placement_epoch: int
    ids: bytes
    rows: bytes
    worker: int
    last: bool
    keep_state: bool
    epoch: int
    seq: int
    first_incomplete: int
    term: int
    def __init__(self, table: _Optional[str] = ..., placement_epoch: _Optional[int] = ..., ids: _Optional[bytes] = ..., rows: _Optional[bytes] = ..., worker: _Optional[int] = ..., last: _Optional[bool] = ..., keep_state: _Optional[bool] = ..., epoch: _Optional[int] = ..., seq: _Optional[int] = ..., first_incomplete: _Optional[int] = ..., term: _Optional[int] = ...) -> None: ...

class Loaded(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    def __init__(self, rows: _Optional[int] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("placement_epoch", "tables", "worker", "epoch", "required_clock", "term", "trace")
    class TableIds(_message.Message):
        __slots__ = ("table", "ids", "route", "codec", "since", "packed_ids", "members", "counts")
        TABLE_FIELD_NUMBER: _ClassVar[int]
        IDS_FIELD_NUMBER: _ClassVar[int]
        ROUTE_FIELD_NUMBER: _ClassVar[int]
        CODEC_FIELD_NUMBER: _ClassVar[int]
        SINCE_FIELD_NUMBER: _ClassVar[int]
        PACKED_IDS_FIELD_NUMBER: _ClassVar[int]
        MEMBERS_FIELD_NUMBER: _ClassVar[int]
        COUNTS_FIELD_NUMBER: _ClassVar[int]
        table: str
        ids: bytes
        route: int
        codec: str
        since: int
        packed_ids: bool
        members: _containers.RepeatedScalarFieldContainer[str]
        counts: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, table: _Optional[str] = ..., ids: _Optional[bytes] = ..., route: _Optional[int] = ..., codec: _Optional[str] = ..., since: _Optional[int] = ..., packed_ids: _Optional[bool] = ..., members: _Optional[_Iterable[str]] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...
    PLACEMENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_CLOCK_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    placement_epoch: int
    tables: _containers.RepeatedCompositeFieldContainer[PullRequest.TableIds]
    worker: int
    epoch: int
    required_clock: int
    term: int
    trace: bytes
    def __init__(self, placement_epoch: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[PullRequest.TableIds, _Mapping]]] = ..., worker: _Optional[int] = ..., epoch: _Optional[int] = ..., required_clock: _Optional[int] = ..., term: _Optional[int] = ..., trace: _Optional[bytes] = ...) -> None: ...

class Rows(_message.Message):
    __slots__ = ("tables", "version", "codecs", "settings", "coding_seconds", "held_seconds", "acknowledged")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    CODING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HELD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedScalarFieldContainer[bytes]
    version: int
    codecs: _containers.RepeatedScalarFieldContainer[str]
    settings: int
    coding_seconds: float
    held_seconds: float
    acknowledged: int
    def __init__(self, tables: _Optional[_Iterable[bytes]] = ..., version: _Optional[int] = ..., codecs: _Optional[_Iterable[str]] = ..., settings: _Optional[int] = ..., coding_seconds: _Optional[float] = ..., held_seconds: _Optional[float] = ..., acknowledged: _Optional[int] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("worker", "epoch", "seq", "first_incomplete", "clock", "placement_epoch", "tables", "last", "weight", "version", "difference", "early", "term", "trace")
    class TableGradients(_message.Message):
        __slots__ = ("table", "ids", "gradients", "lr_scale", "route", "codec", "packed_ids", "unique_ids", "members", "counts")
        TABLE_FIELD_NUMBER: _ClassVar[int]
        IDS_FIELD_NUMBER: _ClassVar[int]
        GRADIENTS_FIELD_NUMBER: _ClassVar[int]
        LR_SCALE_FIELD_NUMBER: _ClassVar[int]
        ROUTE_FIELD_NUMBER: _ClassVar[int]
        CODEC_FIELD_NUMBER: _ClassVar[int]
        PACKED_IDS_FIELD_NUMBER: _ClassVar[int]
        UNIQUE_IDS_FIELD_NUMBER: _ClassVar[int]
        MEMBERS_FIELD_NUMBER: _ClassVar[int]
        COUNTS_FIELD_NUMBER: _ClassVar[int]
        table: str
        ids: bytes
        gradients: bytes
        lr_scale: float
        route: int
        codec: str
        packed_ids: bool
        unique_ids: bool
        members: _containers.RepeatedScalarFieldContainer[str]
        counts: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, table: _Optional[str] = ..., ids: _Optional[bytes] = ..., gradients: _Optional[bytes] = ..., lr_scale: _Optional[float] = ..., route: _Optional[int] = ..., codec: _Optional[str] = ..., packed_ids: _Optional[bool] = ..., unique_ids: _Optional[bool] = ..., members: _Optional[_Iterable[str]] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    FIRST_INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    EARLY_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    worker: int
    epoch: int
    seq: int
    first_incomplete: int
    clock: int
    placement_epoch: int
    tables: _containers.RepeatedCompositeFieldContainer[PushRequest.TableGradients]
    last: bool
    weight: float
    version: int
    difference: bool
    early: bool
    term: int
    trace: bytes
    def __init__(self, worker: _Optional[int] = ..., epoch: _Optional[int] = ..., seq: _Optional[int] = ..., first_incomplete: _Optional[int] = ..., clock: _Optional[int] = ..., placement_epoch: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[PushRequest.TableGradients, _Mapping]]] = ..., last: _Optional[bool] = ..., weight: _Optional[float] = ..., version: _Optional[int] = ..., difference: _Optional[bool] = ..., early: _Optional[bool] = ..., term: _Optional[int] = ..., trace: _Optional[bytes] = ...) -> None: ...

class Pushed(_message.Message):
    __slots__ = ("duplicate", "applied", "skipped", "settings", "coding_seconds", "early", "acknowledged")
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    CODING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EARLY_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    duplicate: bool
    applied: int
    skipped: int
    settings: int
    coding_seconds: float
    early: bool
    acknowledged: int
    def __init__(self, duplicate: _Optional[bool] = ..., applied: _Optional[int] = ..., skipped: _Optional[int] = ..., settings: _Optional[int] = ..., coding_seconds: _Optional[float] = ..., early: _Optional[bool] = ..., acknowledged: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TableStatus(_message.Message):
    __slots__ = ("name", "dim", "rows", "bytes", "optimizer", "loading", "push_codec", "pull_codec", "pulled_rows", "pushed_rows", "skipped_rows")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    PUSH_CODEC_FIELD_NUMBER: _ClassVar[int]
    PULL_CODEC_FIELD_NUMBER: _ClassVar[int]
    PULLED_ROWS_FIELD_NUMBER: _ClassVar[int]
    PUSHED_ROWS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_ROWS_FIELD_NUMBER: _ClassVar[int]
    name: str
    dim: int
    rows: int
    bytes: int
    optimizer: str
    loading: bool
    push_codec: str
    pull_codec: str
    pulled_rows: int
    pushed_rows: int
    skipped_rows: int
    def __init__(self, name: _Optional[str] = ..., dim: _Optional[int] = ..., rows: _Optional[int] = ..., bytes: _Optional[int] = ..., optimizer: _Optional[str] = ..., loading: _Optional[bool] = ..., push_codec: _Optional[str] = ..., pull_codec: _Optional[str] = ..., pulled_rows: _Optional[int] = ..., pushed_rows: _Optional[int] = ..., skipped_rows: _Optional[int] = ...) -> None: ...

class DurationHistogram(_message.Message):
    __slots__ = ("counts", "sum")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class TransportStatus(_message.Message):
    __slots__ = ("name", "received_bytes", "sent_bytes", "connections", "shared_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    received_bytes: int
    sent_bytes: int
    connections: int
    shared_bytes: int
    def __init__(self, name: _Optional[str] = ..., received_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., connections: _Optional[int] = ..., shared_bytes: _Optional[int] = ...) -> None: ...

class MemberStatus(_message.Message):
    __slots__ = ("worker", "clock", "paused", "lease_seconds")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    worker: int
    clock: int
    paused: bool
    lease_seconds: float
    def __init__(self, worker: _Optional[int] = ..., clock: _Optional[int] = ..., paused: _Optional[bool] = ..., lease_seconds: _Optional[float] = ...) -> None: ...

class ShardStatus(_message.Message):
    __slots__ = ("shard", "num_shards", "placement_epoch", "version", "instance", "uptime_seconds", "resident_bytes", "requests", "pulled_rows", "pushed_rows", "duplicate_pushes", "skipped_rows", "queued_bytes", "tables", "clock", "staleness", "members", "staleness_seen", "expired_leases", "rendezvous", "failed_update", "used_bytes", "budget_bytes", "lineage", "durability", "log_bytes", "log_waiting_bytes", "term", "recovering", "recovered_bytes", "recovery_seconds", "base_lsn", "waits_for_room", "apply_busy_seconds", "queue_seconds", "pull_seconds", "push_seconds", "transports", "rejected", "restarts", "draining", "last_snapshot", "system_time")
    class RejectedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PULLED_ROWS_FIELD_NUMBER: _ClassVar[int]
    PUSHED_ROWS_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_PUSHES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_ROWS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_SEEN_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_LEASES_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    FAILED_UPDATE_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    LOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOG_WAITING_BYTES_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    RECOVERING_FIELD_NUMBER: _ClassVar[int]
    RECOVERED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BASE_LSN_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_ROOM_FIELD_NUMBER: _ClassVar[int]
    APPLY_BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PULL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PUSH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LAST_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_TIME_FIELD_NUMBER: _ClassVar[int]
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
    tables: _containers.RepeatedCompositeFieldContainer[TableStatus]
    clock: int
    staleness: int
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    staleness_seen: _containers.RepeatedScalarFieldContainer[int]
    expired_leases: int
    rendezvous: str
    failed_update: str
    used_bytes: int
    budget_bytes: int
    lineage: int
    durability: str
    log_bytes: int
    log_waiting_bytes: int
    term: int
    recovering: bool
    recovered_bytes: int
    recovery_seconds: float
    base_lsn: int
    waits_for_room: str
    apply_busy_seconds: float
    queue_seconds: DurationHistogram
    pull_seconds: DurationHistogram
    push_seconds: DurationHistogram
    transports: _containers.RepeatedCompositeFieldContainer[TransportStatus]
    rejected: _containers.ScalarMap[str, int]
    restarts: int
    draining: bool
    last_snapshot: float
    system_time: float
    def __init__(self, shard: _Optional[int] = ..., num_shards: _Optional[int] = ..., placement_epoch: _Optional[int] = ..., version: _Optional[str] = ..., instance: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., resident_bytes: _Optional[int] = ..., requests: _Optional[int] = ..., pulled_rows: _Optional[int] = ..., pushed_rows: _Optional[int] = ..., duplicate_pushes: _Optional[int] = ..., skipped_rows: _Optional[int] = ..., queued_bytes: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[TableStatus, _Mapping]]] = ..., clock: _Optional[int] = ..., staleness: _Optional[int] = ..., members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ..., staleness_seen: _Optional[_Iterable[int]] = ..., expired_leases: _Optional[int] = ..., rendezvous: _Optional[str] = ..., failed_update: _Optional[str] = ..., used_bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., lineage: _Optional[int] = ..., durability: _Optional[str] = ..., log_bytes: _Optional[int] = ..., log_waiting_bytes: _Optional[int] = ..., term: _Optional[int] = ..., recovering: _Optional[bool] = ..., recovered_bytes: _Optional[int] = ..., recovery_seconds: _Optional[float] = ..., base_lsn: _Optional[int] = ..., waits_for_room: _Optional[str] = ..., apply_busy_seconds: _Optional[float] = ..., queue_seconds: _Optional[_Union[DurationHistogram, _Mapping]] = ..., pull_seconds: _Optional[_Union[DurationHistogram, _Mapping]] = ..., push_seconds: _Optional[_Union[DurationHistogram, _Mapping]] = ..., transports: _Optional[_Iterable[_Union[TransportStatus, _Mapping]]] = ..., rejected: _Optional[_Mapping[str, int]] = ..., restarts: _Optional[int] = ..., draining: _Optional[bool] = ..., last_snapshot: _Optional[float] = ..., system_time: _Optional[float] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("worker", "epoch", "clock", "staleness", "workers", "lease_ms", "staleness_aware_lr", "run", "number")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_AWARE_LR_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    worker: int
    epoch: int
    clock: int
    staleness: int
    workers: int
    lease_ms: int
    staleness_aware_lr: bool
    run: int
    number: int
    def __init__(self, worker: _Optional[int] = ..., epoch: _Optional[int] = ..., clock: _Optional[int] = ..., staleness: _Optional[int] = ..., workers: _Optional[int] = ..., lease_ms: _Optional[int] = ..., staleness_aware_lr: _Optional[bool] = ..., run: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ("member", "clock", "started", "members")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    member: bool
    clock: int
    started: bool
    members: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, member: _Optional[bool] = ..., clock: _Optional[int] = ..., started: _Optional[bool] = ..., members: _Optional[_Iterable[int]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("worker", "epoch", "pause", "number")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    worker: int
    epoch: int
    pause: bool
    number: int
    def __init__(self, worker: _Optional[int] = ..., epoch: _Optional[int] = ..., pause: _Optional[bool] = ..., number: _Optional[int] = ...) -> None: ...

class LeaveAck(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("worker", "epoch", "flush", "term", "first_incomplete")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    FIRST_INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    worker: int
    epoch: int
    flush: bool
    term: int
    first_incomplete: int
    def __init__(self, worker: _Optional[int] = ..., epoch: _Optional[int] = ..., flush: _Optional[bool] = ..., term: _Optional[int] = ..., first_incomplete: _Optional[int] = ...) -> None: ...

class HeartbeatAck(_message.Message):
    __slots__ = ("clock", "members", "acknowledged")
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    clock: int
    members: _containers.RepeatedScalarFieldContainer[int]
    acknowledged: int
    def __init__(self, clock: _Optional[int] = ..., members: _Optional[_Iterable[int]] = ..., acknowledged: _Optional[int] = ...) -> None: ...

class RendezvousRequest(_message.Message):
    __slots__ = ("worker", "epoch", "name", "payload", "want_payloads", "participants")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    WANT_PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    PARTICIPANTS_FIELD_NUMBER: _ClassVar[int]
    worker: int
    epoch: int
    name: str
    payload: bytes
    want_payloads: bool
    participants: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker: _Optional[int] = ..., epoch: _Optional[int] = ..., name: _Optional[str] = ..., payload: _Optional[bytes] = ..., want_payloads: _Optional[bool] = ..., participants: _Optional[_Iterable[int]] = ...) -> None: ...

class RendezvousResult(_message.Message):
    __slots__ = ("workers", "payloads")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedScalarFieldContainer[int]
    payloads: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, workers: _Optional[_Iterable[int]] = ..., payloads: _Optional[_Iterable[bytes]] = ...) -> None: ...

class TakeSplitRequest(_message.Message):
    __slots__ = ("worker", "epoch", "data_epoch", "num_splits", "done")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DATA_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_SPLITS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    worker: int
    epoch: int
    data_epoch: int
    num_splits: int
    done: int
    def __init__(self, worker: _Optional[int] = ..., epoch: _Optional[int] = ..., data_epoch: _Optional[int] = ..., num_splits: _Optional[int] = ..., done: _Optional[int] = ...) -> None: ...

class Split(_message.Message):
    __slots__ = ("index", "returned")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    index: int
    returned: int
    def __init__(self, index: _Optional[int] = ..., returned: _Optional[int] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("url", "name", "id", "at_clock", "step", "incremental", "parent", "max_share")
    URL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    AT_CLOCK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    INCREMENTAL_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    MAX_SHARE_FIELD_NUMBER: _ClassVar[int]
    url: str
    name: str
    id: int
    at_clock: int
    step: str
    incremental: bool
    parent: int
    max_share: float
    def __init__(self, url: _Optional[str] = ..., name: _Optional[str] = ..., id: _Optional[int] = ..., at_clock: _Optional[int] = ..., step: _Optional[str] = ..., incremental: _Optional[bool] = ..., parent: _Optional[int] = ..., max_share: _Optional[float] = ...) -> None: ...

class Snapshotted(_message.Message):
    __slots__ = ("state", "clock", "rows", "total_rows", "bytes", "files", "path", "sha256", "stall_ms")
    STATE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    STALL_MS_FIELD_NUMBER: _ClassVar[int]
    state: str
    clock: int
    rows: int
    total_rows: int
    bytes: int
    files: int
    path: str
    sha256: str
    stall_ms: float
    def __init__(self, state: _Optional[str] = ..., clock: _Optional[int] = ..., rows: _Optional[int] = ..., total_rows: _Optional[int] = ..., bytes: _Optional[int] = ..., files: _Optional[int] = ..., path: _Optional[str] = ..., sha256: _Optional[str] = ..., stall_ms: _Optional[float] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("url", "name", "id", "sha256", "replace", "step")
    URL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    url: str
    name: str
    id: int
    sha256: str
    replace: bool
    step: str
    def __init__(self, url: _Optional[str] = ..., name: _Optional[str] = ..., id: _Optional[int] = ..., sha256: _Optional[str] = ..., replace: _Optional[bool] = ..., step: _Optional[str] = ...) -> None: ...

class Restored(_message.Message):
    __slots__ = ("state", "rows", "bytes")
    STATE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    state: str
    rows: int
    bytes: int
    def __init__(self, state: _Optional[str] = ..., rows: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class TableCodecs(_message.Message):
    __slots__ = ("table", "push", "pull")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    table: str
    push: str
    pull: str
    def __init__(self, table: _Optional[str] = ..., push: _Optional[str] = ..., pull: _Optional[str] = ...) -> None: ...

class CompressRequest(_message.Message):
    __slots__ = ("revision", "tables")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    revision: int
    tables: _containers.RepeatedCompositeFieldContainer[TableCodecs]
    def __init__(self, revision: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[TableCodecs, _Mapping]]] = ...) -> None: ...

class Compressed(_message.Message):
    __slots__ = ("revision", "tables")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    revision: int
    tables: _containers.RepeatedCompositeFieldContainer[TableCodecs]
    def __init__(self, revision: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[TableCodecs, _Mapping]]] = ...) -> None: ...
