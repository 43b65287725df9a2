"""The one interface through which rows are pulled and pushed: by shards, by local steps, through a cache."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from typing import Protocol

from embershard.proto.arrays import Floats
from embershard.proto.messages import Pushed, TableKey
from embershard.proto.routing import Placement, Route
from embershard.worker.client.push import Gradients, Versions
from embershard.worker.compression.compressor import LrScale


class RowSource(Protocol):
    """Rows of tables at a clock. `Client` describes the methods; `LocalSteps` and `CachedRows` are sources, too."""

    @property
    def placement(self) -> Placement:
        """Which shard has an id."""
        ...

    @property
    def timeout(self) -> timedelta:
        """Time limit of a call."""
        ...

    @property
    def lost_leases(self) -> int:
        """Times that the other workers went on without this one."""
        ...

    def packs_ids(self, table: str) -> bool:
        """Whether ids of a table may travel packed, for which they have to ascend."""
        ...

    def in_bundles(self, tables: Sequence[str]) -> AbstractSet[str]:
        """Select the tables that may be read and pushed in bundles, by the names of all members."""
        ...

    def pull(
        self,
        reads: Sequence[tuple[TableKey, Route]],
        out: Sequence[Floats] | None = None,
        *,
        keep: bool = False,
        clock: int | None = None,
        versions: Versions | None = None,
        exact: bool = False,
    ) -> list[Floats]:
        """Rows of every (table, route), (U, dim) float32 in route order."""
        ...

    def push(
        self,
        gradients: Gradients,
        *,
        clock: int,
        lr_scale: LrScale = 1.0,
        weight: float = 1.0,
        versions: Versions | None = None,
    ) -> Pushed:
        """Apply gradients of every (table, route), once."""
        ...

    def load(self, table: str, route: Route, rows: Floats, *, keep_state: bool = False) -> None:
        """Assign rows to the ids of a route."""
        ...


class WrappedSource:
    """A row source around another one: what it does not do itself, that one does. It reads no tables in bundles."""

    def __init__(self, source: RowSource) -> None:
        self._source = source

    @property
    def placement(self) -> Placement:
        """Which shard has an id."""
        return self._source.placement

    @property
    def timeout(self) -> timedelta:
        """Time limit of a call."""
        return self._source.timeout

    @property
    def lost_leases(self) -> int:
        """Times that the other workers went on without this one."""
        return self._source.lost_leases

    def packs_ids(self, table: str) -> bool:
        """Whether ids of a table may travel packed."""
        return self._source.packs_ids(table)

    def in_bundles(self, tables: Sequence[str]) -> AbstractSet[str]:
        """None: its copies are found by table."""
        return frozenset()
