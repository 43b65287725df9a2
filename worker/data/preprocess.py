"""What becomes of a table's columns: ids and dense features, in training, evaluation and serving alike.

A `Preprocessor` is the features of a job and what was fitted on its training data (means, quantiles, vocabularies); as
a dict of numbers and texts it is stored with a model. Its arrays depend on nothing else, and it needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from embershard.proto.arrays import Floats, Ids
from embershard.worker.data.batch import NUM_HASHED_IDS, Field, IdTable, Pooling, Schema
from embershard.worker.data.inputs.rows import PADDING

Kind = Literal["category", "list", "sequence", "number", "cross"]
Transform = Literal["log", "standardise", "min_max", "quantile"]
CROSSED = "\x1f"  # between the values of a cross (ASCII: unit separator), which no value has
MAX_LENGTH = {"list": 20, "sequence": 50}
_QUANTILES = 101
_SAMPLE = 1 << 17  # values of a number that quantiles are taken from, and times that a split is
_OF_TABLE = ("dim", "ids", "num_ids", "buckets", "vocabulary", "min_count")  # alike for all features of one


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
Fitted = dict[str, Any]  # JSON: numbers (feature -> figures), vocabularies (table -> hashes), split, samples


class Preprocessor:
    """Makes ids and dense features of columns, as `schema` names them.

    `paired` are sequences whose values belong together place by place, and which so are as long as each other.
    BadFeature where features contradict each other.
    """

    def __init__(
        self,
        features: Mapping[str, FeatureSpec],
        fitted: Fitted | None = None,
        labels: Sequence[str] = (),
        paired: Sequence[str] = (),
    ) -> None:
        self.features, self.labels, self.paired = dict(features), tuple(labels), tuple(paired)
        self.fitted: Fitted = fitted or {}
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
        return cls(features, values["fitted"], values["labels"], values.get("paired", ()))

    def with_fitted(self, fitted: Fitted) -> Self:
        """The same features with what was learnt from training data."""
        return type(self)(self.features, fitted, self.labels, self.paired)

    def to_dict(self) -> dict[str, Any]:
        """The features and what was fitted, of types that JSON has."""
        features = {name: asdict(feature) for name, feature in self.features.items()}
        labels, paired = list(self.labels), list(self.paired)
        return {"features": features, "fitted": self.fitted, "labels": labels, "paired": paired}

    def __call__(self, columns: Columns | Mapping[str, Sequence[object]]) -> tuple[Ids, Floats | None]:
        """Ids (N, C) int64 and dense features (N, D) float32 or None of columns by name, as arrays of Arrow or lists.

        BadValue for a value that its feature cannot have; KeyError for a column that is missing.
        """
        arrays = {name: _array(columns[name]) for name in self.columns}
        rows, *others = {len(array) for array in arrays.values()}
        if others:
            shown = ", ".join(f"{name} {len(array)}" for name, array in arrays.items())
            raise ValueError(f"columns of different lengths: {shown}")
        schema = self.schema
        ids = np.empty((rows, schema.num_id_columns), np.int64)
        floats = np.empty((rows, schema.num_dense_columns), np.float32)
        for place, name in enumerate(name for name, feature in self.features.items() if feature.is_dense):
            floats[:, place] = self._number(name, self.features[name], arrays)
        first: _Values | None = None  # of the paired ones
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
        for name, feature in self.features.items():
            own = feature.of if feature.kind == "cross" else (feature.column or name,)
            for column in (*own, *([feature.weights] if feature.weights else [])):
                read.setdefault(column, name)
        return read

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
        return Schema(names, num_dense, None, tuple(fields), tables, self.labels or ("label",))

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

    def _values(self, name: str, feature: FeatureSpec, arrays: Columns) -> _Values:
        """The values of a feature, one for each sample or any number."""
        column = feature.column or name
        if feature.kind == "cross":
            return _Values(pc.binary_join_element_wise(*(texts_of(c, arrays[c]) for c in feature.of), CROSSED), name)
        array = arrays[column]
        if feature.kind == "number":
            return _Values(array, column)
        if not feature.is_many:
            if is_list(array.type):
                raise BadFeature(name, f"column {column!r} is a list ({array.type}): {_declare(name)}")
            return _Values(array, column)
        if pa.types.is_null(array.type):  # no row has any
            array = array.cast(pa.list_(pa.string()))
        if not is_list(array.type):
            if feature.separator is None:
                raise BadFeature(name, f"column {column!r} is {array.type}, no list: give it a separator")
            texts = pc.if_else(pc.equal(array := texts_of(column, array), ""), None, array)
            array = pc.split_pattern(texts, feature.separator)
        array = array.cast(pa.large_list(array.type.value_type))
        lengths = np.asarray(pc.fill_null(pc.list_value_length(array), 0), np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        long = np.flatnonzero(lengths > feature.width)
        if len(long) and feature.too_long == "error":
            kept = "last" if feature.kind == "sequence" else "first"
            reason = f"{lengths[long[0]]} values, and max_length is {feature.width}"
            reason += f"; raise it, or have too_long: truncate keep the {kept} ones"
            raise BadValue(int(long[0]), column, reason)
        return _Values(pc.list_flatten(array), column, starts, keep_last=feature.kind == "sequence")

    def _encoded(self, name: str, feature: FeatureSpec, values: _Values) -> Ids:
        """The id of each value."""
        table = feature.table or name
        given = self._tables[table]
        if given["bucketised"]:
            ids = self._buckets(name, feature, values)
        elif given["ids"] == "exact":
            ids = _exact(values, given["num_ids"] or NUM_HASHED_IDS)
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

    @cached_property
    def _vocabularies(self) -> dict[str, tuple[Ids, Ids]]:
        return {}

    def _weights_of(self, name: str, feature: FeatureSpec, arrays: Columns, values: _Values) -> Floats:
        """The weight of each of a list's values."""
        if feature.weight_separator is not None:
            return values.weights(feature.weight_separator)
        assert feature.weights is not None
        own = self._values(name, FeatureSpec(**{**asdict(feature), "column": feature.weights}), arrays)
        own.check_lengths(values, "weights")
        return np.nan_to_num(numbers_of(feature.weights, own.flat, own.row))

    # --- numbers

    def _number(self, name: str, feature: FeatureSpec, arrays: Columns) -> Floats:
        """(N,) numbers as the transforms make them, `missing` where there is none."""
        column = feature.column or name
        x = numbers_of(column, arrays[column])
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

    def _buckets(self, name: str, feature: FeatureSpec, values: _Values) -> Ids:
        """(N,) 0 for a missing number, else 1 + the number of boundaries at or below it."""
        x = numbers_of(values.column, values.flat, values.row)
        if isinstance(feature.bucketise, int):
            knots = np.asarray(self.fitted.get("numbers", {}).get(name, {})["quantiles"])
            at = np.linspace(0, 1, feature.bucketise + 1)[1:-1]
            boundaries = np.quantile(knots, at)
        else:
            boundaries = np.asarray(feature.bucketise, np.float64)
        return np.where(np.isnan(x), 0, 1 + np.searchsorted(boundaries, x, side="right")).astype(np.int64)


