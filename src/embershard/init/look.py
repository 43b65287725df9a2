"""The first rows of a data file, by column, and how its text is to be read."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any, cast

from embershard.proto.errors import EmbershardError
from embershard.worker.data.files import read_blocks
from embershard.worker.data.readers.tabular_files import (
    ENDINGS,
    files_of,
    format_of,
    format_of_first,
    json_row,
    partition_keys,
)
from embershard.worker.data.text import read_header

ROWS = 20_000  # that are looked at
BYTES = 2**22
_FILES = 8  # of a folder or pattern, from all over it: the first may be of one day, or have few rows
TIME_TEXT = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d.*)?$")
_NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*", re.I)
MISSING = {"nan", "na", "n/a", "null", "none", "?", "-", "inf", "+inf", "-inf", "infinity", "-infinity", r"\n"}


class CannotInit(EmbershardError):
    """A data file that no job can be written for."""

    template = "{path}: {reason}"


@dataclass(frozen=True, slots=True)
class Look:
    """The first rows of a table, by column, and how its text is to be read."""

    columns: dict[str, list[object]]  # None: missing
    settings: dict[str, object]  # of the section `data`
    starts: tuple[int, ...] = (0,)  # the first row of each file
    partial: frozenset[str] = frozenset()  # columns that some files lack


def look_at(path: Path) -> Look:
    """Read the first rows of a file, or of some in a folder or of a pattern.

    CannotInit says why there are none; JobError where a file cannot be read, or the folder has none of one format.
    """
    files = data_files(path)
    count = min(len(files), _FILES)
    some = [files[place * (len(files) - 1) // max(1, count - 1)] for place in range(count)]
    looks = [look for file in some if (look := _look_at_file(file, ROWS // len(some))).columns]
    if not looks:
        raise CannotInit(path=str(files[0]), reason="it has no rows")
    columns: dict[str, list[object]] = {}
    settings: dict[str, object] = {}
    starts, rows = [], 0
    for look in looks:
        starts.append(rows)
        columns |= {name: [None] * rows for name in look.columns if name not in columns}
        rows += len(next(iter(look.columns.values())))
        for name, values in columns.items():
            values += look.columns.get(name, [None] * (rows - len(values)))
        both = [text for own in (settings, look.settings) for text in cast(list[str], own.get("missing", []))]
        settings = {**look.settings, **settings, **({"missing": list(dict.fromkeys(both))} if both else {})}
    # a line of JSON may lack a column
    partial = {name for name in columns if format_of(files[0]) != "jsonl" and not all(name in x.columns for x in looks)}
    return Look(columns, settings, tuple(starts), frozenset(partial))


def _look_at_file(path: Path, rows: int) -> Look:
    """The first rows of a file, with columns of the names of its folders; no column where it has no row."""
    if not path.is_file():
        raise CannotInit(path=str(path), reason="there is no such file")
    kind = format_of(path)
    if kind is None:
        raise CannotInit(path=str(path), reason=f"its name ends with none of {', '.join(ENDINGS)} (.gz, .zst)")
    look = {"parquet": _parquet, "jsonl": _json_lines}.get(kind, _text)(path, rows)
    if not any(look.columns.values()):
        return Look({}, {})
    columns = {
        name: [None if isinstance(value, float) and math.isnan(value) else value for value in values]
        for name, values in look.columns.items()
    }
    count = len(next(iter(columns.values())))
    for name, value in partition_keys(path).items() if kind == "parquet" else ():
        columns.setdefault(name, [_of_folder(value)] * count)
    return Look(columns, look.settings)


def _of_folder(value: str | None) -> object:
    """The value of a partition key as a column would have it."""
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        return date.fromisoformat(value) if TIME_TEXT.match(value) else value
    return value


def data_files(data: Path) -> list[Path]:
    """The data files of a folder, those that a pattern with * fits, or the one that is named."""
    if not data.is_dir() and (data.exists() or "*" not in str(data)):
        return [data]
    return [Path(file) for file in files_of(format_of_first(data), [data])]


def _parquet(path: Path, rows: int) -> Look:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if len(set(names := file.schema_arrow.names)) < len(names):
                raise CannotInit(path=str(path), reason="two columns have one name")
            batches: list[pa.RecordBatch] = []
            for group in range(file.num_row_groups):  # one by one: of several, Arrow reads no lists of dictionaries
                if (left := rows - sum(map(len, batches))) > 0:
                    batches += islice(file.iter_batches(left, row_groups=[group]), 1)
    except (pa.ArrowException, OSError) as error:
        raise CannotInit(path=str(path), reason=f"no Parquet file: {error}") from None
    if not batches:
        return Look({}, {})
    batch = pa.Table.from_batches(batches)
    types = {
        field.name: pa.float64() if field.type.scale else pa.int64()
        for field in batch.schema
        if pa.types.is_decimal(field.type)
    }
    for field in batch.schema:
        if pa.types.is_timestamp(field.type) and field.type.unit == "ns":  # which Python's times have not
            types[field.name] = pa.timestamp("us", field.type.tz)
    columns = {name: batch.column(name) for name in batch.schema.names}
    casts = {name: c.cast(types[name], safe=False) if name in types else c for name, c in columns.items()}
    found = {}
    for name, column in casts.items():
        try:
            found[name] = _of_python(column).to_pylist()
        except UnicodeDecodeError:
            reason = f"column {name!r} has texts that are not UTF-8: write them so"
            raise CannotInit(path=str(path), reason=reason) from None
    return Look(found, {})


def _of_python(array: Any) -> Any:
    """A column without times that Python cannot hold, of years before 1 or after 9999, as databases' infinity is."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not (pa.types.is_timestamp(array.type) or pa.types.is_date(array.type)):
        return array
    if pa.types.is_date(array.type):
        days = array.cast(pa.date32()).cast(pa.int32())
    else:
        days = pc.divide(array.cast(pa.int64()), 86_400 * {"s": 1, "ms": 1_000, "us": 1_000_000}[array.type.unit])
    return pc.if_else(pc.and_(pc.greater(days, -719_161), pc.less(days, 2_932_895)), array, None)


