"""PowerSGD against the paper's formulas in plain numpy, over parts of a dense table."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from embershard.proto.codec.low_rank import decode_low_rank
from embershard.proto.codec.values import find_values
from embershard.worker.compression.low_rank import LowRank, Place

BLOCK = 16
PLACES = [Place(0, (6, 8)), Place(3, (5,)), Place(4, (12, 2, 3)), Place(9, (2, 2))]
NUM_BLOCKS = 10
IDS = np.random.default_rng(1).permutation(1000)[:NUM_BLOCKS].astype(np.int64)


def make(rank: int = 1, values: str = "none") -> LowRank:
    return LowRank(IDS, BLOCK, PLACES, rank, find_values(values), seed=7)


def gradients(seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    rows = np.zeros((NUM_BLOCKS, BLOCK), np.float32)
    for place in PLACES:
        flat = rows.reshape(-1)[place.start * BLOCK :][: place.size]
        flat[:] = random.standard_normal(place.size)
    return rows


def matrix(rows: np.ndarray, place: Place) -> np.ndarray:
    return rows.reshape(-1)[place.start * BLOCK :][: place.size].reshape(place.shape[0], -1)


def push(low_rank: LowRank, rows: np.ndarray, cuts: tuple[int, ...] = (), rate: float = 1.0) -> np.ndarray:
    """What the shards apply, of a push that is cut into parts."""
    low_rank.begin(IDS, rows, rate)
    ends = (0, *cuts, NUM_BLOCKS)
    applied = np.empty_like(rows)
    for first, last in pairwise(ends):
        payload = low_rank.payload(IDS[first:last], key=first)
        applied[first:last] = decode_low_rank(payload[2:], low_rank._values, last - first, BLOCK)
    return applied


def held(low_rank: LowRank) -> np.ndarray:
    rows = np.zeros((NUM_BLOCKS, BLOCK), np.float32)
    ids, some = low_rank.held()
    rows[[int(np.flatnonzero(IDS == i)[0]) for i in ids]] = some
    return rows


def test_factors_are_those_of_the_paper() -> None:
    low_rank = make()
    q = low_rank._matrices[0].right.astype(np.float64)
    error = np.zeros((6, 8))
    for step in range(4):
        rows = gradients(step)
        applied = push(low_rank, rows)
        m = matrix(rows, PLACES[0]).astype(np.float64) + error
        p = m @ q
        p /= np.linalg.norm(p)
        q = m.T @ p
        error = m - p @ q.T
        np.testing.assert_allclose(matrix(applied, PLACES[0]), p @ q.T, atol=1e-5)


def test_vectors_and_matrices_that_would_not_shrink_go_as_they_are() -> None:
    rows = gradients(0)
    applied = push(make(), rows)
    for place in (PLACES[1], PLACES[3]):
        assert (
            matrix(applied, Place(place.start, (1, place.size))) == matrix(rows, Place(place.start, (1, place.size)))
        ).all()


def test_full_rank_reproduces_the_gradient() -> None:
    rows = gradients(0)
    assert push(make(rank=12), rows).tobytes() == rows.tobytes()


def test_warm_factors_find_a_gradient_of_low_rank() -> None:
    low_rank, rows = make(rank=1), gradients(0)
    for place in (PLACES[0], PLACES[2]):
        part = matrix(rows, place)
        part[:] = np.outer(np.arange(1, len(part) + 1), np.arange(1, place.columns + 1))
    np.testing.assert_allclose(push(low_rank, rows), rows, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("values", ["none", "fp16s", "int8"])
@pytest.mark.parametrize("cuts", [(), (1,), (2, 5), (1, 2, 3, 4, 5, 6, 7, 8, 9)])
def test_what_is_applied_and_what_is_held_add_up_to_the_gradients(values: str, cuts: tuple[int, ...]) -> None:
    low_rank = make(values=values)
    total, applied = np.zeros((NUM_BLOCKS, BLOCK)), np.zeros((NUM_BLOCKS, BLOCK))
    for step in range(5):
        rows = gradients(step)
        total += rows
        applied += push(low_rank, rows, cuts)
    assert np.abs(applied + held(low_rank) - total).max() < 1e-5 * np.abs(total).max()
    assert np.abs(held(low_rank)).max() > 0.1


@pytest.mark.parametrize("cuts", [(1, 7), (5,)])
def test_parts_of_a_push_apply_what_the_whole_does(cuts: tuple[int, ...]) -> None:
    rows = gradients(0)
    whole, parts = push(make(), rows), push(make(), rows, cuts)
    # a part for which the factors would be no smaller goes as it is
    some = np.abs(parts - rows).max(1) > 0
    assert some.any()
    assert parts[some].tobytes() == whole[some].tobytes()


def test_what_is_held_counts_by_the_learning_rate_of_its_own_push() -> None:
    low_rank, rows = make(), gradients(0)
    applied = push(low_rank, rows, rate=1.0)
    left = rows - applied
    applied = push(low_rank, np.zeros_like(rows), rate=0.5)
    np.testing.assert_allclose(applied + held(low_rank), 2 * left, atol=1e-5)


def test_a_push_that_is_given_back_is_held() -> None:
    low_rank, rows = make(), gradients(0)
    low_rank.begin(IDS, rows, 1.0)
    payload = low_rank.payload(IDS, None)
    low_rank.give_back(IDS, payload, 1.0)
    np.testing.assert_allclose(held(low_rank), rows, atol=1e-6)


def test_a_block_that_is_not_finite_is_sent_and_never_held() -> None:
    low_rank = make()
    push(low_rank, gradients(0))
    before, rows = held(low_rank), gradients(1)
    rows[1, 3] = np.nan
    applied = push(low_rank, rows)
    assert np.isfinite(applied).all(1).tolist() == [number != 1 for number in range(NUM_BLOCKS)]
    after = held(low_rank)
    assert np.isfinite(after).all()
    assert after[1].tobytes() == before[1].tobytes()
    np.testing.assert_allclose(applied[[0, 2]], (rows + before)[[0, 2]])


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    low_rank, rows = make(), gradients(0)
    push(low_rank, rows)
    before = held(low_rank)
    low_rank.begin(IDS[4:], gradients(1)[4:], 1.0)
    low_rank.payload(IDS[4:], None)
    assert held(low_rank)[:4].tobytes() == before[:4].tobytes()


def test_a_run_goes_on_from_its_state_to_the_bit() -> None:
    first, second = make(values="int8"), make(values="int8")
    push(first, gradients(0))
    second.load_state_dict(dict(first.state_dict()))
    assert push(second, gradients(1)).tobytes() == push(first, gradients(1)).tobytes()
    assert held(second).tobytes() == held(first).tobytes()


def test_the_state_of_another_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="of another rank"):
        make(rank=2).load_state_dict(dict(make(rank=1).state_dict()))