class Fitting:
    """Learns from the columns of the training data what a preprocessor needs."""

    def __init__(self, preprocessor: Preprocessor, seed: int = 0) -> None:
        self._preprocessor = preprocessor
        self._random = np.random.default_rng(seed)
        self._numbers: dict[str, _Figures] = {}
        self._counts: dict[str, tuple[Ids, Ids]] = {}  # table -> hashes, ascending, and how often each was there
        for name, feature in preprocessor.features.items():
            if set(feature.transform) - {"log"} or isinstance(feature.bucketise, int):
                self._numbers[name] = _Figures()

    def observe(self, columns: Columns) -> None:
        """Take in a block of rows. BadValue for a value that its feature cannot have."""
        own = self._preprocessor
        arrays = {name: _array(columns[name]) for name in own.columns}
        for name, figures in self._numbers.items():
            feature = own.features[name]
            column = feature.column or name
            x = numbers_of(column, arrays[column])
            if feature.transform[:1] == ("log",):
                x = np.log1p(np.maximum(x, 0))
            figures.observe(x[~np.isnan(x)], self._random)
        for name, feature in own.features.items():
            table = feature.table or name
            if not feature.is_dense and own._tables[table]["min_count"] is not None:
                values = own._values(name, feature, arrays)
                found, counts = np.unique(values.hashes(table, feature.weight_separator), return_counts=True)
                self._counts[table] = _added(self._counts.get(table), found, counts)

    def fitted(self) -> Fitted:
        """Return the figures of numbers and the vocabularies of tables, learnt from the training rows, as JSON."""
        numbers = {name: figures.to_dict() for name, figures in self._numbers.items()}
        vocabularies = {}
        for table, (hashes, counts) in self._counts.items():
            keep = counts >= self._preprocessor._tables[table]["min_count"]
            hashes, counts = hashes[keep], counts[keep]
            vocabularies[table] = hashes[np.lexsort((hashes, -counts))].tolist()
        return {"numbers": numbers, "vocabularies": vocabularies}


