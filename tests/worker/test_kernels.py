"""Rows numbered in the order in which a batch uses them first, and rows that a worker trains itself."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.proto import spec
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Table
from embershard.worker.kernels import LocalRowOptimizer, by_first_use, by_first_use_in_torch
from embershard.worker.nn.embedding import _in_order_of_use


@given(st.lists(st.integers(0, 9), max_size=30))
def test_rows_are_numbered_as_they_come_and_those_that_do_not_come_last(batch):
    found = by_first_use(np.array(batch, np.int64), 10)
    used = list(dict.fromkeys(batch))
    assert found.order.tolist() == used + [row for row in range(10) if row not in used]
    assert found.order[found.numbers].tolist() == batch
    assert found.rank[found.order].tolist() == list(range(10))
    in_torch = by_first_use_in_torch(torch.tensor(batch, dtype=torch.int64), 10)
    assert [part.tolist() for part in in_torch] == [part.tolist() for part in found]


def test_a_bag_reads_the_same_rows_whatever_their_numbers():
    rows, index = torch.randn(7, 3), torch.tensor([[4, 2], [2, 6], [4, 0]])
    numbers, ordered, padding = _in_order_of_use(index, rows, 6)
    assert torch.equal(ordered[numbers], rows[index])
    assert numbers.tolist() == [[0, 1], [1, 2], [0, 3]]
    assert padding == 2
    assert _in_order_of_use(index, rows, None)[2] is None


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
