"""Job files: what a good one gives, and that every mistake is named with its line and field."""

from __future__ import annotations

import errno
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from embershard.proto import spec
from embershard.worker.data.batch import Schema
from embershard.worker.data.text import Layout
from embershard.worker.job.job import Job
from embershard.worker.job.load import JobFileError, load_job
from embershard.worker.job.yaml import Mistake
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
    assert mistakes(folder, GOOD, "train.epochs=0", "train.epoch=3", "=3", "model.name.x=1", "evaluate.metric=") == [
        "--set =3: must read section.field=value",
        "--set model.name.x=1: model.name.x: model.name holds no fields, but 'deepfm'",
        "--set evaluate.metric=: evaluate.metric: has no value; null takes it as not given",
        "--set train.epochs=0: train.epochs: input should be greater than or equal to 1, got 0",
        "--set train.epoch=3: train.epoch: unknown field; did you mean epochs?",
    ]


def test_an_unknown_schedule_is_refused_in_one_line_with_all_that_there_are(folder: Path) -> None:
    assert mistakes(folder, GOOD, "train.lr_schedule.name=nope") == [
        "--set train.lr_schedule.name=nope: train.lr_schedule.name: "
        "input should be 'constant', 'linear', 'cosine', 'step', 'plateau' or 'torch', got 'nope'"
    ]


def test_an_override_of_the_budget_takes_the_place_of_the_files(folder: Path) -> None:
    job = load(folder, GOOD, "train.steps=20")
    assert job.train.budget == ("steps", 20)
    assert "exactly one" in mistakes(folder, GOOD, "train.steps=20", "train.epochs=2")[0]


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
        "job.yaml:2: data: is a section of fields, got 3",
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
    (
        changed(("train: train.csv", "train: train.csv\n  stream: true"), ("plateau, factor: 0.1", "cosine")),
        [
            "job.yaml:17: train.lr_schedule.name: cosine needs the number of steps, which streamed text does not tell: "
            "give train.steps in place of train.epochs"
        ],
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


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENAMETOOLONG, errno.ESTALE])
def test_data_that_cannot_be_looked_at_is_named_with_its_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    stat = Path.stat

    def fails(path: Path, **options: bool) -> os.stat_result:
        if path.name == "valid.csv":
            raise OSError(code, os.strerror(code))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", fails)
    assert mistakes(folder, GOOD) == [
        f"job.yaml:8: data.valid: data/valid.csv cannot be read: {os.strerror(code)}; "
        "check data.root (or pass --data), or the name"
    ]


def test_a_name_that_no_file_can_have_is_named_with_its_line(folder: Path) -> None:
    for name in ('"a\\0b"', "x" * 300):
        (mistake,) = mistakes(folder, changed(("valid: valid.csv", f"valid: {name}")))
        assert mistake.startswith("job.yaml:8: data.valid: ")


@pytest.mark.parametrize("name", ["elsewhere", "data #2", "a: b", "{x", "12 "])  # a path is no YAML
def test_the_data_root_can_be_replaced(folder: Path, name: str) -> None:
    shutil.move(folder / "data", folder / name)
    (folder / "job.yaml").write_text(GOOD)
    assert load_job(folder / "job.yaml", data_root=folder / name).data.root == folder / name


def test_a_data_root_where_there_is_no_section_is_named(folder: Path) -> None:
    (folder / "job.yaml").write_text(GOOD.replace("data:\n", "data: 3\nold:\n"))
    with pytest.raises(JobFileError, match=r"--data .*nowhere: data\.root: data holds no fields, but 3"):
        load_job(folder / "job.yaml", data_root=folder / "nowhere")


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
    assert job.model.takes_dim == ("dim" in inspect.signature(MODELS[name]).parameters)
    assert job.embedding.optimizer.build() == spec.Custom(function="module:function", lr=1.0, settings={"decay": 0.5})


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)


