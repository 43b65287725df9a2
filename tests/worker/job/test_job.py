"""What job files give."""

import inspect
import shutil
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

from embershard.proto import spec
from embershard.proto.codec.name import CodecName
from embershard.worker.data.batch import Schema
from embershard.worker.job.checks import compression_advice
from embershard.worker.job.job import Job
from embershard.worker.job.load import JobFileError, load_job
from embershard.worker.models.registry import MODELS
from harness.job_files import CODECS, GOOD, MODES, NCF, SPLITS, changed, load, mistakes, write


def test_overrides_win_and_are_checked_like_the_file(folder):
    job = load(folder, GOOD, "train.epochs=5", "embedding.optimizer={name: sgd, lr: 1}", "evaluate.metric=logloss")
    assert (job.train.epochs, job.metric, job.embedding.optimizer.build()) == (5, "logloss", spec.SGD(lr=1.0))
    assert mistakes(folder, GOOD, "train.epochs=0", "train.epoch=3", "=3", "model.name.x=1", "evaluate.metric=") == [
        "--set =3: must read section.field=value",
        "--set model.name.x=1: model.name.x: model.name holds no fields, but 'deepfm'",
        "--set evaluate.metric=: evaluate.metric: has no value; null takes it as not given",
        "--set train.epochs=0: train.epochs: input should be greater than or equal to 1, got 0",
        "--set train.epoch=3: train.epoch: unknown field; did you mean epochs?",
    ]


def pushes_plainly(job):
    return job.compression.settings(0).of("rows", dense=False).push.is_plain