def _json_lines(path: Path, most: int) -> Look:
    columns: dict[str, list[object]] = {}
    lines = next(read_blocks(path, BYTES)).text.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    rows = 0
    for number, line in enumerate(lines[:most], 1):
        if not line.strip():  # as in training
            continue
        row = json_row(f"{path}:{number}", line)
        columns |= {name: [None] * rows for name in row if name not in columns}
        for name, values in columns.items():
            values.append(row.get(name))
        rows += 1
    return Look(columns, {})


def _text(path: Path, most: int) -> Look:
    text = next(read_blocks(path, BYTES)).text
    settings: dict[str, object] = {}
    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError:
        decoded, settings["encoding"] = text.decode("cp1252", "replace"), "cp1252"
    header = decoded.partition("\n")[0]
    usual = "\t" if format_of(path) == "tsv" else ","
    delimiter = max((usual, ";", "\t", "|", ","), key=header.count)
    if delimiter != usual:
        settings["delimiter"] = delimiter
    read_header(path, delimiter, str(settings.get("encoding", "utf-8")), unnamed=True)
    try:
        rows = list(csv.reader(io.StringIO(decoded), delimiter=delimiter))[: most + 1]
    except csv.Error as error:
        raise CannotInit(path=str(path), reason=f"cannot be read as CSV: {error}") from None
    names = [name or f"(column {place})" for place, name in enumerate(rows[0] if rows else (), 1)]
    rows = [row for row in rows[1:] if len(row) == len(names)]
    if len(set(names)) < len(names):
        raise CannotInit(path=f"{path}:1", reason="two columns have one name")
    if names and all(_NUMBER.fullmatch(name) for name in names):
        raise CannotInit(path=f"{path}:1", reason="it has no header line with the names of the columns; add one")
    cells = [[row[i].strip() for row in rows] for i in range(len(names))]
    texts = [(name, own) for name, own in zip(names, cells, strict=True) if not _NUMBER.fullmatch(name)]
    if texts and all(name.strip() in own for name, own in texts):
        reason = f"it looks like a row: {texts[0][0]!r} is a value of its column, too"
        raise CannotInit(path=f"{path}:1", reason=f"{reason}; let one line with the names of the columns be the first")
    comma = delimiter != "," and any(
        all(_NUMBER.fullmatch(cell.replace(",", ".")) or cell.lower() in MISSING for cell in own if cell)
        and any("," in cell for cell in own)
        for own in cells
    )
    if comma:
        settings["decimal"] = ","
    missing = {cell for own in cells for cell in _missing_numbers(own, comma)}
    if missing:
        settings["missing"] = ["", *sorted(missing)]
    return Look({name: _typed(own, comma) for name, own in zip(names, cells, strict=True)}, settings)


def _missing_numbers(cells: Sequence[str], comma: bool) -> set[str]:
    """The texts that stand for a missing number, of a column whose other cells, half of all or more, are numbers."""
    others = {cell for cell in cells if cell and not _NUMBER.fullmatch(cell.replace(",", ".") if comma else cell)}
    if not others or not {cell.lower() for cell in others} <= MISSING:
        return set()
    return others if sum(cell in others for cell in cells) * 2 <= len(cells) else set()


def _typed(cells: Sequence[str], comma: bool) -> list[object]:
    """The cells of a column as integers or floats, where all of them are some."""
    missing = _missing_numbers(cells, comma)
    plain = ["" if cell in missing else cell.replace(",", ".") if comma else cell for cell in cells]
    present = [cell for cell in plain if cell]
    kind: Callable[[str], object] = str
    if present and all(_NUMBER.fullmatch(cell) for cell in present):
        # 007 is no number, and what has missing ones is no id
        whole = not missing and all(re.fullmatch(r"[-+]?(0|[1-9]\d{0,17})", cell) for cell in present)
        is_number = missing or any("." in cell or "e" in cell.lower() for cell in present)
        kind = int if whole else float if is_number else str
        # programs write exponents with a sign or a point, as 1e-05 or 1.0E10; ids such as 12e3 have neither
        is_id = any(re.fullmatch(r"\d+[eE]\d+", cell) for cell in present) and not any("." in cell for cell in present)
        if is_id or {*present} == {"+1", "-1"}:  # the latter are of a label, which names its texts
            kind = str
    return [kind(cell) if cell else None for cell in plain]
