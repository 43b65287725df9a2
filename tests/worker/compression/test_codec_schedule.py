"""Which codec, and which density, belongs to a step."""

from __future__ import annotations

from itertools import groupby

import pytest

from embershard.worker.compression.settings import CodecSchedule, warmup_density


def test_a_codec_holds_from_its_step_to_the_next_one():
    schedule = CodecSchedule.of({100: "int8", 0: "none", 200: "topk:0.01"})
    found = [str(schedule.codec(step)) for step in (0, 99, 100, 199, 200, 10**9)]
    assert found == ["none", "none", "int8", "int8", "topk:0.01", "topk:0.01"]


@pytest.mark.parametrize("at", [{}, {1: "none"}, {0: "none", -1: "int8"}])
def test_a_schedule_begins_with_the_first_step(at):
    with pytest.raises(ValueError, match="begins with step 0"):
        CodecSchedule.of(at)


@pytest.mark.parametrize(
    ("ratio", "per_density", "want"),
    [
        (0.001, 2, [(0.25, 2), (0.0625, 2), (0.015625, 2), (0.004, 2), (0.001, 2)]),
        (0.01, 3, [(0.25, 3), (0.0625, 3), (0.015625, 3), (0.01, 1)]),
        (0.0625, 4, [(0.25, 4), (0.0625, 6)]),
        (0.5, 4, [(0.5, 10)]),
        (0.001, 0, [(0.001, 10)]),
    ],
)
def test_dgc_is_warmed_up_over_the_densities_above_its_ratio(ratio, per_density, want):
    densities = [warmup_density(ratio, step, per_density) for step in range(10)]
    assert [(density, len(list(steps))) for density, steps in groupby(densities)] == want
