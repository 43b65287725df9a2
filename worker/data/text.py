"""Lines of delimited text as typed columns; a bad line is reported with its file and line number."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from embershard.proto.errors import JobError
from embershard.worker.data.batch import Samples
from embershard.worker.data.files import (
    BLOCK_BYTES,
    LOOK_BYTES,
    Block,
    File,
    check_readable,
    count_lines,
    fingerprint,
    is_delimiter,
    line_starts,
    read_blocks,
    read_range,
    reading,
)
from embershard.worker.data.values import BadFeature, BadValue, time_remedy

Kind = Literal["label", "id", "text", "number", "skip"]
TYPES = {"label": pa.float32(), "id": pa.int64(), "text": pa.string(), "number": pa.float32()}
BOM = b"\xef\xbb\xbf"
THOUSANDS = re.compile(r"\s*[-+]?\d{1,3}(,\d{3})+(\.\d*)?\s*")  # 1,234.5; but 1,234 may be a decimal comma's
_OPEN_QUOTE = (
    'a field begins with a quote (") that its line does not close; '
    "take out the quote, or the line end within the text: each line is a sample"
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Describe a delimited file: its columns in order, and what their text means.

    Kinds: label (0 or 1, or a key of `label_values`), id (integer >= 0), text (any), number (finite or missing), skip.
    A field in quotes may hold delimiters and doubled quotes, but no line end. ASCII has to be a part of `encoding`.
    """

    columns: Mapping[str, Kind]
    delimiter: str = ","
    missing: tuple[str, ...] = ("",)  # texts that stand for a missing number
    label_values: Mapping[str, float] = field(default_factory=dict)
    num_ids: int | None = None  # ids must be below it, where it is known in advance
    encoding: str = "utf-8"
    decimal: str = "."  # between a number's whole part and its fraction
    number_type: pa.DataType = TYPES["number"]
    remedies: Mapping[str, str] = field(default_factory=dict)  # column -> what to do where a text is no number

    def __post_init__(self) -> None:
        if not is_delimiter(self.delimiter):
            raise ValueError(f"delimiter must be one ASCII character, no quote or line end, got {self.delimiter!r}")
        for name, kind in self.columns.items():
            if kind != "skip" and kind not in TYPES:
                raise ValueError(f"column {name!r}: unknown kind {kind!r} (known: {', '.join(TYPES)}, skip)")

    def names(self, *kinds: Kind) -> tuple[str, ...]:
        """Columns of these kinds, in file order."""
        return tuple(name for name, kind in self.columns.items() if kind in kinds)


def read_header(path: File, delimiter: str, encoding: str = "utf-8", *, unnamed: bool = False) -> tuple[str, ...]:
    """Column names of a file's first line. JobError where it is no text, or a name is empty or occurs twice.

    `unnamed`: columns may have no name, and get one of their place.
    """
    first, ended, _ = next(read_blocks(path, block_bytes=64 << 10)).text.partition(b"\n")
    if b"\r" in first.rstrip(b"\r") and not ended:
        reason = "its lines end with CR alone, as those of an old Mac; write them with LF: tr '\\r' '\\n' < old > new"
        raise JobError(where=f"{path}:1", reason=reason)
    try:
        line = first.decode("utf-8-sig" if encoding == "utf-8" else encoding).rstrip("\r")
    except UnicodeDecodeError as error:
        raise JobError(where=f"{path}:1", reason=_not_text(error, encoding)) from None
    names = _fields(line, delimiter)
    if unnamed:
        names = [name or f"(column {place})" for place, name in enumerate(names, 1)]
    counts = Counter(names)
    for name in names:
        if not name or counts[name] > 1:
            what = f"column {name!r} occurs twice" if name else "a column has no name"
            raise JobError(where=f"{path}:1", reason=f"{what} in the header; is there a header line?")
    return tuple(names)


def read_tables(
    path: File, layout: Layout, *, skip_lines: int = 0, block_bytes: int = BLOCK_BYTES
) -> Iterator[pa.Table]:
    """Tables of a file's lines (labels float32, ids int64, texts string, numbers float32), block by block."""
    rows = 0
    for block in read_blocks(path, block_bytes):
        if skip_lines and block.first_line == 1:
            block = without_lines(block, skip_lines)
        if not block.is_blank:
            table = parse(path, block, layout)
            rows += table.num_rows
            yield table
    if not rows:
        raise JobError(where=str(path), reason="no line of data in the file")


def _not_text(error: UnicodeDecodeError, encoding: str = "utf-8") -> str:
    name = "UTF-8" if encoding == "utf-8" else encoding  # the error has Python's name of many: charmap
    hint = "; of a Windows program, give encoding: cp1252 (with data.reader tabular, lists or sequences)"
    return f"not {name} text ({error.reason} at byte {error.start}){hint * (name == 'UTF-8')}"


