"""What job files give."""

import errno
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import embershard as es
from embershard.proto import spec
from embershard.proto.codec.name import CodecName
from embershard.worker.data.batch import Field, IdTable, Schema
from embershard.worker.data.text import Layout
from embershard.worker.job.compression import CodecsSection
from embershard.worker.job.compression_checks import compression_advice
from embershard.worker.job.job import Job
from embershard.worker.job.load import JobFileError, load_job
from embershard.worker.job.registry import MODELS
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


@pytest.mark.parametrize("value", ["/runs/ads #3", "#3", "ads #"])
def test_an_override_of_which_yaml_would_drop_a_part_is_a_mistake(folder, value):
    (found,) = mistakes(folder, GOOD, f"checkpoint.folder={value}")
    assert f"YAML takes what follows # in {value!r} for a comment" in found
    assert load(folder, GOOD, f'checkpoint.folder="{value}"').checkpoint.folder == value


def pushes_plainly(job):
    return job.compression.settings(0).of("rows", dense=False).push.is_plain


def first_values(job):
    return list(job.initializers().items())


TOWERS = """\
model: {name: two_tower}
data: {reader: lists, train: train.csv, test: train.csv}
embedding: {dim: 64, optimizer: {name: adagrad, lr: 0.1}}
train: {batch_size: 8, epochs: 1}
"""


