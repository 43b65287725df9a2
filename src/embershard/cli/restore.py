"""`embershard restore`: what a snapshot holds, put into running shards."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Annotated

import typer

from embershard.cli.security import TokenFileOption
from embershard.cli.shards import RunningShards
from embershard.cli.signals import ended_by_signals
from embershard.cli.snapshot import connect
from embershard.cli.tls import ServerNameOption, TLSOption, tls_of
from embershard.worker.checkpoint.snapshots import WAIT_TIMEOUT, restore_snapshot


def restore(
    folder: Annotated[
        str,
        typer.Argument(help="Folder of snapshots (the latest is restored), or one snapshot in it; or an fsspec URL."),
    ],
    ps: RunningShards = None,
    tls: TLSOption = None,
    tls_server_name: ServerNameOption = "",
    token_file: TokenFileOption = None,
    name: Annotated[str, typer.Option(help="Name of the snapshot in the folder.  [default: the latest]")] = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the tables that the shards hold; their rows are lost.")
    ] = False,
    wait_timeout: Annotated[
        float, typer.Option(help="Time out if nothing is read for so many seconds.", min=0.1)
    ] = WAIT_TIMEOUT.total_seconds(),
) -> None:
    """Restore the rows and optimizer states of a snapshot onto running shards, of any number."""
    began = time.monotonic()
    with (
        ended_by_signals(),  # so that the shards let go of what they have read
        connect(ps, tls_of(tls, tls_server_name)) as client,
    ):
        wait = timedelta(seconds=wait_timeout)
        manifest = restore_snapshot(client, folder, name, replace_tables=replace, wait_timeout=wait)
    typer.echo(
        f"{manifest.name}: {manifest.rows:,} rows of {len(manifest.tables)} tables, from {manifest.num_shards} shards "
        f"onto {client.num_shards}; {time.monotonic() - began:.1f} s"
    )
