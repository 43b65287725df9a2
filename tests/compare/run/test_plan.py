"""Which runs make a comparison, in which order, with which words."""

from pathlib import Path

import pytest
from report_cases import plan_of

from embershard.compare.results import UNLIMITED, ArmRun
from embershard.compare.run.plan import MOST_SEEDS, SKIPPED_SHARE, TRIAL_STEPS
from embershard.worker.job.load import load_job
from embershard.worker.job.training import CheckpointSection
from embershard.worker.training import autotune
from embershard.worker.training.autotune import TURN_STEPS, TURNS

JOB = """\
model: {name: dlrm, bottom: [16], hidden: [16]}
data: {reader: clicks, eval_samples: 3000}
embedding:
  dim: 4
  optimizer: {name: adagrad, lr: 0.05}
  groups: [{match: "embedding", optimizer: {name: sgd, lr: 0.2}}]
dense: {optimizer: {name: sgd, lr: 0.1}}
train: {batch_size: 256, samples: 100_000, lr_schedule: {name: linear, warmup_steps: 200}, early_stop: {patience: 3}}
evaluate: {every: 50_000}
checkpoint: {folder: kept}
"""
LINKS = ("100mbit", "1gbit")
THREE = {"links": LINKS, "seeds": (0, 1, 2)}


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


@pytest.fixture
def plan(job):
    return plan_of(job, "none,fp16s,dgc:0.01", **THREE)


def job_of(path, task):
    """As `embershard train` reads it."""
    return load_job(path, [value for flag, value in zip(task.words, task.words[1:], strict=False) if flag == "--set"])


def test_every_arm_has_every_seed_on_every_link_once(plan, job):
    tasks = plan.judged()
    assert len(tasks) == len({task.key for task in tasks}) == len({task.folder for task in tasks}) == 3 * 3 * 3
    assert {task.kind for task in tasks if task.bandwidth == UNLIMITED} == {"quality"}
    assert {task.kind for task in tasks if task.bandwidth != UNLIMITED} == {"speed"}
    whole = plan_of(job, "none,fp16s", links=LINKS, speed_steps=None)
    assert {task.kind for task in whole.judged()} == {"quality"}


def test_an_arm_of_many_fields_has_folders_that_a_file_system_takes(job):
    fields = "/".join(["train.prefetch=2", "train.staleness=4"] * 10)
    tasks = plan_of(job, "none", fields, f"{fields}/workers=2", **THREE).judged()
    folders = {Path(task.folder).name for task in tasks}
    assert max(map(len, folders)) < 150
    assert len(folders) == len(tasks) == 3 * 3 * 3


def test_a_seed_is_whole_before_the_next_and_arms_take_turns_at_being_first(plan):
    tasks = plan.judged()
    assert [task.seed for task in tasks] == sorted(task.seed for task in tasks)
    firsts = [next(task.arm for task in tasks if (task.seed, task.bandwidth) == (seed, UNLIMITED)) for seed in range(3)]
    assert firsts == ["none", "fp16s", "dgc:0.01"]


def test_runs_of_a_seed_differ_in_nothing_but_the_arm(plan, job):
    first, *others = (job_of(job, task) for task in plan.judged() if (task.seed, task.kind) == (1, "quality"))
    assert first.train.seed == 1
    assert len(others) == 2
    assert all(other.model_copy(update={"compression": first.compression}) == first for other in others)


def test_the_words_of_a_run_are_a_job_that_can_be_trained(job):
    plan = plan_of(job, "none,dgc:0.01", "strategy=ddp", links=("1gbit",), multiples=(1.0, 2.0))
    for task in [*plan.tuning(), *plan.judged(), *plan.tuned({"none": 2.0, "strategy=ddp": 2.0})]:
        read = job_of(job, task)
        assert (read.checkpoint, read.train.seed) == (CheckpointSection(best=False), task.seed)
        assert not read.has_shards or read.network.bandwidth == task.bandwidth


def test_runs_have_no_checkpoints_whatever_the_job_says_of_going_on_from_them(job):
    job.write_text(JOB.replace("train: {", "train: {recover: true, "))
    (task, *_) = plan_of(job, "none,fp16s", **THREE).judged()
    assert job_of(job, task).recovers is False


def test_speed_runs_are_short_steady_and_not_judged(plan, job):
    read = job_of(job, next(task for task in plan.judged() if (task.kind, task.arm) == ("speed", "dgc:0.01")))
    assert read.train.budget == ("steps", 50)
    assert (read.train.early_stop, read.evaluate.every, read.compression.warmup_steps) == (None, None, 0)


@pytest.mark.parametrize("arms", ["none,int8", "train.samples=50_000,60_000"])
def test_speed_runs_are_short_whoever_gave_the_length(job, arms):
    plan = plan_of(job, arms, links=("1gbit",), overrides=("train.samples=70_000", "evaluate.every=20_000"))
    tasks = [task for task in plan.judged() if task.kind == "speed"]
    assert {job_of(job, task).train.budget for task in tasks} == {("steps", 50)}