# a file, what overrides it, fields of the job (or what is made of it), and their values
SAID = [
    (GOOD, "", lambda job: job.embedding.optimizer.build(), spec.Adam(lr=0.001, weight_decay=0.05)),
    (GOOD, "", lambda job: job.embedding.initializer.build(), spec.Normal(std=1e-4)),
    (GOOD, "", first_values, [("*", spec.Normal(std=1e-4))]),
    # torch's Normal(0, 1) keeps most models from training
    (GOOD, "embedding.initializer=null", first_values, [("*", spec.Normal(std=0.01))]),
    (GOOD, "embedding.initializer=null; embedding.groups=[{match: a, optimizer: {name: sgd, lr: 1}}]", first_values,
     [("a", spec.Normal(std=0.01)), ("*", spec.Normal(std=0.01))]),
    (TOWERS, "", first_values, [("*", spec.Normal(std=0.1))]),  # it normalises
    (TOWERS, "model.normalize=false", first_values, [("*", spec.Normal(std=0.01))]),
    (TOWERS, "embedding.initializer={name: constant, value: 1}", first_values, [("*", spec.Constant(value=1.0))]),
    (GOOD, "", "train.budget", ("epochs", 3)),
    (GOOD, "train.steps=20", "train.budget", ("steps", 20)),  # in place of the file's
    (GOOD, "data.stream=true; train.lr_schedule={name: cosine}; train.steps=9", "data.streams_text", True),
    (GOOD, "data.stream=true", "train.epochs", 3),  # plateau has no end
    (GOOD, "train.lr_schedule={name: linear}", "train.epochs", 3),
    (GOOD, "train.prefetch=off", "train.prefetch", None),
    (MODES, "train.staleness=0", "train.bound, train.local_steps, train.prefetch", (0, None, 0)),
    (MODES, "train.staleness=4", "train.bound, train.local_steps, train.prefetch", (4, None, 0)),
    (MODES, "train.staleness=off", "train.bound, train.local_steps, train.prefetch", (None, None, 0)),
    (MODES, "train.staleness=local(8)", "train.bound, train.local_steps, train.prefetch", (None, 8, 0)),
    (MODES, "train.staleness=4; train.staleness_aware_lr=true", "train.staleness_aware_lr", True),
    (MODES, "train.staleness=off; train.staleness_aware_lr=true", "train.staleness_aware_lr", True),
    (MODES, "train.staleness=4; train.prefetch=1; embedding.cache={staleness: 3}", "embedding.cache.staleness", 3),
    (MODES, "", "dense_mode, all_reduces", ("ps", False)),
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
    # a job goes on by itself from its checkpoints, where it has some
    (GOOD, "", "recovers", False),
    (GOOD, "checkpoint.folder=here", "recovers", True),
    (GOOD, "checkpoint.folder=here; train.recover=true", "recovers", True),
    (GOOD, "checkpoint.folder=here; train.recover=false", "recovers", False),
    (SPLITS, "dense.mode=ddp; data.splits=null", "workers", 3),
    (SPLITS, "data.splits=null; train.steps=10", "workers", 3),
    (CODECS, "", "compression", None),
    (CODECS + "compression: {push: int8}\n", "strategy=local", "compression", None),
    (CODECS, "compression=auto", "compression.auto, compression.allow", (True, ())),
    (CODECS, "compression={auto: true, allow: [topk:0.01]}", "compression.allow", ("topk:0.01",)),
    (CODECS, "compression={auto: true, tables: {linear: {push: none}}}", "compression.auto", True),
    (CODECS, "compression={push: topk:0.01+fp16s}", "compression.push.at", {0: "topk:0.01+fp16s"}),
    (CODECS, "compression={pull: fp16s}", "compression.pull.at", {0: "fp16s"}),
    (CODECS, "compression={dense: {push: {at: {0: off, 10: topk:0.01}}}}", "compression.dense.push.at",
     {0: "none", 10: "topk:0.01"}),
    (CODECS, "compression={push: int8}", "changes_codecs", False),
    *((CODECS, f"compression={given}", "changes_codecs", True) for given in
      ("auto", "{push: int8, unless_slower: true}", "{push: {at: {0: none, 9: int8}}}")),
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
    assert (fields(job) if callable(fields) else attrgetter(*fields.split(", "))(job)) == want


def test_a_codec_holds_from_its_step_to_the_next_one():
    schedule = CodecsSection(at={100: "int8", 0: "none", 200: "topk:0.01"})
    found = [str(schedule.codec(step)) for step in (0, 99, 100, 199, 200, 10**9)]
    assert found == ["none", "none", "int8", "int8", "topk:0.01", "topk:0.01"]
    for at, reason in (({}, "step 0"), ({1: "none"}, "step 0"), ({0: "none", -1: "int8"}, "greater than")):
        with pytest.raises(ValueError, match=reason):
            CodecsSection(at=at)


@pytest.mark.parametrize("name", ["elsewhere", "data #2", "a: b", "{x", "12 "])  # a path is no YAML
def test_the_data_root_can_be_replaced(folder, name):
    shutil.move(folder / "data", folder / name)
    (folder / "job.yaml").write_text(GOOD)
    assert load_job(folder / "job.yaml", data_root=folder / name).data.root == folder / name


@pytest.mark.parametrize("name", MODELS)
def test_every_model_can_be_built_from_a_job(name):
    own = {"din": {"target": "user", "history": "history"}, "feature_towers": {"item": "item"}}
    settings = own.get(name, {})
    values = {
        "model": {"name": name, **settings},
        "data": {"reader": "ncf", "prefix": "p"},
        "embedding": {"optimizer": {"name": "module:function", "lr": 1, "settings": {"decay": 0.5}}},
        "train": {"batch_size": 2, "steps": 1},
    }
    job = Job.model_validate(values)
    history = Field("history", "items", 0, 5, "sequence")
    user, towers = Field("user", "items", 5), (Field("user", "items", 0), Field("item", "items", 1))
    fields = {"sasrec": (history,), "din": (history, user), "feature_towers": towers}.get(name, ())
    model = job.model.build(Schema(("user", "item"), 3, None, fields, (IdTable("items", 9),)), 4, "meta")
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


def test_parquet_can_be_opened_from_a_job(folder):
    pq.write_table(pa.table({"label": [0, 1], "u": [3, 4]}), folder / "a.parquet")
    job = load(folder, MODES, "data={reader: parquet, train: [a.parquet], ids: global, num_ids: 5}")
    data = job.data.open(folder, seed=0)
    assert (data.schema.num_ids, data.num_samples("train")) == (5, 2)


def test_one_file_is_a_list_of_one(folder):
    for reader in ("parquet", "criteo"):
        text = GOOD.replace("ctr_csv", reader).replace("valid: valid.csv", "valid: [train.csv, valid.csv]")
        train, valid = Path("train.csv"), Path("valid.csv")
        assert load(folder, text).data.files() == {"train": (train,), "valid": (train, valid)}


EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def clicks(tmp_path):
    """The tables of examples/din, of four actions of two users and one of another."""
    actions = [(user, 10 * user + step) for step in range(4) for user in (1, 2)]
    (tmp_path / "actions.txt").write_text("".join(f"{user} {item}\n" for user, item in [*actions, (3, 9)]))
    line = [sys.executable, EXAMPLES / "din" / "make_table.py", tmp_path / "actions.txt", tmp_path / "din" / "clicks"]
    subprocess.run(line, check=True, capture_output=True)
    return tmp_path


def test_the_job_of_feature_towers_ranks_the_items_of_the_tables_of_din(clicks):
    shutil.copy(EXAMPLES / "feature-towers.yaml", clicks)
    data = load_job(clicks / "feature-towers.yaml").data.open(clicks, 0)
    assert [data.num_samples(part) for part in ("train", "test")] == [4, 2]
    (users,) = data.users("test", 0, 1, 9)
    assert [len(data.items[0]), len(users.ids), len(users.seen_item)] == [6, 2, 4]


def test_the_job_of_din_reads_the_table_that_is_made_beside_it(clicks):
    shutil.copy(EXAMPLES / "din" / "job.yaml", clicks / "din")
    data = load_job(clicks / "din" / "job.yaml").data.open(clicks / "din", 0)
    assert [data.num_samples(part) for part in ("train", "test")] == [8, 4]  # an item that was drawn beside each
    (batch,) = data.evaluate("test", 0, 1, 9)
    taken = [es.hash_ids("item", [user * 10 + step for step in range(4)]).tolist() for user in (1, 2)]
    assert [row[:4] for row in batch.ids[batch.labels == 1].tolist()] == [[own[3], *own[:3]] for own in taken]


@pytest.mark.parametrize("example", [*sorted(EXAMPLES.glob("*.yaml")), EXAMPLES / "din" / "job.yaml"], ids=str)
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


@pytest.mark.parametrize("text", ["checkpoint=null", "checkpoint.best=false", "checkpoint={folder: here, every: 2}"])
def test_a_manifest_gives_the_section_of_checkpoints_back(folder, text):
    job = load(folder, GOOD, text)
    assert Job.model_validate(job.model_dump(mode="json")).checkpoint == job.checkpoint


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


def test_all_mistakes_are_named_at_once_each_with_line_and_field(folder):
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
        ("a: 1\na: 2\n", 'job.yaml:2: not YAML: while constructing a mapping found duplicate key "a"'),
        ("a: &x 1\nb: *x\n", "job.yaml:2: the alias *x: write its value out"),
        ("a: 1\n? [1]\n: 2\n", "job.yaml:2: not YAML: a key must be a word"),
        ("a: !!python/object/apply:os.system [ls]\n", "job.yaml:1: the tag "),
        ("workers: 1\nshards: !x 1\n", "job.yaml:2: the tag !x: leave it out"),
        ("a: wow!\n", "job.yaml:1: a: unknown field"),
        (
            "a:\n\tb: 1\n",
            "job.yaml:2: not YAML: while scanning for the next token found character '\\t' that cannot "
            "start any token; indent with spaces",
        ),
    ],
)
def test_what_is_no_mapping_of_sections_is_refused(folder, text, want):
    assert any(line.startswith(want) for line in mistakes(folder, text)), mistakes(folder, text)


