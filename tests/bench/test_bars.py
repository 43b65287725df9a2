"""What scripts of bench/ make of the figures that they measured."""

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


MET = {"p50_us": 120, "cpu_us": 130, "torch_ratio": 4, "pulls_per_second_32": 5000, "p99_ms_32": 20}


@pytest.mark.parametrize(
    ("name", "value"),
    [("p50_us", 121), ("cpu_us", 131), ("torch_ratio", 4.1), ("pulls_per_second_32", 4999), ("p99_ms_32", 20.1)],
)
def test_bar_latency_judges_32_clients_whatever_others_take(script, name, value):
    bar_latency = script("bar_latency")
    figures = MET | {"pulls_per_second_64": 1, "p99_ms_64": 1e3, "pulls_per_second_8": 1, "p99_ms_8": 1e3}
    assert 64 in bar_latency.CLIENTS
    assert bar_latency.judged(figures) == []
    assert len(bar_latency.judged(figures | {name: value})) == 1


def ways(**changed):
    """Figures of first starts at their bars, some of them changed."""
    figures = {
        "cold-source": {"wall_s": 12.0, "cpu_s": 24.0, "compiled": 14},
        "cold-wheel": {"wall_s": 6.0, "cpu_s": 8.0, "compiled": 0},
        "warm": {"wall_s": 3.0, "cpu_s": 3.0, "compiled": 0},
    }
    return {name: its | changed.get(name.replace("-", "_"), {}) for name, its in figures.items()}


def below(script, figures, shard=0.9, another=14, damaged=1):
    return script("bar_cold").below(figures, shard, {"another processor": another, "a damaged file": damaged})


def test_bar_cold_passes_at_its_bars_and_names_what_is_below_them(script):
    assert below(script, ways()) == []
    for changed in (
        {"cold_source": {"wall_s": 12.1}},
        {"cold_wheel": {"cpu_s": 8.1}},
        {"cold_wheel": {"compiled": 1}},
        {"warm": {"compiled": 1}},
    ):
        (failure,) = below(script, ways(**changed))
        assert failure.startswith(next(iter(changed)).replace("_", "-"))
    for given in ({"shard": 0.91}, {"another": 13}, {"damaged": 2}):
        assert len(below(script, ways(), **given)) == 1


def test_a_cold_start_that_compiled_nothing_was_not_cold(script):
    (failure,) = below(script, ways(cold_source={"compiled": 0}))
    assert "not cold" in failure


def test_a_slow_pull_is_the_hosts_where_it_did_no_more_and_is_fast_when_repeated(script):
    growth = script("growth")
    hosts = growth.SlowPull(100, 9.0, False, 8.0)
    others = [
        growth.SlowPull(100, 9.0, True, 1.0),  # it changed the table, or took a fault
        growth.SlowPull(100, 9.0, False, 8.1),  # slow again
        growth.SlowPull(100, 8.0, False, 1.0),  # within the bar
    ]
    assert growth.of_host([*others, hosts], 8.0) == [hosts]


def test_what_a_table_more_costs_is_the_slope_over_their_number(script):
    assert script("many_tables").slope({1: 3.5, 10: 8.0, 100: 53.0}) == pytest.approx(0.5)


def test_a_step_passes_through_few_files_and_sends_one_request(script, monkeypatch):
    way = script("way")
    # a process in which a test has compiled a model pulls its dense weights by themselves
    monkeypatch.setattr("embershard.worker.nn.hooks.may_be_compiled", lambda: False)
    figures = {name: it.figures() for name, it in way.measure(1).items()}
    assert way.judged(figures) == []
    assert way.judged(figures | {"forward": {"files": 21, "crossings": 71, "requests": 2}}) == [
        "forward: 21 files, at most 20",
        "forward: 71 crossings, at most 70",
        "forward: 2 requests, at most 1",
    ]
