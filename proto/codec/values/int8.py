"""int8: blocks of at most 64 floats, divided by a 127th of their largest; the same as QSGD's with 127 levels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from embershard.proto.arrays import Bytes, Floats
from embershard.proto.codec.values import floats
from embershard.proto.codec.values.floats import ABS, INFINITY, bits_of, float_of, read_only, written
from embershard.proto.compiled.jit import compiled, inlined
from embershard.proto.errors import check_size
from embershard.proto.routing import mix64

BLOCK = 64
_BLOCK, _1 = np.uint64(BLOCK), np.uint64(1)
_U = np.uint32
_NAN = np.uint16(0x7FC0)
_TILE = 1024  # floats whose random numbers are made at once
_STREAM = np.uint64(0x696E7438)  # "int8": its random numbers are nobody else's


class Int8:
    """1 byte per float and 2 per block of at most 64 floats of a row: q = x / s, s = max |x| / 127 of the block.

    s is a bfloat16 rounded up. With a key, x / s is rounded up with the probability of its fraction, so that the mean
    of many is x (Alistarh et al. 2017); without one, to nearest. Error below s, or s / 2. A block with a float that is
    not finite is read as NaN. Layout: the R * dim int8, then the R * blocks scales.
    """

    name = "int8"
    code = 3

    def nbytes(self, rows: int, dim: int) -> int:
        """Bytes of (rows, dim) floats."""
        return rows * (dim + 2 * -(-dim // BLOCK))

    def encode(self, rows: Floats, out: Bytes, key: int | None = None) -> None:
        """Write (R, dim) floats into `out`, (nbytes,) uint8. key: of this call's random numbers, 64 bits."""
        scales = out[rows.size :].view(np.uint16)
        _encode(
            rows.reshape(-1), rows.shape[1], out[: rows.size].view(np.int8), scales, np.uint64(key or 0), key is None
        )

    def decode(self, payload: Bytes, out: Floats) -> None:
        """Fill `out`, (R, dim), from (nbytes,) uint8. DamagedPayload when there are more or fewer bytes."""
        check_size(self.name, payload.size, out.shape, self.nbytes(*out.shape))
        scales = payload[out.size :].view(np.uint16)
        _decode(payload[: out.size].view(np.int8), scales, out.shape[1], out.reshape(-1))


@inlined
def _scale_of(largest: np.uint32) -> np.uint32:
    """Bits of the smallest bfloat16 of which 127 are at least this finite positive float."""
    up = max(bits_of(float_of(largest) / np.float32(127.0)), _U(1)) + _U(0xFFFF) & _U(0xFFFF0000)
    if np.float64(float_of(up)) * 127.0 < np.float64(float_of(largest)):  # the quotient itself was rounded down
        up += _U(0x10000)
    return up


@compiled(
    types.void(
        read_only(types.float32), types.uint64, written(types.int8), written(types.uint16), types.uint64, types.boolean
    ),
    floats,
)
def _encode(
    rows: Floats,
    dim: np.uint64,
    out: npt.NDArray[np.int8],
    scales: npt.NDArray[np.uint16],
    key: np.uint64,
    nearest: bool,
) -> None:
    words = np.empty(_TILE // 2, np.uint64)
    random = words.view(np.uint32)  # two of a word: float i of the call takes half i % 2 of word i // 2
    key = mix64(key, _STREAM)  # neighbours among keys must not share words
    tile = tile_end = np.uint64(0)
    blocks = (dim + _BLOCK - _1) // _BLOCK  # unsigned: the compiler then sees runs of memory
    for b in range(np.uint64(scales.size)):
        first = b // blocks * dim + b % blocks * _BLOCK
        size = min(_BLOCK, dim - b % blocks * _BLOCK)
        largest = _U(0)
        for j in range(size):
            largest = max(largest, bits_of(rows[first + j]) & ABS)  # bits order floats, and NaN above infinity
        if largest == 0 or largest >= INFINITY:
            scales[b] = _NAN if largest else 0
            for j in range(size):
                out[first + j] = 0
            continue
        scale_bits = _scale_of(largest)
        scales[b] = scale_bits >> _U(16)
        scale = float_of(scale_bits)
        if nearest:
            for j in range(size):
                out[first + j] = np.int8(np.rint(rows[first + j] / scale))
            continue
        if first + size > tile_end:
            tile, tile_end = first & ~_1, (first & ~_1) + np.uint64(_TILE)
            for i in range(np.uint64(words.size)):
                words[i] = mix64((tile >> _1) + i, key)
        for j in range(size):
            x = rows[first + j] / scale
            below = np.floor(x)
            up = np.float32(random[first - tile + j] >> _U(8)) * np.float32(2.0**-24) < x - below
            out[first + j] = np.int8(np.int32(below) + np.int32(up))


@compiled(
    types.void(read_only(types.int8), read_only(types.uint16), types.uint64, written(types.float32)),
    floats,
)
def _decode(levels: npt.NDArray[np.int8], scales: npt.NDArray[np.uint16], dim: np.uint64, out: Floats) -> None:
    blocks = (dim + _BLOCK - _1) // _BLOCK
    for b in range(np.uint64(scales.size)):
        first = b // blocks * dim + b % blocks * _BLOCK
        scale = float_of(_U(scales[b]) << _U(16))
        for j in range(min(_BLOCK, dim - b % blocks * _BLOCK)):
            out[first + j] = np.float32(np.int32(levels[first + j])) * scale
