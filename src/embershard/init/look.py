"""The first rows of a data file, by column, and how its text is to be read."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

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
NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*", re.I)
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
    missing: Mapping[str, frozenset[str]] = field(default_factory=dict)  # of text: column -> its words for no number
    fractions: Mapping[str, str] = field(default_factory=dict)  # of text: column -> its first number with one, as 7.0
    blanks: frozenset[str] = frozenset()  # columns of text with cells that begin or end with blanks
    unlike: Mapping[str, str] = field(default_factory=dict)  # of text: column -> how its numbers are not written alike


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
        settings = {**look.settings, **settings}
    # a line of JSON may lack a column
    partial = {name for name in columns if format_of(files[0]) != "jsonl" and not all(name in x.columns for x in looks)}
    found = Look(columns, settings, tuple(starts), frozenset(partial))
    kind = format_of(files[0])
    usual = {"csv": ",", "tsv": "\t"}.get(kind or "")
    return found if usual is None else _of_cells(found, str(settings.get("delimiter", usual)))


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
    return replace(look, columns=columns)


def setting_lines(settings: Mapping[str, object]) -> list[str]:
    """The lines of a job's section `data` that say how text is read."""
    remarks = {"encoding": "                  # guessed, for the file is not UTF-8: check its texts"}
    return [f"  {name}: {json.dumps(value)}{remarks.get(name, '')}" for name, value in settings.items()]


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
    types, whole = {}, set()
    for own in batch.schema:
        if pa.types.is_decimal(own.type) and own.type.scale:
            types[own.name] = pa.float64()
        elif pa.types.is_decimal(own.type):
            whole.add(own.name)  # integers of any size, which int64 does not hold
        elif pa.types.is_timestamp(own.type) and own.type.unit == "ns":  # which Python's times have not
            types[own.name] = pa.timestamp("us", own.type.tz)
    columns = {name: batch.column(name) for name in batch.schema.names}
    casts = {name: c.cast(types[name], safe=False) if name in types else c for name, c in columns.items()}
    found: dict[str, list[object]] = {}
    for name, column in casts.items():
        try:
            values = _of_python(column).to_pylist()
            found[name] = [None if value is None else int(value) for value in values] if name in whole else values
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
        said = str(error).partition(" - ")[0]  # what follows is advice for a programmer
        reason = f"cannot be read as CSV: {said}; save it as text, with the line ends of Unix or Windows"
        raise CannotInit(path=str(path), reason=reason) from None
    names = [name or f"(column {place})" for place, name in enumerate(rows[0] if rows else (), 1)]
    rows = [row for row in rows[1:] if len(row) == len(names)]
    if len(set(names)) < len(names):
        raise CannotInit(path=f"{path}:1", reason="two columns have one name")
    if names and all(NUMBER.fullmatch(name) for name in names):
        raise CannotInit(path=f"{path}:1", reason="it has no header line with the names of the columns; add one")
    raw = [[row[i] for row in rows] for i in range(len(names))]
    cells = [[cell.strip() for cell in own] for own in raw]
    texts = [(name, own) for name, own in zip(names, cells, strict=True) if not NUMBER.fullmatch(name)]
    if texts and all(name.strip() in own for name, own in texts):
        reason = f"it looks like a row: {texts[0][0]!r} is a value of its column, too"
        raise CannotInit(path=f"{path}:1", reason=f"{reason}; let one line with the names of the columns be the first")
    return Look({name: [cell or None for cell in own] for name, own in zip(names, raw, strict=True)}, settings)


def _of_cells(look: Look, delimiter: str) -> Look:
    """Type the cells of text of all files: a column is what all its cells are."""
    written = {name: [str(cell or "") for cell in own] for name, own in look.columns.items()}
    cells = {name: [cell.strip() for cell in own] for name, own in written.items()}
    comma, unlike = _decimal_comma(cells) if delimiter != "," else (False, {})
    columns, settings = dict(look.columns), dict(look.settings)
    missing, fractions = {}, {}
    for name, own in cells.items():
        if name in unlike:
            continue
        if (found := _typed(own, comma)) is not None:
            columns[name] = found
        if any(isinstance(value, float) for value in found or ()):
            missing[name] = frozenset(_missing_numbers(own, comma))
            fractions[name] = next((cell for cell in own if _is_fraction(cell, comma)), "")
    if comma:
        settings["decimal"] = ","
    if texts := sorted(frozenset[str]().union(*missing.values())):
        settings["missing"] = ["", *texts]
    blanks = frozenset(name for name, own in cells.items() if own != written[name])
    typed = replace(look, columns=columns, settings=settings, missing=missing, fractions=fractions)
    return replace(typed, blanks=blanks, unlike=unlike)


