"""The row optimizers that every shard has, in float32 and in torch's order of operations.

`fma` stands where torch's vector loops fuse a multiplication and an addition. Weight decay is coupled (added to the
gradient) as in torch, except in AdamW. A step counter is a float of the row: it counts the row's own pushes, and stays
at 2**24, where no bias is left to correct.

The last float of `hyper` is the row's age n: `grad` is the sum c of the gradients of n pushes that a worker kept back.
Where a state is a mean over pushes it moves by n of them, each with c / n as its gradient and c^2 / n as the square of
one. Where it is a sum of squares it grows by c^2 / sqrt(n): the n squares add up to c^2 where gradients are noise, to
c^2 / n where they are all the same (bench/ages.py). With n = 1 all have the bits that they have without ages.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embershard.proto.arrays import Floats
from embershard.proto.compiled.intrinsics import fma
from embershard.proto.compiled.jit import inlined
from embershard.proto.optim.user_defined import RowOptimizer, row_optimizer

Hyper = npt.NDArray[np.float64]

_f = np.float32


@inlined
def _power(base: float, exponent: float | np.float32) -> float:
    """base ** exponent for a whole exponent >= 0, by squaring: a libm's pow differs from machine to machine."""
    result = 1.0
    n = int(exponent)
    while n > 0:
        if n & 1:
            result *= base
        base *= base
        n >>= 1
    return result


@inlined
def _share(age: np.float32) -> np.float32:
    """The share of c^2 by which a sum of squares grows: 1 / sqrt(age); a root at every row would cost time."""
    return _f(1) if age == _f(1) else _f(1) / np.sqrt(age)


@inlined
def _lerp(start: np.float32, end: np.float32, weight: np.float32) -> np.float32:
    """torch.lerp, which begins at the nearer end: from start + (end - start) nothing may be left of a small `end`."""
    if weight < _f(0.5):
        return fma(weight, end - start, start)
    return fma(weight - _f(1), end - start, end)


@row_optimizer(
    settings={"momentum": 0.0, "nesterov": 0.0, "weight_decay": 0.0},
    state_per_dim=lambda settings: int(settings["momentum"] > 0),
)
def sgd(row: Floats, state: Floats, grad: Floats, hyper: Hyper) -> None:
    """torch.optim.SGD with dampening 0; without momentum a row has no state."""
    lr, momentum, decay = _f(hyper[0]), _f(hyper[1]), _f(hyper[3]) * _f(hyper[hyper.size - 1])
    for j in range(row.size):
        g = grad[j]
        if decay > _f(0):
            g = fma(decay, row[j], g)
        if state.size > 0:
            velocity = momentum * state[j] + g
            state[j] = velocity
            g = fma(momentum, velocity, g) if hyper[2] > 0 else velocity
        row[j] = fma(-lr, g, row[j])


@row_optimizer(
    settings={"eps": 1e-10, "initial_accumulator": 0.0, "weight_decay": 0.0},
    state_per_dim=1,
    initial_state="initial_accumulator",
)
def adagrad(row: Floats, state: Floats, grad: Floats, hyper: Hyper) -> None:
    """Duchi et al. 2011, as torch.optim.Adagrad with lr_decay 0."""
    age = _f(hyper[hyper.size - 1])
    lr, eps, decay, share = _f(hyper[0]), _f(hyper[1]), _f(hyper[3]) * age, _share(age)
    for j in range(row.size):
        g = grad[j]
        if decay > _f(0):
            g = fma(decay, row[j], g)
        state[j] = fma(g * share, g, state[j])
        row[j] = row[j] - lr * g / (np.sqrt(state[j]) + eps)


@row_optimizer(
    settings={"eps": 1e-10, "initial_accumulator": 0.0, "weight_decay": 0.0},
    state_per_row=1,
    initial_state="initial_accumulator",
)
def rowwise_adagrad(row: Floats, state: Floats, grad: Floats, hyper: Hyper) -> None:
    """Adagrad with the mean of the squared gradient as the row's one accumulator (Naumov et al. 2019, FBGEMM)."""
    age = _f(hyper[hyper.size - 1])
    lr, eps, decay, share = _f(hyper[0]), _f(hyper[1]), _f(hyper[3]) * age, _share(age)
    squares = _f(0)
    for j in range(row.size):
        g = fma(decay, row[j], grad[j])
        squares = fma(g, g, squares)
    state[0] += squares * share / _f(row.size)
    step = lr / (np.sqrt(state[0]) + eps)
    for j in range(row.size):
        g = fma(decay, row[j], grad[j])
        row[j] = fma(-step, g, row[j])


