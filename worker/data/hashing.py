"""Ids of a feature's values where no vocabulary is known: hashes of 62 bits, for tables of any ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from numba import types, uint64

from embershard.proto.arrays import Ids
from embershard.proto.compiled.jit import compiled
from embershard.proto.routing import mix64
from embershard.worker.data.inputs.feature_ids import feature_key

_FNV_OFFSET, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3
# np.frombuffer gives arrays that cannot be written
_INTS = types.Array(types.int64, 1, "C", readonly=True)
_BYTES = types.Array(types.uint8, 1, "C", readonly=True)


def hash_ids(feature: str, values: Sequence[object] | npt.NDArray[np.generic]) -> Ids:
    """(N,) ids in 0..2**62-1 of a feature's values, for a table without a vocabulary; those of text files.

    Values are texts or integers, an integer as its decimal text; None is the empty text: the ids of `feature_id`, which
    docs/ids.md specifies. The same value of another feature has another id, but for chance: of a million values two are
    the same with a chance of 1e-7. TypeError for floats: 1.0 and 1 would be two values.
    """
    array = pa.array(values)
    if pa.types.is_floating(array.type):
        raise TypeError(f"values of feature {feature!r} are {array.type}: only texts, integers and None have ids")
    return hash_texts(feature, array.cast(pa.string()))


def hash_texts(feature: str, texts: pa.Array | pa.ChunkedArray) -> Ids:
    """(N,) ids in 0..2**62-1 of a feature's texts; null is the empty text."""
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
    texts = (pc.fill_null(texts, "") if texts.null_count else texts).cast(pa.large_binary())
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
