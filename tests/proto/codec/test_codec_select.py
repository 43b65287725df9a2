"""The selection of the largest elements, against a full sort."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.proto.codec import select
from embershard.proto.codec.select import REUSE, SMALL, Threshold, count_of, random_positions, row_norms

LARGE = 4 * SMALL  # a sampled threshold decides


def normal(size, seed=0):
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def largest(values, count):
    return np.sort(np.argsort(-np.abs(values), kind="stable")[:count])


def test_a_count_is_the_rounded_share_and_at_least_one():
    shares = [(0.01, 1000), (0.01, 1049), (0.01, 1051), (0.001, 10), (1.0, 7), (0.5, 0), (0.9, 1)]
    assert [count_of(ratio, size) for ratio, size in shares] == [10, 10, 11, 1, 7, 0, 1]


@given(st.integers(0, 2**32), st.integers(1, 99), st.floats(0.001, 1))
def test_a_small_array_gives_its_largest_whatever_their_signs(seed, size, ratio):
    values, count = normal(size, seed), count_of(ratio, size)
    assert np.array_equal(Threshold().select(values, count), largest(values, count))


@pytest.mark.parametrize("size", [99, SMALL, LARGE])
class TestEverySize:
    @pytest.mark.parametrize("nonzero", [0, 1, 5])
    def test_of_a_few_that_are_not_zero_all_are_sent_and_no_zero_but_for_ratio_1(self, size, nonzero):
        values, threshold = np.zeros(size, np.float32), Threshold()
        where = np.linspace(3, size - 1, nonzero).astype(int)
        values[where] = np.float32(1e-45)  # the smallest there is
        for _ in range(3):
            assert threshold.select(values, count_of(0.1, size)).tolist() == where.tolist()
        assert np.array_equal(threshold.select(values, size), np.arange(size))

    def test_of_equal_ones_an_even_share_is_sent(self, size):
        count = count_of(0.1, size)
        positions = Threshold().select(np.full(size, -2, np.float32), count)
        assert positions.size == count
        assert (np.diff(positions) <= np.ceil(size / count)).all()
        assert positions[0] < size / count
        assert positions[-1] >= size - size / count

    def test_what_is_not_finite_comes_first(self, size):
        values = normal(size)
        values[[0, 40, size - 1]] = np.nan, -np.inf, -np.nan
        assert {0, 40, size - 1} <= set(Threshold().select(values, max(3, count_of(0.01, size))).tolist())
        assert Threshold().select(np.full(size, np.nan, np.float32), 7).size == 7

    def test_the_last_rows_do_not_starve(self, size):
        """A threshold that lets too many pass must not take the first of them: with error feedback the end of the
        array would wait until nothing before it is large, step after step."""
        threshold, count, values = Threshold(), count_of(0.1, size), normal(size)
        threshold.select(values, count)
        louder = values * np.float32(1.1)  # more than `count` are over the old threshold
        positions = threshold.select(louder, count)
        assert np.array_equal(positions, largest(louder, count))
        assert np.count_nonzero(positions > size / 2) > 0.4 * count


class TestSampled:
    @pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3])
    def test_the_count_stays_within_the_bounds_while_the_array_changes(self, ratio):
        threshold, count = Threshold(), count_of(ratio, LARGE)
        residual, counts = np.zeros(LARGE, np.float32), []
        for step in range(40):
            residual += normal(LARGE, step)
            positions = threshold.select(residual, count)
            assert np.abs(residual[positions]).min() >= np.delete(np.abs(residual), positions).max()
            assert (np.diff(positions) > 0).all()
            counts.append(positions.size / count)
            residual[positions] = 0
        assert min(counts) >= select.FEWEST
        assert max(counts) <= 1
        assert np.mean(counts) > 0.97

    @pytest.mark.parametrize("factor", [0.01, 0.8, 1.2, 100])
    def test_an_array_that_grew_or_shrank_gets_another_threshold(self, factor):
        threshold, count, values = Threshold(), count_of(0.05, LARGE), normal(LARGE)
        threshold.select(values, count)
        for _ in range(2):
            changed = values * np.float32(factor)
            assert np.array_equal(threshold.select(changed, count), largest(changed, count))

    def test_values_that_repeat_do_not_deceive_the_sample(self, monkeypatch):
        """At a fixed stride, of 100 here, it would meet one column of the rows only, and the array would be sorted."""
        partitioned, kth = [], select._kth
        monkeypatch.setattr(select, "_kth", lambda bits, count: partitioned.append(bits.size) or kth(bits, count))
        values = normal(262_100)
        values[::100] *= 1000
        count = count_of(0.3, values.size)
        assert np.array_equal(Threshold().select(values, count), largest(values, count))
        assert max(partitioned) < values.size

    def test_it_is_sampled_anew_after_many_calls_and_goes_on_from_its_saved_state(self, monkeypatch):
        sampled, sample = [], select._sampled
        monkeypatch.setattr(select, "_sampled", lambda bits, count: sampled.append(1) or sample(bits, count))
        first, count = Threshold(), count_of(0.05, LARGE)
        for step in range(5):
            first.select(normal(LARGE, step), count)
        second = Threshold(**json.loads(json.dumps(dataclasses.asdict(first))))
        for step in range(5, REUSE + 5):
            values = normal(LARGE, step)
            assert np.array_equal(first.select(values, count), second.select(values, count))
        assert first == second
        assert len(sampled) == 3  # one before the copy, and one of each


def test_norms_are_those_of_numpy_and_neither_underflow_nor_overflow():
    rows = np.array([[3e-30, 4e-30], [3e30, -4e30], [0, 0], [3, 4]], np.float32)
    assert row_norms(rows) == pytest.approx(np.array([5e-30, 5e30, 0, 5], np.float32), rel=1e-6)
    for shape in ((0, 4), (5, 1), (100, 17)):
        rows = normal(shape[0] * shape[1]).reshape(shape)
        np.testing.assert_allclose(row_norms(rows), np.linalg.norm(rows.astype(np.float64), axis=1), rtol=1e-6)
    rows[70, 3] = np.nan
    assert 70 in Threshold().select(row_norms(rows), 2)


@given(st.integers(1, 10_000), st.floats(0, 1), st.integers(0, 2**64 - 1))
def test_random_positions_ascend_and_are_a_function_of_the_key(size, share, key):
    count = round(share * size)
    positions = random_positions(size, count, key)
    assert positions.size == count
    assert (np.diff(positions) > 0).all()
    assert count == 0 or (positions[0] >= 0 and positions[-1] < size)
    assert np.array_equal(positions, random_positions(size, count, key))


def test_random_positions_have_golden_values_and_are_drawn_equally_often():
    """Both sides draw them, so they are part of the contract."""
    assert random_positions(1000, 4, 7).tolist() == [18, 454, 678, 929]
    drawn = np.concatenate([random_positions(50, 10, key) for key in range(4000)])
    assert np.abs(np.bincount(drawn, minlength=50) - 800).max() < 5 * np.sqrt(800 * 0.8)
