"""Which jobs the words behind --arms name."""

import pytest

from embershard.compare.run.arms import BadArm, find_arms
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
def arms(tmp_path):
    """The arms of a job by their labels."""

    def find(*groups, text=JOB):
        (tmp_path / "job.yaml").write_text(text)
        return find_arms(groups, tmp_path / "job.yaml", (), None)

    return find


@pytest.fixture
def jobs(arms):
    return lambda *groups, **text: {label: job for label, (_, job) in arms(*groups, **text).items()}


def codecs(job):
    """Of an arm's job: direction -> codec."""
    choices = () if job.compression is None else job.compression.choices()
    return {".".join(map(str, at)): str(codec) for at, _, _, codec in choices if not codec.is_plain}


EVERYWHERE = ("push", "pull", "dense.push", "dense.pull")
CHOSEN = "push=int8/pull=fp16s/dense.push=dgc:0.01"
BY_TORCH = JOB.replace("dense: {", "dense: {mode: ddp, ")


@pytest.mark.parametrize(
    ("arm", "text", "want"),
    [
        *((name, JOB, dict.fromkeys(EVERYWHERE, name)) for name in ("fp16s", "bf16", "int8")),
        # of a selection dense weights come as they change
        *(
            (name, JOB, {"push": name, "dense.push": name, "dense.pull": "delta"})
            for name in ("topk:0.01", "rows:0.1+int8", "randomk:0.01")
        ),
        # made for dense weights
        *((name, JOB, {"dense.push": name, "dense.pull": "delta"}) for name in ("dgc:0.001", "powersgd:4", "onebit")),
        (CHOSEN, JOB, {"push": "int8", "pull": "fp16s", "dense.push": "dgc:0.01"}),
        ("int8", BY_TORCH, {"push": "int8", "pull": "int8"}),
    ],
)
def test_a_codec_serves_the_directions_that_it_is_made_for(jobs, arm, text, want):
    assert codecs(jobs("none", arm, text=text)[arm]) == want


def test_none_is_the_job_without_compression_and_others_keep_what_it_says_of_them(jobs):
    text = JOB + "compression: {push: int8, residual_rows: 10, tables: {embedding: {push: topk:0.1}}}\n"
    found = jobs("none,topk:0.01,dgc:0.01", text=text)
    assert found["none"].compression is None
    assert found["topk:0.01"].compression.tables == {}
    assert found["topk:0.01"].compression.residual_rows == 10
    assert "residual_rows" not in found["dgc:0.01"].compression.model_fields_set
    own = {"warmup_steps": 7, "momentum": 0.5, "clip_norm": 1.0}
    said = ", ".join(f"{name}: {value}" for name, value in own.items())
    found = jobs("none,dgc:0.01,int8", text=f"{JOB}compression: {{dense: {{push: 'dgc:0.1'}}, {said}}}\n")
    assert found["dgc:0.01"].compression.model_dump().items() >= own.items()
    assert found["int8"].compression.warmup_steps != 7
    assert jobs("none,auto")["auto"].compression.auto


def test_fields_of_the_job_are_arms_with_each_of_their_values(jobs):
    found = jobs("staleness=0,4,none", "strategy=ddp", "model.hidden=[8,8],[4]", "train.prefetch=1/staleness=2")
    assert [found[f"staleness={value}"].train.staleness for value in (0, 4, "none")] == [0, 4, None]
    assert found["strategy=ddp"].strategy == "ddp"
    assert [found[f"model.hidden={value}"].model.hidden for value in ("[8,8]", "[4]")] == [(8, 8), (4,)]
    assert found["train.prefetch=1/staleness=2"].train.prefetch == 1


def test_fp16s_stands_beside_codecs_and_nothing_else(arms):
    added = {label: arm.added for label, (arm, _) in arms("none,int8").items()}
    assert list(added.items()) == [("none", False), ("fp16s", True), ("int8", False)]
    assert list(arms("fp16s,none")) == ["fp16s", "none"]
    assert list(arms("staleness=0,4")) == ["staleness=0", "staleness=4"]


@pytest.mark.parametrize(
    ("words", "said"),
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
        ("seed=1,2", "the comparison itself gives train.seed to"),
        ("network.bandwidth=10mbit,1gbit", "the comparison itself gives network.bandwidth to"),
        ("output=a,b", "the comparison itself gives output to"),
        ("none,staleness=4/checkpoint.folder=kept", "the comparison itself gives checkpoint to"),
    ],
)
def test_arms_that_cannot_be_compared_are_refused(arms, words, said):
    with pytest.raises(BadArm) as caught:
        arms(words)
    assert said in str(caught.value)


def test_mistakes_of_the_job_itself_are_not_blamed_on_an_arm(arms):
    with pytest.raises(JobFileError, match="did you mean hidden"):
        arms("none,int8", text=JOB.replace("hidden", "hiden"))
