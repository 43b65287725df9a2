"""Check, clip and decay a row's gradient before its optimizer runs: parts of compiled loops."""

from __future__ import annotations

import numpy as np

from embershard.proto.arrays import Floats
from embershard.proto.compiled.jit import called, inlined

_LARGEST = np.finfo(np.float32).max


@inlined
def is_finite(grad: Floats) -> bool:
    """Whether it has neither NaN nor Inf; without a branch, so that the loop is a vector loop."""
    bad = False
    for j in range(grad.size):
        bad |= not np.abs(grad[j]) <= _LARGEST
    return not bad


@called
def clip_gradient(grad: Floats, out: Floats, clip_value: float, clip_norm: float) -> None:
    """Clamp every float to +-clip_value, then scale down to the L2 norm clip_norm; 0 turns either off."""
    limit = np.float32(clip_value)
    squares = 0.0
    for j in range(grad.size):
        g = grad[j]
        if clip_value > 0.0:
            g = min(max(g, -limit), limit)
        squares += np.float64(g) * np.float64(g)
        out[j] = g
    norm = np.sqrt(squares)
    if 0.0 < clip_norm < norm:
        scale = np.float32(clip_norm / norm)
        for j in range(grad.size):
            out[j] *= scale
