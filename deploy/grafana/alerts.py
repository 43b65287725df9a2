"""The alerts, and for each what makes it fire: promtool tests them by it."""

from __future__ import annotations

from dataclasses import dataclass

_S, _W = "embershard_shard", "embershard_worker"
CERTIFICATE_SECONDS = 7 * 24 * 3600  # that a certificate is still valid when its alert fires
SNAPSHOT_SECONDS = 3600  # between snapshots, of a job that takes them


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert; `fires` are the series, of a point a minute, with which it fires after `minutes`."""

    name: str
    query: str
    wait: str  # for how long it must hold
    severity: str
    summary: str
    remedy: str
    labels: tuple[tuple[str, str], ...]  # of the alert that fires
    fires: tuple[tuple[str, str], ...]  # (series, values in promtool's notation)
    minutes: int


def _pulls(window: str) -> str:
    # not by shard alone: Prometheus may scrape the shards of several jobs
    rate = f'sum without (method, transport) (rate({_S}_request_duration_seconds_bucket{{method="Pull"}}{window}))'
    return f"histogram_quantile(0.99, {rate})"


def _slow_pulls() -> tuple[tuple[str, str], ...]:
    """Two hours of pulls of 0.4 ms, then 20 minutes of pulls of 100 ms, beside another job's many of 0.4 ms."""
    name = f'{_S}_request_duration_seconds_bucket{{shard="0",method="Pull",transport="stream",'
    return (
        (f'{name}instance="a:7790",le="0.0004"}}', "0+600x120 72000x20"),
        (f'{name}instance="a:7790",le="0.1024"}}', "0+600x140"),
        (f'{name}instance="a:7790",le="+Inf"}}', "0+600x140"),
        *((f'{name}instance="b:7790",le="{edge}"}}', "0+600000x140") for edge in ("0.0004", "0.1024", "+Inf")),
    )


def _certificate_expires(process: str, who: str, labels: tuple[tuple[str, str], ...]) -> Alert:
    series = f"embershard_{process}_certificate_expiry_timestamp_seconds"
    matchers = ",".join(f'{name}="{value}"' for name, value in labels)
    return Alert(
        name=f"Embershard{process.capitalize()}CertificateExpires",
        query=f"{series} - time() < {CERTIFICATE_SECONDS}",
        wait="0m",
        severity="warning",
        summary=f"The certificate of {who} expires in less than 7 days.",
        remedy="Replace the files of its --tls folder; it takes them without a restart (docs/security.md).",
        labels=labels,
        fires=((f"{series}{{{matchers}}}", f"{CERTIFICATE_SECONDS + 120}x10"),),
        minutes=5,
    )


_SHARD = (("shard", "0"),)
_WORKER = (("worker", "1"), ("run", "r"))

