"""The options that say who may do what with shards, and where these keep snapshots."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from embershard.cli.folders import folder
from embershard.proto.errors import PlaceNotAllowed
from embershard.proto.security.tokens import TokenFile
from embershard.proto.transport.addresses import use_token_file

SnapshotsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--snapshots",
        metavar="FOLDER_OR_URL",
        help="Folder or URL (s3://, gs://, abfs://) at or below which snapshots and checkpoints may be written and "
        "read; may be repeated.  [default: anywhere if only this machine can reach the shard, else nowhere]",
    ),
]
AccessOption = Annotated[
    Path | None,
    typer.Option("--access", help="File of access rules (access.yaml), read again when it changes; docs/security.md."),
]
InsecureLoopbackOption = Annotated[
    bool,
    typer.Option(
        "--insecure-loopback",
        help="Require no token on loopback: any user of this machine can read and change the model.",
    ),
]
AuditOption = Annotated[
    Path | None,
    typer.Option(
        "--audit",
        parser=folder,
        metavar="<path>",
        help="Folder in which each shard writes its audit log, shard-K/audit.jsonl: logins, refused requests and "
        "changes.",
    ),
]
TOKEN_ENVIRONMENT = "EMBERSHARD_TOKEN_FILE"


def _use_token_file(context: typer.Context, path: Path | None) -> Path | None:
    if path is not None and _is_asked_for(context):
        TokenFile(path).token()  # BadToken now, not once a shard answers, for which workers wait for minutes
    use_token_file(path, asked_for=_is_asked_for(context))
    if path is not None:
        os.environ[TOKEN_ENVIRONMENT] = str(path.absolute())  # for the workers that the command starts
    return path


def _is_asked_for(context: typer.Context) -> bool:
    source = context.get_parameter_source("token_file")
    return source is not None and source.name == "COMMANDLINE"


def token_words(context: typer.Context, path: Path | None) -> list[str]:
    """Return the option for another command that shows the same token, where it was given to this one.

    One of the environment is in the other command's, too.
    """
    return ["--token-file", str(path.absolute())] if path is not None and _is_asked_for(context) else []


# of every command that takes --ps
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar=TOKEN_ENVIRONMENT,
        callback=_use_token_file,
        help="File with the token for the shards.  [default: for your own shards on loopback, the token that they "
        "wrote]",
    ),
]


def checked_access(file: Path | None) -> Path | None:
    """The file's whole path, where it has no mistakes; BadAccessFile with all that it has."""
    if file is None:
        return None
    # imported here: every command that takes --ps has this module's options, and most start no shard
    from embershard.ps.security.access_file import read_access_file

    read_access_file(file)
    return file.absolute()


def checked_snapshots(places: Sequence[str] | None) -> tuple[str, ...]:
    """The places, folders by their whole path."""
    from embershard.ps.security.places import SnapshotPlaces

    roots = tuple(place if ":" in place else os.path.abspath(place) for place in places or ())
    try:
        SnapshotPlaces(roots)
    except PlaceNotAllowed as error:
        raise typer.BadParameter(str(error), param_hint="--snapshots") from None
    return roots
