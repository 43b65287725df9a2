"""Keep the rows and versions of the last pull of tables with the codec `delta`, to which changes are applied."""

from __future__ import annotations

from dataclasses import dataclass

from embershard.proto.arrays import Bytes, Floats, Ids
from embershard.proto.codec.payload import decode_elements
from embershard.proto.routing import Route

Versions = dict[int, int]  # by shard


@dataclass(frozen=True, slots=True)
class CachedPull:
    """The rows that a delta pull starts from, their versions, and those of its replies."""

    versions: Versions  # of the rows that are there
    read: Versions  # the lowest of the replies


@dataclass(frozen=True, slots=True)
class _Held:
    ids: Ids
    rows: Floats  # (U, dim), not to be written to
    versions: Versions


class Deltas:
    """The rows of the last pull of each table. Any number of threads may use it: nothing that is held changes."""

    def __init__(self) -> None:
        self.tables: dict[str, _Held] = {}

    def begin(self, table: str, route: Route, out: Floats) -> CachedPull:
        """Fill `out` ((U, dim), in route order) with what is held of these very ids."""
        held = self.tables.get(table)
        versions: Versions = {}
        if held is not None and held.ids is route.ids:
            out[...] = held.rows
            versions = held.versions
        return CachedPull(versions, {})

    def end(self, table: str, route: Route, out: Floats, base: CachedPull) -> None:
        """Keep the pulled rows as the next base."""
        self.tables[table] = _Held(route.ids, out.copy(), base.read)

    def forget(self, table: str) -> None:
        """Let go of a table that is not pulled this way any more."""
        self.tables.pop(table, None)


def apply_delta(payload: Bytes, rows: Floats) -> None:
    """Put the elements of a payload in their places in rows ((U, dim), C order). DamagedPayload."""
    positions, values = decode_elements(payload, *rows.shape)
    rows.reshape(-1)[positions] = values
