"""`--tls` and `--tls-server-name`: the certificates of a command; EMBERSHARD_TLS stands in where none are given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embershard.proto.security.tls import TLS

ENVIRONMENT = "EMBERSHARD_TLS"

TLSOption = Annotated[
    Path | None,
    typer.Option(
        "--tls",
        metavar="DIR",
        envvar=ENVIRONMENT,
        help="Folder with tls.crt, tls.key and ca.crt: use TLS over TCP (docs/security.md).",
    ),
]
ServerNameOption = Annotated[
    str,
    typer.Option(
        "--tls-server-name",
        metavar="NAME",
        envvar=f"{ENVIRONMENT}_SERVER_NAME",
        help="Name that the shards' certificates must cover.  [default: the host of each address]",
        show_default=False,
    ),
]


def tls_of(folder: Path | None, server_name: str = "") -> TLS | None:
    """Return the settings of the two options; None without a folder. BadParameter for a name alone."""
    if folder is None and server_name:
        raise typer.BadParameter(f"--tls-server-name needs certificates: name their folder by --tls or {ENVIRONMENT}")
    return None if folder is None else TLS(folder, server_name)


def tls_words(tls: TLS | None) -> list[str]:
    """Return the options for another command that uses the same certificates."""
    if tls is None:
        return []
    return ["--tls", str(tls.path.absolute()), *(["--tls-server-name", tls.server_name] if tls.server_name else [])]


def check_certificates(tls: TLS) -> None:
    """BadCertificate where those of a folder cannot be used: before anything starts that would say so later."""
    from embershard.proto.security.credentials import Credentials  # loads cryptography

    Credentials.load(tls.path)
