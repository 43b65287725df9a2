"""The shards' row optimizers, on what a worker holds itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from embershard.proto.arrays import Floats, Ids
from embershard.proto.compiled import intrinsics
from embershard.proto.compiled.intrinsics import address_of, call_row_function, detached, window
from embershard.proto.compiled.jit import compiled
from embershard.proto.optim import clip as gradients_module
from embershard.proto.optim.clip import clip_gradient, is_finite
from embershard.proto.optim.formulas import BUILTIN
from embershard.proto.spec import Optimizer

_ROWS = types.float32[:, ::1]
_IDS = types.Array(types.int64, 1, "C", readonly=True)

_U = np.uint64


class Formula:
    """One of them and its settings, compiled. KeyError for a user-defined optimizer.

    `hyper` are its settings as the compiled function at `address` reads them: hyper[0] is the learning rate.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = BUILTIN[optimizer.name]
        self.settings = self._optimizer.params(optimizer)
        self.hyper = np.array([*self.settings.values(), 1.0])  # the last one: a gradient is that of one step
        self._function = self._optimizer.compiled  # kept: it lives where the address says
        self.address = address_of(self._function)

    def initial(self, dim: int) -> Floats:
        """(num_state,), the first state of a row."""
        return self._optimizer.initial(dim, self.settings)

    def update(self, rows: Floats, state: Floats, numbers: Ids, gradients: Floats, lr: float) -> npt.NDArray[np.bool_]:
        """Change rows (N, dim) and their state (N, num_state) at `numbers` (U,) by gradients (U, dim), clipped.

        A row whose gradient has a NaN or Inf is left alone. Returns which were changed, (U,).
        """
        self.hyper[0] = lr
        clips = np.array([self.settings["clip_value"], self.settings["clip_norm"]])
        changed = np.empty(len(numbers), np.bool_)
        _update((rows, state), numbers, gradients, self.hyper, clips, self.address, changed)
        return changed


@compiled(
    types.void(
        types.UniTuple(_ROWS, 2), _IDS, _ROWS, types.float64[::1], types.float64[::1], types.int64, types.boolean[::1]
    ),
    intrinsics,
    gradients_module,
)
def _update(
    both: tuple[Floats, Floats],
    numbers: Ids,
    gradients: Floats,
    hyper: npt.NDArray[np.float64],
    clips: npt.NDArray[np.float64],
    function: int,
    changed: npt.NDArray[np.bool_],
) -> None:
    """both: the rows and their state. clips: (2,) clip_value, clip_norm."""
    rows, state, gradients, hyper = detached(both[0]), detached(both[1]), detached(gradients), detached(hyper)
    dim, num_state = rows.shape[1], state.shape[1]
    clipped = np.empty(dim, np.float32)
    for i in range(numbers.size):
        number, grad = _U(numbers[i]), window(gradients, _U(i) * _U(dim), dim)
        changed[i] = is_finite(grad)
        if not changed[i]:
            continue
        if clips[0] > 0.0 or clips[1] > 0.0:
            clip_gradient(grad, clipped, clips[0], clips[1])
            grad = window(clipped, _U(0), dim)
        row, its_state = window(rows, number * _U(dim), dim), window(state, number * _U(num_state), num_state)
        call_row_function(function, row, its_state, grad, hyper)
