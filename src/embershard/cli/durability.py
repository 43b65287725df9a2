"""The options that say whether shards keep a log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embershard.cli.folders import folder
from embershard.cli.sizes import file_bytes
from embershard.ps.options import Durability, check_durability

DurabilityOption = Annotated[
    Durability | None,
    typer.Option(
        help="Which failures acknowledged pushes survive. memory: none, all rows of the shard are lost. log: the end "
        "of the shard's process. fsync: also a power failure of its machine. [default: log with --log-dir, else "
        "memory]",
    ),
]
LogDirOption = Annotated[
    Path | None,
    typer.Option(
        parser=folder,
        metavar="<path>",
        help="Folder of the shards' event logs, on a local disk; a shard that finds its event log there continues it.",
    ),
]
LogBytesOption = Annotated[
    str | None,
    typer.Option(
        help="Maximum size of each shard's event log on the disk, such as 20GiB; at least twice the rows, and 1 GiB. "
        "At the limit, pushes wait until a new base has replaced old events. [default: no limit]"
    ),
]


def checked_log_bytes(log_bytes: str | None, log_dir: Path | None) -> int | None:
    """The size that an option means."""
    if log_bytes is None:
        return None
    if log_dir is None:
        raise typer.BadParameter(
            "it limits the event log, and there is none without --log-dir", param_hint="--log-bytes"
        )
    return file_bytes(log_bytes, "--log-bytes")


def checked_durability(durability: Durability | None, log_dir: Path | None) -> Durability:
    """The mode that two options mean."""
    try:
        return check_durability(durability, log_dir)
    except ValueError as error:
        raise typer.BadParameter(str(error).replace("log_dir", "--log-dir"), param_hint="--durability") from None
