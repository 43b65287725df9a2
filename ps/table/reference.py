"""The kernels of a table in plain numpy: slow, short, and the specification that kernels.py is tested against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from embershard.proto.arrays import Doubles, Floats, Ids
from embershard.proto.optim.user_defined import RowOptimizer
from embershard.proto.reference import mix64
from embershard.proto.spec import Constant, Initializer, Normal, TableSpec, Uniform
from embershard.ps.table.initial_values import GOLDEN


def initial_rows(initializer: Initializer, row_seed: int, ids: Ids, dim: int) -> Floats:
    """(U, dim) float32 first values: SplitMix64 from mix64(id, row_seed), two floats per step, low 32 bits first."""
    if isinstance(initializer, Constant):
        return np.full((len(ids), dim), initializer.value, np.float32)
    steps = np.arange(1, (dim + 1) // 2 + 1).astype(np.uint64) * np.uint64(GOLDEN)
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