class _Figures:
    """Count, mean, spread, range and a sample of a number's values, block by block (Chan et al. 1983)."""

    def __init__(self) -> None:
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
        quantiles = np.quantile(self._sample, np.linspace(0, 1, _QUANTILES)).tolist()
        std = (self._squares / self._count) ** 0.5
        return {"mean": self._mean, "std": std, "min": self._low, "max": self._high, "quantiles": quantiles}


def _added(known: tuple[Ids, Ids] | None, found: Ids, counts: Ids) -> tuple[Ids, Ids]:
    if known is None:
        return found, counts
    keys, inverse = np.unique(np.concatenate([known[0], found]), return_inverse=True)
    return keys, np.bincount(inverse, np.concatenate([known[1], counts])).astype(np.int64)


@dataclass(frozen=True, eq=False)
class _Values:
    """Values of a column: one for each sample, or in `starts` where each sample's begin."""

    flat: pa.Array
    column: str
    starts: Ids | None = None  # (N + 1,)
    keep_last: bool = False

    def row(self, place: int) -> int:
        """The sample of a value."""
        return place if self.starts is None else int(np.searchsorted(self.starts, place, side="right")) - 1

    def check_lengths(self, other: _Values, what: str = "values") -> None:
        """BadValue where a sample has not as many values as of another column."""
        assert self.starts is not None
        assert other.starts is not None
        own, others = np.diff(self.starts), np.diff(other.starts)
        differ = np.flatnonzero(own != others)
        if len(differ):
            reason = f"{own[differ[0]]} {what} for {others[differ[0]]} values of {other.column!r}"
            raise BadValue(int(differ[0]), self.column, reason)

    def hashes(self, table: str, weight_separator: str | None) -> Ids:
        """The hash of each value."""
        return hashes_of(table, self.column, self.flat, self.row, weight_separator)

    def weights(self, separator: str) -> Floats:
        """The weight that each value ends with, 1 where it has none."""
        parts = pc.split_pattern(texts_of(self.column, self.flat), separator, max_splits=1, reverse=True)
        has = pc.equal(pc.list_value_length(parts), 2)
        given = pc.if_else(has, _last(parts), "1")
        return numbers_of(self.column, given, self.row)

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


def _last(parts: pa.Array) -> pa.Array:
    """The last element of each list, none of which is empty."""
    ends = np.asarray(parts.offsets)[1:] - 1
    return parts.values.take(pa.array(ends))


def _array(values: object) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        return values.combine_chunks() if values.num_chunks != 1 else values.chunk(0)
    return values if isinstance(values, pa.Array) else pa.array(values)


def is_list(kind: pa.DataType) -> bool:
    """Whether values of a type are lists."""
    return bool(pa.types.is_list(kind)) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def texts_of(column: str, array: pa.Array, row: Callable[[int], int] = int) -> pa.Array:
    """Values as texts, an integer as its decimal text and a missing one as the empty text."""
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    kind = array.type
    if pa.types.is_floating(kind):
        reason = f"has {kind} values, and a category is a text or an integer: declare it as type: number"
        raise BadFeature(column, f"{reason}, or save integers (of pandas Int64, which may be missing)")
    if pa.types.is_temporal(kind) and not pa.types.is_date(kind):
        reason = f"is {kind}, and a time would be another category in each unit and zone"
        raise BadFeature(column, f"{reason}: save a date, a text or an integer (the hour, say)")
    try:
        texts = array if pa.types.is_string(array.type) else array.cast(pa.string())
        texts = pc.fill_null(texts, "") if texts.null_count else texts
    except pa.ArrowException:
        raise BadFeature(column, f"is {kind}, and a category is a text or an integer: {_as_category(kind)}") from None
    data = texts.buffers()[2]
    if data is not None and (np.frombuffer(data, np.uint8) == 10).any():
        broken = np.flatnonzero(np.asarray(pc.match_substring(texts, "\n")))
        if len(broken):
            value = texts[int(broken[0])].as_py()[:40]
            raise BadValue(row(int(broken[0])), column, f"{value!r} has a line break, which no category may have")
    return texts


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
            return hashes_of(table, column, array.cast(array.type.value_type), row, weight_separator)
        return ids_of_indices(table, own, array.indices)
    if pa.types.is_integer(array.type):
        return hash_column(table, array)
    texts = texts_of(column, array, row)
    if weight_separator is not None:
        texts = pc.list_element(pc.split_pattern(texts, weight_separator, max_splits=1, reverse=True), 0)
    return hash_texts(table, texts)


