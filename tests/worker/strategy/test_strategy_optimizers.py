"""What torch, or a shard's formula, does to weights in the workers is what a shard does to their rows."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from embershard.proto import spec
from embershard.proto.spec import FTRL, SGD, Adagrad, Adam, AdamW, Constant, Custom, RMSprop, RowWiseAdagrad, TableSpec
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.reference import ReferenceTable
from embershard.ps.table.table import Table
from embershard.worker.strategy.dense import ReplicatedDense
from embershard.worker.strategy.formula_optimizer import RowFormulaOptimizer
from embershard.worker.strategy.optimizers import dense_optimizer, table_optimizer, torch_optimizer

ROWS, DIM, STEPS = 5, 3, 6

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


def row_gradients(step, rows=ROWS):
    return np.random.default_rng(100 + step).normal(0, 1, (rows, DIM)).astype(np.float32)


def sparse(ids, rows, count=ROWS):
    shape = (count, rows.shape[1])
    return torch.sparse_coo_tensor(torch.from_numpy(ids)[None], torch.from_numpy(rows), shape, check_invariants=True)


def settings(optimizer):
    return f"{optimizer.kind}-{list(optimizer.params().values())}"


@pytest.mark.parametrize("optimizer", [*SPARSE, *EVERY_STEP], ids=settings)
def test_rows_of_a_table_change_as_on_a_shard(make_table, optimizer):
    table = make_table(optimizer)
    weight = nn.Parameter(torch.from_numpy(table.gather(np.arange(ROWS))))
    by_torch, _ = table_optimizer(optimizer, [weight])
    for step in range(STEPS):
        # Adam's bias is corrected by the table's steps there and by the row's here: the same where all rows are read
        ids = np.arange(ROWS) if optimizer in EVERY_STEP else np.array([step % ROWS, (step + 2) % ROWS])
        rows = row_gradients(step, len(ids))
        weight.grad = sparse(ids, rows)
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
    for kind in (torch_optimizer, RowFormulaOptimizer):
        with pytest.raises(ValueError, match="torch has no"):
            dense_optimizer(optimizer, [nn.Parameter(torch.zeros(1))], kind)


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


OPTIMIZERS = [
    SGD(lr=0.1, weight_decay=0.01),
    SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    Adagrad(lr=0.1, eps=0.1, initial_accumulator=0.5, weight_decay=0.1),
    RMSprop(lr=0.01),
    RMSprop(lr=0.01, alpha=0.9, eps=0.1, momentum=0.5, weight_decay=0.1),
    Adam(lr=0.02),
    Adam(lr=0.01, beta1=0.8, beta2=0.95, eps=0.1, weight_decay=0.1),
    AdamW(lr=0.01, weight_decay=0.2),
    Adam(lr=0.01, clip_value=0.3),
]
SHAPES = [(1,), (8,), (5, 7), (33, 64)]  # the last one is of several chunks and a part
FORMULA_STEPS = 60


def parameters(seed=0):
    rng = np.random.default_rng(seed)
    return [nn.Parameter(torch.from_numpy(rng.standard_normal(shape).astype(np.float32))) for shape in SHAPES]


def gradients(step):
    rng = np.random.default_rng(100 + step)
    return [(rng.standard_normal(shape) * 10.0 ** rng.integers(-5, 1)).astype(np.float32) for shape in SHAPES]


def step(optimizer, weights, number):
    for weight, gradient in zip(weights, gradients(number), strict=True):
        weight.grad = torch.from_numpy(gradient)
    optimizer.step()


@pytest.mark.parametrize("spec", OPTIMIZERS, ids=lambda spec: spec.kind)
def test_a_step_has_the_bits_that_it_has_on_a_shard(spec):
    weights = parameters()
    ours = dense_optimizer(spec, weights, RowFormulaOptimizer)
    tables = []
    for weight in weights:
        table = Table(TableSpec(name="t", dim=weight.numel(), optimizer=spec), OptimizerRegistry().find(spec))
        table.load(np.zeros(1, np.int64), weight.detach().numpy().reshape(1, -1))
        tables.append(table)
    for number in range(FORMULA_STEPS):
        scale = 1.0 - number / FORMULA_STEPS
        ours.param_groups[0]["lr"] = spec.lr * scale
        step(ours, weights, number)
        for table, gradient in zip(tables, gradients(number), strict=True):
            table.apply(np.zeros(1, np.int64), gradient.reshape(1, -1), scale)
    for table, weight in zip(tables, weights, strict=True):
        np.testing.assert_array_equal(table.gather(np.zeros(1, np.int64))[0], weight.detach().numpy().reshape(-1))


@pytest.mark.parametrize("spec", OPTIMIZERS, ids=lambda spec: spec.kind)
@pytest.mark.parametrize("first", [RowFormulaOptimizer, torch_optimizer])
def test_torchs_own_goes_on_from_its_state_and_the_other_way_round(spec, first):
    weights, others = parameters(), parameters()
    whole = dense_optimizer(spec, weights, RowFormulaOptimizer)
    begun = dense_optimizer(spec, others, first)
    for number in range(5):
        step(whole, weights, number)
        step(begun, others, number)
    then = torch_optimizer if first is RowFormulaOptimizer else RowFormulaOptimizer
    other = dense_optimizer(spec, others, then)
    other.load_state_dict({**other.state_dict(), "state": copy.deepcopy(begun.state_dict()["state"])})
    for number in range(5, 10):
        step(whole, weights, number)
        step(other, others, number)
    for weight, by_both in zip(weights, others, strict=True):
        torch.testing.assert_close(by_both, weight, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("spec", OPTIMIZERS, ids=lambda spec: spec.kind)
def test_a_parameter_that_is_not_contiguous_is_trained_alike(spec):
    plain = [nn.Parameter(weight.detach().clone()) for weight in parameters()[2:]]
    turned = [nn.Parameter(weight.detach().t().contiguous().t()) for weight in plain]
    assert not turned[0].is_contiguous()
    both = [RowFormulaOptimizer(spec, weights) for weights in (plain, turned)]
    for number in range(4):
        for weight, other, gradient in zip(plain, turned, gradients(number)[2:], strict=True):
            weight.grad, other.grad = torch.from_numpy(gradient), torch.from_numpy(gradient.copy())
        for optimizer in both:
            optimizer.step()
    for weight, other in zip(plain, turned, strict=True):
        assert torch.equal(weight, other)


def test_a_parameter_without_a_gradient_is_left_alone():
    weights = parameters()
    optimizer = RowFormulaOptimizer(Adam(lr=0.1), weights)
    before = weights[0].detach().clone()
    weights[1].grad = torch.ones_like(weights[1])
    optimizer.step()
    assert torch.equal(weights[0], before)
    assert list(optimizer.state) == [weights[1]]


def test_a_closure_is_called_with_gradients_on():
    weight = nn.Parameter(torch.ones(3))
    optimizer = RowFormulaOptimizer(SGD(lr=0.5), [weight])

    def closure():
        loss = weight.sum()
        loss.backward()
        return loss.item()

    with torch.no_grad():
        assert optimizer.step(closure) == 3.0
    assert weight.tolist() == [0.5, 0.5, 0.5]


def test_elements_beside_nan_are_left_alone_and_counted_as_on_a_shard():
    weight = nn.Parameter(torch.ones(2500))  # three blocks
    optimizer = RowFormulaOptimizer(SGD(lr=1.0), [weight])
    weight.grad = torch.ones(2500)
    weight.grad[1030] = float("nan")
    optimizer.step()
    assert optimizer.skipped == 1
    assert weight.tolist() == [0.0] * 1024 + [1.0] * 1024 + [0.0] * 452


def test_a_copy_goes_on_alike():
    weights = parameters()
    optimizer = RowFormulaOptimizer(Adam(lr=0.1), weights)
    step(optimizer, weights, 0)
    twin = copy.deepcopy(optimizer)
    for number in range(1, 3):
        step(optimizer, weights, number)
        step(twin, [p for group in twin.param_groups for p in group["params"]], number)
    for weight, other in zip(weights, twin.param_groups[0]["params"], strict=True):
        assert torch.equal(weight, other)


def test_autograd_notices_that_a_weight_was_changed():
    weight = nn.Parameter(torch.ones(3))
    optimizer = RowFormulaOptimizer(SGD(lr=1.0), [weight])
    squares = (weight * weight).sum()
    squares.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


def test_a_sparse_gradient_is_taken_whole():
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = RowFormulaOptimizer(SGD(lr=1.0), [weight])
    weight.grad = torch.sparse_coo_tensor(torch.tensor([[2]]), torch.ones(1, 2), (3, 2), check_invariants=True)
    optimizer.step()
    assert weight.tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("mode", "dtype", "kind"),
    [
        ("ddp", torch.float32, RowFormulaOptimizer),
        ("ddp", torch.float64, torch.optim.SGD),
        ("fsdp", torch.float32, torch.optim.SGD),
    ],
)
def test_float32_on_the_cpu_by_ddp_is_trained_by_the_formula(mode, dtype, kind):
    dense = ReplicatedDense(nn.Linear(2, 1).to(dtype), mode, {"*": SGD(lr=1.0)}, torch.device("cpu"))
    (optimizer,) = dense.optimizers
    assert type(optimizer) is kind
    assert dense.skipped == 0
