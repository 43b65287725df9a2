"""`embershard inspect`: what a folder of snapshots, or one of them, holds."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from embershard.cli.tables import table_of
from embershard.proto.snapshot.stored import StoredSnapshot, list_snapshots, open_snapshot


def inspect(
    folder: Annotated[str, typer.Argument(help="Folder of snapshots, or one snapshot in it; or an fsspec URL.")],
    name: Annotated[str, typer.Option(help="Name of the snapshot in the folder.  [default: the latest]")] = "",
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare its sha256.")] = False,
) -> None:
    """Show the snapshots of a folder, and the tables of the latest or of the named one."""
    console = Console()
    stored = open_snapshot(folder, name)
    manifest = stored.manifest
    if others := list_snapshots(folder):
        console.print("snapshots: " + escape(", ".join(others)))
    taken = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created))
    console.print(
        f"[bold]{escape(manifest.name)}[/]: {taken}, embershard {escape(manifest.package)}, "
        f"{manifest.num_shards} shards, clock {manifest.clock}, {manifest.rows:,} rows, {manifest.bytes / 1e6:,.1f} MB"
    )
    if manifest.parent is not None:
        before = [one.url for one in stored.chain[1:]]
        console.print("increment of: " + escape(", ".join(before)))
    if manifest.extra:
        console.print("extra: " + escape(", ".join(map(str, manifest.extra))))
    view = table_of(("table", "optimizer"), ("dim", "state", "rows", "files", "MB"))
    for blocks in manifest.tables.values():
        size = sum(file.bytes for file in blocks.files) / 1e6
        numbers = (blocks.spec.dim, blocks.num_state, f"{blocks.total_rows:,}", len(blocks.files), f"{size:,.1f}")
        view.add_row(escape(blocks.spec.name), escape(blocks.spec.optimizer.name), *map(str, numbers))
    console.print(view)
    if verify:
        _verify(stored)
        console.print("all files are intact")


def _verify(stored: StoredSnapshot) -> None:
    for table in stored.manifest.tables:
        for _ in stored.read_table(table):
            pass
