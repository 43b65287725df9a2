"""A values codec as a user might write it, in numpy: 4 bits per float, naming a quantile of the normal distribution.

Of the kind of NormalFloat (Dettmers et al., "QLoRA", NeurIPS 2023), a row's largest value its scale. Slow beside those
of proto/codec, it loses on a fast link: what bar_bandwidth.py needs to hold the break-even of the formula against a
measured one.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from embershard.proto.codec.user_defined import values_codec

_QUANTILES = np.array([NormalDist().inv_cdf((code + 0.5) / 16) for code in range(16)], np.float32)
LEVELS = _QUANTILES / _QUANTILES[-1]  # -1 .. 1
_BOUNDS = (LEVELS[1:] + LEVELS[:-1]) / 2


def read_normal4(payload: npt.NDArray[np.uint8], rows: int, dim: int) -> npt.NDArray[np.float32]:
    scales, codes = payload[: 4 * rows].view(np.float32), payload[4 * rows :].reshape(rows, -1)
    values = np.stack([LEVELS[codes >> 4], LEVELS[codes & 15]], axis=2).reshape(rows, -1)[:, :dim]
    return values * scales[:, None]


@values_codec(decode=read_normal4, nbytes=lambda rows, dim: rows * (4 + (dim + 1) // 2))
def normal4(rows: npt.NDArray[np.float32], key: int | None) -> bytes:
    scales = np.abs(rows).max(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.searchsorted(_BOUNDS, np.nan_to_num(rows / scales[:, None]), side="right").astype(np.uint8)
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return scales.tobytes() + (codes[:, ::2] << 4 | codes[:, 1::2]).tobytes()
