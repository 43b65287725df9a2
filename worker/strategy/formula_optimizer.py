"""The shards' row optimizers on dense parameters of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from numba import types
from torch import Tensor, nn

from embershard.proto.arrays import Floats
from embershard.proto.compiled import intrinsics
from embershard.proto.compiled.intrinsics import call_row_function, detached, window
from embershard.proto.compiled.jit import compiled, inlined
from embershard.proto.optim import clip as gradients_module
from embershard.proto.optim.clip import is_finite
from embershard.proto.spec import Optimizer
from embershard.worker.kernels import LocalRowOptimizer

# what torch.optim calls the state that a row function keeps per element, in its order
_NAMES = {
    "sgd": ("momentum_buffer",),
    "adagrad": ("sum",),
    "rmsprop": ("square_avg", "momentum_buffer"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
}
_CHUNK = 1024  # elements, as in a block of dense weights on a shard
_UNCOUNTED = np.float32(-1)
_NOTHING = np.empty(0, np.float32)
_FLOATS = types.float32[::1]

_U = np.uint64


class RowFormulaOptimizer(torch.optim.Optimizer):
    """A row optimizer of the shards as one of torch's: a step has the same bits in a worker and on a shard.

    torch's own come near: the root in their vector loops is not always the nearest float32, and those with `fused=True`
    round otherwise at the end of a tensor. Parameters are float32 on the CPU; every element has its own state, as
    torch.optim names it, so that a checkpoint of either goes on with the other. ValueError for optimizers that torch
    has not, whose state would have no such names. As on a shard, elements that have a NaN or Inf among their gradients
    are left alone, _CHUNK at once, and counted. Clipping is the caller's.
    """

    def __init__(self, spec: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        if spec.name not in _NAMES:
            raise ValueError(f"torch has no {spec.name}, whose state would have a name; use {', '.join(_NAMES)}")
        self._spec = spec
        self._prepare()
        self.skipped = 0  # times _CHUNK elements that were left alone
        super().__init__(parameters, {"lr": spec.lr})

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy; compiled code is not copied."""
        return {**super().__getstate__(), "_spec": self._spec, "skipped": self.skipped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickled optimizer."""
        super().__setstate__(state)
        self._prepare()

    def _prepare(self) -> None:
        name = self._spec.name
        self._formula = LocalRowOptimizer(self._spec)
        self._initial = dict(zip(_NAMES[name], self._formula.initial(1).tolist(), strict=False))
        self._counts = name in ("adam", "adamw")  # the last float of a row's state is the number of its steps
        self._has_step = name != "sgd"  # in torch, also where no formula reads it

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Change the parameters that have a gradient, each group's at its learning rate."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._formula.hyper[0] = float(group["lr"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            if self._has_step:
                state["step"] = torch.tensor(0.0, device="cpu")
            state.update({name: torch.full_like(parameter, first) for name, first in self._initial.items()})
        changed = [parameter, *(state[name] for name in self._initial)]
        plain = [tensor.contiguous() for tensor in changed]
        values, *moments = (tensor.view(-1).numpy() for tensor in plain)
        both = (*moments, _NOTHING, _NOTHING)[:2]
        steps = np.float32(state["step"]) if self._counts else _UNCOUNTED
        flat = (gradient.to_dense() if gradient.is_sparse else gradient).contiguous().view(-1).numpy()
        self.skipped += _apply(values, both, steps, flat, self._formula.hyper, self._formula.address)
        if self._has_step:
            state["step"] += 1
        for tensor, new in zip(changed, plain, strict=True):
            if new is not tensor:  # a transposed one, for instance
                tensor.copy_(new)
        torch.autograd.graph.increment_version(parameter)  # as writes by torch do, which autograd checks


@compiled(
    types.int64(_FLOATS, types.UniTuple(_FLOATS, 2), types.float32, _FLOATS, types.float64[::1], types.int64),
    intrinsics,
    gradients_module,
)
def _apply(
    values: Floats,
    moments: tuple[Floats, Floats],
    steps: np.float32,
    gradient: Floats,
    hyper: npt.NDArray[np.float64],
    function: int,
) -> int:
    """Update values (N,) by the row function at an address, as rows of _CHUNK elements and what is left of them.

    moments: its state per element, (N,) each, or (0,). steps: those made before, in the state behind them, or
    _UNCOUNTED. Returns how many rows were left out, as their gradient is not finite.
    """
    values, gradient, hyper = detached(values), detached(gradient), detached(hyper)
    first, second = detached(moments[0]), detached(moments[1])
    state = np.empty(2 * _CHUNK + 1, np.float32)
    skipped = 0
    for start in range(0, values.size, _CHUNK):
        size = min(_CHUNK, values.size - start)
        row, grad = window(values, _U(start), size), window(gradient, _U(start), size)
        if not is_finite(grad):
            skipped += 1
            continue
        used = 0
        if first.size > 0:
            used = _copy(first, start, state, used, size)
        if second.size > 0:
            used = _copy(second, start, state, used, size)
        if steps >= 0:
            state[used] = steps
            used += 1
        call_row_function(function, row, window(state, _U(0), used), grad, hyper)
        if first.size > 0:
            _copy(state, 0, first, start, size)
        if second.size > 0:
            _copy(state, size, second, start, size)
    return skipped


@inlined
def _copy(source: Floats, first: int, target: Floats, start: int, size: int) -> int:
    """target[start : start + size] = source[first : first + size], which would compile for 1.3 s; the end in target."""
    for i in range(_U(size)):
        target[_U(start) + i] = source[_U(first) + i]
    return start + size
