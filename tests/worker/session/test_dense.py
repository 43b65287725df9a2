"""Dense parameters as blocks: in the order of their route where the placement is even, and right where it is not."""

import numpy as np
import pytest
import torch
from torch import nn

from embershard.proto.routing import NUM_BUCKETS, Placement, make_route
from embershard.proto.spec import SGD, Constant, TableSpec
from embershard.worker.compression.low_rank import ParameterSlice
from embershard.worker.session.dense import BLOCK, DenseWeights, layout_seed
from embershard.worker.session.gradients import RowGradients, merge, to_arrays

SPEC = TableSpec(name="dense", dim=BLOCK, optimizer=SGD(lr=1.0), initializer=Constant(), id_space="dense")
SCATTERED = Placement(1, (0, 1, 2), np.random.default_rng(0).integers(0, 3, NUM_BUCKETS).astype(np.uint16))
PLACEMENTS = [Placement.even(1), Placement.even(2), Placement.even(4), SCATTERED]


def make(placement, before=None):
    """A model whose weights are routed by a placement, which takes the place of another one where one is given."""
    model = nn.Sequential(nn.Linear(70, 50), nn.Linear(50, 3, bias=False), nn.Conv2d(3, 5, 2))
    model[2].to(memory_format=torch.channels_last)
    dense = DenseWeights(SPEC, list(model.named_parameters()), before or placement)
    dense.gradients()
    dense.place(placement)
    return model, dense


def on_shards(dense, values, route):
    """What a pull of `route` gives when the shards hold `values` in the order of dense.ids."""
    found = {int(id_): row for id_, row in zip(dense.ids, values, strict=True)}
    return np.array([found[int(id_)] for id_ in route.ids])


@pytest.mark.parametrize("before", [None, Placement.even(3), SCATTERED], ids=["first", "even", "scattered"])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: f"{p.num_shards}")
@pytest.mark.parametrize("trained", [(True,) * 5, (True, False, True, False, True), (False,) * 4 + (True,)])
def test_gradients_and_pulled_rows_find_their_parameters(placement, before, trained):
    model, dense = make(placement, before)
    first = [parameter.detach().clone() for parameter in model.parameters()]
    values = dense.values().copy()
    dense.accept(dense.reads(), on_shards(dense, values, dense.reads()), clock=0)
    steps = []
    for parameter, train in zip(model.parameters(), trained, strict=True):
        parameter.requires_grad_(train)
        parameter.grad = torch.randn(parameter.shape).to(memory_format=torch.preserve_format) if train else None
        steps.append(torch.zeros(parameter.shape) if parameter.grad is None else parameter.grad.clone())
    pushed = dense.gradients()
    route, gradients = pushed.route, pushed.gradients.numpy()
    assert pushed.spec is dense.spec
    assert all(parameter.grad is None for parameter in model.parameters())
    row_of = {int(id_): number for number, id_ in enumerate(dense.ids)}
    for id_, gradient in zip(route.ids, gradients, strict=True):
        values[row_of[int(id_)]] -= gradient
    assert len(route.ids) == len(dense.reads().ids)
    dense.accept(dense.reads(), on_shards(dense, values, dense.reads()), clock=1)
    for parameter, start, step in zip(model.parameters(), first, steps, strict=True):
        assert torch.equal(parameter.detach(), start - step)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
def test_under_an_even_placement_blocks_are_routed_in_their_own_order(num_shards):
    _, dense = make(Placement.even(num_shards))
    np.testing.assert_array_equal(dense.reads().ids, dense.ids)


def test_a_push_on_its_way_keeps_its_gradients():
    model, dense = make(Placement.even(2))
    pushed = []
    for value in (1.0, 2.0):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        gradients = dense.gradients()
        pushed.append(gradients.gradients)
    assert [rows.max() for rows in pushed] == [1.0, 2.0]


def test_the_rest_of_a_parameters_last_block_takes_no_gradient():
    model, dense = make(Placement.even(2))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    pushed = dense.gradients()
    assert np.isnan(pushed.gradients.numpy()).sum() == sum(parameter.numel() for parameter in model.parameters())
    assert np.nansum(pushed.gradients.numpy()) == 0.0


def test_a_sparse_gradient_of_a_dense_parameter_is_pushed_whole():
    embedding = nn.Embedding(3, 2, sparse=True)
    dense = DenseWeights(SPEC, [("weight", embedding.weight)], Placement.even(1))
    embedding(torch.tensor([2, 2])).sum().backward()
    pushed = dense.gradients()
    assert pushed.gradients.numpy()[0, :6].tolist() == [0, 0, 0, 0, 2, 2]