def _exact(values: _Values, limit: int) -> Ids:
    """Ids that are numbers already."""
    bound = f"num_ids {limit}" if limit != NUM_HASHED_IDS else "2**62; leave ids: exact out to hash any value"
    try:
        array = values.flat.cast(pa.int64())
    except pa.ArrowException:
        texts = texts_of(values.column, values.flat)
        wrong = np.flatnonzero(~np.asarray(pc.match_substring_regex(texts, r"^[0-9]{1,18}$")))
        place = int(wrong[0]) if len(wrong) else 0
        text = texts[place].as_py()
        reason = f"id {text} is not in 0 to below {bound}" if text.isdecimal() else f"{text[:40]!r} is no integer id"
        raise BadValue(values.row(place), values.column, reason) from None
    ids: Ids = pc.fill_null(array, -1).to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero((ids < 0) | (ids >= limit))
    if len(wrong):
        place = int(wrong[0])
        raise BadValue(values.row(place), values.column, f"id {array[place]} is not in 0 to below {bound}")
    return ids


def numbers_of(column: str, array: pa.Array, row: Callable[[int], int] = int) -> Floats:
    """(N,) float64, NaN where missing. BadValue for a text that is no number, and for one without bounds."""
    array = _array(array)
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if is_list(array.type):
        raise BadFeature(column, f"is a list ({array.type}), no number")
    try:
        if pa.types.is_temporal(array.type):
            array = array.cast(pa.timestamp("us"), safe=False).cast(pa.int64()).cast(pa.float64(), safe=False)
        if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
            array = pc.utf8_trim_whitespace(array)  # as in CSV
            array = pc.if_else(pc.equal(array, ""), None, array)
        x: Floats = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    except pa.ArrowException:
        for place, value in enumerate(array.to_pylist()):
            if value is not None and not _is_number(value):
                raise BadValue(row(place), column, f"{str(value)[:40]!r} is not a number") from None
        raise BadFeature(column, f"is {array.type}, no number") from None
    infinite = np.flatnonzero(np.abs(x) > np.finfo(np.float32).max)  # what a model computes with
    if len(infinite):
        reason = f"{x[infinite[0]]} is not a finite number; write a missing value in its place"
        raise BadValue(row(int(infinite[0])), column, reason)
    return x


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


def _is_number(value: object) -> bool:
    try:
        pa.scalar(str(value)).cast(pa.float64())
    except pa.ArrowException:
        return False
    return True


def _declare(name: str) -> str:
    return f"declare it, {name}: {{type: list}}, or as a sequence, {name}: {{type: sequence, max_length: 50}}"


def check_undeclared(name: str, feature: FeatureSpec, array: pa.Array | pa.ChunkedArray) -> None:
    """BadFeature where the first values of a feature without a type are several in one, as in a|b|c.

    And where those of a list with a separator are in brackets, which would be parts of its values.
    """
    array = _array(array)
    if feature.separator is not None and (shown := looks_separated(array, _BRACKETS)):
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


_BRACKETS = r"^\[.*\]$"


def looks_separated(array: pa.Array | pa.ChunkedArray, pattern: str = rf"\||{_BRACKETS}") -> str:
    """A value of texts that are lists, as a|b or [a, b], if a tenth of them or more are; else the empty text."""
    array = _array(array)
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if not (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)) or not len(array):
        return ""
    parted = array.filter(pc.fill_null(pc.match_substring_regex(array, pattern), False))
    return str(parted[0].as_py())[:60] if len(parted) * 10 >= len(array) else ""


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
