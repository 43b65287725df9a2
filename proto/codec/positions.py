"""Ascending positions as bytes: the gaps between them as integers, a bitmap where that is smaller, or a key."""

from __future__ import annotations

import numpy as np
from numba import types
from numba.cpython.unsafe.numbers import trailing_zeros

from embershard.proto.codec.integers import (
    Bytes,
    Words,
    damaged,
    decode_integers,
    encode_integers,
    read_varint,
    varint,
)
from embershard.proto.codec.select import random_positions
from embershard.proto.jit import compiled
from embershard.proto.messages import Ids

BITMAP, EVERY, DRAWN = 66, 67, 68  # beside the kinds of integers

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
    block = encode_integers(gaps)
    bitmap_bytes = -(-limit // 8)
    if bitmap_bytes + 1 < block.size:
        words = np.zeros(-(-limit // 64), np.uint64)
        _set_bits(positions, words)
        bitmap = words.astype("<u8", copy=False).view(np.uint8)[:bitmap_bytes]
        return np.concatenate([count, np.array([BITMAP], np.uint8), bitmap])
    return np.concatenate([count, block])


def encode_drawn(count: int, key: int) -> Bytes:
    """The positions of random_positions(limit, count, key)."""
    return np.concatenate([varint(count), np.array([DRAWN], np.uint8), np.array([key], _KEY).view(np.uint8)])


def decode_positions(data: Bytes, limit: int) -> tuple[Ids, int]:
    """The positions at the start of data, and how many bytes they took. Total: DamagedPayload otherwise.

    (K,) int64, ascending, each at least 0 and below `limit`.
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
    if body.size and body[0] == BITMAP:
        used = 1 + -(-limit // 8)
        if body.size < used:
            raise damaged(f"a bitmap of {limit} positions in {body.size - 1} bytes")
        words = np.zeros(-(-limit // 64), "<u8")
        words.view(np.uint8)[: used - 1] = body[1:used]
        positions = np.empty(count, np.int64)
        good = _read_bits(words.astype(np.uint64, copy=False), limit, positions)
    else:
        gaps, used = decode_integers(body, count)
        positions = np.empty(count, np.int64)
        good = _add_gaps(gaps, limit, positions)
    if not good:
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


@compiled(types.void(_IDS, types.uint64[::1]))
def _set_bits(positions: Ids, words: Words) -> None:
    for i in range(positions.size):
        at = _U(positions[i])
        words[at >> _U(6)] |= _1 << (at & _U(63))


@compiled(types.boolean(_WORDS, types.int64, types.int64[::1]))
def _read_bits(words: Words, limit: int, positions: Ids) -> bool:
    count = 0
    for i in range(words.size):
        word = words[i]
        while word:
            at = np.int64(64 * i + trailing_zeros(word))
            if count == positions.size or at >= limit:
                return False
            positions[count] = at
            count += 1
            word &= word - _1
    return bool(count == positions.size)
