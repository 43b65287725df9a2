"""Exports of a trained model, and models from elsewhere brought in."""

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import embershard as es
from embershard.proto.errors import EmbershardError, JobError, LoadLost, RowsLost, ShardRestarted, TableMismatch
from embershard.proto.messages import Declare, Load
from embershard.proto.snapshot.stored import open_snapshot
from embershard.proto.spec import SGD, TableSpec
from embershard.worker.checkpoint.snapshots import take_snapshot
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.data.batch import Field, IdTable, RowsDataset, Samples, Schema
from embershard.worker.data.interactions.gowalla import InteractionLists
from embershard.worker.data.interactions.sequences import ActionSequences
from embershard.worker.models.recommender import ListRecommender
from embershard.worker.session.session import Session
from embershard.worker.trained import export as export_module
from embershard.worker.trained import import_weights
from embershard.worker.trained.export import export_weights
from embershard.worker.trained.folder import (
    FACTS,
    UNFINISHED,
    CannotExport,
    ExportFacts,
    TableFacts,
    export_into,
    make_folder,
    write_facts,
    write_tensors,
)
from embershard.worker.trained.import_weights import CannotImport, ShardLostImport, import_state
from embershard.worker.trained.onnx import _samples, dense_part, export_onnx, part_of_trained
from embershard.worker.trained.quantise import int8_tensors, load_int8, quantise
from embershard.worker.trained.reading import NotTrained, OnlyInWorkers, ReadOnlySession, trained
from embershard.worker.trained.served_inputs import job_data
from embershard.worker.training.build import choose_strategy, job_model
from embershard.worker.training.trainer import Trainer
from harness.job import make_job
from harness.raises import raises

F, PER_FIELD, D = 3, 20, 2
IDS = F * PER_FIELD
SCHEMA = Schema(tuple("abc"), D, IDS)


