"""Parquet files of clicks, streamed by row group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from embershard.proto.errors import JobError
from embershard.worker.data.batch import Samples
from embershard.worker.data.columns import Columns
from embershard.worker.data.files import File, expand, fingerprint, is_url, open_binary, reading
from embershard.worker.data.inputs.feature_ids import is_category
from embershard.worker.data.shuffle import too_many_workers
from embershard.worker.data.stream import SHUFFLE_ROWS, StreamDataset
from embershard.worker.data.text import TYPES, Layout, plausible
from embershard.worker.data.values import BadValue, as_array, decoded, is_list, without_views

LOOK_ROWS = 1 << 10  # of each file, before anything is trained
READ_ROWS = 1 << 16  # rows decoded at once: a row group may be larger than memory
READ_BYTES = 1 << 30  # and their bytes: fewer rows where they are longer than 16 kB
_DELTA = {"DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"}  # of texts, which Arrow does not read as dictionaries


class ParquetData(StreamDataset):
    """Parquet files, or folders of them, by split; a worker's share is whole row groups.

    Columns are as in CSV files: an integer hashes as its decimal text, so the same value has the same id in both
    formats. Global ids need `num_ids`, and each of them is checked against it.
    """

    def __init__(
        self,
        files: Mapping[str, Sequence[Path]],
        columns: Columns | None = None,
        *,
        num_ids: int | None = None,
        seed: int = 0,
        shuffle_rows: int = SHUFFLE_ROWS,
    ) -> None:
        columns = columns or Columns()
        if columns.ids == "global" and num_ids is None:
            raise ValueError("global ids need num_ids where the files are not read in advance")
        layout, sources = _sources(files, columns, num_ids)
        self.inputs = columns.inputs(layout, num_ids)
        super().__init__(columns.schema(layout, num_ids), sources, seed=seed, shuffle_rows=shuffle_rows)


def look(files: Mapping[str, Sequence[Path]], columns: Columns, *, num_ids: int | None = None) -> None:
    """Read the first rows of every file, without torch. JobError names the file of what is wrong."""
    for source in _sources(files, columns, num_ids)[1].values():
        source.look()


def _sources(
    files: Mapping[str, Sequence[Path]], columns: Columns, num_ids: int | None
) -> tuple[Layout, dict[str, ParquetSource]]:
    if not files.get("train"):
        raise JobError(where="files", reason="no train file is named")
    paths = {split: [p for path in given for p in expand(path, (".parquet",))] for split, given in files.items()}
    first = paths["train"][0]
    layout = columns.layout(str(first), tuple(open_parquet(first).schema_arrow.names), num_ids=num_ids)
    return layout, {split: ParquetSource(paths=p, layout=layout, columns=columns) for split, p in paths.items()}


@dataclass(frozen=True, kw_only=True)
class ParquetSource:
    """The Parquet files of one split."""

    paths: Sequence[File]
    layout: Layout
    columns: Columns

    @property
    def where(self) -> str:
        """The first file, for errors that name none."""
        return str(self.paths[0])

    def check(self) -> None:
        """Read every file's footer, and compare its columns."""
        self.num_rows()

    def look(self) -> None:
        """Read the first rows of every file. JobError where they are none of this layout."""
        self.check()
        for path, group in self._first_groups():
            where = f"{path}: row group {group}"
            for part in self._parts(path, group, LOOK_ROWS):
                self.columns.check_undeclared(where, self._typed(where, part), self.layout)
                break

    def num_rows(self) -> int | None:
        """The number of rows, from the files' footers."""
        return sum(rows for _, _, rows in self._groups)

    def fingerprint(self) -> dict[str, object]:
        """Return what changes when a file is edited, added or moved: the number of rows and, of local files, hashes."""
        return {"rows": sum(rows for _, _, rows in self._groups), **fingerprint(self.paths)}

    def blocks(self, rank: int, world_size: int, shuffle: np.random.Generator | None) -> Iterator[Samples]:
        """This worker's row groups, the largest shared out first so that shares are even."""
        groups = self._groups
        if shuffle is not None:
            if len(groups) < world_size:
                raise too_many_workers(self.where, len(groups), world_size, "row groups")
            groups = [groups[i] for i in shuffle.permutation(len(groups))]
        rows = [0] * world_size
        owner = {}
        for group in sorted(groups, key=lambda group: -group[2]):
            least = rows.index(min(rows))
            rows[least] += group[2]
            owner[group[:2]] = least
        for path, number, _ in groups:
            if owner[path, number] == rank:
                yield from self._read(path, number)

    @cached_property
    def _groups(self) -> list[tuple[File, int, int]]:
        """(path, row group, rows) of every row group that has rows."""
        groups = []
        for path in self.paths:
            file = open_parquet(path)
            for name in self._names:
                if file.schema_arrow.names.count(name) > 1:
                    raise JobError(where=str(path), reason=f"column {name!r} occurs twice: give one another name")
            self._check_columns(path, file.schema_arrow)
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
            groups += [(path, i, size) for i, size in enumerate(sizes) if size]
        if not groups:
            raise JobError(where=self.where, reason="no rows in the file")
        return groups

    def _first_groups(self) -> list[tuple[File, int]]:
        """The first row group with rows of each file that has one."""
        return list({path: number for path, number, _ in reversed(self._groups)}.items())[::-1]

    @cached_property
    def _sizes(self) -> dict[tuple[File, int], int]:
        return {(path, group): rows for path, group, rows in self._groups}

    @property
    def _names(self) -> list[str]:
        return [name for name, kind in self.layout.columns.items() if kind != "skip"]

    def _check_columns(self, path: File, schema: pa.Schema) -> None:
        for name in self._names:
            if name not in schema.names:
                reason = f"no column {name!r}, which the first train file has (there are: {', '.join(schema.names)})"
                raise JobError(where=str(path), reason=reason)
        self._typed(str(path), schema.empty_table().select(self._names))

    def _read(self, path: File, group: int) -> Iterator[Samples]:
        for table in self._parts(path, group, READ_ROWS):
            yield self.columns.rows(self._typed(f"{path}: row group {group}", table), self.layout)

    def _parts(self, path: File, group: int, rows: int) -> Iterator[pa.Table]:
        file = open_parquet(path, self._footer.get(path))
        self._footer.clear()
        self._footer[path] = file.metadata
        texts = self._text_leaves(file, group)
        if texts:
            file = open_parquet(path, file.metadata, list(texts))
        try:
            with reading(path):
                group_bytes = file.metadata.row_group(group).total_byte_size  # not compressed, of all columns
                rows = max(1, min(rows, READ_BYTES * self._sizes[path, group] // max(1, group_bytes)))
                parts = file.iter_batches(rows, row_groups=[group], columns=self._names, use_threads=False)
                found, names = 0, set(self._names)  # for a column user.id Arrow reads field id of user, too
                for number, part in enumerate(parts):
                    found += part.num_rows
                    for values in part.columns:
                        _check_indices(values)
                    if number == 0 or part.num_rows == rows:  # a short last part has whole dictionaries all the same
                        self._as_text.update(name for name in texts.values() if not _repeats(part.column(name)))
                    own = [field for field in part.schema if field.name in names]
                    table = pa.Table.from_batches([part]).select([field.name for field in own])
                    types = [(field.name, without_views(field.type)) for field in own]
                    yield table.cast(pa.schema(types)) if types != [(f.name, f.type) for f in own] else table
                if found != self._sizes[path, group]:  # Arrow says nothing of a column that has fewer values
                    raise pa.ArrowInvalid(f"it has {found} rows, and by its footer {self._sizes[path, group]}")
        except (pa.ArrowException, OSError) as error:
            where = f"{path}: row group {group}"
            raise JobError(where=where, reason=f"cannot be read ({error}); get the file again") from None

    def _text_leaves(self, file: pq.ParquetFile, group: int) -> dict[str, str]:
        """Paths of texts to read as dictionaries, whose values are then hashed once each, and their columns."""
        chunks = file.metadata.row_group(group)
        schema, leaves = file.schema_arrow, {}
        for place in range(len(file.schema)):
            path = file.schema.column(place).path  # of a list's values: history.list.element, or as other writers say
            name = path if path in self.layout.columns else path.partition(".")[0]
            if self.layout.columns.get(name) == "text" and name not in self._as_text:
                kind = schema.field(name).type
                is_delta = not _DELTA.isdisjoint(chunks.column(place).encodings)
                if _is_text(kind.value_type if is_list(kind) else kind) and not is_delta:
                    leaves[path] = name
        return leaves

    @cached_property
    def _footer(self) -> dict[File, pq.FileMetaData]:
        """Footer of the file read last: it is as long as a file has row groups, and each of them is opened anew."""
        return {}

    @cached_property
    def _as_text(self) -> set[str]:
        """Columns whose values hardly occur twice in a part, so that a dictionary of them costs more than it saves."""
        return set()

    def _typed(self, where: str, table: pa.Table) -> pa.Table:
        """The columns with the types of the layout. JobError where one has no such values."""
        typed = {}
        for name in table.column_names:
            kind, values = self.layout.columns[name], table.column(name)
            of = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
            if kind == "text" and is_list(of):
                declare = f"use data.reader tabular, with features: {name}: {{type: list}}, or name it in data.skip"
                raise JobError(where=where, reason=f"column {name!r} is a list ({of}): {declare}")
            if kind == "text" and not is_category(of):
                raise JobError(where=where, reason=f"column {name!r} has {of} values: not categorical")
            if kind == "text" and (pa.types.is_integer(of) or _is_text(of)):
                typed[name] = values  # as it is: a dictionary's values are hashed once, integers without their texts
                continue
            try:
                values = decoded(name, as_array(values))
                # a number may be rounded, as one in a CSV file is
                values = values.cast(TYPES[kind], safe=kind != "number" or not pa.types.is_integer(values.type))
            except pa.ArrowException as error:
                raise JobError(where=where, reason=f"column {name!r} is no {kind}: {error}") from None
            except BadValue as error:
                raise JobError(where=where, reason=str(error)) from None
            if kind == "number":  # NaN is how data frames write a missing number
                values = pc.if_else(pc.is_nan(values), None, values)
            typed[name] = values
        checked = pa.table(typed)
        problem = plausible(checked, self.layout)
        if problem:
            raise JobError(where=where, reason=problem)
        return checked


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind)) or pa.types.is_large_string(kind)


