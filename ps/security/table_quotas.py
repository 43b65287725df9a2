"""What the tables of one principal may have: held against the tables themselves, before a request makes any larger.

Nothing is counted beside the tables. So a quota holds after a restart with a log, after a restore and after a reload of
access.yaml; and who is at one goes on with the rows that are there.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np

from embershard.proto.arrays import Ids
from embershard.proto.errors import TableQuotaExceeded
from embershard.proto.spec import TableSpec
from embershard.ps.security.access_file import TableLimits


class HeldTable(Protocol):
    """The part of a table that quotas look at."""

    spec: TableSpec

    @property
    def num_rows(self) -> int:
        """The number of rows that exist."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        ...

    def growth(self, new_rows: int) -> int:
        """Bytes that so many new rows take at most."""
        ...

    def count_missing(self, ids: Ids) -> int:
        """Count the ids that have no row."""
        ...


T = TypeVar("T", bound=HeldTable)
T_co = TypeVar("T_co", bound=HeldTable, covariant=True)


class HeldTables(Protocol[T_co]):
    """The tables of a shard."""

    @property
    def revision(self) -> int:
        """Grows whenever there are other tables."""
        ...

    def names(self) -> list[str]:
        """Return the names of all tables."""
        ...

    def table(self, name: str) -> T_co:
        """Return the table of a name that exists."""
        ...


class TableQuotas:
    """The limits of one principal, whose tables are those that it `owns`. For the apply thread."""

    def __init__(self, who: str, owns: Callable[[str], bool], limits: Sequence[TableLimits]) -> None:
        self._limits = [_Limit(who, owns, limit) for limit in limits]

    def check_rows(
        self,
        tables: HeldTables[T],
        parts: Sequence[tuple[T, Ids]],
        waiting: Mapping[T, int],
        waiting_parts: Callable[[], Iterable[tuple[T, Ids]]],
    ) -> None:
        """TableQuotaExceeded where the ids of a request would make rows that are too many.

        waiting: ids per table that are to be applied before, those of `waiting_parts`; their rows count, too.
        """
        for limit in self._limits:
            own = [(table, ids) for table, ids in parts if len(ids) and limit.covers(table.spec.name)]
            if own:
                limit.check_rows(tables, own, waiting, waiting_parts)

    def check_table(self, tables: HeldTables[T], made: T) -> None:
        """TableQuotaExceeded where there is no room for a new table, which has memory without a row."""
        for limit in self._limits:
            if limit.covers(made.spec.name):
                limit.check([*limit.held(tables), made], {})

    def check_restored(self, restored: Iterable[HeldTable]) -> None:
        """TableQuotaExceeded where tables that would be in the place of all others have too much."""
        for limit in self._limits:
            limit.check([table for table in restored if limit.covers(table.spec.name)], {})


class _Limit:
    """One bound of rows, of bytes or of both, over the tables of a principal that match a pattern."""

    def __init__(self, who: str, owns: Callable[[str], bool], limit: TableLimits) -> None:
        self._who, self._owns, self._limit = who, owns, limit
        self._names: tuple[str, ...] = ()  # of the tables that it covers, as of `_revision` of all tables
        self._revision = -1

    def covers(self, name: str) -> bool:
        """Whether a table is one of those that it bounds."""
        return self._owns(name) and fnmatch.fnmatchcase(name, self._limit.pattern)

    def held(self, tables: HeldTables[T]) -> list[T]:
        """The tables that it bounds and that are there."""
        if self._revision != tables.revision:
            self._names, self._revision = tuple(filter(self.covers, tables.names())), tables.revision
        return [tables.table(name) for name in self._names]

    def check_rows(
        self,
        tables: HeldTables[T],
        parts: Sequence[tuple[T, Ids]],
        waiting: Mapping[T, int],
        waiting_parts: Callable[[], Iterable[tuple[T, Ids]]],
    ) -> None:
        """TableQuotaExceeded where the ids of these parts have rows to make, and those would be too many."""
        held = self.held(tables)
        counts = {table: waiting.get(table, 0) for table in held}
        for table, ids in parts:
            counts[table] += len(ids)
        if self._excess(held, counts) is None:  # as if all ids were new; now as they are
            return
        first = [(table, ids) for table, ids in waiting_parts() if table in counts]
        after = _new_rows([*first, *parts])
        if after != _new_rows(first):
            self.check(held, after)

    def check(self, held: Sequence[T], new_rows: Mapping[T, int]) -> None:
        """TableQuotaExceeded where these tables and so many new rows in them are too much."""
        excess = self._excess(held, new_rows)
        if excess is not None:
            unit, limit, would = excess
            of = "its tables" if self._limit.pattern == "*" else f"tables {self._limit.pattern}"
            raise TableQuotaExceeded(who=self._who, what=f"{unit} in {of}", limit=limit, would=would)

    def _excess(self, held: Sequence[T], new_rows: Mapping[T, int]) -> tuple[str, int, int] | None:
        """Check the limits: "rows" or "bytes", the limit, and how many there would be; None within the limits."""
        limit = self._limit
        if limit.rows_held is not None:
            rows = sum(table.num_rows for table in held) + sum(new_rows.values())
            if rows > limit.rows_held:
                return "rows", limit.rows_held, rows
        if limit.bytes_held is not None:
            growth = sum(table.growth(count) for table, count in new_rows.items())
            if (nbytes := sum(table.nbytes for table in held) + growth) > limit.bytes_held:
                return "bytes", limit.bytes_held, nbytes
        return None


def _new_rows(parts: Iterable[tuple[T, Ids]]) -> dict[T, int]:
    """How many rows these ids would make in each table; an id that comes more than once makes one."""
    ids_of: dict[T, list[Ids]] = {}
    for table, ids in parts:
        ids_of.setdefault(table, []).append(ids)
    found = {table: table.count_missing(np.unique(np.concatenate(ids))) for table, ids in ids_of.items()}
    return {table: count for table, count in found.items() if count}
