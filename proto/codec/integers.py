"""Unsigned integers as bytes: Rice coded with the best parameter, as varints or raw, whichever is smallest.

Positions, ids and ages are made of these (docs/payloads.md). Rice: Robert F. Rice, JPL 79-22 (1979).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from numba import types
from numba.cpython.unsafe.numbers import leading_zeros, trailing_zeros

from embershard.proto.arrays import Bytes
from embershard.proto.compiled.jit import compiled, inlined
from embershard.proto.errors import DamagedPayload

Words = npt.NDArray[np.uint64]

MAX_RICE = 56  # above it, raw is as small
VARINT, RAW = 64, 65  # the first byte of a block; up to MAX_RICE it is the Rice parameter
VARINT_BYTES = 10  # of the largest uint64

_U = np.uint64
_0, _1, _7, _8, _64 = _U(0), _U(1), _U(7), _U(8), _U(64)
_LOW7 = _U(0x7F)
_WORDS = types.Array(types.uint64, 1, "C", readonly=True)
_BYTES = types.Array(types.uint8, 1, "C", readonly=True)


def damaged(reason: str) -> DamagedPayload:
    """The error of every decoder here; the caller names the codec where it knows one."""
    return DamagedPayload(codec="packed", reason=reason)


def encode_integers(values: Words) -> Bytes:
    """The shortest block of values (N,) uint64."""
    count = values.size
    rice, bits = best_rice(lambda k: _rice_bits(values, k), count)
    nbytes = {rice: math.ceil(bits / 8), VARINT: _varint_bytes(values), RAW: 8 * count}
    kind = min(nbytes, key=lambda kind: nbytes[kind])
    out = np.empty(1 + nbytes[kind], np.uint8)
    out[0] = kind
    if kind == RAW:
        out[1:] = values.astype("<u8", copy=False).view(np.uint8)
    elif kind == VARINT:
        _write_varints(values, out[1:])
    else:
        words = np.zeros(nbytes[kind] // 8 + 1, np.uint64)
        _write_rice(values, kind, words)
        out[1:] = words.astype("<u8", copy=False).view(np.uint8)[: nbytes[kind]]
    return out


def decode_integers(data: Bytes, count: int) -> tuple[Words, int]:
    """`count` integers from the start of data, and how many bytes they took. Total: DamagedPayload otherwise."""
    if data.size < 1:
        raise damaged("it ends where integers should begin")
    kind, body = int(data[0]), data[1:]
    if kind > MAX_RICE and kind not in (VARINT, RAW):
        raise damaged(f"integers of kind {kind}, which nobody writes")
    least = 8 * count if kind == RAW else count if kind == VARINT else -(-count * (kind + 1) // 8)
    if least > body.size:  # before memory is taken
        raise damaged(f"{count} integers of kind {kind} in {body.size} bytes")
    values = np.empty(count, np.uint64)
    if kind == RAW:
        used = least
        values[:] = body[:used].copy().view("<u8")
    elif kind == VARINT:
        used = _read_varints(body, values)
    else:
        body = body[: 8 * count]  # more than raw ones nobody writes
        words = np.zeros(body.size // 8 + 2, "<u8")
        words.view(np.uint8)[: body.size] = body
        used = _read_rice(words.astype(np.uint64, copy=False), body.size, kind, values)
    if used < 0:
        raise damaged(f"{count} integers of kind {kind} do not end in {body.size} bytes, or are too large")
    return values, 1 + used


def varint(value: int) -> Bytes:
    """One integer, 7 bits a byte from the lowest, the eighth bit set on all bytes but the last (LEB128)."""
    out = np.empty(max(1, -(-value.bit_length() // 7)), np.uint8)
    _write_varints(np.array([value], np.uint64), out)
    return out


def read_varint(data: Bytes, limit: int, what: str) -> tuple[int, int]:
    """A varint of at most `limit` from the start of data, and how many bytes it took; DamagedPayload otherwise."""
    value = np.empty(1, np.uint64)
    used = _read_varints(data[:VARINT_BYTES], value)
    if used < 0:
        raise damaged(f"{what} does not end")
    if int(value[0]) > limit:
        raise damaged(f"{what} is {value[0]}, over {limit}")
    return int(value[0]), int(used)


def best_rice(bits: Callable[[int], float], count: float) -> tuple[int, float]:
    """The Rice parameter with the fewest bits(k) of `count` integers, maybe a mean, and these: bits is convex in k."""
    if not count:
        return 0, 0.0
    # sum(v) from the bits at 0; the best parameter is next to log2(mean * ln 2)
    mean = max(bits(0) / count - 1, 0.0) * math.log(2)
    k = min(max(math.floor(math.log2(mean)), 0), MAX_RICE) if mean > 1 else 0
    least = bits(k)
    for step in (1, -1):
        while 0 <= k + step <= MAX_RICE and (next_bits := bits(k + step)) < least:
            k, least = k + step, next_bits
    return k, least


@compiled(types.float64(_WORDS, types.int64))
def _rice_bits(values: Words, k: int) -> float:
    quotients = 0.0  # not an integer: at a small k the sum of large values is over 64 bits
    for i in range(values.size):
        quotients += np.float64(values[i] >> _U(k))
    return quotients + np.float64(values.size * (k + 1))


@inlined
def _varint_size(value: np.uint64) -> np.uint64:
    return (_U(70) - _U(leading_zeros(value | _1))) // _7


@compiled(types.int64(_WORDS))
def _varint_bytes(values: Words) -> int:
    total = _0
    for i in range(values.size):
        total += _varint_size(values[i])
    return int(total)


@compiled(types.void(_WORDS, types.uint8[::1]))
def _write_varints(values: Words, out: Bytes) -> None:
    at = _0
    for i in range(values.size):
        value = values[i]
        while value > _LOW7:
            out[at] = np.uint8((value & _LOW7) | _U(0x80))
            value >>= _7
            at += _1
        out[at] = np.uint8(value)
        at += _1


@compiled(types.void(_WORDS, types.int64, types.uint64[::1]))
def _write_rice(values: Words, k: int, out: Words) -> None:
    """Each value as value >> k zeros, a one, its k low bits; bits are filled from the lowest. out is zero."""
    width, mask = _U(k), (_1 << _U(k)) - _1
    at = _0
    for i in range(values.size):
        value = values[i]
        at += value >> width
        code = ((value & mask) << _1) | _1
        word, shift = at >> _U(6), at & _U(63)
        out[word] |= code << shift
        if shift + width + _1 > _64:  # so shift is not 0
            out[word + _1] |= code >> (_64 - shift)
        at += width + _1


@inlined
def _window(words: Words, at: np.uint64) -> np.uint64:
    """The 64 bits from bit `at` on."""
    word, shift = at >> _U(6), at & _U(63)
    return _U((words[word] >> shift) | (words[word + _1] << _1 << (_U(63) - shift)))


@compiled(types.int64(_WORDS, types.int64, types.int64, types.uint64[::1]))
def _read_rice(words: Words, size: int, k: int, out: Words) -> int:
    """Bytes used of `size`; -1 where they end before, a value is over 64 bits, or bits after the last are not 0.

    words: the bytes, and at least one word more.
    """
    width, mask = _U(k), (_1 << _U(k)) - _1
    end, at = _8 * _U(size), _0
    for i in range(out.size):
        start = at
        while True:
            if at >= end:
                return -1
            word = _window(words, at)
            if word:
                break
            at += _64
        zeros = _U(trailing_zeros(word))
        at += zeros
        quotient = at - start
        at += _1
        low = word >> zeros >> _1 if zeros + width < _64 else _window(words, at)
        at += width
        if at > end or (quotient << width) >> width != quotient:
            return -1
        out[i] = (quotient << width) | (low & mask)
    used = (at + _7) >> _U(3)
    if at & _7 and _window(words, at) & ((_1 << (_8 * used - at)) - _1):
        return -1
    return int(used)


@compiled(types.int64(_BYTES, types.uint64[::1]))
def _read_varints(data: Bytes, out: Words) -> int:
    """Bytes used; -1 where the data ends before, or a value is over 64 bits."""
    at, end = _0, _U(data.size)
    for i in range(out.size):
        value, shift = _0, _0
        while True:
            if at >= end or shift > _U(63):
                return -1
            byte = _U(data[at])
            at += _1
            if shift == _U(63) and byte > _1:
                return -1
            value |= (byte & _LOW7) << shift
            shift += _7
            if byte <= _LOW7:
                break
        out[i] = value
    return int(at)
