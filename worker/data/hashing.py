"""Ids of a feature's values where no vocabulary is known: hashes of 62 bits, for tables of any ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from numba import types, uint8, uint64

from embershard.proto.arrays import Ids
from embershard.proto.compiled.jit import compiled
from embershard.proto.routing import mix64
from embershard.worker.data.inputs.feature_ids import feature_key, is_category

_FNV_OFFSET, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3
# np.frombuffer gives arrays that cannot be written
_INTS = types.Array(types.int64, 1, "C", readonly=True)
_BYTES = types.Array(types.uint8, 1, "C", readonly=True)


def hash_ids(feature: str, values: Sequence[object] | npt.NDArray[np.generic]) -> Ids:
    """Hash a feature's values to (N,) int64 ids in 0..2**62-1, for a table without a vocabulary.

    Values are texts, integers or dates; an integer is hashed as its decimal text, None as the empty text. The ids
    are those of `feature_id`, and docs/ids.md specifies them. The same value of another feature has another id,
    except for hash collisions: among a million values there is a collision with probability 1e-7. TypeError for
    floats, because 1.0 and 1 would be two values, and for times, see is_category.
    """
    array = pa.array(values)
    if not is_category(array.type):
        raise TypeError(
            f"values of feature {feature!r} are {array.type}: only texts, integers, dates and None have ids"
        )
    return hash_column(feature, array)


def hash_column(feature: str, values: pa.Array | pa.ChunkedArray) -> Ids:
    """(N,) ids in 0..2**62-1 of a column's values, those of their texts; a dictionary's values are hashed once each."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if pa.types.is_dictionary(values.type):
        return ids_of_indices(feature, hash_column(feature, values.dictionary), values.indices)
    if pa.types.is_integer(values.type):
        return _hash_integers(feature, values)
    return hash_texts(feature, values.cast(pa.string()))


def ids_of_indices(feature: str, ids: Ids, indices: pa.Array) -> Ids:
    """(N,) the ids at these indices; a missing index stands for the empty text."""
    if indices.null_count:
        ids = np.append(ids, hash_texts(feature, pa.array([""])))
        indices = pc.fill_null(indices, len(ids) - 1)
    found: Ids = ids[indices.to_numpy()]
    return found


def hash_texts(feature: str, texts: pa.Array | pa.ChunkedArray) -> Ids:
    """(N,) ids in 0..2**62-1 of a feature's texts; null is the empty text."""
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
    out = np.empty(len(texts), np.int64)
    if not len(texts):
        return out
    texts = pc.fill_null(texts, "") if texts.null_count else texts
    if not pa.types.is_string(texts.type):
        texts = texts.cast(pa.large_binary())
    width = np.dtype(np.int32 if pa.types.is_string(texts.type) else np.int64)
    _, offsets, data = texts.buffers()
    starts = np.frombuffer(offsets, width, len(texts) + 1, texts.offset * width.itemsize).astype(np.int64, copy=False)
    _hash_texts(starts, np.frombuffer(data or b"", np.uint8), np.uint64(feature_key(feature)), out)
    return out


def _hash_integers(feature: str, values: pa.Array) -> Ids:
    """(N,) ids of integers, which are those of their decimal texts, without the texts."""
    missing = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None
    numbers = (values if missing is None else pc.fill_null(values, 0)).to_numpy()
    signed = numbers.dtype.kind == "i"
    numbers = numbers.astype(np.int64, copy=False) if signed else numbers.astype(np.uint64, copy=False).view(np.int64)
    out = np.empty(len(values), np.int64)
    _hash_decimals(numbers, signed, np.uint64(feature_key(feature)), out)
    if missing is not None:
        out[missing] = hash_texts(feature, pa.array([""]))
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
        h, start, end = uint64(_FNV_OFFSET), starts[i], starts[i + 1]
        while end - start >= 4:
            for j in range(4):
                h = (h ^ uint64(data[start + j])) * prime
            start += 4
        if start + 4 <= len(data):  # the last bytes without a branch, which texts of random lengths would mispredict
            for j in range(3):
                longer = (h ^ uint64(data[start + j])) * prime
                h = longer if start + j < end else h
        else:
            for j in range(start, end):
                h = (h ^ uint64(data[j])) * prime
        out[i] = np.int64(mix64(h, key) >> uint64(2))


@compiled(types.void(_INTS, types.boolean, types.uint64, types.int64[::1]))
def _hash_decimals(numbers: Ids, signed: bool, key: np.uint64, out: Ids) -> None:
    prime, ten = uint64(_FNV_PRIME), uint64(10)
    digits = np.empty(20, np.uint8)  # of 2**64 - 1, the last one first
    for i in range(len(numbers)):
        h, rest = uint64(_FNV_OFFSET), uint64(numbers[i])
        if signed and numbers[i] < 0:
            h, rest = (h ^ uint64(45)) * prime, uint64(0) - rest  # "-"
        count = 0
        while rest >= ten:
            digits[count] = uint8(rest % ten)
            rest //= ten
            count += 1
        h = (h ^ (rest + uint64(48))) * prime  # "0"
        while count > 0:
            count -= 1
            h = (h ^ (uint64(digits[count]) + uint64(48))) * prime
        out[i] = np.int64(mix64(h, key) >> uint64(2))


@compiled(types.void(_INTS, types.uint64, types.int64[::1]))
def _hash_numbers(values: Ids, key: np.uint64, out: Ids) -> None:
    for i in range(len(values)):
        out[i] = np.int64(mix64(np.uint64(values[i]), key) >> uint64(2))
