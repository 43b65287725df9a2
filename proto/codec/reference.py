"""The values codecs in plain numpy: slow, short, and the specification that their kernels are tested against.

Each takes (R, dim) float32 and gives its payload, or takes a payload and gives the rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from embershard.proto.arrays import Bytes, Floats, mix64


def encode_fp16s(rows: Floats, key: int | None = None) -> Bytes:
    """fp16(x * 2^-e), e = floor(log2(max |x|)) of the row, between -127 and 126; -128 where it is not finite."""
    finite = np.isfinite(rows).all(axis=1, keepdims=True)
    rows = np.where(finite, rows, 0)
    largest = np.abs(rows).max(axis=1, initial=0, keepdims=True)
    e = np.where(largest == 0, -127, np.clip(np.frexp(largest)[1] - 1, -127, 126))
    halves = np.ldexp(rows.astype(np.float64), -e).astype(np.float16)
    return _joined(halves, np.where(finite, e, -128).astype(np.int8))


def decode_fp16s(payload: Bytes, num_rows: int, dim: int) -> Floats:
    """x = fp16 * 2^e; NaN where e is -128."""
    halves = payload[: 2 * num_rows * dim].view(np.float16).reshape(num_rows, dim)
    e = payload[2 * num_rows * dim :].view(np.int8)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(e == -128, np.nan, np.ldexp(halves.astype(np.float64), e.astype(int))).astype(np.float32)


def encode_bf16(rows: Floats, key: int | None = None) -> Bytes:
    """The upper 16 bits, rounded to nearest even; a NaN keeps its sign and becomes quiet."""
    bits = rows.view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return _joined(np.where(np.isnan(rows), bits >> 16 | 0x40, nearest).astype(np.uint16))


def decode_bf16(payload: Bytes, num_rows: int, dim: int) -> Floats:
    """The 16 bits and 16 zeros."""
    return (payload.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(num_rows, dim)


def encode_int8(rows: Floats, key: int | None = None) -> Bytes:
    """q = x / s, rounded to nearest even, or up where u of float i of the call is below the fraction.

    s: the smallest bfloat16 with 127 s >= max |x| of the block (or the one above). u: 24 bits of half i % 2 of word
    i // 2, word w = mix64(w, mix64(key, "int8")).
    """
    levels, scales = np.zeros(rows.shape, np.int8), []
    if key is not None:
        call_key = int(mix64(np.array([key], np.uint64).view(np.int64), 0x696E7438)[0])
        words = mix64(np.arange(-(-rows.size // 2)), call_key)
        u = (words.view(np.uint32) >> 8)[: rows.size].reshape(rows.shape) * np.float32(2.0**-24)
    for r, start, stop in _blocks(*rows.shape):
        x = rows[r, start:stop]
        s = _scale(np.abs(x).max())
        scales.append(s.view(np.uint32) >> 16)
        if s == 0 or np.isnan(s):
            continue
        below = np.floor(x / s)
        up = u[r, start:stop] < x / s - below if key is not None else False
        levels[r, start:stop] = below + up if key is not None else np.rint(x / s)
    return _joined(levels, np.array(scales, np.uint16))


def decode_int8(payload: Bytes, num_rows: int, dim: int) -> Floats:
    """x = q * s."""
    out = payload[: num_rows * dim].view(np.int8).reshape(num_rows, dim).astype(np.float32)
    scales = (payload[num_rows * dim :].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for block, (r, start, stop) in enumerate(_blocks(num_rows, dim)):
            out[r, start:stop] *= scales[block]
    return out


def encode_onebit(rows: Floats, key: int | None = None) -> Bytes:
    """Of each 1024 floats the signs, bit b of byte i of n for float b * n + i, and the mean size."""
    signs, means = [], []
    for x in np.split(rows.reshape(-1), range(1024, rows.size, 1024)) if rows.size else ():
        folded = np.pad(np.abs(x).astype(np.float64), (0, 1024 - x.size))
        while folded.size > 1:
            folded = folded[: folded.size // 2] + folded[folded.size // 2 :]
        means.append(folded[0] / x.size if np.isfinite(x).all() else np.nan)
        n = -(-x.size // 8)
        negative = np.pad(x < 0, (0, 8 * n - x.size)).reshape(8, n)
        signs.append(np.packbits(negative, axis=0, bitorder="little").reshape(-1))
    return _joined(*signs, np.array(means, np.float32))


def decode_onebit(payload: Bytes, num_rows: int, dim: int) -> Floats:
    """x = the mean size of its block, with its sign."""
    out = np.empty(num_rows * dim, np.float32)
    end = -(-out.size // 8)
    for block, mean in enumerate(payload[end:].view(np.float32)):
        part = out[1024 * block : 1024 * (block + 1)]
        n = -(-part.size // 8)
        packed = payload[128 * block : 128 * block + n].reshape(1, n)
        negative = np.unpackbits(packed, axis=0, bitorder="little").reshape(-1)[: part.size]
        part[:] = np.where(negative, -mean, mean)
    return out.reshape(num_rows, dim)


def _scale(largest: np.float32) -> np.float32:
    if not np.isfinite(largest):
        return np.float32(np.nan)
    quotient = max(np.float32(largest / np.float32(127)), np.float32(2.0**-149)) if largest else np.float32(0)
    bits = (int(quotient.view(np.uint32)) + 0xFFFF) & 0xFFFF0000
    if float(np.uint32(bits).view(np.float32)) * 127 < float(largest):
        bits += 0x10000
    return np.uint32(bits).view(np.float32)


def _blocks(num_rows: int, dim: int) -> Iterator[tuple[int, int, int]]:
    for r in range(num_rows):
        for start in range(0, dim, 64):
            yield r, start, min(start + 64, dim)


def _joined(*parts: npt.NDArray[np.generic]) -> Bytes:
    return np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])