def _check_indices(values: pa.Array) -> None:
    """ArrowInvalid where a dictionary has not the value of an index, of which Arrow says nothing."""
    flat = values.values if is_list(values.type) else values
    if pa.types.is_dictionary(flat.type):
        low, high = (index.as_py() for index in pc.min_max(flat.indices).values())
        if low is not None and not 0 <= low <= high < len(flat.dictionary):
            raise pa.ArrowInvalid(f"a dictionary of {len(flat.dictionary)} values has an index from {low} to {high}")


def _repeats(values: pa.Array) -> bool:
    """Whether a dictionary, or that of lists' values, has at most half as many values as there are cells."""
    flat = values.values if is_list(values.type) else values
    return not pa.types.is_dictionary(flat.type) or 2 * len(flat.dictionary) <= len(flat)


def open_parquet(
    path: File, metadata: pq.FileMetaData | None = None, dictionaries: Sequence[str] = ()
) -> pq.ParquetFile:
    """A Parquet file, here or at a URL, whose texts at these paths are read as dictionaries.

    JobError where it is none, or is not whole.
    """
    try:
        with reading(path):
            source = open_binary(path) if is_url(path) else path
            return pq.ParquetFile(source, metadata=metadata, read_dictionary=list(dictionaries))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last of a column's name
        raise JobError(where=str(path), reason=f"not a whole Parquet file ({error})") from None
