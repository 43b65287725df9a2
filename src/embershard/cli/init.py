"""`embershard init`: a job file for a table, written from a look at its first rows."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, cast
from uuid import UUID

import typer

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
from embershard.worker.data.text import THOUSANDS, read_header
from embershard.worker.job.load import load_job

ROWS = 20_000  # that are looked at
_BYTES = 2**22
_FILES = 8  # of a folder or pattern, from all over it: the first may be of one day, or have few rows
_LABELS = ("label", "click", "clicked", "is_click", "target", "y", "conversion", "purchase")
_TIME = re.compile(r"(^|_)(time|timestamp|date|datetime|ts|day)(?P<unit>_(s|ms|us|ns))?$", re.I)
_TIME_TEXT = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d.*)?$")
_NOUNS = "user|item|product|ad|movie|book|song|store|brand|category|code|zip|hour|device"
_NO_ID = "([a-z]*(b|pa|val)|ac|andro|cov|flu|gr|hum|liqu|sol)id"  # of amounts: maxbid, prepaid, valid
_ID = re.compile(rf"(^|_)({_NOUNS}|id|(?!{_NO_ID}s?(_|$))[a-z]+id)s?(_|$)", re.I)
_WORD_ENDS = re.compile(r"[\W_]+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*", re.I)
_UNIT = re.compile(r"[-+]?[$€£¥₹]\s*-?\d[\d.,]*|[-+]?\d[\d.,]*\s*[$€£¥₹%]")
_MISSING = {"nan", "na", "n/a", "null", "none", "?", "-", "inf", "+inf", "-inf", "infinity", "-infinity", r"\n"}
_RESERVED = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}
_FEW = 100  # distinct integers that are categories
_FIRST_TIME = 10_000_000  # a smaller number in a column such as watch_time is a duration
_A_TIME = "# NAME: left out, a time"
# the last two are of pandas
_ROW_NUMBERS = ("id", "index", "row", "row_id", "uuid", "(column 1)", "unnamed: 0", "__index_level_0__")
_YES = {"yes", "true", "y", "t", "positive", "pos", "clicked", "bought", "won", "+1"}  # of labels: stand for 1
_NO = {"no", "false", "n", "f", "negative", "neg"}


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


def init(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="Parquet, CSV, TSV or lines of JSON, also compressed (.gz, .zst); or a folder of such files, "
            "or a pattern in quotes, 'clicks/**/*.parquet' say.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The job file to write.")] = Path("job.yaml"),
    label: Annotated[
        str | None, typer.Option(help="Column of the label.  [default: a column of zeros and ones]")
    ] = None,
    user: Annotated[
        str | None, typer.Option(help="Column of the user, of interactions without a label; needs --item.")
    ] = None,
    item: Annotated[str | None, typer.Option(help="Column of the item that the user took.")] = None,
    time: Annotated[
        str | None, typer.Option(help="Column of the interaction's time.  [default: the column that looks like one]")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite an existing job file.")] = False,
) -> None:
    """Read the first rows of a data file or folder, and write a commented job file that trains on it."""
    if (user is None) != (item is None) or (time is not None and user is None) or (label and user):
        reason = "interactions have --user and --item, and perhaps --time, and no --label"
        raise typer.BadParameter(reason)
    if out.exists() and not replace:
        raise CannotInit(path=str(out), reason="is there already; name another file with -o, or give --replace")
    look = look_at(data)
    folder = out.absolute().parent
    if user is not None and item is not None:
        text = interactions_text(data, look, {"user": user, "item": item, "time": time}, folder)
    else:
        text = job_text(data, look, label, folder)
    before = out.read_bytes() if out.exists() else None
    try:
        _write(out, text, before)
    except OSError as error:
        raise CannotInit(path=str(out), reason=f"cannot be written: {error.strerror}") from None
    except UnicodeEncodeError:  # the bytes of a name that this locale has no characters for
        reason = "cannot be written: the data file's name is not text in this locale; set LC_ALL=C.UTF-8"
        raise CannotInit(path=str(out), reason=reason) from None
    typer.echo(f"{out}: {len(look.columns)} columns of {data}; train with: embershard train {out}")


def _write(out: Path, text: str, before: bytes | None) -> None:
    """Write a job file, and read it; the file of before, or none, is there where that fails."""
    try:
        out.write_bytes(text.encode())  # as a job file is read, whatever the locale is
        load_job(out).data.look(out.parent)
    except Exception:
        with contextlib.suppress(OSError):
            out.unlink(missing_ok=True) if before is None else out.write_bytes(before)
        raise


def look_at(path: Path) -> Look:
    """Read the first rows of a file, or of some in a folder or of a pattern.

    CannotInit says why there are none; JobError where a file cannot be read, or the folder has none of one format.
    """
    files = _files(path)
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
        return date.fromisoformat(value) if _TIME_TEXT.match(value) else value
    return value


def _files(data: Path) -> list[Path]:
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
    lines = next(read_blocks(path, _BYTES)).text.removeprefix(b"\xef\xbb\xbf").split(b"\n")
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
    text = next(read_blocks(path, _BYTES)).text
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
        all(_NUMBER.fullmatch(cell.replace(",", ".")) or cell.lower() in _MISSING for cell in own if cell)
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
    if not others or not {cell.lower() for cell in others} <= _MISSING:
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


def job_text(data: Path, look: Look, label: str | None, folder: Path) -> str:
    """Return the job file for a table. CannotInit where no column can be the label, or none is left for features."""
    label, is_named = _label(data, look, label), label is not None
    rows, texts = len(look.columns[label]), _label_values(look.columns[label], named=is_named)
    shared = _shared_tables({name: values for name, values in look.columns.items() if name != label})
    features: list[str] = []
    skipped, times = [], []
    for name, values in look.columns.items():
        if name == label:
            continue
        found = _leak(name, values, look.columns[label])
        if not found and name.lower() in _ROW_NUMBERS and _are_distinct(values, look.starts):
            found = "# NAME: left out, it numbers the rows"
        if name in look.partial:
            found = "# NAME: left out, some files have no such column"
        found = found or _feature(name, values, rows, shared.get(name))
        if found.startswith("#"):
            skipped.append(f"  {found.replace('NAME', name if name.isprintable() else json.dumps(name))}")
            times += [name] if found == _A_TIME else []
        else:
            features.append(f"  {_name(name)}: {found}")
    if any(name.startswith(" ") for name in look.columns):
        skipped.append("  # a blank in front of a name or a value is a part of it, also in the rows of a served model")
    if not features:
        raise CannotInit(path=str(data), reason="no column but the label is left to learn from")
    if all("type: number" in feature for feature in features):  # every model has embeddings
        features = [f"{line.partition(': {')[0]}: {{type: number, bucketise: 10}}" for line in features]
    split = "{by: random"
    if times := [name for name in times if None not in look.columns[name]]:
        finest = max(times, key=lambda name: len(set(look.columns[name])))  # of an event, and no date of birth
        files = _files(data)
        is_whole = len(files) == 1 and rows < ROWS and files[0].stat().st_size < _BYTES
        if not is_whole or _parts_by_time(look.columns[finest]):
            split = f"{{by: time, column: {_name(finest)}"
    path = os.path.relpath(data.absolute(), folder)
    seen = f"its first {rows:,} rows" if len(look.starts) == 1 else f"{rows:,} rows of {len(look.starts)} of its files"
    lines = [
        f"# Written by `embershard init {data.name}` from {seen}. Check what each column is.",
        "model: {name: deepfm, hidden: [64, 32]}",
        "data:",
        "  reader: tabular",
        f"  train: {json.dumps(path)}",
        *(f"  {field}: {json.dumps(value)}" for field, value in look.settings.items()),
        f"  label: {_name(label)}",
        *([f"  label_values: {json.dumps(texts, ensure_ascii=False)}     # of 0, and of 1: check it"] if texts else []),
        f"  split: {split}, valid: 0.1, test: 0.1}}     # or name files: valid: valid.csv, test: test.csv",
        "features:                             # text and ids are hashed to 62 bits: no vocabulary is needed",
        *features,
        *skipped,
        "embedding:",
        "  dim: 16",
        "  optimizer: {name: adagrad, lr: 0.05}",
        "dense:",
        "  optimizer: {name: adam, lr: 0.001}",
        "train:",
        f"  batch_size: {4096 if sum(file.stat().st_size for file in _files(data)) > 2**25 else 512}",
        "  epochs: 5",
        "  early_stop: {patience: 2}           # ends when so many evaluations in a row are not better",
        "workers: 1",
        "shards: 2",
    ]
    return "\n".join(lines) + "\n"


def interactions_text(data: Path, look: Look, columns: Mapping[str, str | None], folder: Path) -> str:
    """Return the job file for a table of interactions. CannotInit where it has not the columns, or no one time."""
    known = ", ".join(look.columns)
    for name in columns.values():
        if name is not None and name not in look.columns:
            raise CannotInit(path=str(data), reason=f"no column {name!r} (there are: {known})")
    taken = {columns["user"], columns["item"]}
    times = [
        name
        for name, values in look.columns.items()
        if name not in taken and _feature(name, values, len(values), None) == _A_TIME
    ]
    if columns["time"] is None and len(times) != 1:
        found = f"{len(times)} columns of times: {', '.join(times)}" if times else f"no column of times in {known}"
        raise CannotInit(path=str(data), reason=f"{found}; name that of the interaction by --time")
    rows = len(next(iter(look.columns.values())))
    named = ", ".join(f"{what}: {_name(name or times[0])}" for what, name in columns.items())
    settings = {field: value for field, value in look.settings.items() if field in ("encoding", "delimiter")}
    remarks = [line for what in ("user", "item") for line in _check_names(data, what, str(columns[what]), look)]
    lines = [
        f"# Written by `embershard init {data.name}` from its first {rows:,} rows.",
        "model: {name: two_tower}              # or simplex, with negatives: 8 and history: 30 below",
        "data:",
        "  reader: lists",
        f"  train: {json.dumps(os.path.relpath(data.absolute(), folder))}",
        f"  columns: {{{named}}}",
        *remarks,
        *(f"  {field}: {json.dumps(value)}" for field, value in settings.items()),
        "  hold_out: 1                         # each user's latest item is the test; or name a file: test: test.csv",
        "embedding:",
        "  dim: 32",
        "  optimizer: {name: adam, lr: 0.001}",
        "train:",
        "  batch_size: 512",
        "  epochs: 20",
        "  early_stop: {patience: 3}           # ends when so many evaluations in a row are not better",
        "workers: 1",
        "shards: 2",
    ]
    return "\n".join(lines) + "\n"


def _check_names(data: Path, what: str, name: str, look: Look) -> list[str]:
    """Remarks on a column of users or items. CannotInit where these are floats, which no request has."""
    values = look.columns[name]
    texts = [str(text) for text in cast(list[str], look.settings.get("missing", []))] if None in values else []
    words = sorted({value for value in values if isinstance(value, str) and value.strip().lower() in _MISSING})
    if (floats := [value for value in values if isinstance(value, float)]) and not any(texts):
        reason = f"the {what}s in column {name!r} are floats, as {floats[0]}: save integers (of pandas Int64)"
        raise CannotInit(path=str(data), reason=reason)
    words += [text for text in texts if text and floats]
    return [f"  # {json.dumps(word)} is read as the {what} of that name: leave its rows out" for word in words[:1]]


def _parts_by_time(times: Sequence[Any]) -> bool:
    """Whether the latest tenth of all rows, and the tenth before it, are parts of their own: not where few days are."""
    ordered = sorted(times)
    valid, test = (ordered[math.ceil(share * (len(ordered) - 1))] for share in (0.8, 0.9))
    return bool(ordered[0] < valid < test)


def _label(data: Path, look: Look, label: str | None) -> str:
    known = ", ".join(look.columns)
    if label is not None:
        if label not in look.columns:
            raise CannotInit(path=str(data), reason=f"no column {label!r} (there are: {known})")
        return label
    binary = [name for name, values in look.columns.items() if {*map(_as_label, values)} == {0.0, 1.0}]
    two = [name for name, values in look.columns.items() if _label_values(values)]
    named = [name for name in (*binary, *two) if _words(name).lower() in _LABELS]
    of_texts = [name for name in two if any(isinstance(value, str) for value in look.columns[name])]
    two = of_texts or two  # -1 and 1 may be something else
    for name, values in [] if named else look.columns.items():
        present = {_as_label(value) for value in values if value is not None}
        if _words(name).lower() in _LABELS and present == {0.0, 1.0}:
            reason = f"column {name!r} has no value in {values.count(None):,} of {len(values):,} rows"
            remedy = "a label may not be missing: leave these rows out, or name another label by --label"
            raise CannotInit(path=str(data), reason=f"{reason}, and {remedy}")
    if len(binary) > 1 and not named:
        reason = f"{len(binary)} columns of zeros and ones: {', '.join(binary)}; name the label by --label"
        raise CannotInit(path=str(data), reason=reason)
    if not named and not binary and len(two) != 1:
        others = f", and {len(two)} of two texts, or of -1 and 1: {', '.join(two)}" if two else ""
        raise CannotInit(
            path=str(data),
            reason=f"no column of zeros and ones{others}; name the label by --label, or, of interactions, which "
            f"have none, their columns by --user and --item (there are: {known})",
        )
    return (named or binary or two)[0]


def _are_distinct(values: Sequence[object], starts: Sequence[int]) -> bool:
    """Whether no value is in a file twice, of more than a few."""
    ends = (*starts[1:], len(values))
    return len(values) > _FEW and all(
        len(set(map(str, values[start:end]))) == end - start for start, end in zip(starts, ends, strict=True)
    )


def _leak(name: str, values: Sequence[object], labels: Sequence[object]) -> str:
    """A comment on a column that a model must not read to predict the label; the empty text of any other."""
    if _words(name).lower() in _LABELS and ({*map(_as_label, values)} == {0.0, 1.0} or _label_values(values)):
        return "# NAME: left out, it looks like a label, too: data.label takes a list of labels"
    if len(values) > _FEW and not any(isinstance(value, list | dict) for value in (*values, *labels)):
        pairs = set(zip(values, labels, strict=True))
        if len(pairs) == len(set(values)) == len(set(labels)) == 2:
            return "# NAME: left out, it tells the label in each of these rows"
    return ""


def _label_values(values: Sequence[object], *, named: bool = False) -> list[str]:
    """The texts of a label that stand for 0 and for 1, of two texts or of -1 and 1; none of other labels.

    Of a label that the user has `named`, they may be any two integers but 0 and 1.
    """
    texts = {value for value in values if isinstance(value, str)}
    if not texts:
        numbers = sorted({value for value in values if type(value) is int})
        is_whole = all(value is None or type(value) is int for value in values)
        found = is_whole and len(numbers) == 2 and numbers != [0, 1] and (named or numbers == [-1, 1])
        return [str(number) for number in numbers] if found else []
    if len(texts) != 2 or any(value is not None and not isinstance(value, str) for value in values):
        return []
    first, second = sorted(texts)
    if first.strip().lower() in _YES or second.strip().lower() in _NO:
        first, second = second, first
    return [first, second]


def _as_label(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _shared_tables(columns: Mapping[str, Sequence[object]]) -> dict[str, str]:
    """List column -> the column of single values that most of its values are in, where there is one such alone.

    Numbers below 100 say nothing: those of all columns are alike.
    """
    single: dict[str, set[str]] = {}
    lists: dict[str, set[str]] = {}
    for name, values in columns.items():
        parts = [part for value in values for part in (value if isinstance(value, list) else [value])]
        if not any(isinstance(value, list) for value in values):
            texts = [value for value in values if isinstance(value, str)]
            is_list = bool(texts) and sum("|" in text for text in texts) * 4 > len(texts)
            parts = [part for text in texts for part in text.split("|")] if is_list else parts
            if not is_list:
                single[name] = {str(value) for value in values if isinstance(value, str | int) and not _is_small(value)}
                continue
        if all(part is None or isinstance(part, str | int) for part in parts):
            lists[name] = {str(part) for part in parts if part is not None and not _is_small(part)}
    found = {}
    for name, own in lists.items():
        common = {other: len(own & values) for other, values in single.items()}
        like = [other for other, count in common.items() if count >= 5 and count * 2 > len(own)]
        if len(like) == 1:
            found[name] = like[0]
    return found


def _is_small(value: object) -> bool:
    text = str(value)
    return isinstance(value, bool) or (text.lstrip("-").isdecimal() and abs(int(text)) < _FEW)


def _feature(name: str, values: Sequence[object], rows: int, table: str | None = None) -> str:
    """The section of a column, or a comment that says why it is left out."""
    present = [value for value in values if value is not None]
    if not present:
        return "# NAME: left out, it is empty in these rows"
    if any(isinstance(value, list) for value in present):
        if any(isinstance(one, list | dict | tuple) for value in present if isinstance(value, list) for one in value):
            return "# NAME: left out, it has lists of lists or of objects"
        parts = [one for value in present if isinstance(value, list) for one in value]
        if any(isinstance(one, float) for one in parts):
            shown = next(value for value in present if isinstance(value, list) and value)[:2]
            reason = f"# NAME: left out, it has lists of floats, as {shown}: save ids as integers (of pandas Int64), "
            return reason + "or write each number into a column of its own, or name it as the weights of a list"
        if not parts:
            return "# NAME: left out, its lists are empty in these rows"
        return _list(present, table)
    if isinstance(first := present[0], dict):
        return f"# NAME: left out, its values are objects: write their fields ({', '.join(first)}) as columns"
    if any(isinstance(value, dict | bytes | time | timedelta | UUID) for value in present):
        return f"# NAME: left out, its values are of type {type(present[0]).__name__}"
    distinct = set(present)
    if isinstance(present[0], date | datetime) or (_is_time(name, present) and len(distinct) > _FEW):
        return _A_TIME
    if _TIME.search(_words(name)) and len(distinct) > _FEW and isinstance(present[0], str):
        return "# NAME: left out, its times are not written as 2026-01-31 12:00:00"
    if len(distinct) == 1:
        return "# NAME: left out, it has one value in these rows"
    if all(isinstance(value, bool | int) for value in present):
        if len(distinct) <= _FEW or _ID.search(_words(name)):
            return "{}"
        return _number([float(value) for value in present if isinstance(value, int)])
    if all(isinstance(value, int | float) for value in present):
        if _ID.search(_words(name)) and all(isinstance(value, float) and value.is_integer() for value in present):
            return f"# NAME: left out, its ids are floats, as {present[0]}: save integers (of pandas Int64)"
        return _number([float(value) for value in present if isinstance(value, int | float)])
    return _of_text([str(value) for value in present], rows, table)


def _words(name: str) -> str:
    """A column's name as user_id, where it is written as userId or User ID."""
    return _WORD_ENDS.sub("_", name).strip("_")


