"""What a report says of where it ran, and of what its data allows."""

import pytest
from report_cases import FP16S, INT8, JOB, NONE, fake_results, plan_of

from embershard.compare.analysis.gather import gather
from embershard.compare.results import UNLIMITED

MADE = fake_results((NONE, FP16S, INT8), links={UNLIMITED: None}, seeds=(1, 2)).runs


@pytest.fixture
def results_of(tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    plan = plan_of(job, "none,int8", seeds=(1, 2))
    said = {"command": ("embershard",), "chosen": {}, "complete": True, "margin": None}
    return lambda *runs: gather(plan, {run.key: run for run in runs}, job_file=job, **said)


def test_versions_are_those_of_the_runs_and_changes_are_named(results_of):
    old = [run.model_copy(update={"versions": {"torch": "1.0", "python": "3.0.1"}}) for run in MADE]
    found = results_of(*old).conditions
    assert (found.versions["torch"], found.python, found.mixed) == ("1.0", "3.0.1", ())
    assert "python" not in found.versions
    newer = old[-1].model_copy(update={"versions": {"torch": "1.1", "python": "3.0.1"}})
    assert results_of(*old[:-1], newer).conditions.mixed == ("torch 1.0 and 1.1",)


def test_what_no_model_can_beat_is_the_mean_over_seeds_of_what_is_judged(results_of):
    known = [
        run.model_copy(update={"reachable": {"auc": 0.7 + 0.1 * run.seed, "samples": 3000.0, "calibration": 1.0}})
        for run in MADE
    ]
    assert results_of(*known).reachable == {"auc": pytest.approx(0.85)}


def test_runs_that_were_not_asked_for_are_counted_and_in_no_figure(results_of):
    others = [MADE[0].model_copy(update={"seed": 7}), MADE[1].model_copy(update={"arm": "topk:0.01", "ok": False})]
    asked, more = results_of(*MADE), results_of(*others, *MADE)
    assert more.runs == asked.runs == MADE
    (note,) = set(more.notes) - set(asked.notes)
    assert "(2)" in note
    assert (more.quality, more.speeds, more.verdicts) == (asked.quality, asked.speeds, asked.verdicts)