def dataset(num_ids=IDS):
    rng = np.random.default_rng(1)
    # of each field a half occurs: the other rows are never trained
    ids = rng.integers(0, PER_FIELD // 2, (400, F)) + np.arange(F) * PER_FIELD
    rows = Samples(ids, rng.random((400, D), np.float32), (rng.random(400) < 0.5).astype(np.float32))
    return RowsDataset(Schema(tuple("abc"), D, num_ids), {"train": rows, "valid": rows}, where="made up")


def job(**sections):
    model = {"name": "deepfm", "hidden": [16, 8], **sections.pop("model", {})}
    embedding = {"dim": 4, "optimizer": {"name": "adagrad", "lr": 0.1}, **sections.pop("embedding", {})}
    return make_job(model=model, embedding=embedding, train={"epochs": 1, "linear": "torch"}, **sections)


def plain_state():
    """Of the model with nn.Embedding, as anyone would build it."""
    return dict(job().model.build(SCHEMA, 4, None).state_dict())


def logits(model, data):
    one = next(data.evaluate("valid", 0, 1, 64))
    with torch.no_grad():
        return model.eval()(one.ids, one.dense)


def plain_logits(job, data, state):
    model = job.model.build(data.schema, job.dim, None)
    model.load_state_dict(state, strict=True)
    return logits(model, data)


class Run:
    """A short training, its shards, and a snapshot of them."""

    def __init__(self, session, folder, num_ids=IDS, **settings):
        self.job, self.data, self.session, self.folder = job(**settings), dataset(num_ids), session, folder
        self.trainer = Trainer(self.job, self.data, session, WorkerGroup())
        self.trainer.run()
        self.logits = logits(self.trainer.strategy.model, self.data)
        take_snapshot(session.client, str(folder), "last")

    def trained(self, other=None):
        return trained(other or self.job, self.data, ReadOnlySession(self.session.client), None)

    def export(self, out):
        strategy = self.trained()
        with export_into(out) as folder:
            return export_weights(strategy.model, folder, self.read_table, strategy.table_rows())

    def facts(self, name, file, rows, trained):
        spec = self.table(name).spec
        initializer = {"name": spec.initializer.kind, **spec.initializer.params()}
        return TableFacts(file, spec.dim, rows, trained, initializer, f"{spec.row_seed:016x}")

    def read_table(self, table):
        return ((ids, rows) for ids, rows, _ in open_snapshot(str(self.folder), "last").read_table(table))

    def table(self, name):
        return next(table for table in self.session.tables if table.spec.name == name)


@pytest.fixture
def make_run(make_session, tmp_path):
    return lambda *given, **settings: Run(make_session(2), tmp_path / "snapshots", *given, **settings)


@pytest.fixture
def run(make_run):
    return make_run()


def test_an_exported_state_dict_loads_into_the_plain_model_and_scores_alike(run, tmp_path):
    facts = run.export(tmp_path / "out")
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1  # that of the user's other files
    state = load_file(tmp_path / "out" / "model.safetensors")
    torch.testing.assert_close(plain_logits(run.job, run.data, state), run.logits)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers opens no file without it
    assert facts["embedding"] == run.facts("embedding", "model.safetensors", IDS, IDS // 2)
    assert facts["linear"].dim == 1


@pytest.mark.parametrize("prefix", ["", "a/"])  # of tables, but not of the model's parameters
def test_rows_that_were_never_trained_are_named_and_have_their_first_values(make_run, tmp_path, prefix):
    run = make_run(prefix=prefix)
    run.export(tmp_path / "out")
    marks = load_file(tmp_path / "out" / "trained.safetensors")["embedding"]
    assert marks.tolist() == [i % PER_FIELD < PER_FIELD // 2 for i in range(IDS)]
    initial = torch.arange(IDS)[~marks]
    weight = load_file(tmp_path / "out" / "model.safetensors")["embedding.weight"]
    assert torch.equal(weight[initial], run.table(f"{prefix}embedding").pull(initial))


def test_tables_of_hashed_ids_are_written_as_pairs(make_run, tmp_path):
    run = make_run(None)
    facts = run.export(tmp_path / "out")
    pairs = load_file(tmp_path / "out" / "tables.safetensors")
    assert pairs["embedding.ids"].tolist() == [i for i in range(IDS) if i % PER_FIELD < PER_FIELD // 2]
    assert torch.equal(pairs["embedding.rows"], run.table("embedding").pull(pairs["embedding.ids"]))
    assert facts["embedding"].file == "tables.safetensors"
    assert "embedding.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    with pytest.raises(CannotExport, match="take a snapshot"):  # which lists them
        export_weights(run.trained().model, tmp_path / "other", None, {})
    facts = export_weights(run.trained().model, tmp_path / "empty", lambda table: iter(()), {"embedding": 30})
    pairs = load_file(tmp_path / "empty" / "tables.safetensors")
    found = [(pairs[f"embedding.{name}"].shape, pairs[f"embedding.{name}"].dtype) for name in ("ids", "rows")]
    assert found == [((0,), torch.int64), ((0, 4), torch.float32)]
    assert facts["embedding"] == run.facts("embedding", "tables.safetensors", 0, 0)  # what the file holds


@pytest.mark.parametrize("num_ids", [IDS, None], ids=["numbered", "hashed"])
def test_a_table_that_is_sorted_in_parts_is_the_same_file(make_run, tmp_path, monkeypatch, num_ids):
    run = make_run(num_ids)
    run.export(tmp_path / "whole")
    monkeypatch.setattr(export_module, "SORTED_BYTES", 7 * 16)
    monkeypatch.setattr(export_module, "PORTION", 3)
    (tmp_path / "parts" / f"{UNFINISHED}killed" / "files").mkdir(parents=True)  # by a signal, in an earlier export
    (tmp_path / "parts" / "unfinished-of-mine").mkdir()
    run.export(tmp_path / "parts")
    (tmp_path / "parts" / "unfinished-of-mine").rmdir()  # a folder of the user's own stays
    whole, parts = ({path.name: path.read_bytes() for path in (tmp_path / n).iterdir()} for n in ("whole", "parts"))
    assert whole == parts  # and nothing else is left in the folder


def test_without_a_snapshot_nothing_says_which_rows_were_trained(run, tmp_path):
    out = tmp_path / "of" / "today"
    first = run.export(out)
    strategy = run.trained()
    # again into the same folder, where the marks of the last export would be wrong
    with export_into(out) as folder:
        facts = export_weights(strategy.model, folder, None, {"embedding": 7})
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert (facts["embedding"].trained, facts["linear"].trained) == (7, 0)  # as many as the shards say
    assert (facts["embedding"].rows, facts["linear"].dim) == (IDS, 1)
    assert first["embedding"].trained == IDS // 2


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.safetensors", lambda folder: write_tensors(folder / "a.safetensors", {"a": torch.ones(2)})),
        (FACTS, lambda folder: write_facts(folder, ExportFacts(job={}, schema=SCHEMA, inputs=None, tables={}))),
    ],
)
def test_a_file_that_cannot_take_its_place_is_named_and_leaves_no_part_of_it(tmp_path, name, write):
    (tmp_path / name / "taken").mkdir(parents=True)
    with pytest.raises(CannotExport, match=rf"cannot write .*/{name}: Is a directory; export to another folder"):
        write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotExport):
        make_folder(tmp_path / "file" / "out")


def test_each_file_is_on_the_disk_before_it_has_its_name_and_export_json_comes_last(tmp_path, monkeypatch):
    """A power cut after an export could leave empty files, or no folder."""
    calls, fsync, put = [], os.fsync, os.replace

    def synced(handle):
        calls.append(("sync", Path(os.readlink(f"/proc/self/fd/{handle}")).relative_to(tmp_path).as_posix()))
        fsync(handle)

    def replaced(new, path):
        calls.append(("name", path.name))
        put(new, path)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)

    def written(part, inputs, path, **_):
        path.write_bytes(b"graph")
        return SimpleNamespace(model=SimpleNamespace(graph=SimpleNamespace(inputs=[])))

    monkeypatch.setattr(torch.onnx, "export", written)
    out = tmp_path / "a" / "b"
    make_folder(out)
    assert set(calls) == {("sync", "a"), ("sync", ".")}
    del calls[:]
    write_tensors(out / "model.safetensors", {"w": torch.ones(2)})
    export_onnx(dense_part(job(), SCHEMA, plain_state()), SCHEMA, out)
    write_facts(out, ExportFacts(job={}, schema=SCHEMA, inputs=None, tables={}))
    names = "model.safetensors", "dense.onnx", "export.json"
    assert calls == [call for name in names for call in (("sync", f"a/b/{name}.new"), ("name", name), ("sync", "a/b"))]


