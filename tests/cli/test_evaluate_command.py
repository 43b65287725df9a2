"""`embershard evaluate` and `export` of checkpoints: the figures of their run, and those of a new file."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner

from embershard.cli.app import app
from embershard.local_shards import local
from embershard.proto.errors import JobError, SnapshotNotFound
from embershard.worker.checkpoint.checkpoint import BadCheckpoint, OtherJob, with_preprocessing
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.job.load import load_job
from embershard.worker.trained.evaluation import open_file
from embershard.worker.trained.reading import OnlyInWorkers
from embershard.worker.training.trainer import Trainer
from harness.clicks import Notes
from harness.job import make_job

JOB = """\
model: {name: deepfm, hidden: [8], batch_norm: true}
data: {reader: ctr_csv, train: train.csv, valid: valid.csv, ids: global}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.1}}
train: {batch_size: 50, epochs: 3, early_stop: {patience: 9, min_delta: 9}}  # the first evaluation is the best
checkpoint: {folder: checkpoints}
"""
BEST, LAST = "step-000000006", "step-000000018"


def clicks(path, seed, rows=300, head="label,user,item"):
    draw = random.Random(seed)
    pairs = [(draw.randrange(10), 10 + draw.randrange(10)) for _ in range(rows)]
    lines = [f"{int(draw.random() < 0.2 + 0.6 * (user % 2))},{user},{item}" for user, item in pairs]
    Path(path).write_text("\n".join([head, *lines, ""]))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A job file with its data, here."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("train.csv", "valid.csv", "new.csv")):
        clicks(name, seed)
    Path("job.yaml").write_text(JOB)


def train(*sets):
    """A run's evaluations and its result."""
    job, notes = load_job(Path("job.yaml"), sets), Notes()
    with local(2) as session:
        data = job.data.open(Path(), job.train.seed)
        Trainer(job, data, session if job.has_shards else None, WorkerGroup(), [notes]).run()
    return notes


@pytest.fixture(scope="module")
def runs():
    """By their settings: what `train` gave, and a copy of the checkpoints."""
    return {}


@pytest.fixture
def trained(runs, tmp_path_factory):
    """As `train`, with the checkpoints of an earlier test's run where that had these settings: all have one data."""

    def make(*sets):
        if sets in runs:
            shutil.copytree(runs[sets][1], "checkpoints")
        else:
            notes = train(*sets)
            runs[sets] = notes, shutil.copytree("checkpoints", tmp_path_factory.mktemp("run") / "checkpoints")
        return runs[sets][0]

    return make


