"""Routing is a contract between processes of different versions: golden values, and the kernel against its twin."""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.proto import routing
from embershard.proto.arrays import mix64
from harness import reference_routes
from harness.shards import table

INT64 = np.iinfo(np.int64)
VECTORS = json.loads((Path(__file__).resolve().parents[2] / "docs" / "routing.json").read_text())
ANY_ID = st.integers(INT64.min, INT64.max)
KEYS = st.integers(0, 2**64 - 1)


def assert_is_the_references(route, ids, key, placement):
    want = reference_routes.make_route(ids, key, placement)
    for part in ("ids", "splits", "index"):
        np.testing.assert_array_equal(getattr(route, part), getattr(want, part))


@pytest.mark.parametrize(
    ("x", "key", "want"),
    [
        (0, 0, 0x0),
        (0, 1, 0x5692161D100B05E5),
        (1, 0, 0x5692161D100B05E5),
        (2**63, 12345, 0x6271F2C2F6C525BA),
        (2**64 - 1, 2**64 - 1, 0x0),
        # Steele et al.'s generator adds the golden gamma before the finalizer: the outputs of seed 1234567
        (1234567 + 0x9E3779B97F4A7C15, 0, 6457827717110365317),
        ((1234567 + 2 * 0x9E3779B97F4A7C15) % 2**64, 0, 3203168211198807973),
    ],
)
def test_mix64_has_its_golden_values_and_those_of_splitmix64(x, key, want):
    assert int(routing.mix64(np.uint64(x), np.uint64(key))) == want
    assert int(mix64(np.array([x], np.uint64).view(np.int64), key)[0]) == want


def test_a_route_has_its_golden_value():
    route = routing.make_route(np.array([5, -1, 5, 7, 0, 7, 2**62]), 42, routing.Placement.even(3))
    assert route.ids.tolist() == [-1, 5, 0, 4611686018427387904, 7]
    assert route.splits.tolist() == [0, 1, 4, 5]
    assert route.ids[route.index].tolist() == [5, -1, 5, 7, 0, 7, 2**62]


@settings(max_examples=100)
@given(st.lists(st.integers(-3, 3) | ANY_ID, max_size=60), KEYS, st.sampled_from([1, 2, 3, 7, 4096]))
def test_the_kernel_equals_its_reference(ids, key, num_shards):
    flat, placement = np.array(ids, np.int64), routing.Placement.even(num_shards)
    assert_is_the_references(routing.make_route(flat, key, placement), flat, key, placement)


BATCHES = {
    "none": np.empty(0, np.int64),
    "one": np.array([-7]),
    "equal": np.full(1_000, 3),
    "unique": np.random.default_rng(0).integers(INT64.min, INT64.max, 5_000),
    "in order": np.arange(70_000) % 50_000,
    "skewed": np.random.default_rng(1).zipf(1.2, 3_000),
    "large and skewed": np.random.default_rng(3).zipf(1.2, 65_536).astype(np.int64),
    "blocks": np.repeat(np.arange(300), 256),
}


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_routes_of_many_tables_at_once_are_those_of_each(num_shards):
    placement, inputs = routing.Placement.even(num_shards), [(ids, key) for key, ids in enumerate(BATCHES.values())]
    for (ids, key), route in zip(inputs, routing.make_routes(inputs, placement), strict=True):
        assert_is_the_references(route, ids, key, placement)
        assert_is_the_references(routing.make_route(ids, key, placement), ids, key, placement)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.lists(st.integers(-20, 20), max_size=300), KEYS), max_size=6), st.sampled_from([1, 2, 7]))
def test_the_kernel_of_many_tables_equals_its_reference(tables, num_shards):
    placement, inputs = routing.Placement.even(num_shards), [(np.array(ids, np.int64), key) for ids, key in tables]
    for (ids, key), route in zip(inputs, routing.make_routes(inputs, placement), strict=True):
        assert_is_the_references(route, ids, key, placement)


def assert_ascends(route, ids, num_shards):
    found = routing.ascending(route)
    np.testing.assert_array_equal(found.ids[found.index], ids)
    assert found.splits is route.splits
    for shard in range(num_shards):
        np.testing.assert_array_equal(found.ids[found.slice_of(shard)], np.sort(route.ids[route.slice_of(shard)]))


@settings(max_examples=100)
@given(
    st.lists(ANY_ID, max_size=60)
    | st.lists(st.integers(-5, 3_000), max_size=60)
    | st.lists(st.sampled_from([INT64.min, INT64.max, -1, 0, 2**11, 2**22 - 1]), max_size=20),
    st.sampled_from([1, 2, 5]),
)
def test_a_route_in_ascending_order_reads_the_same(ids, num_shards):
    flat = np.array(ids, np.int64)
    assert_ascends(routing.make_route(flat, 3, routing.Placement.even(num_shards)), flat, num_shards)


