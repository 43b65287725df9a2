"""First values of rows in plain numpy: what a shard gives for ids that have no row, for those that have no shard.

The specification that ps/table/initial_values.py is tested against.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embershard.proto.arrays import Doubles, Floats, Ids, mix64
from embershard.proto.spec import Constant, Initializer, Normal, Uniform

_GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's step


def initial_rows(initializer: Initializer, row_seed: int, ids: Ids, dim: int) -> Floats:
    """(U, dim) float32 first values: SplitMix64 from mix64(id, row_seed), two floats per step, low 32 bits first."""
    if isinstance(initializer, Constant):
        return np.full((len(ids), dim), initializer.value, np.float32)
    steps = np.arange(1, (dim + 1) // 2 + 1).astype(np.uint64) * np.uint64(_GOLDEN)
    bits = mix64(mix64(ids, row_seed)[:, None] + steps, 0)
    words = np.stack([bits & np.uint64(0xFFFFFFFF), bits >> np.uint64(32)], axis=2).reshape(len(ids), 2 * steps.size)[
        :, :dim
    ]
    if isinstance(initializer, Uniform):
        low, high = initializer.low, initializer.high
        ceiling = max(np.float32(low), np.nextafter(np.float32(high), np.float32(-np.inf)))
        return np.minimum(low + (high - low) * (words * 2.0**-32), np.float64(ceiling)).astype(np.float32)
    assert isinstance(initializer, Normal)
    return (initializer.mean + initializer.std * normal_quantile(words)).astype(np.float32)


def normal_quantile(words: npt.NDArray[np.uint64]) -> Doubles:
    """The standard normal's quantile at (words + 0.5) / 2**32 (Wichura 1988, AS 241, PPND7)."""
    q = (words.astype(np.float64) + 0.5) * 2.0**-32 - 0.5
    r = 0.180625 - q * q
    over = _polynomial(r, 59.109374720, 159.29113202, 50.434271938, 3.3871327179)
    middle = q * over / _polynomial(r, 67.187563600, 78.757757664, 17.895169469, 1.0)
    tail = np.where(q < 0, words, np.uint64(0xFFFFFFFF) - words)
    r = np.sqrt(minus_log(tail + tail + np.uint64(1)))
    near = _polynomial(r - 1.6, 0.17023821103, 1.3067284816, 2.7568153900, 1.4234372777)
    near /= _polynomial(r - 1.6, 0.12021132975, 0.73700164250, 1.0)
    far = _polynomial(r - 5.0, 0.017337203997, 0.42868294337, 3.0812263860, 6.6579051150)
    far /= _polynomial(r - 5.0, 0.012258202635, 0.24197894225, 1.0)
    outside = np.where(r <= 5.0, near, far)
    return np.where(np.abs(q) <= 0.425, middle, np.where(q < 0, -outside, outside))


def minus_log(k: npt.NDArray[np.uint64]) -> Doubles:
    """-log(k / 2**33) by the series of artanh."""
    fraction, exponent = np.frexp(k.astype(np.float64))
    small = fraction < 0.7071067811865476
    fraction, exponent = np.where(small, fraction * 2, fraction), exponent - small
    s = (fraction - 1.0) / (fraction + 1.0)
    q = s * s
    series = _polynomial(q, 1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0)
    return (33.0 - exponent) * 0.6931471805599453 - 2.0 * s * (1.0 + q * series)


def _polynomial(x: Doubles, *coefficients: float) -> Doubles:
    """Horner's rule, highest power first."""
    result = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result = result * x + coefficient
    return result