CRITEO = "1\t" + "\t".join(["3"] * 13 + ["0a1b2c3d"] * 26) + "\n"
ADULT = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, "
    "United-States, <=50K\n"
)
NCF = {"p.train.pairs": "0\t1\n1\t2\n", "p.test.rating": "0\t2\t1\t0\n", "p.test.negative": "(0,2)\t3\n"}
READERS: list[tuple[str, dict[str, str], tuple[str, ...], int | None]] = [
    ("reader: ncf, prefix: p, negatives: 0", NCF, ("user", "item"), 2),
    ("reader: lists, train: a, test: b", {"a": "0 1 2\n", "b": "0 3\n"}, ("user", "item"), 2),
    ("reader: ctr_csv, train: a, numeric: [x]", {"a": "label,u,x\n1,2,3\n"}, ("u",), 1),
    ("reader: ctr_csv, train: a, stream: true, delimiter: ;", {"a": "label;u\n1;2\n"}, ("u",), None),
    ("reader: criteo, train: [a, a]", {"a": CRITEO}, tuple(f"C{i}" for i in range(1, 27)), 2),
    ("reader: criteo, train: [a], stream: true", {"a": CRITEO}, tuple(f"C{i}" for i in range(1, 27)), None),
    ("reader: adult, train: a", {"a": ADULT}, ("workclass",), 1),
    ("reader: clicks, samples: 7", {}, ("C1",), 7),
]


@pytest.mark.parametrize(("section", "files", "features", "samples"), READERS)
def test_every_reader_can_be_opened_from_a_job(
    folder: Path, section: str, files: dict[str, str], features: tuple[str, ...], samples: int | None
) -> None:
    write(folder, files)
    rest = "embedding: {optimizer: {name: sgd, lr: 1}}\ntrain: {batch_size: 2, epochs: 1}\n"
    model = "two_tower" if "ncf" in section or "lists" in section else "fm"
    job = load(folder, f"model: {{name: {model}}}\ndata: {{{section}}}\n{rest}")
    data = job.data.open(folder, seed=0)
    assert data.schema.features[: len(features)] == features
    assert data.num_samples("train") == samples
    assert data.splits == job.data.judged_on
    assert (data.schema.num_dense > 0) == job.data.has_dense
    assert data.evaluation == job.data.evaluation


def test_parquet_can_be_opened_from_a_job(folder: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"label": [0, 1], "u": [3, 4]}), folder / "a.parquet")
    text = "model: {name: lr}\ndata: {reader: parquet, train: [a.parquet], ids: global, num_ids: 5}\n"
    job = load(folder, text + "embedding: {optimizer: {name: sgd, lr: 1}}\ntrain: {batch_size: 2, epochs: 1}\n")
    data = job.data.open(folder, seed=0)
    assert (data.schema.num_ids, data.num_samples("train")) == (5, 2)


@pytest.mark.parametrize("text", ["§", "", "::", '"', "\r", "\n"])
def test_a_delimiter_that_parsers_do_not_take_is_refused(folder: Path, text: str) -> None:
    reason = f"must be one ASCII character, no quote or line end, got {text!r}"
    given = GOOD.replace("  root: data\n", f"  root: data\n  delimiter: {json.dumps(text)}\n")
    assert mistakes(folder, given) == [f"job.yaml:7: data.delimiter: {reason}"]
    with pytest.raises(ValueError, match=re.escape(f"delimiter {reason}")):
        Layout(columns={"label": "label"}, delimiter=text)


def test_one_file_is_a_list_of_one(folder: Path) -> None:
    for reader in ("parquet", "criteo"):
        text = GOOD.replace("ctr_csv", reader).replace("valid: valid.csv", "valid: [train.csv, valid.csv]")
        assert load(folder, text).data.files() == {
            "train": (Path("train.csv"),),
            "valid": (Path("train.csv"), Path("valid.csv")),
        }
    assert "data.train: is missing" in mistakes(folder, text.replace("  train: train.csv\n", ""))[0]


