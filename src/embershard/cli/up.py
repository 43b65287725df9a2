"""`embershard up`: supervised shards on this machine."""

from __future__ import annotations

import signal
import threading
from datetime import timedelta
from typing import Annotated

import typer

from embershard.cli.durability import (
    DurabilityOption,
    LogBytesOption,
    LogDirOption,
    checked_durability,
    checked_log_bytes,
)
from embershard.cli.security import (
    AccessOption,
    AuditOption,
    InsecureLoopbackOption,
    SnapshotsOption,
    checked_access,
    checked_snapshots,
)
from embershard.deploy.supervisor import LocalShards, RestartPolicy

DEFAULT_PORT = 7700
_WATCH = timedelta(seconds=0.5)


def up(
    shards: Annotated[int, typer.Option(help="Number of shards.", min=1, max=4096)] = 2,
    base_port: Annotated[
        int, typer.Option(help="Port of shard 0; the others follow. 0: any free ones.", min=0, max=65535)
    ] = DEFAULT_PORT,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import", help="Module with row optimizers or codecs, found from here or installed; may be repeated."
        ),
    ] = None,
    durability: DurabilityOption = None,
    log_dir: LogDirOption = None,
    log_bytes: LogBytesOption = None,
    snapshots: SnapshotsOption = None,
    access: AccessOption = None,
    insecure_loopback: InsecureLoopbackOption = False,
    audit: AuditOption = None,
) -> None:
    """Run shards on this machine until Ctrl-C; one that dies is reported and started again.

    Without a log, a shard keeps its rows in memory: what one that died held is lost, and the workers are told so.
    """
    mode = checked_durability(durability, log_dir)
    if base_port + shards > 65536:
        raise typer.BadParameter(f"there are no {shards} ports from {base_port} on", param_hint="--base-port")
    options = [word for place in checked_snapshots(snapshots) for word in ("--snapshots", place)]
    options += [] if access is None else ["--access", str(checked_access(access))]
    options += [] if audit is None else ["--audit", str(audit.absolute())]
    options += ["--insecure-loopback"] if insecure_loopback else []
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    local = LocalShards(
        shards,
        imports=imports or (),
        base_port=base_port,
        restart=RestartPolicy(),
        durability=mode,
        log_dir=log_dir,
        log_bytes=checked_log_bytes(log_bytes, log_dir),
        options=options,
        report=_say,
        forward=_say,
    )
    with local:
        for index, (address, pid) in enumerate(zip(local.addresses, local.pids, strict=True)):
            typer.echo(f"shard {index} serves at {address} (pid {pid})")
        typer.echo(f"connect with {','.join(local.addresses)}; Ctrl-C ends them")
        while not stop.is_set():
            if failure := local.wait(_WATCH):
                raise failure


def _say(line: str) -> None:
    typer.echo(line, err=True)
