"""What becomes of a table's columns: ids and dense features, in training, evaluation and serving alike.

A `Preprocessor` is the features of a job and what was fitted on its training data (means, quantiles, vocabularies); as
a dict of numbers and texts it is stored with a model. Its arrays depend on nothing else, and it needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embershard.proto.arrays import Floats, Ids
from embershard.worker.data.batch import NUM_HASHED_IDS, Field, IdTable, Pooling, Schema
from embershard.worker.data.inputs.rows import PADDING
from embershard.worker.data.values import (
    BRACKETS,
    BadFeature,
    BadValue,
    ColumnValues,
    as_array,
    decoded,
    hashes_of,
    is_list,
    looks_separated,
    numbers_of,
    texts_of,
)

Kind = Literal["category", "list", "sequence", "number", "cross"]
Transform = Literal["log", "standardise", "min_max", "quantile"]
CROSSED = "\x1f"  # between the values of a cross (ASCII: unit separator), which no value has
MAX_LENGTH = {"list": 20, "sequence": 50}
_QUANTILES = 101
_SAMPLE = 1 << 17  # values of a number that quantiles are taken from, and times that a split is
_OF_TABLE = ("dim", "ids", "num_ids", "buckets", "vocabulary", "min_count")  # alike for all features of one


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """Describe how a feature is made of a column; docs/data.md has each field. `None` is the default of its type."""

    type: Kind | None = None
    column: str | None = None
    of: tuple[str, ...] = ()
    table: str | None = None
    dim: int | None = None
    ids: Literal["hashed", "exact"] | None = None
    num_ids: int | None = None
    buckets: int | None = None
    vocabulary: str | None = None
    min_count: int | None = None
    pooling: Pooling | None = None
    max_length: int | None = None
    too_long: Literal["error", "truncate"] = "error"
    separator: str | None = None
    weights: str | None = None
    weight_separator: str | None = None
    transform: tuple[Transform, ...] = ()
    bucketise: int | tuple[float, ...] | None = None
    missing: float = 0.0

    @property
    def kind(self) -> Kind:
        """The type, "category" by default."""
        return self.type or "category"

    @property
    def is_many(self) -> bool:
        """Whether a sample has any number of values."""
        return self.kind in MAX_LENGTH

    @property
    def is_dense(self) -> bool:
        """Whether it is a number as such."""
        return self.kind == "number" and self.bucketise is None

    @property
    def width(self) -> int:
        """Number of columns that the feature has in a batch's ids: `max_length` of a list or a sequence, else 1."""
        return (self.max_length or MAX_LENGTH[self.kind]) if self.is_many else 1

    @property
    def is_weighted(self) -> bool:
        """Whether its values have weights."""
        return self.weights is not None or self.weight_separator is not None


Columns = Mapping[str, pa.Array | pa.ChunkedArray]
_Counts = tuple[Ids, Ids]  # hashes, ascending, and how often each was there
Fitted = dict[str, Any]  # JSON: numbers (feature -> figures), vocabularies (table -> hashes), split, samples


