"""Values of a column as texts, numbers, hashes and ids: what they may be, and which row has one that may not.

The arrays are of Arrow. Nothing here knows of features.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from embershard.proto.arrays import Floats, Ids
from embershard.worker.data.batch import NUM_HASHED_IDS

BRACKETS = r"^\[.*\]$"
_TIME = re.compile(r"\s*(\d{4}[-/]\d\d[-/]\d\d([ T]|$)|\d{1,2}[./]\d{1,2}[./]\d{4}\b)")
MAX_TEXT_BYTES = (1 << 31) - 1  # of a block of a column, decoded: Arrow's offsets are of 32 bits


class BadValue(ValueError):
    """A value that a feature cannot have; `row` counts from 0 within the columns given."""

    def __init__(self, row: int, column: str, reason: str) -> None:
        super().__init__(f"column {column!r}: {reason}")
        self.row, self.column, self.reason = row, column, reason


class BadFeature(ValueError):
    """Features that contradict each other, or that the columns' types contradict."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"feature {name!r}: {reason}")
        self.name, self.reason = name, reason


@dataclass(frozen=True, eq=False)
class ColumnValues:
    """Values of a column: one for each sample, or in `starts` where each sample's begin."""

    flat: pa.Array
    column: str
    starts: Ids | None = None  # (N + 1,)
    keep_last: bool = False

    def row(self, place: int) -> int:
        """The sample of a value."""
        return place if self.starts is None else int(np.searchsorted(self.starts, place, side="right")) - 1

    def check_lengths(self, other: ColumnValues, what: str = "values") -> None:
        """BadValue where a sample has not as many values as of another column."""
        assert self.starts is not None
        assert other.starts is not None
        own, others = np.diff(self.starts), np.diff(other.starts)
        differ = np.flatnonzero(own != others)
        if len(differ):
            reason = f"{own[differ[0]]} {what} for {others[differ[0]]} values of {other.column!r}"
            raise BadValue(int(differ[0]), self.column, reason)

    def hashes(self, table: str, weight_separator: str | None) -> Ids:
        """The hash of each value. BadFeature, and BadValue, where these are no texts or integers."""
        if self.starts is not None and pa.types.is_floating(self.flat.type) and not _is_missing(self.flat):
            reason = f"has lists of {self.flat.type} values, and a category is a text or an integer"
            remedy = "save lists of integers (of pandas, cast the column to Int64 before lists are made of it)"
            remedy += ", or write each number into a column of its own, of type: number"
            raise BadFeature(self.column, f"{reason}: {remedy}")
        return hashes_of(table, self.column, self.flat, self.row, weight_separator)

    def exact_ids(self, limit: int, weight_separator: str | None) -> Ids:
        """The ids that the values are already; BadValue for one that is not in 0 to below `limit`."""
        bound = f"num_ids {limit}" if limit != NUM_HASHED_IDS else "2**62; leave ids: exact out to hash any value"
        values = decoded(self.column, self.flat, self.row)
        if weight_separator is not None:
            values = _without_weights(texts_of(self.column, values, self.row), weight_separator)
        try:
            array = values.cast(pa.int64())
        except pa.ArrowException:
            texts = texts_of(self.column, values)
            wrong = np.flatnonzero(~np.asarray(pc.match_substring_regex(texts, r"^[0-9]{1,18}$")))
            place = int(wrong[0]) if len(wrong) else 0
            text = texts[place].as_py()
            reason = f"{text[:40]!r} is no integer id"
            if text.isdecimal():
                reason = f"id {text} is not in 0 to below {bound}"
            raise BadValue(self.row(place), self.column, reason) from None
        ids: Ids = pc.fill_null(array, -1).to_numpy(zero_copy_only=False)
        wrong = np.flatnonzero((ids < 0) | (ids >= limit))
        if len(wrong):
            place = int(wrong[0])
            raise BadValue(self.row(place), self.column, f"id {array[place]} is not in 0 to below {bound}")
        return ids

    def weights(self, separator: str) -> Floats:
        """The weight that each value ends with, 1 where it has none, and 0 where it is missing, as in `a:`."""
        parts = pc.split_pattern(texts_of(self.column, self.flat), separator, max_splits=1, reverse=True)
        has = pc.equal(pc.list_value_length(parts), 2)
        given = pc.if_else(has, _last(parts), "1")
        return np.nan_to_num(numbers_of(self.column, given, self.row))

    def write(self, numbers: npt.NDArray[Any], out: npt.NDArray[Any], fill: float) -> None:
        """Write the numbers of each sample into its row of `out`, (N, width), from the left, and `fill` behind them."""
        if self.starts is None:
            out[:, 0] = numbers
            return
        lengths = np.diff(self.starts)
        kept = np.minimum(lengths, out.shape[1])
        if kept.sum() < len(numbers):
            first = self.starts[:-1] + (lengths - kept if self.keep_last else 0)
            place = np.arange(len(numbers)) - np.repeat(first, lengths)
            numbers = numbers[(place >= 0) & (place < out.shape[1])]
        out[...] = fill
        out[np.arange(out.shape[1]) < kept[:, None]] = numbers


