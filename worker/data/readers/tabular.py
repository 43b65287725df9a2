"""Tables of any columns, Parquet or text: the data of a job with a `features` section."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from embershard.proto.arrays import Floats, Ids
from embershard.proto.errors import JobError
from embershard.worker.data.batch import Samples
from embershard.worker.data.files import File, as_file, real_path
from embershard.worker.data.negatives import InteractionStream, ItemPool, NegativeSampling, observe_all
from embershard.worker.data.preprocess import Fitted, Fitting, Preprocessor, check_undeclared, preprocessed_columns
from embershard.worker.data.readers.tabular_files import (
    TableFormat,
    TableSource,
    Wanted,
    located,
    open_tables,
    read_vocabulary,
)
from embershard.worker.data.stream import SHUFFLE_ROWS, StreamDataset
from embershard.worker.data.text import Kind
from embershard.worker.data.values import (
    BadValue,
    as_array,
    check_utf8,
    decoded,
    float_of,
    hashes_of,
    is_list,
    numbers_of,
    texts_of,
)

Times = TypeVar("Times")

NO_SAMPLES = Samples(np.empty((0, 0), np.int64), None, np.empty(0, np.float32))


class OpenTables(Protocol):
    """Open the tables of each split, as `open_tables` does."""

    def __call__(
        self,
        files: Mapping[str, Sequence[File]],
        how: TableFormat,
        wanted: Wanted,
        to_samples: Callable[[pa.Table, str], Samples],
        counts: Mapping[str, int] = ...,
    ) -> Mapping[str, TableSource]:
        """JobError where a table cannot be read."""


@dataclass(frozen=True, kw_only=True)
class RowSplit:
    """Describe how the rows of one table are shared out over train, valid and test.

    random: by a hash of all columns of a table; user: by one of `column`, so that a user's rows stay together;
    time: by `column`, the latest rows to test and those before them to valid. `at` are the times where valid and test
    begin, in place of which `valid` and `test` give shares of the rows.
    """

    by: Literal["random", "user", "time"]
    parts: tuple[str, ...]  # that get rows, train first
    column: str | None = None
    valid: float = 0.0
    test: float = 0.0
    at: tuple[float | str, ...] = ()
    seed: int = 0

    def places(self, table: pa.Table, cuts: Sequence[float]) -> npt.NDArray[np.intp]:
        """(N,) the place in `parts` of each row; BadValue for a time that is missing."""
        if self.by == "time":
            return np.searchsorted(np.asarray(cuts), self.times(table), side="right")
        from embershard.worker.data.hashing import hash_numbers  # here: its kernels need numba

        keys = _row_keys(table if self.by == "random" else table.select([self.column]))
        share = hash_numbers(f"split {self.seed}", keys) / 2.0**62
        test = share < self.test
        valid = ~test & (share < self.test + self.valid)
        parts = self.parts
        return np.where(test, len(parts) - 1, np.where(valid, parts.index("valid") if self.valid else 0, 0))

    def times(self, table: pa.Table) -> Floats:
        """(N,) the times of rows. BadValue where one is missing, or is no time."""
        assert self.column is not None
        times = as_times(self.column, table.column(self.column))
        missing = np.flatnonzero(np.isnan(times))
        if len(missing):
            raise BadValue(int(missing[0]), self.column, "has no time, by which the rows are split")
        return times

    def times_of_one_kind(self) -> Callable[[pa.Table], Floats]:
        """Return `times` for one table after the other. BadValue where some have dates, and others plain numbers."""
        assert self.column is not None
        return of_one_kind(self.column, self.times)

    def cuts(self, times: npt.NDArray[np.floating]) -> list[float]:
        """The times where the parts behind train begin."""
        if self.at:
            assert self.column is not None
            try:
                return [float(as_times(self.column, pa.array([str(value)]))[0]) for value in self.at]
            except BadValue as error:
                raise JobError(where="data.split.at", reason=error.reason) from None
        shares = (
            [1 - self.test - self.valid, 1 - self.test] if self.valid and self.test else [1 - self.valid - self.test]
        )
        return [float(np.quantile(times, share, method="higher")) for share in shares]


@dataclass(frozen=True, kw_only=True)
class LabelColumns:
    """The labels of a sample and its weight."""

    names: tuple[str, ...] = ("label",)
    range: tuple[float, float] | None = (0.0, 1.0)
    texts: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # of 0 and of 1, of labels that are no numbers
    weight: str | None = None

    def of(self, table: pa.Table) -> tuple[Floats, Floats | None]:
        """Labels (N,) or (N, L), and weights; without a column of labels each is 1. BadValue for one out of range."""
        found = [] if self.names else [np.ones(table.num_rows, np.float32)]
        for name in self.names:
            labels = self._numbers(name, table.column(name))
            missing = np.flatnonzero(np.isnan(labels))
            if len(missing) and len(self.names) == 1:
                raise BadValue(int(missing[0]), name, "the label is missing: leave the row out, or write a label")
            if self.range is not None:
                low, high = self.range
                wrong = np.flatnonzero((labels < low) | (labels > high))
                if len(wrong):
                    reason = f"label {labels[wrong[0]]:g} is not in {low:g} to {high:g}"
                    reason += ": write it as 0 or 1, or give data.label_range and a loss of your own"
                    raise BadValue(int(wrong[0]), name, reason)
            found.append(labels.astype(np.float32))
        weights = None
        if self.weight is not None:
            given = numbers_of(self.weight, table.column(self.weight))
            wrong = np.flatnonzero(~(given >= 0))
            if len(wrong):
                raise BadValue(int(wrong[0]), self.weight, f"weight {given[wrong[0]]:g} is not a number of at least 0")
            weights = given.astype(np.float32)
        return found[0] if len(found) == 1 else np.stack(found, 1), weights

    def _numbers(self, name: str, column: pa.ChunkedArray) -> Floats:
        """(N,) labels, NaN where missing."""
        if name not in self.texts:
            try:
                return numbers_of(name, column)
            except BadValue as error:  # of a text
                raise BadValue(error.row, name, f"{error.reason}; {give_label_values(column)}") from None
        texts, (zero, one) = column.combine_chunks(), self.texts[name]
        if pa.types.is_floating(texts.type):  # integers, as pandas writes them in a column with missing cells
            x = numbers_of(name, texts)
            found: Floats = np.select([x == float_of(zero), x == float_of(one)], [0.0, 1.0], np.nan)
            missing = np.isnan(x)
        else:
            texts = texts_of(name, texts)
            found = pc.index_in(texts, pa.array([zero, one])).to_numpy(zero_copy_only=False).astype(np.float64)
            missing = np.asarray(pc.equal(texts, ""))
        wrong = np.flatnonzero(np.isnan(found) & ~missing)
        if len(wrong):
            value = str(texts[int(wrong[0])].as_py())[:40]
            raise BadValue(int(wrong[0]), name, f"label {value!r} is neither {zero!r} nor {one!r}")
        return found


@dataclass(frozen=True, kw_only=True)
class Tabular:
    """Tables by split, or one table of rows that are split, and what becomes of their columns.

    `fit` learns from the training rows what the features need; `open` is the dataset, with what was learnt.
    """

    files: Mapping[str, Sequence[File]]
    preprocessor: Preprocessor
    labels: LabelColumns = field(default_factory=LabelColumns)
    how: TableFormat = field(default_factory=TableFormat)
    split: RowSplit | None = None
    vocabulary_folder: Path = Path()
    negatives: NegativeSampling | None = None
    ranked: tuple[str, ...] = ()  # the features of the items that are ranked in an evaluation
    user: str | None = None  # the feature of the user, from whose ranking is left out what the user took before
    catalogue: Sequence[File] = ()  # tables with these features of more items
    open_tables: OpenTables = open_tables

    def look(self) -> None:
        """Read the first rows of every file, without torch. JobError names the file and line of what is wrong."""
        pre, sources = self.preprocessor, self._sources(lambda table, part: NO_SAMPLES)
        times_of = None if self.split is None or self.split.by != "time" else self.split.times_of_one_kind()
        if self.split is None:
            paths = {part: getattr(source, "paths", ()) for part, source in sources.items()}
            _check_apart({part: {real_path(path) for path in own} for part, own in paths.items()})
        for part, source in sources.items():
            for where, table in source.first_rows() if self.split is None or part == "train" else ():
                with located(where):
                    for name, feature in pre.features.items():
                        if feature.kind != "cross":
                            check_undeclared(name, feature, table.column(feature.column or name))
                    if not pre.fitted:  # of the first file, which is one to train on
                        pre = pre.with_fitted(self._fit([table], first=True))
                    pre(_columns(table, pre))
                    self.labels.of(table)
                    if times_of is not None:
                        times_of(table)
        if self.catalogue:
            self._of_items().look()

    def needs_fit(self) -> bool:
        """Whether the training rows have to be read before training."""
        pre = self.preprocessor
        return not pre.fitted and (pre.needs_fit() or bool(pre.vocabulary_files()) or self.split is not None)

    def fit(self, seed: int = 0) -> Fitted:
        """Read the training rows once, and return the figures and vocabularies that the features need.

        JobError where a split leaves one part empty.
        """
        return self._fit(None, seed)

    def open(self, *, seed: int = 0, shuffle_rows: int = SHUFFLE_ROWS) -> StreamDataset:
        """The dataset. JobError names what is wrong with a file."""
        pre, fitted = self.preprocessor, self.preprocessor.fitted
        if self.needs_fit():
            fitted = self.fit(seed)
            pre = pre.with_fitted(fitted)
        whole = replace(self, preprocessor=pre)
        counts = fitted.get("samples", {})
        counts = {part: count for part, count in counts.items() if part in self._shared_out or part == "train"}
        sources = whole._sources(whole._samples, counts)
        numbers = tuple(name for name, feature in pre.features.items() if feature.is_dense)
        if self.ranked:
            from embershard.worker.data.readers.ranked import RankedStream  # imports torch

            own = [name for name in pre.features if name in self.ranked]  # in the order of the columns
            pool = ItemPool(NegativeSampling(count=1, features=tuple(own)), pre.schema, numbers)
            catalogue = whole._items()
            return RankedStream(
                pre.schema, sources, pool, catalogue, user=self.user, seed=seed, shuffle_rows=shuffle_rows
            )
        stream = StreamDataset(pre.schema, sources, seed=seed, shuffle_rows=shuffle_rows)
        if self.negatives is None:
            return stream
        return InteractionStream(stream, observe_all(ItemPool(self.negatives, pre.schema, numbers), sources["train"]))

    def _of_items(self) -> Tabular:
        """The catalogue, of which only the features of items are read."""
        pre = self.preprocessor
        features = {name: feature for name, feature in pre.features.items() if name in self.ranked}
        own = Preprocessor(features, pre.fitted, missing=pre.missing)
        files, labels = {"train": self.catalogue}, LabelColumns(names=())
        return replace(self, files=files, preprocessor=own, labels=labels, split=None, ranked=(), catalogue=())

    def _items(self) -> Iterator[Samples]:
        """The rows of the catalogue."""
        if self.catalogue:
            tables = self._of_items()
            source = tables._sources(tables._samples)["train"]
            source.check()
            yield from source.blocks(0, 1, None)

    def open_first_rows(self, seed: int = 0) -> StreamDataset:
        """The dataset, as `open` gives it, with what the first rows alone tell: to try a model on."""
        pre = self.preprocessor
        if self.needs_fit():
            _, table = next(self._sources(lambda table, part: NO_SAMPLES)["train"].first_rows())
            pre = pre.with_fitted({**self._fit([table], first=True), "samples": {}})
        return replace(self, preprocessor=pre).open(seed=seed)

    def _fit(self, tables: Iterable[pa.Table] | None, seed: int = 0, *, first: bool = False) -> Fitted:
        cuts: list[float] = []
        if self.split is not None and self.split.by == "time":
            split, times, times_of = self.split, [], self.split.times_of_one_kind()
            if split.at:
                cuts = split.cuts(np.empty(0))
            else:
                self._each_row(tables, lambda table: times.append(times_of(table)))
                cuts = split.cuts(np.concatenate(times))
        names = self.preprocessor.vocabulary_files()
        known = {table: read_vocabulary(as_file(self.vocabulary_folder, name), table) for table, name in names.items()}
        fitting, counts = Fitting(self.preprocessor, seed, known), dict.fromkeys(self._parts, 0)

        def observe(table: pa.Table) -> None:
            masks = self._masks(table, cuts)
            for part, mask in masks.items():
                counts[part] += table.num_rows if mask is None else int(mask.sum())
            with _rows_of(masks["train"]):
                fitting.observe(_columns(_chosen(table, masks["train"]), self.preprocessor))

        self._each_row(tables, observe)
        empty = [part for part, count in counts.items() if not count]
        if empty and self.split is not None and not first:
            rows, where = sum(counts.values()), str(self.files["train"][0])
            remedy = "; larger shares, or more rows, may give it one"
            if self.split.at:
                remedy = f"; choose data.split.at within the times of column {self.split.column!r}, written as they are"
            elif self.split.by == "random":
                remedy += ": rows with the same features are in one split"
            elif self.split.by == "user":
                remedy += f": rows with one value of {self.split.column!r} are in one split"
            reason = f"leaves {empty[0]} without a row, of {rows} in {where}{remedy}"
            raise JobError(where="data.split", reason=reason)
        for table in fitting.unseen if not first else ():
            where, train = str(as_file(self.vocabulary_folder, names[table])), self.files["train"][0]
            reason = f"has none of the values that table {table!r} gets in {train}: is each line a value?"
            if table in fitting.without_values:
                reason = f"no row has a value of table {table!r}, of which {where} has a list: leave its features out"
                where = str(train)
            raise JobError(where=where, reason=reason)
        fitted = fitting.fitted()
        fitted["vocabularies"] |= known
        return {**fitted, "cuts": cuts, "samples": counts if self.split is not None else {"train": counts["train"]}}

    def _each_row(self, tables: Iterable[pa.Table] | None, do: Callable[[pa.Table], None]) -> None:
        if tables is not None:
            for table in tables:
                do(table)
            return

        def run(table: pa.Table, part: str) -> Samples:
            do(table)
            return NO_SAMPLES

        for _ in self._sources(run)["train"].blocks(0, 1, None):
            pass

    @property
    def _parts(self) -> tuple[str, ...]:
        return ("train",) if self.split is None else self.split.parts

    @property
    def _shared_out(self) -> tuple[str, ...]:
        """The parts that have rows of the files of train by the split; beside files of other parts train alone."""
        if self.split is None:
            return ()
        return self.split.parts if len(self.files) == 1 else ("train",)

    def _masks(self, table: pa.Table, cuts: Sequence[float]) -> dict[str, npt.NDArray[np.bool_] | None]:
        """Which rows each part has; None for all."""
        if self.split is None:
            return {"train": None}
        if self.split.by == "random":  # by label, too, rows with the same features would be in other splits than those
            table = table.select(list(self.preprocessor.columns))  # with the other label, and seem to have this one
        places = self.split.places(table, cuts)
        return {part: places == place for place, part in enumerate(self.split.parts)}

    def _samples(self, table: pa.Table, part: str) -> Samples:
        mask = self._masks(table, self.preprocessor.fitted["cuts"])[part] if part in self._shared_out else None
        chosen = _chosen(table, mask)
        with _rows_of(mask):
            ids, dense = self.preprocessor(_columns(chosen, self.preprocessor))
            labels, weights = self.labels.of(chosen)
        return Samples(ids, dense, labels, weights)

    def _sources(
        self, to_samples: Callable[[pa.Table, str], Samples], counts: Mapping[str, int] = {}
    ) -> Mapping[str, TableSource]:
        """The files of each split; of one table, each split reads the same ones."""
        if self.split is None:
            return self.open_tables(self.files, self.how, self._wanted(), to_samples, counts)
        files = dict.fromkeys(self._shared_out, self.files["train"])
        own = self.open_tables(files, self.how, self._wanted(), to_samples, counts)
        if len(self.files) == 1:
            return own
        return {**replace(self, split=None)._sources(to_samples), **own}  # others need no column to be split by

    def _wanted(self) -> Wanted:
        """Column -> its kind in text, and who reads it."""
        wanted: dict[str, tuple[Kind, str]] = {}
        owner = self.preprocessor.columns
        for column, kind in preprocessed_columns(self.preprocessor):
            wanted[column] = ("number" if kind == "number" else "text", f"feature {owner[column]!r}")
        for name in self.labels.names:
            as_feature, who = wanted.get(name, ("number", "data.label"))
            wanted[name] = "text" if name in self.labels.texts else as_feature, who
        if self.labels.weight is not None:
            wanted.setdefault(self.labels.weight, ("number", "data.weight"))
        if self.split is not None and self.split.column is not None:
            wanted.setdefault(self.split.column, ("text", "data.split"))
        return wanted


def _check_apart(files: Mapping[str, set[str]]) -> None:
    """JobError where one of several files to train on is to be evaluated on, too; one file for both is no oversight."""
    for part, own in files.items():
        both = sorted(own & files["train"])
        if both and own != files["train"]:
            reason = f"{both[0]} is a file of train, too, so that the metrics would be of rows that were trained on"
            raise JobError(where=f"data.{part}", reason=f"{reason}: let the files of train be others")


def give_label_values(column: pa.ChunkedArray) -> str:
    """Return the setting that declares labels which are texts, with the first two of them."""
    first = [str(value) for value in pc.unique(column.cast(pa.string()).drop_null())[:2].to_pylist()]
    shown = ", ".join(f'"{value[:20]}"' for value in first) if len(first) == 2 else '"no", "yes"'
    return f"name the texts of 0 and of 1, as data.label_values: [{shown}]"


def as_times(column: str, array: pa.Array | pa.ChunkedArray) -> Floats:
    """(N,) times as numbers: microseconds where they are dates, NaN where missing. BadValue where one is neither."""
    array = plain_times(column, array)
    if pa.types.is_string(array.type):
        with suppress(pa.ArrowException):
            return numbers_of(column, array.cast(pa.float64()))
        dates = as_dates(array, "us")
        if dates is not None:
            return numbers_of(column, dates)
        check_utf8(column, as_array(array))
        first = None
        for row, value in enumerate(array.to_pylist()):
            if value is None:
                continue
            date = as_dates(pa.array([value]), "us")
            if date is None:
                raise BadValue(row, column, f"{value[:40]!r} is no time, as 2026-01-31 12:00:00 is")
            first = first or date.type
            if date.type != first:
                zone = "no" if date.type.tz is None else "a"
                reason = f"{value[:40]!r} has {zone} time zone, unlike the times before; write all its values alike"
                raise BadValue(row, column, reason)
    return numbers_of(column, array)


def plain_times(column: str, array: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Times without a dictionary, texts of them as strings, of which the empty one is a missing time.

    BadValue where they are true and false.
    """
    if pa.types.is_boolean(array.type):
        raise BadValue(0, column, "is true or false, and no time: name a column of dates or of numbers")
    if pa.types.is_large_string(array.type) or pa.types.is_dictionary(array.type):  # as pandas and polars write texts
        array = decoded(column, as_array(array))
        array = array.cast(pa.string()) if pa.types.is_large_string(array.type) else array
    return pc.if_else(pc.equal(array, ""), None, array) if pa.types.is_string(array.type) else array