def recoded(path: File, block: Block, encoding: str) -> Block:
    """A block as UTF-8. JobError names the line that is not of this encoding."""
    if encoding == "utf-8":
        return block
    try:
        return Block(block.first_line, block.text.decode(encoding).encode())
    except UnicodeDecodeError as error:
        line = block.first_line + block.text.count(b"\n", 0, error.start)
        raise JobError(where=f"{path}:{line}", reason=_not_text(error, encoding)) from None


def parse(path: File, block: Block, layout: Layout) -> pa.Table:
    """The columns of a block of lines, those of kind skip left out. JobError names the first bad line."""
    block = recoded(path, block, layout.encoding)
    kept = [name for name, kind in layout.columns.items() if kind != "skip"]
    types = {name: TYPES[layout.columns[name]] for name in kept} | dict.fromkeys(
        layout.names("number"), layout.number_type
    )
    if layout.label_values:
        types |= dict.fromkeys(layout.names("label"), pa.string())
    text = block.text
    if block.first_line > 1 and text.startswith(BOM):  # of its first field: Arrow takes one away from any block
        text = BOM + text
    try:
        table = pa_csv.read_csv(
            pa.py_buffer(text),
            read_options=pa_csv.ReadOptions(
                column_names=list(layout.columns), use_threads=False, block_size=len(text) + 1
            ),
            parse_options=pa_csv.ParseOptions(delimiter=layout.delimiter),
            convert_options=pa_csv.ConvertOptions(
                include_columns=kept,
                column_types=types,
                null_values=list(layout.missing),
                strings_can_be_null=False,
                decimal_point=layout.decimal,
                check_utf8=not block.text.isascii(),
            ),
        )
    except (pa.ArrowInvalid, pa.ArrowKeyError) as error:
        raise _bad_line(path, block, layout, str(error)) from None
    problem = plausible(table, layout)
    if problem is None and b'"' in block.text and not _row_per_line(table.num_rows, block.text, layout.delimiter):
        problem = _OPEN_QUOTE
    if problem:
        raise _bad_line(path, block, layout, problem)
    return table


def column(table: pa.Table, name: str) -> npt.NDArray[np.generic]:
    """A column without missing values as one array."""
    array: npt.NDArray[np.generic] = table.column(name).combine_chunks().to_numpy(zero_copy_only=False)
    return array


def without_lines(block: Block, lines: int) -> Block:
    """A block without its first lines."""
    parts = block.text.split(b"\n", lines)
    return Block(block.first_line + lines, parts[lines] if len(parts) > lines else b"")


def plausible(table: pa.Table, layout: Layout) -> str | None:
    """Return what is wrong with typed columns (a label not 0 or 1, a negative or missing id, an infinite number)."""
    if not table.num_rows:
        return None
    for name in layout.names("label"):
        known = pa.array(list(layout.label_values or (0.0, 1.0)), table.column(name).type)
        if not pc.all(pc.is_in(table.column(name), known)).as_py():
            return f"column {name!r} has a label that is not 0 or 1"
    for name in layout.names("id"):
        values = table.column(name)
        if values.null_count or pc.min(values).as_py() < 0:
            return f"column {name!r} has an id that is missing or negative"
        if layout.num_ids is not None and pc.max(values).as_py() >= layout.num_ids:
            return f"column {name!r}: id {pc.max(values)} is not below num_ids = {layout.num_ids}"
    for name in layout.names("number"):
        if pc.all(pc.is_finite(table.column(name))).as_py() is False:
            return f"column {name!r} has a number that is not finite"
    return None


def _row_per_line(rows: int, text: bytes, delimiter: str) -> bool:
    """Whether no quoted field took in a line end: Arrow reads on to the next quote, or to the end of the block."""
    text = text.rstrip(b"\r\n")
    last = text[text.rfind(b"\n") + 1 :]  # has none behind it that would be missing
    if _opens_quote(last.decode("utf-8", "replace"), delimiter):
        return False
    lines = 1 + int(np.count_nonzero(np.frombuffer(text, np.uint8) == 10))  # bytes.count takes four times as long
    if rows == lines and b"\r" not in text:
        return True
    return rows == sum(map(bool, text.splitlines()))  # Arrow, too, ends a line at CR and skips empty ones


def _share(block: Block, place: int, parts: int) -> tuple[Block, int]:
    """One of so many parts of a block, and the number of all its lines; the first parts may have one line more."""
    if parts == 1:
        return block, 0
    ends = np.flatnonzero(np.frombuffer(block.text, np.uint8) == 10) + 1
    tail = [] if not block.text or block.text.endswith(b"\n") else [len(block.text)]
    starts = np.concatenate([[0], ends, tail]).astype(np.int64)
    each, more = divmod(len(starts) - 1, parts)
    first, behind = (part * each + min(part, more) for part in (place, place + 1))
    return Block(block.first_line + first, block.text[starts[first] : starts[behind]]), len(starts) - 1


