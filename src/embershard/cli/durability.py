"""The options that say whether shards keep a log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embershard.cli.sizes import file_bytes
from embershard.ps.options import Durability, check_durability

DurabilityOption = Annotated[
    str | None,
    typer.Option(
        metavar="memory|log|fsync",
        help="What a shard's end may cost: memory: all of its rows. log: nothing that was acknowledged, where its "
        "process ends. fsync: nothing either where its machine loses power. "
        "[default: log with --log-dir, else memory]",
    ),
]
LogDirOption = Annotated[
    Path | None,
    typer.Option(help="Folder of the shards' logs, on a local disk; a shard that finds its log there goes on with it."),
]
LogBytesOption = Annotated[
    str | None,
    typer.Option(
        help="What each shard's log may take on the disk (20GiB): at least twice the rows, and 1 GiB. Where more is "
        "needed pushes wait until an image of the rows has taken the place of old events. [default: no limit]"
    ),
]


def checked_log_bytes(log_bytes: str | None, log_dir: Path | None) -> int | None:
    """The size that an option means."""
    if log_bytes is None:
        return None
    if log_dir is None:
        raise typer.BadParameter("it limits a log, and there is none without --log-dir", param_hint="--log-bytes")
    return file_bytes(log_bytes, "--log-bytes")


def checked_durability(durability: str | None, log_dir: Path | None) -> Durability:
    """The mode that two options mean."""
    known: dict[str | None, Durability | None] = {None: None, "memory": "memory", "log": "log", "fsync": "fsync"}
    if durability not in known:
        raise typer.BadParameter(f"{durability!r} is none of memory, log, fsync", param_hint="--durability")
    try:
        return check_durability(known[durability], log_dir)
    except ValueError as error:
        raise typer.BadParameter(str(error).replace("log_dir", "--log-dir"), param_hint="--durability") from None