def embershard(*words, sets=()):
    words = [*words, *(word for one in sets for word in ("--set", one))]
    result = CliRunner().invoke(app, words, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.output


def evaluate(source, *words, sets=()):
    return json.loads(embershard("evaluate", "job.yaml", source, *words, sets=sets))


CASES = {
    "batch norm": (),
    "average": ("train.average={decay: 0.5}",),
    "dense weights in the worker": ("strategy=hybrid",),
    "no shards": ("strategy=local",),
}


@pytest.mark.parametrize("sets", CASES.values(), ids=CASES)
def test_a_checkpoint_has_the_figures_that_its_run_has_reported(trained, sets):
    notes = trained(*sets)
    best = evaluate("checkpoints", sets=sets)
    assert best["valid"] == notes.result.figures["valid"] == notes.evaluations[0].figures["valid"]
    assert (Path(best["checkpoint"]).name, best["step"]) == (BEST, 6)
    last = evaluate("checkpoints", "--latest", sets=sets)
    assert last["valid"] == notes.evaluations[-1].figures["valid"] != best["valid"]
    assert evaluate(f"checkpoints/{LAST}", sets=sets)["valid"] == last["valid"]
    Path("run").mkdir()
    Path("checkpoints").rename("run/best")
    assert evaluate("run", sets=sets)["valid"] == best["valid"]


def test_a_calibration_plot_is_of_the_samples_that_were_scored(trained):
    trained("strategy=local")
    found = evaluate("checkpoints", "--calibration-plot", "curve.svg", sets=("strategy=local",))
    assert f"valid, {found['valid']['samples']:,.0f} samples" in Path("curve.svg").read_text()


@pytest.mark.parametrize("sets", CASES.values(), ids=CASES)
def test_an_export_holds_the_weights_that_were_evaluated(trained, sets):
    notes = trained(*sets)
    for words, number, step in (((), 0, 6), (("--latest",), -1, 18)):
        output = embershard("export", "job.yaml", "checkpoints", "out", *words, sets=sets)
        assert output.startswith(f"from {Path('checkpoints').absolute()}/step-{step:09d}, of step {step}\n")
        job = load_job(Path("job.yaml"), sets)
        data = job.data.open(Path(), 0)
        model = job.model.build(data.schema, job.dim, None)
        model.load_state_dict(load_file("out/model.safetensors"))
        (batch,) = data.evaluate("valid", 0, 1, 300)
        with torch.no_grad():
            logits = model.eval()(batch.ids, batch.dense)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        assert loss.item() == pytest.approx(notes.evaluations[number].figures["valid"]["logloss"], rel=1e-5)


@pytest.mark.parametrize("halved", [(), ("data.halve_valid_by=user",)])
def test_a_new_file_is_scored_alone_by_the_jobs_reader(trained, halved):
    sets = ("strategy=local", *halved)
    trained(*sets)
    own = evaluate("checkpoints", sets=sets)
    new, valid = (evaluate("checkpoints", "--on", name, sets=sets) for name in ("new.csv", "valid.csv"))
    assert new["new.csv"]["samples"] == valid["valid.csv"]["samples"] == 300
    assert new.keys() == {"time", "checkpoint", "step", "seconds", "new.csv"}
    assert halved or valid["valid.csv"] == own["valid"] != new["new.csv"]


WRONG = {
    "missing": (None, JobError),
    "empty": ("", JobError),
    "header alone": ("label,user,item\n", JobError),
    "other columns": ("label,user,thing\n1,2,12\n", JobError),
    "no labels": ("user,item\n2,12\n", JobError),
    "a label missing": ("label,user,item\n,2,12\n", JobError),
    "an unknown id": ("label,user,item\n1,2,99\n", JobError),
}


@pytest.mark.parametrize(("text", "error"), WRONG.values(), ids=WRONG)
def test_a_file_that_cannot_be_scored_is_named(trained, text, error):
    trained("strategy=local", "train.epochs=1")
    if text is not None:
        Path("wrong.csv").write_text(text)
    with pytest.raises(error, match=r"wrong\.csv"):
        evaluate("checkpoints", "--on", "wrong.csv", sets=("strategy=local",))


LISTS = {"reader": "lists", "train": "lists.txt", "test": "lists.txt"}


@pytest.mark.parametrize(
    ("data", "text", "samples"),
    [
        (LISTS, "0 1\n1 0 2\n", 3),
        (LISTS, "0 1\n2 0\n", None),  # a third user would move all items
        (LISTS, "0 1\n1 0 3\n", None),
        ({"reader": "criteo", "train": ["criteo.tsv"], "test": ["criteo.tsv"]}, "1" + "\t" * 39 + "\n", 1),
    ],
)
def test_readers_of_other_files_take_one_of_their_own(data, text, samples):
    Path("lists.txt").write_text("0 0 1\n1 2\n")
    Path("criteo.tsv").write_text("0" + "\t" * 39 + "\n")
    Path("other").write_text(text)
    job = make_job(data=data)
    if samples is None:
        with pytest.raises(JobError, match="other: its users and items are not numbered as"):
            open_file(job, Path(), Path("other"))
    else:
        found = open_file(job, Path(), Path("other"))
        assert (found.splits, found.num_samples("test")) == (("test",), samples)


def test_a_new_table_of_interactions_is_found_among_what_was_not_trained_on():
    rows = ["bob,x,1", "bob,y,2", "bob,z,3", "ann,x,1", "ann,z,2"]
    Path("plays.csv").write_text("\n".join(["who,what,at", *rows, ""]))
    Path("new.csv").write_text("who,what,at\nbob,z,3\nann,z,2\n")
    columns = {"user": "who", "item": "what", "time": "at"}
    data = {"reader": "lists", "train": "plays.csv", "columns": columns, "negatives": 1, "history": 2}
    job = make_job(model={"name": "simplex"}, embedding={"dim": 4}, data=data)
    own, found = job.data.open(Path(), 0), open_file(job, Path(), Path("new.csv"))
    assert (own.splits, found.splits) == (("valid", "test"), ("test",))
    trained = [[batch.ids[:, :2].tolist() for batch in data.train(0, 0, 1, 9)] for data in (own, found)]
    assert trained[0] == trained[1]
    (users,) = found.users("test", 0, 1, 9)
    assert users.ids.tolist() == [[0, 3, 5], [1, 3, -1]]  # with what they took in train
    assert list(zip(users.seen_user, users.seen_item, strict=True)) == [(0, 0), (0, 2), (1, 0)]
    Path("new.csv").write_text("who,what,at\nbob,z,3\neve,q,1\nmax,q,1\n")
    with pytest.raises(JobError, match=r"column 'who' has values that the job's files lack \(2\), such as 'eve'"):
        open_file(job, Path(), Path("new.csv"))


@pytest.mark.parametrize("split", [None, {"by": "random", "valid": 0.2, "test": 0.2}])
def test_a_new_table_is_scored_alone_with_what_was_learnt_from_the_rows_to_train_on(split):
    rows = [f"{n % 2},u{n % 5},{n / 10}" for n in range(100)]
    Path("table.csv").write_text("\n".join(["label,user,price", *rows, ""]))
    Path("new").write_text("label,user,price\n1,u1,3.5\n0,u9,2\n")
    features = {"user": {}, "price": {"type": "number", "transform": "standardise"}}
    data = {"reader": "tabular", "train": "table.csv", "split": split, "format": "csv"}
    job = make_job(data=data, features=features)
    found = open_file(job.model_copy(update={"data": job.data.fit(Path(), 0)}), Path(), Path("new"))
    assert found.splits == ("test",)
    assert sum(len(batch.labels) for batch in found.evaluate("test", 0, 1, 10)) == 2


@pytest.mark.parametrize(
    "data",
    [
        {"train": "all.csv", "split": {"by": "time", "column": "at", "at": ["5"]}},
        {"train": "old.csv", "test": "late.csv"},
    ],
)
def test_a_new_table_of_features_is_ranked_among_all_items_but_those_that_were_trained_on(data):
    old, late = ["ann,x,1", "ann,y,2", "bob,x,3", "bob,z,4"], ["ann,z,5", "bob,v,6"]
    for name, rows in {"all.csv": old + late, "old.csv": old, "late.csv": late}.items():
        Path(name).write_text("\n".join(["user,item,at", *rows, ""]))
    Path("new.csv").write_text("user,item\nann,z\n")
    model, data = {"name": "feature_towers", "item": "item"}, {"reader": "tabular", "label": [], **data}
    job = make_job(model=model, data=data, features={"user": {}, "item": {}}, evaluate={"user": "user"})
    job = with_preprocessing(job, Path())
    own, found = job.data.open(Path(), 0), open_file(job, Path(), Path("new.csv"))
    assert found.splits == ("test",)
    assert found.items[0][:, 1].tolist() == own.items[0][:, 1].tolist()
    (users,) = found.users("test", 0, 1, 9)
    assert users.seen_item.tolist() == next(own.users("test", 0, 1, 1)).seen_item.tolist()
    assert (len(users.seen_item), users.relevant_item[0] in users.seen_item) == (2, False)


OWN_READER = """import numpy as np
import embershard as es

class Logs(es.Reader):
    features, num_ids, splits = ("user",), 10, ("valid", "test")

    def __init__(self, test=None):
        self.test = test

    def read(self, split):
        labels = np.loadtxt(self.test, ndmin=1) if self.test else np.zeros(2)
        yield np.zeros((len(labels), 1), int), None, labels

class OfValid(Logs):
    splits = ("valid",)

class OfNoFile(Logs):
    def __init__(self):
        self.test = None
"""


def test_a_reader_of_a_users_own_takes_a_file_by_its_argument_test(monkeypatch):
    monkeypatch.syspath_prepend(Path.cwd())
    Path("own_logs.py").write_text(OWN_READER)
    Path("new").write_text("1\n0\n1\n")
    found = open_file(make_job(data={"reader": "own_logs:Logs"}), Path(), Path("new"))
    assert found.splits == ("test",)
    assert [len(batch.labels) for batch in found.evaluate("test", 0, 1, 10)] == [3]
    for name in ("OfValid", "OfNoFile"):
        with pytest.raises(JobError, match="--on"):
            open_file(make_job(data={"reader": f"own_logs:{name}"}), Path(), Path("new"))


def test_what_is_no_source_is_named():
    for words in ((), ("checkpoints", "--ps", "127.0.0.1:7700")):
        with pytest.raises(typer.BadParameter):
            embershard("evaluate", "job.yaml", *words)
    Path("checkpoints").mkdir()
    with pytest.raises(SnapshotNotFound):
        evaluate("checkpoints")
    train("train.epochs=1")
    with pytest.raises(typer.BadParameter):
        evaluate("checkpoints", "--every", "1")
    with pytest.raises(OtherJob):
        evaluate("checkpoints", sets=("embedding.dim=8",))
    with pytest.raises(OnlyInWorkers):  # the running statistics
        evaluate(f"checkpoints/{BEST}/shards")
    clicks_of_no_file = ("data={reader: clicks, samples: 100}", "evaluate.metric=auc")
    with pytest.raises(JobError, match="clicks takes no file"):
        evaluate("checkpoints", "--on", "new.csv", sets=clicks_of_no_file)
    Path("checkpoints/BEST").write_text("../elsewhere\n")
    with pytest.raises(BadCheckpoint):
        evaluate("checkpoints")
