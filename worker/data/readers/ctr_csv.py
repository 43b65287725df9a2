"""Click data as CSV with a header line: one label, categorical and numeric columns (Frappe and its like)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from embershard.proto.errors import JobError
from embershard.worker.data.batch import RowsDataset, Samples
from embershard.worker.data.columns import Columns
from embershard.worker.data.stream import SHUFFLE_ROWS, StreamDataset
from embershard.worker.data.text import Layout, TextSource, line_of, read_header


class CtrCsv(RowsDataset):
    """CSV files in memory: `files` maps "train" and evaluation splits to paths, plain or gzipped.

    Columns are found by the names in each file's header line.

    halve_valid_by=column splits the file of "valid" in two by a hash of that column's value, so that no user (say)
    is in both: "valid" is then one half, to stop early on, and "test" the other, to report on. `num_ids` bounds global
    ids; without it, it is one above the largest.
    """

    def __init__(
        self,
        files: Mapping[str, Path],
        columns: Columns | None = None,
        *,
        delimiter: str = ",",
        num_ids: int | None = None,
        halve_valid_by: str | None = None,
        seed: int = 0,
    ) -> None:
        columns = columns or Columns()
        layout, sources = _sources(files, columns, delimiter, num_ids)
        where = sources["train"].where
        splits = {name: source.load() for name, source in sources.items()}
        if halve_valid_by is not None:
            _halve(splits, layout.names("id", "text"), halve_valid_by, where)
        if num_ids is None:  # over every split: an id that only evaluation has must still be a valid index
            num_ids = 1 + max(int(part.ids.max(initial=-1)) for part in splits.values())
        self.inputs = columns.inputs(layout, num_ids)
        super().__init__(columns.schema(layout, num_ids), splits, where=where, seed=seed)


class CtrCsvStream(StreamDataset):
    """CSV files larger than memory, with hashed ids, or global ids below `num_ids`."""

    def __init__(
        self,
        files: Mapping[str, Path],
        columns: Columns | None = None,
        *,
        delimiter: str = ",",
        num_ids: int | None = None,
        seed: int = 0,
        shuffle_rows: int = SHUFFLE_ROWS,
    ) -> None:
        columns = columns or Columns()
        if columns.ids == "global" and num_ids is None:
            raise ValueError("global ids need num_ids where the files are not read in advance")
        layout, sources = _sources(files, columns, delimiter, num_ids)
        self.inputs = columns.inputs(layout, num_ids)
        super().__init__(columns.schema(layout, num_ids), sources, seed=seed, shuffle_rows=shuffle_rows)


def look(files: Mapping[str, Path], columns: Columns, *, delimiter: str = ",", num_ids: int | None = None) -> None:
    """Parse the first lines of every file, without torch. JobError names file:line of what is wrong."""
    for source in _sources(files, columns, delimiter, num_ids)[1].values():
        for path, block, table in source.looks():
            columns.check_undeclared(f"{path}:{line_of(block, 0)}", table, source.layout)


def _sources(
    files: Mapping[str, Path], columns: Columns, delimiter: str, num_ids: int | None
) -> tuple[Layout, dict[str, TextSource]]:
    if "train" not in files:
        raise JobError(where=str(next(iter(files.values()), "files")), reason="no train file is named")
    header = read_header(files["train"], delimiter)
    layout = columns.layout(f"{files['train']}:1", header, delimiter=delimiter, num_ids=num_ids)
    return layout, {
        name: TextSource(
            paths=[path],
            layout=_layout_of(path, layout),
            to_rows=partial(_samples, columns, layout),
            has_header=True,
        )
        for name, path in files.items()
    }


def _layout_of(path: Path, train: Layout) -> Layout:
    """The layout of a file whose columns are those of the train file by name; others are skipped."""
    own = read_header(path, train.delimiter)
    for name, kind in train.columns.items():
        if kind != "skip" and name not in own:
            reason = f"no column {name!r}, which is read of the train file (there are: {', '.join(own)})"
            raise JobError(where=f"{path}:1", reason=reason)
    return replace(train, columns={name: train.columns.get(name, "skip") for name in own})


def _samples(columns: Columns, layout: Layout, table: pa.Table, own: Layout) -> Samples:
    """Samples with the train file's order of features, whatever that of the columns of their file is."""
    return columns.rows(table, layout)


def _halve(splits: dict[str, Samples], features: tuple[str, ...], by: str, where: str) -> None:
    if "valid" not in splits or "test" in splits:
        raise JobError(where=where, reason="halve_valid_by needs a valid file and no test file")
    if by not in features:
        raise JobError(where=where, reason=f"halve_valid_by: no categorical column {by!r} ({', '.join(features)})")
    from embershard.worker.data.hashing import hash_numbers

    rows = splits["valid"]
    second = hash_numbers("halve_valid_by", rows.ids[:, features.index(by)]) & 1 == 1
    splits["valid"], splits["test"] = rows.take(~second), rows.take(second)
