"""Which runs make a comparison, in which order, with which words."""

import itertools
from pathlib import Path

import pytest

from embershard.compare.results import UNLIMITED, ArmRun, Bandwidth
from embershard.compare.run.arms import find_arms
from embershard.compare.run.plan import MOST_SEEDS, ComparisonPlan, Experiment, Task
from embershard.worker.job.job import Job
from embershard.worker.job.load import load_job

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
LINKS = (
    Bandwidth(label="100mbit", bits_per_second=1e8),
    Bandwidth(label="1gbit", bits_per_second=1e9),
    Bandwidth(label=UNLIMITED, bits_per_second=None),
)


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def plan_of(path: Path, *arms: str, **fields: object) -> ComparisonPlan:
    found = find_arms(arms or ("none,fp16s,dgc:0.01",), path, (), None)
    values = {
        "job": load_job(path).model_dump(mode="json"),
        "overrides": (),
        "imports": (),
        "arms": tuple((arm.label, arm.settings) for arm, _ in found.values()),
        "bandwidths": tuple(link.label for link in LINKS),
        "seeds": (0, 1, 2),
        "multiples": (1.0,),
        "speed_steps": 50,
        "link": "token bucket",
    }
    return ComparisonPlan(Experiment.model_validate({**values, **fields}), found, LINKS)


def job_of(path: Path, task: Task) -> Job:
    """As `embershard train` reads it."""
    pairs = (
        itertools.batched(task.words, 2) if hasattr(itertools, "batched") else zip(*[iter(task.words)] * 2, strict=True)
    )
    return load_job(path, [value for flag, value in pairs if flag == "--set"])


def test_every_arm_has_every_seed_on_every_link_once(job):
    tasks = plan_of(job).judged()
    assert len(tasks) == 3 * 3 * 3
    assert len({task.key for task in tasks}) == len({task.folder for task in tasks}) == len(tasks)
    assert {task.kind for task in tasks if task.bandwidth == UNLIMITED} == {"quality"}
    assert {task.kind for task in tasks if task.bandwidth != UNLIMITED} == {"speed"}


def test_an_arm_of_many_fields_has_folders_that_a_file_system_takes(job):
    fields = "/".join(["train.prefetch=2", "train.staleness=4"] * 10)
    folders = [Path(task.folder) for task in plan_of(job, "none", fields, f"{fields}/workers=2").judged()]
    assert max(len(folder.name) for folder in folders) < 150
    assert len(set(folders)) == len(folders) == 3 * 3 * 3


def test_a_seed_is_whole_before_the_next_and_arms_take_turns_at_being_first(job):
    tasks = plan_of(job).judged()
    assert [task.seed for task in tasks] == sorted(task.seed for task in tasks)
    firsts = [next(task.arm for task in tasks if (task.seed, task.bandwidth) == (seed, UNLIMITED)) for seed in range(3)]
    assert firsts == ["none", "fp16s", "dgc:0.01"]


def test_runs_of_a_seed_differ_in_nothing_but_the_arm(job):
    first, *others = (task for task in plan_of(job).judged() if task.seed == 1 and task.kind == "quality")
    base = job_of(job, first)
    assert base.train.seed == 1
    for task in others:
        assert job_of(job, task).model_copy(update={"compression": base.compression}) == base


def test_the_words_of_a_run_are_a_job_that_can_be_trained(job):
    plan = plan_of(job, "none,dgc:0.01", "strategy=ddp", multiples=(1.0, 2.0))
    for task in [*plan.tuning(), *plan.judged(), *plan.tuned({"none": 2.0, "strategy=ddp": 2.0})]:
        read = job_of(job, task)
        assert read.checkpoint is None
        assert read.train.seed == task.seed
        if read.has_shards:
            assert read.network.bandwidth == task.bandwidth


def test_speed_runs_are_short_steady_and_not_judged(job):
    task = next(task for task in plan_of(job).judged() if (task.kind, task.arm) == ("speed", "dgc:0.01"))
    read = job_of(job, task)
    assert read.train.budget == ("steps", 50)
    assert read.train.early_stop is None
    assert read.evaluate.every is None
    assert read.compression.warmup_steps == 0


@pytest.mark.parametrize("arms", [("none,int8",), ("train.samples=50_000,60_000",)])
def test_speed_runs_are_short_whoever_gave_the_length(job, arms):
    given = ("train.samples=70_000", "evaluate.every=20_000")
    found = find_arms(arms, job, given, None)
    plan = ComparisonPlan(plan_of(job).experiment.model_copy(update={"overrides": given}), found, LINKS)
    tasks = [task for task in plan.judged() if task.kind == "speed"]
    assert {job_of(job, task).train.budget for task in tasks} == {("steps", 50)}


