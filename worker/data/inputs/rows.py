"""Rows of a request as the ids and dense features of a model: what the reader of a job does with its columns.

In plain Python and numpy, so that a server needs neither pyarrow nor numba. `RowInputs` is data: an export holds it.
"""

from __future__ import annotations

import bisect
import contextlib
import numbers
from collections.abc import Collection, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, cast

import numpy as np
import numpy.typing as npt

from embershard.proto.arrays import Floats, Ids
from embershard.proto.errors import BadRows
from embershard.worker.data.inputs.feature_ids import feature_ids, feature_key, spelled

Columns = Mapping[str, Sequence[object]]
PADDING = -1  # in place of an id, where a list is shorter than its columns


@dataclass(frozen=True, kw_only=True, slots=True)
class CategoricalInput:
    """Convert the values of a column to ids.

    hashed: feature_id of column and value. global: the value is the id, below `num_ids`. vocabulary: `first` + the
    position of the value in the sorted `values`, or the position after the last one for an unknown value; white
    space around a text is ignored.
    """

    name: str
    ids: Literal["hashed", "global", "vocabulary"] = "hashed"
    num_ids: int | None = None
    values: tuple[str, ...] = ()
    first: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericInput:
    """Convert a column of numbers to a dense feature: log(1 + max(x, 0)) if `log`, then (x - mean) / std.

    A missing number counts as 0 before this, or is an error if it is `required`.
    """

    name: str
    log: bool = False
    mean: float = 0.0
    std: float = 1.0
    required: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ListInput:
    """Convert a column of lists to `width` columns of ids: `first` + each integer, then PADDING.

    With `values` lists have these texts in place of integers, and each counts as its position in the sorted `values`.
    An unknown one is left out, or, where there is no `width`, has the position after the last one.
    `keep` selects the values of a list that is too long: the last ones, or values spread evenly over its distinct
    ones. Without a `width` the lists of all rows must have the same length, and all values are kept.
    """

    name: str
    num_ids: int
    first: int = 0
    width: int | None = None
    keep: Literal["last", "spread"] = "last"
    values: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RowInputs:
    """Describe how the columns of a request become a model's ids and dense features, in the order of the model.

    A batch's ids are those of `categorical`, then those of `lists`.
    """

    categorical: tuple[CategoricalInput, ...] = ()
    numeric: tuple[NumericInput, ...] = ()
    lists: tuple[ListInput, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the columns that rows must have."""
        parts: tuple[Sequence[CategoricalInput | ListInput | NumericInput], ...]
        parts = self.categorical, self.lists, self.numeric
        return tuple(feature.name for part in parts for feature in part)

    def as_data(self) -> dict[str, object]:
        """Return the inputs as values that JSON can hold, for `of`."""
        return {"kind": "columns", **asdict(self)}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """Create the inputs from a result of `as_data`. TypeError, KeyError or ValueError if it is malformed."""
        if data["kind"] != "columns":
            raise ValueError(f"its inputs are of kind {data['kind']!r}, which this version does not know")
        return cls(
            categorical=tuple(CategoricalInput(**{**c, "values": tuple(c["values"])}) for c in data["categorical"]),
            numeric=tuple(NumericInput(**n) for n in data["numeric"]),
            lists=tuple(ListInput(**{**one, "values": tuple(one["values"])}) for one in data["lists"]),
            ignored=tuple(data["ignored"]),
        )

    def __call__(self, rows: object) -> tuple[Ids, Floats | None]:
        """Ids (N, F) and dense features (N, D), or None, of columns by name: a dict, an Arrow table, a data frame.

        BadRows names a feature that is unknown, missing, of another length, or has a value that it cannot have.
        """
        columns = self._columns(rows)
        count = len(next(iter(columns.values()), ()))
        ids = np.empty((count, len(self.categorical)), np.int64)
        hashed = [(i, c) for i, c in enumerate(self.categorical) if c.ids == "hashed"]
        if hashed and count:
            keys = np.repeat(np.array([feature_key(c.name) for _, c in hashed], np.uint64), count)
            texts = [text for _, c in hashed for text in _spelled(c.name, columns[c.name])]
            ids[:, [i for i, _ in hashed]] = feature_ids(keys, texts).reshape(len(hashed), count).T
        for i, feature in enumerate(self.categorical):
            if feature.ids == "global":
                ids[:, i] = _global(feature, columns[feature.name])
            elif feature.ids == "vocabulary":
                ids[:, i] = _places(feature, columns[feature.name])
        if self.lists:
            ids = np.concatenate([ids, *(_of_lists(feature, columns[feature.name]) for feature in self.lists)], axis=1)
        if not self.numeric:
            return ids, None
        return ids, np.stack([_dense(feature, columns[feature.name]) for feature in self.numeric], axis=1)

    def _columns(self, rows: object) -> Columns:
        given = columns_by_name(rows)
        check_columns(given, self.names, self.ignored)
        lists = {feature.name for feature in self.lists}
        columns = {name: _values(name, given[name], dims=2 if name in lists else 1) for name in self.names}
        check_lengths(columns)
        return columns


def earlier_names(now: Sequence[str], before: Sequence[str]) -> dict[str, str]:
    """Name of each column now -> its name before, in other files or an export of the same job; in the order of now.

    A column that is not among those before was renamed: it stands for the one in its place among those that are not
    here any more. One beside them is new, and left out.
    """
    renamed = dict(zip((n for n in now if n not in before), (n for n in before if n not in now), strict=False))
    return {name: renamed.get(name, name) for name in now if name in before or name in renamed}


def other_order(named: Mapping[str, str], before: Sequence[str]) -> str:
    """Say that columns have another order than before, where they do; the empty text where not.

    A model knows a column by its place. `named` is as `earlier_names` gives it.
    """
    then = [name for name in before if name in named.values()]
    if then == list(named.values()):
        return ""
    return f"the columns are in another order ({', '.join(named)}; then {', '.join(then)})"


def check_columns(given: Collection[str], wanted: Collection[str], ignored: Collection[str]) -> None:
    """BadRows for a column that is unknown or missing."""
    for name in given:
        if name not in wanted and name not in ignored:
            raise BadRows(feature=name, value=None, reason=f"unknown (known: {', '.join(wanted)})")
    for name in wanted:
        if name not in given:
            raise BadRows(feature=name, value=None, reason="missing")


def check_lengths(columns: Mapping[str, Sized]) -> None:
    """BadRows for a column of another length than the first."""
    first = next(iter(columns), "")
    for name, values in columns.items():
        if len(values) != len(columns[first]):
            reason = f"has {len(values)} values, {first!r} has {len(columns[first])}"
            raise BadRows(feature=name, value=len(values), reason=reason)


def columns_by_name(rows: object) -> Mapping[str, object]:
    """The columns of a mapping, an Arrow table or batch, or a data frame."""
    names: Any = getattr(getattr(rows, "schema", None), "names", None)
    if not isinstance(names, list):  # of polars it is a method
        names = rows if isinstance(rows, Mapping) else getattr(rows, "columns", None)
    if names is None:
        raise TypeError(f"rows are columns by name (a dict, an Arrow table, a data frame), not {type(rows).__name__}")
    table: Any = rows
    return {str(name): table[name] for name in names}


def _values(name: str, column: object, dims: int = 1) -> Sequence[object]:
    """A column as a list of Python's objects, or a numpy array of numbers, of at most so many dimensions."""
    if isinstance(column, list | tuple) or (isinstance(column, np.ndarray) and column.dtype.kind in "biuf"):
        found: Any = column
    else:
        listed = next((getattr(column, m) for m in ("to_pylist", "tolist", "to_list") if hasattr(column, m)), None)
        found = None if listed is None else listed()
    if isinstance(found, np.ndarray) and not 1 <= found.ndim <= dims:
        found = None
    if not isinstance(found, list | tuple | np.ndarray):
        raise BadRows(feature=name, value=shown(column), reason=f"{shown(column)} is no list of values")
    if dims == 1 and len(found) and isinstance(found[0], list | tuple | Mapping | np.ndarray):
        raise no_single_value(name, 0, found[0])
    return found  # type: ignore[return-value]  # an array of one dimension is a sequence here


def no_single_value(name: str, row: int, value: object) -> BadRows:
    """The error of a list or an object where a feature has one value."""
    return _bad(name, row, value, "is no single value: give the column one value for each row")


def shown(value: object) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _bad(name: str, row: int, value: object, reason: str) -> BadRows:
    return BadRows(feature=name, value=shown(value), reason=f"row {row}: {shown(value)} {reason}")


def _spelled(name: str, values: Sequence[object]) -> list[bytes]:
    if set(map(type, values)) == {str}:  # as most are, in a tenth of the time
        with contextlib.suppress(UnicodeEncodeError):
            return [value.encode() for value in cast(Sequence[str], values)]
    out = []
    for row, value in enumerate(values):
        try:
            out.append(spelled(value))
        except TypeError:
            raise _bad(name, row, value, "is neither a text nor an integer") from None
        except UnicodeEncodeError:
            raise _bad(name, row, value, "has characters that UTF-8 cannot spell") from None
    return out


def _global(feature: CategoricalInput, values: Sequence[object]) -> list[int]:
    found = []
    for row, value in enumerate(values):
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or int(value) < 0:
            raise _bad(feature.name, row, value, "is not an integer id >= 0")
        if feature.num_ids is not None and int(value) >= feature.num_ids:
            raise _bad(feature.name, row, value, f"is not below num_ids = {feature.num_ids}")
        found.append(feature.first + int(value))
    return found


def _places(feature: CategoricalInput, values: Sequence[object]) -> list[int]:
    known, found = feature.values, []
    for text in (spelt.decode().strip() for spelt in _spelled(feature.name, values)):
        place = bisect.bisect_left(known, text)
        found.append(feature.first + (place if place < len(known) and known[place] == text else len(known)))
    return found


def _of_lists(feature: ListInput, values: Sequence[object]) -> Ids:
    """(N, width) ids of lists."""
    lists = [_integers(feature, row, value) for row, value in enumerate(values)]
    width = feature.width
    if width is None:
        width = max(1, len(lists[0])) if lists else 1
        for row, own in enumerate(lists):
            if len(own) != width:
                raise _bad(feature.name, row, values[row], f"has {len(own)} values, and that of row 0 has {width}")
    ids = np.full((len(lists), width), PADDING, np.int64)
    for row, own in enumerate(lists):
        if feature.keep == "spread":
            taken = sorted(set(own))
            shown = min(len(taken), width)
            own = [taken[place * len(taken) // shown] for place in range(shown)]
        ids[row, : min(len(own), width)] = own[-width:]
    return np.where(ids == PADDING, PADDING, ids + feature.first)


def _integers(feature: ListInput, row: int, value: object) -> list[int]:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise _bad(feature.name, row, value, f"is no list of {'values' if feature.values else 'integers'}")
    if feature.values:
        try:
            places = _places(CategoricalInput(name=feature.name, values=feature.values), value)
        except BadRows:
            raise _bad(feature.name, row, value, "has a value that is neither a text nor an integer") from None
        return places if feature.width is None else [place for place in places if place < len(feature.values)]
    try:
        return _global(CategoricalInput(name=feature.name, ids="global", num_ids=feature.num_ids), value)
    except BadRows:
        reason = f"has a value that is no integer from 0 to below {feature.num_ids}"
        raise _bad(feature.name, row, value, reason) from None


_NUMBERS = {float, int, type(None)}  # and others that are slower to know


def _dense(feature: NumericInput, values: Sequence[object]) -> Floats:
    if not isinstance(values, np.ndarray) and not set(map(type, values)) <= _NUMBERS:
        for row, value in enumerate(values):
            if value is not None and not isinstance(value, numbers.Real):
                raise _bad(feature.name, row, value, "is no number")
    with np.errstate(over="ignore"):  # told below
        x = np.array(values, np.float64).astype(np.float32)
    missing = np.isnan(x)
    wrong = missing if feature.required and missing.any() else np.isinf(x)
    if wrong.any():
        row = int(wrong.argmax())
        raise _bad(feature.name, row, values[row], "is missing" if feature.required and missing.any() else "not finite")
    return transformed(np.where(missing, np.float32(0), x), feature)


def transformed(x: Floats, feature: NumericInput) -> Floats:
    """(N,) dense features of numbers none of which is missing."""
    if feature.log:
        x = np.log1p(np.maximum(x, 0))
    if (feature.mean, feature.std) != (0.0, 1.0):
        scaled: npt.NDArray[np.float64] = (x - np.float64(feature.mean)) / np.float64(feature.std)
        x = scaled.astype(np.float32)
    return x
