"""What `--profile` writes: a split that adds up to the step, and a trace with our spans in it."""

import json
from collections import Counter

import pytest

from embershard.proto.timing import begin_step, end_step, span
from embershard.worker.reporting.profile import TRACED_STEPS, WARM_UP_STEPS, Profile


def train(steps: int) -> None:
    begin_step()
    for _ in range(steps):
        with span("forward"), span("wait"):
            pass
        with span("backward"):
            pass
        end_step()


def test_a_profile_splits_the_steps_behind_warm_up_and_trace(tmp_path):
    with Profile(tmp_path) as profile:
        train(WARM_UP_STEPS + TRACED_STEPS + 7)
    written = json.loads((tmp_path / "profile.json").read_text())
    assert written["steps"] == 7
    assert set(written["parts"]) == {"forward", "wait", "backward", "other"}
    assert sum(part["share"] for part in written["parts"].values()) == pytest.approx(1)
    assert written["overlapped"] == {}
    assert str(tmp_path / "trace.json") in profile.summary()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ranges = Counter(event.get("name") for event in events if event.get("cat") == "user_annotation")
    assert {ranges[name] for name in ("forward", "wait", "backward")} == {TRACED_STEPS}