def test_a_job_that_is_shorter_than_a_speed_run_is_not_made_longer(job):
    short = JOB.replace("samples: 100_000", "steps: 30").replace("warmup_steps: 200", "warmup_steps: 20")
    job.write_text(short.replace("50_000", "10"))
    task = next(task for task in plan_of(job, "none,fp16s", links=("1gbit",)).judged() if task.kind == "speed")
    assert job_of(job, task).train.steps == 30


@pytest.mark.parametrize("arm", ["auto", 'compression={"push": "int8", "unless_slower": true}'])
def test_speed_runs_skip_the_steps_in_which_codecs_are_tried(job, arm):
    assert TRIAL_STEPS == autotune.WARM_UP + autotune.STEPS + len(TURNS) * (autotune.WARM_UP + TURN_STEPS)
    plan = plan_of(job, "none", arm, links=("1gbit",))
    steps = {task.arm: job_of(job, task).train.steps for task in plan.judged() if task.kind == "speed"}
    assert steps["none"] == 50
    assert steps[arm] * SKIPPED_SHARE == TRIAL_STEPS


def test_arms_that_all_reduce_past_the_links_are_measured_without_limit_alone(job):
    tasks = plan_of(job, "strategy=ps,ddp", **THREE).judged()
    assert {task.bandwidth for task in tasks if task.arm == "strategy=ddp"} == {UNLIMITED}
    assert {task.bandwidth for task in tasks if task.arm == "strategy=ps"} == {*LINKS, UNLIMITED}


def test_rates_are_tuned_with_a_seed_that_is_not_judged_and_groups_move_along(job):
    tasks = plan_of(job, "none,int8", multiples=(0.5, 1.0, 2.0)).tuning()
    assert len(tasks) == 3 * 3
    assert {task.seed for task in tasks} == {MOST_SEEDS}
    doubled = job_of(job, next(task for task in tasks if task.multiple == 2.0))
    sections = (doubled.embedding, doubled.dense, *doubled.embedding.groups)
    assert [section.optimizer.model_dump()["lr"] for section in sections] == [0.1, 0.2, 0.4]


def tuned(arm, multiple, decided):
    return ArmRun(
        arm=arm, seed=MOST_SEEDS, bandwidth=UNLIMITED, kind="tune", multiple=multiple, ok=decided is not None, error="",
        attempts=1, words=(), folder="", began="", total_seconds=1.0, load_average=0.0, decided=decided,
    )  # fmt: skip


def test_an_arms_rate_is_that_of_its_best_tuning_run(job):
    plan = plan_of(job, "none,int8", multiples=(0.5, 1.0, 2.0))
    runs = [tuned("none", 0.5, 0.7), tuned("none", 1.0, 0.8), tuned("none", 2.0, 0.8), tuned("fp16s", 2.0, None)]
    runs += [tuned("int8", 0.5, 0.9), tuned("int8", 1.0, 0.8)]
    chosen = plan.choose(runs)
    assert chosen == {"none": 1.0, "fp16s": 1.0, "int8": 0.5}
    assert {task.arm for task in plan.tuned(chosen)} == {"int8"}
    assert plan_of(job, "none,int8").choose(runs) == {}


def test_an_arms_rate_is_the_best_by_the_metric_that_decides_in_its_own_runs(job):
    plan = plan_of(job, "evaluate.metric=auc,logloss", multiples=(0.5, 1.0))
    auc, logloss = plan.arms
    runs = [tuned(arm, multiple, value) for arm in plan.arms for multiple, value in ((0.5, 0.7), (1.0, 0.8))]
    assert plan.choose(runs) == {auc: 1.0, logloss: 0.5}


def test_a_difference_of_experiments_is_named_by_field(job):
    one, other = (plan_of(job, "none,int8", speed_steps=steps).experiment for steps in (50, 60))
    assert one.difference(one) == ""
    assert one.difference(other) == "  speed_steps: 50 there, 60 now"
    other = one.model_copy(update={"arms": (("none", ()), ("new", ()))})
    assert one.difference(other) == '  arms.none: ["compression=null"] there, [] now'
    job.write_text(JOB.replace("dim: 4", "dim: 8"))
    assert one.difference(plan_of(job, "none,int8").experiment) == "  job.embedding.dim: 4 there, 8 now"


def test_arms_seeds_and_bandwidths_alone_may_be_added(job):
    few = plan_of(job, "none,fp16s", links=("1gbit",), multiples=(1.0, 2.0))
    more = plan_of(job, "none,fp16s,int8", seeds=(0, 1, 2), links=("1gbit",), multiples=(1.0, 2.0))
    tasks, all_tasks = ({task.key: task for task in plan.tasks({"fp16s": 2.0})} for plan in (few, more))
    assert tasks.items() < all_tasks.items()
    more = plan_of(job, "int8,none", seeds=(0, 1, 2), links=("100mbit",), multiples=(1.0, 2.0)).experiment
    assert few.experiment.difference(more) == more.difference(few.experiment) == ""
    both = few.experiment.joined(more)
    assert [label for label, _ in both.arms] == ["none", "fp16s", "int8"]
    assert (both.seeds, both.bandwidths) == ((0, 1, 2), ("1gbit", "100mbit", UNLIMITED))
    assert both.joined(few.experiment) == both.joined(more) == both