@pytest.mark.parametrize(
    ("theirs", "error"),
    [
        (None, raises(NotTrained, table="embedding", known="none")),
        ({"embedding": {"dim": 8}}, raises(TableMismatch, difference="dim: 8, not 4")),
        ({"model": {"hidden": [16, 16]}}, pytest.raises(EmbershardError, match="table 'dense'")),
        ({"dense": {"mode": "ddp"}}, raises(NotTrained, table="dense", known="embedding, linear")),
    ],
    ids=["empty", "other tables", "other dense weights", "no dense weights"],
)
def test_shards_of_another_job_are_refused_and_left_as_they_are(make_session, theirs, error):
    session = make_session(2)
    if theirs is not None:
        Trainer(job(**theirs), dataset(), session, WorkerGroup()).run()
    before = [status.tables for status in session.client.status()]
    with error:
        trained(job(), dataset(), ReadOnlySession(session.client), None)
    assert [status.tables for status in session.client.status()] == before


def test_a_table_that_one_shard_lacks_is_not_created_there(make_wires):
    wires = make_wires(2)
    wires.wires[0].shard.handle(Declare(TableSpec(name="t", dim=2, optimizer=SGD(lr=0.1))))
    with pytest.raises(NotTrained):
        ReadOnlySession(wires.client()).table(TableSpec(name="t", dim=2, optimizer=SGD(lr=0.1)))
    assert not wires.client().status()[1].tables


def test_statistics_of_batch_norm_are_asked_for_where_only_shards_are_named(make_run):
    with raises(OnlyInWorkers, what=re.compile(r"deep\.1\.running_mean")):
        make_run(model={"batch_norm": True}).trained()


