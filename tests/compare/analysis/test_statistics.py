"""Estimates over paired seeds, on cases whose answers are known."""

import math

import numpy as np
import pytest

from embershard.compare.analysis import statistics as st
from embershard.compare.results import Estimate


def test_an_interval_is_students():
    found = st.estimate([1, 2, 3, 4, 5])
    half = 2.7764451 * math.sqrt(2.5 / 5)  # t of 4 degrees of freedom at 97.5 %
    assert found.mean == 3
    assert (found.low, found.high) == pytest.approx((3 - half, 3 + half))
    assert found.seeds == 5


def test_one_seed_has_no_interval_and_equal_runs_one_of_no_width():
    assert st.estimate([0.98]) == Estimate(mean=0.98, low=None, high=None, seeds=1)
    assert st.ratio([1.5]).low is None
    assert st.estimate([0.5, 0.5, 0.5]) == Estimate(mean=0.5, low=0.5, high=0.5, seeds=3)


def test_an_interval_holds_the_truth_19_times_of_20():
    rng = np.random.default_rng(0)
    found = [st.estimate(rng.normal(2.0, 1.0, 5).tolist()) for _ in range(1000)]
    share = np.mean([one.low <= 2.0 <= one.high for one in found])
    assert abs(share - 0.95) < 0.03  # 4 standard deviations of 1000 draws


def test_a_ratio_is_the_inverse_of_its_inverse():
    values = [1.2, 1.5, 0.9]
    found, inverse = st.ratio(values), st.ratio([1 / value for value in values])
    assert found.mean == pytest.approx(float(np.prod(values)) ** (1 / 3))
    assert (found.low, found.high) == pytest.approx((1 / inverse.high, 1 / inverse.low))


def test_only_seeds_that_both_have_are_paired():
    assert st.pairs({3: 0.3, 1: 0.1, 2: 0.2}, {1: 1.1, 3: 1.3, 4: 1.4}) == [(0.1, 1.1), (0.3, 1.3)]


def test_break_even_by_formula():
    # 1 MB less per step, 2 ms to encode and decode: 4 Gbit/s
    assert st.crossing_by_formula(1e6, 2e-3) == st.Crossing("value", pytest.approx(4e9))
    assert st.crossing_by_formula(1e6, 0.0) == st.Crossing("always")
    assert st.crossing_by_formula(-1.0, 2e-3) == st.Crossing("never")


def test_break_even_by_measurement_finds_that_of_the_formula():
    def costs(bits):
        return (0.010 + 0.002 + 8e5 / bits, 0.010 + 8.8e6 / bits)  # 100 kB and 1.1 MB

    def crossing(*links):
        return st.crossing_by_measurement({bits: costs(bits) for bits in links})

    assert crossing(1e8, 1e9, 1e10, math.inf).bits_per_second == pytest.approx(4e9)
    assert crossing(1e8, math.inf).bits_per_second == pytest.approx(4e9)  # where no fast link was measured, too
    assert crossing(1e8, 1e9) == st.Crossing("always")
    assert crossing(5e9, math.inf) == st.Crossing("never")


@pytest.mark.parametrize(
    "costs",
    [
        {math.inf: (1.0, 1.1)},
        {math.inf: (1.0, 1.1), 1e9: (1.2, 1.1)},
        {math.inf: (1.2, 1.1), 1e9: (1.0, 1.1), 1e8: (1.2, 1.1)},
    ],
)
def test_break_even_is_not_made_up_from_noise(costs):
    assert st.crossing_by_measurement(costs) == st.Crossing("unknown")


def test_the_interval_of_a_break_even_holds_the_truth_19_times_of_20():
    rng = np.random.default_rng(0)
    x = np.asarray([0.0, 1e-9, 1e-8])  # no limit, 1 Gbit/s, 100 Mbit/s
    found = []
    for _ in range(1000):  # 1 ms of coding against 8e5 bytes: 6.4 Gbit/s
        seeds = 1e-3 - 6.4e6 * x + rng.normal(0, 2e-4, (5, 1)) + rng.normal(0, 1e-4, (5, 3))
        found.append(st.crossing_interval(dict(zip((math.inf, 1e9, 1e8), seeds.T.tolist(), strict=True))))
    share = np.mean([low <= 6.4e9 <= high for low, high in found])
    assert abs(share - 0.95) < 0.03  # 4 standard deviations of 1000 draws


def test_a_break_even_that_noise_can_move_anywhere_has_no_bounds():
    apart = {math.inf: [0.1, -0.05, 0.02], 1e8: [0.05, -0.1, -0.02]}
    assert st.crossing_interval(apart) == (0.0, math.inf)
    sure = {math.inf: [0.1, 0.1, 0.1], 1e8: [-0.3, -0.3, -0.3]}
    assert st.crossing_interval(sure) == (pytest.approx(4e8), pytest.approx(4e8))
