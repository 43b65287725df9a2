"""Job files: what a good one gives, and that every mistake is named with its line and field."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from embershard.proto import spec
from embershard.worker.data.batch import Schema
from embershard.worker.job import Job, JobFileError, load_job
from embershard.worker.models.registry import MODELS

GOOD = """\
model:
  name: deepfm
  hidden: [8, 4]
data:
  reader: ctr_csv
  root: data
  train: train.csv
  valid: valid.csv
embedding:
  dim: 4
  optimizer: {name: adam, lr: 1e-3, weight_decay: 0.05}
  initializer: {name: normal, std: 1e-4}
train:
  batch_size: 32
  epochs: 3
  lr_schedule: {name: plateau, factor: 0.1}
  early_stop: {patience: 2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for name in ("train.csv", "valid.csv", "p.train.pairs"):
        (tmp_path / "data" / name).write_text("label,a\n1,2\n")
    return tmp_path


def load(folder: Path, text: str = GOOD, *overrides: str) -> Job:
    (folder / "job.yaml").write_text(text)
    return load_job(folder / "job.yaml", overrides)


def mistakes(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(JobFileError) as caught:
        load(folder, text, *overrides)
    return str(caught.value).replace(f"{folder}/", "").splitlines()


def test_a_good_file_gives_the_job(folder: Path) -> None:
    job = load(folder)
    assert job.embedding.optimizer.build() == spec.Adam(lr=0.001, weight_decay=0.05)
    assert job.embedding.initializer is not None
    assert job.embedding.initializer.build() == spec.Normal(std=1e-4)
    assert (job.metric, job.metrics) == ("auc", ("auc", "logloss", "ne", "calibration"))
    assert job.train.budget == ("epochs", 3)


def test_overrides_win_and_are_checked_like_the_file(folder: Path) -> None:
    job = load(folder, GOOD, "train.epochs=5", "embedding.optimizer={name: sgd, lr: 1}", "evaluate.metric=logloss")
    assert job.train.epochs == 5
    assert job.embedding.optimizer.build() == spec.SGD(lr=1.0)
    assert job.metric == "logloss"
    assert mistakes(folder, GOOD, "train.epochs=0", "train.epoch=3", "=3", "model.name.x=1") == [
        "--set =3: must read section.field=value",
        "--set model.name.x=1: model.name.x: model.name holds no fields, but 'deepfm'",
        "--set train.epochs=0: train.epochs: input should be greater than or equal to 1, got 0",
        "--set train.epoch=3: train.epoch: unknown field; did you mean epochs?",
    ]


def test_all_mistakes_are_named_at_once_each_with_line_and_field(folder: Path) -> None:
    text = GOOD.replace("hidden: [8, 4]", "hiden: [8, 4]").replace("dim: 4", "dim: four")
    text = text.replace("lr: 1e-3", "lr: -1").replace("  batch_size: 32\n", "").replace("name: normal", "name: norml")
    found = mistakes(folder, text + "workrs: 2\n")
    assert found == [
        "job.yaml:3: model.hiden: unknown field; did you mean hidden?",
        "job.yaml:10: embedding.dim: input should be a valid integer, unable to parse string as an integer, got 'four'",
        "job.yaml:11: embedding.optimizer.lr: must be >= 0, got -1.0",
        "job.yaml:12: embedding.initializer.name: unknown 'norml'; did you mean normal?",
        "job.yaml:13: train.batch_size: is missing",
        "job.yaml:17: workrs: unknown field; did you mean workers?",
    ]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("model: [", "job.yaml:1: not YAML: while parsing a flow node expected the node content"),
        ("- 1\n", "job.yaml:1: a job is a mapping of sections (model, data, train, ...)"),
        ("", "job.yaml:1: a job is a mapping of sections (model, data, train, ...)"),
        ("a: 1\na: 2\n", "job.yaml:2: a: given twice"),
        ("a: &x 1\nb: *x\n", "job.yaml:2: the alias *x: write its value out"),
        ("? [1]\n: 2\n", "job.yaml:1: a key must be a word"),
        ("a: !!python/object/apply:os.system [ls]\n", "job.yaml:1: a: unknown field"),
    ],
)
def test_what_is_no_mapping_of_sections_is_refused(folder: Path, text: str, want: str) -> None:
    assert any(line.startswith(want) for line in mistakes(folder, text)), mistakes(folder, text)


def test_a_missing_section_or_choice_is_named(folder: Path) -> None:
    assert mistakes(
        folder, "model: {factors: 8}\ndata: 3\ntrain: {batch_size: 1}\nembedding: {optimizer: {lr: 1}}\n"
    ) == [
        "job.yaml:1: model.name: is missing",
        "job.yaml:2: data: input should be a valid dictionary or object to extract fields from, got 3",
        "job.yaml:4: embedding.optimizer.name: is missing",
    ]


