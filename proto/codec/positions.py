"""Ascending positions as bytes: the gaps between them as integers, or the key that drew them.

Rice codes of parameter 0 are the bitmap of the positions, so nothing is gained by another.
"""

from __future__ import annotations

import numpy as np
from numba import types

from embershard.proto.arrays import Bytes, Ids
from embershard.proto.codec.integers import Words, damaged, decode_integers, encode_integers, read_varint, varint
from embershard.proto.codec.select import random_positions
from embershard.proto.compiled.jit import compiled

EVERY, DRAWN = 66, 67  # beside the kinds of integers

_KEY = np.dtype("<u8")
_U = np.uint64
_0, _1 = _U(0), _U(1)
_WORDS = types.Array(types.uint64, 1, "C", readonly=True)
_IDS = types.Array(types.int64, 1, "C", readonly=True)


def encode_positions(positions: Ids, limit: int) -> Bytes:
    """positions: (K,) int64, ascending, each at least 0 and below `limit`."""
    count = varint(positions.size)
    if positions.size == limit:
        return np.append(count, np.uint8(EVERY))
    gaps = np.empty(positions.size, np.uint64)
    _gaps(positions, gaps)
    return np.concatenate([count, encode_integers(gaps)])


def encode_drawn(count: int, key: int) -> Bytes:
    """The positions of random_positions(limit, count, key)."""
    return np.concatenate([varint(count), np.array([DRAWN], np.uint8), np.array([key], _KEY).view(np.uint8)])


def decode_positions(data: Bytes, limit: int) -> tuple[Ids, int]:
    """The positions at the start of data, and how many bytes they took. Total: DamagedPayload otherwise.

    (K,) int64, ascending, each at least 0 and below `limit`, which bounds the memory, too.
    """
    count, start = read_varint(data, limit, "the count of positions")
    body = data[start:]
    if body.size and body[0] == EVERY:
        if count != limit:
            raise damaged(f"every position is named, but there are {count}, not {limit}")
        return np.arange(limit), start + 1
    if body.size and body[0] == DRAWN:
        used = 1 + _KEY.itemsize
        if body.size < used:
            raise damaged("it ends in the key of its positions")
        return random_positions(limit, count, int(body[1:used].copy().view(_KEY)[0])), start + used
    gaps, used = decode_integers(body, count)
    positions = gaps.view(np.int64)  # in place
    if not _add_gaps(gaps, limit, positions):
        raise damaged(f"its positions are not {count} below {limit}")
    return positions, start + used


@compiled(types.void(_IDS, types.uint64[::1]))
def _gaps(positions: Ids, gaps: Words) -> None:
    before = np.int64(-1)
    for i in range(positions.size):
        gaps[i] = _U(positions[i] - before - 1)
        before = positions[i]


@compiled(types.boolean(_WORDS, types.int64, types.int64[::1]))
def _add_gaps(gaps: Words, limit: int, positions: Ids) -> bool:
    at, end = _0, _U(limit)
    for i in range(gaps.size):
        if at >= end or gaps[i] >= end - at:
            return False
        at += gaps[i]
        positions[i] = np.int64(at)
        at += _1
    return True
