"""Ids as bytes: of ascending ones the first, and the gaps between them as integers; of even ones their places."""

from __future__ import annotations

import numpy as np
from numba import types

from embershard.proto.arrays import Bytes, Ids
from embershard.proto.codec.integers import Words, damaged, decode_integers, encode_integers, read_varint, varint
from embershard.proto.codec.positions import decode_positions, encode_positions
from embershard.proto.compiled.jit import compiled
from embershard.proto.routing import MAX_EVEN, even_ids_at

_U = np.uint64
_1 = _U(1)
_TOP = _U(np.iinfo(np.int64).max)
_FIRST, _KEY = np.dtype("<i8"), np.dtype("<u8")


def encode_ids(ids: Ids) -> Bytes:
    """ids: (U,) int64, ascending, each once; any int64 may be one. At most 8 bytes each, and a few of all."""
    if not ids.size:
        return varint(0)
    gaps = np.empty(ids.size - 1, np.uint64)
    _gaps(ids, gaps)
    first = ids[:1].astype(_FIRST, copy=False).view(np.uint8)
    return np.concatenate([varint(ids.size), first, encode_integers(gaps)])


def encode_even_ids(places: Ids, count: int, space_key: int) -> Bytes:
    """even_ids(count, space_key)[places]: places (U,) int64, ascending. About a bit each, and 17 bytes of all."""
    key = np.array([space_key], _KEY).view(np.uint8)
    return np.concatenate([varint(0), varint(count), key, encode_positions(places, count)])


def decode_ids(data: Bytes, max_ids: int) -> Ids:
    """The ids of all of data, each once. Total: DamagedPayload otherwise, or where they are over max_ids."""
    count, start = read_varint(data, max_ids, "the count of ids")
    data = data[start:]
    if not count and data.size:
        return _decode_even(data, max_ids)
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


def _decode_even(data: Bytes, max_ids: int) -> Ids:
    of, start = read_varint(data, MAX_EVEN, "the number that ids are of")
    key, data = data[start : start + _KEY.itemsize], data[start + _KEY.itemsize :]
    if key.size < _KEY.itemsize:
        raise damaged("it ends in the key of its ids")
    count, _ = read_varint(data, max_ids, "the count of ids")  # which bounds the memory
    places, used = decode_positions(data, of)
    if used != data.size:
        raise damaged(f"{data.size - used} bytes follow its {count} ids")
    return even_ids_at(places, of, int(key.copy().view(_KEY)[0]))


@compiled(types.void(types.Array(types.int64, 1, "C", readonly=True), types.uint64[::1]))
def _gaps(ids: Ids, gaps: Words) -> None:
    for i in range(gaps.size):
        gaps[i] = _U(ids[i + 1]) - _U(ids[i]) - _1  # modulo 2^64: the difference of two int64 may have 64 bits


@compiled(types.boolean(types.Array(types.uint64, 1, "C", readonly=True), types.int64[::1]))
def _add_gaps(gaps: Words, ids: Ids) -> bool:
    at = _U(ids[0])
    for i in range(gaps.size):
        if gaps[i] >= _TOP - at:  # modulo 2^64, too: how many ids lie above this one
            return False
        at += gaps[i] + _1
        ids[i + 1] = np.int64(at)
    return True