def test_onnx_scores_as_torch_does(run, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    state, out = dict(run.trained().model.state_dict()), tmp_path / "out"
    tables = run.export(out)
    path = export_onnx(dense_part(run.job, run.data.schema, state), run.data.schema, out)
    session = runtime.InferenceSession(str(path))
    one = next(run.data.evaluate("valid", 0, 1, 64))
    ids, index = torch.unique(one.ids, return_inverse=True)
    rows = {f"{name}.rows": run.table(name).pull(ids).numpy() for name in ("embedding", "linear")}
    given = {"index": index.numpy(), "dense": one.dense.numpy(), **rows}
    assert {i.name for i in session.get_inputs()} == set(given)
    (found,) = session.run(["logits"], given)
    torch.testing.assert_close(torch.from_numpy(found), run.logits, rtol=1e-4, atol=1e-5)
    write_facts(out, ExportFacts(job=job_data(run.job), schema=run.data.schema, inputs=None, tables=tables))
    found = es.load_exported(out, dense="onnx").score_ids(one.ids, one.dense)
    torch.testing.assert_close(torch.from_numpy(found), run.logits, rtol=1e-4, atol=1e-5)


LISTS = Schema(
    ("user", "item", "tags", "words", "history"),
    1,
    None,
    (
        Field("user", "user", 0),
        Field("item", "item", 1),
        Field("tags", "tag", 2, 3, "mean", weights=1),
        Field("words", "tag", 5, 2, "max"),
        Field("history", "item", 7, 4, "sequence"),
    ),
    (IdTable("user", 9), IdTable("item", 12, dim=3), IdTable("tag", 7)),
)


def lists_of(schema, labels=("label",)):
    """Samples with lists of every length, empty ones included, and their weights."""
    rng = np.random.default_rng(2)
    columns = []
    for field in schema.fields:
        ids = rng.integers(0, schema.id_limits[field.table], (90, field.width))
        if field.pooling != "none":
            ids[np.arange(field.width) >= (rng.integers(0, field.width + 1, 90))[:, None]] = es.PADDING
        columns.append(ids)
    values = (rng.random((90, len(labels))) < 0.5).astype(np.float32)
    rows = Samples(
        np.concatenate(columns, 1),
        rng.random((90, schema.num_dense_columns), np.float32),
        values if len(labels) > 1 else values[:, 0],
    )
    own = replace(schema, labels=labels)
    return RowsDataset(own, {"train": rows, "valid": rows.take(slice(0, 40))}, where="made up")


def interactions(folder, **settings):
    lists = "".join(f"{user} {' '.join(str((user * 3 + i) % 11) for i in range(1 + user % 6))}\n" for user in range(9))
    (folder / "lists.txt").write_text(lists)
    return InteractionLists.read(folder / "lists.txt", folder / "lists.txt", **settings)


def actions(folder):
    lines = [f"{user} {(user * 3 + i) % 23}\n" for user in range(9) for i in range(3 + user)]
    (folder / "actions.txt").write_text("".join(lines))
    return ActionSequences.read(folder / "actions.txt", max_length=5, candidates=4)


NO_SEQUENCE = replace(LISTS, features=LISTS.features[:4], fields=LISTS.fields[:4])
IN_ONNX = {  # model -> (its section, its data)
    "deepfm": ({"hidden": [8]}, lambda folder: lists_of(NO_SEQUENCE)),
    "xdeepfm": ({"hidden": [8], "cin": [4, 3]}, lambda folder: lists_of(NO_SEQUENCE)),
    "mmoe": ({"expert": [8], "tower": [4]}, lambda folder: lists_of(NO_SEQUENCE, ("a", "b"))),
    "ple": ({"expert": [8], "tower": [4]}, lambda folder: lists_of(NO_SEQUENCE, ("a", "b"))),
    "din": ({"target": "item", "history": "history", "hidden": [8]}, lambda folder: lists_of(LISTS)),
    "two_tower": ({"hidden": [6]}, lambda folder: interactions(folder, negatives=2)),
    "simplex": ({"pooling": "user_attention"}, lambda folder: interactions(folder, negatives=2, history=4)),
    "sasrec": ({"blocks": 1}, actions),
}


READS = {
    "two_tower": {"reader": "lists", "train": "a", "test": "a"},
    "simplex": {"reader": "lists", "train": "a", "test": "a", "negatives": 2},
    "sasrec": {"reader": "sequences", "actions": "a"},
}


# an export takes seconds, and these are traced as one of the others is
AS_OTHERS = {"deepfm", "xdeepfm", "din", "mmoe", "ple", "simplex"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in AS_OTHERS)) for name in IN_ONNX]
)
def test_models_of_lists_sequences_and_labels_score_alike_in_onnx(tmp_path, name):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    section, data_of = IN_ONNX[name]
    data = data_of(tmp_path)
    embedding = {"dim": 4, "optimizer": {"name": "sgd", "lr": 0.1}}
    settings = make_job(model={"name": name, **section}, embedding=embedding, data=READS.get(name, {}))
    torch.manual_seed(3)
    model = settings.model.build(data.schema, settings.dim, None).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    out = tmp_path / "out"
    make_folder(out)
    write_tensors(out / "model.safetensors", dict(model.state_dict()))
    part = part_of_trained(settings, model, data, out)
    export_onnx(part, data.schema, out)
    write_facts(out, ExportFacts(job=job_data(settings), schema=data.schema, inputs=None, tables={}))
    served = es.load_exported(out, dense="onnx")
    batch = _samples(model, data)
    empty = batch.ids.clone()
    if data.schema.fields and not isinstance(model, ListRecommender):  # a sample whose lists are all empty
        wide = [field for field in data.schema.fields if field.pooling != "none"]
        for field in wide:
            empty[0, field.start : field.start + field.width] = es.PADDING
    with torch.no_grad():
        wanted = model(empty, batch.dense).numpy()
    for count in (1, 3, len(empty)):
        dense = None if batch.dense is None else batch.dense[:count]
        found = served.score_ids(empty[:count], dense)
        np.testing.assert_allclose(found, wanted[:count], rtol=1e-6, atol=1e-6)


