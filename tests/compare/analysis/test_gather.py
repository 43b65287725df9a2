"""What a report says of where it ran, and of what its data allows."""

from pathlib import Path

import pytest
from report_cases import FP16S, INT8, NONE, fake_results

from embershard.compare.analysis.gather import gather
from embershard.compare.results import UNLIMITED, ArmRun, Bandwidth, Results
from embershard.compare.run.arms import find_arms
from embershard.compare.run.plan import ComparisonPlan, Experiment
from embershard.worker.job.load import load_job

JOB = """\
model: {name: dlrm, bottom: [16], hidden: [16]}
data: {reader: clicks, eval_samples: 3000}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.05}}
train: {batch_size: 256, samples: 10_000}
"""
MADE = fake_results((NONE, FP16S, INT8), links={UNLIMITED: None}, seeds=(1, 2)).runs


def results_of(folder: Path, *runs: ArmRun) -> Results:
    job = folder / "job.yaml"
    job.write_text(JOB)
    arms = find_arms(["none,int8"], job, (), None)
    experiment = Experiment(
        job=load_job(job).model_dump(mode="json"), overrides=(), imports=(), bandwidths=(UNLIMITED,), seeds=(1, 2),
        arms=tuple((arm.label, arm.settings) for arm, _ in arms.values()), multiples=(1.0,), speed_steps=50,
        link="token bucket",
    )  # fmt: skip
    plan = ComparisonPlan(experiment, arms, [Bandwidth(label=UNLIMITED, bits_per_second=None)])
    made = {run.key: run for run in runs}
    return gather(plan, made, job_file=job, command=("embershard",), chosen={}, complete=True, margin=None)


def test_versions_are_those_of_the_runs_and_changes_are_named(tmp_path):
    old = [run.model_copy(update={"versions": {"torch": "1.0", "python": "3.0.1"}}) for run in MADE]
    found = results_of(tmp_path, *old).conditions
    assert (found.versions["torch"], found.python, found.mixed) == ("1.0", "3.0.1", ())
    assert "python" not in found.versions
    newer = old[-1].model_copy(update={"versions": {"torch": "1.1", "python": "3.0.1"}})
    assert results_of(tmp_path, *old[:-1], newer).conditions.mixed == ("torch 1.0 and 1.1",)


def test_what_no_model_can_beat_is_the_mean_over_seeds_of_what_is_judged(tmp_path):
    known = [
        run.model_copy(update={"reachable": {"auc": 0.7 + 0.1 * run.seed, "samples": 3000.0, "calibration": 1.0}})
        for run in MADE
    ]
    assert results_of(tmp_path, *known).reachable == {"auc": pytest.approx(0.85)}


def test_runs_that_were_not_asked_for_are_counted_and_in_no_figure(tmp_path):
    others = [MADE[0].model_copy(update={"seed": 7}), MADE[1].model_copy(update={"arm": "topk:0.01", "ok": False})]
    asked, more = results_of(tmp_path, *MADE), results_of(tmp_path, *others, *MADE)
    assert more.runs == asked.runs == MADE
    assert set(more.notes) - set(asked.notes) == {
        "The folder also holds runs of arms, seeds, links or rates that this report was not asked for (2); they are in "
        "no figure."
    }
    assert (more.quality, more.speeds, more.verdicts) == (asked.quality, asked.speeds, asked.verdicts)