def test_a_missing_section_or_choice_is_named(folder):
    found = mistakes(folder, "model: {factors: 8}\ndata: 3\ntrain: {batch_size: 1}\nembedding: {optimizer: {lr: 1}}\n")
    assert [line.partition(";")[0] for line in found] == [
        "job.yaml:1: model.name: is missing",
        "job.yaml:2: data: is a section of fields, got 3",
        "job.yaml:4: embedding.optimizer.name: is missing",
    ]
    choices = [line.partition("one of: ")[2].split(", ") for line in found]
    assert {"dlrm", "sasrec"} <= set(choices[0])
    assert {"sgd", "adagrad"} <= set(choices[2])


def test_the_values_of_a_missing_field_are_named(folder):
    (found,) = mistakes(folder, GOOD, "data={reader: tabular, train: a.csv, split: {valid: .1}}", "features={a: {}}")
    assert set(found.partition("data.split.by: is missing; give one of: ")[2].split(", ")) == {"random", "user", "time"}


def test_a_missing_or_binary_file_is_named(folder):
    with pytest.raises(JobFileError, match=r"no\.yaml: cannot be read: No such file"):
        load_job(folder / "no.yaml")
    (folder / "job.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JobFileError, match="not UTF-8"):
        load_job(folder / "job.yaml")


def test_data_that_cannot_be_looked_at_is_named_with_its_line(folder, monkeypatch):
    stat = Path.stat

    def fails(path, **options):
        if path.name == "valid.csv":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", fails)
    (line,) = mistakes(folder, GOOD)
    assert line.startswith(f"job.yaml:8: data.valid: data/valid.csv cannot be read: {os.strerror(errno.ESTALE)}")


def test_a_name_that_no_file_can_have_is_named_with_its_line(folder):
    for name in ('"a\\0b"', "x" * 300):
        (mistake,) = mistakes(folder, changed(("valid: valid.csv", f"valid: {name}")))
        assert mistake.startswith("job.yaml:8: data.valid: ")


@pytest.mark.parametrize("text", ["§", "", "::", '"', "\r", "\n"])
def test_a_delimiter_that_parsers_do_not_take_is_refused(folder, text):
    reason = f"must be one ASCII character, no quote or line end, got {text!r}"
    given = GOOD.replace("  root: data\n", f"  root: data\n  delimiter: {json.dumps(text)}\n")
    assert mistakes(folder, given) == [f"job.yaml:7: data.delimiter: {reason}"]
    with pytest.raises(ValueError, match=re.escape(f"delimiter {reason}")):
        Layout(columns={"label": "label"}, delimiter=text)


def test_coverage_alone_cannot_decide_which_evaluation_is_the_best(folder):
    assert any("coverage@20 is high for random" in line for line in mistakes(folder, TOWERS, "metrics=[coverage@20]"))
    assert load(folder, TOWERS, "data.root=data", "metrics=[recall@20, coverage@20]").metric == "recall@20"


@pytest.mark.parametrize(
    ("section", "want"),
    [
        ("reader: clicks", "train.epochs: the data has no end: give data.samples, or train.samples instead"),
        ("reader: ncf, prefix: p", "model.name: two_tower learns from positives alone: set data.negatives to 0"),
        ("reader: tabular, train: train.csv", "model.name: two_tower learns from lists of items"),
        ("reader: lists, train: p, test: p", "data.negatives: simplex learns from items that a user did not take"),
        ("reader: ctr_csv, train: train.csv, num_ids: 3", "data.num_ids: has no meaning for hashed ids; remove it"),
        ("reader: ctr_csv, train: train.csv, ids: global, stream: true", "data.num_ids: must be given"),
        ("reader: ctr_csv, train: train.csv, halve_valid_by: a", "data.halve_valid_by: makes a test split"),
        ("reader: ctr_csv, train: train.csv, skip: [a], numeric: [a]", "data.numeric: column 'a' is named twice"),
        ("reader: parquet, train: []", "data.train: list should have at least 1 item"),
    ],
)
def test_contradictions_of_the_data_are_refused(folder, section, want):
    write(folder, {"data/" + name: text for name, text in NCF.items()})
    model = "two_tower" if "ncf" in section or "tabular" in section else "simplex" if "lists" in section else "fm"
    text = f"model: {{name: {model}}}\ndata: {{root: data, {section}}}\n"
    text += "embedding: {optimizer: {name: sgd, lr: 1}}\ntrain: {batch_size: 2, epochs: 1}\n"
    assert any(want in line for line in mistakes(folder, text)), mistakes(folder, text)


# what overrides a good file, and how each mistake begins
OF_FIELDS = """
model={name: sasrec} -> model.name: sasrec and data.reader ctr_csv do not fit together
model={name: din, target: a, history: b} -> model.name: din needs a sequence
model={name: din, target: [a, b], history: c} -> model.history: must name a sequence for each of a, b
metrics=[auc:label2] -> metrics.0: 'auc:label2' is no metric
evaluate.metric=calibration -> evaluate.metric: calibration is best near 1
evaluate.user=user -> evaluate.user: has a meaning for feature_towers
loss=ccl -> loss: ccl compares items of lists
loss={name: ccl, margin: 2} -> loss.margin
loss=bpr2 -> loss.name: unknown 'bpr2'
model={name: gmf}; embedding.dim=null -> model.name: gmf needs a user and an item per sample
model={name: lr} -> embedding.dim: has no meaning for lr
model={name: persia_dnn} -> model.name: persia_dnn needs dense features
train.epochs=null -> train: give exactly one of epochs, steps and samples
train.epochs=3; train.steps=4 -> train: give exactly one of epochs, steps and samples
train.steps=3; train.lr_schedule={name: plateau, warmup_steps: 3} -> train.lr_schedule.warmup_steps: must be below
train.lr_schedule={name: plateau, end: 0.1} -> train.lr_schedule.end: has no meaning for plateau
train.lr_schedule={name: step, factor: 0.1} -> train.lr_schedule.every: must say after how many steps
evaluate.every=4 -> evaluate.every: must be at most train.epochs, which is 3
evaluate.metric=hr@10 -> evaluate.metric: 'hr@10' is not computed on data.reader ctr_csv
evaluate.top_k=5 -> evaluate.top_k: has no meaning for data.reader ctr_csv
data.valid=null -> train.lr_schedule: needs something to evaluate on -> train.early_stop: needs something to evaluate on
train.samples=3; workers=4 -> workers: 4 workers cannot share 3 samples
model={name: deepfm, batch_norm: true}; train.batch_size=1 -> train.batch_size: batch norm needs at least 2 samples
data.valid=walid.csv -> data.valid: no file
data.stream=true; train.lr_schedule={name: cosine} -> train.lr_schedule.name: cosine needs the number of steps
checkpoint.every=1; checkpoint.keep=3 -> checkpoint.every: has no meaning without -> checkpoint.keep: has no meaning
shards=4097 -> shards: input should be less than or equal to 4096
workers=65536 -> workers: input should be less than or equal to 65535
shards={durability: log} -> shards: is a number; what else is said of shards stands beside it
train.recover=true -> train.recover: continues from checkpoints: set checkpoint.folder
checkpoint={best: false, restore_best: true} -> checkpoint.restore_best: the best weights are not kept
data.valid=null; train.early_stop=null; train.lr_schedule={name: constant}; checkpoint.best=true -> checkpoint.best:
"""

OF_MODES = """
strategy=ddp; shards=2 -> shards: strategy ddp has no shards
strategy=ddp; durability=log -> durability: strategy ddp has no shards
strategy=local; workers=2 -> workers: strategy local trains in one process
strategy=ddp; train.staleness=4 -> train.staleness: has no meaning for strategy ddp
strategy=ddp; train.lease=4 -> train.lease: has no meaning for strategy ddp
strategy=ddp; train.staleness_aware_lr=true -> train.staleness_aware_lr: has no meaning for strategy ddp
strategy=ddp; train.prefetch=2 -> train.prefetch: has no meaning for strategy ddp
strategy=ddp; embedding.cache={rows: 9} -> embedding.cache: has no meaning for strategy ddp
strategy=ddp; train.staleness=0; train.prefetch=1 -> train.prefetch: has no meaning for strategy ddp
strategy=ddp; dense.mode=fsdp -> dense.mode: has no meaning for strategy ddp
strategy=local; dense.mode=ddp -> dense.mode: has no meaning for strategy local
strategy=ddp; data.ids=hashed -> strategy: strategy ddp needs tables in memory, and hashed ids have 2**62
strategy=ddp; embedding.optimizer.name=rmsprop -> embedding.optimizer.name: strategy ddp trains by torch
strategy=ddp; embedding.optimizer={name: ftrl, lr: 1} -> embedding.optimizer.name: strategy ddp trains by
strategy=ddp; embedding.optimizer={name: sgd, lr: 1, momentum: 0.9} -> embedding.optimizer.momentum: strategy
strategy=ddp; embedding.optimizer={name: adam, lr: 1, eps: 0} -> embedding.optimizer.eps: strategy ddp trains by torch
strategy=ddp; dense.optimizer={name: ftrl, lr: 1} -> dense.optimizer.name: torch applies it to the dense
dense.mode=ddp; dense.optimizer={name: ftrl, lr: 1} -> dense.optimizer.name: torch applies it to the dense
dense.mode=ddp; embedding.optimizer.name=ftrl -> embedding.optimizer.name: torch applies it to the dense
strategy=ddp; embedding.groups=[{match: linear, optimizer: {name: ftrl, lr: 1}}] -> embedding.groups.0.optimizer.name:
train.staleness=local(2); embedding.optimizer.name=ftrl -> embedding.optimizer.name: train.staleness local(2)
train.staleness=local(2); dense.optimizer={name: ftrl, lr: 1} -> dense.optimizer.name: train.staleness local(2)
dense.mode=ddp; dense.groups=[{match: first_order, optimizer: {name: ftrl, lr: 1}}] -> dense.groups.0.optimizer.name:
dense.mode=ddp; dense.optimizer={name: sgd, lr: 1, clip_norm: 1} -> dense.optimizer.clip_norm: bounds a block
strategy=hybrid; dense.mode=ps -> dense.mode: strategy hybrid keeps dense weights in the workers
strategy=hybrid; train.staleness=local(2) -> strategy: all-reduces dense weights at every step
dense.mode=fsdp; train.staleness=local(2) -> dense.mode: all-reduces dense weights at every step
train.staleness=local(2); train.prefetch=1 -> train.prefetch: train.staleness local(2) reads copies of its
train.staleness=local(2); embedding.cache={rows: 9} -> embedding.cache: train.staleness local(2) reads cop
train.staleness=local(2); train.staleness_aware_lr=true -> train.staleness_aware_lr: with train.staleness
train.staleness=0; train.staleness_aware_lr=true -> train.staleness_aware_lr: with train.staleness 0 no push
train.staleness=0; train.prefetch=1 -> train.prefetch: pulls 1 clocks ahead, beyond train.staleness 0
train.staleness=4; train.prefetch=4; embedding.cache={staleness: 1} -> embedding.cache: its copies may be 5
train.lease=0 -> train.lease: input should be greater than or equal to 0.1
"""

OF_CODECS = """
compression={push: topk:1.5} -> compression.push: codec 'topk:1.5': its ratio must be above 0 and at most 1, got 1.5
compression={pull: topk:0.5} -> compression.pull: codec 'topk:0.5'
compression={push: onebit} -> compression.push: codec 'onebit' on the push of rows: it serves dense weights
compression={push: powersgd:2} -> compression.push: codec 'powersgd:2' on the push of rows
compression={pull: delta} -> compression.pull: codec 'delta' on the pull of rows
compression={push: gzip} -> compression.push: codec 'gzip': there is no 'gzip' (
compression={push: 3} -> compression.push: must be the text of a codec
compression={push: {at: {10: int8}}} -> compression.push.at: a schedule of codecs begins
strategy=local; compression={push: int8} -> compression: strategy local has no shards to send anything to
dense.mode=ddp; compression={dense: {push: int8}} -> compression.dense: torch all-reduces the dense weights
embedding.optimizer.momentum=0.9; compression={push: dgc:0.01} -> compression.push: dgc:0.01 applies momentum
dense.optimizer={name: sgd, lr: 1, momentum: 0.5}; compression={dense: {push: dgc:0.01}} -> compression.dense.push:
dense.optimizer={name: adam, lr: 1}; compression={dense: {push: dgc:0.1}, momentum: 0.9} -> compression.dense.push: dgc
train.staleness=local(4); compression={push: dgc:0.1} -> compression.push: dgc:0.1 keeps a momentum of
compression={push: int8, residual_rows: 9} -> compression.residual_rows: no codec of an embedding table leaves
compression={dense: {push: onebit}, residual_rows: 9} -> compression.residual_rows: no codec of an embedding
compression={push: topk:0.1, warmup_steps: 9} -> compression.warmup_steps: only dgc has it, and no push
compression={push: topk:0.1, momentum: 0.9} -> compression.momentum: only dgc has it, and no push travels so
compression={auto: true, push: int8} -> compression.push: auto chooses it; remove it, or name tables under
compression={auto: true, allow: [int8, powersgd:2]} -> compression.allow.1: what powersgd:2 sends is not known
compression={auto: true, allow: [dgc:0.01]} -> compression.allow.0: dgc begins with a quarter of all elements,
train.staleness=local(4); compression=auto -> compression.auto: most steps send nothing with train.staleness
compression={allow: [int8]} -> compression.allow: says what auto may choose; add auto: true
compression={auto: true, unless_slower: true} -> compression.unless_slower: auto tries what it chooses anyway
train.staleness=local(4); compression={push: int8, unless_slower: true} -> compression.unless_slower: most steps send
compression={push: none, unless_slower: true} -> compression.unless_slower: there is no codec to try; remove
compression={push: {at: {0: none, 9: int8}}, unless_slower: true} -> compression.unless_slower: codecs are
compression={push: dgc:0.01, unless_slower: true} -> compression.unless_slower: dgc begins with a quarter of
"""

OF_WORKERS = """
dense.mode=ddp -> data.splits: gives workers different numbers of steps, but with dense.mode ddp
train.steps=10 -> data.splits: divides whole epochs into input splits: set train.epochs instead of train.steps
data.splits=2 -> data.splits: must be at least as many as workers, which are 3
data.splits=0 -> data.splits: must be a number of parts, auto or null, got 0
data.splits=null; dense.mode=fsdp; train.restart_workers=1 -> train.restart_workers: has no meaning for
strategy=ddp; workers=1; data.splits=null; train.restart_workers=1 -> train.restart_workers: has no meaning
strategy=ddp; data.splits=4 -> data.splits: gives workers different numbers of steps, but with strategy ddp
train.samples=10 -> data.splits: divides whole epochs into input splits: set train.epochs instead of train.samples
workers=1; train.restart_workers=1 -> train.restart_workers: restarts lost workers while the others continue
"""

CASES = [
    (text, *row.split(" -> "))
    for text, table in [(GOOD, OF_FIELDS), (MODES, OF_MODES), (CODECS, OF_CODECS), (SPLITS, OF_WORKERS)]
    for row in table.strip().splitlines()
]
GROUP = "embedding.groups=[{match: x, optimizer: {name: sgd, lr: 1}}]"  # beside it the tables' own optimizer counts
CASES.append((MODES, f"strategy=ddp; embedding.optimizer.name=ftrl; {GROUP}", "embedding.optimizer.name: strategy ddp"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[1])
def test_fields_that_contradict_each_other_are_refused(folder, case):
    text, overrides, *wants = case
    (folder / "job.yaml").write_text(text)
    with pytest.raises(JobFileError) as caught:
        load_job(folder / "job.yaml", overrides.split("; "))
    found = [f"{mistake.field}: {mistake.reason}" for mistake in caught.value.mistakes]
    assert all(line.startswith(want) for want, line in zip(wants, found, strict=True)), found


IN_FILE = [
    (CODECS, "compression:\n  tables:\n    linear: {push: onebit}", ["7: compression.tables.linear.push: codec"]),
    (CODECS, "compression:\n  push:\n    at: {0: none,\n      10: topk:0}", ["8: compression.push.at.10: codec"]),
    (MODES, "strategy: ddp", ["6: shards: strategy ddp has no shards"]),
    (MODES, "strategy: local", ["5: workers: strategy local trains in", "6: shards: strategy local has no shards"]),
]


@pytest.mark.parametrize(("text", "added", "wants"), IN_FILE)
def test_a_contradiction_is_named_with_its_line(folder, text, added, wants):
    found = mistakes(folder, f"{text}{added}\n")
    assert all(line.startswith(f"job.yaml:{want}") for want, line in zip(wants, found, strict=True)), found


@pytest.mark.parametrize("word", ["-1", "true", "local", "local(0)", "1.5", "[1]"])
def test_another_staleness_is_refused(folder, word):
    (line,) = mistakes(folder, MODES, f"train.staleness={word}")
    assert "train.staleness: must be 0, a number of clocks, off or local(steps), got" in line


def test_data_parallel_needs_a_gpu(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for overrides in ([], ["train.device=cpu"]):
        (line,) = mistakes(folder, MODES, "strategy=dp", *overrides)
        assert "strategy: dp (DataParallel) splits a batch over GPUs, and this machine has none" in line
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert load(folder, MODES, "strategy=dp").workers == 1
    for override in ("workers=2", "model.name=two_tower", "train.device=cpu"):
        line = mistakes(folder, MODES, "strategy=dp", override)[0]
        assert f": {override.partition('=')[0]}: " in line


def test_gzipped_text_is_not_dealt_out_where_it_streams(folder):
    (folder / "a.csv.gz").write_bytes(b"")
    with pytest.raises(JobFileError, match=r"data.splits: a.csv.gz would be read from its start for every input split"):
        load(folder, SPLITS, "data={reader: ctr_csv, train: a.csv.gz, stream: true, splits: 8}")
    load(folder, SPLITS, "data={reader: ctr_csv, train: a.csv.gz, splits: 8}")  # read once, into memory
    (folder / "a.csv").write_text("label,a\n1,2\n")
    load(folder, SPLITS, "data={reader: ctr_csv, train: a.csv, stream: true, splits: 8}")


@pytest.mark.parametrize(
    ("section", "field", "short"),
    [
        ("DINSection", "target", "'anyOf': [{'type': 'string'}"),
        ("DINSection", "history", "'anyOf': [{'type': 'string'}"),
        ("Job", "loss", "'type': 'string'"),
        ("Job", "features", "'type': 'null'"),
        ("TabularSection", "label_values", "'type': 'integer'"),
        ("CompressionSection", "allow", "'type': 'boolean'"),
    ],
)
def test_the_schema_takes_short_forms_as_files_may_say_them(section, field, short):
    schema = Job.model_json_schema()
    fields = schema if section == "Job" else schema["$defs"][section]
    assert short in str(fields["properties"][field])
