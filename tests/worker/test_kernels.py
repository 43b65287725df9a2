"""Rows that a worker trains itself."""

import numpy as np
import pytest

from embershard.proto import spec
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Table
from embershard.worker.kernels import LocalRowOptimizer

ROWS, DIM, STEPS = 50, 7, 20


@pytest.mark.parametrize("kind", spec.OPTIMIZERS)
def test_rows_and_their_state_change_as_on_a_shard(kind):
    optimizer = spec.Optimizer.of(kind, {"lr": 0.1, "weight_decay": 0.02})
    table = Table(spec.TableSpec(name="t", dim=DIM, optimizer=optimizer), OptimizerRegistry().find(optimizer))
    formula = LocalRowOptimizer(optimizer)
    rows = table.gather(np.arange(ROWS))
    state = np.tile(formula.initial(DIM), (ROWS, 1))
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        numbers = rng.permutation(ROWS)[: rng.integers(0, ROWS)]
        gradients = rng.standard_normal((len(numbers), DIM)).astype(np.float32)
        formula.update(rows, state, numbers, gradients, 0.1 * 0.9**step)
        table.apply(numbers, gradients, 0.1 * 0.9**step / 0.1)
    np.testing.assert_array_equal(rows, table.gather(np.arange(ROWS)))
    assert state.shape == (ROWS, table.num_state)
