"""Files of tables in each format, as blocks of rows with the columns that somebody wants."""

from __future__ import annotations

import difflib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.json as pa_json

from embershard.proto.errors import JobError
from embershard.worker.data.batch import Samples
from embershard.worker.data.columns import Columns
from embershard.worker.data.files import BLOCK_BYTES, LOOK_BYTES, Block, File, expand, read_blocks
from embershard.worker.data.readers.parquet import LOOK_ROWS, READ_ROWS, ParquetSource
from embershard.worker.data.stream import BlockSource
from embershard.worker.data.text import BOM, Kind, Layout, TextSource, line_of, parse, read_header, recoded
from embershard.worker.data.values import BadFeature, BadValue

Format = Literal["parquet", "csv", "tsv", "jsonl"]
ENDINGS: dict[str, Format] = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}


def format_of(path: File) -> Format | None:
    """The format that a file's name tells, that of its compression aside; None where it tells none."""
    name = str(path).lower().removesuffix(".gz").removesuffix(".zst")
    return next((kind for ending, kind in ENDINGS.items() if name.endswith(ending)), None)


Wanted = Mapping[str, tuple[Kind, str]]  # column -> its kind in text, and who reads it


@dataclass(frozen=True, kw_only=True)
class TableFormat:
    """Describe how files are read; the format is that of their names where it is None."""

    format: Format | None = None
    delimiter: str | None = None
    encoding: str = "utf-8"
    decimal: str = "."
    missing: tuple[str, ...] = ("",)
    columns: tuple[str, ...] = ()  # of text without a header line


def open_tables(
    files: Mapping[str, Sequence[File]],
    how: TableFormat,
    wanted: Wanted,
    to_samples: Callable[[pa.Table, str], Samples],
    counts: Mapping[str, int] = {},
) -> dict[str, TableSource]:
    """The files of each split, which `to_samples` makes samples of; `counts` are rows that were counted before.

    The files of the first split tell the format, and what columns the others must have.
    JobError where a file has not all the columns, or cannot be read. BadValue of `to_samples` becomes one.
    """
    kind = how.format or format_of_first(next(iter(files.values()))[0])
    paths = {part: files_of(kind, named) for part, named in files.items()}
    to_rows = {part: partial(_of_part, to_samples, part) for part in files}
    if kind == "parquet":
        layout = Layout(columns={name: kind for name, (kind, _) in wanted.items()})
        return {
            part: _ParquetTables(paths=own, layout=layout, wanted=wanted, to_rows=to_rows[part], rows=counts.get(part))
            for part, own in paths.items()
        }
    every = list(dict.fromkeys(path for own in paths.values() for path in own))
    layout, parser = _json(paths, how, wanted) if kind == "jsonl" else _csv(every, how, kind, wanted)
    return {
        part: _TextTables(
            paths=own,
            layout=layout,
            to_rows=to_rows[part],
            has_header=kind != "jsonl" and not how.columns,
            parser=parser,
            rows=counts.get(part),
        )
        for part, own in paths.items()
    }


def files_of(kind: Format, named: Sequence[File]) -> list[File]:
    """The files of a format that are named, that lie in folders, or that patterns fit."""
    endings = tuple(f"{ending}{z}" for ending, own in ENDINGS.items() if own == kind for z in ("", ".gz", ".zst"))
    return [file for given in named for file in expand(given, endings)]


def format_of_first(path: File) -> Format:
    """The format of a file, or of those in a folder, by their names. JobError where they tell none."""
    kind = format_of(path)
    if kind is None and Path(path).is_dir():
        kinds = sorted({found for file in Path(path).iterdir() if (found := format_of(file)) is not None})
        if len(kinds) == 1:
            return kinds[0]
        if kinds:
            reason = f"its files are of several formats ({', '.join(kinds)}): give data.format"
            reason += f", or a pattern of one, {path}/*.{kinds[0]} say"
        else:
            reason = f"no file in this folder ends with {' or '.join(ENDINGS)} (.gz, .zst)"
            if ending := _ending_in_folders(path):
                reason += f", but files in folders of it do: give the pattern {path}/**/*{ending}"
            else:
                reason += f": give data.format, or, for files in folders of it, a pattern, {path}/**/*.csv say"
        raise JobError(where=str(path), reason=reason)
    if kind is None:
        known = ", ".join(dict.fromkeys(ENDINGS.values()))
        raise JobError(where=str(path), reason=f"its name tells no format: give data.format ({known})")
    return kind