def as_dates(texts: pa.Array | pa.ChunkedArray, unit: Literal["us", "ns"]) -> pa.Array | pa.ChunkedArray | None:
    """Timestamps of texts; None where one is no date, or not in the range of the unit."""
    texts = pc.replace_substring_regex(texts, r"(\.\d{6})\d+" if unit == "us" else r"(\.\d{9})\d+", r"\1")
    texts = pc.replace_substring_regex(texts, r" UTC$", "Z")
    for zone in (None, "UTC"):  # all with a zone, as 2026-01-31T12:00:00Z, or none
        with suppress(pa.ArrowException):
            return texts.cast(pa.timestamp(unit, zone))
    return None


def of_one_kind(column: str, times_of: Callable[[pa.Table], Times]) -> Callable[[pa.Table], Times]:
    """Return `times_of` for one table after the other. BadValue where some have dates, and others plain numbers."""
    first = ""

    def checked(table: pa.Table) -> Times:
        nonlocal first
        times = times_of(table)
        if table.num_rows:
            kind = "dates" if has_dates(table.column(column)) else "numbers"
            first = first or kind
            if kind != first:
                reason = f"has {kind}, and {first} in the rows before, with which they have no order"
                raise BadValue(0, column, f"{reason}; write all its values alike")
        return times

    return checked


