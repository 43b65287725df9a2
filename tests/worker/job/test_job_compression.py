"""The section of a job file that says how rows and gradients travel."""

from __future__ import annotations

from pathlib import Path

import pytest

from embershard.proto.codec.name import CodecName
from embershard.worker.job.checks import compression_advice
from embershard.worker.job.job import Job
from embershard.worker.job.load import JobFileError, load_job

JOB = """\
model: {name: deepfm}
data: {reader: ctr_csv, train: train.csv, ids: global}
embedding: {optimizer: {name: sgd, lr: 0.1}}
train: {batch_size: 8, epochs: 1}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.csv").write_text("label,a\n1,2\n")
    return tmp_path


def load(folder: Path, *overrides: str, text: str = JOB) -> Job:
    path = folder / "job.yaml"
    path.write_text(text)
    return load_job(path, overrides)


def mistakes(folder: Path, *overrides: str, text: str = JOB) -> list[str]:
    with pytest.raises(JobFileError) as caught:
        load(folder, *overrides, text=text)
    return [str(mistake).removeprefix(f"{folder}/") for mistake in caught.value.mistakes]


def test_a_job_without_the_section_compresses_nothing(folder: Path) -> None:
    assert load(folder).compression is None
    assert load(folder, "compression=off").compression is None


def test_a_text_is_the_codec_of_every_step(folder: Path) -> None:
    section = load(folder, "compression={push: topk:0.01+fp16s, pull: fp16s}").compression
    assert section is not None
    assert section.push is not None
    assert section.pull is not None
    assert [str(section.push.schedule.codec(step)) for step in (0, 10**6)] == ["topk:0.01+fp16s"] * 2
    assert str(section.pull.schedule.codec(0)) == "fp16s"


def test_a_schedule_changes_the_codec_at_its_steps(folder: Path) -> None:
    section = load(folder, "compression={dense: {push: {at: {0: off, 1000: topk:0.01}}}}").compression
    assert section is not None
    assert section.dense.push is not None
    schedule = section.dense.push.schedule
    assert [str(schedule.codec(step)) for step in (0, 999, 1000, 2000)] == ["none", "none", "topk:0.01", "topk:0.01"]


def test_auto_is_a_section_that_measures(folder: Path) -> None:
    section = load(folder, "compression=auto").compression
    assert section is not None
    assert (section.auto, section.allow) == (True, ())
    section = load(folder, "compression={auto: true, allow: [topk:0.01], tables: {linear: {push: none}}}").compression
    assert section is not None
    assert section.allow == ("topk:0.01",)


@pytest.mark.parametrize(
    "text", ["compression:\n  push:\n", "compression: {push: null}\n", "compression:\n  push: off\n"]
)
def test_a_direction_without_a_value_is_not_given(folder: Path, text: str) -> None:
    section = load(folder, text=JOB + text).compression
    assert section is not None
    assert section.settings(0).of("rows", dense=False).push.is_plain


def test_a_direction_of_the_file_is_taken_back_by_null_and_not_by_nothing(folder: Path) -> None:
    text = JOB + "compression:\n  push: int8\n  pull: bf16\n"
    section = load(folder, "compression.push=null", text=text).compression
    assert section is not None
    assert section.settings(0).of("rows", dense=False) == (CodecName(), CodecName.parse("bf16"))
    (line,) = mistakes(folder, "compression.push=", text=text)
    assert line == "--set compression.push=: compression.push: has no value; null takes it as not given"


@pytest.mark.parametrize("text", ["compression=auto", "compression={push: int8, dense: {push: {at: {0: dgc:0.01}}}}"])
def test_a_checkpoints_manifest_gives_the_section_back(folder: Path, text: str) -> None:
    job = load(folder, text)
    assert Job.model_validate(job.model_dump(mode="json")).compression == job.compression


IN_FILE = [
    (
        "compression:\n  push: topk:1.5\n",
        "job.yaml:6: compression.push: codec 'topk:1.5': its ratio must be above 0 and at most 1, got 1.5",
    ),
    (
        "compression:\n  pull: topk:0.5\n",
        "job.yaml:6: compression.pull: codec 'topk:0.5'",
    ),
    (
        "compression:\n  push: onebit\n",
        "job.yaml:6: compression.push: codec 'onebit' on the push of rows: it serves dense weights: a row that is",
    ),
    ("compression:\n  push: powersgd:2\n", "job.yaml:6: compression.push: codec 'powersgd:2' on the push of rows"),
    ("compression:\n  pull: delta\n", "job.yaml:6: compression.pull: codec 'delta' on the pull of rows"),
    (
        "compression:\n  tables:\n    linear: {push: onebit}\n",
        "job.yaml:7: compression.tables.linear.push: codec 'onebit' on the push of rows",
    ),
    (
        "compression:\n  push: gzip\n",
        "job.yaml:6: compression.push: codec 'gzip': there is no 'gzip' (",
    ),
    (
        "compression:\n  push: 3\n",
        "job.yaml:6: compression.push: must be the text of a codec, as int8 or topk:0.01, got 3",
    ),
    ("compression:\n  pushh: int8\n", "job.yaml:6: compression.pushh: unknown field; did you mean push?"),
    (
        "compression:\n  push:\n    at: {0: none,\n      10: topk:0}\n",
        "job.yaml:8: compression.push.at.10: codec 'topk:0': its ratio must be above 0 and at most 1, got 0",
    ),
    (
        "compression:\n  push:\n    at: {10: int8}\n",
        "job.yaml:7: compression.push.at: a schedule of codecs begins",
    ),
]


@pytest.mark.parametrize(("text", "want"), IN_FILE, ids=[text for text, _ in IN_FILE])
def test_a_codec_that_cannot_be_is_named_with_its_line(folder: Path, text: str, want: str) -> None:
    (line,) = mistakes(folder, text=JOB + text)
    assert line.startswith(want)


CONTRADICTIONS = [
    (["strategy=local", "compression={push: int8}"], "compression: strategy local has no shards to send anything to"),
    (
        ["dense.mode=ddp", "compression={dense: {push: int8}}"],
        "compression.dense: torch all-reduces the dense weights (dense.mode ddp), past the shards; remove it",
    ),
    (
        ["embedding.optimizer.momentum=0.9", "compression={push: dgc:0.01}"],
        "compression.push: dgc:0.01 applies momentum before it selects, and the optimizer's 0.9 would again",
    ),
    (
        ["dense.optimizer={name: sgd, lr: 1, momentum: 0.5}", "compression={dense: {push: dgc:0.01}}"],
        "compression.dense.push: dgc:0.01 applies momentum before it selects, and the optimizer's 0.5 would again",
    ),
    (
        ["train.staleness=local(4)", "compression={push: dgc:0.1}"],
        "compression.push: dgc:0.1 keeps a momentum of gradients, and train.staleness local(4) pushes differences of",
    ),
    (
        ["compression={push: int8, residual_rows: 9}"],
        "compression.residual_rows: no codec of an embedding table leaves anything for later; remove it",
    ),
    (
        ["compression={dense: {push: onebit}, residual_rows: 9}"],
        "compression.residual_rows: no codec of an embedding table leaves anything for later; remove it",
    ),
    (
        ["compression={push: topk:0.1, warmup_steps: 9}"],
        "compression.warmup_steps: only dgc has it, and no push",
    ),
    (["compression={push: topk:0.1, momentum: 0.9}"], "compression.momentum: only dgc has it, and no push travels so"),
    (["compression={auto: true, push: int8}"], "compression.push: auto chooses it; remove it, or name tables under"),
    (
        ["compression={auto: true, allow: [int8, powersgd:2]}"],
        "compression.allow.1: what powersgd:2 sends is not known before it does; name it under compression.tables",
    ),
    (
        ["compression={auto: true, allow: [dgc:0.01]}"],
        "compression.allow.0: dgc begins with a quarter of all elements, which later steps do not send; set warmup",
    ),
    (
        ["train.staleness=local(4)", "compression=auto"],
        "compression.auto: most steps send nothing with train.staleness local(4), and auto judges by steps",
    ),
    (["compression={allow: [int8]}"], "compression.allow: says what auto may choose; add auto: true"),
    (["compression={auto: true, unless_slower: true}"], "compression.unless_slower: auto tries what it chooses anyway"),
    (
        ["train.staleness=local(4)", "compression={push: int8, unless_slower: true}"],
        "compression.unless_slower: most steps send nothing with train.staleness local(4); remove either",
    ),
    (["compression={push: none, unless_slower: true}"], "compression.unless_slower: there is no codec to try; remove"),
    (
        ["compression={push: {at: {0: none, 9: int8}}, unless_slower: true}"],
        "compression.unless_slower: codecs are tried in the first steps, and a schedule changes them later; remove",
    ),
    (
        ["compression={push: dgc:0.01, unless_slower: true}"],
        "compression.unless_slower: dgc begins with a quarter of all elements, which later steps do not send; set warm",
    ),
]


@pytest.mark.parametrize(("overrides", "want"), CONTRADICTIONS, ids=[" ".join(c[0]) for c in CONTRADICTIONS])
def test_what_contradicts_the_job_is_refused(folder: Path, overrides: list[str], want: str) -> None:
    found = mistakes(folder, *overrides)
    assert len(found) == 1, found
    assert want in found[0]


def test_tables_of_groups_have_their_own_momentum_and_advice(folder: Path) -> None:
    groups = [
        "embedding.optimizer={name: sgd, lr: 1, momentum: 0.9}",
        "compression={tables: {linear: {push: dgc:0.1}}}",
    ]
    assert mistakes(folder, *groups)
    own = load(folder, *groups, "embedding.groups=[{match: linear, optimizer: {name: adam, lr: 1}}]")
    assert compression_advice(own) == []  # it comes from the worker, who knows the tables


def test_a_pattern_of_all_dense_tables_is_one_of_dense_weights(folder: Path) -> None:
    section = load(folder, "compression={tables: {'dense*': {push: powersgd:4, pull: delta}}}").compression
    assert section is not None
    assert [dense for *_, dense, _ in section.choices()] == [True, True]


def test_another_strategy_sets_the_section_aside(folder: Path) -> None:
    assert load(folder, "strategy=local", text=JOB + "compression: {push: int8}\n").compression is None


def test_a_poor_choice_in_front_of_an_optimizer_gives_a_line_of_advice(folder: Path) -> None:
    adam = "embedding.optimizer={name: adam, lr: 0.1}"
    assert compression_advice(load(folder)) == []
    assert compression_advice(load(folder, adam, "compression={push: int8, pull: int8}")) == []
    (line,) = compression_advice(load(folder, adam, "compression={push: topk:0.01}"))
    assert line.startswith("compression.push: topk:0.01 in front of adam changes the size of its steps")
    (line,) = compression_advice(load(folder, "compression={dense: {push: int8}}"))
    assert line.startswith("compression.dense.push: in front of sgd topk:0.01+fp16s sends far less than int8")