class Preprocessor:
    """Makes ids and dense features of columns, as `schema` names them.

    `paired` are sequences whose values belong together place by place, and which so are as long as each other.
    `missing` are texts that stand for a missing number. BadFeature where features contradict each other.
    """

    def __init__(
        self,
        features: Mapping[str, FeatureSpec],
        fitted: Fitted | None = None,
        labels: Sequence[str] = (),
        paired: Sequence[str] = (),
        missing: Sequence[str] = (),
    ) -> None:
        self.features, self.labels, self.paired = dict(features), tuple(labels), tuple(paired)
        self.missing = tuple(missing)
        self.fitted: Fitted = fitted or {}
        self._vocabularies: dict[str, tuple[Ids, Ids]] = {}  # of the tables that were asked for
        self._tables = self._settings_of_tables()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The preprocessor that `to_dict` described."""
        tuples = ("of", "transform", "bucketise")
        features = {}
        for name, fields in values["features"].items():
            given: dict[str, Any] = {
                k: tuple(v) if k in tuples and isinstance(v, list | tuple) else v for k, v in fields.items()
            }
            features[name] = FeatureSpec(**given)
        return cls(features, values["fitted"], values["labels"], values["paired"], values["missing"])

    def with_fitted(self, fitted: Fitted) -> Self:
        """The same features with what was learnt from training data."""
        return type(self)(self.features, fitted, self.labels, self.paired, self.missing)

    def to_dict(self) -> dict[str, Any]:
        """The features and what was fitted, of types that JSON has."""
        features = {name: asdict(feature) for name, feature in self.features.items()}
        given = {"labels": list(self.labels), "paired": list(self.paired), "missing": list(self.missing)}
        return {"features": features, "fitted": self.fitted, **given}

    def __call__(self, columns: Columns | Mapping[str, Sequence[object]]) -> tuple[Ids, Floats | None]:
        """Ids (N, C) int64 and dense features (N, D) float32 or None of columns by name, as arrays of Arrow or lists.

        BadValue for a value that its feature cannot have; KeyError for a column that is missing.
        """
        arrays = {name: as_array(columns[name]) for name in self.columns}
        rows, *others = {len(array) for array in arrays.values()}
        if others:
            shown = ", ".join(f"{name} {len(array)}" for name, array in arrays.items())
            raise ValueError(f"columns of different lengths: {shown}")
        schema = self.schema
        ids = np.empty((rows, schema.num_id_columns), np.int64)
        floats = np.empty((rows, schema.num_dense_columns), np.float32)
        for place, name in enumerate(name for name, feature in self.features.items() if feature.is_dense):
            floats[:, place] = self._number(name, self.features[name], arrays)
        first: ColumnValues | None = None  # of the paired ones
        for field in schema.fields:
            feature = self.features[field.name]
            values = self._values(field.name, feature, arrays)
            if field.name in self.paired:
                first = first or values
                values.check_lengths(first)
            own = ids[:, field.start : field.start + field.width]
            values.write(self._encoded(field.name, feature, values), own, PADDING)
            if field.weights is not None:
                weights = floats[:, field.weights : field.weights + field.width]
                values.write(self._weights_of(field.name, feature, arrays, values), weights, 0)
        return ids, floats if schema.num_dense_columns else None

    @cached_property
    def columns(self) -> dict[str, str]:
        """The columns that features read, each with the name of the first feature that does."""
        read: dict[str, str] = {}
        for name in self.features:
            for column in self.columns_of(name):
                read.setdefault(column, name)
        return read

    def columns_of(self, name: str) -> tuple[str, ...]:
        """The columns that a feature reads."""
        feature = self.features[name]
        own = feature.of if feature.kind == "cross" else (feature.column or name,)
        return (*own, *([feature.weights] if feature.weights else []))

    @cached_property
    def schema(self) -> Schema:
        """The columns of a batch, and the tables that its ids belong to."""
        fields, start = [], 0
        num_dense = sum(feature.is_dense for feature in self.features.values())
        weights = num_dense
        for name, feature in self.features.items():
            if feature.is_dense:
                continue
            pooling: Pooling = "none"
            if feature.is_many:
                pooling = "sequence" if feature.kind == "sequence" else feature.pooling or "mean"
            own = weights if feature.is_weighted else None
            fields.append(Field(name, feature.table or name, start, feature.width, pooling, own))
            start += feature.width
            weights += feature.width if feature.is_weighted else 0
        tables = tuple(IdTable(name, self._num_ids(name), given["dim"]) for name, given in self._tables.items())
        names = tuple(field.name for field in fields)
        numbers = tuple(name for name, feature in self.features.items() if feature.is_dense)
        return Schema(names, num_dense, None, tuple(fields), tables, self.labels or ("label",), numbers)

    def needs_fit(self) -> bool:
        """Whether something is to be learnt from the training data."""
        numbers = any(set(f.transform) - {"log"} or isinstance(f.bucketise, int) for f in self.features.values())
        return numbers or any(given["min_count"] is not None for given in self._tables.values())

    def vocabulary_files(self) -> dict[str, str]:
        """Table -> its file of values."""
        return {name: given["vocabulary"] for name, given in self._tables.items() if given["vocabulary"] is not None}

    def _settings_of_tables(self) -> dict[str, dict[str, Any]]:
        if not any(not feature.is_dense for feature in self.features.values()):
            raise BadFeature(next(iter(self.features), ""), "is a number, and no feature has an embedding; declare one")
        tables: dict[str, dict[str, Any]] = {}
        first: dict[tuple[str, str], str] = {}
        for name, feature in self.features.items():
            if feature.is_dense:
                continue
            table = feature.table or name
            settings = tables.setdefault(table, dict.fromkeys(_OF_TABLE))
            for key in _OF_TABLE:
                given = getattr(feature, key)
                if given is not None and settings[key] not in (None, given):
                    other = first[table, key]
                    reason = f"table {table!r} has {key} {given} here, and {settings[key]} in feature {other!r}"
                    raise BadFeature(name, f"{reason}; give both the same, or tables of their own")
                if given is not None:
                    settings[key] = given
                    first.setdefault((table, key), name)
            bucketised = feature.kind == "number"
            other = settings.setdefault("bucketised", name if bucketised else "")
            if bool(other) != bucketised:
                raise BadFeature(name, f"table {table!r} would have buckets of numbers and other ids; name another one")
            if other not in ("", name):
                raise BadFeature(name, f"table {table!r} has the buckets of {other!r}; name another one")
        return tables

    def _num_ids(self, table: str) -> int | None:
        given = self._tables[table]
        if given["bucketised"]:
            bucketise = self.features[given["bucketised"]].bucketise
            assert bucketise is not None
            return (bucketise if isinstance(bucketise, int) else len(bucketise) + 1) + 1
        if given["vocabulary"] is not None or given["min_count"] is not None:
            return len(self._vocabulary(table)[0]) + 1
        buckets: int | None = given["buckets"]
        return given["num_ids"] if buckets is None else buckets

    # --- categories

    def _values(self, name: str, feature: FeatureSpec, arrays: Columns) -> ColumnValues:
        """The values of a feature, one for each sample or any number."""
        column = feature.column or name
        if feature.kind == "cross":
            texts = (texts_of(column, arrays[column]) for column in feature.of)
            return ColumnValues(pc.binary_join_element_wise(*texts, CROSSED), name)
        array = arrays[column]
        if feature.kind == "number":
            return ColumnValues(array, column)
        if not feature.is_many:
            if is_list(array.type):
                raise BadFeature(name, f"column {column!r} is a list ({array.type}): {_declare(name)}")
            return ColumnValues(array, column)
        if array.null_count == len(array):  # no row has any: its type says nothing
            array = pa.nulls(len(array), pa.list_(pa.string()))
        given = array
        if not is_list(array.type):
            if feature.separator is None:
                raise BadFeature(name, f"column {column!r} is {array.type}, no list: give it a separator")
            given = texts_of(column, array)
            array = pc.split_pattern(pc.if_else(pc.equal(given, ""), None, given), feature.separator)
        array = array.cast(pa.large_list(array.type.value_type))
        lengths = np.asarray(pc.fill_null(pc.list_value_length(array), 0), np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        long = np.flatnonzero(lengths > feature.width)
        if len(long) and feature.too_long == "error":
            kept = "last" if feature.kind == "sequence" else "first"
            row = int(long[0])
            shown = ascii(given[row].as_py())
            shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
            reason = f"{shown} has {lengths[row]} values, and max_length is {feature.width}"
            raise BadValue(row, column, f"{reason}; raise it, or have too_long: truncate keep the {kept} ones")
        return ColumnValues(pc.list_flatten(array), column, starts, keep_last=feature.kind == "sequence")

    def _encoded(self, name: str, feature: FeatureSpec, values: ColumnValues) -> Ids:
        """The id of each value."""
        table = feature.table or name
        given = self._tables[table]
        if given["bucketised"]:
            ids = self._buckets(name, feature, values)
        elif given["ids"] == "exact":
            ids = values.exact_ids(given["num_ids"] or NUM_HASHED_IDS, feature.weight_separator)
        else:
            ids = values.hashes(table, feature.weight_separator)
            if given["buckets"] is not None:
                ids = ids % given["buckets"]
            elif given["vocabulary"] is not None or given["min_count"] is not None:
                known, order = self._vocabulary(table)
                place = np.searchsorted(known, ids)
                found = known[np.minimum(place, len(known) - 1)] == ids if len(known) else np.zeros(len(ids), np.bool_)
                ids = np.where(found, order[np.minimum(place, max(len(known) - 1, 0))] if len(known) else 0, len(known))
        return ids

    def _vocabulary(self, table: str) -> tuple[Ids, Ids]:
        """Hashes of the known values, ascending, and the id of each."""
        if table not in self._vocabularies:
            hashes = np.asarray(self.fitted.get("vocabularies", {}).get(table, ()), np.int64)
            order = np.argsort(hashes)
            self._vocabularies[table] = hashes[order], order
        return self._vocabularies[table]

    def _weights_of(self, name: str, feature: FeatureSpec, arrays: Columns, values: ColumnValues) -> Floats:
        """The weight of each of a list's values."""
        if feature.weight_separator is not None:
            return values.weights(feature.weight_separator)
        assert feature.weights is not None
        own = self._values(name, FeatureSpec(**{**asdict(feature), "column": feature.weights}), arrays)
        own.check_lengths(values, "weights")
        return np.nan_to_num(numbers_of(feature.weights, own.flat, own.row))

    # --- numbers

    def numbers(self, column: str, values: pa.Array, row: Callable[[int], int] = int) -> Floats:
        """(N,) float64 numbers of a column, NaN where missing; errors as of `numbers_of`."""
        values = decoded(column, values, row)
        if self.missing and (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
            values = pc.if_else(pc.is_in(values, pa.array(self.missing, values.type)), None, values)
        x = numbers_of(column, values, row)
        # -999 of a text file, where it is missing, is a number in a request or in Parquet
        return np.where(np.isin(x, self._missing_numbers), np.nan, x) if self._missing_numbers else x

    @cached_property
    def _missing_numbers(self) -> list[float]:
        found = []
        for text in self.missing:
            with suppress(ValueError):
                found.append(float(text))
        return found

    def _number(self, name: str, feature: FeatureSpec, arrays: Columns) -> Floats:
        """(N,) numbers as the transforms make them, `missing` where there is none."""
        column = feature.column or name
        x = self.numbers(column, arrays[column])
        figures = self.fitted.get("numbers", {}).get(name, {})
        for transform in feature.transform:
            if transform == "log":
                x = np.log1p(np.maximum(x, 0))
            elif transform == "standardise":
                x = (x - figures["mean"]) / (figures["std"] or 1.0)
            elif transform == "min_max":
                x = np.clip((x - figures["min"]) / ((figures["max"] - figures["min"]) or 1.0), 0, 1)
            else:
                knots = np.asarray(figures["quantiles"])
                x = np.where(np.isnan(x), x, np.interp(x, knots, np.linspace(0, 1, len(knots))))
        return np.where(np.isnan(x), feature.missing, x)

    def _buckets(self, name: str, feature: FeatureSpec, values: ColumnValues) -> Ids:
        """(N,) 0 for a missing number, else 1 + the number of boundaries at or below it."""
        x = self.numbers(values.column, values.flat, values.row)
        if isinstance(feature.bucketise, int):
            knots = np.asarray(self.fitted.get("numbers", {}).get(name, {})["quantiles"])
            at = np.linspace(0, 1, feature.bucketise + 1)[1:-1]
            boundaries = np.quantile(knots, at)
        else:
            boundaries = np.asarray(feature.bucketise, np.float64)
        return np.where(np.isnan(x), 0, 1 + np.searchsorted(boundaries, x, side="right")).astype(np.int64)


class Fitting:
    """Learns from the columns of the training data what a preprocessor needs.

    `unseen` are the vocabularies that have none of the values so far: table -> hashes; `without_values` are those of
    them whose columns had no value at all.
    """

    def __init__(
        self, preprocessor: Preprocessor, seed: int = 0, vocabularies: Mapping[str, Sequence[int]] = {}
    ) -> None:
        self._preprocessor = preprocessor
        self.unseen = dict(vocabularies)
        self.without_values = set(vocabularies)
        self._random = np.random.default_rng(seed)
        self._numbers: dict[str, _Figures] = {}
        self._counts: dict[str, list[_Counts]] = {}  # of a table
        for name, feature in preprocessor.features.items():
            if set(feature.transform) - {"log"} or isinstance(feature.bucketise, int):
                buckets = feature.bucketise if isinstance(feature.bucketise, int) else 0
                # all boundaries of its buckets are among them; a sample has no more quantiles than values
                self._numbers[name] = _Figures(min(max(_QUANTILES, buckets + 1), _SAMPLE))

    def observe(self, columns: Columns) -> None:
        """Take in a block of rows. BadValue for a value that its feature cannot have."""
        own = self._preprocessor
        arrays = {name: as_array(columns[name]) for name in own.columns}
        for name, figures in self._numbers.items():
            feature = own.features[name]
            column = feature.column or name
            x = own.numbers(column, arrays[column])
            if feature.transform[:1] == ("log",):
                x = np.log1p(np.maximum(x, 0))
            figures.observe(x[~np.isnan(x)], self._random)
        counted: set[tuple[object, ...]] = set()  # a column that two features of a table read counts once
        for name, feature in own.features.items():
            table = feature.table or name
            if table in self.unseen and not feature.is_dense:
                hashes = own._values(name, feature, arrays).hashes(table, feature.weight_separator)
                if (hashes != hashes_of(table, name, pa.array([""]))).any():
                    self.without_values.discard(table)
                if np.isin(hashes, self.unseen[table]).any():
                    del self.unseen[table]
            read = table, feature.column or name, feature.of, feature.separator, feature.weight_separator
            if not feature.is_dense and own._tables[table]["min_count"] is not None and read not in counted:
                counted.add(read)
                values = own._values(name, feature, arrays)
                found, counts = np.unique(values.hashes(table, feature.weight_separator), return_counts=True)
                parts = self._counts.setdefault(table, [])
                parts.append((found, counts))
                if sum(len(hashes) for hashes, _ in parts[1:]) > len(parts[0][0]):  # else each block would sort all
                    parts[:] = [_summed(parts)]

    def fitted(self) -> Fitted:
        """Return the figures of numbers and the vocabularies of tables, learnt from the training rows, as JSON."""
        numbers = {name: figures.to_dict() for name, figures in self._numbers.items()}
        vocabularies = {}
        for table, parts in self._counts.items():
            hashes, counts = _summed(parts)
            keep = counts >= self._preprocessor._tables[table]["min_count"]
            hashes, counts = hashes[keep], counts[keep]
            vocabularies[table] = hashes[np.lexsort((hashes, -counts))].tolist()
        return {"numbers": numbers, "vocabularies": vocabularies}


class _Figures:
    """Count, mean, spread, range and a sample of a number's values, block by block (Chan et al. 1983)."""

    def __init__(self, num_quantiles: int) -> None:
        self._num_quantiles = num_quantiles
        self._count, self._mean, self._squares = 0, 0.0, 0.0
        self._low, self._high = np.inf, -np.inf
        self._sample, self._keys = np.empty(0), np.empty(0)

    def observe(self, x: Floats, random: np.random.Generator) -> None:
        if not len(x):
            return
        mean, count = float(x.mean()), self._count + len(x)
        shift = mean - self._mean
        self._squares += float(((x - mean) ** 2).sum()) + shift**2 * self._count * len(x) / count
        self._mean += shift * len(x) / count
        self._count = count
        self._low, self._high = min(self._low, float(x.min())), max(self._high, float(x.max()))
        keys, sample = np.concatenate([self._keys, random.random(len(x))]), np.concatenate([self._sample, x])
        if len(keys) > _SAMPLE:  # the smallest keys are a uniform sample of all values so far
            keep = np.sort(np.argpartition(keys, _SAMPLE)[:_SAMPLE])
            keys, sample = keys[keep], sample[keep]
        self._keys, self._sample = keys, sample

    def to_dict(self) -> dict[str, Any]:
        if not self._count:
            return {"mean": 0.0, "std": 0.0, "min": 0.0, "max": 0.0, "quantiles": [0.0]}
        quantiles = np.quantile(self._sample, np.linspace(0, 1, self._num_quantiles)).tolist()
        mean, std = self._mean, (self._squares / self._count) ** 0.5
        if self._low == self._high:  # a constant, whose squares are rounding errors, by which others would be divided
            mean, std = self._low, 0.0
        return {"mean": mean, "std": std, "min": self._low, "max": self._high, "quantiles": quantiles}


def _summed(parts: Sequence[_Counts]) -> _Counts:
    hashes, counts = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    keys, inverse = np.unique(hashes, return_inverse=True)
    return keys, np.bincount(inverse, counts).astype(np.int64)


def _declare(name: str) -> str:
    return f"declare it, {name}: {{type: list}}, or as a sequence, {name}: {{type: sequence, max_length: 50}}"


def check_undeclared(name: str, feature: FeatureSpec, array: pa.Array | pa.ChunkedArray) -> None:
    """BadFeature where the first values of a feature without a type are several in one, as in a|b|c.

    And where those of a list with a separator are in brackets, which would be parts of its values.
    """
    array = as_array(array)
    if feature.separator is not None and (shown := looks_separated(array, BRACKETS)):
        reason = f"values of column {feature.column or name!r} are in brackets, as {shown!r}"
        raise BadFeature(name, f"{reason}, which a separator leaves in the first and the last value: write them as a|b")
    if feature.type is not None or feature.separator is not None:
        return
    if is_list(array.type):
        raise BadFeature(name, f"column {feature.column or name!r} is a list ({array.type}): {_declare(name)}")
    if shown := looks_separated(array):
        reason = f"values of column {feature.column or name!r} look like several in one, as {shown!r}"
        declare = f"{'write them as a|b and ' if shown.startswith('[') else ''}declare {name}: "
        declare += f"{{type: list, separator: '|'}}, or {name}: {{type: category}} if each is one value"
        raise BadFeature(name, f"{reason}: {declare}")


def preprocessed_columns(preprocessor: Preprocessor) -> Iterator[tuple[str, str]]:
    """(column, kind for a text file) of all that a preprocessor reads: a number may be read as one."""
    roles: dict[str, set[str]] = {}
    for name, feature in preprocessor.features.items():
        own = feature.of if feature.kind == "cross" else (feature.column or name,)
        for column in own:
            roles.setdefault(column, set()).add("number" if feature.kind == "number" else "text")
        if feature.weights:
            roles.setdefault(feature.weights, set()).add("text")
    return ((column, "number" if kinds == {"number"} else "text") for column, kinds in roles.items())