def test_a_job_that_is_shorter_than_a_speed_run_is_not_made_longer(job):
    job.write_text(
        JOB.replace("samples: 100_000", "steps: 30")
        .replace("warmup_steps: 200", "warmup_steps: 20")
        .replace("50_000", "10")
    )
    task = next(task for task in plan_of(job).judged() if task.kind == "speed")
    assert job_of(job, task).train.steps == 30


def test_full_makes_whole_runs_on_limited_links_too(job):
    assert {task.kind for task in plan_of(job, speed_steps=None).judged()} == {"quality"}


def test_arms_that_all_reduce_past_the_links_are_measured_without_limit_alone(job):
    tasks = plan_of(job, "strategy=ps,ddp").judged()
    assert {task.bandwidth for task in tasks if task.arm == "strategy=ddp"} == {UNLIMITED}
    assert {task.bandwidth for task in tasks if task.arm == "strategy=ps"} == {link.label for link in LINKS}


def test_rates_are_tuned_with_a_seed_that_is_not_judged_and_groups_move_along(job):
    plan = plan_of(job, "none,int8", multiples=(0.5, 1.0, 2.0))
    tasks = plan.tuning()
    assert len(tasks) == 3 * 3
    assert {task.seed for task in tasks} == {MOST_SEEDS}
    doubled = job_of(job, next(task for task in tasks if task.multiple == 2.0))
    rates = [
        section.optimizer.model_dump()["lr"]
        for section in (doubled.embedding, doubled.dense, *doubled.embedding.groups)
    ]
    assert rates == [0.1, 0.2, 0.4]


def tuned(arm: str, multiple: float, decided: float | None) -> ArmRun:
    return ArmRun(
        arm=arm, seed=MOST_SEEDS, bandwidth=UNLIMITED, kind="tune", multiple=multiple, ok=decided is not None, error="",
        attempts=1, words=(), folder="", began="", total_seconds=1.0, load_average=0.0,
        decided=decided,
    )  # fmt: skip


def test_an_arms_rate_is_that_of_its_best_tuning_run(job):
    plan = plan_of(job, "none,int8", multiples=(0.5, 1.0, 2.0))
    runs = [tuned("none", 0.5, 0.7), tuned("none", 1.0, 0.8), tuned("none", 2.0, 0.8), tuned("fp16s", 2.0, None)]
    runs += [tuned("int8", 0.5, 0.9), tuned("int8", 1.0, 0.8)]
    assert plan.choose(runs, higher_is_better=True) == {"none": 1.0, "fp16s": 1.0, "int8": 0.5}
    assert plan.choose(runs, higher_is_better=False)["none"] == 0.5
    assert [task.arm for task in plan.tuned({"none": 1.0, "fp16s": 1.0, "int8": 0.5})] == ["int8"] * 3
    assert plan_of(job, "none,int8").choose(runs, higher_is_better=True) == {}


def test_a_difference_of_experiments_is_named_by_field(job):
    one, other = plan_of(job).experiment, plan_of(job, speed_steps=60).experiment
    assert one.difference(one) == ""
    assert one.difference(other) == "  speed_steps: 50 there, 60 now"
    other = one.model_copy(update={"arms": (("none", ()), ("new", ()))})
    assert one.difference(other) == '  arms.none: ["compression=null"] there, [] now'
    job.write_text(JOB.replace("dim: 4", "dim: 8"))
    assert one.difference(plan_of(job).experiment) == "  job.embedding.dim: 4 there, 8 now"


def test_arms_seeds_and_bandwidths_alone_may_be_added(job):
    few = plan_of(job, "none,fp16s", seeds=(0, 1), bandwidths=("1gbit", UNLIMITED)).experiment
    more = plan_of(job, "int8,none", seeds=(0, 1, 2), bandwidths=("100mbit", UNLIMITED)).experiment
    assert few.difference(more) == more.difference(few) == ""
    both = few.joined(more)
    assert [label for label, _ in both.arms] == ["none", "fp16s", "int8"]
    assert (both.seeds, both.bandwidths) == ((0, 1, 2), ("1gbit", "100mbit", UNLIMITED))
    assert both.joined(few) == both.joined(more) == both


def test_runs_of_more_seeds_and_arms_are_those_of_fewer_and_others(job):
    few = plan_of(job, "none,fp16s", seeds=(0, 1), multiples=(1.0, 2.0)).tasks({"fp16s": 2.0})
    more = plan_of(job, "none,fp16s,int8", seeds=(0, 1, 2), multiples=(1.0, 2.0)).tasks({"fp16s": 2.0})
    assert {task.key: task for task in few}.items() <= {task.key: task for task in more}.items()