def _is_time(name: str, values: Sequence[object]) -> bool:
    """Whether a column has texts of times, or has the name of times and numbers that may be some."""
    if any(isinstance(value, str) for value in values):
        return all(isinstance(value, str) and _TIME_TEXT.match(value) for value in values)
    named = _TIME.search(_words(name))
    numbers = [value for value in values if isinstance(value, int | float)]
    if named is None:
        return False
    return (named.start() == 0 and not named["unit"]) or min(numbers, default=0) >= _FIRST_TIME


def _number(values: Sequence[float]) -> str:
    ordered = sorted(values)
    middle, skewed = ordered[len(ordered) // 2], ordered[-1] > 20 * max(ordered[len(ordered) // 2], 1e-9)
    transform = "[log, standardise]" if ordered[0] >= 0 and (skewed or middle == 0) else "standardise"
    return f"{{type: number, transform: {transform}}}"


def _list(values: Sequence[object], table: str | None) -> str:
    longest = max(len(value) for value in values if isinstance(value, list))
    section = f"{{type: list, {_of_table(table)}max_length: {max(longest, 1)}, too_long: truncate}}"
    return f"{section}     # or type: sequence{_why(table)}"


def _of_table(table: str | None) -> str:
    return "" if table is None else f"table: {_name(table)}, "


def _why(table: str | None) -> str:
    """What a reader of the job file must know of a shared table."""
    return "" if table is None else f"; most values are those of column {table}, hence its table"


def _of_text(values: Sequence[str], rows: int, table: str | None) -> str:
    if sum("|" in value for value in values) * 4 > len(values):
        longest = max(value.count("|") + 1 for value in values)
        section = f"{{type: list, separator: '|', {_of_table(table)}max_length: {longest}, too_long: truncate}}"
        return section + ("" if table is None else f"     #{_why(table).removeprefix(';')}")
    bracketed = [value for value in values if value.startswith("[") and value.endswith("]")]
    if len(bracketed) * 10 >= len(values):
        return f"# NAME: left out, its lists are in brackets, as {bracketed[0][:40]}: write them as a|b"
    if sum(bool(THOUSANDS.fullmatch(value)) for value in values) * 2 > len(values):
        shown = next(value for value in values if THOUSANDS.fullmatch(value))
        return f"# NAME: left out, its numbers have thousands separators, as {shown}: write them without"
    with_unit = [value for value in values if _UNIT.fullmatch(value)]
    if len(with_unit) * 2 > len(values) and len(set(values)) > _FEW:
        return f"# NAME: left out, its numbers have a unit, as {with_unit[0]}: write them without"
    if sum(map(len, values)) > 60 * len(values) and len(set(values)) * 2 > rows:
        return "# NAME: left out, it is free text"
    return "{}"


def _name(name: str) -> str:
    """A column's name in YAML."""
    is_plain = re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) and name.lower() not in _RESERVED
    return name if is_plain else json.dumps(name, ensure_ascii=False)