def _ending_in_folders(path: File) -> str:
    """How the name of a table in folders of a folder ends, as .csv.gz; the empty text where there is none."""
    for _, folders, names in os.walk(path):
        folders[:] = [name for name in sorted(folders) if not name.startswith((".", "_"))]  # of Delta's log, say
        for name in names:
            stem = name.lower().removesuffix(".gz").removesuffix(".zst")
            for ending in ENDINGS:
                if stem.endswith(ending):
                    return name[len(stem) - len(ending) :]
    return ""


_REMEDIES = {
    "data.label": '; name the texts of 0 and of 1, as data.label_values: ["no", "yes"]',
    "": "; if it stands for a missing number, name it in data.missing",
}


def _csv(
    paths: Sequence[File], how: TableFormat, kind: Format, wanted: Wanted
) -> tuple[Layout, Callable[[File, Block, Layout], pa.Table]]:
    delimiter = how.delimiter or ("\t" if kind == "tsv" else ",")
    layouts: dict[tuple[str, ...], Layout] = {}
    names = {path: how.columns or read_header(path, delimiter, how.encoding, unnamed=True) for path in paths}
    for path, own in names.items():
        if own in layouts:
            continue
        check_columns(f"{path}:1", own, wanted, delimiter)
        layouts[own] = Layout(
            columns={name: wanted[name][0] if name in wanted else "skip" for name in own},
            delimiter=delimiter,
            missing=how.missing,
            encoding=how.encoding,
            decimal=how.decimal,
            number_type=pa.float64(),  # as a served row has it: float32's .7 is below a boundary at .7
            remedies={name: _REMEDIES.get(who, _REMEDIES[""]) for name, (_, who) in wanted.items()},
        )
    return layouts[names[paths[0]]], partial(_parse_by_name, {path: layouts[own] for path, own in names.items()})


def _parse_by_name(layouts: Mapping[File, Layout], path: File, block: Block, layout: Layout) -> pa.Table:
    """The columns of a block of lines in the order of the first file, whatever that of this file is."""
    table = parse(path, block, layouts[path])
    return table if layouts[path] is layout else table.select(layout.names("text", "number"))


def _json(
    paths: Mapping[str, Sequence[File]], how: TableFormat, wanted: Wanted
) -> tuple[Layout, Callable[[File, Block, Layout], pa.Table]]:
    layout = Layout(columns=dict.fromkeys(wanted, "text"), encoding=how.encoding)
    # of train first, which gives the types; in the others a column may be missing, too
    schemas = [_json_schema(own, wanted) for own in dict.fromkeys(map(tuple, paths.values()))]
    return layout, partial(_parse_json, schemas[0])


def _of_part(to_samples: Callable[[pa.Table, str], Samples], part: str, table: pa.Table, layout: Layout) -> Samples:
    return to_samples(table, part)


class TableSource(BlockSource, Protocol):
    """A split's files, whose first rows can be looked at."""

    def first_rows(self) -> Iterator[tuple[Callable[[int], str], pa.Table]]:
        """The first rows of every file, and where each of them stands."""


_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_NO_COLUMNS = Columns()  # of readers without a features section


class _TextTables(TextSource):
    def first_rows(self) -> Iterator[tuple[Callable[[int], str], pa.Table]]:
        for path, block, table in self.looks():
            yield (lambda row, path=path, block=block: f"{path}:{line_of(block, row)}"), table  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True)
