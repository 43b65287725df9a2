"""What is held by id: as a dict would hold it, within the capacity."""

from __future__ import annotations

import numpy as np
import pytest

from embershard.proto.arrays import Floats
from embershard.worker.compression.residual_store import ResidualRows
from embershard.worker.compression.residuals import Residuals


def push(held: Residuals, ids: list[int], rows: Floats, rate: float = 1.0) -> tuple[Floats, Floats, ResidualRows]:
    """What is held of ids is replaced by rows; what it was, with ages, and what gave way."""
    at = np.array(ids, np.int64)
    slots = held.find(at)
    before, ages = np.zeros((len(ids), held.dim), np.float32), np.ones(len(ids), np.float32)
    held.add_to(slots, before, ages, rate)
    return before, ages, held.keep(at, slots, rows, ages, rate)


def row(*values: float) -> Floats:
    return np.array([values], np.float32)


def test_a_row_that_was_held_comes_back_once_and_counts_its_pushes():
    held = Residuals(2, 10)
    push(held, [7], row(1, -2))
    before, ages, _ = push(held, [7], row(0.5, 0))
    assert before.tolist() == [[1, -2]]
    assert ages.tolist() == [2]
    before, ages, _ = push(held, [7], row(0, 0))
    assert before.tolist() == [[0.5, 0]]
    assert ages.tolist() == [3]
    assert len(held) == 0


def test_what_is_held_counts_by_the_rate_that_it_was_made_with():
    held = Residuals(1, 10)
    push(held, [1], row(8), rate=0.5)
    before, _, _ = push(held, [1], row(0), rate=2.0)
    assert before.tolist() == [[2]]


def test_a_row_that_is_not_finite_is_never_held():
    held = Residuals(2, 10)
    push(held, [1, 2, 3], np.array([[1, np.nan], [np.inf, 0], [1, 1]], np.float32))
    assert held.held().ids.tolist() == [3]


def test_without_room_the_row_that_was_not_met_for_longest_gives_way_whole():
    held = Residuals(1, 3)
    for number in (1, 2, 3):
        push(held, [number], row(number))
    push(held, [1], row(10))
    _, _, gone = push(held, [4], row(4))
    assert gone.ids.tolist() == [2]
    assert gone.rows.tolist() == [[2]]
    assert sorted(held.held().ids.tolist()) == [1, 3, 4]


def test_what_gives_way_is_sent_in_the_order_of_ids_each_row_with_its_age():
    gone = ResidualRows(
        np.array([5, 2, 9]), row(1, 2, 3).T.copy(), np.array([4, 0, 7], np.float32), np.full(3, 0.5, np.float32)
    )
    sent = gone.scaled(2.0)
    assert sent.ids.tolist() == [2, 5, 9]
    assert sent.rows.ravel().tolist() == [0.5, 0.25, 0.75]
    assert sent.ages.tolist() == [1, 4, 7]  # at least the push that it goes with
    assert sent.rates.tolist() == [2.0] * 3


def test_what_a_push_beyond_the_capacity_cannot_hold_gives_way_itself():
    held = Residuals(1, 2)
    _, _, gone = push(held, [1, 2, 3, 4], np.ones((4, 1), np.float32))
    assert len(held) == 2
    assert sorted([*held.held().ids.tolist(), *gone.ids.tolist()]) == [1, 2, 3, 4]


def test_what_is_given_back_is_held_even_above_the_capacity_and_gives_way_later():
    held = Residuals(1, 2)
    push(held, [1, 2], np.ones((2, 1), np.float32))
    ones = np.ones(3, np.float32)
    held.restore_residual(ResidualRows(np.array([1, 3, 4]), np.ones((3, 1), np.float32), ones, ones), 1.0)
    assert dict(zip(held.held().ids.tolist(), held.held().rows[:, 0].tolist(), strict=True)) == {1: 2, 2: 1, 3: 1, 4: 1}
    gone: list[int] = []
    for number in range(5, 9):
        gone += push(held, [number], row(1))[2].ids.tolist()
    assert len(gone) == 4


def test_rows_get_and_lose_a_momentum():
    held = Residuals(2, 10)
    push(held, [1, 2], np.array([[1, 2], [3, 4]], np.float32), rate=0.5)
    with_momentum = held.with_momentum(True)
    assert with_momentum.held().rates.tolist() == [0.5, 0.5]
    back = with_momentum.with_momentum(False)
    assert back.held().rows.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("capacity", [None, 5, 40])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_or_doubled_whatever_comes(capacity, seed):
    rng = np.random.default_rng(seed)
    held = Residuals(2, capacity)
    known: dict[int, list[float]] = {}
    for _ in range(200):
        ids = rng.choice(100, rng.integers(0, 12), replace=False)
        rows = rng.integers(-1, 2, (len(ids), 2)).astype(np.float32)
        before, _, gone = push(held, ids.tolist(), rows)
        assert before.tolist() == [known.pop(number, [0, 0]) for number in ids.tolist()]
        known |= {n: r for n, r in zip(ids.tolist(), rows.tolist(), strict=True) if any(r)}
        for number, values in zip(gone.ids.tolist(), gone.rows.tolist(), strict=True):
            assert known.pop(number) == values
        now = held.held()
        assert dict(zip(now.ids.tolist(), now.rows.tolist(), strict=True)) == known
        assert capacity is None or len(held) <= capacity


def test_a_restored_one_goes_on_to_the_same_bits():
    rng = np.random.default_rng(0)

    def pushes(held, count, seed):
        rng = np.random.default_rng(seed)
        gone = []
        for _ in range(count):
            ids = rng.choice(300, 12, replace=False)
            gone.append(push(held, ids.tolist(), rng.integers(-1, 2, (12, 2)).astype(np.float32))[2].ids.tolist())
        return gone

    held, again = Residuals(2, 50, momentum=False), Residuals(2, 50)
    pushes(held, 60, int(rng.integers(99)))
    again.load_state_dict(held.state_dict())
    assert pushes(held, 60, 1) == pushes(again, 60, 1)
    for mine, other in zip(held.held(), again.held(), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_the_state_of_another_dim_is_refused():
    held = Residuals(2, None)
    push(held, [1], row(1, 2))
    with pytest.raises(ValueError, match="not 3"):
        Residuals(3, None).load_state_dict(held.state_dict())


@pytest.mark.parametrize("capacity", [None, 256])
def test_a_state_is_restored_whole_above_the_capacity_and_over_what_was_held(capacity):
    held, again = Residuals(2, capacity), Residuals(2, capacity)
    ids, ones = np.arange(600), np.ones(600, np.float32)
    held.restore_residual(ResidualRows(ids, np.ones((600, 2), np.float32), ones, ones), 1.0)
    push(again, [-1], row(5, 5))
    again.load_state_dict(held.state_dict())
    assert again.held().ids.tolist() == ids.tolist()
    before, _, _ = push(again, [599, -1], np.zeros((2, 2), np.float32))
    assert before.tolist() == [[1, 1], [0, 0]]
