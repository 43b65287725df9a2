"""Every metric of shards and workers, once: their exporters, docs, dashboards and alerts are made from these tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from embershard.proto.monitoring.histogram import BOUNDS, DurationHistogram

MetricType = Literal["counter", "gauge", "histogram"]
MAX_TABLES = 200  # values of the label `table`; the tables behind them are added up under OTHER
OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric, as Prometheus knows it.

    `source` is where its number comes from: "ShardStatus.clock" and "TableStatus.rows" are fields of
    proto/embershard.proto, which are exported as they are; anything else is described.
    """

    name: str
    type: MetricType
    help: str
    source: str
    labels: tuple[str, ...] = ()

    @property
    def status_field(self) -> str:
        """The field of ShardStatus that it is; empty where it is none."""
        return self._field_of("ShardStatus")

    @property
    def table_field(self) -> str:
        """The field of TableStatus that it is, of every table; empty where it is none."""
        return self._field_of("TableStatus")

    def _field_of(self, message: str) -> str:
        name, _, field = self.source.partition(".")
        return field if name == message and field.isidentifier() else ""


class HistogramValue(NamedTuple):
    """Counts by bucket, the last one of what is above every bound, and the sum of what was counted."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @staticmethod
    def of(durations: DurationHistogram) -> HistogramValue:
        """A copy of the durations of a histogram."""
        return HistogramValue(BOUNDS, tuple(durations.counts), durations.sum)


class Sample(NamedTuple):
    """The value of a metric for some values of its labels, in their order."""

    metric: str
    value: float | HistogramValue
    labels: tuple[str, ...] = ()


def by_table(metric: str, values: Mapping[tuple[str, ...], float]) -> Iterator[Sample]:
    """The samples of a metric whose first label is `table`; those of tables behind the first MAX_TABLES as one."""
    names = dict.fromkeys(labels[0] for labels in values)
    known = set(list(names)[:MAX_TABLES]) - {OTHER}  # a series of a table's own of that name would be there twice
    rest: dict[tuple[str, ...], float] = {}
    for labels, value in values.items():
        if labels[0] in known:
            yield Sample(metric, value, labels)
        else:
            other = (OTHER, *labels[1:])
            rest[other] = rest.get(other, 0) + value
    for labels, value in rest.items():
        yield Sample(metric, value, labels)


def find(tables: Iterable[tuple[Metric, ...]], name: str) -> Metric:
    """The metric of a name. KeyError where there is none."""
    return {metric.name: metric for table in tables for metric in table}[name]


_LOOP = "counted where requests arrive and replies leave"

# of every shard; the label `shard` is its index
SHARD_METRICS = (
    Metric(
        name="embershard_shard_request_duration_seconds",
        type="histogram",
        help="From the arrival of a request to its reply, including waits for other workers and for the event log.",
        source=_LOOP,
        labels=("method", "transport"),
    ),
    Metric(
        name="embershard_shard_requests_total",
        type="counter",
        help="Answered requests by outcome: ok, the type of the error, or expired (the caller no longer waited).",
        source=_LOOP,
        labels=("method", "transport", "outcome"),
    ),
    Metric(
        name="embershard_shard_queue_duration_seconds",
        type="histogram",
        help="From the arrival of a request until the apply thread starts it.",
        source="ShardStatus.queue_seconds",
    ),
    Metric(
        name="embershard_shard_apply_busy_seconds_total",
        type="counter",
        help="Busy time of the apply thread, which reads and changes all rows.",
        source="ShardStatus.apply_busy_seconds",
    ),
    Metric(
        name="embershard_shard_received_bytes_total",
        type="counter",
        help="Bytes received, those in shared memory too; of grpc and rpc those of messages.",
        source="TransportStatus.received_bytes",
        labels=("transport",),
    ),
    Metric(
        name="embershard_shard_sent_bytes_total",
        type="counter",
        help="Bytes sent, those in shared memory too; of grpc and rpc those of messages.",
        source="TransportStatus.sent_bytes",
        labels=("transport",),
    ),
    Metric(
        name="embershard_shard_connections",
        type="gauge",
        help="Open connections.",
        source="TransportStatus.connections",
        labels=("transport",),
    ),
    Metric(
        name="embershard_shard_shared_bytes",
        type="gauge",
        help="Memory that workers of this machine share with the shard; only touched pages take memory.",
        source="TransportStatus.shared_bytes",
        labels=("transport",),
    ),
    Metric(
        name="embershard_shard_rejected_total",
        type="counter",
        help="Rejected requests, connections and logins (not_authenticated, not_allowed, tls, other_user).",
        source="ShardStatus.rejected, by key",
        labels=("reason",),
    ),
    Metric(
        name="embershard_shard_queue_bytes",
        type="gauge",
        help="Bytes of accepted requests that are not handled yet.",
        source="ShardStatus.queued_bytes",
    ),
    Metric(
        name="embershard_shard_resident_memory_bytes",
        type="gauge",
        help="Resident memory of the process.",
        source="ShardStatus.resident_bytes",
    ),
    Metric(
        name="embershard_shard_memory_used_bytes",
        type="gauge",
        help="Used part of the memory budget: rows, index, copies for a snapshot, waiting updates.",
        source="ShardStatus.used_bytes",
    ),
    Metric(
        name="embershard_shard_memory_limit_bytes",
        type="gauge",
        help="The memory budget (embershard ps --memory).",
        source="ShardStatus.budget_bytes",
    ),
    Metric(
        name="embershard_shard_table_rows",
        type="gauge",
        help="Number of rows.",
        source="TableStatus.rows",
        labels=("table",),
    ),
    Metric(
        name="embershard_shard_table_bytes",
        type="gauge",
        help="Memory of rows and index.",
        source="TableStatus.bytes",
        labels=("table",),
    ),
    Metric(
        name="embershard_shard_table_pulled_rows_total",
        type="counter",
        help="Rows that were read.",
        source="TableStatus.pulled_rows",
        labels=("table",),
    ),
    Metric(
        name="embershard_shard_table_pushed_rows_total",
        type="counter",
        help="Gradient rows that were accepted.",
        source="TableStatus.pushed_rows",
        labels=("table",),
    ),
    Metric(
        name="embershard_shard_table_skipped_rows_total",
        type="counter",
        help="Gradient rows that were skipped, because they had NaN or Inf.",
        source="TableStatus.skipped_rows",
        labels=("table",),
    ),
    Metric(
        name="embershard_shard_duplicate_pushes_total",
        type="counter",
        help="Repeated pushes and loads, not applied again. Not by table, because a push has several tables.",
        source="ShardStatus.duplicate_pushes",
    ),
    Metric(
        name="embershard_shard_staleness_updates",
        type="histogram",
        help="Pushes by staleness, the number of updates that their rows had missed; 31 means 31 and more.",
        source="ShardStatus.staleness_seen",
    ),
    Metric(
        name="embershard_shard_clock",
        type="gauge",
        help="The first clock that is not closed.",
        source="ShardStatus.clock",
    ),
    Metric(
        name="embershard_shard_members",
        type="gauge",
        help="Workers that are members of the job.",
        source="ShardStatus.members, counted",
    ),
    Metric(
        name="embershard_shard_expired_leases_total",
        type="counter",
        help="Times that a worker was evicted.",
        source="ShardStatus.expired_leases",
    ),
    Metric(
        name="embershard_shard_update_failed",
        type="gauge",
        help="1 if an update of this job has failed, else 0.",
        source="ShardStatus.failed_update, whether there is one",
    ),
    Metric(
        name="embershard_shard_snapshot_last_success_timestamp_seconds",
        type="gauge",
        help="When the last snapshot was complete on this shard; 0 without any.",
        source="ShardStatus.last_snapshot",
    ),
    Metric(
        name="embershard_shard_certificate_expiry_timestamp_seconds",
        type="gauge",
        help="When the certificate of new connections expires; missing without --tls.",
        source="tls.crt of --tls, as it is in use",
    ),
    Metric(
        name="embershard_shard_log_bytes",
        type="gauge",
        help="Bytes of the shard's event log, which a recovery reads; 0 without one.",
        source="ShardStatus.log_bytes",
    ),
    Metric(
        name="embershard_shard_log_waiting_bytes",
        type="gauge",
        help="Bytes of the event log's records that are not written yet.",
        source="ShardStatus.log_waiting_bytes",
    ),
    Metric(
        name="embershard_shard_recovery_seconds",
        type="gauge",
        help="Estimated time of a recovery from the event log; during a recovery, the remaining time.",
        source="ShardStatus.recovery_seconds",
    ),
    Metric(
        name="embershard_shard_restarts_total",
        type="counter",
        help="Restarts of the shard by its supervisor.",
        source="ShardStatus.restarts",
    ),
    Metric(
        name="embershard_shard_uptime_seconds",
        type="gauge",
        help="Time since the process began to serve.",
        source="ShardStatus.uptime_seconds",
    ),
    Metric(
        name="embershard_shard_ready",
        type="gauge",
        help="1 if /readyz returns 200, else 0.",
        source="/readyz",
    ),
    Metric(
        name="embershard_shard_build_info",
        type="gauge",
        help="Always 1; the labels tell which process this is.",
        source="ShardStatus.version, .instance, .durability",
        labels=("version", "instance", "durability"),
    ),
)

# of every worker; the label `worker` is its number, `run` the name of the run's folder
WORKER_METRICS = (
    Metric(
        name="embershard_worker_step_duration_seconds",
        type="histogram",
        help="Training steps, without evaluations.",
        source="proto/timing.py",
    ),
    Metric(
        name="embershard_worker_step_part_duration_seconds",
        type="histogram",
        help="Parts of a step. Those with overlapped=no are in the training thread, and add up to the step's duration.",
        source="proto/timing.py",
        labels=("part", "overlapped"),
    ),
    Metric(
        name="embershard_worker_steps_total",
        type="counter",
        help="Steps of this process.",
        source="proto/timing.py",
    ),
    Metric(
        name="embershard_worker_samples_total",
        type="counter",
        help="Samples of this worker.",
        source="worker/reporting/throughput.py",
    ),
    Metric(
        name="embershard_worker_loss",
        type="gauge",
        help="Mean training loss of about the last second.",
        source="`loss` of a `train` line of log.jsonl, of this worker",
    ),
    Metric(
        name="embershard_worker_samples_per_second",
        type="gauge",
        help="Samples per second of all workers, as known to this one, over about the last second.",
        source="`samples_per_second` of a `train` line of log.jsonl",
    ),
    Metric(
        name="embershard_worker_metric",
        type="gauge",
        help="A metric of the last evaluation.",
        source="`figures` of an `eval` line of log.jsonl",
        labels=("name", "split"),
    ),
    Metric(
        name="embershard_worker_waiting_seconds_total",
        type="counter",
        help="Time that the training thread waited: for shards, for other workers' clocks, for data.",
        source="worker/reporting/throughput.py",
        labels=("reason",),
    ),
    Metric(
        name="embershard_worker_transferred_bytes_total",
        type="counter",
        help="Bytes on the wire between this worker and the shards, both ways; table is empty for frames and heads.",
        source="worker/client/byte_counts.py",
        labels=("table", "direction", "part"),
    ),
    Metric(
        name="embershard_worker_uncompressed_bytes_total",
        type="counter",
        help="Bytes that these messages would have as float32 rows and plain ids.",
        source="worker/client/byte_counts.py",
        labels=("table", "direction", "part"),
    ),
    Metric(
        name="embershard_worker_table_codec_info",
        type="gauge",
        help="Always 1; the labels tell the codecs of a table now.",
        source="worker/compression/compressor.py",
        labels=("table", "push", "pull"),
    ),
    Metric(
        name="embershard_worker_skipped_rows_total",
        type="counter",
        help="Gradient rows that were skipped, because they had NaN or Inf.",
        source="ClientStats of worker/client/connections.py",
    ),
    Metric(
        name="embershard_worker_lost_leases_total",
        type="counter",
        help="Times that this worker was evicted, and the others continued without it.",
        source="ClientStats of worker/client/connections.py",
    ),
    Metric(
        name="embershard_worker_clock",
        type="gauge",
        help="The clock of this worker: the number of its next step.",
        source="worker/strategy",
    ),
    Metric(
        name="embershard_worker_certificate_expiry_timestamp_seconds",
        type="gauge",
        help="When the certificate of new connections expires; missing without --tls.",
        source="tls.crt of --tls, as it is in use",
    ),
)
