"""Click data as CSV with a header line: one label, categorical and numeric columns (Frappe and its like)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from embershard.proto.errors import JobError
from embershard.worker.data.batch import Schema
from embershard.worker.data.delimited import Kind, Layout, column, read_header, read_tables
from embershard.worker.data.feature_ids import hash_numbers, hash_texts
from embershard.worker.data.rows import Rows, RowsDataset


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

    def layout(self, path: Path, header: tuple[str, ...], delimiter: str) -> Layout:
        """The layout of a file with this header. JobError where a named column is not in it."""
        for name in (self.label, *self.categorical, *self.numeric):
            if name not in header:
                raise JobError(where=f"{path}:1", reason=f"no column {name!r} in the header: {', '.join(header)}")
        return Layout(columns={name: self._kind(name) for name in header}, delimiter=delimiter)

    def _kind(self, name: str) -> Kind:
        if name == self.label:
            return "label"
        if name in self.numeric:
            return "number"
        if name in self.skip or (self.categorical and name not in self.categorical):
            return "skip"
        return "id" if self.ids == "global" else "text"

    def rows(self, table: pa.Table, layout: Layout) -> Rows:
        """Samples of a parsed table."""
        features, numeric = layout.names("id", "text"), layout.names("number")
        ids = np.empty((table.num_rows, len(features)), np.int64)
        for i, name in enumerate(features):
            ids[:, i] = column(table, name) if self.ids == "global" else hash_texts(name, table.column(name))
        dense = np.empty((table.num_rows, len(numeric)), np.float32) if numeric else None
        for i, name in enumerate(numeric):
            assert dense is not None
            dense[:, i] = numbers(table.column(name), log=self.log)
        return Rows(ids, dense, column(table, self.label).astype(np.float32))


def numbers(values: pa.ChunkedArray, *, log: bool) -> npt.NDArray[np.float32]:
    """(N,) numbers, log(1 + max(x, 0)) of them if asked for, and 0 where missing."""
    array: npt.NDArray[np.float32] = pc.fill_null(values, 0.0).combine_chunks().to_numpy(zero_copy_only=False)
    return np.log1p(np.maximum(array, 0)) if log else array


class CtrCsv(RowsDataset):
    """CSV files in memory: `files` maps "train" and evaluation splits to paths, plain or gzipped.

    halve_valid_by=column splits the file of "valid" in two by a hash of that column's value, so that no user (say)
    is in both: "valid" is then one half, to stop early on, and "test" the other, to report on.
    """

    def __init__(
        self,
        files: Mapping[str, Path],
        columns: Columns | None = None,
        *,
        delimiter: str = ",",
        halve_valid_by: str | None = None,
        seed: int = 0,
    ) -> None:
        columns = columns or Columns()
        where = str(files.get("train", "files"))
        if "train" not in files:
            raise JobError(where=where, reason="no train file is named")
        header = read_header(files["train"], delimiter)
        layout = columns.layout(files["train"], header, delimiter)
        splits = {name: _read(path, header, layout, columns) for name, path in files.items()}
        features = layout.names("id", "text")
        if halve_valid_by is not None:
            _halve(splits, features, halve_valid_by, where)
        # over every split: an id that only evaluation has must still be a valid index
        top = max(int(part.ids.max(initial=-1)) for part in splits.values())
        num_ids = top + 1 if columns.ids == "global" else None
        schema = Schema(features, len(layout.names("number")), num_ids)
        super().__init__(schema, splits, where=where, seed=seed)


def _read(path: Path, header: tuple[str, ...], layout: Layout, columns: Columns) -> Rows:
    own = read_header(path, layout.delimiter)
    if own != header:
        raise JobError(where=f"{path}:1", reason=f"its columns differ from the train file's: {', '.join(own)}")
    return Rows.concat([columns.rows(table, layout) for table in read_tables(path, layout, skip_lines=1)])


def _halve(splits: dict[str, Rows], features: tuple[str, ...], by: str, where: str) -> None:
    if "valid" not in splits or "test" in splits:
        raise JobError(where=where, reason="halve_valid_by needs a valid file and no test file")
    if by not in features:
        raise JobError(where=where, reason=f"halve_valid_by: no categorical column {by!r} ({', '.join(features)})")
    rows = splits["valid"]
    second = hash_numbers("halve_valid_by", rows.ids[:, features.index(by)]) & 1 == 1
    splits["valid"], splits["test"] = rows.take(~second), rows.take(second)