def _decimal_comma(cells: Mapping[str, Sequence[str]]) -> tuple[bool, dict[str, str]]:
    """Whether numbers have a decimal comma, and of columns with decimals unlike those of the others, what they have."""
    decimals = {name: _decimals(own) for name, own in cells.items()}
    first = next(((name, comma) for name, (point, comma) in decimals.items() if comma and not point), None)
    unlike = {}
    for name, (point, comma) in decimals.items():
        if point and comma:
            unlike[name] = f"a decimal point, as {point}, and a decimal comma, as {comma}"
        elif point and first is not None:
            unlike[name] = f"a decimal point, as {point}, and those of {first[0]} a decimal comma, as {first[1]}"
    return first is not None, unlike


def _decimals(cells: Sequence[str]) -> tuple[str, str]:
    """The first number with a decimal point, and with a decimal comma, of a column of numbers; the empty text if none.

    Of a column with other texts there are none of both.
    """
    if not all(NUMBER.fullmatch(cell.replace(",", ".")) or cell.lower() in MISSING for cell in cells if cell):
        return "", ""
    return next((cell for cell in cells if "." in cell), ""), next((cell for cell in cells if "," in cell), "")


def _is_fraction(cell: str, comma: bool) -> bool:
    """Whether a number is written with a decimal separator or an exponent."""
    plain = cell.replace(",", ".") if comma else cell
    return bool(NUMBER.fullmatch(plain)) and not plain.lstrip("+-").isdecimal()


def _missing_numbers(cells: Sequence[str], comma: bool) -> set[str]:
    """The texts that stand for a missing number, of a column whose other cells, a tenth of all or more, are numbers."""
    others = {cell for cell in cells if cell and not NUMBER.fullmatch(cell.replace(",", ".") if comma else cell)}
    if not others or not {cell.lower() for cell in others} <= MISSING:
        return set()
    return others if sum(cell in others for cell in cells) * 10 <= len(cells) * 9 else set()


def _typed(cells: Sequence[str], comma: bool) -> list[object] | None:
    """The cells of a column as integers or floats, where all of them are some; else None."""
    missing = _missing_numbers(cells, comma)
    plain = ["" if cell in missing else cell.replace(",", ".") if comma else cell for cell in cells]
    present = [cell for cell in plain if cell]
    if not present or not all(NUMBER.fullmatch(cell) for cell in present):
        return None
    # programs write exponents with a sign or a point, as 1e-05 or 1.0E10; ids such as 12e3 have neither
    is_id = any(re.fullmatch(r"\d+[eE]\d+", cell) for cell in present) and not any("." in cell for cell in present)
    if is_id or (not missing and _are_written_labels({*present})):
        return None
    # 007 is no number, what has missing ones is no id, and as one +7 would be another than 7
    if not missing and all(re.fullmatch(r"-?(0|[1-9]\d{0,17})", cell) for cell in present):
        return [int(cell) if cell else None for cell in plain]
    signs = sum(cell[0] == "+" for cell in present)  # in front of all of them: telephones
    is_number = missing or any("." in cell or "e" in cell.lower() for cell in present) or 0 < signs < len(present)
    return [float(cell) if cell else None for cell in plain] if is_number else None


def _are_written_labels(cells: set[str]) -> bool:
    """Whether a column has two integers other than 0 and 1 that are written as -1.0 or +1: a job names labels so."""
    values = sorted(map(float, cells))
    is_whole = len(values) == 2 and all(value.is_integer() for value in values) and values != [0, 1]
    return is_whole and any(str(int(float(cell))) != cell for cell in cells)