def has_dates(array: pa.ChunkedArray) -> bool:
    """Whether times, as `as_times` reads them, are dates; else they are plain numbers."""
    first = array.slice(0, 1).cast(getattr(array.type, "value_type", array.type))
    if not (pa.types.is_string(first.type) or pa.types.is_large_string(first.type)):
        return bool(pa.types.is_temporal(first.type))
    try:
        first.cast(pa.float64())
    except pa.ArrowException:
        return True
    return False


def _row_keys(table: pa.Table) -> Ids:
    """(N,) a hash of each row's values."""
    from embershard.worker.data.hashing import hash_numbers  # its kernels need numba

    keys = np.zeros(table.num_rows, np.int64)
    for name in sorted(table.column_names):  # files may have them in another order
        array = table.column(name).combine_chunks()
        lengths = None
        if is_list(array.type):
            lengths = np.asarray(pc.fill_null(pc.list_value_length(array), 0), np.int64)
            array = pc.list_flatten(array)
        of = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
        if pa.types.is_decimal(of):  # a feature may read it as a number; as a category it is refused elsewhere
            array = array.cast(of).cast(pa.string())
        if pa.types.is_floating(array.type):
            values = _keys_of_floats(name, array.to_numpy(zero_copy_only=False).astype(np.float64))
        elif pa.types.is_timestamp(array.type):  # a feature may read it as a number
            values = np.nan_to_num(numbers_of(name, array), nan=-0.5).view(np.int64)
        else:
            values = hashes_of(name, name, array)
        if lengths is not None:
            ends = np.cumsum(lengths)
            place = np.arange(len(values)) - np.repeat(ends - lengths, lengths)  # in its list: blocks differ by reader
            sums = np.concatenate([[0], np.cumsum(values * (place % 61 + 1))])
            values = sums[ends] - sums[ends - lengths] + lengths
        keys = hash_numbers(name, keys ^ values)
    return keys


def _keys_of_floats(name: str, x: Floats) -> Ids:
    """(N,) a hash of each float, that of the integer where it is one: pandas writes integers so if one is missing."""
    from embershard.worker.data.hashing import hash_column  # its kernels need numba

    missing = np.isnan(x)
    whole = missing | ((np.rint(x) == x) & (np.abs(x) < 2.0**63))
    integers = pa.array(np.where(whole & ~missing, x, 0).astype(np.int64), mask=missing)
    return np.where(whole, hash_column(name, integers), x.view(np.int64))


def _columns(table: pa.Table, preprocessor: Preprocessor) -> dict[str, pa.ChunkedArray]:
    return {name: table.column(name) for name in preprocessor.columns}


def _chosen(table: pa.Table, mask: npt.NDArray[np.bool_] | None) -> pa.Table:
    return table if mask is None else table.filter(pa.array(mask))


@contextmanager
def _rows_of(mask: npt.NDArray[np.bool_] | None) -> Iterator[None]:
    """While chosen rows are converted: a BadValue's row is that among all of them."""
    try:
        yield
    except BadValue as error:
        error.row = error.row if mask is None else int(np.flatnonzero(mask)[error.row])
        raise