def test_a_table_of_features_is_read_for_its_own_ids_alone_in_onnx(tmp_path):
    embedding = {"dim": 4, "optimizer": {"name": "sgd", "lr": 0.1}}
    settings = make_job(model={"name": "deepfm", "hidden": [8]}, embedding=embedding)
    model = settings.model.build(NO_SEQUENCE, settings.dim, None)
    make_folder(tmp_path / "out")
    write_tensors(tmp_path / "out/model.safetensors", dict(model.state_dict()))
    facts = ExportFacts(job=job_data(settings), schema=NO_SEQUENCE, inputs=None, tables={})
    write_facts(tmp_path / "out", facts)
    served = es.load_exported(tmp_path / "out")
    ids = torch.tensor([[8, 11, 1, es.PADDING, es.PADDING, 6, 5]])  # a user, an item, two lists of tags
    read = {name: sorted(found.tolist()) for name, found in served._ids_by_table(ids).items()}
    assert read.keys() == served.tables.keys()
    own = {"user": [[8]], "item": [[11]], "tag": [1, 5, 6]}
    assert all(found == own[name.rpartition(".")[2]] for name, found in read.items())


OWN = """
import torch
from torch import nn
class TwoSpaces(nn.Module):  # field a has a table of its own, and so have positions
    def __init__(self, dim):
        super().__init__()
        self.first, self.others = nn.Embedding(20, dim), nn.EmbeddingBag(60, dim, mode="sum")
        self.position, self.head = nn.Embedding(3, dim), nn.Linear(dim, 1)
        self.kept = nn.Linear(dim, 60)
        self.kept.weight = nn.Parameter(torch.ones(60, dim))
    def forward(self, ids):
        rows = self.first(ids[:, 0]) + self.others(ids[:, 1:]) + self.position(torch.arange(3)).sum(0)
        return self.head(rows) + self.kept(rows).logsumexp(1, keepdim=True)
class Offset(TwoSpaces):
    def forward(self, ids):
        return super().forward(torch.cat([ids[:, :1], ids[:, 1:] - 1], 1))
class Masked(TwoSpaces):
    def forward(self, ids):
        return super().forward(ids).squeeze(1) * (ids[:, 0] != 3)
class Whole(TwoSpaces):
    def forward(self, ids):
        return super().forward(ids) + self.first.weight.sum()
class Padded(TwoSpaces):
    def __init__(self, dim):
        super().__init__(dim)
        self.others = nn.EmbeddingBag(60, dim, mode="sum", padding_idx=21)
class Named(TwoSpaces):
    def __init__(self, dim):
        super().__init__(dim)
        self.again = self.first
    def forward(self, ids):
        return super().forward(ids) + self.again(ids[:, 0]).sum(1, keepdim=True)
class Odd(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.first, self.hashed = nn.Embedding(20, dim), nn.Embedding(2**62, dim)
        self.same, self.norm = self.hashed, nn.BatchNorm1d(dim)
        self.norm_too = self.norm
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("least", torch.tensor([float("-inf")]))
        self.register_buffer("turn", torch.tensor([1 + 2j]))
        self.register_buffer("places", torch.arange(3, dtype=torch.int32))
    def forward(self, ids):
        return self.norm(self.first(ids[:, 0]) + self.hashed(ids[:, 1])).sum(1)
class Extra(Odd):
    def get_extra_state(self):
        return {"turns": 3}
class Counted(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.all = nn.Embedding(60, dim)
    def forward(self, ids):
        return self.all(ids).view(len(ids), -1).sum(1)
"""


