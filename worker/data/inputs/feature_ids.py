"""Ids of a feature's values where no vocabulary is known, without a compiler: docs/ids.md in plain Python and numpy.

`embershard.worker.data.hashing` gives the same ids of whole columns, by compiled kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from embershard.proto.arrays import Ids, mix64

if TYPE_CHECKING:
    import pyarrow as pa

_OFFSET, _PRIME, _MASK = 0xCBF29CE484222325, 0x100000001B3, 2**64 - 1
_SHORT = 64  # bytes of a text up to which all texts are hashed together, byte by byte


def feature_id(column: str, value: object) -> int:
    """Compute the id (0..2**62-1) of a value of a column, as readers with hashed ids do; docs/ids.md specifies it.

    `value` is a text, an integer, a bool, or None for a missing value, which counts as the empty text. TypeError
    for all other types, including floats, because 1.0 and 1 would be two values. ValueError for a text that UTF-8
    cannot encode.
    """
    return int(mix64(np.array([fnv1a(spelled(value))], np.uint64), feature_key(column))[0]) >> 2


def feature_ids(keys: npt.NDArray[np.uint64], texts: Sequence[bytes]) -> Ids:
    """(N,) ids of spelled values, of the features with these keys (N,)."""
    count = len(texts)
    lengths = np.fromiter(map(len, texts), np.int64, count)
    ends = np.cumsum(lengths)
    data = np.frombuffer(b"".join(texts), np.uint8)
    h = np.full(count, _OFFSET, np.uint64)
    for i in np.flatnonzero(lengths > _SHORT).tolist():
        h[i] = fnv1a(texts[i])
    left = np.flatnonzero(lengths <= _SHORT)
    for place in range(int(lengths[left].max(initial=0))):
        left = left[lengths[left] > place]
        h[left] = (h[left] ^ data[ends[left] - lengths[left] + place]) * np.uint64(_PRIME)
    return (mix64(h ^ keys, 0) >> np.uint64(2)).astype(np.int64)


def is_category(kind: pa.DataType) -> bool:
    """Whether a value of this type has one text: 1.0 and 1.00 would be two, and so would a time in two units."""
    from pyarrow import types  # here: to serve ids takes numpy alone

    of = kind.value_type if types.is_dictionary(kind) else kind
    has_fraction = types.is_floating(of) or (types.is_decimal(of) and of.scale != 0)
    return not has_fraction and (not types.is_temporal(of) or bool(types.is_date(of)))


def spelled(value: object) -> bytes:
    """The bytes of a value that are hashed: UTF-8 of its text, which docs/ids.md specifies."""
    if value is None:
        return b""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bool | np.bool_):
        return b"true" if value else b"false"
    if isinstance(value, int | np.integer):
        return str(int(value)).encode()
    if isinstance(value, date) and not isinstance(value, datetime):
        return value.isoformat().encode()
    raise TypeError(f"{value!r} is {type(value).__name__}: only texts, integers and dates have ids")


@cache
def feature_key(feature: str) -> int:
    """FNV-1a of a feature's name."""
    return fnv1a(feature.encode())


def fnv1a(data: bytes) -> int:
    """64 bits of FNV-1a (Fowler, Noll, Vo)."""
    h = _OFFSET
    for byte in data:
        h = ((h ^ byte) * _PRIME) & _MASK
    return h
