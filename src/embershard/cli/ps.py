"""`embershard ps`: one shard as a service."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

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
    rpc: Annotated[
        str, typer.Option(help="host:port at which to serve torch.distributed.rpc too; it executes pickles.")
    ] = "",
    rpc_executes_pickles: Annotated[
        bool, typer.Option("--rpc-executes-pickles", help="Allow --rpc an address that other machines reach.")
    ] = False,
    queue_bytes: Annotated[
        int, typer.Option(help="Bytes of requests that may wait before workers are told to come back later.", min=1)
    ] = ServerOptions.queue_bytes,
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
        parent_pid=parent_pid,
        rpc=rpc,
        rpc_executes_pickles=rpc_executes_pickles,
    )
    raise typer.Exit(serve(options))
