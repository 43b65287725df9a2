"""bench/bar_modes.py says what it judged, and with how many seeds."""

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def bar_modes(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("bar_modes")


def test_every_job_and_mode_is_either_judged_or_named_as_not_judged(bar_modes):
    modes = {label: bar_modes.MODES[label] for label in ("sync", "async")}
    seeds, left_out = bar_modes.judged(["frappe-fm", "frappe-deepfm"], modes)
    assert seeds == {"frappe-fm": {"sync": 3, "async": 3}, "frappe-deepfm": {"sync": 1, "async": 1}}
    jobs = set(bar_modes.BARS) - {"frappe-fm", "frappe-deepfm"}
    assert set(left_out) == jobs | set(bar_modes.MODES) - {"sync", "async"}


def test_the_mode_of_equal_bits_is_judged_with_one_seed(bar_modes):
    seeds, left_out = bar_modes.judged(bar_modes.BARS, bar_modes.MODES)
    assert seeds["ncf-gmf"] == {**dict.fromkeys(bar_modes.MODES, 3), "sync-ddp": 1}
    assert not left_out
