"""`embershard ps`: one shard as a service."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from embershard.cli.durability import (
    DurabilityOption,
    LogBytesOption,
    LogDirOption,
    checked_durability,
    checked_log_bytes,
)
from embershard.cli.folders import folder
from embershard.cli.monitoring import LogFormatOption, MetricsOption, TraceOption
from embershard.cli.security import (
    AccessOption,
    AuditOption,
    InsecureLoopbackOption,
    SnapshotsOption,
    checked_access,
    checked_snapshots,
)
from embershard.cli.signals import ParentPidOption
from embershard.cli.sizes import memory_bytes
from embershard.cli.tls import TLSOption, tls_of
from embershard.proto.user_modules import search_from
from embershard.ps.options import ServerOptions
from embershard.ps.server import serve

INDEX_VARIABLES = ("EMBERSHARD_INDEX", "JOB_COMPLETION_INDEX", "SLURM_PROCID")  # the first that is set counts


def ps(
    shard: Annotated[
        str,
        typer.Option(
            metavar="INDEX",
            help="Index of this shard, from 0. auto: the index in EMBERSHARD_INDEX, JOB_COMPLETION_INDEX (Kubernetes) "
            "or SLURM_PROCID, whichever is set first.",
        ),
    ],
    of: Annotated[int, typer.Option(help="Number of shards; the same for every shard.", min=1, max=4096)],
    listen: Annotated[
        str, typer.Option(help="Address to listen on: host:port (port 0: any free port) or unix:/path.")
    ] = "127.0.0.1:7700",
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import", help="Module with row optimizers or codecs, in this folder or installed; may be repeated."
        ),
    ] = None,
    announce: Annotated[
        Path | None,
        typer.Option(
            parser=folder,
            metavar="<path>",
            help="Folder in which the shard announces its address; clients use --ps file:FOLDER.",
        ),
    ] = None,
    advertise: Annotated[
        str,
        typer.Option(
            metavar="HOST[:PORT]",
            envvar="EMBERSHARD_ADVERTISE",
            help="Address to announce, if it differs from --listen.",
        ),
    ] = "",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow, without TLS or tokens, an address that other machines can reach.")
    ] = False,
    tls: TLSOption = None,
    rpc: Annotated[
        str, typer.Option(help="host:port at which to serve torch.distributed.rpc as well; it executes pickles.")
    ] = "",
    rpc_executes_pickles: Annotated[
        bool, typer.Option("--rpc-executes-pickles", help="Allow --rpc an address that other machines can reach.")
    ] = False,
    queue_bytes: Annotated[
        int,
        typer.Option(
            help=("Maximum bytes of waiting requests; further requests are refused, and workers retry them."), min=1
        ),
    ] = ServerOptions.queue_bytes,
    connections: Annotated[
        int, typer.Option(help="Maximum number of open connections; more are refused.", min=1)
    ] = ServerOptions.connections,
    memory: Annotated[
        str,
        typer.Option(
            help="Maximum memory of all tables of this shard: bytes (4GiB, 500MB), or a share (80%) of the memory of "
            "this machine or its container."
        ),
    ] = "80%",
    durability: DurabilityOption = None,
    log_dir: LogDirOption = None,
    log_bytes: LogBytesOption = None,
    metrics: MetricsOption = "",
    log_format: LogFormatOption = "text",
    trace: TraceOption = "",
    restarts: Annotated[int, typer.Option(hidden=True, help="How often this shard was restarted.", min=0)] = 0,
    snapshots: SnapshotsOption = None,
    access: AccessOption = None,
    insecure_loopback: InsecureLoopbackOption = False,
    audit: AuditOption = None,
    parent_pid: ParentPidOption = 0,
) -> None:
    """Serve one shard until SIGTERM. Once it serves, it prints its address as one JSON line on stdout."""
    index = _index(shard)
    if index >= of:
        raise typer.BadParameter(f"shards count from 0, so --shard {index} --of {of} does not exist")
    if imports:
        search_from(Path())
    options = ServerOptions(
        shard=index,
        of=of,
        listen=listen,
        imports=tuple(imports or ()),
        insecure=insecure,
        queue_bytes=queue_bytes,
        memory=memory_bytes(memory),
        connections=connections,
        parent_pid=parent_pid,
        rpc=rpc,
        rpc_executes_pickles=rpc_executes_pickles,
        durability=checked_durability(durability, log_dir),
        log_dir=log_dir,
        log_bytes=checked_log_bytes(log_bytes, log_dir),
        restarts=restarts,
        metrics=metrics,
        log_format=log_format,
        trace=trace,
        tls=tls_of(tls),
        snapshots=checked_snapshots(snapshots),
        access=checked_access(access),
        insecure_loopback=insecure_loopback,
        audit=None if audit is None else audit.absolute(),
        announce=None if announce is None else Path(str(announce).removeprefix("file:")).absolute(),
        advertise=advertise,
    )
    raise typer.Exit(serve(options))


def _index(shard: str) -> int:
    """The number of --shard, or that of the cluster's variables."""
    if shard != "auto":
        if not (shard.isascii() and shard.isdigit()):
            raise typer.BadParameter(f"--shard is a number from 0, or auto, not {shard!r}")
        return int(shard)
    for name in INDEX_VARIABLES:
        if (value := os.environ.get(name)) is not None:
            if not (value.isascii() and value.isdigit()):
                raise typer.BadParameter(f"--shard auto: {name} is {value!r}, which is no index")
            return int(value)
    raise typer.BadParameter(f"--shard auto: none of {', '.join(INDEX_VARIABLES)} is set; write the shard's index")
