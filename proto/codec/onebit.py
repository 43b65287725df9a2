"""One bit per float: its sign, and per block of 1024 the mean of its sizes (Seide et al. 2014, EF-signSGD 2019)."""

from __future__ import annotations

import numpy as np
from numba import types

from embershard.proto.codec import floats
from embershard.proto.codec.floats import Bytes, Floats, bits_of, float_of, read_only, written
from embershard.proto.codec_errors import check_size
from embershard.proto.jit import compiled

BLOCK = 1024
_U = np.uint32
_ABS, _INFINITY = _U(0x7FFFFFFF), _U(0x7F800000)


class Onebit:
    """1 bit per float and 4 bytes per block of 1024 floats: x is read as mean |x| of its block, with its sign.

    Useless without error feedback. A block of zeros stays zeros; one with a float that is not finite is read as NaN.
    Layout: the bits, then the float32 means. Bit b of byte i of a block of n bytes belongs to its float b * n + i.
    """

    name = "onebit"
    code = 4

    def nbytes(self, rows: int, dim: int) -> int:
        """Bytes of (rows, dim) floats."""
        return -(-rows * dim // 8) + 4 * -(-rows * dim // BLOCK)

    def encode(self, rows: Floats, out: Bytes, key: int | None = None) -> None:
        """Write (R, dim) floats into `out`, (nbytes,) uint8."""
        end = -(-rows.size // 8)
        _encode(rows.reshape(-1), out[:end], out[end:].view(np.float32))

    def decode(self, payload: Bytes, out: Floats) -> None:
        """Fill `out`, (R, dim), from (nbytes,) uint8. DamagedPayload when there are more or fewer bytes."""
        check_size(self.name, payload.size, out.shape, self.nbytes(*out.shape))
        end = -(-out.size // 8)
        _decode(payload[:end], payload[end:].view(np.float32), out.reshape(-1))


@compiled(types.void(read_only(types.float32), written(types.uint8), written(types.float32)), floats)
def _encode(rows: Floats, signs: Bytes, means: Floats) -> None:
    for block in range(means.size):
        first = block * BLOCK
        size = min(BLOCK, rows.size - first)
        total, largest = 0.0, _U(0)
        for i in range(first, first + size):
            total += np.float64(abs(rows[i]))  # float64: 1024 huge floats do not overflow
            largest = max(largest, bits_of(rows[i]) & _ABS)
        means[block] = total / size if largest < _INFINITY else np.nan
        stride = (size + 7) // 8
        for i in range(stride):
            byte = np.uint8(0)
            for b in range(8):
                j = b * stride + i
                if j < size and rows[first + j] < 0:
                    byte |= np.uint8(1 << b)
            signs[first // 8 + i] = byte


@compiled(types.void(read_only(types.uint8), read_only(types.float32), written(types.float32)), floats)
def _decode(signs: Bytes, means: Floats, out: Floats) -> None:
    for block in range(means.size):
        first = block * BLOCK
        size = min(BLOCK, out.size - first)
        stride = (size + 7) // 8
        mean = bits_of(means[block])
        for b in range(8):
            for i in range(min(stride, size - b * stride)):
                sign = (_U(signs[first // 8 + i]) >> _U(b)) << _U(31)
                out[first + b * stride + i] = float_of(mean ^ sign)
