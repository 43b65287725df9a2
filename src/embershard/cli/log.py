"""`embershard log`: what a shard's log holds, and how it is cut."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from embershard.cli.tables import table_of
from embershard.proto.errors import EmbershardError
from embershard.ps.bases.base import ShardBase, check_bases
from embershard.ps.events import event_name
from embershard.ps.journal.disk import LocalDisk
from embershard.ps.journal.folder import LogFolder, manifest_of
from embershard.ps.journal.summary import LogSummary, find_logs, summarize

log = typer.Typer(add_completion=False, no_args_is_help=True, help="Show or truncate the event log of a shard.")

_TRIES = 3
_END = {
    "clean": "it ends there",
    "torn": "a record that was not written whole follows; nobody was told that it was safe, and it is left out",
    "unsynced": "the machine was started anew before everything behind was written; it is left out",
}


@log.command("inspect")
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of one shard's event log, or of several.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per event log.")] = False,
) -> None:
    """Read event logs completely, and show their segments, LSNs and events; the exit code is 1 if one is damaged.

    Nothing is changed; a shard may write to its event log meanwhile.
    """
    damage: EmbershardError | None = None
    for one in find_logs(folder):
        try:
            summary, bases, damaged = _read(one)
        except EmbershardError as unreadable:  # of the others there may be something to show
            damage = damage or unreadable
            continue
        typer.echo(json.dumps(_plain(summary, bases))) if as_json else _show(summary, bases, Console())
        damage = damage or damaged or summary.damage
    if damage is not None:
        raise damage


@log.command("truncate")
def truncate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of one shard's event log.")],
    at: Annotated[
        int, typer.Option(help="LSN of the first event to remove; all later events are removed, too.", min=1)
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Truncate an event log, for example before damage. Prints what would be lost, and asks. The shard must not run."""
    with contextlib.closing(LogFolder.existing(folder)) as locked:
        lost = locked.lost_by_cut(at)
        if lost.kinds:
            count, size = sum(lost.kinds.values()), f"{lost.num_bytes / 1e6:,.1f} MB"
            typer.echo(f"{folder}: {count:,} events up to LSN {lost.last_lsn}, {size}, would be lost")
            typer.echo("; ".join(f"{name}: {number:,}" for name, number in _named(lost.kinds).items()))
        elif at < locked.manifest.end_lsn:
            typer.echo(f"{folder}: events {at:,} to {locked.manifest.end_lsn - 1:,} are missing, and would be lost")
        else:
            typer.echo(f"{folder}: it has no intact event from LSN {at} on; nothing is truncated")
            return
        if not yes:
            typer.confirm("Cut them off?", abort=True)
        locked.cut(at)
    typer.echo(f"the event log now ends before LSN {at}")


def _read(folder: Path) -> tuple[LogSummary, list[ShardBase], EmbershardError | None]:
    """A log, its bases, and what is wrong with these."""
    for _ in range(_TRIES):
        summary = summarize(folder)
        try:
            return summary, check_bases(folder, summary.manifest), None
        except EmbershardError as error:
            damage = error
        if manifest_of(folder, LocalDisk()) == summary.manifest:  # else a running shard has taken another meanwhile
            break
    return summary, [], damage


def _named(kinds: Mapping[int, int]) -> dict[str, int]:
    """Counts by the name of the event."""
    return {event_name(kind): number for kind, number in sorted(kinds.items())}


def _plain(summary: LogSummary, bases: list[ShardBase]) -> dict[str, object]:
    manifest, end, damage = summary.manifest, summary.end, summary.damage
    return {
        "folder": str(summary.folder),
        "shard": manifest.shard,
        "num_shards": manifest.num_shards,
        "lineage": f"{manifest.lineage:016x}",
        "term": max(manifest.term, summary.term),
        "first_lsn": manifest.first_lsn,
        "last_lsn": max((segment.last_lsn for segment in summary.segments), default=0),
        "bases": [
            {"name": one.name, "lsn": one.lsn, "redo_lsn": one.redo_lsn}
            | ({"rows": base.num_rows, "bytes": base.num_bytes} if base else {})
            for one, base in zip_longest(manifest.bases, bases)
        ],
        "segments": [
            {
                "name": str(segment.name),
                "first_lsn": segment.first_lsn,
                "last_lsn": segment.last_lsn,
                "records": segment.records,
                "bytes": segment.num_bytes,
                "file_bytes": segment.size,
                "synced": segment.is_synced,
            }
            for segment in summary.segments
        ],
        "events": {
            name: {"records": number, "bytes": num_bytes}
            for (name, number), num_bytes in zip(
                _named(summary.kinds).items(), _named(summary.kind_bytes).values(), strict=True
            )
        },
        "end": None if end is None else end.state,
        "damage": None if damage is None else damage.fields,
    }


def _show(summary: LogSummary, bases: list[ShardBase], console: Console) -> None:
    manifest = summary.manifest
    last = max((segment.last_lsn for segment in summary.segments), default=0)
    console.print(
        f"[bold]{escape(str(summary.folder))}[/]: shard {manifest.shard} of {manifest.num_shards}, lineage "
        f"{manifest.lineage:016x}, term {max(manifest.term, summary.term)}, LSN {manifest.first_lsn} to {last}"
    )
    for one, base in zip_longest(manifest.bases, bases):
        holds = f"{base.num_rows:,} rows, {base.num_bytes / 1e6:,.1f} MB" if base else "damaged"
        console.print(
            f"{escape(one.name)}: {holds}; all events up to LSN {one.lsn}, with the log from {one.redo_lsn} on"
        )
    view = table_of(("segment",), ("first LSN", "last LSN", "records", "MB", "file MB"))
    for segment in summary.segments:
        numbers = (segment.first_lsn, segment.last_lsn, segment.records)
        sizes = (segment.num_bytes / 1e6, segment.size / 1e6)
        view.add_row(str(segment.name), *(f"{n:,}" for n in numbers), *(f"{n:,.1f}" for n in sizes))
    console.print(view)
    view = table_of(("event",), ("records", "MB"))
    for kind, number in sorted(summary.kinds.items()):
        view.add_row(event_name(kind), f"{number:,}", f"{summary.kind_bytes[kind] / 1e6:,.1f}")
    console.print(view)
    if summary.end is not None:
        console.print(f"LSN {last} is the last: {_END[summary.end.state]}")
