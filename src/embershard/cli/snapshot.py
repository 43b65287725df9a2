"""`embershard snapshot`: all shards on disk, or in remote storage, while they train."""

from __future__ import annotations

import contextlib
import posixpath
from datetime import timedelta
from typing import Annotated

import typer

from embershard.cli.security import TokenFileOption
from embershard.cli.shards import RunningShards, find_shards
from embershard.cli.signals import ended_by_signals
from embershard.cli.tls import ServerNameOption, TLSOption, tls_of
from embershard.proto.security.tls import TLS
from embershard.worker.checkpoint.snapshots import WAIT_TIMEOUT, take_snapshot
from embershard.worker.client.client import Client

CONNECT_TIMEOUT = timedelta(seconds=10)


def connect(ps: str | None, tls: TLS | None) -> contextlib.closing[Client]:
    """A client of the shards of --ps, which is closed with the block that it is for."""
    return contextlib.closing(Client.connect(find_shards(ps), timeout=CONNECT_TIMEOUT, tls=tls))


def snapshot(
    folder: Annotated[
        str,
        typer.Argument(help="Folder that all shards and this machine share, or an fsspec URL (s3://..., gs://...)."),
    ],
    ps: RunningShards = None,
    tls: TLSOption = None,
    tls_server_name: ServerNameOption = "",
    token_file: TokenFileOption = None,
    name: Annotated[str, typer.Option(help="Name of the snapshot.  [default: the time]")] = "",
    at_clock: Annotated[
        int | None,
        typer.Option(
            help="Take it when this number of clocks is closed; 0: at once.  [default: a clock soon if workers train "
            "synchronously, else at once]",
            min=0,
        ),
    ] = None,
    keep: Annotated[
        int,
        typer.Option(
            help="Keep only the last N snapshots of the folder; a full snapshot and its increments count as one.", min=0
        ),
    ] = 0,
    incremental: Annotated[
        bool,
        typer.Option(
            "--incremental",
            help="Write only the rows that changed since the latest snapshot of the folder, if that was taken with "
            "this option, too; from time to time all rows are written.",
        ),
    ] = False,
    wait_timeout: Annotated[
        float, typer.Option(help="Time out if nothing is written for so many seconds.", min=0.1)
    ] = WAIT_TIMEOUT.total_seconds(),
) -> None:
    """Take a snapshot of all shards (rows and optimizer states) while they continue to serve."""
    with (
        ended_by_signals(),  # so that nothing of it stays in the folder
        connect(ps, tls_of(tls, tls_server_name)) as client,
    ):
        wait = timedelta(seconds=wait_timeout)
        taken = take_snapshot(
            client, folder, name, at_clock=at_clock, keep=keep, incremental=incremental, wait_timeout=wait
        )
    increment = f"an increment of {posixpath.basename(taken.parent)}, " if taken.parent else ""
    typer.echo(
        f"{taken.url}/{taken.name}: {increment}{taken.rows:,} rows, {taken.bytes / 1e6:,.1f} MB in {taken.files} files "
        f"of {client.num_shards} shards, clock {taken.clock}; {taken.seconds:.1f} s, the shards paused for "
        f"{taken.stall_ms:.1f} ms"
    )
