"""A values codec as a user might write it, in numpy: a byte per float, its sign and the logarithm of its size.

Slow beside those of proto/codec, it loses on a fast link: what bar_bandwidth.py needs to hold the break-even of the
formula against a measured one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embershard.proto.codec.custom import values_codec

_STEPS, _ONE = 4, 110  # of an octave; the code of 1.0: codes 1..126 are 2**-27 to 2**4, 0 is zero, 127 not a number


def read_log8(payload: npt.NDArray[np.uint8], rows: int, dim: int) -> npt.NDArray[np.float32]:
    code = payload.reshape(rows, dim)
    size = np.exp2(((code & 127).astype(np.float32) - _ONE) / _STEPS)
    size[(code & 127) == 0] = 0.0
    size[(code & 127) == 127] = np.nan
    return np.where(code > 127, -size, size).astype(np.float32)


@values_codec(decode=read_log8, nbytes=lambda rows, dim: rows * dim)
def log8(rows: npt.NDArray[np.float32], key: int | None) -> npt.NDArray[np.uint8]:
    with np.errstate(divide="ignore", invalid="ignore"):
        code = np.rint(np.log2(np.abs(rows)) * _STEPS) + _ONE
    code = np.where(np.isfinite(rows), np.clip(code, 0, 126), 127)
    return (code + 128 * np.signbit(rows)).astype(np.uint8)
