"""What each table's two directions use now, between a client and its messages."""

from __future__ import annotations

from dataclasses import dataclass

from embershard.proto.codec.choice import Codec
from embershard.proto.spec import TableSpec
from embershard.worker.compression.settings import PLAIN, Compression, Directions, check_momentum


@dataclass(slots=True)
class _Table:
    """One table, as it travels."""

    spec: TableSpec
    dense: bool
    directions: Directions


class Compressor:
    """How the tables of one client travel, from one push or pull to the next."""

    def __init__(self) -> None:
        self.settings = Compression()
        self._tables: dict[str, _Table] = {}

    def add(self, spec: TableSpec, *, dense: bool) -> None:
        """Have a table travel as the settings say. ValueError where that cannot be."""
        if spec.name not in self._tables:
            directions = self.settings.of(spec.name, dense)
            check_momentum(spec, directions.push, self.settings.momentum)
            self._tables[spec.name] = _Table(spec, dense, directions)

    def check(self, table: str, push: Codec | None = None, pull: Codec | None = None) -> None:
        """ValueError where a table cannot travel so; None: as now."""
        self._directions(table, push, pull)

    def choose(self, table: str, push: Codec | None = None, pull: Codec | None = None) -> None:
        """Have a table travel so from its next push and pull on. ValueError, and no change, where that cannot be."""
        self._tables[table].directions = self._directions(table, push, pull)

    def _directions(self, table: str, push: Codec | None, pull: Codec | None) -> Directions:
        entry = self._tables[table]
        before = entry.directions
        after = Directions(before.push if push is None else push, before.pull if pull is None else pull)
        after.push.check("push", entry.dense)
        after.pull.check("pull", entry.dense)
        check_momentum(entry.spec, after.push, self.settings.momentum)
        return after

    def directions(self) -> dict[str, Directions]:
        """What every table uses now."""
        return {name: table.directions for name, table in self._tables.items()}

    def is_dense(self, table: str) -> bool:
        """Whether a table holds dense weights."""
        return self._tables[table].dense

    def pull_codec(self, table: str) -> Codec:
        """How its rows come."""
        entry = self._tables.get(table)
        return PLAIN if entry is None else entry.directions.pull
