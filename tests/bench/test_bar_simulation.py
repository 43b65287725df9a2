"""bench/bar_simulation.py counts the planted mutants that are caught."""

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def bar_simulation(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("bar_simulation")


def test_a_mutant_that_names_a_test_is_caught_by_it(bar_simulation, tmp_path):
    progress = bar_simulation.Progress(tmp_path / "state.json", 0)
    bar_simulation.run_mutants(progress, ["put_off_not_logged"], 1)
    test = "ps/coordination/test_dedup.py::test_a_first_push_that_was_put_off_is_a_change_of_the_state_once"
    assert progress.state["mutants"] == {"put_off_not_logged": test}
