"""Ids for values without a vocabulary: a 62-bit hash of (feature name, text).

The hash is part of a trained model, since it says which row a value owns: it never changes, and golden values are
tested. id(feature, text) = mix64(fnv1a(text as UTF-8), key = fnv1a(feature as UTF-8)) >> 2, with the 64-bit FNV-1a
(Fowler, Noll, Vo) and mix64 of proto/routing.py. A missing value is the empty text and so has an id of its own in
each feature. Ids are below 2**62, hence non-negative int64; among n distinct values the chance of any collision is
about n**2 / 2**63 (one in 9,000 for Criteo's 33 million).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit, uint64

from embershard.proto.arrays import Ids
from embershard.proto.routing import mix64

_FNV_OFFSET, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3
_jit: Callable[..., Callable[..., Callable[..., None]]] = njit


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


@_jit(cache=True, nogil=True)
def _hash_texts(starts: Ids, data: npt.NDArray[np.uint8], key: np.uint64, out: Ids) -> None:
    prime = uint64(_FNV_PRIME)
    for i in range(len(out)):
        h = uint64(_FNV_OFFSET)
        for j in range(starts[i], starts[i + 1]):
            h = (h ^ uint64(data[j])) * prime
        out[i] = np.int64(mix64(h, key) >> uint64(2))


@_jit(cache=True, nogil=True)
def _hash_numbers(values: Ids, key: np.uint64, out: Ids) -> None:
    for i in range(len(values)):
        out[i] = np.int64(mix64(np.uint64(values[i]), key) >> uint64(2))
