"""The kernels of a table in plain numpy: slow, short, and the specification that kernels.py is tested against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from embershard.proto.arrays import Floats, Ids
from embershard.proto.optim.initial_rows import initial_rows
from embershard.proto.optim.user_defined import RowOptimizer
from embershard.proto.spec import TableSpec


def clip_gradient(grad: Floats, clip_value: float, clip_norm: float) -> Floats:
    """Every float clamped to +-clip_value, then the row scaled down to the L2 norm clip_norm; 0 turns either off."""
    if clip_value > 0:
        grad = np.clip(grad, np.float32(-clip_value), np.float32(clip_value))
    norm = np.sqrt(np.add.accumulate(grad.astype(np.float64) ** 2)[-1])  # in order, as the kernel adds
    if 0 < clip_norm < norm:
        grad = grad * np.float32(clip_norm / norm)
    return grad


def sum_gradients(scaled: Sequence[tuple[np.float32, Ids, Floats, Floats]]) -> tuple[dict[int, Floats], dict[int, int]]:
    """The sum of scale * gradient per id, in float32 and in order, and the rounded sum of scale * age, at least 1.

    Rows that are not finite are left out.
    """
    sums: dict[int, Floats] = {}
    ages: dict[int, np.float32] = {}
    for scale, ids, gradients, counts in scaled:
        for id_, gradient, age in zip(ids.tolist(), gradients, counts, strict=True):
            if np.isfinite(gradient).all():
                share = scale * gradient
                sums[id_] = sums[id_] + share if id_ in sums else share
                ages[id_] = ages.get(id_, np.float32(0)) + scale * age
    return sums, {id_: max(1, int(np.floor(age + np.float32(0.5)))) for id_, age in ages.items()}


class ReferenceTable:
    """ps.table.Table as a dict from id to (weights, state), with the optimizer's function run as plain Python."""

    def __init__(self, spec: TableSpec, optimizer: RowOptimizer) -> None:
        self.spec = spec
        self._optimizer = optimizer
        self._params = optimizer.params(spec.optimizer)
        self._rows: dict[int, tuple[Floats, Floats]] = {}

    @property
    def num_rows(self) -> int:
        """The number of rows that exist."""
        return len(self._rows)

    def gather(self, ids: Ids) -> Floats:
        """Weights, or first values where an id has no row."""
        out = initial_rows(self.spec.initializer, self.spec.row_seed, ids, self.spec.dim)
        for i, id_ in enumerate(ids.tolist()):
            if id_ in self._rows:
                out[i] = self._rows[id_][0]
        return out

    def apply(self, ids: Ids, gradients: Floats, lr_scale: float = 1.0, ages: Floats | None = None) -> tuple[int, int]:
        """Apply gradients; return the numbers of rows updated and skipped."""
        hyper = np.array([*self._params.values(), 1.0])
        hyper[0] *= lr_scale
        skipped = 0
        ages = np.ones(len(ids), np.float32) if ages is None else ages
        for id_, grad, hyper[-1] in zip(ids.tolist(), gradients, ages, strict=True):
            if not np.isfinite(grad).all():
                skipped += 1
                continue
            if id_ not in self._rows:
                weights = self.gather(np.array([id_]))[0]
                self._rows[id_] = weights, self._optimizer.initial(self.spec.dim, self._params)
            weights, state = self._rows[id_]
            clipped = clip_gradient(grad, self._params["clip_value"], self._params["clip_norm"])
            self._optimizer.function(weights, state, clipped, hyper)
        return len(ids) - skipped, skipped

    def load(self, ids: Ids, rows: Floats, *, keep_state: bool = False) -> None:
        """Set weights; the state starts anew, unless it is kept."""
        for id_, row in zip(ids.tolist(), rows, strict=True):
            known = self._rows.get(id_) if keep_state else None
            state = known[1] if known else self._optimizer.initial(self.spec.dim, self._params)
            self._rows[id_] = row.copy(), state

    def scan(self) -> Iterator[tuple[Ids, Floats, Floats]]:
        """One block of all rows, in the order of their creation."""
        if self._rows:
            weights, state = (np.stack(part) for part in zip(*self._rows.values(), strict=True))
            yield np.array(list(self._rows)), weights, state
