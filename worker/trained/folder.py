"""The folder of an export: its files, how they are written, and what is refused when it is read.

model.safetensors      state_dict of the model with plain nn.Embedding: tables, dense weights and buffers
tables.safetensors     tables of hashed ids, which are no matrix: NAME.ids (N,) int64, ascending, and NAME.rows
                       (N, dim) float32 in the same order
trained.safetensors    NAME (rows,) bool: which rows of model.safetensors were trained; others have first values
dense.onnx             the dense part, with rows as inputs (worker/trained/onnx.py)
dense.int8.safetensors its linear layers in int8 (worker/trained/quantise.py)
export.json            format version, job, schema, what is done with columns, tables, files; put there last
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from embershard.proto.errors import BadExport, EmbershardError, Status
from embershard.proto.snapshot import folders
from embershard.proto.snapshot.sealed import check_json, seal_json
from embershard.proto.spec import Initializer
from embershard.worker.data.batch import Field, IdTable, Schema

MODEL, TABLES, TRAINED, FACTS = "model.safetensors", "tables.safetensors", "trained.safetensors", "export.json"
ONNX, INT8 = "dense.onnx", "dense.int8.safetensors"
UNFINISHED = ".embershard-unfinished-"  # begins the name of an export's folder until it is whole; no user's own
FORMAT, VERSION = "embershard-export", 2

DTYPES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


class CannotExport(EmbershardError):
    """A model that cannot be written down, or a place that does not take it."""

    status = Status.FAILED_PRECONDITION
    template = "cannot write {path}: {reason}"


def _not_written(path: Path, error: OSError) -> CannotExport:
    """What the system says of a place, and what to do."""
    remedy = "free some space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "correct that"
    reason = f"{error.strerror or error}; export to another folder, or {remedy}"
    return CannotExport(path=str(path), reason=reason)


@dataclass(frozen=True, slots=True)
class TableFacts:
    """One table of an export."""

    file: str
    dim: int
    rows: int  # in the file
    trained: int  # of these
    initializer: Mapping[str, str | float] = field(default_factory=dict)  # of all other rows
    row_seed: str = ""  # 16 hexadecimal digits

    def build_initializer(self) -> Initializer:
        """The initializer. ValueError where it is none."""
        settings = {name: float(value) for name, value in self.initializer.items() if name != "name"}
        return Initializer.of(str(self.initializer.get("name")), settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportFacts:
    """The contents of export.json: the job, its schema and inputs, and facts of each table."""

    job: Mapping[str, Any]
    schema: Schema
    inputs: Mapping[str, Any] | None  # what is done with columns; None where the reader does not tell
    tables: Mapping[str, TableFacts]  # of hashed or numbered ids on shards, by module
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)  # bytes and sha256; of an export that is read
    written: tuple[int, int] = (0, 0)  # inode and time of the export.json that was read: equal exports have others


@dataclass(frozen=True, slots=True)
class TensorStream:
    """A tensor that is written portion by portion."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    portions: Iterable[torch.Tensor]  # one behind the other they are all of it

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorStream:
        """One that is in memory."""
        return cls(tensor.dtype, tuple(tensor.shape), (tensor,))

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def check_tensors(path: Path, values: Mapping[str, object]) -> None:
    """CannotExport where a value of a state_dict is nothing that safetensors can hold."""
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or value.dtype not in DTYPES:
            found = value.dtype if isinstance(value, torch.Tensor) else f"{type(value).__name__}, no tensor"
            reason = f"{name} of the model's state_dict is {found}, which safetensors cannot hold"
            raise CannotExport(path=str(path), reason=f"{reason}: keep it as another tensor, or out of the state_dict")


def make_folder(path: Path) -> None:
    """Make the folder of an export. CannotExport if it fails."""
    try:
        folders.make_folder(path)
    except OSError as error:
        raise _not_written(path, error) from None


@contextlib.contextmanager
def export_into(out: Path) -> Iterator[Path]:
    """Give an empty folder to write the files of an export to; once all are there, they replace the export in `out`.

    An export that fails or is killed leaves the one before as it was: a server that starts meanwhile loads it.
    CannotExport names files as they are called in `out`.
    """
    make_folder(out)
    for killed in out.glob(f"{UNFINISHED}*"):  # as large as an export
        shutil.rmtree(killed, ignore_errors=True)
    try:
        unfinished = tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=out)
    except OSError as error:
        raise _not_written(out, error) from None
    with unfinished as name:
        try:
            yield Path(name)
        except CannotExport as error:
            path, reason = out / Path(str(error.fields["path"])).name, str(error.fields["reason"])
            raise CannotExport(path=str(path), reason=reason) from error.__cause__
        remove_file(out / FACTS)  # a folder with files of two exports is none
        for file in (MODEL, TABLES, TRAINED, ONNX, INT8, FACTS):
            _replace(Path(name) / file, out / file)


