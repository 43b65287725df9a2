"""`embershard up`: supervised shards on this machine."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Annotated

import typer

from embershard.cli.durability import (
    DurabilityOption,
    LogBytesOption,
    LogDirOption,
    checked_durability,
    checked_log_bytes,
)
from embershard.cli.monitoring import LogFormatOption, MetricsOption, TraceOption, say
from embershard.cli.security import (
    AccessOption,
    AuditOption,
    InsecureLoopbackOption,
    SnapshotsOption,
    checked_access,
    checked_snapshots,
)
from embershard.cli.shards import DEFAULT_PORT
from embershard.cli.signals import ended_by_signals, is_ignored
from embershard.cli.tls import TLSOption
from embershard.deploy.supervisor import LocalShards, RestartPolicy, ShardSettings
from embershard.proto.monitoring.exporter import check_addresses
from embershard.proto.monitoring.logs import log_as_json

_WATCH = timedelta(seconds=0.5)


def up(
    shards: Annotated[int, typer.Option(help="Number of shards.", min=1, max=4096)] = 2,
    base_port: Annotated[
        int,
        typer.Option(help="Port of shard 0; the others use the following ports. 0: any free ports.", min=0, max=65535),
    ] = DEFAULT_PORT,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import", help="Module with row optimizers or codecs, in this folder or installed; may be repeated."
        ),
    ] = None,
    tls: TLSOption = None,
    durability: DurabilityOption = None,
    log_dir: LogDirOption = None,
    log_bytes: LogBytesOption = None,
    metrics: MetricsOption = "",
    log_format: LogFormatOption = "text",
    trace: TraceOption = "",
    snapshots: SnapshotsOption = None,
    access: AccessOption = None,
    insecure_loopback: InsecureLoopbackOption = False,
    audit: AuditOption = None,
) -> None:
    """Run shards on this machine until Ctrl-C; report and restart a shard that dies.

    With --metrics HOST:PORT shard 0 serves its metrics at this port, the others at the following ones.

    Without an event log (--log-dir) a shard keeps its rows only in memory: if it dies, its rows are lost, and its
    workers end with an error.
    """
    if log_format == "json":
        log_as_json(sys.stderr)
    mode = checked_durability(durability, log_dir)
    if base_port + shards > 65536:
        raise typer.BadParameter(f"there are no {shards} ports from {base_port} on", param_hint="--base-port")
    options = [word for place in checked_snapshots(snapshots) for word in ("--snapshots", place)]
    options += [] if access is None else ["--access", str(checked_access(access))]
    options += [] if audit is None else ["--audit", str(audit.absolute())]
    options += ["--insecure-loopback"] if insecure_loopback else []
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or not is_ignored(number):
            signal.signal(number, lambda *_: stop.set())
    settings = ShardSettings(
        imports=imports or (),
        durability=mode,
        log_dir=log_dir,
        log_bytes=checked_log_bytes(log_bytes, log_dir),
        metrics=check_addresses(metrics, shards) if metrics else (),
        log_format=log_format,
        trace=trace,
        tls=tls,
        options=options,
    )
    local = LocalShards(
        shards,
        settings,
        base_port=base_port,
        restart=RestartPolicy(),
        report=partial(say, err=True),
        forward=partial(typer.echo, err=True),
    )
    with ExitStack() as stack:
        with ended_by_signals():  # until they serve, which may take as long as a recovery, nobody looks at `stop`
            stack.enter_context(local)
        for index, (address, pid) in enumerate(zip(local.addresses, local.pids, strict=True)):
            say(f"shard {index} serves at {address} (pid {pid})")
        for address in filter(None, local.metrics_addresses):
            say(f"metrics: http://{address}/metrics")
        say(f"connect with {','.join(local.addresses)}; Ctrl-C ends them")
        while not stop.is_set():
            if failure := local.wait(_WATCH):
                raise failure
    if not local.ended_well:
        raise typer.Exit(1)
