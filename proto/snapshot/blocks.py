"""Rows of a table in one file of a snapshot: safetensors with `ids`, `rows` and `state`, sorted by bucket."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping
from hashlib import sha256

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from embershard.proto.arrays import Floats, Ids
from embershard.proto.errors import SnapshotDamaged
from embershard.proto.snapshot.manifest import BlockFile, TableBlocks
from embershard.proto.snapshot.storage import Storage

FILE_BYTES = 64 * 2**20  # large enough for object stores, small enough to hold, and to read for a few buckets
_DTYPES = {"int64": "I64", "float32": "F32"}


def rows_per_file(dim: int, num_state: int) -> int:
    """Rows of a file of about FILE_BYTES."""
    return max(1, FILE_BYTES // (8 + 4 * (dim + num_state)))


def block_header(arrays: Mapping[str, npt.NDArray[np.generic]], about: Mapping[str, str]) -> bytes:
    """Write the head of a safetensors file; its arrays follow in this order, little endian, C order.

    Written here, since the library wants all of a file in memory once more.
    """
    entries: dict[str, object] = {"__metadata__": dict(about)}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        entries[name] = {"dtype": _DTYPES[array.dtype.name], "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_block(storage: Storage, folder: str, file: BlockFile, table: TableBlocks) -> tuple[Ids, Floats, Floats]:
    """(ids (n,), rows (n, dim), state (n, num_state)) of a file of the snapshot in `folder`; SnapshotDamaged."""
    path = posixpath.join(folder, file.path)
    try:
        data = storage.read(path)
    except FileNotFoundError:
        raise SnapshotDamaged(path=storage.at(path), reason="the file is missing") from None
    if len(data) != file.bytes:
        raise SnapshotDamaged(path=storage.at(path), reason=f"it has {len(data)} bytes, not {file.bytes}")
    if sha256(data).hexdigest() != file.sha256:
        raise SnapshotDamaged(path=storage.at(path), reason="its sha256 is not the manifest's")
    try:
        arrays = safetensors.numpy.load(data)
    except safetensors.SafetensorError as error:
        raise SnapshotDamaged(path=storage.at(path), reason=str(error)) from None
    want = {
        "ids": ((file.rows,), np.int64),
        "rows": ((file.rows, table.spec.dim), np.float32),
        "state": ((file.rows, table.num_state), np.float32),
    }
    for key, (shape, dtype) in want.items():
        array = arrays.get(key)
        if array is None or array.shape != shape or array.dtype != dtype:
            got = "missing" if array is None else f"{array.shape} {array.dtype}"
            reason = f"{key!r} is {got}, not {shape} {np.dtype(dtype)}"
            raise SnapshotDamaged(path=storage.at(path), reason=reason)
    return arrays["ids"], arrays["rows"], arrays["state"]
