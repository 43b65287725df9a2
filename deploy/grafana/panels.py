"""The panels of the Grafana dashboard: what each shows, and the queries that it does so by.

A query names metrics and labels of proto/monitoring/metrics.py only. `$run` and `$instance` are the dashboard's
variables: one Prometheus may scrape the shards of several jobs, of which a sum would be of none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["short", "percentunit", "s", "bytes", "Bps", "reqps", "none"]

_S, _W = "embershard_shard", "embershard_worker"
_RUN, _INSTANCE = 'run=~"$run"', 'instance=~"$instance"'


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One graph; `queries` are (PromQL, legend)."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: Unit = "short"
    stacked: bool = False
    help: str = ""


def _quantiles(metric: str, by: str = "shard", where: str = "") -> tuple[tuple[str, str], ...]:
    found = []
    for share, name in ((0.5, "p50"), (0.99, "p99")):
        rate = f"sum by ({by}, le) (rate({metric}_bucket{where}[$__rate_interval]))"
        found.append((f"histogram_quantile({share}, {rate})", f"{{{{{by}}}}} {name}"))
    return tuple(found)


def _rate(metric: str, by: str, where: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{where}[$__rate_interval]))"


_DURATIONS = f"{_S}_request_duration_seconds"
_RUNS, _SHARDS = f"{{{_RUN}}}", f"{{{_INSTANCE}}}"  # of the chosen ones

_TRAINING_THREAD = f'{{{_RUN}, overlapped="no"}}'

TRAINING = (
    Panel(title="Loss", queries=((f"{_W}_loss{_RUNS}", "{{run}} worker {{worker}}"),), unit="none"),
    Panel(
        title="Figures of evaluations",
        queries=((f"{_W}_metric{_RUNS}", "{{run}} {{split}} {{name}}"),),
        unit="none",
    ),
    Panel(
        title="Samples per second",
        queries=((_rate(f"{_W}_samples_total", "run", _RUNS), "{{run}}"),),
    ),
    Panel(
        title="Where a step goes",
        queries=(
            (
                f"{_rate(f'{_W}_step_part_duration_seconds_sum', 'part', _TRAINING_THREAD)} "
                f"/ scalar(sum(rate({_W}_step_duration_seconds_count{_RUNS}[$__rate_interval])))",
                "{{part}}",
            ),
        ),
        unit="s",
        stacked=True,
        help="Seconds of the mean step by part of it, of the training threads.",
    ),
    Panel(
        title="Step duration",
        queries=_quantiles(f"{_W}_step_duration_seconds", "run", _RUNS),
        unit="s",
    ),
    Panel(
        title="Waiting",
        queries=((f"sum by (worker, reason) (rate({_W}_waiting_seconds_total{_RUNS}[$__rate_interval]))",
                  "worker {{worker}} for {{reason}}"),),
        unit="percentunit",
        help="Share of a worker's time that its training thread waits.",
    ),
    Panel(
        title="Bytes between workers and shards",
        queries=((_rate(f"{_W}_transferred_bytes_total", "direction, part", _RUNS), "{{direction}} {{part}}"),),
        unit="Bps",
        stacked=True,
    ),
    Panel(
        title="Saved by compression",
        queries=(
            (
                f"{_rate(f'{_W}_uncompressed_bytes_total', 'direction', _RUNS)} "
                f"/ {_rate(f'{_W}_transferred_bytes_total', 'direction', _RUNS)}",
                "{{direction}}",
            ),
        ),
        unit="none",
        help="How many times more bytes it would be as float32 rows and plain ids.",
    ),
    Panel(
        title="Clocks of workers",
        queries=((f"{_W}_clock{_RUNS}", "worker {{worker}}"), (f"max({_S}_clock{_SHARDS})", "shards")),
    ),
)  # fmt: skip

SHARDS = (
    Panel(title="Pulls", queries=_quantiles(_DURATIONS, where=f'{{{_INSTANCE}, method="Pull"}}'), unit="s"),
    Panel(title="Pushes", queries=_quantiles(_DURATIONS, where=f'{{{_INSTANCE}, method="Push"}}'), unit="s"),
    Panel(title="Queue", queries=_quantiles(f"{_S}_queue_duration_seconds", where=_SHARDS), unit="s"),
    Panel(
        title="Apply thread busy",
        queries=((_rate(f"{_S}_apply_busy_seconds_total", "shard", _SHARDS), "shard {{shard}}"),),
        unit="percentunit",
        help="Near 1, this shard is what training waits for: use more shards.",
    ),
    Panel(
        title="Requests",
        queries=((_rate(f"{_S}_requests_total", "method, outcome", _SHARDS), "{{method}} {{outcome}}"),),
        unit="reqps",
    ),
    Panel(
        title="Turned away",
        queries=((_rate(f"{_S}_rejected_total", "shard, reason", _SHARDS), "shard {{shard}}: {{reason}}"),),
        unit="reqps",
    ),
    Panel(
        title="Bytes",
        queries=(
            (_rate(f"{_S}_received_bytes_total", "shard, transport", _SHARDS), "shard {{shard}} in, {{transport}}"),
            (_rate(f"{_S}_sent_bytes_total", "shard, transport", _SHARDS), "shard {{shard}} out, {{transport}}"),
        ),
        unit="Bps",
    ),
    Panel(
        title="Connections and members",
        queries=(
            (f"{_S}_connections{_SHARDS}", "shard {{shard}} {{transport}}"),
            (f"{_S}_members{_SHARDS}", "members of shard {{shard}}"),
        ),
    ),
    Panel(
        title="Memory of its budget",
        queries=((f"{_S}_memory_used_bytes{_SHARDS} / {_S}_memory_limit_bytes{_SHARDS}", "shard {{shard}}"),),
        unit="percentunit",
    ),
    Panel(
        title="Bytes of requests that wait", queries=((f"{_S}_queue_bytes{_SHARDS}", "shard {{shard}}"),), unit="bytes"
    ),
    Panel(
        title="Resident memory, and what workers share of theirs",
        queries=(
            (f"{_S}_resident_memory_bytes{_SHARDS}", "shard {{shard}}"),
            (f"{_S}_shared_bytes{_SHARDS}", "shard {{shard}} {{transport}}, shared"),
        ),
        unit="bytes",
    ),
    Panel(title="Rows", queries=((f"sum by (table) ({_S}_table_rows{_SHARDS})", "{{table}}"),)),
    Panel(
        title="Bytes of tables", queries=((f"sum by (table) ({_S}_table_bytes{_SHARDS})", "{{table}}"),), unit="bytes"
    ),
    Panel(
        title="Rows pulled and pushed",
        queries=(
            (_rate(f"{_S}_table_pulled_rows_total", "table", _SHARDS), "{{table}} pulled"),
            (_rate(f"{_S}_table_pushed_rows_total", "table", _SHARDS), "{{table}} pushed"),
        ),
    ),
    Panel(
        title="Rows left out for NaN or Inf",
        queries=((_rate(f"{_S}_table_skipped_rows_total", "table", _SHARDS), "{{table}}"),),
    ),
    Panel(
        title="Staleness seen",
        queries=_quantiles(f"{_S}_staleness_updates", where=_SHARDS),
        help="Updates that the rows of a push had missed.",
    ),
    Panel(
        title="Log",
        queries=(
            (f"{_S}_log_bytes{_SHARDS}", "shard {{shard}}"),
            (f"{_S}_log_waiting_bytes{_SHARDS}", "shard {{shard}}, not written"),
        ),
        unit="bytes",
    ),
    Panel(title="A recovery would take", queries=((f"{_S}_recovery_seconds{_SHARDS}", "shard {{shard}}"),), unit="s"),
    Panel(
        title="Since the last snapshot",
        queries=((f"time() - ({_S}_snapshot_last_success_timestamp_seconds{_SHARDS} > 0)", "shard {{shard}}"),),
        unit="s",
    ),
    Panel(
        title="Days until a certificate expires",
        queries=(
            (f"({_S}_certificate_expiry_timestamp_seconds{_SHARDS} - time()) / 86400", "shard {{shard}}"),
            (f"({_W}_certificate_expiry_timestamp_seconds{_RUNS} - time()) / 86400", "{{run}} worker {{worker}}"),
        ),
        unit="none",
        help="Of the certificate that new connections use; an alert fires at 7. Empty without --tls.",
    ),
    Panel(
        title="Restarts, evictions, repeats",
        queries=(
            (f"{_S}_restarts_total{_SHARDS}", "restarts of shard {{shard}}"),
            (f"max({_S}_expired_leases_total{_SHARDS})", "evictions of workers"),
            (f"sum({_S}_duplicate_pushes_total{_SHARDS})", "repeated pushes"),
        ),
    ),
)

ROWS = (("Training", TRAINING), ("Shards", SHARDS))