class _ParquetTables(ParquetSource):
    columns: Columns = _NO_COLUMNS
    wanted: Mapping[str, tuple[Kind, str]]
    to_rows: Callable[[pa.Table, Layout], Samples]
    rows: int | None = None

    def first_rows(self) -> Iterator[tuple[Callable[[int], str], pa.Table]]:
        self.check()
        for path, group in self._first_groups():
            for table in self._parts(path, group, LOOK_ROWS):
                yield (lambda row, path=path: f"{path}: row {row + 1}"), table  # type: ignore[misc]
                break

    def num_rows(self) -> int | None:
        counted = super().num_rows()
        return counted if self.rows is None else self.rows

    def _check_columns(self, path: File, schema: pa.Schema) -> None:
        check_columns(str(path), [*schema.names, *partition_keys(path)], self.wanted)

    def _parts(self, path: File, group: int, rows: int) -> Iterator[pa.Table]:
        keys = [(name, value) for name, value in partition_keys(path).items() if name in self.wanted]
        for part in super()._parts(path, group, rows):
            for name, value in keys:
                if name not in part.column_names:
                    values = pa.array([value], pa.string())
                    zeros = pa.array(np.zeros(part.num_rows, np.int32))
                    part = part.append_column(name, pa.DictionaryArray.from_arrays(zeros, values))
            yield part

    def blocks(self, rank: int, world_size: int, shuffle: np.random.Generator | None) -> Iterator[Samples]:
        """This worker's row groups; where there are fewer than workers, each reads all and keeps its share of parts."""
        if len(self._groups) >= world_size:
            yield from super().blocks(rank, world_size, shuffle)
            return
        rows = max(1, sum(size for _, _, size in self._groups) // (8 * world_size))
        parts = (part for path, group, _ in self._groups for part in self._tables(path, group, rows))
        for path, begin, table in islice(parts, rank, None, world_size):
            yield self._samples(path, begin, table)

    def _read(self, path: File, group: int) -> Iterator[Samples]:
        return (self._samples(*part) for part in self._tables(path, group, READ_ROWS))

    def _tables(self, path: File, group: int, rows: int) -> Iterator[tuple[File, int, pa.Table]]:
        """Parts of a row group, each with its first row within the file."""
        begin = self._begins[path, group]
        for table in self._parts(path, group, rows):
            yield path, begin, table
            begin += table.num_rows

    @cached_property
    def _begins(self) -> dict[tuple[File, int], int]:
        """The first row of each row group within its file."""
        begins, rows = {}, Counter[File]()
        for path, group, size in self._groups:
            begins[path, group] = rows[path]
            rows[path] += size
        return begins

    def _samples(self, path: File, begin: int, table: pa.Table) -> Samples:
        with located(lambda row: f"{path}: row {begin + row + 1}"):
            return self.to_rows(table, self.layout)


def partition_keys(path: File) -> dict[str, str | None]:
    """Columns that the names of a file's folders give, as Spark and Hive write them: day=2026-01-31/part-0.parquet."""
    folders = [name.partition("=") for name in str(path).split("/")[:-1]]
    return {key: None if value == _NULL_PARTITION else unquote(value) for key, sign, value in folders if key and sign}


def read_vocabulary(path: File, table: str) -> list[int]:
    """Hashes of the values of a file, one on each line. JobError where one is there twice, with both lines."""
    from embershard.worker.data.hashing import hash_texts  # here: its kernels need numba, and a look at files not

    lines = [line.rstrip(b"\r") for block in read_blocks(path) for line in block.text.removesuffix(b"\n").split(b"\n")]
    lines[0] = lines[0].removeprefix(BOM)  # of Windows programs
    first: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if first.setdefault(line, number) != number:
            value = line.decode("utf-8", "replace")[:40]
            raise JobError(where=f"{path}:{number}", reason=f"value {value!r} is on line {first[line]} already")
    try:
        texts = pa.array([line.decode() for line in lines])
    except UnicodeDecodeError as error:
        raise JobError(where=str(path), reason=f"not UTF-8 text ({error.reason})") from None
    hashes: list[int] = hash_texts(table, texts).tolist()
    return hashes


def check_columns(where: str, names: Sequence[str], wanted: Wanted, delimiter: str = "", remedy: str = "") -> None:
    """JobError where a column is missing; it ends with `remedy` if no name is like that of the column."""
    for name, (_, who) in wanted.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0]}?" if near else remedy
            if len(names) == 1 and (other := next((d for d in ";\t|," if d in names[0] and d != delimiter), "")):
                hint = f"; the file seems to be parted by {other!r}: give data.delimiter"
            reason = f"no column {name!r}, which {who} reads (there are: {', '.join(names)}){hint}"
            raise JobError(where=where, reason=reason)


def _json_schema(paths: Sequence[File], wanted: Wanted) -> pa.Schema:
    """The types of a split's columns, by the first lines of its files, and more where those lack a column's values."""
    values: dict[str, list[object]] = {name: [] for name in wanted}
    names: dict[str, None] = {}
    looked, has_lines = 0, False
    for path, block in ((own, block) for own in paths for block in read_blocks(own, LOOK_BYTES)):
        for number, line in enumerate(block.text.removeprefix(BOM).split(b"\n"), block.first_line):
            if line.strip():
                has_lines = True
                row = json_row(f"{path}:{number}", line)
                names |= dict.fromkeys(row)
                for name in wanted:
                    if (value := row.get(name)) is not None:
                        _check_kind(f"{path}:{number}", name, value, values[name])
                        values[name].append(value)
        looked += len(block.text)
        if looked >= BLOCK_BYTES or all(any(value != [] for value in own) for own in values.values()):
            break
    if not has_lines:
        raise JobError(where=str(paths[0]), reason="no line of data in the file")
    remedy = "; if it has no value here, write it as null in one line"
    check_columns(f"{paths[0]}:1", list(names), wanted, remedy=remedy)
    # in the file's order, in which Arrow finds a line's keys without a look into its map of them
    return pa.schema([(name, _json_type(wanted[name][0], values[name])) for name in names if name in wanted])


