"""Scaled fp16: a row divided by a power of two near its largest float, so that small gradients do not underflow."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from embershard.proto.arrays import Bytes, Floats
from embershard.proto.codec.values import floats, half
from embershard.proto.codec.values.floats import ABS, INFINITY, bits_of, float_of, read_only, written
from embershard.proto.codec.values.half import float_of_half, half_of
from embershard.proto.compiled.jit import compiled
from embershard.proto.errors import check_size

_U = np.uint32
_NOT_FINITE = -128


class Fp16s:
    """2 bytes per float and 1 per row: fp16(x * 2^-e) rounded to nearest even, e = floor(log2(max |x|)) of the row.

    Relative error 2^-11 at most, 2^-25 of the row's largest float for those below 2^-14 of it. e is between -127 and
    126; -128 says that the row is not finite, and it is read as NaN. Layout: the R * dim fp16, then the R exponents.
    """

    name = "fp16s"
    code = 1

    def nbytes(self, rows: int, dim: int) -> int:
        """Bytes of (rows, dim) floats."""
        return (2 * dim + 1) * rows

    def encode(self, rows: Floats, out: Bytes, key: int | None = None) -> None:
        """Write (R, dim) floats into `out`, (nbytes,) uint8."""
        end = 2 * rows.size
        _encode(rows.reshape(-1), out[:end].view(np.uint16), out[end:].view(np.int8))

    def decode(self, payload: Bytes, out: Floats) -> None:
        """Fill `out`, (R, dim), from (nbytes,) uint8. DamagedPayload when there are more or fewer bytes."""
        check_size(self.name, payload.size, out.shape, self.nbytes(*out.shape))
        end = 2 * out.size
        _decode(payload[:end].view(np.uint16), payload[end:].view(np.int8), out.reshape(-1))


@compiled(types.void(read_only(types.float32), written(types.uint16), written(types.int8)), floats, half)
def _encode(rows: Floats, halves: npt.NDArray[np.uint16], exponents: npt.NDArray[np.int8]) -> None:
    dim = np.uint64(rows.size // max(exponents.size, 1))  # unsigned: the compiler then sees runs of memory
    for r in range(np.uint64(exponents.size)):
        first = r * dim
        largest = _U(0)
        for j in range(dim):
            largest = max(largest, bits_of(rows[first + j]) & ABS)  # bits order floats, and NaN above infinity
        if largest >= INFINITY:
            exponents[r] = _NOT_FINITE
            for j in range(dim):
                halves[first + j] = 0
            continue
        exponent = min(int(largest >> _U(23)) - 127, 126)  # 2^-127 would be subnormal itself
        exponents[r] = exponent
        scale = float_of(_U(127 - exponent) << _U(23))
        for j in range(dim):
            halves[first + j] = half_of(rows[first + j] * scale)


@compiled(types.void(read_only(types.uint16), read_only(types.int8), written(types.float32)), floats, half)
def _decode(halves: npt.NDArray[np.uint16], exponents: npt.NDArray[np.int8], out: Floats) -> None:
    dim = np.uint64(out.size // max(exponents.size, 1))
    for r in range(np.uint64(exponents.size)):
        first = r * dim
        exponent = int(exponents[r])
        scale = float_of(_U(exponent + 127) << _U(23) if exponent > -127 else _U(1 << 22))  # 2^-127 is subnormal
        if exponent == _NOT_FINITE:
            scale = np.float32(np.nan)
        for j in range(dim):
            out[first + j] = float_of_half(halves[first + j]) * scale