@pytest.fixture
def own_job(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_export", raising=False)
    (tmp_path / "mine_export.py").write_text(OWN)
    return lambda name, strategy: make_job(
        strategy,
        model={"class": f"mine_export:{name}"},
        embedding={"dim": 4, "optimizer": {"name": "sgd", "lr": 0.1}},
        train={"linear": "torch"},
    )


@pytest.mark.parametrize("strategy", ["ps", pytest.param("local", marks=pytest.mark.long)])
def test_a_users_model_of_several_tables_scores_alike_in_onnx(make_session, own_job, tmp_path, strategy):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    settings, data = own_job("TwoSpaces", strategy), dataset()
    model = choose_strategy(
        settings, job_model(settings, SCHEMA), make_session() if strategy == "ps" else None, torch.device("cpu")
    ).model.eval()
    part = part_of_trained(settings, model, data, tmp_path)
    assert part.tables == ["first", "others"]
    one = next(data.train(0, 0, 1, 50))
    ids, index = torch.unique(one.ids, return_inverse=True)
    with torch.no_grad():
        rows = {"first.rows": model.first(ids.clamp(max=19)), "others.rows": model.others(ids[:, None])}
        wanted = model(one.ids).squeeze(1)
    session = runtime.InferenceSession(str(export_onnx(part, SCHEMA, tmp_path)))
    given = {"index": index.numpy(), **{name: value.numpy() for name, value in rows.items()}}
    (found,) = session.run(["logits"], given)
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-4, atol=1e-5)


def test_hashed_ids_of_a_list_that_the_last_of_the_samples_has_empty_are_inputs_in_onnx(make_session, tmp_path):
    tags = Field("tags", "tag", 1, 2, "mean")
    schema = Schema(
        ("user", "tags"), 0, None, (Field("user", "user", 0), tags), (IdTable("user", 9), IdTable("tag", None))
    )
    rows = Samples(np.array([[1, 7, 8], [2, 9, es.PADDING], [3, es.PADDING, es.PADDING]]), None, np.ones(3, np.float32))
    data = RowsDataset(schema, {"train": rows, "valid": rows}, where="made up")
    settings = make_job(
        model={"name": "deepfm", "hidden": [8]}, embedding={"dim": 4, "optimizer": {"name": "sgd", "lr": 0.1}}
    )
    strategy = choose_strategy(settings, job_model(settings, schema), make_session(), torch.device("cpu"))
    part = part_of_trained(settings, strategy.model.eval(), data, tmp_path)
    assert sorted(part.tables) == sorted(
        name for name, _ in part.model.named_modules() if name.endswith(("user", "tag"))
    )


@pytest.mark.parametrize("name", ["Offset", "Masked", "Whole", "Padded"])
def test_a_model_that_computes_with_ids_is_not_written_as_onnx(own_job, tmp_path, name):
    settings = own_job(name, "local")
    model = choose_strategy(settings, job_model(settings, SCHEMA), None, torch.device("cpu")).model.eval()
    with pytest.raises(CannotExport, match="padding_idx" if name == "Padded" else "compute with them"):
        part_of_trained(settings, model, dataset(), tmp_path)


def test_a_table_of_two_names_is_one_input_of_the_dense_part(own_job, tmp_path):
    settings = own_job("Named", "local")
    model = choose_strategy(settings, job_model(settings, SCHEMA), None, torch.device("cpu")).model.eval()
    assert part_of_trained(settings, model, dataset(), tmp_path).tables == ["first", "others"]


def test_a_model_of_one_batch_size_alone_is_not_written_as_onnx(own_job, tmp_path):
    pytest.importorskip("onnxscript")
    settings = own_job("Counted", "local")
    model = choose_strategy(settings, job_model(settings, SCHEMA), None, torch.device("cpu")).model.eval()
    part = part_of_trained(settings, model, dataset(), tmp_path)
    with pytest.raises(CannotExport, match=r"3 rows alone.*write ids\.shape\[0\]"):
        export_onnx(part, SCHEMA, tmp_path)
    assert not any(tmp_path.glob("*.onnx*"))


