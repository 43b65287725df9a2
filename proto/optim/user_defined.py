"""Declare a row optimizer: a function over (row, state, grad, hyper), its state and its settings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType

import numpy as np
import numpy.typing as npt

from embershard.proto import spec
from embershard.proto.arrays import Floats
from embershard.proto.compiled import intrinsics
from embershard.proto.compiled.intrinsics import ROW_FUNCTION
from embershard.proto.compiled.jit import compiled, load
from embershard.proto.errors import BadOptimizer
from embershard.proto.user_modules import files_of

RowFunction = Callable[[Floats, Floats, Floats, npt.NDArray[np.float64]], None]  # over row, state, grad, hyper
Settings = Mapping[str, float]
COMMON = ("clip_value", "clip_norm")  # done for every optimizer, before its function sees the gradient


@dataclass(frozen=True)
class RowOptimizer:
    """A row optimizer: its function in Python, what it keeps per row, and its settings with their defaults.

    The state of a row is `state_per_dim * dim + state_per_row` floats, in this order; either may be a function of the
    settings. `initial_state` is their first value: a number or the name of a setting.
    """

    function: RowFunction
    settings: Settings
    state_per_dim: int | Callable[[Settings], int] = 0
    state_per_row: int | Callable[[Settings], int] = 0
    initial_state: float | str = 0.0

    @property
    def name(self) -> str:
        """The address of the function, `module:function`."""
        return f"{self.function.__module__}:{self.function.__name__}"

    def params(self, optimizer: spec.Optimizer) -> dict[str, float]:
        """Every number that the function gets as `hyper`, by name and in order: lr, the settings, the common ones.

        BadOptimizer when the spec has a setting that the function does not.
        """
        given = optimizer.params()
        known = {"lr": 0.0, **self.settings, **dict.fromkeys(COMMON, 0.0)}
        unknown = [name for name in given if name not in known]
        if unknown:
            reason = f"it has no setting {', '.join(unknown)} (it has: {', '.join(known)})"
            raise BadOptimizer(optimizer=optimizer.name, reason=reason)
        return {name: given.get(name, default) for name, default in known.items()}

    def initial(self, dim: int, params: Settings) -> npt.NDArray[np.float32]:
        """(num_state,) float32, the first state of a row of this dim."""
        per_dim, per_row = (
            count if isinstance(count, int) else count(params) for count in (self.state_per_dim, self.state_per_row)
        )
        value = params[self.initial_state] if isinstance(self.initial_state, str) else self.initial_state
        return np.full(per_dim * dim + per_row, value, np.float32)

    @cached_property
    def compiled(self) -> RowFunction:
        """The function compiled; BadOptimizer with the compiler's reason when it does not compile."""
        try:
            # ours are linked against nothing that numba would have to import first
            users = not self.function.__module__.startswith("embershard.")
            # in the order of their names: another process may have imported them in another one
            files = sorted(set(map(str, files_of([self.function.__module__]).values()))) if users else []
            return load(compiled(ROW_FUNCTION, intrinsics, *files, registries=users)(self.function))
        except Exception as error:  # numba lets some mistakes through as what Python raises
            reason = _compiler_reason(str(error), self.function.__code__)
            raise BadOptimizer(optimizer=self.name, reason=reason) from error


def _compiler_reason(text: str, code: CodeType) -> str:
    """file:line and the first lines of what numba says, without its list of everything else that it tried."""
    numbers = re.findall(rf'File "[^"]*{re.escape(Path(code.co_filename).name)}", line (\d+)', text)
    line = numbers[-1] if numbers else code.co_firstlineno
    said = [part.strip(" >") for part in re.split(r"There are|During:|File", text)[0].splitlines() if part.strip()]
    said = [part for part in said if not part.startswith("Failed in nopython mode")]
    return f"{code.co_filename}:{line} does not compile: {' '.join(said)}"


def row_optimizer(
    *,
    settings: Settings | None = None,
    state_per_dim: int | Callable[[Settings], int] = 0,
    state_per_row: int | Callable[[Settings], int] = 0,
    initial_state: float | str = 0.0,
) -> Callable[[RowFunction], RowOptimizer]:
    """Make a row optimizer of `def f(row, state, grad, hyper) -> None`, as a decorator; shards compile it.

    row: (dim,) float32, changed in place. state: (num_state,) float32, changed in place. grad: (dim,) float32.
    hyper: float64, hyper[0] is the learning rate, then the settings in the order given here; the last one is the row's
    age: the number of gradients that grad sums up (1 without a codec that delays gradients). The function is compiled
    by numba and called once per pushed row. `initial_state` may name a setting. TypeError if the function does not take
    four arguments, ValueError if a setting has the name of a common one (lr, clip_value, ...).
    """
    own = dict(settings or {})
    for name in ("lr", *COMMON):
        if name in own:
            raise ValueError(f"row_optimizer: every optimizer has {name!r}; leave it out of settings")
    if isinstance(initial_state, str) and initial_state not in own:
        raise ValueError(f"row_optimizer: initial_state names {initial_state!r}, which is not in settings")

    def declare(function: RowFunction) -> RowOptimizer:
        if len(inspect.signature(function).parameters) != 4:
            raise TypeError(f"row_optimizer: {function.__qualname__} must take (row, state, grad, hyper)")
        return RowOptimizer(function, own, state_per_dim, state_per_row, initial_state)

    return declare
