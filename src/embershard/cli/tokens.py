"""`embershard keys token | show`: tokens of clients, and their entries of access.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embershard.proto.errors import CannotWrite
from embershard.proto.security.tokens import new_token, token_digest, write_private
from embershard.ps.security.access_file import parse_access, read_access_file, shown

_OTHER_FILE = "choose another file with --out"


def token(
    name: Annotated[
        str, typer.Argument(help="Name of the client (principal), for access.yaml, messages and the audit log.")
    ],
    role: Annotated[str, typer.Option(help="read, train or admin.")],
    tables: Annotated[
        list[str] | None,
        typer.Option("--table", help="Table, or pattern with * and ?; may be repeated. [default: all]"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File for the token; only you can read it.  [default: NAME.token]")
    ] = None,
) -> None:
    """Create a token: write it to a file, and print its entry for access.yaml."""
    made = new_token()
    lines = [f"- name: {name}", f"  role: {role}", f'  token_sha256: "{token_digest(made).hex()}"']
    lines += [f"  tables: [{', '.join(map(_quoted, tables))}]"] if tables else []
    entry = "\n".join(lines)
    parse_access(entry, "the new entry")  # before there is a file
    path = out or Path(f"{name.replace('/', '-')}.token")
    if path.exists():
        raise CannotWrite(path=str(path), reason="it exists, and may be in use", remedy=_OTHER_FILE)
    try:
        write_private(path, made + "\n")
    except OSError as error:
        raise CannotWrite(path=str(path), reason=error.strerror or str(error), remedy=_OTHER_FILE) from None
    typer.echo(f"the token is in {path}; clients show it with --token-file. Its entry for access.yaml:", err=True)
    typer.echo(entry)


def show(file: Annotated[Path, typer.Argument(help="access.yaml.")]) -> None:
    """Check access.yaml, and show who may do what, without the hashes of tokens."""
    for entry in read_access_file(file):
        typer.echo("; ".join(f"{what}: {value}" for what, value in shown(entry)))


def _quoted(pattern: str) -> str:
    return "'" + pattern.replace("'", "''") + "'"
