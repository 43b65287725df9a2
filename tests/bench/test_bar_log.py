"""bench/bar_log.py judges what a log costs by blocks of steps."""

import importlib
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(os.environ.get("EMBERSHARD_PEERS") or ROOT.parent / "shared/peers")


@pytest.fixture
def bar_log(monkeypatch):
    if not PEERS.exists():
        pytest.skip("the programs of the peers are not here")
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("bar_log")


def blocks(bar_log, seconds, log_bytes=0.0):
    return [bar_log.Block(one, one, one, 0.0, log_bytes, 0) for one in seconds]


def test_a_bar_is_missed_by_the_median_of_the_pairs(bar_log):
    theirs = blocks(bar_log, [1.0, 2.0, 4.0, 8.0, 16.0])
    bar = bar_log.Bar("W-PS", "log", "memory", 1.15)
    for factor, passed in ((1.1, True), (1.2, False)):
        ours = blocks(bar_log, [factor * block.wall for block in theirs[:-1]] + [100.0])
        found = bar_log.judge(bar, bar_log.Figures(ours, theirs, []))
        assert found["wall"]["ratio"] == pytest.approx(factor)
        assert found["passed"] is passed


def test_fsync_is_held_to_the_disk_where_that_is_slower_than_a_step(bar_log):
    ours, theirs = blocks(bar_log, [0.03] * 3, 2e6), blocks(bar_log, [0.01] * 3)
    assert bar_log.Figures(ours, theirs, [1e8] * 3).ratios("wall") == pytest.approx([1.5] * 3)
    assert bar_log.Figures(ours, theirs, [1e9] * 3).ratios("wall") == pytest.approx([3.0] * 3)


def test_an_interval_has_the_ranks_of_the_binomial(bar_log):
    assert bar_log.interval(list(range(1, 21))) == (6, 15)
    assert bar_log.interval([3.0]) == (3.0, 3.0)
