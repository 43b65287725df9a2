"""`embershard audit`: the log of who came to a shard, and what they changed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embershard.cli.app import fail
from embershard.ps.security.audit import verify as verify_log

audit = typer.Typer(add_completion=False, no_args_is_help=True, help="Check an audit log of a shard.")


@audit.callback()
def _audit() -> None:
    """Check an audit log of a shard."""


@audit.command()
def verify(
    file: Annotated[Path, typer.Argument(help="The audit.jsonl of a shard.")],
    expect: Annotated[
        str | None, typer.Option(help="Hash that a line of the file must have, as an earlier `verify` printed it.")
    ] = None,
) -> None:
    """Check that no line was changed, removed or added; print the number of lines and the hash of the last one.

    Someone who can write the file can still rewrite all of it, or truncate it. To detect this, keep the printed hash in
    another place, and pass it with --expect the next time.
    """
    try:
        count, last, found = verify_log(file, expect)
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror}; name the audit.jsonl that a shard wrote with --audit")
    if not found:
        fail(f"{file}: no line has the hash {expect}: the audit log was truncated or rewritten")
    typer.echo(f"{file}: {count} lines, none changed; the last one has the hash {last}")
