"""Where trained weights come from: a checkpoint, a snapshot, or running shards."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import typer

from embershard.cli.shards import is_from_environment
from embershard.local_shards import local
from embershard.proto.arrays import Floats, Ids
from embershard.proto.codec.name import CodecName
from embershard.proto.errors import SnapshotNotFound
from embershard.proto.messages import READ_ONLY_WORKER
from embershard.proto.routing import make_route
from embershard.proto.security.tls import TLS
from embershard.proto.snapshot.stored import StoredSnapshot, list_snapshots, open_snapshot
from embershard.worker.checkpoint.checkpoint import SNAPSHOT, Checkpoint, best_checkpoint, checkpoint_at
from embershard.worker.checkpoint.snapshots import restore_snapshot
from embershard.worker.client.client import Client
from embershard.worker.trained.export import ReadTable
from embershard.worker.trained.reading import ReadOnlySession


@dataclass(frozen=True, slots=True)
class Source:
    """Trained weights, wherever they are."""

    session: ReadOnlySession | None  # None for a checkpoint of a job without shards
    checkpoint: Checkpoint | None
    read_table: ReadTable | None  # None for running shards, and without any

    @property
    def is_running(self) -> bool:
        """Whether these are shards of others, which may change."""
        return self.checkpoint is None and self.read_table is None


_REMEDY = "Name the folder of a run, a checkpoint or a snapshot, or shards by --ps"


def check_one_source(context: typer.Context, source: str | None, ps: str | None) -> None:
    """Raise BadParameter unless one source is named; a SOURCE overrides the environment's shards."""
    if (source is None) == (ps is None or (source is not None and is_from_environment(context))):
        raise typer.BadParameter("name one source: a checkpoint's folder behind the job file, or shards by --ps")


def open_source(
    source: str | None,
    ps: str | None,
    stack: contextlib.ExitStack,
    *,
    latest: bool = False,
    imports: Sequence[str] = (),
    tables: Collection[str] | None = None,
    tls: TLS | None = None,
) -> Source:
    """Open the weights of a checkpoint or a snapshot (folder or URL), or, without one, those of shards, to read them.

    Of a folder of several checkpoints it is that of the best evaluation; with `latest`, or where none is marked, it is
    the newest. A run's folder stands for `best` in it. What is read from a folder is put into shards in this process.
    `imports`: modules of row optimizers. `tables`: those whose rows are put there, and not their optimizer's state;
    without it all are, and all fit memory.
    """
    if source is None:
        # not a worker whose loading it would end
        client = Client.connect(ps or "", worker=READ_ONLY_WORKER, tls=tls)
        stack.callback(client.close)
        return Source(ReadOnlySession(client), None, None)
    if (Path(source) / "best").is_dir():  # a run's folder
        source = str(Path(source) / "best")
    if not Path(source).exists() and "://" not in source:
        raise SnapshotNotFound(path=source, reason=f"there is no such folder. {_REMEDY}")
    checkpoint = (None if latest else best_checkpoint(source)) or checkpoint_at(source)
    if checkpoint is not None and not checkpoint.manifest.snapshot:
        return Source(None, checkpoint, None)
    where = (checkpoint.url, SNAPSHOT) if checkpoint is not None else (source, "")
    try:
        snapshot = open_snapshot(*where)
    except SnapshotNotFound:
        if checkpoint is not None or list_snapshots(source):
            raise
        reason = f"there is no checkpoint in it either, and no `best` of a run. {_REMEDY}"
        raise SnapshotNotFound(path=source, reason=reason) from None
    client = local(1, imports=imports).client
    if tables is None:
        restore_snapshot(client, *where)
    else:
        _load(client, snapshot, tables)

    def read_table(table: str) -> Iterator[tuple[Ids, Floats]]:
        return ((ids, rows) for ids, rows, _ in snapshot.read_table(table))

    return Source(ReadOnlySession(client), checkpoint, read_table)


def _load(client: Client, snapshot: StoredSnapshot, tables: Collection[str]) -> None:
    """Declare all tables of a snapshot, and load the rows of these."""
    for name, blocks in snapshot.manifest.tables.items():
        client.declare(replace(blocks.spec, push_codec=CodecName(), pull_codec=CodecName()))
        for ids, rows, _ in snapshot.read_table(name) if name in tables else ():
            route = make_route(ids, blocks.spec.space_key, client.placement)
            order = np.empty(len(ids), np.int64)
            order[route.index] = np.arange(len(ids))
            client.load(name, route, rows[order])
