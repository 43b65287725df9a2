"""bfloat16: the upper half of a float32, rounded to nearest even."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from embershard.proto.arrays import Bytes, Floats
from embershard.proto.codec.values import floats
from embershard.proto.codec.values.floats import ABS, INFINITY, read_only, written
from embershard.proto.compiled.jit import compiled
from embershard.proto.errors import check_size

_U = np.uint32


class Bf16:
    """2 bytes per float: sign, exponent and 7 bits of mantissa; relative error 2^-8 at most.

    Every float32 but those within rounding of the largest stays finite, and NaN and infinities stay what they are.
    """

    name = "bf16"
    code = 2

    def nbytes(self, rows: int, dim: int) -> int:
        """Bytes of (rows, dim) floats."""
        return 2 * rows * dim

    def encode(self, rows: Floats, out: Bytes, key: int | None = None) -> None:
        """Write (R, dim) floats into `out`, (nbytes,) uint8."""
        _encode(rows.reshape(-1).view(np.uint32), out.view(np.uint16))

    def decode(self, payload: Bytes, out: Floats) -> None:
        """Fill `out`, (R, dim), from (nbytes,) uint8. DamagedPayload when there are more or fewer bytes."""
        check_size(self.name, payload.size, out.shape, self.nbytes(*out.shape))
        _decode(payload.view(np.uint16), out.reshape(-1).view(np.uint32))


@compiled(types.void(read_only(types.uint32), written(types.uint16)), floats)
def _encode(bits: npt.NDArray[np.uint32], out: npt.NDArray[np.uint16]) -> None:
    for i in range(bits.size):
        x = bits[i]
        nearest = (x + _U(0x7FFF) + ((x >> _U(16)) & _U(1))) >> _U(16)
        # rounding would carry some NaNs over into -0
        quiet = (x >> _U(16)) | _U(0x40)
        out[i] = np.uint16(quiet if (x & ABS) > INFINITY else nearest)


@compiled(types.void(read_only(types.uint16), written(types.uint32)), floats)
def _decode(halves: npt.NDArray[np.uint16], out: npt.NDArray[np.uint32]) -> None:
    for i in range(halves.size):
        out[i] = _U(halves[i]) << _U(16)
