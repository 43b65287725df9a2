"""Durations in fixed buckets, and what can be read from them."""

import numpy as np
import pytest

from embershard.proto.monitoring.histogram import BOUNDS, DurationHistogram, quantile


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [(0.0, 0), (49e-6, 0), (51e-6, 1), (99e-6, 1), (101e-6, 2), (1.0, 15), (1.63, 15), (1.64, 16), (3600.0, 16)],
)
def test_a_duration_is_counted_in_the_first_bucket_whose_bound_it_does_not_exceed(seconds, bucket):
    histogram = DurationHistogram()
    histogram.add(seconds)
    assert histogram.counts.index(1) == bucket
    assert bucket == sum(bound < seconds for bound in BOUNDS)
    assert (histogram.count, histogram.sum) == (1, seconds)


def test_a_quantile_is_within_its_bucket_of_the_exact_one():
    seconds = np.random.default_rng(7).lognormal(-6, 1.0, 10_000)
    histogram = DurationHistogram()
    for one in seconds:
        histogram.add(one)
    for share in (0.01, 0.5, 0.9, 0.99):
        exact = float(np.quantile(seconds, share))
        assert exact / 2 <= quantile(histogram.counts, share) <= 2 * exact
    assert quantile([0] * 17, 0.5) == 0.0
