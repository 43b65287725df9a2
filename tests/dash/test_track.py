"""Numbers over time keep their newest points as they are, and the beginning ever coarser."""

import math

from embershard.dash.track import Track


def filled(count, capacity=16, peaks=()):
    track = Track(("a",), peaks=peaks, capacity=capacity)
    for i in range(count):
        track.add(float(i), {"a": float(i)})
    return track


def test_the_newest_half_is_kept_as_it_came():
    columns = filled(1000).columns()
    assert columns["time"][-8:] == columns["a"][-8:] == [float(i) for i in range(992, 1000)]


def test_memory_is_bounded_and_the_beginning_stays():
    track = filled(1000)
    assert track.points <= 16
    assert track.columns()["time"][0] == 0.0


def test_older_points_are_averaged_and_peaks_keep_the_larger():
    assert filled(17).columns()["a"][:2] == [0.5, 2.5]
    assert filled(17, peaks=("a",)).columns()["a"][:2] == [1.0, 3.0]


def test_what_was_not_known_is_none_also_beside_a_known_number():
    track = Track(("a",), capacity=8)
    for i in range(8):
        track.add(float(i), {} if i < 3 else {"a": float(i)})
    track.add(8.0, {"a": math.nan})
    assert track.columns()["a"] == [None, 3.0, 4.0, 5.0, 6.0, 7.0, None]
