"""Which jobs the words behind --arms name."""

from pathlib import Path

import pytest

from embershard.compare.run.arms import BadArm, find_arms
from embershard.worker.job.job import Job
from embershard.worker.job.load import JobFileError

JOB = """\
model: {name: dlrm, bottom: [16], hidden: [16]}
data: {reader: clicks}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.05}}
dense: {optimizer: {name: sgd, lr: 0.1}}
train: {batch_size: 256, samples: 10_000}
workers: 1
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def jobs(path: Path, *groups: str) -> dict[str, Job]:
    return {label: job for label, (_, job) in find_arms(groups, path, (), None).items()}


def codecs(job: Job) -> dict[str, str]:
    """Of an arm's job: direction -> codec."""
    if job.compression is None:
        return {}
    return {".".join(map(str, at)): str(codec) for at, _, _, codec in job.compression.choices() if not codec.is_plain}


def test_a_codec_of_values_serves_everything_both_ways(job):
    for name in ("fp16s", "bf16", "int8"):
        assert codecs(jobs(job, f"none,{name}")[name]) == dict.fromkeys(
            ("push", "pull", "dense.push", "dense.pull"), name
        )


@pytest.mark.parametrize("name", ["topk:0.01", "rows:0.1+int8", "randomk:0.01"])
def test_a_selection_serves_pushes_and_dense_weights_come_as_they_change(job, name):
    assert codecs(jobs(job, f"none,{name}")[name]) == {"push": name, "dense.push": name, "dense.pull": "delta"}


@pytest.mark.parametrize("name", ["dgc:0.001", "powersgd:4", "onebit"])
def test_codecs_made_for_dense_weights_leave_rows_alone(job, name):
    assert codecs(jobs(job, f"none,{name}")[name]) == {"dense.push": name, "dense.pull": "delta"}


def test_none_is_the_job_without_compression(job):
    job.write_text(JOB + "compression: {push: int8, residual_rows: 10, tables: {embedding: {push: topk:0.1}}}\n")
    found = jobs(job, "none,topk:0.01,dgc:0.01")
    assert found["none"].compression is None
    assert found["topk:0.01"].compression.tables == {}
    assert found["topk:0.01"].compression.residual_rows == 10
    assert "residual_rows" not in found["dgc:0.01"].compression.model_fields_set


def test_dgc_keeps_what_the_job_says_of_it(job):
    own = {"warmup_steps": 7, "momentum": 0.5, "clip_norm": 1.0}
    job.write_text(
        JOB + f"compression: {{dense: {{push: 'dgc:0.1'}}, {', '.join(f'{k}: {v}' for k, v in own.items())}}}\n"
    )
    found = jobs(job, "none,dgc:0.01,int8")
    assert found["dgc:0.01"].compression.model_dump().items() >= own.items()
    assert found["int8"].compression.warmup_steps != 7


def test_directions_can_be_named_one_by_one(job):
    found = jobs(job, "none,push=int8/pull=fp16s/dense.push=dgc:0.01")
    assert codecs(found["push=int8/pull=fp16s/dense.push=dgc:0.01"]) == {
        "push": "int8",
        "pull": "fp16s",
        "dense.push": "dgc:0.01",
    }


def test_where_torch_all_reduces_dense_weights_codecs_leave_them_alone(job):
    job.write_text(JOB.replace("dense: {", "dense: {mode: ddp, "))
    assert codecs(jobs(job, "none,int8")["int8"]) == {"push": "int8", "pull": "int8"}


def test_fields_of_the_job_are_arms_with_each_of_their_values(job):
    found = jobs(job, "staleness=0,4,none", "strategy=ddp", "model.hidden=[8,8],[4]", "train.prefetch=1/staleness=2")
    assert [found[f"staleness={value}"].train.staleness for value in (0, 4, "none")] == [0, 4, None]
    assert found["strategy=ddp"].strategy == "ddp"
    assert [found[f"model.hidden={value}"].model.hidden for value in ("[8,8]", "[4]")] == [(8, 8), (4,)]
    assert found["train.prefetch=1/staleness=2"].train.prefetch == 1


def test_fp16s_stands_beside_codecs_and_nothing_else(job):
    found = find_arms(["none,int8"], job, (), None)
    assert [(label, arm.added) for label, (arm, _) in found.items()] == [
        ("none", False), ("fp16s", True), ("int8", False),
    ]  # fmt: skip
    assert list(jobs(job, "fp16s,none")) == ["fp16s", "none"]
    assert list(jobs(job, "staleness=0,4")) == ["staleness=0", "staleness=4"]


@pytest.mark.parametrize(
    ("arms", "said"),
    [
        ("none,none", "arm none: it is the same as none"),
        ("int8,push=int8/pull=int8/dense.push=int8/dense.pull=int8", "it is the same as int8"),
        ("none,push=fp16s/pull=fp16s/dense.push=fp16s/dense.pull=fp16s", "the same as fp16s (it is added to every"),
        ("staleness=none,off", "it is the same as staleness=none"),
        ("none", "needs at least two"),
        ("none,", "nothing between two of its commas"),
        ("none,zip", "there is no 'zip' (known: none, fp16s, bf16, int8, onebit, topk:RATIO"),
        ("none,topk:2", "its ratio must be above 0 and at most 1, got 2"),
        ("none,topk:nan", "its ratio must be a number"),
        ("none,push=onebit", "a row that is exactly zero cannot say so in one bit"),
        ("none,pull=topk:0.1", "a pull has no later"),
        ("staleness=0,banana", "train.staleness: must be 0, a number of clocks"),
        ("train.epoch=1,2", "unknown field"),
    ],
)
def test_arms_that_cannot_be_compared_are_refused(job, arms, said):
    with pytest.raises(BadArm) as caught:
        jobs(job, arms)
    assert said in str(caught.value)


def test_mistakes_of_the_job_itself_are_not_blamed_on_an_arm(job):
    job.write_text(JOB.replace("hidden", "hiden"))
    with pytest.raises(JobFileError, match="did you mean hidden"):
        jobs(job, "none,int8")


def test_each_arm_is_described_in_words(job):
    arms = [arm for arm, _ in find_arms(["none,int8,dgc:0.001,auto", "strategy=ddp"], job, (), None).values()]
    assert all(len(arm.meaning) > 15 and arm.label not in arm.meaning for arm in arms)
    assert "the largest 0.1 % of the floats" in next(arm for arm in arms if arm.label == "dgc:0.001").meaning


def test_the_examples_can_be_compared():
    path = Path(__file__).parents[3] / "examples" / "demo.yaml"
    assert list(jobs(path, "none,fp16s,int8,topk:0.01,dgc:0.001")) == [
        "none", "fp16s", "int8", "topk:0.01", "dgc:0.001",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "arms", ["seed=1,2", "network.bandwidth=10mbit,1gbit", "output=a,b", "none,staleness=4/checkpoint.folder=kept"]
)
def test_fields_that_are_the_comparisons_own_make_no_arms(job, arms):
    with pytest.raises(
        BadArm, match=r"the comparison itself gives (train\.seed|network\.bandwidth|output|checkpoint) to"
    ):
        jobs(job, arms)