def test_buffers_of_any_type_and_hashed_tables_of_two_names_come_back(make_session, own_job, tmp_path):
    settings, session = own_job("Odd", "ps"), make_session()
    model = choose_strategy(settings, job_model(settings, SCHEMA), make_session(), torch.device("cpu")).model
    ids, rows = np.array([2]), np.full((1, 4), 0.5, np.float32)
    export_weights(model, tmp_path, lambda name: iter([(ids, rows)]), {})
    state = load_file(tmp_path / "model.safetensors")
    for name in ("mask", "turn", "places"):
        assert torch.equal(state[name], model.get_buffer(name))
    import_state(tmp_path, settings, SCHEMA, session)
    (hashed,) = (table for table in session.tables if table.spec.name == "hashed")
    assert torch.equal(hashed.pull(torch.from_numpy(ids)), torch.from_numpy(rows))
    twice = {name: torch.cat([value] * 2) for name, value in load_file(tmp_path / "tables.safetensors").items()}
    save_file(twice, tmp_path / "tables.safetensors")
    with pytest.raises(CannotImport, match=r"hashed\.ids has an id twice"):
        import_state(tmp_path, settings, SCHEMA, session)
    save_file({**twice, "hashed.ids": torch.tensor(2)}, tmp_path / "tables.safetensors")
    with pytest.raises(CannotImport, match=r"hashed\.ids has shape \(\)"):
        import_state(tmp_path, settings, SCHEMA, session)


def test_a_state_that_is_no_tensor_is_named_before_another_export_is_removed(make_session, own_job, tmp_path):
    settings = own_job("Extra", "ps")
    model = choose_strategy(settings, job_model(settings, SCHEMA), make_session(), torch.device("cpu")).model
    (tmp_path / "export.json").touch()
    with pytest.raises(CannotExport, match=r"_extra_state .* is dict, no tensor"):
        export_weights(model, tmp_path, None, {})
    assert (tmp_path / "export.json").exists()


def test_int8_layers_are_restored_from_plain_tensors_and_score_nearly_alike(run, tmp_path):
    run.export(tmp_path)
    model, other = run.trained().model, job().model.build(SCHEMA, 4, None)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert quantise(model) == 3
    tensors = int8_tensors(model)
    assert tensors["output.weight"].dtype == torch.int8
    rounded = logits(model, run.data)
    assert 0 < float((rounded - run.logits).abs().max()) < 0.1
    for layer in other.modules():
        if isinstance(layer, nn.Linear):
            with torch.no_grad():
                layer.weight.copy_(torch.zeros_like(layer.weight))  # the weights come from the int8 tensors alone
    load_int8(other, tensors)
    torch.testing.assert_close(logits(other, run.data), rounded, rtol=0, atol=0)


def test_layers_whose_weights_are_computed_or_read_by_others_stay_as_they_are():
    torch.manual_seed(0)
    parts = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.utils.spectral_norm(nn.Linear(4, 4))
    transformer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
    model = nn.Sequential(*parts, transformer, nn.Linear(4, 1), nn.Linear(1, 1).double()).eval()
    model[3].register_forward_hook(lambda layer, given, found: found.double())
    x = torch.randn(5, 3, 4)
    with torch.no_grad():
        wanted = model(x)
        assert quantise(model) == 1
        assert set(int8_tensors(model)) == {f"3.{name}" for name in ("weight", "scale", "zero_point", "bias")}
        torch.testing.assert_close(model(x), wanted, rtol=0, atol=0.05)


def test_an_int8_layer_is_what_the_format_says():
    weight = torch.tensor([[-128, 0, 7], [3, 4, 127]], dtype=torch.int8)
    scale = torch.tensor(0.1, dtype=torch.float64)
    model = load_int8(
        nn.Sequential(nn.Linear(3, 2, bias=False)),
        {"0.weight": weight, "0.scale": scale, "0.zero_point": torch.tensor(3)},
    )
    torch.testing.assert_close(model[0].weight().dequantize(), (weight.float() - 3) * 0.1)


