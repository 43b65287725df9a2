"""Where trained weights come from: a checkpoint, a snapshot, or running shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from embershard.local_shards import local
from embershard.proto.arrays import Floats, Ids
from embershard.proto.errors import BadAddress, SnapshotNotFound
from embershard.proto.messages import READ_ONLY_WORKER
from embershard.proto.transport.addresses import parse_addresses
from embershard.worker.checkpoint.checkpoint import SNAPSHOT, Checkpoint, best_checkpoint, checkpoint_at
from embershard.worker.checkpoint.snapshots import open_snapshot, restore_snapshot
from embershard.worker.client.client import Client
from embershard.worker.trained.export import ReadTable
from embershard.worker.trained.reading import ReadOnlySession

_TRANSPORTS = ("tcp://", "grpc://", "grpc+", "rpc://", "rpc-executes-pickles://")  # all other URLs are storage


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


def open_source(
    source: str, stack: contextlib.ExitStack, *, latest: bool = False, imports: Sequence[str] = ()
) -> Source:
    """The weights of a checkpoint or a snapshot (folder or URL), or of shards at some addresses, which are only read.

    Of a folder of several checkpoints it is that of the best evaluation; with `latest`, or where none is marked, it is
    the newest. A run's folder stands for `best` in it. What is read from a folder is put into shards in this process.
    `imports`: modules of row optimizers.
    """
    if (Path(source) / "best").is_dir():  # a run's folder
        source = str(Path(source) / "best")
    if not Path(source).exists() and ("://" not in source or source.startswith(_TRANSPORTS)):
        try:
            addresses = parse_addresses(source)
        except BadAddress as error:
            reason = f"there is no such folder, and {error}"
            raise SnapshotNotFound(path=source, reason=reason) from None
        client = Client.connect(addresses, worker=READ_ONLY_WORKER)  # not one whose loading it would end
        stack.callback(client.close)
        return Source(ReadOnlySession(client), None, None)
    checkpoint = (None if latest else best_checkpoint(source)) or checkpoint_at(source)
    if checkpoint is not None and not checkpoint.manifest.snapshot:
        return Source(None, checkpoint, None)
    where = (checkpoint.url, SNAPSHOT) if checkpoint is not None else (source, "")
    snapshot = open_snapshot(*where)
    client = local(1, imports=imports).client
    restore_snapshot(client, *where)

    def read_table(table: str) -> Iterator[tuple[Ids, Floats]]:
        return ((ids, rows) for ids, rows, _ in snapshot.read_table(table))

    return Source(ReadOnlySession(client), checkpoint, read_table)
