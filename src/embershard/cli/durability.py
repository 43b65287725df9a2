"""The options that say whether shards keep a log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embershard.ps.server import Durability, check_durability

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


def checked_durability(durability: str | None, log_dir: Path | None) -> Durability:
    """The mode that two options mean."""
    known: dict[str | None, Durability | None] = {None: None, "memory": "memory", "log": "log", "fsync": "fsync"}
    if durability not in known:
        raise typer.BadParameter(f"{durability!r} is none of memory, log, fsync", param_hint="--durability")
    try:
        return check_durability(known[durability], log_dir)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--durability") from None
