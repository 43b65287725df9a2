"""Gradients of several reads become one part per table: summed by id, in an order that its codec can pack."""

import numpy as np
import pytest
import torch

from embershard.proto.routing import Placement, make_route
from embershard.proto.spec import SGD, Constant, TableSpec
from embershard.worker.session.gradients import RowGradients, merge, to_arrays

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