@row_optimizer(
    settings={"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}, state_per_dim=2, state_per_row=1
)
def adam(row: Floats, state: Floats, grad: Floats, hyper: Hyper) -> None:
    """Kingma & Ba 2015, as torch.optim.Adam; the state is the two moments, then the row's step."""
    n = row.size
    age = _f(hyper[hyper.size - 1])
    share = _f(1) / age
    b1, b2 = _power(hyper[1], age), _power(hyper[2], age)
    beta2, eps, decay = _f(b2), _f(hyper[3]), _f(hyper[4]) * age
    step = state[2 * n] + age
    state[2 * n] = step
    rate = _f(hyper[0] * age / (1.0 - _power(hyper[1], step)))
    correction = _f(np.sqrt(1.0 - _power(hyper[2], step)))
    w1, w2 = _f(1.0 - b1), _f(1.0 - b2)
    for j in range(n):
        g = grad[j]
        if decay > _f(0):
            g = fma(decay, row[j], g)
        mean = g * share
        state[j] = _lerp(state[j], mean, w1)
        state[n + j] = fma(w2 * g, mean, beta2 * state[n + j])
        row[j] = row[j] - rate * state[j] / (np.sqrt(state[n + j]) / correction + eps)


@row_optimizer(
    settings={"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}, state_per_dim=2, state_per_row=1
)
def adamw(row: Floats, state: Floats, grad: Floats, hyper: Hyper) -> None:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019), as torch.optim.AdamW; state as adam's."""
    n = row.size
    age = _f(hyper[hyper.size - 1])
    share = _f(1) / age
    b1, b2 = _power(hyper[1], age), _power(hyper[2], age)
    beta2, eps = _f(b2), _f(hyper[3])
    shrink = _f(_power(1.0 - hyper[0] * hyper[4], age))
    step = state[2 * n] + age
    state[2 * n] = step
    rate = _f(hyper[0] * age / (1.0 - _power(hyper[1], step)))
    correction = _f(np.sqrt(1.0 - _power(hyper[2], step)))
    w1, w2 = _f(1.0 - b1), _f(1.0 - b2)
    for j in range(n):
        g = grad[j]
        mean = g * share
        state[j] = _lerp(state[j], mean, w1)
        state[n + j] = fma(w2 * g, mean, beta2 * state[n + j])
        row[j] = row[j] * shrink - rate * state[j] / (np.sqrt(state[n + j]) / correction + eps)


@row_optimizer(settings={"beta": 1.0, "l1": 0.0, "l2": 0.0, "weight_decay": 0.0}, state_per_dim=2)
def ftrl(row: Floats, state: Floats, grad: Floats, hyper: Hyper) -> None:
    """FTRL-Proximal (McMahan et al. 2013, algorithm 1); the state is z, then n.

    The weight is a function of z and n: a row's first values only enter through its first push, as in the paper, which
    starts at 0.
    """
    dim = row.size
    alpha, beta, l1, l2 = _f(hyper[0]), _f(hyper[1]), _f(hyper[2]), _f(hyper[3])
    age = _f(hyper[hyper.size - 1])
    decay, share = _f(hyper[4]) * age, _share(age)
    if alpha <= _f(0):  # a warm-up that starts at 0: nothing to learn yet
        return
    for j in range(dim):
        g = fma(decay, row[j], grad[j])
        before = np.sqrt(state[dim + j])
        squares = fma(g * share, g, state[dim + j])
        after = np.sqrt(squares)
        z = state[j] + g - (after - before) / alpha * row[j]
        state[j], state[dim + j] = z, squares
        scale = (beta + after) / alpha + l2
        if abs(z) <= l1:
            row[j] = _f(0)
        elif scale > _f(0):  # else the squares of all gradients so far are 0 in float32, and beta and l2 are 0, too
            row[j] = (np.copysign(l1, z) - z) / scale


@row_optimizer(
    settings={"alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "weight_decay": 0.0},
    state_per_dim=lambda settings: 2 if settings["momentum"] > 0 else 1,
)
def rmsprop(row: Floats, state: Floats, grad: Floats, hyper: Hyper) -> None:
    """Hinton's RMSprop, as torch.optim.RMSprop, not centered; the state is the mean square, then any velocity."""
    n = row.size
    lr, eps, momentum = _f(hyper[0]), _f(hyper[2]), _f(hyper[3])
    age = _f(hyper[hyper.size - 1])
    share, alpha, decay = _f(1) / age, _power(hyper[1], age), _f(hyper[4]) * age
    fresh = _f(1.0 - alpha)
    for j in range(n):
        g = grad[j]
        if decay > _f(0):
            g = fma(decay, row[j], g)
        state[j] = fma(fresh * g, g * share, _f(alpha) * state[j])
        scale = np.sqrt(state[j]) + eps
        if state.size > n:
            velocity = momentum * state[n + j] + g / scale
            state[n + j] = velocity
            row[j] = fma(-lr, velocity, row[j])
        else:
            row[j] = row[j] - lr * g / scale


BUILTIN: dict[str, RowOptimizer] = {
    "sgd": sgd,
    "adagrad": adagrad,
    "rowwise_adagrad": rowwise_adagrad,
    "adam": adam,
    "adamw": adamw,
    "ftrl": ftrl,
    "rmsprop": rmsprop,
}
