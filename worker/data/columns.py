"""Which column of a table of clicks is what, and the samples that its values make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from numba import types, uint64

from embershard.proto.arrays import Ids
from embershard.proto.compiled.jit import compiled
from embershard.proto.errors import JobError
from embershard.proto.routing import mix64
from embershard.worker.data.batch import Samples, Schema
from embershard.worker.data.text import Kind, Layout, column

_FNV_OFFSET, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3
# np.frombuffer gives arrays that cannot be written
_INTS = types.Array(types.int64, 1, "C", readonly=True)
_BYTES = types.Array(types.uint8, 1, "C", readonly=True)


def hash_ids(feature: str, values: Sequence[object] | npt.NDArray[np.generic]) -> Ids:
    """(N,) ids in 0..2**62-1 of a feature's values, for a table without a vocabulary; those of text files.

    Values are texts or integers, an integer as its decimal text; None is the empty text. The same value of another
    feature has another id, but for chance: of a million values two are the same with a chance of 1e-7.
    """
    return hash_texts(feature, pa.array(values).cast(pa.string()))


def hash_texts(feature: str, texts: pa.Array | pa.ChunkedArray) -> Ids:
    """(N,) ids in 0..2**62-1 of a feature's texts; null is the empty text."""
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
    texts = pc.fill_null(texts, "").cast(pa.large_binary())
    _, offsets, data = texts.buffers()
    starts = np.frombuffer(offsets, np.int64, len(texts) + 1, texts.offset * 8)
    out = np.empty(len(texts), np.int64)
    _hash_texts(starts, np.frombuffer(data or b"", np.uint8), np.uint64(feature_key(feature)), out)
    return out


def hash_numbers(feature: str, values: Ids) -> Ids:
    """(N,) ids in 0..2**62-1 of a feature's integers: mix64(value, key of the feature) >> 2."""
    out = np.empty(len(values), np.int64)
    _hash_numbers(np.ascontiguousarray(values, np.int64), np.uint64(feature_key(feature)), out)
    return out


def feature_key(feature: str) -> int:
    """FNV-1a of a feature's name."""
    h = _FNV_OFFSET
    for byte in feature.encode():
        h = ((h ^ byte) * _FNV_PRIME) & (2**64 - 1)
    return h


@compiled(types.void(_INTS, _BYTES, types.uint64, types.int64[::1]))
def _hash_texts(starts: Ids, data: npt.NDArray[np.uint8], key: np.uint64, out: Ids) -> None:
    prime = uint64(_FNV_PRIME)
    for i in range(len(out)):
        h = uint64(_FNV_OFFSET)
        for j in range(starts[i], starts[i + 1]):
            h = (h ^ uint64(data[j])) * prime
        out[i] = np.int64(mix64(h, key) >> uint64(2))


@compiled(types.void(_INTS, types.uint64, types.int64[::1]))
def _hash_numbers(values: Ids, key: np.uint64, out: Ids) -> None:
    for i in range(len(values)):
        out[i] = np.int64(mix64(np.uint64(values[i]), key) >> uint64(2))


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

    def layout(self, where: str, names: tuple[str, ...], *, delimiter: str = ",", num_ids: int | None = None) -> Layout:
        """The layout of a file with these columns. JobError where one that is named here is not among them."""
        for name in (self.label, *self.categorical, *self.numeric, *self.skip):
            if name not in names:
                raise JobError(where=where, reason=f"no column {name!r} (there are: {', '.join(names)})")
        kinds = {name: self._kind(name) for name in names}
        layout = Layout(columns=kinds, delimiter=delimiter, num_ids=num_ids if self.ids == "global" else None)
        if not layout.names("id", "text"):
            raise JobError(where=where, reason="no categorical column is left: nothing to embed")
        return layout

    def _kind(self, name: str) -> Kind:
        if name == self.label:
            return "label"
        if name in self.numeric:
            return "number"
        if name in self.skip or (self.categorical and name not in self.categorical):
            return "skip"
        return "id" if self.ids == "global" else "text"

    def schema(self, layout: Layout, num_ids: int | None) -> Schema:
        """The schema of samples with this layout; hashed ids have no `num_ids`."""
        known = num_ids if self.ids == "global" else None
        return Schema(layout.names("id", "text"), len(layout.names("number")), known)

    def rows(self, table: pa.Table, layout: Layout) -> Samples:
        """Samples of a parsed table."""
        features, numeric = layout.names("id", "text"), layout.names("number")
        ids = np.empty((table.num_rows, len(features)), np.int64)
        for i, name in enumerate(features):
            ids[:, i] = column(table, name) if self.ids == "global" else hash_texts(name, table.column(name))
        dense = np.empty((table.num_rows, len(numeric)), np.float32) if numeric else None
        for i, name in enumerate(numeric):
            assert dense is not None
            dense[:, i] = numbers(table.column(name), log=self.log)
        return Samples(ids, dense, column(table, self.label).astype(np.float32))


def numbers(values: pa.ChunkedArray, *, log: bool) -> npt.NDArray[np.float32]:
    """(N,) numbers, log(1 + max(x, 0)) of them if asked for, and 0 where missing."""
    array: npt.NDArray[np.float32] = pc.fill_null(values, 0.0).combine_chunks().to_numpy(zero_copy_only=False)
    return np.log1p(np.maximum(array, 0)) if log else array
