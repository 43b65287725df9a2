"""Rows of a request for a served model: `RowInputs`, or the features of a job, by the code that training uses."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Set
from typing import Any, Protocol

import numpy as np

from embershard.proto.arrays import Floats, Ids
from embershard.proto.errors import BadRows
from embershard.worker.data.batch import Dataset
from embershard.worker.data.inputs.feature_ids import spelled
from embershard.worker.data.inputs.rows import (
    RowInputs,
    check_columns,
    check_lengths,
    columns_by_name,
    no_single_value,
    shown,
)
from embershard.worker.job.job import Job
from embershard.worker.job.readers.tabular import TabularSection


class Inputs(Protocol):
    """Makes ids and dense features of columns."""

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that rows must have."""

    def __call__(self, rows: object) -> tuple[Ids, Floats | None]:
        """Ids (N, C) and dense features (N, D), or None; BadRows."""


class FeatureInputs:
    """The columns of a job with features, made into ids and dense features by its preprocessor; needs pyarrow."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        from embershard.worker.data.preprocess import Preprocessor, preprocessed_columns

        self._preprocessor = Preprocessor.from_dict(data)
        self._ignored = (*self._preprocessor.labels, *data["ignored"])
        self.names = tuple(self._preprocessor.columns)
        self.features = frozenset(self._preprocessor.features)
        many = [(name, feature) for name, feature in self._preprocessor.features.items() if feature.is_many]
        self._lists = {column for name, one in many for column in (one.column or name, one.weights)}
        self._numbers = {column for column, kind in preprocessed_columns(self._preprocessor) if kind == "number"}

    def __call__(self, rows: object) -> tuple[Ids, Floats | None]:
        """Ids (N, C) and dense features (N, D), or None. BadRows."""
        import pyarrow as pa

        from embershard.worker.data.values import BadFeature, BadValue

        given = columns_by_name(rows)
        check_columns(given, self.names, self._ignored)
        arrays = {}
        for name in self.names:
            column = given[name]
            if isinstance(column, str | bytes | Mapping | Set):  # Arrow would take its characters, or keys
                raise BadRows(feature=name, value=shown(column), reason=f"{shown(column)} is no list of values")
            arrays[name] = column if isinstance(column, pa.Array | pa.ChunkedArray) else self._array(name, column)
        for name, array in arrays.items():
            if name not in self._lists and pa.types.is_nested(array.type) and array.null_count < len(array):
                row = next(row for row, value in enumerate(array) if value.is_valid)
                raise no_single_value(name, row, array[row].as_py())
        check_lengths(arrays)
        try:
            return self._preprocessor(arrays)
        except BadValue as error:
            value = None
            with contextlib.suppress(UnicodeDecodeError):  # of an Arrow table with texts that are not UTF-8
                value = shown(arrays[error.column][error.row].as_py()) if error.column in arrays else None
            raise BadRows(feature=error.column, value=value, reason=f"row {error.row}: {error}") from None
        except BadFeature as error:
            raise self._bad_type(error.name, error.reason, arrays) from None

    def of_some(self, rows: object, features: Collection[str]) -> tuple[Ids, Floats | None]:
        """Ids and dense features of rows that have the columns of these features; what other ones have is missing.

        BadRows.
        """
        given, specs = columns_by_name(rows), self._preprocessor.features
        own = {column for name in features for column in self._preprocessor.columns_of(name)}
        exact = {one.column or name for name, one in specs.items() if one.ids == "exact" and not one.is_many}
        count = len(next((given[name] for name in given if name in own), ()))  # type: ignore[arg-type]
        others = [name for name in self.names if name not in given and name not in own]
        return self({**given, **{name: [0 if name in exact else None] * count for name in others}})

    def _bad_type(self, name: str, reason: str, arrays: Mapping[str, Any]) -> BadRows:
        """The error of a column, or that of a feature, whose values are of a type that it cannot have."""
        column = name if name in arrays else self._preprocessor.features[name].column or name
        for row, scalar in enumerate(arrays.get(column, ())):
            value = scalar.as_py()
            parts = value if isinstance(value, list) else [value]
            first = next((part for part in parts if part is not None and part == part), None)  # no NaN
            if first is None:
                continue
            if column in self._lists and not isinstance(value, list):
                reason = "is no list of values"
            elif isinstance(first, float):
                reason = f"{'has a value that ' * isinstance(value, list)}is neither a text nor an integer"
            return BadRows(feature=column, value=shown(value), reason=f"row {row}: {shown(value)} {reason}")
        return BadRows(feature=name, value=None, reason=reason)

    def _array(self, name: str, column: Any) -> Any:
        """A column as an array of Arrow: of texts, where its values are of several types. BadRows."""
        import pyarrow as pa

        with contextlib.suppress(pa.ArrowException, TypeError, ValueError, OverflowError):
            return pa.array(column.to_arrow() if hasattr(column, "to_arrow") else column)  # lists of polars are Series
        try:
            return pa.array([_text(name, row, value, name in self._numbers) for row, value in enumerate(column)])
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise BadRows(feature=name, value=shown(column), reason=f"{shown(column)}: {error}") from None


def _text(name: str, row: int, value: object, is_number: bool) -> object:
    """A value as the text that it is in a file, or a list of them; BadRows for one that has none."""
    if value is None:
        return None
    if isinstance(value, list | tuple | np.ndarray):
        return [_text(name, row, one, is_number) for one in value]
    reason = "is no number" if is_number else "is neither a text nor an integer"
    if is_number and isinstance(value, float):
        return repr(value)
    try:
        return spelled(value).decode()
    except TypeError:
        pass
    except UnicodeEncodeError:
        reason = "has characters that UTF-8 cannot spell"
    raise BadRows(feature=name, value=shown(value), reason=f"row {row}: {shown(value)} {reason}")


def inputs_of(job: Job, dataset: Dataset) -> dict[str, object] | None:
    """Describe for export.json how a job makes ids and dense features of columns; None where its reader cannot."""
    if isinstance(job.data, TabularSection):
        beside = [job.data.weight, job.data.split and job.data.split.column]  # which a row of the data has, too
        return {"kind": "features", **job.data.preprocessor().to_dict(), "ignored": [name for name in beside if name]}
    inputs = getattr(dataset, "inputs", None)
    return inputs.as_data() if isinstance(inputs, RowInputs) else None


def job_data(job: Job) -> dict[str, Any]:
    """A job as data for export.json, without what its features learnt, which `inputs_of` has."""
    told = job.model_dump(mode="json")
    if isinstance(job.data, TabularSection):
        told["data"]["fitted"] = None
        # as they were given: a field that has no meaning for a feature's type is refused
        given = {name: one.model_dump(mode="json", exclude_unset=True) for name, one in job.data.features.items()}
        told["data"]["features"] = given
    return told


def make_inputs(data: Mapping[str, Any]) -> Inputs:
    """The inputs that `inputs_of` described. ValueError, TypeError or KeyError where these are none."""
    return FeatureInputs(data) if data["kind"] == "features" else RowInputs.of(data)