@pytest.mark.parametrize(("numel", "num_blocks"), [(1, 1), (BLOCK - 1, 1), (BLOCK, 1), (BLOCK + 1, 2), (2 * BLOCK, 2)])
def test_a_parameter_takes_the_fewest_blocks_that_hold_it(numel, num_blocks):
    parameter, last = nn.Parameter(torch.ones(numel)), nn.Parameter(torch.full((3,), 2.0))
    dense = DenseWeights(SPEC, [("full", parameter), ("last", last)], Placement.even(2))
    assert dense.num_blocks == num_blocks + 1
    assert dense.layout.places == [ParameterSlice(0, (numel,)), ParameterSlice(num_blocks, (3,))]
    parameter.grad, last.grad = torch.full((numel,), 3.0), torch.full((3,), 4.0)
    pushed = dense.gradients()
    for blocks, first, second in ((dense.values(), 1.0, 2.0), (pushed.gradients.numpy(), 3.0, 4.0)):
        want = np.zeros((num_blocks + 1, BLOCK), np.float32)
        want.reshape(-1)[:numel], want[-1, :3] = first, second
        np.testing.assert_array_equal(blocks, want)  # zeros behind the parameters


@pytest.mark.parametrize("pushes", [False, True], ids=["pulled", "pushed"])
def test_a_parameter_that_was_given_other_memory_is_followed(pushes):
    model, dense = make(Placement.even(2))
    ones = np.ones((dense.num_blocks, BLOCK), np.float32)
    last = list(model.parameters())[-1]  # one is enough
    last.data = last.detach().clone()
    last.grad = torch.ones_like(last)
    if pushes:
        dense.gradients()
        assert last.data_ptr() >= model[0].weight.data_ptr()
    dense.accept(dense.reads(), ones, clock=0)
    assert all(torch.equal(parameter, torch.ones_like(parameter)) for parameter in model.parameters())


def test_what_was_forgotten_is_pulled_again_frozen_parameters_with_it():
    model, dense = make(Placement.even(2))
    model[0].requires_grad_(False)
    assert dense.stale(0)
    assert len(dense.reads().ids) == dense.num_blocks  # the frozen ones are pulled once, too
    dense.accept(dense.reads(), dense.values().copy(), clock=0)
    assert not dense.stale(0)
    assert len(dense.reads().ids) < dense.num_blocks
    dense.forget()
    assert dense.stale(0)
    assert len(dense.reads().ids) == dense.num_blocks


def test_dense_weights_on_several_devices_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"dense parameters lie on several devices \(cpu, meta\)"):
        DenseWeights(SPEC, list(model.named_parameters()), Placement.even(1))


def test_workers_with_other_names_or_shapes_of_dense_weights_have_another_seed():
    one, two = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3, 2))
    named = [[("a", one)], [("b", one)], [("a", two)], [("a", one), ("b", one)], [("b", one), ("a", one)]]
    seeds = [layout_seed(parameters) for parameters in named]
    assert len(set(seeds)) == len(named)
    assert layout_seed([("a", nn.Parameter(torch.ones(2, 3)))]) == seeds[0]  # whatever the values are


PLACEMENT = Placement.even(2)


def read(name, ids, value, *, dim=2, padding=None):
    """Gradients of one read: each row is its id, times `value`. `padding`: the id that takes none."""
    spec = TableSpec(name=name, dim=dim, optimizer=SGD(lr=1.0), initializer=Constant())
    route = make_route(np.array(ids), spec.space_key, PLACEMENT)
    gradients = torch.from_numpy(route.ids).float().mul(value).unsqueeze(1).expand(-1, dim).contiguous()
    position = None if padding is None else route.ids.tolist().index(padding)
    return RowGradients(spec, route, gradients, position)


def by_id(part):
    return dict(zip(part.route.ids.tolist(), part.gradients.tolist(), strict=True))


def test_each_table_has_one_part_with_the_gradients_of_an_id_summed():
    reads = [read("a", [9, 1, 4], 1.0), read("b", [4, 7], 1.0, dim=1), read("a", [4, 8, 9], 10.0, padding=8)]
    a, b = merge(reads, PLACEMENT)
    assert by_id(a) == {1: [1.0, 1.0], 4: [44.0, 44.0], 9: [99.0, 99.0]}
    assert by_id(b) == {4: [4.0], 7: [7.0]}
    (name_a, route_a, rows_a), (name_b, _, rows_b) = to_arrays([a, b])
    assert (name_a, name_b) == ("a", "b")
    assert route_a is a.route
    np.testing.assert_array_equal(rows_a, a.gradients.numpy())
    np.testing.assert_array_equal(rows_b, b.gradients.numpy())
    assert reads[0].gradients.max() == 9.0  # what was collected stays as it was


@pytest.mark.parametrize("packed", [True, False])
def test_ids_of_several_reads_ascend_on_each_shard_where_they_travel_packed(packed):
    many = list(range(50, 0, -1))
    reads = [read("a", many[:30], 1.0), read("b", [1], 1.0), read("a", many[20:], 1.0)]
    part, _ = merge(reads, PLACEMENT, lambda table: packed and table == "a")
    ids = [part.route.ids[start:stop] for start, stop in zip(part.route.splits, part.route.splits[1:], strict=False)]
    assert all(len(shard) > 1 for shard in ids)
    assert all((np.diff(shard) > 0).all() for shard in ids) == packed
    assert by_id(part) == {id_: [(1.0 + (21 <= id_ <= 30)) * id_] * 2 for id_ in many}
