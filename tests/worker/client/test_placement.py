"""A client goes over to another placement: routes that were made before, and residuals, follow the ids."""

import numpy as np
import pytest

from embershard.proto.codec.name import CodecName
from embershard.proto.errors import WrongPlacement
from embershard.proto.messages import TableGradients
from embershard.proto.routing import NUM_BUCKETS, Placement, make_route, regroup
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.worker.client.routes import Directory
from embershard.worker.compression.compressor import Compressor
from embershard.worker.compression.settings import Compression
from harness.shards import table
from harness.wires import Wires

RANDOM = np.random.default_rng(0)
MOVED = Placement(2, (0, 1), RANDOM.integers(0, 2, NUM_BUCKETS).astype(np.uint16))
SPARSE = Placement(3, (0, 2, 5), RANDOM.choice([0, 2, 5], NUM_BUCKETS).astype(np.uint16))  # shards 1, 3 and 4 have left
IDS = RANDOM.integers(-(2**62), 2**62, 500)
SPEC = table(dim=4)


@pytest.mark.parametrize("placement", [Placement.even(3, 2), MOVED, SPARSE], ids=["even", "moved", "sparse"])
def test_a_regrouped_route_has_the_same_ids_by_the_new_placement_and_the_way_back(placement):
    old = make_route(np.concatenate([IDS, IDS]), SPEC.space_key, Placement.even(2))
    new = regroup(old, placement)
    assert (new.epoch, new.space_key) == (placement.epoch, SPEC.space_key)
    np.testing.assert_array_equal(new.ids[new.index], old.ids)
    for shard in placement.shards:
        part = new.ids[new.slice_of(shard)]
        direct = make_route(IDS, SPEC.space_key, placement)
        assert set(part.tolist()) == set(direct.ids[direct.slice_of(shard)].tolist())
    assert sum(len(new.ids[new.slice_of(shard)]) for shard in placement.shards) == len(old.ids)


def test_routes_keep_their_epoch_and_id_space_when_they_are_cut_and_ordered():
    route = make_route(IDS, 7, MOVED)
    assert (route.epoch, route.space_key) == (2, 7)
    cut = route.select(np.arange(len(route.ids)) % 2 == 0)
    assert (cut.epoch, cut.space_key) == (2, 7)


@pytest.fixture
def client():
    """A client that still goes by the placement before, on shards of the new one."""
    wires = Wires([Shard(index, MOVED, OptimizerRegistry()) for index in range(2)])
    client = wires.client()
    client.directory.current = Placement.even(2, 1)
    client.declare(SPEC)
    return client


def test_pulls_pushes_and_loads_by_routes_of_before_find_the_rows(client):
    old = make_route(IDS, SPEC.space_key, client.placement)
    first = RANDOM.normal(size=(len(old.ids), 4)).astype(np.float32)
    with pytest.raises(WrongPlacement):
        client.load(SPEC.name, old, first)
    client.use_placement(MOVED)
    client.load(SPEC.name, old, first)
    np.testing.assert_array_equal(client.pull([(SPEC.name, old)], keep=True)[0], first)
    step = RANDOM.normal(size=first.shape).astype(np.float32)
    client.push([(SPEC.name, old, step)], clock=0)
    expected = first - step
    into = np.empty_like(first)
    client.pull([(SPEC.name, old)], [into])
    np.testing.assert_array_equal(into, expected)
    new = make_route(old.ids, SPEC.space_key, client.placement)
    np.testing.assert_array_equal(client.pull([(SPEC.name, new)])[0][new.index], expected)
    assert client.num_shards == 2


def test_an_older_placement_and_the_one_now_change_nothing():
    directory, told = Directory(MOVED), []
    directory.subscribe(told.append)
    directory.move(Placement.even(2, 1))
    directory.move(MOVED)
    assert (directory.current, told) == (MOVED, [])
    directory.move(SPARSE)
    assert (directory.current, told) == (SPARSE, [SPARSE])


def push(compressor, route, rows, placement):
    """Pack gradients for all shards, of which nothing arrives anywhere."""
    compressor.begin([(SPEC.name, route, rows)], 1.0)
    for shard in placement.shards:
        part = route.slice_of(shard)
        compressor.pack(TableGradients(SPEC.name, route.ids[part], rows[part]), shard, 0)


def by_id(residual):
    return {int(id_): (*row.tolist(), float(age)) for id_, row, age, _ in zip(*residual, strict=True)}


def test_residuals_follow_their_ids_to_the_shards_that_have_them():
    before = Placement.even(2)
    compressor = Compressor(0, before)
    compressor.settings = Compression(push="topk:0.1")
    compressor.add(compressor.with_codecs(SPEC, dense=False), dense=False)
    route = make_route(IDS, SPEC.space_key, before)
    rows = RANDOM.normal(size=(len(route.ids), 4)).astype(np.float32)
    push(compressor, route, rows, before)
    held = by_id(compressor.residual(SPEC.name))
    compressor.follow(SPARSE)
    assert by_id(compressor.residual(SPEC.name)) == held
    compressor.choose(SPEC.name, push=CodecName())
    for shard in SPARSE.shards:
        new = regroup(route, SPARSE)
        mine = set(new.ids[new.slice_of(shard)].tolist())
        drained = {id_ for part in compressor.drain(shard, 1.0, 2**20) for id_ in part.ids.tolist()}
        assert drained == mine & held.keys()
    assert not compressor.residual_rows()


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1)])
def test_the_residual_of_a_table_has_as_much_room_on_any_number_of_shards(before, after):
    compressor = Compressor(0, Placement.even(before))
    compressor.settings = Compression(push="topk:0.1", residual_rows=8)
    compressor.add(compressor.with_codecs(SPEC, dense=False), dense=False)
    four = make_route(IDS, SPEC.space_key, Placement.even(4))
    first = four.ids[four.slice_of(0)][:1]  # of shard 0 under both
    for ids, placement in ((first, Placement.even(before)), (IDS, Placement.even(after, epoch=2))):
        compressor.follow(placement)
        route = make_route(ids, SPEC.space_key, placement)
        push(compressor, route, RANDOM.normal(size=(len(route.ids), 4)).astype(np.float32), placement)
    assert len(compressor.residual(SPEC.name).ids) == 8
