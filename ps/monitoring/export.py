"""The metrics of a shard (proto/monitoring/metrics.py), from its status and its counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from google.protobuf.json_format import MessageToDict

from embershard.proto.messages import METHODS, ShardStatus
from embershard.proto.monitoring.exporter import stuck
from embershard.proto.monitoring.histogram import BOUNDS
from embershard.proto.monitoring.metrics import SHARD_METRICS, HistogramValue, Sample, by_table
from embershard.ps.monitoring.counters import Counters

if TYPE_CHECKING:
    from embershard.proto.security.credentials import CertificateFolder

_PREFIX = "embershard_shard_"
_OF_STATUS = {
    metric.name: metric.status_field for metric in SHARD_METRICS if metric.status_field and metric.type != "histogram"
}
_OF_TABLES = {metric.name: metric.table_field for metric in SHARD_METRICS if metric.table_field}
# a replay counts these up again, which would look like new ones after a start at 0
_REPLAYED = {f"{_PREFIX}expired_leases_total", f"{_PREFIX}staleness_updates"} | {
    metric.name for metric in SHARD_METRICS if metric.table_field and metric.type == "counter"
}


class MonitoredShard:
    """A shard as its exporter sees it. `idle_seconds` gives how long ago its loop and its apply thread moved.

    `certificates` are those of its TLS port.
    """

    def __init__(
        self,
        status: Callable[[], ShardStatus],
        counters: Counters,
        idle_seconds: Callable[[], Mapping[str, float]],
        certificates: CertificateFolder | None = None,
    ) -> None:
        self._status, self._counters, self._idle_seconds = status, counters, idle_seconds
        self._certificates = certificates

    def samples(self) -> Iterator[Sample]:
        """Every metric of the shard; while it recovers, none that its replay counts."""
        status = self._status()
        for sample in self._samples(status):
            if not (status.recovering and sample.metric in _REPLAYED):
                yield sample

    def _samples(self, status: ShardStatus) -> Iterator[Sample]:
        for name, field in _OF_STATUS.items():
            yield Sample(name, getattr(status, field))
        for name, field in _OF_TABLES.items():
            yield from by_table(name, {(table.name,): getattr(table, field) for table in status.tables})
        queue = tuple(status.queue_seconds.counts)
        yield Sample(f"{_PREFIX}queue_duration_seconds", HistogramValue(BOUNDS, queue, status.queue_seconds.sum))
        yield Sample(f"{_PREFIX}staleness_updates", _staleness(tuple(status.staleness_seen)))
        yield Sample(f"{_PREFIX}members", len(status.members))
        yield Sample(f"{_PREFIX}update_failed", bool(status.failed_update))
        yield Sample(f"{_PREFIX}ready", not _not_ready(status))
        yield Sample(f"{_PREFIX}build_info", 1, (status.version, status.instance, status.durability))
        for transport in status.transports:
            for field in ("received_bytes_total", "sent_bytes_total", "connections", "shared_bytes"):
                yield Sample(f"{_PREFIX}{field}", getattr(transport, field.removesuffix("_total")), (transport.name,))
        for reason, count in status.rejected.items():
            yield Sample(f"{_PREFIX}rejected_total", count, (reason,))
        if self._certificates is not None:
            expires = self._certificates.current.expires.timestamp()
            yield Sample(f"{_PREFIX}certificate_expiry_timestamp_seconds", expires)
        yield from self._requests()

    def _requests(self) -> Iterator[Sample]:
        for transport, counters in tuple(self._counters.transports.items()):
            for kind, durations in tuple(counters.durations.items()):
                labels = METHODS[kind][0], transport
                yield Sample(f"{_PREFIX}request_duration_seconds", HistogramValue.of(durations), labels)
            for (kind, outcome), count in tuple(counters.outcomes.items()):
                yield Sample(f"{_PREFIX}requests_total", count, (METHODS[kind][0], transport, outcome))

    def not_live(self) -> str:
        """Why the process should be started again; empty where it should not."""
        return stuck(self._idle_seconds())

    def not_ready(self) -> str:
        """Why no request should be sent here now; empty where one may."""
        return _not_ready(self._status())

    def as_json(self) -> Mapping[str, object]:
        """The status, with its names in proto/embershard.proto."""
        return MessageToDict(
            self._status(), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )


def _not_ready(status: ShardStatus) -> str:
    if status.recovering:
        return f"it recovers its rows, for about {status.recovery_seconds:.0f} s more"
    if status.draining:
        return "it finishes what it accepted, and ends"
    loading = [table.name for table in status.tables if table.loading]
    return f"first values are being loaded: {', '.join(loading[:10])}" if loading else ""


def _staleness(seen: tuple[int, ...]) -> HistogramValue:
    seen = seen or (0,)  # none yet
    return HistogramValue(
        tuple(map(float, range(len(seen) - 1))), seen, float(sum(missed * count for missed, count in enumerate(seen)))
    )