# a file, what overrides it, fields of the job (or what is made of it), and their values
SAID = [
    (GOOD, "", lambda job: job.embedding.optimizer.build(), spec.Adam(lr=0.001, weight_decay=0.05)),
    (GOOD, "", lambda job: job.embedding.initializer.build(), spec.Normal(std=1e-4)),
    (GOOD, "", "metrics", ("auc", "logloss", "ne", "calibration")),
    (GOOD, "", "metric", "auc"),
    (GOOD, "", "train.budget", ("epochs", 3)),
    (GOOD, "train.steps=20", "train.budget", ("steps", 20)),  # in place of the file's
    (GOOD, "data.stream=true; train.lr_schedule={name: cosine}; train.steps=9", "data.streams_text", True),
    (GOOD, "data.stream=true", "train.epochs", 3),  # plateau has no end
    (GOOD, "train.lr_schedule={name: linear}", "train.epochs", 3),
    (GOOD, "", "train.prefetch", 0),
    (GOOD, "train.prefetch=2", "train.prefetch", 2),
    (GOOD, "train.prefetch=off", "train.prefetch", None),
    (MODES, "train.staleness=0", "train.bound, train.local_steps, train.prefetch", (0, None, 0)),
    (MODES, "train.staleness=4", "train.bound, train.local_steps, train.prefetch", (4, None, 0)),
    (MODES, "train.staleness=off", "train.bound, train.local_steps, train.prefetch", (None, None, 0)),
    (MODES, "train.staleness=local(8)", "train.bound, train.local_steps, train.prefetch", (None, 8, 0)),
    (MODES, "train.staleness=4; train.staleness_aware_lr=true", "train.staleness_aware_lr", True),
    (MODES, "train.staleness=off; train.staleness_aware_lr=true", "train.staleness_aware_lr", True),
    (MODES, "train.staleness=4; train.prefetch=1; embedding.cache={staleness: 3}", "embedding.cache.staleness", 3),
    (MODES, "", "dense_mode, all_reduces", ("ps", False)),
    (MODES, "dense.mode=ps", "dense_mode", "ps"),
    (MODES, "dense.mode=ddp", "all_reduces", True),
    (MODES, "strategy=hybrid", "dense_mode", "ddp"),  # ps with dense weights in the workers
    (MODES, "strategy=hybrid; dense.mode=fsdp", "dense_mode", "fsdp"),
    (MODES, "dense.mode=ddp; embedding.optimizer.name=rowwise_adagrad", "all_reduces", True),  # adagrad of torch
    # dense weights in workers need nothing of the optimizer of rows beside their own
    (MODES, "dense.mode=ddp; embedding.optimizer.name=ftrl; dense.optimizer={name: adam, lr: 1}", "all_reduces", True),
    # without shards a job may say that nothing is stale, and where its dense weights lie anyway
    (MODES, "strategy=ddp; train.staleness=0; train.prefetch=0; train.staleness_aware_lr=false", "has_shards", False),
    (MODES, "strategy=ddp; dense.mode=ddp", "has_shards", False),
    # eight for each worker; who is alone has all of it
    (SPLITS, "", lambda job: (job.num_splits(3), job.elastic(3), job.elastic(1)), (24, True, False)),
    (SPLITS, "", lambda job: job.num_splits(1), 0),
    (SPLITS, "data.splits=5", lambda job: job.num_splits(3), 5),
    (SPLITS, "data.splits=null", lambda job: job.num_splits(3), 0),
    (SPLITS, "data.splits=3", "workers", 3),
    (SPLITS, "workers=2; train.restart_workers=1", "workers", 2),
    (SPLITS, "workers=1", "workers", 1),
    (SPLITS, "dense.mode=ddp; data.splits=null", "workers", 3),
    (SPLITS, "data.splits=null; train.steps=10", "workers", 3),
    (CODECS, "", "compression", None),
    (CODECS, "compression=off", "compression", None),
    (CODECS + "compression: {push: int8}\n", "strategy=local", "compression", None),
    (CODECS, "compression=auto", "compression.auto, compression.allow", (True, ())),
    (CODECS, "compression={auto: true, allow: [topk:0.01]}", "compression.allow", ("topk:0.01",)),
    (CODECS, "compression={auto: true, tables: {linear: {push: none}}}", "compression.auto", True),
    (CODECS, "compression={push: topk:0.01+fp16s}", "compression.push.schedule.at", {0: "topk:0.01+fp16s"}),
    (CODECS, "compression={pull: fp16s}", "compression.pull.schedule.at", {0: "fp16s"}),
    (CODECS, "compression={dense: {push: {at: {0: off, 10: topk:0.01}}}}", "compression.dense.push.schedule.at",
     {0: "none", 10: "topk:0.01"}),
    # a direction without a value is not given
    (CODECS + "compression:\n  push:\n", "", pushes_plainly, True),
    (CODECS, "compression={push: null}", pushes_plainly, True),
    (CODECS, "compression={push: off}", pushes_plainly, True),
    # a pattern of all dense tables is one of dense weights
    (CODECS, "compression={tables: {'dense*': {push: powersgd:4, pull: delta}}}",
     lambda job: [dense for *_, dense, _ in job.compression.choices()], [True, True]),
    # the optimizers of torch; for tables, those that take sparse gradients
    *((MODES, f"dense.mode=ddp; dense.optimizer={{name: {name}, lr: 0.1}}", "dense.optimizer.name", name)
      for name in ("sgd", "adagrad", "rmsprop", "adam", "adamw")),
    *((MODES, f"strategy=ddp; embedding.optimizer={{name: {name}, lr: 0.1}}", "embedding.optimizer.name", name)
      for name in ("sgd", "adagrad", "adam", "adamw")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "overrides", "fields", "want"), SAID)