@pytest.mark.parametrize("num_ids", [IDS, None])
def test_an_export_comes_back_into_other_shards(make_session, make_run, tmp_path, num_ids):
    run, session = make_run(num_ids), make_session(3)
    run.export(tmp_path / "out")
    loaded = import_state(tmp_path / "out", run.job, run.data.schema, session)
    assert loaded["embedding"] == (IDS if num_ids else IDS // 2)
    strategy = trained(run.job, run.data, ReadOnlySession(session.client), None)
    assert torch.equal(logits(strategy.model, run.data), run.logits)


def test_a_plain_checkpoint_is_trained_on(make_session, tmp_path):
    torch.manual_seed(3)
    state, path, session = plain_state(), tmp_path / "model.safetensors", make_session(2)
    save_file({name: value.half() for name, value in state.items()}, path)
    import_state(path, job(), SCHEMA, session)
    trainer = Trainer(job(), dataset(), Session(session.client), WorkerGroup())
    want = plain_logits(job(), dataset(), {name: value.half().float() for name, value in state.items()})
    torch.testing.assert_close(logits(trainer.strategy.model, dataset()), want)


def test_tables_of_an_import_that_was_ended_are_closed_until_it_is_done_again(make_session, tmp_path, monkeypatch):
    """A job trained on what had been loaded and on first values for the rest."""
    state, path, session = plain_state(), tmp_path / "model.safetensors", make_session(2)
    save_file(state, path)
    monkeypatch.setattr(import_weights, "PORTION", IDS // 3)
    load, loads = session.client.load, []

    def ended_early(*args, **options):
        loads.append(args)
        if len(loads) == 3:
            raise KeyboardInterrupt
        load(*args, **options)

    session.client.load = ended_early
    with pytest.raises(KeyboardInterrupt):
        import_state(path, job(), SCHEMA, session)
    assert sum(table.rows for one in session.client.status() for table in one.tables)
    with pytest.raises(LoadLost, match="run the import again"):
        logits(Trainer(job(), dataset(), Session(session.client), WorkerGroup()).strategy.model, dataset())
    session.client.load = load
    import_state(path, job(), SCHEMA, Session(session.client))
    model = Trainer(job(), dataset(), Session(session.client), WorkerGroup()).strategy.model
    torch.testing.assert_close(logits(model, dataset()), plain_logits(job(), dataset(), state))


def test_a_shard_that_loses_its_rows_during_an_import_is_named_with_a_remedy_for_imports(tmp_path, make_wires):
    path, wires = tmp_path / "model.safetensors", make_wires(2)
    save_file(plain_state(), path)
    session = wires.session()

    def restarted(request):
        if isinstance(request, Load):
            raise ShardRestarted(shard="shard 1 at wire/1", address="wire/1", got="b", want="a")

    wires.wires[1].before = restarted
    with pytest.raises(ShardLostImport, match=r"shard 1 at wire/1 was restarted.*Restart all shards, or.*import again"):
        import_state(path, job(), SCHEMA, session)
    wires.wires[1].before = lambda request: None
    session = wires.session(1)

    def mixed(request):
        raise RowsLost(lost="shard 0 at wire/0", kept="shard 1 at wire/1", minutes=0.0)

    session.client.lineage.declare = mixed
    with pytest.raises(ShardLostImport, match="shard 0 at wire/0 was restarted without its rows"):
        import_state(path, job(), SCHEMA, session)


GROUP = [{"match": "embeding*", "optimizer": {"name": "sgd", "lr": 0.1}}]


@pytest.mark.parametrize(
    ("content", "settings", "wants"),
    [
        (None, {}, ["no such file"]),
        (b"", {}, ["no safetensors file"]),
        (b"\x80\x04pickle", {}, ["no safetensors file"]),
        (
            {"output.bias": None, "embedding.weight": torch.zeros(IDS, 8), "output.extra": torch.zeros(1)},
            {},
            [f"embedding.weight has shape ({IDS}, 8), the model's is", "output.bias (1,)", "output.extra (1,)"],
        ),
        ({"embedding.weight": torch.zeros(IDS, 4, dtype=torch.int32)}, {}, ["embedding.weight holds I32"]),
        (
            {
                "embedding.weight": torch.full((IDS, 4), 1e39, dtype=torch.float64),
                "output.bias": torch.tensor([float("nan")]),
            },
            {},
            ["embedding.weight has numbers that are not finite", "output.bias has numbers that are not finite"],
        ),
        ({}, {"embedding": {"groups": GROUP}}, ["embedding.groups", "embeding"]),
        ({}, {"dense": {"groups": GROUP}}, ["dense.groups", "embeding"]),
    ],
    ids=["missing", "empty", "pickle", "other tensors", "integers", "infinite", "embedding group", "dense group"],
)
def test_all_that_does_not_fit_is_named_before_anything_is_changed(make_session, tmp_path, content, settings, wants):
    path, session = tmp_path / "model.safetensors", make_session(1)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        state = {**plain_state(), **content}
        save_file({name: value for name, value in state.items() if value is not None}, path)
    with pytest.raises(CannotImport if "groups" not in str(settings) else JobError) as raised:
        import_state(path, job(**settings), SCHEMA, session)
    assert all(want in str(raised.value) for want in wants), raised.value
    assert not session.client.status()[0].tables
