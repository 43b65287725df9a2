"""Tables of who took which item, and when. Users and items are numbered in the order of their texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embershard.proto.arrays import Floats, Ids
from embershard.proto.errors import JobError
from embershard.worker.data.batch import Samples
from embershard.worker.data.files import File
from embershard.worker.data.readers.tabular import NO_SAMPLES, as_dates, as_times, of_one_kind, plain_times
from embershard.worker.data.readers.tabular_files import (
    TableFormat,
    TableSource,
    Wanted,
    files_of,
    format_of_first,
    located,
    open_tables,
)
from embershard.worker.data.values import BadValue, as_array, decoded, texts_of

Pairs = tuple[Ids, Ids]  # (N,) users and (N,) items


@dataclass(frozen=True)
class Names:
    """The texts that numbers of users and items stand for, ascending, and the columns that have them."""

    users: tuple[str, ...]
    items: tuple[str, ...]
    user_column: str = "user"
    item_column: str = "item"
    time_column: str | None = None


@dataclass(frozen=True, kw_only=True)
class InteractionTables:
    """Tables by split, a row for each interaction, with columns of the user, the item and, if named, the time."""

    files: Mapping[str, Sequence[File]]
    user: str
    item: str
    time: str | None = None
    how: TableFormat = field(default_factory=TableFormat)

    def look(self) -> None:
        """Read the first rows of every file, without torch. JobError names the file and row of what is wrong."""
        rows = _Rows(self)
        for part, named in self.files.items():
            for where, table in self._source(part, named, lambda table, part: NO_SAMPLES).first_rows():
                with located(where):
                    rows.add(table)

    def read(self) -> tuple[dict[str, Pairs], Names]:
        """The interactions of each split in the order of time, and the names of users and items.

        Without a column of times they are in the order of the files. JobError names the file and row of what is wrong.
        """
        parts = {part: _Rows(self) for part in self.files}

        def add(table: pa.Table, part: str) -> Samples:
            parts[part].add(table)
            return NO_SAMPLES

        for part, named in self.files.items():
            kind = self.how.format or format_of_first(named[0])
            files = files_of(kind, named)
            # files of text one by one: a reader of several takes compressed ones last
            for own in [files] if kind == "parquet" else [[file] for file in files]:
                for _ in self._source(part, own, add).blocks(0, 1, None):
                    pass
            if not parts[part].users:
                raise JobError(where=str(self.files[part][0]), reason="no interaction: the table has no row")
        users, user_names = _numbered([rows.users for rows in parts.values()])
        items, item_names = _numbered([rows.items for rows in parts.values()])
        pairs = {}
        for (part, rows), user, item in zip(parts.items(), users, items, strict=True):
            order = slice(None) if self.time is None else np.argsort(np.concatenate(rows.times), kind="stable")
            pairs[part] = user[order], item[order]
        return pairs, Names(user_names, item_names, self.user, self.item, self.time)

    def _source(self, part: str, files: Sequence[File], to_samples: Callable[[pa.Table, str], Samples]) -> TableSource:
        """Files of a split, whose format may be another one than that of the others."""
        wanted: Wanted = {self.user: ("text", "data.columns.user"), self.item: ("text", "data.columns.item")}
        if self.time is not None:
            wanted = {**wanted, self.time: ("text", "data.columns.time")}
        return open_tables({part: files}, self.how, wanted, to_samples)[part]


class _Rows:
    """The rows of a split: texts of users and items, each block with a dictionary of its own, and times."""

    def __init__(self, tables: InteractionTables) -> None:
        self._tables = tables
        self.users: list[pa.DictionaryArray] = []
        self.items: list[pa.DictionaryArray] = []
        self.times: list[Ids | Floats] = []
        self._times_of = None if tables.time is None else of_one_kind(tables.time, partial(_times, tables.time))

    def add(self, table: pa.Table) -> None:
        """Add a block. BadValue for a user, item or time that is missing, or of another type; of a list BadFeature."""
        if not table.num_rows:
            return
        for what, into in (("user", self.users), ("item", self.items)):
            into.append(_texts(what, getattr(self._tables, what), table))
        if self._times_of is not None:
            self.times.append(self._times_of(table))


def _times(column: str, table: pa.Table) -> Ids | Floats:
    """(N,) times that sort as those of the column: integers, and dates in nanoseconds, as int64 where it holds them.

    BadValue where one is missing, or is no time.
    """
    times = as_array(plain_times(column, table.column(column)))
    missing = np.flatnonzero(np.asarray(pc.is_null(times, nan_is_null=True)))
    if len(missing):
        raise BadValue(int(missing[0]), column, "the time is missing: leave the row out, or write one")
    if pa.types.is_string(times.type):
        with suppress(pa.ArrowException):
            return _integers(times)
        with suppress(pa.ArrowException):
            times.cast(pa.float64())
            return as_times(column, times)
        dates = as_dates(times, "ns")
        times = times if dates is None else as_array(dates)
    with suppress(pa.ArrowException):
        if pa.types.is_integer(times.type):
            return _integers(times)
        if pa.types.is_temporal(times.type):
            return _integers(times.cast(pa.timestamp("ns")))
    is_date = pa.types.is_string(times.type) or pa.types.is_temporal(times.type)
    return as_times(column, times) * (1000 if is_date else 1)  # of dates in years that nanoseconds do not reach


def _integers(array: pa.Array) -> Ids:
    found: Ids = array.cast(pa.int64()).to_numpy(zero_copy_only=False)
    return found


def _texts(what: str, column: str, table: pa.Table) -> pa.DictionaryArray:
    """Texts of users or items, without white space around them, as requests to a served model are read."""
    array = decoded(column, as_array(table.column(column)))
    kind, remedy = array.type, "save it as one of these"
    is_integer = pa.types.is_integer(kind) or (pa.types.is_decimal(kind) and kind.scale == 0)  # as Snowflake has them
    if not (is_integer or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        if pa.types.is_floating(kind):
            remedy = "save integers (pandas makes floats of those in a column with missing cells: leave these rows "
            remedy += "out, and cast the column to Int64)"
        raise BadValue(0, column, f"is {kind}, and {what}s are texts or integers: {remedy}")
    texts = pc.utf8_trim_whitespace(texts_of(column, array))
    missing = np.flatnonzero(np.asarray(pc.equal(texts, "")))
    if len(missing):
        raise BadValue(int(missing[0]), column, f"the {what} is missing: leave the row out, or write one")
    return texts.dictionary_encode()


def _numbered(parts: Sequence[Sequence[pa.DictionaryArray]]) -> tuple[list[Ids], tuple[str, ...]]:
    """(N,) numbers of the texts of each part, and the text of each number, ascending."""
    whole = pa.chunked_array([chunk for part in parts for chunk in part]).unify_dictionaries()
    texts = whole.chunk(0).dictionary
    order = np.asarray(pc.sort_indices(texts))
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.arange(len(order))
    flat = numbers[np.concatenate([np.asarray(chunk.indices) for chunk in whole.chunks])]
    ends = np.cumsum([sum(map(len, part)) for part in parts])
    return np.split(flat, ends[:-1]), tuple(texts.take(pa.array(order)).to_pylist())


def hold_out_latest(pairs: Pairs, count: int, parts: Sequence[str] = ("valid", "test")) -> dict[str, Pairs]:
    """The splits train and `parts` of interactions in the order of time.

    The last part has the latest `count` items of each user, the part before it the `count` items before those. Users
    with no more items than all parts take are in train alone. Of a user's interactions with one item, the first counts.
    """
    users, items = pairs
    _, first = np.unique(users * (1 + items.max(initial=0)) + items, return_index=True)
    first.sort()
    users, items = users[first], items[first]
    order = np.argsort(users, kind="stable")
    users, items = users[order], items[order]
    ends = np.searchsorted(users, users, side="right")
    taken, later = ends - np.searchsorted(users, users, side="left"), ends - np.arange(len(users)) - 1
    place = len(parts) - 1 - later // count  # among the parts, below 0 of train
    place[taken <= count * len(parts)] = -1
    chosen = {"train": place < 0, **{part: place == number for number, part in enumerate(parts)}}
    return {part: (users[which], items[which]) for part, which in chosen.items()}