def test_a_job_says(folder, text, overrides, fields, want):
    job = load(folder, text, *filter(None, overrides.split("; ")))
    found = fields(job) if callable(fields) else attrgetter(*fields.split(", "))(job)
    assert ({at: str(codec) for at, codec in found.items()} if isinstance(want, dict) else found) == want


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
ADULT = "39, State-gov, 7, Bachelors, 13, Divorced, Sales, Wife, White, Male, 2174, 0, 40, Cuba, <=50K\n"
READERS = [
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


def test_one_file_is_a_list_of_one(folder):
    for reader in ("parquet", "criteo"):
        text = GOOD.replace("ctr_csv", reader).replace("valid: valid.csv", "valid: [train.csv, valid.csv]")
        train, valid = Path("train.csv"), Path("valid.csv")
        assert load(folder, text).data.files() == {"train": (train,), "valid": (train, valid)}


@pytest.mark.parametrize(
    "example", sorted((Path(__file__).parents[3] / "examples").glob("*.yaml")), ids=lambda p: p.name
)
def test_every_example_is_a_good_job(example):
    wrong = ()
    try:
        load_job(example)
    except JobFileError as error:
        wrong = error.mistakes
    assert all("no file " in mistake.reason for mistake in wrong)  # the data may not be here


def test_a_job_is_checked_without_torch():
    code = "import embershard.cli.train, sys; assert not {'torch', 'numba', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)


LOADERS = [
    ("reader: clicks", 4, 1),
    ("reader: clicks", 3, 0),  # a worker, its loader and two shards
    ("reader: clicks, loader_processes: 1", 1, 1),
    ("reader: clicks, loader_processes: 0", 64, 0),
    ("reader: ctr_csv, root: data, train: train.csv", 64, 0),  # in memory
    ("reader: ctr_csv, root: data, train: train.csv, stream: true", 64, 1),
    ("reader: parquet, root: data, train: [train.csv]", 64, 1),
]


@pytest.mark.parametrize(("data", "cores", "processes"), LOADERS)
def test_batches_are_made_by_a_process_of_their_own_where_that_helps(folder, monkeypatch, data, cores, processes):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    rest = "embedding: {optimizer: {name: sgd, lr: 1}}\ntrain: {batch_size: 2, samples: 1}\n"
    assert load(folder, f"model: {{name: fm}}\ndata: {{{data}}}\n{rest}").loader_processes(1) == processes


@pytest.mark.parametrize("word", ["off", "false"])
def test_off_may_be_written_as_false(folder, word):
    text = CODECS.replace("train: {", f"train: {{staleness: {word}, prefetch: {word}, amp: {word}, ")
    job = load(folder, text + f"compression: {word}\n")
    assert (job.train.bound, job.train.prefetch, job.train.amp, job.compression) == (None, None, "off", None)
    compression = load(folder, text, f"compression={{push: {word}}}").compression
    assert [str(codec) for _, codecs in compression.given() for codec in codecs.codecs] == ["none"]


@pytest.mark.parametrize("name", ["off", "1:30", "2024-01-01", "2024-13-45", "=", "!!str 3"])
def test_a_name_stays_as_it_is_written(folder, name):
    want = Path(name.removeprefix("!!str "))
    shutil.move(folder / "data", folder / want)
    assert load(folder, changed(("root: data", f"root: {name}"))).data.root == want
    assert load(folder, GOOD, f"data.root={name}").data.root == want


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
    assert (job.has_shards, job.workers, job.loader_processes(1)) == (False, 2 if strategy == "ddp" else 1, 0)
    said = job.model_fields_set | job.train.model_fields_set | job.dense.model_fields_set
    of_train = {"staleness", "lease", "staleness_aware_lr", "prefetch", "restart_workers"}
    assert not said & {"shards", "compression", "mode", *of_train}
    assert (job.data.splits, job.embedding.cache, job.network.bandwidth) == (None, None, "unlimited")


def test_a_direction_of_the_file_is_taken_back_by_null_and_not_by_nothing(folder):
    text = CODECS + "compression:\n  push: int8\n  pull: bf16\n"
    section = load(folder, text, "compression.push=null").compression
    assert section.settings(0).of("rows", dense=False) == (CodecName(), CodecName.parse("bf16"))
    assert mistakes(folder, text, "compression.push=")


@pytest.mark.parametrize("text", ["compression=auto", "compression={push: int8, dense: {push: {at: {0: dgc:0.01}}}}"])
def test_a_checkpoints_manifest_gives_the_section_back(folder, text):
    job = load(folder, CODECS, text)
    assert Job.model_validate(job.model_dump(mode="json")).compression == job.compression


def test_tables_of_groups_have_their_own_momentum_and_advice(folder):
    momentum, dgc = "embedding.optimizer.momentum=0.9", "compression={tables: {linear: {push: dgc:0.1}}}"
    assert mistakes(folder, CODECS, momentum, dgc)
    own = load(folder, CODECS, momentum, dgc, "embedding.groups=[{match: linear, optimizer: {name: adam, lr: 1}}]")
    assert compression_advice(own) == []  # it comes from the worker, who knows the tables


def test_a_poor_choice_in_front_of_an_optimizer_gives_a_line_of_advice(folder):
    adam = "embedding.optimizer.name=adam"
    for overrides in ([], [adam, "compression={push: int8, pull: int8}"]):
        assert compression_advice(load(folder, CODECS, *overrides)) == []
    for overrides in ([adam, "compression={push: topk:0.01}"], ["compression={dense: {push: int8}}"]):
        (advice,) = compression_advice(load(folder, CODECS, *overrides))
        assert advice.startswith("compression.")