def changed(*replacements: tuple[str, str]) -> str:
    text = GOOD
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    return text


CONTRADICTIONS = [
    (
        changed(("name: deepfm\n  hidden: [8, 4]", "name: gmf"), ("  dim: 4\n", "")),
        ["job.yaml:2: model.name: gmf needs a user and an item per sample, but data.reader ctr_csv reads features"],
    ),
    (
        changed(("name: deepfm\n  hidden: [8, 4]", "name: lr")),
        ["job.yaml:9: embedding.dim: has no meaning for lr (it has only weights); remove it"],
    ),
    (
        changed(("name: deepfm\n  hidden: [8, 4]", "name: persia_dnn")),
        ["job.yaml:2: model.name: persia_dnn needs dense features, but data.reader ctr_csv has none here"],
    ),
    (changed(("  epochs: 3\n", "")), ["job.yaml:13: train: give exactly one of epochs, steps and samples"]),
    (
        changed(("epochs: 3", "epochs: 3\n  steps: 4")),
        ["job.yaml:13: train: give exactly one of epochs, steps and samples"],
    ),
    (
        changed(("epochs: 3", "steps: 3"), ("factor: 0.1", "warmup_steps: 3")),
        ["job.yaml:16: train.lr_schedule.warmup_steps: must be below train.steps, which is 3"],
    ),
    (
        changed(("factor: 0.1", "end: 0.1")),
        ["job.yaml:16: train.lr_schedule.end: has no meaning for plateau; remove it"],
    ),
    (
        changed(("name: plateau", "name: step")),
        ["job.yaml:16: train.lr_schedule.every: must say after how many steps the rate falls"],
    ),
    (GOOD + "evaluate: {every: 4}\n", ["job.yaml:18: evaluate.every: must be at most train.epochs, which is 3"]),
    (
        GOOD + "evaluate: {metric: hr@10}\n",
        [
            "job.yaml:18: evaluate.metric: 'hr@10' is not computed on data.reader ctr_csv; "
            "it has auc, logloss, ne, calibration"
        ],
    ),
    (
        GOOD + "evaluate: {top_k: 5}\n",
        ["job.yaml:18: evaluate.top_k: has no meaning for data.reader ctr_csv; remove it"],
    ),
    (
        changed(("  valid: valid.csv\n", "")),
        [
            "job.yaml:15: train.lr_schedule: needs something to evaluate on: name a file in data.valid or data.test",
            "job.yaml:16: train.early_stop: needs something to evaluate on: name a file in data.valid or data.test",
        ],
    ),
    (
        changed(("epochs: 3", "samples: 3")) + "workers: 4\n",
        ["job.yaml:18: workers: 4 workers cannot share 3 samples"],
    ),
    (
        changed(("hidden: [8, 4]", "batch_norm: true"), ("batch_size: 32", "batch_size: 1")),
        ["job.yaml:14: train.batch_size: batch norm needs at least 2 samples"],
    ),
    (
        changed(("valid: valid.csv", "valid: walid.csv")),
        ["job.yaml:8: data.valid: no file data/walid.csv; check data.root (or pass --data), or the name"],
    ),
]


@pytest.mark.parametrize(("text", "want"), CONTRADICTIONS)
def test_contradictory_fields_are_refused(folder: Path, text: str, want: list[str]) -> None:
    assert mistakes(folder, text) == want


def test_a_missing_or_binary_file_is_named(folder: Path) -> None:
    with pytest.raises(JobFileError, match=r"no\.yaml: cannot be read: No such file"):
        load_job(folder / "no.yaml")
    (folder / "job.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JobFileError, match="not UTF-8"):
        load_job(folder / "job.yaml")


def test_the_data_root_can_be_replaced(folder: Path) -> None:
    shutil.move(folder / "data", folder / "elsewhere")
    (folder / "job.yaml").write_text(GOOD)
    assert load_job(folder / "job.yaml", data_root=folder / "elsewhere").data.root == folder / "elsewhere"


@pytest.mark.parametrize("name", MODELS)
def test_every_model_can_be_built_from_a_job(name: str) -> None:
    values = {
        "model": {"name": name},
        "data": {"reader": "ncf", "prefix": "p"},
        "embedding": {"optimizer": {"name": "module:function", "lr": 1, "settings": {"decay": 0.5}}},
        "train": {"batch_size": 2, "steps": 1},
    }
    job = Job.model_validate(values)
    model = job.model.build(Schema(("user", "item"), 3, None), 4, "meta")
    assert type(model) is MODELS[name]
    assert job.embedding.optimizer.build() == spec.Custom(function="module:function", lr=1.0, settings={"decay": 0.5})
