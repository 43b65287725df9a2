"""Dense parameters as blocks: in the order of their route where the placement is even, and right where it is not."""

import numpy as np
import pytest
import torch
from torch import nn

from embershard.proto.routing import NUM_BUCKETS, Placement, Route
from embershard.proto.spec import SGD, Constant, TableSpec
from embershard.worker.dense import BLOCK, DenseWeights, Floats

SPEC = TableSpec(name="dense", dim=BLOCK, optimizer=SGD(lr=1.0), initializer=Constant(), id_space="dense")
SCATTERED = Placement(1, 3, np.random.default_rng(0).integers(0, 3, NUM_BUCKETS).astype(np.uint16))
PLACEMENTS = [Placement.even(1), Placement.even(2), Placement.even(4), SCATTERED]


def make(placement: Placement) -> tuple[nn.Module, DenseWeights]:
    model = nn.Sequential(nn.Linear(70, 50), nn.Linear(50, 3, bias=False), nn.Conv2d(3, 5, 2))
    model[2].to(memory_format=torch.channels_last)
    return model, DenseWeights(SPEC, list(model.named_parameters()), placement)


def on_shards(dense: DenseWeights, values: Floats, route: Route) -> Floats:
    """What a pull of `route` gives when the shards hold `values` in the order of dense.ids."""
    found = {int(id_): row for id_, row in zip(dense.ids, values, strict=True)}
    return np.array([found[int(id_)] for id_ in route.ids])


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: f"{p.num_shards}")
@pytest.mark.parametrize("trained", [(True,) * 5, (True, False, True, False, True), (False,) * 4 + (True,)])
def test_gradients_and_pulled_rows_find_their_parameters(placement: Placement, trained: tuple[bool, ...]) -> None:
    model, dense = make(placement)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    values = dense.values().copy()
    dense.accept(dense.reads(), on_shards(dense, values, dense.reads()), clock=0)
    steps = []
    for parameter, train in zip(model.parameters(), trained, strict=True):
        parameter.requires_grad_(train)
        parameter.grad = torch.randn(parameter.shape).to(memory_format=torch.preserve_format) if train else None
        steps.append(torch.zeros(parameter.shape) if parameter.grad is None else parameter.grad.clone())
    pushed = dense.gradients()
    assert pushed is not None
    name, route, gradients = pushed
    assert name == "dense"
    assert all(parameter.grad is None for parameter in model.parameters())
    row_of = {int(id_): number for number, id_ in enumerate(dense.ids)}
    for id_, gradient in zip(route.ids, gradients, strict=True):
        values[row_of[int(id_)]] -= gradient
    assert len(route.ids) == len(dense.reads().ids)
    dense.accept(dense.reads(), on_shards(dense, values, dense.reads()), clock=1)
    for parameter, start, step in zip(model.parameters(), before, steps, strict=True):
        assert torch.equal(parameter.detach(), start - step)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
def test_under_an_even_placement_blocks_are_routed_in_their_own_order(num_shards: int) -> None:
    _, dense = make(Placement.even(num_shards))
    np.testing.assert_array_equal(dense.reads().ids, dense.ids)


def test_a_push_on_its_way_keeps_its_gradients() -> None:
    model, dense = make(Placement.even(2))
    pushed = []
    for value in (1.0, 2.0):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        gradients = dense.gradients()
        assert gradients is not None
        pushed.append(gradients[2])
    assert [rows.max() for rows in pushed] == [1.0, 2.0]


def test_the_rest_of_a_parameters_last_block_takes_no_gradient() -> None:
    model, dense = make(Placement.even(2))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    pushed = dense.gradients()
    assert pushed is not None
    assert np.isnan(pushed[2]).sum() == sum(parameter.numel() for parameter in model.parameters())
    assert np.nansum(pushed[2]) == 0.0


def test_a_sparse_gradient_of_a_dense_parameter_is_pushed_whole() -> None:
    embedding = nn.Embedding(3, 2, sparse=True)
    dense = DenseWeights(SPEC, [("weight", embedding.weight)], Placement.even(1))
    embedding(torch.tensor([2, 2])).sum().backward()
    pushed = dense.gradients()
    assert pushed is not None
    assert pushed[2][0, :6].tolist() == [0, 0, 0, 0, 2, 2]
