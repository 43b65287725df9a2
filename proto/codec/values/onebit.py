"""One bit per float: its sign, and per block of 1024 the mean of its sizes (Seide et al. 2014, EF-signSGD 2019)."""

from __future__ import annotations

import numpy as np
from numba import types

from embershard.proto.arrays import Bytes, Floats
from embershard.proto.codec.values import floats
from embershard.proto.codec.values.floats import bits_of, float_of, read_only, written
from embershard.proto.compiled.jit import compiled
from embershard.proto.errors import check_size

BLOCK = 1024
_BLOCK, _1 = np.uint64(BLOCK), np.uint64(1)
_U = np.uint32


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
    sums = np.empty(BLOCK, np.float64)  # float64: 1024 huge floats do not overflow
    for block in range(np.uint64(means.size)):
        first = block * _BLOCK
        size = min(_BLOCK, np.uint64(rows.size) - first)
        for j in range(size):
            sums[j] = np.float64(abs(rows[first + j]))
        for j in range(size, _BLOCK):
            sums[j] = 0.0
        width = _BLOCK >> _1
        while width:  # in halves, as vectors can
            for j in range(width):
                sums[j] += sums[width + j]
            width >>= _1
        means[block] = sums[0] / np.float64(size) if sums[0] < np.inf else np.nan
        stride = (size + np.uint64(7)) >> np.uint64(3)
        at = first >> np.uint64(3)
        for j in range(stride):
            signs[at + j] = 0
        for bit in range(np.uint64(8)):
            start = bit * stride
            for j in range(min(stride, max(size, start) - start)):  # the last bytes have spare bits
                negative = rows[first + start + j] < 0
                signs[at + j] |= np.uint8(np.uint8(negative) << np.uint8(bit))


@compiled(types.void(read_only(types.uint8), read_only(types.float32), written(types.float32)), floats)
def _decode(signs: Bytes, means: Floats, out: Floats) -> None:
    for block in range(np.uint64(means.size)):
        first = block * _BLOCK
        size = min(_BLOCK, np.uint64(out.size) - first)
        stride = (size + np.uint64(7)) >> np.uint64(3)
        at = first >> np.uint64(3)
        mean = bits_of(means[block])
        for bit in range(np.uint64(8)):
            start = bit * stride
            for j in range(min(stride, max(size, start) - start)):  # the last bytes have spare bits
                sign = (_U(signs[at + j]) >> _U(bit)) << _U(31)
                out[first + start + j] = float_of(mean ^ sign)