def line_of(block: Block, row: int) -> int:
    """The number of the line that a row of a parsed block is of: Arrow skips empty lines."""
    lines = (number for number, line in enumerate(block.text.split(b"\n"), block.first_line) if line.strip(b"\r"))
    return next(islice(lines, row, None), block.first_line)


def _bad_line(path: File, block: Block, layout: Layout, reason: str) -> JobError:
    """The first line that breaks the layout, found line by line: slow, but it runs once."""
    for number, raw in enumerate(block.text.split(b"\n"), block.first_line):
        try:
            line = raw.decode("utf-8").rstrip("\r")
        except UnicodeDecodeError as error:
            return JobError(where=f"{path}:{number}", reason=_not_text(error))
        if line:
            opens = _opens_quote(line, layout.delimiter)
            problem = _OPEN_QUOTE if opens else _problem(_fields(line, layout.delimiter), layout)
            if problem:
                return JobError(where=f"{path}:{number}", reason=problem)
    return JobError(where=f"{path}:{block.first_line}", reason=f"in the lines from here on: {reason}")


def _fields(line: str, delimiter: str) -> list[str]:
    """The fields of a line; a line that is no CSV at all is one field."""
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        return [line]


def _opens_quote(line: str, delimiter: str) -> bool:
    """Whether a field of the line begins with a quote that the line does not close: it would go on in the next one."""
    if '"' not in line:
        return False
    try:
        return next(csv.reader([line + "\n"], delimiter=delimiter))[-1].endswith("\n")
    except csv.Error:
        return False


def _problem(fields: list[str], layout: Layout) -> str | None:
    if len(fields) != len(layout.columns):
        cut = " (cut short?)" if len(fields) < len(layout.columns) else ""
        return f"expected {len(layout.columns)} fields, got {len(fields)}{cut}"
    for (name, kind), text in zip(layout.columns.items(), fields, strict=True):
        if kind == "label":
            if text not in layout.label_values if layout.label_values else not _is_number(text, (0.0, 1.0)):
                known = " or ".join(layout.label_values or ("0", "1"))
                other = not layout.label_values and text and not _is_number(text)
                hint = "; labels that are texts are read by data.reader tabular, with data.label_values" * bool(other)
                return f"column {name!r}: label {text[:40]!r} is not {known}{hint}"
        elif kind == "id":
            if not text.strip().isdecimal() or int(text) >= 2**63:
                return f"column {name!r}: {text[:40]!r} is not an integer id >= 0"
            if layout.num_ids is not None and int(text) >= layout.num_ids:
                return f"column {name!r}: id {text} is not below num_ids = {layout.num_ids}"
        elif kind == "number" and text not in layout.missing and not _is_number(text, decimal=layout.decimal):
            comma = layout.decimal == "." and _is_number(text, decimal=",")
            hint = time_remedy(text) or layout.remedies.get(name, "")
            if comma:
                hint = "; if it has a decimal comma, give decimal: ','"
            if THOUSANDS.fullmatch(text) and not comma:
                hint = "; write it without thousands separators"
            return f"column {name!r}: {text[:40]!r} is not a finite number{hint}"
    return None


