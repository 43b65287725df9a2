"""Train the runs of a comparison on shards that run already, each on empty ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta

from embershard.proto.errors import EmbershardError
from embershard.proto.security.tls import TLS
from embershard.worker.checkpoint.snapshots import drop_tables
from embershard.worker.client.client import Client

_CONNECT_TIMEOUT = timedelta(seconds=10)


class ShardsNotEmpty(EmbershardError):
    """The shards of a comparison hold tables that are not its own."""

    template = (
        "the shards already hold tables ({tables}), but every run of a comparison begins with empty shards; name "
        "other shards, or drop these tables with --replace"
    )


def prepare_shards(addresses: Sequence[str], *, replace: bool, tls: TLS | None = None) -> None:
    """Check that all shards are empty; with `replace` drop their tables. ShardsNotEmpty."""
    with closing(Client.connect(addresses, timeout=_CONNECT_TIMEOUT, tls=tls)) as client:
        names = sorted({table.name for status in client.status() for table in status.tables})
        if names and not replace:
            raise ShardsNotEmpty(tables=", ".join(names))
        drop_tables(client)


@contextmanager
def emptied_shards(addresses: Sequence[str], tls: TLS | None = None) -> Iterator[Sequence[str]]:
    """Drop what was trained on the shards in the block at its end; the command of the run names them."""
    try:
        yield ()
    finally:
        prepare_shards(addresses, replace=True, tls=tls)
