"""How many workers a job has: decided from measurements alone."""

import pytest

from embershard.deploy.scaling import Measured, Scaling, ScalingPolicy

EACH = 1000.0  # samples per second


def measured(workers, rate=None, busy=0.1, waits=0.1):
    return Measured(workers, EACH * workers if rate is None else rate, busy, waits)


def decided(measurements, **policy):
    """The numbers of workers that a job of 2 to 5 is to have after each; None where that does not change."""
    scaling = Scaling(ScalingPolicy(**{"least": 2, "most": 5, **policy}))
    return [None if (one := scaling.on(now)) is None else one.workers for now in measurements]


def test_a_job_grows_one_by_one_to_its_most_workers_while_each_pays():
    assert decided([measured(2), measured(3), measured(4), measured(5), measured(5)]) == [3, 4, 5, None, None]


@pytest.mark.parametrize(
    ("gain", "grows"), [(0.4, False), (0.5, False), (0.6, True), (-1.0, False)], ids=["less", "half", "more", "slower"]
)
def test_it_grows_on_where_the_last_worker_brought_more_than_half_of_what_one_made_before(gain, grows):
    assert decided([measured(2), measured(3, 2 * EACH + gain * EACH)]) == [3, 4 if grows else None]


@pytest.mark.parametrize("now", [measured(2, busy=0.6), measured(2, waits=0.51), measured(5)], ids=str)
def test_it_does_not_grow_where_shards_are_busy_or_workers_wait_or_there_are_enough(now):
    assert decided([now]) == [4 if now.workers > 4 and now.waits > 0.5 else None]
    assert decided([measured(2, busy=0.59, waits=0.5)]) == [3]


def test_a_worker_leaves_where_they_wait_for_more_than_half_of_their_time_down_to_the_least():
    assert decided([measured(n, waits=0.6) for n in (4, 3, 2)]) == [3, 2, None]


def test_a_number_that_was_too_high_is_not_tried_again_for_a_while():
    calm = [measured(3)] * 4
    assert decided([measured(4, waits=0.6), *calm], patience=3) == [3, None, None, 4, None]


def test_a_worker_that_found_no_place_or_was_lost_is_not_asked_for_again_for_a_while():
    assert decided([measured(2), measured(2), measured(2), measured(2)], patience=2) == [3, None, None, 3]


def test_a_job_that_has_lost_workers_has_its_least_again_however_it_does():
    assert decided([measured(1, busy=0.9, waits=0.9)]) == [2]


def test_the_reason_has_the_figures():
    change = Scaling(ScalingPolicy(least=1, most=2)).on(measured(1, 12345.0, busy=0.25, waits=0.3))
    assert change.reason == "12,345 samples/s, shards are busy for 25% of the time, workers wait for 30%"


@pytest.mark.parametrize(("least", "most"), [(0, 1), (3, 2)])
def test_bounds_without_a_number_between_them_are_refused(least, most):
    with pytest.raises(ValueError, match="least"):
        ScalingPolicy(least=least, most=most)
