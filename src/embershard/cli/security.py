"""The options that say who may do what with shards, and where these keep snapshots."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated

import typer

from embershard.proto.errors import PlaceNotAllowed
from embershard.ps.security.places import SnapshotPlaces

SnapshotsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--snapshots",
        metavar="FOLDER_OR_URL",
        help="Where snapshots and checkpoints may lie, at it or below: a folder, s3://, gs:// or abfs://; may be "
        "repeated. "
        "[default: anywhere, where no other machine reaches the shard; else nowhere]",
    ),
]


def checked_snapshots(places: Sequence[str] | None) -> tuple[str, ...]:
    """The places, folders by their whole path."""
    roots = tuple(place if ":" in place else os.path.abspath(place) for place in places or ())
    try:
        SnapshotPlaces(roots)
    except PlaceNotAllowed as error:
        raise typer.BadParameter(str(error), param_hint="--snapshots") from None
    return roots
