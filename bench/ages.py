"""What delay does to an optimizer's learning rate: rows that top-k keeps back, with and without their ages.

The same gradients are pushed at every step, and by top-k with a residual: 1 in 20 rows, or 1 in 20 elements, where the
age of a row is the pushes since anything of it was sent. The effective learning
rate is the slope of the delayed run's displacement on the other's: 1 is no change.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

import numpy as np

from embershard.proto import spec
from embershard.proto.optim.user_defined import RowOptimizer, row_optimizer
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Table

DENSITY = 1 / 20
DIM, NUM_ROWS = 16, 1000
Step = tuple[np.ndarray, np.ndarray]  # ids (U,), gradients (U, DIM)


@row_optimizer(settings={"power": 0.0}, state_per_dim=1)
def adagrad_by(row, state, grad, hyper):
    """Adagrad whose accumulator grows by c^2 / n^power with the sum c of n gradients."""
    lr, share = np.float32(hyper[0]), np.float32(hyper[hyper.size - 1] ** -hyper[1])
    for j in range(row.size):
        state[j] += grad[j] * grad[j] * share
        row[j] -= lr * grad[j] / (np.sqrt(state[j]) + np.float32(1e-10))


OPTIMIZERS: dict[str, tuple[spec.Optimizer, bool]] = {  # and whether it is told the ages
    "sgd": (spec.SGD(lr=0.01), False),
    "adagrad, no ages": (spec.Adagrad(lr=0.01), False),
    "adagrad": (spec.Adagrad(lr=0.01), True),
    "adagrad, c^2/n": (spec.Custom(function="ages:adagrad_by", lr=0.01, settings={"power": 1.0}), True),
    "rowwise_adagrad, no ages": (spec.RowWiseAdagrad(lr=0.01), False),
    "rowwise_adagrad": (spec.RowWiseAdagrad(lr=0.01), True),
    "ftrl, no ages": (spec.FTRL(lr=0.01), False),
    "ftrl": (spec.FTRL(lr=0.01), True),
    "adam, no ages": (spec.Adam(lr=0.001), False),
    "adam": (spec.Adam(lr=0.001), True),
    "adamw": (spec.AdamW(lr=0.001), True),
    "rmsprop, no ages": (spec.RMSprop(lr=0.001), False),
    "rmsprop": (spec.RMSprop(lr=0.001), True),
}


def constant(signal: float, steps: int) -> Iterator[Step]:
    """Every row at every step: `signal` times a fixed direction and normal noise of size 1 - signal."""
    rng = np.random.default_rng(0)
    mean = rng.standard_normal((NUM_ROWS, DIM))
    for _ in range(steps):
        noise = rng.standard_normal((NUM_ROWS, DIM))
        yield np.arange(NUM_ROWS), (signal * mean + (1 - signal) * noise).astype(np.float32)


def clicks(steps: int) -> Iterator[Step]:
    """The gradients of a factorization machine that learns clicks, 4 fields of Zipf ids, by Adagrad."""
    rng = np.random.default_rng(0)
    true, rows = rng.standard_normal((2, NUM_ROWS, DIM)) * np.array([0.5, 0.05])[:, None, None]
    squares = np.full_like(rows, 1e-10)
    chances = 1 / np.arange(1, NUM_ROWS + 1)
    for _ in range(steps):
        ids = rng.choice(NUM_ROWS, (256, 4), p=chances / chances.sum())

        def score(weights: np.ndarray, ids: np.ndarray = ids) -> np.ndarray:
            total = weights[ids].sum(1)
            return ((total**2).sum(1) - (weights[ids] ** 2).sum((1, 2))) / 2

        labels = rng.random(256) < 1 / (1 + np.exp(-score(true)))
        error = 1 / (1 + np.exp(-score(rows))) - labels
        each = error[:, None, None] * (rows[ids].sum(1, keepdims=True) - rows[ids]) / 256
        gradients = np.zeros_like(rows)
        np.add.at(gradients, ids.reshape(-1), each.reshape(-1, DIM))
        touched = np.unique(ids)
        squares[touched] += gradients[touched] ** 2
        rows[touched] -= 0.05 * gradients[touched] / np.sqrt(squares[touched])
        yield touched, gradients[touched].astype(np.float32)


def delayed(steps: Iterator[Step], elements: bool) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(ids, rows, ages) of top-k with a residual: the largest of the rows that a step touches, or of their elements."""
    residual, ages = np.zeros((NUM_ROWS, DIM), np.float32), np.zeros(NUM_ROWS, np.float32)
    for ids, gradients in steps:
        residual[ids] += gradients
        ages[ids] += 1
        held = residual[ids]
        sizes = np.abs(held) if elements else np.linalg.norm(held, axis=1, keepdims=True)
        count = max(1, round(sizes.size * DENSITY))
        mask = np.zeros(sizes.size, bool)
        mask[np.argpartition(-sizes.ravel(), count - 1)[:count]] = True
        mask = np.broadcast_to(mask.reshape(sizes.shape), held.shape)
        touched = mask.any(axis=1)
        sent = ids[touched]
        yield sent, np.where(mask, held, 0)[touched], ages[sent]
        residual[ids] = np.where(mask, 0, held)
        ages[sent] = 0


def effective_rate(name: str, steps: list[Step], elements: bool) -> float:
    """Slope of the delayed displacement on the other, over rows that were sent."""
    optimizer, told = OPTIMIZERS[name]
    registry = OptimizerRegistry()
    found: RowOptimizer = adagrad_by if isinstance(optimizer, spec.Custom) else registry.find(optimizer)
    table_spec = spec.TableSpec(name="t", dim=DIM, optimizer=optimizer, initializer=spec.Constant())
    full, late = (Table(table_spec, found, 1 << 26) for _ in range(2))
    for ids, gradients in steps:
        full.apply(ids, gradients)
    for ids, gradients, ages in delayed(iter(steps), elements):
        late.apply(ids, gradients, 1.0, ages if told else None)
    every = np.arange(NUM_ROWS)
    want, got = full.gather(every).astype(np.float64), late.gather(every).astype(np.float64)
    return float((want * got).sum() / (want * want).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    steps = parser.parse_args().steps
    streams = {f"signal {signal:g}": list(constant(signal, steps)) for signal in (0, 0.05, 0.1, 0.3, 1)}
    streams["clicks"] = list(clicks(steps))
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for what in ("rows", "elements"):
        print(f"{what:26}" + "".join(f"{stream:>13}" for stream in streams))
        for name in OPTIMIZERS:
            rates = {s: round(effective_rate(name, given, what == "elements"), 3) for s, given in streams.items()}
            figures.setdefault(what, {})[name] = rates
            print(f"{name:26}" + "".join(f"{rate:13.2f}" for rate in rates.values()), flush=True)
    print(json.dumps({"bench": "ages", "density": DENSITY, "steps": steps, "effective_learning_rate": figures}))


if __name__ == "__main__":
    main()
