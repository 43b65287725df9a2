"""What torch does to weights in the workers is what a shard does to their rows."""

import numpy as np
import pytest
import torch
from torch import nn

from embershard.proto import spec
from embershard.proto.spec import FTRL, SGD, Adagrad, Adam, AdamW, Constant, Custom, RMSprop, RowWiseAdagrad
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.reference import ReferenceTable
from embershard.worker.strategy.optimizers import dense_optimizer, table_optimizer

ROWS, DIM, STEPS = 5, 3, 6

DENSE = [
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
    SGD(lr=0.1, momentum=0.9, nesterov=True),
    Adagrad(lr=0.1),
    Adagrad(lr=0.1, eps=0.1, initial_accumulator=0.5, weight_decay=0.1),
    RMSprop(lr=0.01),
    RMSprop(lr=0.01, alpha=0.9, eps=0.1, momentum=0.5, weight_decay=0.1),
    Adam(lr=0.01),
    Adam(lr=0.01, beta1=0.8, beta2=0.95, eps=0.1, weight_decay=0.1),
    AdamW(lr=0.01, weight_decay=0.2),
    Adam(lr=0.01, clip_value=0.3),
]
SPARSE = [
    SGD(lr=0.1, weight_decay=0.1),
    SGD(lr=0.1, clip_value=0.5, clip_norm=0.6),
    Adagrad(lr=0.1, eps=0.1, initial_accumulator=0.5, weight_decay=0.1),
    Adagrad(lr=0.1, clip_norm=0.3),
]
EVERY_STEP = [Adam(lr=0.01, beta1=0.8, weight_decay=0.1), AdamW(lr=0.01, weight_decay=0.2)]


@pytest.fixture
def make_table():
    def make(optimizer):
        table = spec.TableSpec(name="t", dim=DIM, optimizer=optimizer, initializer=Constant(value=0.0))
        reference = ReferenceTable(table, OptimizerRegistry().find(optimizer))
        weights = np.random.default_rng(0).normal(0, 1, (ROWS, DIM)).astype(np.float32)
        reference.load(np.arange(ROWS), weights)
        return reference

    return make


def gradients(step, rows=ROWS):
    return np.random.default_rng(100 + step).normal(0, 1, (rows, DIM)).astype(np.float32)


def sparse(ids, rows, count=ROWS):
    shape = (count, rows.shape[1])
    return torch.sparse_coo_tensor(torch.from_numpy(ids)[None], torch.from_numpy(rows), shape, check_invariants=True)


def settings(optimizer):
    return f"{optimizer.kind}-{list(optimizer.params().values())}"


@pytest.mark.parametrize("optimizer", DENSE, ids=settings)
def test_dense_weights_change_as_on_a_shard(make_table, optimizer):
    table = make_table(optimizer)
    weight = nn.Parameter(torch.from_numpy(table.gather(np.arange(ROWS))))
    by_torch = dense_optimizer(optimizer, [weight])
    for step in range(STEPS):
        scale = 1.0 / (step + 1)
        by_torch.param_groups[0]["lr"] = optimizer.lr * scale
        weight.grad = torch.from_numpy(gradients(step))
        table.apply(np.arange(ROWS), gradients(step), scale)
        by_torch.step()
    np.testing.assert_allclose(weight.detach().numpy(), table.gather(np.arange(ROWS)), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", [*SPARSE, *EVERY_STEP], ids=settings)
def test_rows_of_a_table_change_as_on_a_shard(make_table, optimizer):
    table = make_table(optimizer)
    weight = nn.Parameter(torch.from_numpy(table.gather(np.arange(ROWS))))
    by_torch, _ = table_optimizer(optimizer, [weight])
    for step in range(STEPS):
        # Adam's bias is corrected by the table's steps there and by the row's here: the same where all rows are read
        ids = np.arange(ROWS) if optimizer in EVERY_STEP else np.array([step % ROWS, (step + 2) % ROWS])
        rows = gradients(step, len(ids))
        weight.grad = torch.sparse_coo_tensor(
            torch.from_numpy(ids)[None], torch.from_numpy(rows), (ROWS, DIM), check_invariants=True
        )
        table.apply(ids, rows)
        by_torch.step()
    np.testing.assert_allclose(weight.detach().numpy(), table.gather(np.arange(ROWS)), rtol=2e-5, atol=1e-6)


def test_a_row_that_is_not_finite_is_left_out_and_counted():
    weight = nn.Parameter(torch.zeros(3, 2))
    by_torch, rows = table_optimizer(SGD(lr=1.0), [weight])
    weight.grad = sparse(np.array([0, 2]), np.array([[1.0, 1.0], [np.nan, 1.0]], np.float32), count=3)
    by_torch.step()
    assert weight.tolist() == [[-1.0, -1.0], [0.0, 0.0], [0.0, 0.0]]
    assert rows.skipped == 1


@pytest.mark.parametrize(
    "optimizer",
    [FTRL(lr=0.1), RowWiseAdagrad(lr=0.1), Custom(function="module:function", lr=0.1), Adam(lr=0.1, clip_norm=1.0)],
    ids=settings,
)
def test_what_torch_has_not_for_dense_weights_is_refused(optimizer):
    with pytest.raises(ValueError, match="torch has no"):
        dense_optimizer(optimizer, [nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize(
    "optimizer", [FTRL(lr=0.1), RMSprop(lr=0.1), RowWiseAdagrad(lr=0.1), SGD(lr=0.1, momentum=0.5)], ids=settings
)
def test_what_torch_has_not_for_sparse_gradients_is_refused(optimizer):
    with pytest.raises(ValueError, match=r"torch has no .* for sparse gradients"):
        table_optimizer(optimizer, [nn.Parameter(torch.zeros(1, 1))])


@pytest.mark.parametrize("optimizer", [Adam(lr=0.0), Adagrad(lr=0.0), SGD(lr=0.0)], ids=settings)
def test_a_rate_of_zero_changes_nothing(optimizer):
    weight = nn.Parameter(torch.ones(2, 1))
    by_torch, _ = table_optimizer(optimizer, [weight])
    weight.grad = sparse(np.array([1]), np.array([[3.0]], np.float32), count=2)
    by_torch.step()
    assert weight.tolist() == [[1.0], [1.0]]