def _without_weights(texts: pa.Array, separator: str) -> pa.Array:
    return pc.list_element(pc.split_pattern(texts, separator, max_splits=1, reverse=True), 0)


def _last(parts: pa.Array) -> pa.Array:
    """The last element of each list, none of which is empty."""
    ends = np.asarray(parts.offsets)[1:] - 1
    return parts.values.take(pa.array(ends))


def as_array(values: object) -> pa.Array:
    """One array of Arrow, of chunks or of any sequence."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks() if values.num_chunks != 1 else values.chunk(0)
    array = values if isinstance(values, pa.Array) else pa.array(values)
    return array if (kind := without_views(array.type)) == array.type else array.cast(kind)


def without_views(kind: pa.DataType) -> pa.DataType:
    """The type that stands for one of views of texts, as DataFusion writes: Arrow cannot filter or trim these."""
    if is_list(kind):
        return pa.large_list(without_views(kind.value_type)) if pa.types.is_string_view(kind.value_type) else kind
    return pa.string() if pa.types.is_string_view(kind) else kind


def is_list(kind: pa.DataType) -> bool:
    """Whether values of a type are lists."""
    return bool(pa.types.is_list(kind)) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def decoded(column: str, array: pa.Array, row: Callable[[int], int] = int) -> pa.Array:
    """Return the values of a dictionary one by one, and any other array as it is.

    BadValue where texts are too long for that: a file of 2 kB can have one of 50 MB in all of its rows.
    """
    if not pa.types.is_dictionary(array.type):
        return array
    kind = array.type.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        lengths = pc.fill_null(pc.binary_length(array.dictionary).take(array.indices), 0)
        total = pc.sum(lengths.cast(pa.int64())).as_py() or 0
        if total > MAX_TEXT_BYTES:
            longest = int(np.argmax(lengths))
            reason = f"a text of {lengths[longest].as_py():,} bytes, and {len(array):,} rows have {total:,} together"
            raise BadValue(row(longest), column, f"{reason}, more than is read at once; is it a value of a feature?")
    return array.cast(kind)


def texts_of(column: str, array: pa.Array, row: Callable[[int], int] = int) -> pa.Array:
    """Values as texts, an integer as its decimal text and a missing one as the empty text."""
    array = decoded(column, array, row)
    if pa.types.is_floating(array.type) and _is_missing(array):  # of one part of a table, as pandas writes it
        array = pa.nulls(len(array), pa.string())
    kind = array.type
    if pa.types.is_floating(kind):
        reason = f"has {kind} values, and a category is a text or an integer: declare it as type: number"
        raise BadFeature(column, f"{reason}, or save integers (of pandas Int64, which may be missing)")
    if pa.types.is_temporal(kind) and not pa.types.is_date(kind):
        reason = f"is {kind}, and a time would be another category in each unit and zone"
        raise BadFeature(column, f"{reason}: save a date, a text or an integer (the hour, say)")
    if pa.types.is_decimal(kind) and kind.scale:
        reason = f"is {kind}, and 7.0 and 7.00 would be two categories"
        raise BadFeature(column, f"{reason}: save integers or texts, or declare it as type: number")
    if getattr(kind, "extension_name", "") == "arrow.uuid":  # 16 bytes, which may be UTF-8 by chance
        raise BadFeature(column, f"is {kind}, and a category is a text or an integer: save the texts of the UUIDs")
    try:
        texts = array if pa.types.is_string(array.type) else array.cast(pa.string())
        texts = pc.fill_null(texts, "") if texts.null_count else texts
    except pa.ArrowException:
        raise BadFeature(column, f"is {kind}, and a category is a text or an integer: {_as_category(kind)}") from None
    data = texts.buffers()[2]
    found = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    if found.max(initial=0) > 127:  # not all ASCII
        check_utf8(column, texts, row)
    if (found == 10).any():
        broken = np.flatnonzero(np.asarray(pc.match_substring(texts, "\n")))
        if len(broken):
            value = texts[int(broken[0])].as_py()[:40]
            raise BadValue(row(int(broken[0])), column, f"{value!r} has a line break, which no category may have")
    return texts


def check_utf8(column: str, texts: pa.Array, row: Callable[[int], int] = int) -> None:
    """BadValue for a text that is not UTF-8, which Parquet files may have: Arrow does not look when it reads them."""
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        for place, value in enumerate(texts.cast(pa.large_binary()).to_pylist()):
            try:
                (value or b"").decode()
            except UnicodeDecodeError:
                raise BadValue(row(place), column, f"{value[:40]!r} is not UTF-8: write it as such text") from None
        raise


def _is_missing(array: pa.Array) -> bool:
    """Whether floats are all missing."""
    return bool(pc.all(pc.is_null(array, nan_is_null=True), min_count=0).as_py())


def hashes_of(
    table: str,
    column: str,
    array: pa.Array,
    row: Callable[[int], int] = int,
    weight_separator: str | None = None,
) -> Ids:
    """(N,) the hash of each value, without the weight behind it; those of a dictionary are computed once each."""
    # here: its kernels need numba, and a look at files not
    from embershard.worker.data.hashing import hash_column, hash_texts, ids_of_indices

    if pa.types.is_dictionary(array.type):
        try:
            own = hashes_of(table, column, array.dictionary, weight_separator=weight_separator)
        except BadValue:  # has it a row of these, and which? Others may share the dictionary
            return hashes_of(table, column, decoded(column, array, row), row, weight_separator)
        return ids_of_indices(table, own, array.indices)
    if pa.types.is_integer(array.type):
        return hash_column(table, array)
    texts = texts_of(column, array, row)
    if weight_separator is not None:
        texts = _without_weights(texts, weight_separator)
    return hash_texts(table, texts)


def numbers_of(column: str, array: pa.Array, row: Callable[[int], int] = int) -> Floats:
    """(N,) float64, NaN where missing. BadValue for a text that is no number, and for one without bounds."""
    array = decoded(column, as_array(array), row)
    if is_list(array.type):
        raise BadFeature(column, f"is a list ({array.type}), no number")
    try:
        if pa.types.is_temporal(array.type):
            array = array.cast(pa.timestamp("us"), safe=False).cast(pa.int64()).cast(pa.float64(), safe=False)
        if pa.types.is_decimal(array.type):  # their cast gives not the nearest float: another 0.3 than a request's
            array = array.cast(pa.string())
        if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
            array = pc.utf8_trim_whitespace(array)  # as in CSV
            array = pc.if_else(pc.equal(array, ""), None, array)
        x: Floats = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    except pa.ArrowException:
        check_utf8(column, array, row)
        for place, value in enumerate(array.to_pylist()):
            if value is not None and not _is_number(value):
                shown = f"{str(value)[:40]!r} is not a number{time_remedy(str(value))}"
                raise BadValue(row(place), column, shown) from None
        raise BadFeature(column, f"is {array.type}, no number") from None
    infinite = np.flatnonzero(np.abs(x) > np.finfo(np.float32).max)  # what a model computes with
    if len(infinite):
        reason = f"{x[infinite[0]]} is not a finite number; write a missing value in its place"
        raise BadValue(row(int(infinite[0])), column, reason)
    return x


def time_remedy(text: str) -> str:
    """Return the remedy for a time, as 2026-01-31 12:00, in a column of numbers, to append to an error; else ""."""
    if not _TIME.match(text):
        return ""
    return "; a text of a time is no number: write seconds since 1970-01-01, or the hour, say"


def _as_category(kind: pa.DataType) -> str:
    """What to do with a type of Arrow that is no category."""
    if pa.types.is_struct(kind):
        return f"write its fields ({', '.join(field.name for field in kind)}) as columns of their own"
    if pa.types.is_map(kind):
        return "write its keys, and its values, as a list each; the values may be the weights of a feature of type list"
    if is_list(kind):
        return "write all values of a row as one list"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return "write it as a text, in hexadecimal digits say"
    return "write it as one of these"


def float_of(text: str) -> float:
    """The number that a text is, NaN where it is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _is_number(value: object) -> bool:
    try:
        pa.scalar(str(value)).cast(pa.float64())
    except pa.ArrowException:
        return False
    return True


def looks_separated(array: pa.Array | pa.ChunkedArray, pattern: str = rf"\||{BRACKETS}") -> str:
    """A value of texts that are lists, as a|b or [a, b], if a tenth of them or more are; else the empty text."""
    array = as_array(array)
    coded = pa.types.is_dictionary(array.type)
    values = array.dictionary if coded else array
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)) or not len(array):
        return ""
    are = pc.match_substring_regex(values, pattern)  # not of a dictionary's values one by one: they may be long
    parted = array.filter(pc.fill_null(are.take(array.indices) if coded else are, False))
    return str(parted[0].as_py())[:60] if len(parted) * 10 >= len(array) else ""