def _check_kind(where: str, name: str, value: object, before: Sequence[object]) -> None:
    """JobError for an object, and for a value of another kind than those before."""
    if isinstance(value, dict):
        reason = f"column {name!r}: {ascii(value)[:40]} is an object; write its fields as columns"
        raise JobError(where=where, reason=reason)
    if before and (kind := _kind_of(before[0])) != _kind_of(value):
        reason = f"column {name!r}: {ascii(value)[:40]} is no {kind}, as in the lines before"
        raise JobError(where=where, reason=f"{reason}; write all its values alike")


def _kind_of(value: object) -> str:
    """What JSON calls a value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return {bool: "boolean", str: "string", list: "array"}.get(type(value), "object")
    return "number"


def json_row(where: str, line: bytes) -> dict[str, object]:
    """A line's columns. JobError where it is no object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # the latter of arrays in arrays in arrays
        hint = "; each line has to be one object, and a file that is one JSON array has to be written so"
        raise JobError(where=where, reason=f"no JSON: {error}{hint * (line.strip() in (b'[', b'{'))}") from None
    if not isinstance(row, dict):
        hint = "; a file that is one JSON array has to be written as lines of objects" if isinstance(row, list) else ""
        raise JobError(where=where, reason=f"is a {type(row).__name__}, no object of columns{hint}")
    return row


def _json_type(kind: Kind, values: Sequence[object]) -> pa.DataType:
    if any(isinstance(value, list) for value in values):
        inner = [item for value in values if isinstance(value, list) for item in value if item is not None]
        return pa.list_(_json_type("text", inner))
    if values and all(isinstance(value, bool) for value in values):
        return pa.bool_()
    if kind == "number" and not (values and all(isinstance(value, str) for value in values)):
        return pa.float64()
    if values and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        if any(isinstance(value, float) for value in values):
            return pa.float64()
        return pa.uint64() if any(isinstance(value, int) and value >= 2**63 for value in values) else pa.int64()
    return pa.string()


def _parse_json(schema: pa.Schema, path: File, block: Block, layout: Layout) -> pa.Table:
    """The columns of a block of lines of JSON. JobError names the first bad line."""
    block = recoded(path, block, layout.encoding)

    def read(text: bytes) -> pa.Table:
        read_options = pa_json.ReadOptions(use_threads=False, block_size=len(text) + 1)
        parse_options = pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        return pa_json.read_json(pa.BufferReader(text), read_options, parse_options).select(list(layout.columns))

    text = block.text.removeprefix(BOM) if block.first_line == 1 else block.text
    try:
        return read(text)
    except pa.ArrowException as error:
        for number, line in enumerate(text.split(b"\n"), block.first_line):
            if line.strip():
                json_row(f"{path}:{number}", line)
                try:
                    read(line)
                except pa.ArrowException as wrong:
                    reason = f"{_about(json.loads(line), schema)} ({str(wrong).partition(chr(10))[0]})"
                    raise JobError(where=f"{path}:{number}", reason=reason) from None
        raise JobError(where=f"{path}:{block.first_line}", reason=f"in the lines from here on: {error}") from None


def _about(row: Mapping[str, object], schema: pa.Schema) -> str:
    """Which value of a row has not the type of its column."""
    for name in schema.names:
        value, kind = row.get(name), schema.field(name).type
        reason = f"column {name!r}: {ascii(value)[:40]} is no {kind}, as in the first lines"
        whole = kind.value_type if pa.types.is_list(kind) else kind
        inside = value if isinstance(value, list) else [value]
        try:
            pa.array([value], kind)
            pa.array([value]).cast(kind)  # the line above makes 1 of 1.5
        except (pa.ArrowException, OverflowError, ValueError, TypeError):  # of an int or a text that Arrow cannot hold
            is_large = pa.types.is_integer(whole) and any(type(one) is int and not 0 <= one < 2**63 for one in inside)
            return reason + "; write integers of this size as texts, in quotes, in all its lines" * is_large
        if pa.types.is_integer(whole) and any(isinstance(one, float) for one in inside):  # 7.0, which the casts take
            return f"{reason}; write its integers without a fraction, as 7 (of pandas, cast the column to Int64)"
    return "values of other types than in the first lines"


@contextmanager
def located(where: Callable[[int], str]) -> Iterator[None]:
    """JobError in place of what is wrong with a value, or with a feature's column."""
    try:
        yield
    except BadValue as error:
        raise JobError(where=where(error.row), reason=str(error)) from None
    except BadFeature as error:
        raise JobError(where=where(0), reason=str(error)) from None