ALERTS = (
    Alert(
        name="EmbershardShardDown",
        query='up{job="embershard-shards"} == 0',
        wait="1m",
        severity="critical",
        summary="The shard at {{ $labels.instance }} does not answer.",
        remedy="Look at its output; workers wait for it, and end when it has lost its rows (docs/durability.md).",
        labels=(("job", "embershard-shards"), ("instance", "a:7790")),
        fires=(('up{job="embershard-shards",instance="a:7790"}', "1 1 0x10"),),
        minutes=5,
    ),
    Alert(
        name="EmbershardShardNotReady",
        query=f"{_S}_ready == 0",
        wait="10m",
        severity="warning",
        summary="Shard {{ $labels.shard }} is not ready.",
        remedy="Its /readyz says why: it recovers, it loads first values, or it drains.",
        labels=_SHARD,
        fires=((f'{_S}_ready{{shard="0"}}', "1 1 0x20"),),
        minutes=15,
    ),
    Alert(
        name="EmbershardShardRestarted",
        query=f"increase({_S}_restarts_total[15m]) > 0",
        wait="0m",
        severity="warning",
        summary="Shard {{ $labels.shard }} was started again.",
        remedy="The output of its supervisor has its last lines.",
        labels=_SHARD,
        fires=((f'{_S}_restarts_total{{shard="0"}}', "0 0 0 1x10"),),
        minutes=6,
    ),
    Alert(
        name="EmbershardApplySaturated",
        query=f"rate({_S}_apply_busy_seconds_total[5m]) > 0.9",
        wait="10m",
        severity="warning",
        summary="The apply thread of shard {{ $labels.shard }} is busy nearly all the time.",
        remedy="Start more shards (a snapshot restores onto any number of them), or larger batches.",
        labels=_SHARD,
        fires=((f'{_S}_apply_busy_seconds_total{{shard="0"}}', "0x5 0+58x30"),),
        minutes=25,
    ),
    Alert(
        name="EmbershardPullSlow",
        query=f"{_pulls('[5m]')} > 5 * {_pulls('[1h] offset 15m')} and {_pulls('[5m]')} > 0.001",
        wait="5m",
        severity="warning",
        summary="Pulls of shard {{ $labels.shard }} take five times what they took in the hour before, at p99.",
        remedy="Look at its queue and apply thread, at the clocks that pulls wait for, and at the machine.",
        labels=(("shard", "0"), ("instance", "a:7790")),
        fires=_slow_pulls(),
        minutes=127,
    ),
    Alert(
        name="EmbershardWorkerWaiting",
        query=f"sum without (reason) (rate({_W}_waiting_seconds_total[5m])) > 0.5",
        wait="10m",
        severity="info",
        summary="Worker {{ $labels.worker }} waits for more than half of its time.",
        remedy="The panel Waiting says for what; `embershard doctor --run` says what to try.",
        labels=_WORKER,
        fires=((f'{_W}_waiting_seconds_total{{worker="1",run="r",reason="shards"}}', "0x5 0+40x30"),),
        minutes=25,
    ),
    Alert(
        name="EmbershardLeasesExpiring",
        query=f"increase({_S}_expired_leases_total[15m]) > 0",
        wait="0m",
        severity="warning",
        summary="Shard {{ $labels.shard }} has evicted a worker.",
        remedy="The worker is dead or slower than its lease (train.lease); docs/training/workers.md.",
        labels=_SHARD,
        fires=((f'{_S}_expired_leases_total{{shard="0"}}', "0 0 0 1x10"),),
        minutes=6,
    ),
    Alert(
        name="EmbershardSnapshotOld",
        query=f"time() - ({_S}_snapshot_last_success_timestamp_seconds > 0) > {2 * SNAPSHOT_SECONDS}",
        wait="5m",
        severity="warning",
        summary="The last snapshot of shard {{ $labels.shard }} is older than two intervals.",
        remedy="Look for errors of the snapshot in the shard's output: its storage may be full, or out of reach.",
        labels=_SHARD,
        fires=((f'{_S}_snapshot_last_success_timestamp_seconds{{shard="0"}}', "60x140"),),
        minutes=130,
    ),
    Alert(
        name="EmbershardMemoryNearLimit",
        query=f"{_S}_memory_used_bytes / {_S}_memory_limit_bytes > 0.9",
        wait="5m",
        severity="warning",
        summary="Shard {{ $labels.shard }} has used more than 90 % of its memory budget.",
        remedy="At 100 % pushes of new ids are refused (TableFull): start more shards, or raise --memory.",
        labels=_SHARD,
        fires=(
            (f'{_S}_memory_used_bytes{{shard="0"}}', "1 1 95x20"),
            (f'{_S}_memory_limit_bytes{{shard="0"}}', "100x22"),
        ),
        minutes=10,
    ),
    Alert(
        name="EmbershardNonFiniteGradients",
        query=f"increase({_S}_table_skipped_rows_total[10m]) > 0",
        wait="0m",
        severity="warning",
        summary="Gradients of table {{ $labels.table }} held NaN or Inf, and were left out.",
        remedy="Lower the learning rate, clip gradients (train.clip_norm), look for values without bounds in the data.",
        labels=(("shard", "0"), ("table", "t")),
        fires=((f'{_S}_table_skipped_rows_total{{shard="0",table="t"}}', "0 0 0 5x10"),),
        minutes=6,
    ),
    Alert(
        name="EmbershardUpdateFailed",
        query=f"{_S}_update_failed == 1",
        wait="0m",
        severity="critical",
        summary="An update of shard {{ $labels.shard }} has failed.",
        remedy="`embershard status` shows its error.",
        labels=_SHARD,
        fires=((f'{_S}_update_failed{{shard="0"}}', "0 0 1x10"),),
        minutes=5,
    ),
    _certificate_expires("shard", "shard {{ $labels.shard }}", _SHARD),
    _certificate_expires("worker", "worker {{ $labels.worker }}", _WORKER),
)
