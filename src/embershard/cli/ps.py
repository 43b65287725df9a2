"""`embershard ps`: one shard as a service."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from embershard.cli.durability import (
    DurabilityOption,
    LogBytesOption,
    LogDirOption,
    checked_durability,
    checked_log_bytes,
)
from embershard.cli.monitoring import LogFormatOption, MetricsOption, TraceOption
from embershard.cli.security import (
    AccessOption,
    AuditOption,
    InsecureLoopbackOption,
    SnapshotsOption,
    checked_access,
    checked_snapshots,
)
from embershard.cli.sizes import memory_bytes
from embershard.cli.tls import TLSOption, tls_of
from embershard.ps.server import ServerOptions, serve


def ps(
    shard: Annotated[int, typer.Option(help="Index of this shard, from 0.", min=0)],
    of: Annotated[int, typer.Option(help="Number of shards; the same for every shard.", min=1, max=4096)],
    listen: Annotated[str, typer.Option(help="host:port (port 0: any free one) or unix:/path.")] = "127.0.0.1:7700",
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import", help="Module with row optimizers or codecs, found from here or installed; may be repeated."
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow an address that other machines reach, without protection.")
    ] = False,
    tls: TLSOption = None,
    rpc: Annotated[
        str, typer.Option(help="host:port at which to serve torch.distributed.rpc too; it executes pickles.")
    ] = "",
    rpc_executes_pickles: Annotated[
        bool, typer.Option("--rpc-executes-pickles", help="Allow --rpc an address that other machines reach.")
    ] = False,
    queue_bytes: Annotated[
        int, typer.Option(help="Bytes of requests that may wait before workers are told to come back later.", min=1)
    ] = ServerOptions.queue_bytes,
    connections: Annotated[
        int, typer.Option(help="Connections at a time; more are refused.", min=1)
    ] = ServerOptions.connections,
    memory: Annotated[
        str,
        typer.Option(
            help="What all tables of this shard may take: bytes (4GiB, 500MB), or a part (80%) of the memory of this "
            "machine or its container."
        ),
    ] = "80%",
    durability: DurabilityOption = None,
    log_dir: LogDirOption = None,
    log_bytes: LogBytesOption = None,
    metrics: MetricsOption = "",
    log_format: LogFormatOption = "text",
    trace: TraceOption = "",
    restarts: Annotated[int, typer.Option(hidden=True, help="How often this shard was started again.", min=0)] = 0,
    snapshots: SnapshotsOption = None,
    access: AccessOption = None,
    insecure_loopback: InsecureLoopbackOption = False,
    audit: AuditOption = None,
    parent_pid: Annotated[int, typer.Option(hidden=True, help="End when this process, our parent, ends.")] = 0,
) -> None:
    """Serve one shard until SIGTERM; one JSON line on stdout says where, once it serves."""
    if shard >= of:
        raise typer.BadParameter(f"shards count from 0, so --shard {shard} --of {of} does not exist")
    if imports:
        sys.path.append(os.getcwd())  # last: a module here must not hide an installed one
    options = ServerOptions(
        shard=shard,
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
    )
    raise typer.Exit(serve(options))