def _replace(new: Path, path: Path) -> None:
    if not new.exists():
        remove_file(path)  # of an earlier export, whose weights these are not
        return
    try:
        move(new, path)
    except OSError as error:
        raise _not_written(path, error) from None


def remove_file(path: Path) -> None:
    """Remove what may be there. CannotExport where it cannot be removed."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _not_written(path, error) from None


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor | TensorStream]) -> None:
    """Tensors by name as one safetensors file; whole or not there. CannotExport where the disk does not take it.

    Written here, since the library wants all of a file in memory.
    """
    streams = {name: t if isinstance(t, TensorStream) else TensorStream.of(t) for name, t in tensors.items()}
    # 8-byte numbers first, so that all are aligned
    streams = dict(sorted(streams.items(), key=lambda item: -item[1].dtype.itemsize))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers opens no file without it
    end = 0
    for name, stream in streams.items():
        start, end = end, end + stream.num_bytes
        entries[name] = {"dtype": DTYPES[stream.dtype], "shape": stream.shape, "data_offsets": [start, end]}
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)

    def parts() -> Iterable[bytes | memoryview]:
        yield len(head).to_bytes(8, "little") + head
        for stream in streams.values():
            for portion in stream.portions:
                yield _bytes_of(portion)

    _write(path, parts())


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("wb") as file:
            for part in parts:
                file.write(part)
        move(new, path)
    except OSError as error:
        raise _not_written(path, error) from None
    finally:
        new.unlink(missing_ok=True)


def move(new: Path, path: Path) -> None:
    """Put a finished file in the place of another one, on the disk: a power cut leaves one of them, whole. OSError."""
    folders.sync(new)
    os.replace(new, path)
    folders.sync(path.parent)


def _bytes_of(tensor: torch.Tensor) -> bytes | memoryview:
    if not tensor.numel():
        return b""
    flat: npt.NDArray[np.uint8] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.data


def write_facts(out: Path, facts: ExportFacts) -> None:
    """Write export.json, once all other files are there; it tells their sizes and digests."""
    files = {path.name: path for path in (out / name for name in (MODEL, TABLES, TRAINED, ONNX, INT8)) if path.exists()}
    told = {
        "format": FORMAT,
        "version": VERSION,
        "job": facts.job,
        "schema": asdict(facts.schema),
        "inputs": facts.inputs,
        "tables": {name: asdict(table) for name, table in facts.tables.items()},
        "files": {name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for name, path in files.items()},
    }
    _write(out / FACTS, [seal_json(json.dumps(told, indent=1).encode())])


def read_facts(folder: Path, *, verify: bool = False) -> ExportFacts:
    """Return what an export says, once its files are found to be there and whole; `verify` reads all of their bytes.

    BadExport names the file, and what is wrong with it.
    """
    path = folder / FACTS
    try:
        with path.open("rb") as file:
            data, written = file.read(), os.fstat(file.fileno())
        told = json.loads(data)
    except FileNotFoundError:
        reason = "no such folder"
        if folder.is_dir():
            reason = "no such file: this is no export, one that did not end, or one that another is replacing just now"
        raise BadExport(path=str(path if folder.is_dir() else folder), reason=reason) from None
    except OSError as error:
        raise BadExport(path=str(path), reason=f"cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise BadExport(path=str(path), reason=f"damaged, it is no JSON ({error}): export the model again") from None
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        reason = f"its format is not {FORMAT}: export the model again, or name the folder of an export"
        raise BadExport(path=str(path), reason=reason)
    if told.get("version") != VERSION:
        reason = f"its version is {told.get('version')!r}, this program reads {VERSION}: export the model again"
        raise BadExport(path=str(path), reason=reason)
    try:
        check_json(data, told)
        facts = ExportFacts(
            job=dict(told["job"]),
            schema=_schema(told["schema"]),
            inputs=told["inputs"],
            tables={name: TableFacts(**table) for name, table in told["tables"].items()},
            files={name: (int(one["bytes"]), str(one["sha256"])) for name, one in told["files"].items()},
            written=(written.st_ino, written.st_mtime_ns),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadExport(path=str(path), reason=f"{type(error).__name__}: {error}") from None
    for name, (size, sha256) in facts.files.items():
        part = folder / Path(name).name
        if not part.is_file():
            raise BadExport(path=str(part), reason="no such file, which export.json names")
        if part.stat().st_size != size:
            raise BadExport(path=str(part), reason=f"it has {part.stat().st_size} bytes, not {size}")
        if verify and _sha256(part) != sha256:
            raise BadExport(path=str(part), reason="its sha256 is not that of export.json")
    return facts


def _schema(told: Mapping[str, Any]) -> Schema:
    tuples = {name: tuple(told.get(name, ())) for name in ("features", "labels", "numbers")}  # earlier: no numbers
    fields = tuple(Field(**one) for one in told["fields"])
    tables = tuple(IdTable(**one) for one in told["tables"])
    return Schema(**{**told, **tuples, "fields": fields, "tables": tables})


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
