"""What job files give."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from embershard.proto import spec
from embershard.proto.codec.name import CodecName
from embershard.worker.data.batch import Schema
from embershard.worker.job import checks
from embershard.worker.job.checks import compression_advice
from embershard.worker.job.job import Job
from embershard.worker.job.load import JobFileError, load_job
from embershard.worker.job.yaml import Mistake
from embershard.worker.models.registry import MODELS
from embershard.worker.session import local_steps
from harness.job_files import CODECS, GOOD, MODES, NCF, SPLITS, changed, load, mistakes, write


def test_a_good_file_gives_the_job(folder):
    job = load(folder)
    assert job.embedding.optimizer.build() == spec.Adam(lr=0.001, weight_decay=0.05)
    assert job.embedding.initializer is not None
    assert job.embedding.initializer.build() == spec.Normal(std=1e-4)
    assert (job.metric, job.metrics) == ("auc", ("auc", "logloss", "ne", "calibration"))
    assert job.train.budget == ("epochs", 3)


def test_overrides_win_and_are_checked_like_the_file(folder):
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


def test_an_override_of_the_budget_takes_the_place_of_the_files(folder):
    job = load(folder, GOOD, "train.steps=20")
    assert job.train.budget == ("steps", 20)
    assert "exactly one" in mistakes(folder, GOOD, "train.steps=20", "train.epochs=2")[0]


@pytest.mark.parametrize("name", ["elsewhere", "data #2", "a: b", "{x", "12 "])  # a path is no YAML
def test_the_data_root_can_be_replaced(folder, name):
    shutil.move(folder / "data", folder / name)
    (folder / "job.yaml").write_text(GOOD)
    assert load_job(folder / "job.yaml", data_root=folder / name).data.root == folder / name


@pytest.mark.parametrize("name", MODELS)
def test_every_model_can_be_built_from_a_job(name):
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


CRITEO = "1\t" + "\t".join(["3"] * 13 + ["0a1b2c3d"] * 26) + "\n"


ADULT = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, "
    "United-States, <=50K\n"
)


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
def test_every_reader_can_be_opened_from_a_job(folder, section, files, features, samples):
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


def test_parquet_can_be_opened_from_a_job(folder):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"label": [0, 1], "u": [3, 4]}), folder / "a.parquet")
    text = "model: {name: lr}\ndata: {reader: parquet, train: [a.parquet], ids: global, num_ids: 5}\n"
    job = load(folder, text + "embedding: {optimizer: {name: sgd, lr: 1}}\ntrain: {batch_size: 2, epochs: 1}\n")
    data = job.data.open(folder, seed=0)
    assert (data.schema.num_ids, data.num_samples("train")) == (5, 2)


def test_one_file_is_a_list_of_one(folder):
    for reader in ("parquet", "criteo"):
        text = GOOD.replace("ctr_csv", reader).replace("valid: valid.csv", "valid: [train.csv, valid.csv]")
        assert load(folder, text).data.files() == {
            "train": (Path("train.csv"),),
            "valid": (Path("train.csv"), Path("valid.csv")),
        }
    assert "data.train: is missing" in mistakes(folder, text.replace("  train: train.csv\n", ""))[0]


def test_a_schedule_over_streamed_text_takes_steps_or_a_shape_without_an_end(folder):
    stream = "data.stream=true"
    assert load(folder, GOOD, stream, "train.lr_schedule={name: cosine}", "train.steps=9").data.streams_text
    assert load(folder, GOOD, stream).train.epochs == 3
    assert load(folder, GOOD, "train.lr_schedule={name: linear}").train.epochs == 3


@pytest.mark.parametrize(
    "example", sorted((Path(__file__).parents[3] / "examples").glob("*.yaml")), ids=lambda p: p.name
)
def test_every_example_is_a_good_job(example):
    wrong: tuple[Mistake, ...] = ()
    try:
        load_job(example)
    except JobFileError as error:
        wrong = error.mistakes
    assert not [str(mistake) for mistake in wrong if "no file " not in mistake.reason]  # the data may not be here


def test_a_job_is_checked_without_torch():
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
def test_batches_are_made_by_a_process_of_their_own_where_that_helps(folder, monkeypatch, data, cores, processes):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    rest = "embedding: {optimizer: {name: sgd, lr: 1}}\ntrain: {batch_size: 2, samples: 1}\n"
    assert load(folder, f"model: {{name: fm}}\ndata: {{{data}}}\n{rest}").loader_processes(1) == processes


def test_prefetch_is_a_staleness_or_off(folder):
    assert load(folder).train.prefetch == 0
    assert load(folder, GOOD, "train.prefetch=2").train.prefetch == 2
    assert load(folder, GOOD, "train.prefetch=off").train.prefetch is None
    for wrong, why in (("-1", "greater than or equal to 0"), ("true", "a valid integer")):
        (line,) = mistakes(folder, GOOD, f"train.prefetch={wrong}")
        assert line.startswith(f"--set train.prefetch={wrong}: train.prefetch: input should be {why}")


@pytest.mark.parametrize("word", ["off", "false"])
def test_off_may_be_written_as_false(folder, word):
    text = CODECS.replace("train: {", f"train: {{staleness: {word}, prefetch: {word}, amp: {word}, ")
    job = load(folder, text + f"compression: {word}\n")
    assert (job.train.bound, job.train.prefetch, job.train.amp, job.compression) == (None, None, "off", None)
    compression = load(folder, text, f"compression={{push: {word}}}").compression
    assert compression is not None
    assert [str(codec) for _, codecs in compression.given() for codec in codecs.codecs] == ["none"]


@pytest.mark.parametrize("name", ["off", "1:30", "2024-01-01", "2024-13-45", "=", "!!str 3"])
def test_a_name_stays_as_it_is_written(folder, name):
    want = Path(name.removeprefix("!!str "))
    shutil.move(folder / "data", folder / want)
    assert load(folder, changed(("root: data", f"root: {name}"))).data.root == want
    assert load(folder, GOOD, f"data.root={name}").data.root == want


@pytest.mark.parametrize(
    ("word", "bound", "local_steps"), [("0", 0, None), ("4", 4, None), ("off", None, None), ("local(8)", None, 8)]
)
def test_staleness_is_a_number_off_or_local(folder, word, bound, local_steps):
    train = load(folder, MODES, f"train.staleness={word}").train
    assert (train.bound, train.local_steps, train.prefetch) == (bound, local_steps, 0)


def test_hybrid_is_ps_with_dense_weights_in_the_workers(folder):
    assert load(folder, MODES).dense_mode == load(folder, MODES, "dense.mode=ps").dense_mode == "ps"
    assert load(folder, MODES, "strategy=hybrid").dense_mode == "ddp"
    assert load(folder, MODES, "strategy=hybrid", "dense.mode=fsdp").dense_mode == "fsdp"
    assert load(folder, MODES, "dense.mode=ddp").all_reduces
    assert not load(folder, MODES).all_reduces


OF_SHARDS = """\
model: {name: lr}
data: {reader: ctr_csv, train: train.csv, ids: global, splits: 4}
embedding: {optimizer: {name: adagrad, lr: 0.1}, cache: {rows: 9}}
dense: {mode: ddp}
train: {batch_size: 8, epochs: 1, staleness: 4, lease: 3, staleness_aware_lr: true, prefetch: 2, restart_workers: 1}
compression: {push: int8}
network: {bandwidth: 100mbit}
workers: 2
shards: 3
"""


@pytest.mark.parametrize("strategy", ["local", "ddp"])
def test_an_override_of_the_strategy_sets_aside_what_the_file_says_of_shards(folder, strategy):
    job = load(folder, OF_SHARDS, f"strategy={strategy}")
    assert not job.has_shards
    assert job.workers == (2 if strategy == "ddp" else 1)
    assert not job.model_fields_set & {"shards", "compression"}
    assert not job.train.model_fields_set & {"staleness", "lease", "staleness_aware_lr", "prefetch", "restart_workers"}
    assert job.data.splits is None
    assert "mode" not in job.dense.model_fields_set
    assert job.embedding.cache is None
    assert job.network.bandwidth == "unlimited"
    assert job.loader_processes(1) == 0


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rmsprop", "adam", "adamw"])
def test_dense_weights_in_workers_take_the_optimizers_of_torch(folder, name):
    job = load(folder, MODES, "dense.mode=ddp", f"dense.optimizer={{name: {name}, lr: 0.1}}")
    assert job.dense.optimizer is not None
    assert job.dense.optimizer.name == name


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam", "adamw"])
def test_tables_in_workers_take_the_optimizers_of_torch_for_sparse_gradients(folder, name):
    job = load(folder, MODES, "strategy=ddp", f"embedding.optimizer={{name: {name}, lr: 0.1}}")
    assert job.embedding.optimizer.name == name


def test_without_shards_a_job_may_say_that_nothing_is_stale(folder):
    nothing = ("train.staleness=0", "train.prefetch=0", "train.staleness_aware_lr=false")
    assert not load(folder, MODES, "strategy=ddp", *nothing).has_shards
    assert not load(folder, MODES, "strategy=ddp", "dense.mode=ddp").has_shards  # as it does anyway


def test_local_steps_are_promised_for_what_trains_copies():
    assert set(checks.LOCAL_OPTIMIZERS) == set(local_steps.LOCAL_OPTIMIZERS)


@pytest.mark.parametrize("staleness", ["4", "off"])
def test_learning_rates_are_damped_where_pushes_may_be_stale(folder, staleness):
    assert load(folder, MODES, f"train.staleness={staleness}", "train.staleness_aware_lr=true").train.staleness_aware_lr


def test_a_cache_within_the_bound_is_taken(folder):
    assert load(
        folder, MODES, "train.staleness=4", "train.prefetch=1", "embedding.cache={staleness: 3}"
    ).embedding.cache


def test_dense_weights_in_workers_take_adagrad_for_rowwise_adagrad(folder):
    assert load(folder, MODES, "dense.mode=ddp", "embedding.optimizer.name=rowwise_adagrad").all_reduces


def test_dense_weights_in_workers_need_nothing_of_the_optimizer_of_rows_beside_their_own(folder):
    rows, dense = "embedding.optimizer={name: ftrl, lr: 1}", "dense.optimizer={name: adam, lr: 1}"
    assert load(folder, MODES, "dense.mode=ddp", rows, dense).all_reduces


def test_an_epoch_is_dealt_in_eight_splits_for_each_worker_or_as_many_as_the_job_says(folder):
    assert load(folder, SPLITS).num_splits(3) == 24
    assert load(folder, SPLITS, "data.splits=5").num_splits(3) == 5
    assert load(folder, SPLITS, "data.splits=null").num_splits(3) == 0
    assert load(folder, SPLITS).num_splits(1) == 0  # who is alone has all of it
    assert load(folder, SPLITS).elastic(3)
    assert not load(folder, SPLITS).elastic(1)


@pytest.mark.parametrize(
    "sets",
    [
        ("data.splits=3",),
        ("workers=2", "train.restart_workers=1"),
        ("workers=1",),
        ("dense.mode=ddp", "data.splits=null"),
        ("data.splits=null", "train.steps=10"),
    ],
    ids=" ".join,
)
def test_what_is_no_contradiction_is_taken(folder, sets):
    load(folder, SPLITS, *sets)


def test_a_job_without_the_section_compresses_nothing(folder):
    assert load(folder, CODECS).compression is None
    assert load(folder, CODECS, "compression=off").compression is None


def test_a_text_is_the_codec_of_every_step(folder):
    section = load(folder, CODECS, "compression={push: topk:0.01+fp16s, pull: fp16s}").compression
    assert section is not None
    assert section.push is not None
    assert section.pull is not None
    assert [str(section.push.schedule.codec(step)) for step in (0, 10**6)] == ["topk:0.01+fp16s"] * 2
    assert str(section.pull.schedule.codec(0)) == "fp16s"


def test_a_schedule_changes_the_codec_at_its_steps(folder):
    section = load(folder, CODECS, "compression={dense: {push: {at: {0: off, 1000: topk:0.01}}}}").compression
    assert section is not None
    assert section.dense.push is not None
    schedule = section.dense.push.schedule
    assert [str(schedule.codec(step)) for step in (0, 999, 1000, 2000)] == ["none", "none", "topk:0.01", "topk:0.01"]


def test_auto_is_a_section_that_measures(folder):
    section = load(folder, CODECS, "compression=auto").compression
    assert section is not None
    assert (section.auto, section.allow) == (True, ())
    section = load(
        folder, CODECS, "compression={auto: true, allow: [topk:0.01], tables: {linear: {push: none}}}"
    ).compression
    assert section is not None
    assert section.allow == ("topk:0.01",)


@pytest.mark.parametrize(
    "text", ["compression:\n  push:\n", "compression: {push: null}\n", "compression:\n  push: off\n"]
)
def test_a_direction_without_a_value_is_not_given(folder, text):
    section = load(folder, CODECS + text).compression
    assert section is not None
    assert section.settings(0).of("rows", dense=False).push.is_plain


def test_a_direction_of_the_file_is_taken_back_by_null_and_not_by_nothing(folder):
    text = CODECS + "compression:\n  push: int8\n  pull: bf16\n"
    section = load(folder, text, "compression.push=null").compression
    assert section is not None
    assert section.settings(0).of("rows", dense=False) == (CodecName(), CodecName.parse("bf16"))
    (line,) = mistakes(folder, text, "compression.push=")
    assert line == "--set compression.push=: compression.push: has no value; null takes it as not given"


@pytest.mark.parametrize("text", ["compression=auto", "compression={push: int8, dense: {push: {at: {0: dgc:0.01}}}}"])
def test_a_checkpoints_manifest_gives_the_section_back(folder, text):
    job = load(folder, CODECS, text)
    assert Job.model_validate(job.model_dump(mode="json")).compression == job.compression


def test_tables_of_groups_have_their_own_momentum_and_advice(folder):
    groups = [
        "embedding.optimizer={name: sgd, lr: 1, momentum: 0.9}",
        "compression={tables: {linear: {push: dgc:0.1}}}",
    ]
    assert mistakes(folder, CODECS, *groups)
    own = load(folder, CODECS, *groups, "embedding.groups=[{match: linear, optimizer: {name: adam, lr: 1}}]")
    assert compression_advice(own) == []  # it comes from the worker, who knows the tables


def test_a_pattern_of_all_dense_tables_is_one_of_dense_weights(folder):
    section = load(folder, CODECS, "compression={tables: {'dense*': {push: powersgd:4, pull: delta}}}").compression
    assert section is not None
    assert [dense for *_, dense, _ in section.choices()] == [True, True]


def test_another_strategy_sets_the_section_aside(folder):
    assert load(folder, CODECS + "compression: {push: int8}\n", "strategy=local").compression is None


def test_a_poor_choice_in_front_of_an_optimizer_gives_a_line_of_advice(folder):
    adam = "embedding.optimizer={name: adam, lr: 0.1}"
    assert compression_advice(load(folder, CODECS)) == []
    assert compression_advice(load(folder, CODECS, adam, "compression={push: int8, pull: int8}")) == []
    (line,) = compression_advice(load(folder, CODECS, adam, "compression={push: topk:0.01}"))
    assert line.startswith("compression.push: topk:0.01 in front of adam changes the size of its steps")
    (line,) = compression_advice(load(folder, CODECS, "compression={dense: {push: int8}}"))
    assert line.startswith("compression.dense.push: in front of sgd topk:0.01+fp16s sends far less than int8")
