"""Which column of a table of clicks is what, and the samples that its values make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from embershard.proto.errors import JobError
from embershard.worker.data.batch import Samples, Schema
from embershard.worker.data.inputs.rows import CategoricalInput, NumericInput, RowInputs
from embershard.worker.data.text import Kind, Layout, column
from embershard.worker.data.values import looks_separated


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which column is what; columns named nowhere are categorical, except when `categorical` is given.

    ids: "global" reads categorical columns as integers that are unique across features already; "hashed" takes any
    text and gives a 62-bit hash of (column, text), missing values included.
    A missing number becomes 0 after the transform; log=True takes x -> log(1 + x), with x < 0 as 0.
    """

    label: str = "label"
    categorical: tuple[str, ...] = ()
    numeric: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    ids: Literal["global", "hashed"] = "hashed"
    log: bool = False

    def __post_init__(self) -> None:
        if self.ids not in ("global", "hashed"):
            raise ValueError(f"Columns: ids must be 'global' or 'hashed', got {self.ids!r}")
        named = (self.label, *self.categorical, *self.numeric, *self.skip)
        for name in named:
            if named.count(name) > 1:
                raise ValueError(f"Columns: {name!r} is named twice")

    def layout(self, where: str, names: tuple[str, ...], *, delimiter: str = ",", num_ids: int | None = None) -> Layout:
        """The layout of a file with these columns. JobError where one that is named here is not among them."""
        for name in (self.label, *self.categorical, *self.numeric, *self.skip):
            if name not in names:
                raise JobError(where=where, reason=f"no column {name!r} (there are: {', '.join(names)})")
        kinds = {name: self._kind(name) for name in names}
        layout = Layout(columns=kinds, delimiter=delimiter, num_ids=num_ids if self.ids == "global" else None)
        if not layout.names("id", "text"):
            raise JobError(where=where, reason="no categorical column is left: nothing to embed")
        return layout

    def _kind(self, name: str) -> Kind:
        if name == self.label:
            return "label"
        if name in self.numeric:
            return "number"
        if name in self.skip or (self.categorical and name not in self.categorical):
            return "skip"
        return "id" if self.ids == "global" else "text"

    def check_undeclared(self, where: str, table: pa.Table, layout: Layout) -> None:
        """JobError where the first rows of a column that is named nowhere have several values in one, as in a|b|c."""
        for name in layout.names("text"):
            if name not in self.categorical and (value := looks_separated(table.column(name))):
                reason = (
                    f"values of column {name!r} look like several in one, as {value!r}: use data.reader tabular, with"
                )
                declare = f"features: {name}: {{type: list, separator: '|'}}"
                raise JobError(
                    where=where, reason=f"{reason} {declare}; or name it in data.categorical, or in data.skip"
                )

    def schema(self, layout: Layout, num_ids: int | None) -> Schema:
        """The schema of samples with this layout; hashed ids have no `num_ids`."""
        known = num_ids if self.ids == "global" else None
        return Schema(layout.names("id", "text"), len(layout.names("number")), known)

    def inputs(self, layout: Layout, num_ids: int | None) -> RowInputs:
        """Describe how `rows` makes ids and dense features of these columns, so that a served model does the same."""
        read = layout.names("id", "text", "number")
        return RowInputs(
            categorical=tuple(
                CategoricalInput(name=name, ids=self.ids, num_ids=num_ids if self.ids == "global" else None)
                for name in layout.names("id", "text")
            ),
            numeric=tuple(NumericInput(name=name, log=self.log) for name in layout.names("number")),
            ignored=tuple(name for name in layout.columns if name not in read),
        )

    def rows(self, table: pa.Table, layout: Layout) -> Samples:
        """Samples of a parsed table."""
        from embershard.worker.data.hashing import hash_column  # here: its kernels need numba, and parsing does not

        features, numeric = layout.names("id", "text"), layout.names("number")
        ids = np.empty((table.num_rows, len(features)), np.int64)
        for i, name in enumerate(features):
            ids[:, i] = column(table, name) if self.ids == "global" else hash_column(name, table.column(name))
        dense = np.empty((table.num_rows, len(numeric)), np.float32) if numeric else None
        for i, name in enumerate(numeric):
            assert dense is not None
            dense[:, i] = numbers(table.column(name), log=self.log)
        return Samples(ids, dense, column(table, self.label).astype(np.float32))


def numbers(values: pa.ChunkedArray, *, log: bool) -> npt.NDArray[np.float32]:
    """(N,) numbers, log(1 + max(x, 0)) of them if asked for, and 0 where missing."""
    array: npt.NDArray[np.float32] = pc.fill_null(values, 0.0).combine_chunks().to_numpy(zero_copy_only=False)
    return np.log1p(np.maximum(array, 0)) if log else array