def test_many_ids_of_any_range_are_put_in_order():
    far = np.random.default_rng(0).integers(-(2**62), -(2**62) + 2**33, 20_000)
    for ids in (far, np.arange(20_000)[::-1] * 7, np.arange(20_000)[::-1] * 7 * 2**40):
        assert_ascends(routing.make_route(ids, 3, routing.Placement.even(3)), ids, 3)


def test_a_route_without_an_index_is_put_in_order_too():
    route = routing.make_route(np.array([5, 3, 9, 3]), 3, routing.Placement.even(1))
    found = routing.ascending(dataclasses.replace(route, index=np.empty(0, np.int64)))
    assert (found.ids.tolist(), found.index.size) == ([3, 5, 9], 0)


def test_every_shape_is_read_flat():
    ids = np.arange(12).reshape(3, 4).T
    route = routing.make_route(ids, 1, routing.Placement.even(2))
    np.testing.assert_array_equal(route.ids[route.index].reshape(4, 3), ids)


def test_small_and_sequential_ids_spread_evenly_over_shards():
    counts = np.diff(routing.make_route(np.arange(100_000), 7, routing.Placement.even(8)).splits)
    assert 0.95 * counts.mean() < counts.min() <= counts.max() < 1.05 * counts.mean()


@pytest.mark.parametrize("key", [0, 7, 2**64 - 1])
@pytest.mark.parametrize("count", [0, 1, 3, 465, 5_000])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 8, 4096])
def test_even_ids_are_routed_in_their_own_order_and_in_equal_shares(num_shards, count, key):
    ids = routing.even_ids(count, key)
    route = routing.make_route(ids, key, routing.Placement.even(num_shards))
    np.testing.assert_array_equal(route.ids, ids)
    np.testing.assert_array_equal(route.index, np.arange(count))
    assert np.ptp(np.diff(route.splits)) <= 2


@given(st.integers(1, routing.MAX_EVEN), KEYS, st.data())
def test_even_ids_have_the_hashes_that_exact_arithmetic_gives(count, key, draw):
    place = draw.draw(st.integers(0, count - 1))
    (found,) = routing.even_ids_at(np.array([place]), count, key)
    assert int(routing.mix64(np.uint64(int(found) % 2**64), np.uint64(key))) == ((2 * place + 1) << 63) // count


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5, 4096])
def test_even_placement_gives_every_shard_its_share(num_shards):
    counts = np.bincount(routing.Placement.even(num_shards).shard_of, minlength=num_shards)
    assert counts.sum() == routing.NUM_BUCKETS
    assert np.ptp(counts) <= 1


@pytest.mark.parametrize("num_shards", [0, -1, 4097])
def test_an_impossible_number_of_shards_is_named(num_shards):
    with pytest.raises(ValueError, match=str(num_shards)):
        routing.Placement.even(num_shards)


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["id_space"])
def test_the_published_vectors_are_those_of_the_kernel_the_reference_and_plain_integers(case):
    key, ids = int(case["space_key"], 16), np.array(case["ids"], np.int64)
    digest = hashlib.blake2b((case["id_space"] or case["table"]).encode(), digest_size=8).digest()
    assert key == table(case["table"], id_space=case["id_space"]).space_key == int.from_bytes(digest, "little")
    hashes = [int(text, 16) for text in case["hashes"]]
    assert hashes == mix64(ids, key).tolist()
    assert hashes == [plain_mix64(int(text) % 2**64 ^ key) for text in case["ids"]]
    assert case["buckets"] == [value >> 52 for value in hashes]
    for text, shards in case["shards"].items():
        assert shards == [bucket * int(text) // 4096 for bucket in case["buckets"]]
        route = routing.make_route(ids, key, routing.Placement.even(int(text)))
        assert shards == (np.searchsorted(route.splits, route.index, side="right") - 1).tolist()


def plain_mix64(z):
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


@pytest.mark.parametrize("dim", [1, 3, 16, 17, 64])
@pytest.mark.parametrize(("count", "num_rows"), [(0, 0), (0, 4), (1, 1), (500, 7), (500, 900)])
def test_a_sum_of_rows_is_index_add_to_the_bit(dim, count, num_rows):
    rng = np.random.default_rng(dim)
    index = rng.integers(0, max(num_rows, 1), count)
    rows = rng.standard_normal((count, dim)).astype(np.float32)
    want = torch.zeros(num_rows, dim).index_add_(0, torch.from_numpy(index), torch.from_numpy(rows))
    assert np.array_equal(routing.sum_rows(index, rows, num_rows), want.numpy())


def test_rows_that_are_not_finite_spoil_their_own_sum_only():
    rows = np.array([[1], [np.nan], [2], [np.inf]], np.float32)
    rows.flags.writeable = False
    assert np.array_equal(
        routing.sum_rows(np.array([0, 1, 0, 2]), rows, 4), [[3], [np.nan], [np.inf], [0]], equal_nan=True
    )
