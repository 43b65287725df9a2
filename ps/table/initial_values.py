"""First values of a row: a function of (row_seed, id, position) alone, the same bits on every machine.

Random floats come from SplitMix64 (Steele et al. 2014) started at mix64(id, row_seed), 32 bits each. Normal ones are
the inverse of the normal distribution by Wichura's AS 241 (PPND7, 1988), with a logarithm of our own: a libm's last
bits differ from machine to machine, while + - * / and sqrt are exact everywhere.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from embershard.proto.compiled.jit import called, inlined
from embershard.proto.routing import mix64
from embershard.proto.spec import Constant, Initializer, Normal, Uniform

CONSTANT, UNIFORM, NORMAL = 0, 1, 2
GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's step

_U = np.uint64
_UNIT = 2.0**-32
_LN2 = 0.6931471805599453


def initializer_code(initializer: Initializer) -> tuple[int, npt.NDArray[np.float64]]:
    """Kind and numbers of an initializer as the kernels take them."""
    if isinstance(initializer, Constant):
        return CONSTANT, np.array([initializer.value, 0.0, 0.0])
    if isinstance(initializer, Uniform):
        # rounding to float32 must not reach high
        below = np.nextafter(np.float32(initializer.high), np.float32(-np.inf))
        ceiling = max(np.float32(initializer.low), below)
        return UNIFORM, np.array([initializer.low, initializer.high - initializer.low, ceiling])
    assert isinstance(initializer, Normal), initializer
    return NORMAL, np.array([initializer.mean, initializer.std, 0.0])


@inlined
def _minus_log(k: np.uint64) -> float:
    """-log(k / 2**33) for 0 < k < 2**33, to 1e-12: the fraction in [0.7, 1.42) by the series of artanh."""
    fraction, exponent = math.frexp(float(k))
    if fraction < 0.7071067811865476:
        fraction += fraction
        exponent -= 1
    s = (fraction - 1.0) / (fraction + 1.0)
    q = s * s
    series = ((((q / 13.0 + 1.0 / 11.0) * q + 1.0 / 9.0) * q + 1.0 / 7.0) * q + 1.0 / 5.0) * q + 1.0 / 3.0
    return (33.0 - exponent) * _LN2 - 2.0 * s * (1.0 + q * series)


@inlined
def normal_quantile(bits: np.uint64) -> float:
    """The standard normal's quantile at (bits + 0.5) / 2**32, AS 241's PPND7."""
    q = (float(bits) + 0.5) * _UNIT - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        over = ((59.109374720 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179
        return q * over / (((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0)
    tail = bits if q < 0.0 else _U(0xFFFFFFFF) - bits
    r = math.sqrt(_minus_log(tail + tail + _U(1)))
    if r <= 5.0:
        r -= 1.6
        z = ((0.17023821103 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777
        z /= (0.12021132975 * r + 0.73700164250) * r + 1.0
    else:
        r -= 5.0
        z = ((0.017337203997 * r + 0.42868294337) * r + 3.0812263860) * r + 6.6579051150
        z /= (0.012258202635 * r + 0.24197894225) * r + 1.0
    return -z if q < 0.0 else z


@called
def write_initial(
    row: npt.NDArray[np.float32], id_: np.int64, seed: np.uint64, kind: np.uint64, bounds: npt.NDArray[np.float64]
) -> None:
    """Write an id's first weights."""
    if kind == _U(CONSTANT):
        for j in range(row.size):
            row[j] = bounds[0]
        return
    state = mix64(_U(id_), seed)
    bits = _U(0)
    for j in range(row.size):
        if j & 1:
            bits >>= _U(32)
        else:
            state += _U(GOLDEN)
            bits = mix64(state, _U(0))
        word = bits & _U(0xFFFFFFFF)
        if kind == _U(NORMAL):
            row[j] = bounds[0] + bounds[1] * normal_quantile(word)
        else:
            row[j] = min(bounds[0] + bounds[1] * (float(word) * _UNIT), bounds[2])
