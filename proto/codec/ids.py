"""Ascending ids as bytes: the first, and the gaps between them as integers."""

from __future__ import annotations

import numpy as np
from numba import types

from embershard.proto.codec.integers import Bytes, Words, damaged, decode_integers, encode_integers, read_varint, varint
from embershard.proto.jit import compiled
from embershard.proto.messages import Ids

_U = np.uint64
_1 = _U(1)
_FIRST = np.dtype("<i8")


def encode_ids(ids: Ids) -> Bytes:
    """ids: (U,) int64, ascending, each once; any int64 may be one. At most 8 bytes each, and a few of all."""
    if not ids.size:
        return varint(0)
    gaps = np.empty(ids.size - 1, np.uint64)
    _gaps(ids, gaps)
    first = ids[:1].astype(_FIRST, copy=False).view(np.uint8)
    return np.concatenate([varint(ids.size), first, encode_integers(gaps)])


def decode_ids(data: Bytes, max_ids: int) -> Ids:
    """The ids of all of data, ascending, each once. Total: DamagedPayload otherwise, or where they are over max_ids."""
    count, start = read_varint(data, max_ids, "the count of ids")
    data = data[start:]
    if not count:
        used = 0
        ids = np.empty(0, np.int64)
    else:
        if data.size < _FIRST.itemsize:
            raise damaged("it ends in its first id")
        gaps, used = decode_integers(data[_FIRST.itemsize :], count - 1)
        used += _FIRST.itemsize
        ids = np.empty(count, np.int64)
        ids[0] = data[: _FIRST.itemsize].copy().view(_FIRST)[0]
        if not _add_gaps(gaps, ids):
            raise damaged("its ids leave the range of int64")
    if used != data.size:
        raise damaged(f"{data.size - used} bytes follow its {count} ids")
    return ids


@compiled(types.void(types.Array(types.int64, 1, "C", readonly=True), types.uint64[::1]))
def _gaps(ids: Ids, gaps: Words) -> None:
    for i in range(gaps.size):
        gaps[i] = _U(ids[i + 1]) - _U(ids[i]) - _1  # modulo 2^64: the difference of two int64 may have 64 bits


@compiled(types.boolean(types.Array(types.uint64, 1, "C", readonly=True), types.int64[::1]))
def _add_gaps(gaps: Words, ids: Ids) -> bool:
    top = _U(np.iinfo(np.int64).max)
    at = _U(ids[0])
    for i in range(gaps.size):
        if gaps[i] >= top - at:  # modulo 2^64, too: how many ids lie above this one
            return False
        at += gaps[i] + _1
        ids[i + 1] = np.int64(at)
    return True