def _is_number(text: str, among: tuple[float, ...] = (), decimal: str = ".") -> bool:
    if "_" in text or not text.isascii():  # which are numbers in Python alone
        return False
    try:
        value = float(text if decimal == "." else text.replace(decimal, "."))
    except ValueError:
        return False
    return bool(np.isfinite(value)) and (not among or value in among)


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Files of one layout; `parser` makes a table of their lines, and `to_rows` samples of a table.

    BadValue of `to_rows` becomes a JobError with the line, BadFeature one with the first line of the block.

    Plain local files are cut into ranges of bytes, read in any order. Compressed ones, and those at a URL, are read
    from their start, so each worker reads all of it, parses its share of each block and leaves the mixing to the
    shuffle buffer.
    """

    paths: Sequence[File]
    layout: Layout
    to_rows: Callable[[pa.Table, Layout], Samples]
    has_header: bool = False
    block_bytes: int = BLOCK_BYTES
    parser: Callable[[File, Block, Layout], pa.Table] = parse
    rows: int | None = None  # samples, where they were counted before

    @property
    def where(self) -> str:
        """The first file, for errors that name none."""
        return str(self.paths[0])

    def check(self) -> None:
        """Parse the start of every file."""
        for _ in self.looks():
            pass

    def looks(self) -> Iterator[tuple[File, Block, pa.Table]]:
        """The first lines of each file that has any, and the table that they are. JobError where none has."""
        has_lines = False
        for path in self.paths:
            for block in read_blocks(path, LOOK_BYTES):
                if self.has_header and block.first_line == 1:
                    block = without_lines(block, 1)
                if not block.is_blank:
                    has_lines = True
                    yield path, block, self.parser(path, block, self.layout)
                    break
        if not has_lines:
            raise JobError(where=self.where, reason="no line of data in the file")

    @cached_property
    def _sizes(self) -> dict[Path, int]:
        """Bytes of each file when parts of it were first shared out."""
        return {}

    def num_rows(self) -> int | None:
        """The number of rows, which reading alone tells."""
        return self.rows

    def fingerprint(self) -> dict[str, object]:
        """Return what changes when a file is edited, added or moved: hashes of the files; empty for URLs."""
        return fingerprint(self.paths)

    def load(self) -> Samples:
        """Read all samples of the files."""
        tables = (read_tables(path, self.layout, skip_lines=int(self.has_header)) for path in self.paths)
        return Samples.concat([self.to_rows(table, self.layout) for part in tables for table in part])

    def blocks(self, rank: int, world_size: int, shuffle: np.random.Generator | None) -> Iterator[Samples]:
        """Iterate over this worker's blocks of samples."""
        gzipped = {path for path in self.paths if check_readable(path)}
        ranges = self._ranges([Path(path) for path in self.paths if path not in gzipped], world_size)
        if shuffle is not None:
            ranges = [ranges[i] for i in shuffle.permutation(len(ranges))]
        for path, start, end in ranges[rank::world_size]:
            yield from self._parse_range(path, start, end)
        unpacked = (
            (path, block) for path in self.paths if path in gzipped for block in read_blocks(path, self.block_bytes)
        )
        lines = 0
        for of, block in unpacked:  # a small file is one block, and may have fewer lines than there are workers
            if self.has_header and block.first_line == 1:
                block = without_lines(block, 1)
            own, count = _share(block, (rank - lines) % world_size, world_size)
            lines += count  # the next block's begin at the worker that would have had the next line
            yield from self._parse(of, own)

    def _ranges(self, paths: list[Path], world_size: int) -> list[tuple[Path, int, int]]:
        """(path, start, end) in bytes; about 32 or more for each worker, so that shares differ by little.

        Each has a line of data: else a share could be empty in some epochs, as the order falls out.
        """
        sizes = [_size(path) for path in paths]
        for path, size in zip(paths, sizes, strict=True) if world_size > 1 else ():
            if (before := self._sizes.setdefault(path, size)) != size:  # parts of other ranges: rows twice, or never
                reason = f"has {size} bytes, and had {before} when others began to read their parts of it"
                raise JobError(where=str(path), reason=f"{reason}; write new lines into another file, and train anew")
        step = max(1, min(self.block_bytes, sum(sizes) // (32 * world_size)))
        whole = step == self.block_bytes  # which no line is longer than: look for none among a large file's ranges
        ranges = []
        for path, size in zip(paths, sizes, strict=True):
            starts = range(0, size, step) if whole else _line_starts(path, size, step, self.has_header)
            ranges += [(path, start, end) for start, end in pairwise((*starts, size))]
        return ranges

    def _parse_range(self, path: Path, start: int, end: int) -> Iterator[Samples]:
        begin, text = read_range(path, start, end)
        if begin == 0:
            yield from self._parse(path, Block(1, text))
            return
        try:
            yield from self._parse(path, Block(2, text))  # not the first line: that is all that matters yet
        except JobError:  # its line number is wrong: count the lines before, which is slow, and parse again
            yield from self._parse(path, Block(1 + count_lines(path, begin), text))

    def _parse(self, path: File, block: Block) -> Iterator[Samples]:
        if self.has_header and block.first_line == 1:
            block = without_lines(block, 1)
        if not block.is_blank:
            try:
                yield self.to_rows(self.parser(path, block, self.layout), self.layout)
            except BadValue as error:
                raise JobError(where=f"{path}:{line_of(block, error.row)}", reason=str(error)) from None
            except BadFeature as error:  # of a column of lines of JSON, whose first ones tell its type
                raise JobError(where=f"{path}:{line_of(block, 0)}", reason=str(error)) from None


@cache  # the same in each epoch, and in each part of one that is dealt out; a few numbers each
def _line_starts(path: Path, size: int, step: int, has_header: bool) -> tuple[int, ...]:
    return tuple(line_starts(path, (max(int(has_header), start) for start in range(0, size, step))))


def _size(path: Path) -> int:
    with reading(path):
        return path.stat().st_size