@pytest.mark.parametrize(
    ("section", "want"),
    [
        ("reader: clicks", "train.epochs: the data has no end: give data.samples, or train.samples instead"),
        ("reader: ncf, prefix: p", "model.name: two_tower learns from positives alone: set data.negatives to 0"),
        ("reader: ctr_csv, train: train.csv, num_ids: 3", "data.num_ids: has no meaning for hashed ids; remove it"),
        ("reader: ctr_csv, train: train.csv, ids: global, stream: true", "data.num_ids: must be given"),
        ("reader: ctr_csv, train: train.csv, halve_valid_by: a", "data.halve_valid_by: makes a test split"),
        ("reader: ctr_csv, train: train.csv, skip: [a], numeric: [a]", "data.numeric: column 'a' is named twice"),
        ("reader: parquet, train: []", "data.train: tuple should have at least 1 item"),
    ],
)
def test_contradictions_of_the_data_are_refused(folder: Path, section: str, want: str) -> None:
    write(folder, {"data/" + name: text for name, text in NCF.items()})
    model = "two_tower" if "ncf" in section else "fm"
    text = f"model: {{name: {model}}}\ndata: {{root: data, {section}}}\n"
    text += "embedding: {optimizer: {name: sgd, lr: 1}}\ntrain: {batch_size: 2, epochs: 1}\n"
    assert any(want in line for line in mistakes(folder, text)), mistakes(folder, text)


def test_a_schedule_over_streamed_text_takes_steps_or_a_shape_without_an_end(folder: Path) -> None:
    stream = "data.stream=true"
    assert load(folder, GOOD, stream, "train.lr_schedule={name: cosine}", "train.steps=9").data.streams_text
    assert load(folder, GOOD, stream).train.epochs == 3
    assert load(folder, GOOD, "train.lr_schedule={name: linear}").train.epochs == 3


@pytest.mark.parametrize(
    "example", sorted((Path(__file__).parents[3] / "examples").glob("*.yaml")), ids=lambda p: p.name
)
def test_every_example_is_a_good_job(example: Path) -> None:
    wrong: tuple[Mistake, ...] = ()
    try:
        load_job(example)
    except JobFileError as error:
        wrong = error.mistakes
    assert not [str(mistake) for mistake in wrong if "no file " not in mistake.reason]  # the data may not be here


def test_a_job_is_checked_without_torch() -> None:
    code = "import embershard.cli.train, sys; assert not {'torch', 'numba', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)


@pytest.mark.parametrize(
    ("data", "cores", "processes"),
    [
        ("reader: clicks", 4, 1),
        ("reader: clicks", 3, 0),  # a worker, its loader and two shards
        ("reader: clicks, loader_processes: 1", 1, 1),
        ("reader: clicks, loader_processes: 0", 64, 0),
        ("reader: ctr_csv, root: data, train: train.csv", 64, 0),  # in memory
        ("reader: ctr_csv, root: data, train: train.csv, stream: true", 64, 1),
        ("reader: parquet, root: data, train: [train.csv]", 64, 1),
    ],
)
def test_batches_are_made_by_a_process_of_their_own_where_that_helps(
    folder: Path, monkeypatch: pytest.MonkeyPatch, data: str, cores: int, processes: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    rest = "embedding: {optimizer: {name: sgd, lr: 1}}\ntrain: {batch_size: 2, samples: 1}\n"
    assert load(folder, f"model: {{name: fm}}\ndata: {{{data}}}\n{rest}").loader_processes(1) == processes


def test_prefetch_is_a_staleness_or_off(folder: Path) -> None:
    assert load(folder).train.prefetch == 0
    assert load(folder, GOOD, "train.prefetch=2").train.prefetch == 2
    assert load(folder, GOOD, "train.prefetch=off").train.prefetch is None
    for wrong, why in (("-1", "greater than or equal to 0"), ("true", "a valid integer")):
        (line,) = mistakes(folder, GOOD, f"train.prefetch={wrong}")
        assert line.startswith(f"--set train.prefetch={wrong}: train.prefetch: input should be {why}")
