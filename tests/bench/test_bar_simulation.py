"""bench/bar_simulation.py counts the planted mutants that are caught."""

import importlib
import shutil
from pathlib import Path

import pytest

from simulation import mutants

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


def test_a_changed_mutant_has_all_run_again_and_no_seed(bar_simulation, tmp_path, monkeypatch):
    patches = shutil.copytree(mutants.FOLDER, tmp_path / "mutants")
    monkeypatch.setattr(mutants, "FOLDER", patches)
    progress = bar_simulation.Progress(tmp_path / "state.json", 0)
    progress.state |= {"next": 100, "mutants": {"no_settled": "7"}}
    progress.write()
    assert bar_simulation.Progress(progress.path, 0).state == progress.state
    changed = patches / "no_settled.patch"
    changed.write_text(changed.read_text() + "\n")
    state = bar_simulation.Progress(progress.path, 0).state
    assert (state["next"], state["mutants"]) == (100, {})


def test_the_files_of_tests_that_mutants_name_count_as_theirs(bar_simulation):
    assert bar_simulation.TESTS / "ps/coordination/test_dedup.py" in bar_simulation.mutant_files()
