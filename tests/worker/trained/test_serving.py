"""An export serves what was trained: the trainer's logits, without shards."""

import copy
import json
import shutil
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest
import torch
from safetensors.torch import load_file, save_file

import embershard as es
from embershard.errors import BadExport, BadIds, BadRows, CannotServe, UserCodeFailed
from embershard.proto.snapshot.stored import open_snapshot
from embershard.worker.checkpoint.checkpoint import with_preprocessing
from embershard.worker.checkpoint.snapshots import take_snapshot
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.data.inputs.rows import ListInput, RowInputs
from embershard.worker.models.retrieval.two_tower import TwoTower
from embershard.worker.trained import serving
from embershard.worker.trained.export import export_weights
from embershard.worker.trained.folder import INT8, TABLES, ExportFacts, write_facts, write_tensors
from embershard.worker.trained.quantise import int8_tensors, quantise
from embershard.worker.trained.served_inputs import inputs_of, job_data
from embershard.worker.trained.served_tables import ServedEmbeddingBag, SortedRows
from embershard.worker.training.trainer import Trainer
from harness.job import make_job

UNSEEN = {"user": ["nobody", None], "item": [-5, "é"], "age": [3.5, None], "price": [1, 0]}


class Export:
    """A short training on shards, what it scores, and its export."""

    def __init__(self, session, folder, model, **data):
        rng = np.random.default_rng(0)
        columns = {
            "click": (rng.random(300) < 0.4).astype(int),
            "bought": (rng.random(300) < 0.2).astype(int),
            "user": [f"u{i}" for i in rng.integers(0, 30, 300)],
            "item": rng.integers(0, 40, 300),
            "age": rng.integers(0, 90, 300),
            "price": rng.random(300).round(3),
            "tags": ["|".join(f"t{t}:0.5" for t in rng.integers(0, 5, n)) for n in rng.integers(0, 4, 300)],
        }
        if data.get("ids") == "global":
            columns["user"] = 40 + rng.integers(0, 30, 300)
        self.rows = pa.table(columns)
        pa_csv.write_csv(self.rows, folder / "a.csv")
        numeric = {"skip": ("tags", "bought"), "numeric": ("age", "price")}
        if model["name"] == "two_tower":
            numeric = {"skip": ("tags", "bought", "age", "price")}
        of_reader = {} if data.get("reader") else {"reader": "ctr_csv", "log": True, **numeric}
        data = {"train": "a.csv", "test": "a.csv", "label": "click", **of_reader, **data}
        embedding = {"dim": 4, "optimizer": {"name": "adagrad", "lr": 0.1}}
        self.job = make_job(model=model, data=data, embedding=embedding, train={"epochs": 1, "linear": "torch"})
        self.job = with_preprocessing(self.job, folder)
        self.data, self.session, self.folder = self.job.data.open(folder, 0), session, folder / "out"
        strategy = Trainer(self.job, self.data, session, WorkerGroup())
        strategy.run()
        self.model = strategy.strategy.model.eval()
        self.batch = next(self.data.evaluate("test", 0, 1, 300))
        self.logits = self.forward(self.batch.ids, self.batch.dense)
        take_snapshot(session.client, str(folder / "snapshots"), "s")
        facts = export_weights(self.model, self.folder, lambda name: self.read(folder, name), {})
        self.facts = ExportFacts(
            job=job_data(self.job), schema=self.data.schema, inputs=inputs_of(self.job, self.data), tables=facts
        )
        write_facts(self.folder, self.facts)

    def forward(self, *given):
        with torch.no_grad():
            return self.model(*given).numpy()

    def read(self, folder, name):
        return ((ids, rows) for ids, rows, _ in open_snapshot(str(folder / "snapshots"), "s").read_table(name))


@pytest.fixture
def make_export(make_session, tmp_path):
    return lambda model, **data: Export(make_session(2), tmp_path, model, **data)


DEEPFM = {"name": "deepfm", "hidden": [8], "batch_norm": True}


@pytest.fixture(scope="module")
def shared_export(tmp_path_factory):
    with es.local(2) as session:
        yield Export(session, tmp_path_factory.mktemp("shared"), DEEPFM)


@pytest.fixture
def export(shared_export, tmp_path):
    """The export of one training, in a folder of the test's own."""
    own = copy.copy(shared_export)
    own.folder = shutil.copytree(shared_export.folder, tmp_path / "own")
    return own


def assert_same(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ids", ["hashed", "global"])
def test_an_export_scores_rows_as_the_trainer_does(make_export, ids):
    export = make_export({"name": "dlrm", "bottom": [8], "hidden": [8]}, ids=ids)
    served = es.load_exported(export.folder, verify=True)
    assert served.features == ("user", "item", "age", "price")
    assert_same(served.score(export.rows), export.logits)  # the label, which is among them, is not read
    assert_same(served.score_ids(export.batch.ids, export.batch.dense), export.logits)
    assert served.score_ids(np.empty((0, 2), int), np.empty((0, 2))).shape == (0,)


FEATURES = {
    "user": {"min_count": 9},
    "item": {"dim": 3},
    "other": {"column": "item", "buckets": 7},
    "tags": {"type": "list", "separator": "|", "weight_separator": ":", "max_length": 4},
    "age": {"type": "number", "transform": ["log", "standardise"]},
    "old": {"type": "number", "column": "age", "bucketise": 4},
    "user_item": {"type": "cross", "of": ["user", "item"]},
}


TWO_LABELS = {"features": FEATURES, "label": ["click", "bought"]}
SEQUENCE = {
    "user": {},
    "item": {"dim": 4, "buckets": 30},
    "tags": {"type": "sequence", "table": "item", "separator": "|", "max_length": 3, "too_long": "truncate"},
}


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (
            {"name": "mmoe", "experts": 2, "expert": [8], "tower": [4]},
            {"features": FEATURES, "label": ["click", "bought"]},
        ),
        ({"name": "din", "target": "item", "history": "tags", "hidden": [8]}, {"features": SEQUENCE}),
    ],
    ids=["two labels", "sequence"],
)
def test_models_of_several_labels_and_of_sequences_score_alike(make_export, model, data):
    export = make_export(model, reader="tabular", **data)
    served = es.load_exported(export.folder)
    assert_same(served.score(export.rows.select(served.features)), export.logits)
    assert served.score({name: [] for name in served.features}).shape == (0, *export.logits.shape[1:])


def test_an_export_of_a_job_with_features_scores_rows_as_the_trainer_does(make_export):
    export = make_export({"name": "deepfm", "hidden": [8]}, reader="tabular", features=FEATURES)
    served = es.load_exported(export.folder)
    assert served.features == ("user", "item", "tags", "age")
    wanted = ("click", *served.features)
    assert_same(served.score(export.rows.select(wanted)), export.logits)
    rows = export.rows.slice(0, 3).select(served.features).to_pydict()
    assert_same(served.score(rows), export.logits[:3])
    assert served.score({name: [] for name in rows}).shape == (0,)
    for change, feature, value in (
        ({"x": [1, 2, 3]}, "x", None),
        ({"tags": None}, "tags", "None"),
        ({"tags": ["a|b|c|d|e"] * 3}, "tags", "'a|b|c|d|e'"),
        ({"age": ["1", "b", "3"]}, "age", "'b'"),
        ({"user": "abc"}, "user", "'abc'"),
        ({"age": [1, 2]}, "age", 2),
        ({"user": [1.5, 2, 3]}, "user", "1.5"),
        ({"user": ["a", 2, 3.5]}, "user", "3.5"),
        ({"item": ["a\nb", "", ""]}, "item", "'a\\nb'"),
    ):
        with pytest.raises(BadRows) as raised:
            served.score({**rows, **change})
        assert (raised.value.fields["feature"], raised.value.fields["value"]) == (feature, value)


def test_ids_that_were_never_trained_have_the_first_values_of_the_shards(export):
    served = es.load_exported(export.folder)
    ids, dense = served._inputs(UNSEEN)
    assert_same(served.score(UNSEEN), export.forward(torch.from_numpy(ids), torch.from_numpy(dense)))
    both = np.concatenate([ids, export.batch.ids.numpy()])
    for name, module in (("embedding", export.model.embedding), ("linear", export.model.linear)):
        assert served.embedding(name, both).tobytes() == module.table.pull(torch.from_numpy(both)).numpy().tobytes()
    empty = SortedRows(ids[:0, 0], np.empty((0, 4), np.float32), es.Constant(value=0.5), 1)
    assert empty.read(torch.tensor([3, 4, 3])).tolist() == [[0.5] * 4] * 3


SIMPLEX = {"name": "simplex", "gamma": 0.3}
SASREC = {"name": "sasrec", "blocks": 1}
INTERACTIONS = {
    "ncf": ({"name": "neumf", "factors": 2}, {"reader": "ncf", "prefix": "n", "negatives": 1}),
    "lists": ({"name": "two_tower"}, {"reader": "lists", "train": "lists.txt", "test": "found.txt", "negatives": 2}),
    "history": (SIMPLEX, {"reader": "lists", "train": "lists.txt", "test": "found.txt", "negatives": 1, "history": 3}),
    "sequences": (SASREC, {"reader": "sequences", "actions": "actions.txt", "max_length": 4, "candidates": 5}),
}
TAKEN = {user: [(user * 7 + step * 3) % 20 for step in range(2 + 2 * user)] for user in range(5)}


@pytest.fixture(params=INTERACTIONS)
def interactions(request, make_session, tmp_path):
    """A model of users and items, its data, and what an export of it serves."""
    model, data = INTERACTIONS[request.param]
    pairs = [(user, item) for user, items in TAKEN.items() for item in items]
    (tmp_path / "n.train.pairs").write_text("".join(f"{user}\t{item}\n" for user, item in pairs))
    (tmp_path / "n.test.rating").write_text("".join(f"{user}\t21\t5\t9\n" for user in TAKEN))
    (tmp_path / "n.test.negative").write_text("".join(f"({user},21)\t22\t23\n" for user in TAKEN))
    lists = [[user, *items] for user, items in TAKEN.items()]
    (tmp_path / "lists.txt").write_text("".join(" ".join(map(str, line)) + "\n" for line in lists))
    (tmp_path / "found.txt").write_text("".join(f"{user} 21\n" for user in TAKEN))
    (tmp_path / "actions.txt").write_text("".join(f"{user} {item}\n" for user, item in pairs))
    return ReaderExport(make_session(2), tmp_path, model, data)


class ReaderExport(Export):
    """The export of a model that was trained for one epoch on a reader's own data."""

    def __init__(self, session, folder, model, data):
        embedding = {"optimizer": {"name": "adagrad", "lr": 0.1}}
        embedding |= {} if model.get("name") == "neumf" else {"dim": 4}
        self.job = make_job(model=model, data=data, embedding=embedding, train={"epochs": 1, "linear": "torch"})
        self.data, self.folder = self.job.data.open(folder, 0), folder / "out"
        trainer = Trainer(self.job, self.data, session, WorkerGroup())
        trainer.run()
        self.model = trainer.strategy.model.eval()
        take_snapshot(session.client, str(folder / "snapshots"), "s")
        facts = export_weights(self.model, self.folder, lambda name: self.read(folder, name), {})
        told = {"job": job_data(self.job), "inputs": inputs_of(self.job, self.data)}
        write_facts(self.folder, ExportFacts(**told, schema=self.data.schema, tables=facts))
        self.served = es.load_exported(self.folder)

    def scores(self):
        """Rows of the evaluation as a request has them, and the logits that the trainer's evaluation has of them."""
        if self.job.data.reader == "sequences":
            batch = next(self.data.evaluate("test", 0, 1, 100))
            logits = self.forward(batch.ids, None)
            rows = {"history": [TAKEN[user][:-1] for user in batch.groups.tolist()], "items": batch.ids[:, 4:].tolist()}
            return rows, logits
        if self.job.data.reader == "lists":
            users, others = next(self.data.users("test", 0, 1, 100)), self.data.item_ids
            with torch.no_grad():
                products = self.model.user_vectors(users.ids) @ self.model.item_vectors(others).T
            rows = {"user": np.repeat(range(5), len(others)), "item": np.tile(range(len(others)), 5)}
            if self.job.data.history:
                rows["history"] = [TAKEN[user] for user in rows["user"]]
            temperature = getattr(self.job.model, "temperature", 1.0)
            return rows, (products / temperature).reshape(-1).numpy()
        batch = next(self.data.evaluate("test", 0, 1, 100))
        users = batch.ids[:, 0]
        return {"user": users, "item": batch.ids[:, 1] - 5}, self.forward(batch.ids, None)


def test_users_items_and_histories_of_a_request_score_as_in_the_trainers_evaluation(interactions):
    rows, logits = interactions.scores()
    served = interactions.served
    assert set(served.features) == set(rows)
    assert_same(served.score(rows), logits)
    as_json = json.loads(json.dumps({name: np.asarray(v, object).tolist() for name, v in rows.items()}))
    assert_same(served.score(as_json), logits)
    none = served.score({name: [] for name in rows})
    assert none.shape == (0, *logits.shape[1:-1], *[1] * (logits.ndim - 1))
    ids, _ = served._inputs(rows)
    assert_same(served.score_ids(ids), logits)
    for name in rows:
        value = [10**6] if isinstance(as_json[name][0], list) else 10**6
        with pytest.raises(BadRows) as raised:
            served.score({**as_json, name: [*as_json[name][:-1], value]})
        assert raised.value.fields["feature"] == name
    if interactions.job.data.reader == "lists":  # a user's id is none of an item
        with pytest.raises(BadIds, match="ids of items"):
            served.item_vectors(ids[:2, 0])
        with pytest.raises(BadIds, match="ids of users"):
            served.user_vectors(ids[:2, 1])
        for shape in ((), (1, 1)):
            with pytest.raises(BadIds, match="have shape"):
                served.item_vectors(np.full(shape, 25))
        assert served.user_vectors([]).shape == (0, 4)
        with pytest.raises(BadIds, match=r"ids of the history|have shape"):
            served.user_vectors(np.stack([ids[:2, 0], ids[:2, 0]], 1))
    with pytest.raises(BadIds):
        served.score_ids(ids[:, :1])
    with pytest.raises(BadIds):
        served.score_ids(np.full_like(ids, 10**6))


def test_a_model_of_a_table_is_served_by_the_names_of_its_users_and_items(make_session, tmp_path):
    rows = [(f"u{user}", f"i{item}", time) for user, items in TAKEN.items() for time, item in enumerate(items)]
    text = "".join(f"{who},{what},{at}\n" for who, what, at in rows)
    (tmp_path / "plays.csv").write_text(f"who,what,at\n{text}")
    data = {"reader": "lists", "train": "plays.csv", "columns": {"user": "who", "item": "what", "time": "at"}}
    export = ReaderExport(make_session(2), tmp_path, SIMPLEX, {**data, "negatives": 1, "history": 3})
    served, items = export.served, sorted({what for _, what, _ in rows})
    assert served.features == ("who", "what", "history")
    users = served.ids("who", ["u1", "u3"])
    taken = [[f"i{item}" for item in TAKEN[user][:-2]] for user in (1, 3)]
    vectors = served.user_vectors(np.column_stack([users, served.ids("history", taken)]))
    products = vectors @ served.item_vectors(served.ids("what", items)).T
    for place, user in enumerate(("u1", "u3")):
        own = {"who": [user] * len(items), "what": items, "history": [taken[place]] * len(items)}
        assert_same(served.score(own), products[place])
        assert_same(served.score({**own, "history": [[*taken[place], "never seen"]] * len(items)}), products[place])
    (judged,) = export.data.users("test", 0, 1, 100)
    with torch.no_grad():
        wanted = export.model.user_vectors(judged.ids) @ export.model.item_vectors(export.data.item_ids).T
    assert_same(products, wanted.numpy()[[0, 2]])  # user 0 has too few items
    strangers = {"who": ["nobody", "somebody"], "what": ["nothing", "never seen"], "history": [[], ["nothing"]]}
    one, other = served.score(strangers)
    assert one == other
    with pytest.raises(BadRows, match="unknown"):
        served.ids("user", ["u1"])


def test_lists_of_one_row_that_are_longer_than_anothers_are_refused_where_all_are_scored():
    items = RowInputs(lists=(ListInput(name="items", num_ids=9),))
    assert items({"items": [[1, 2], [3, 4]]})[0].tolist() == [[1, 2], [3, 4]]
    for wrong in ([[1, 2], [3]], [[1], 2], [[1], [True]], [[1], [-1]], [[1], ["2"]], [[1], None]):
        with pytest.raises(BadRows) as raised:
            items({"items": wrong})
        assert raised.value.fields["value"] == repr(wrong[1])


OWN = """
import numpy as np
import torch
import embershard as es
class Wide(torch.nn.Module):
    def __init__(self, num_ids, num_dense):
        super().__init__()
        self.first, self.rest = torch.nn.Embedding(num_ids, 1), torch.nn.Linear(num_dense, 1)
    def forward(self, ids, dense):
        return self.first(ids).sum(1) + self.rest(dense)
class Drawn(Wide):  # what it draws is in no state_dict
    def __init__(self, num_ids, num_dense):
        super().__init__(num_ids, num_dense)
        self.mix = torch.randn(num_dense)
        self.register_buffer("shift", torch.randn(num_dense), persistent=False)
    def forward(self, ids, dense):
        return super().forward(ids, dense * self.mix + self.shift)
INPUTS = es.RowInputs(
    categorical=(es.CategoricalInput(name="user"), es.CategoricalInput(name="item")),
    numeric=(es.NumericInput(name="age", log=True),),
)
def rows(inputs="whole"):
    users, items, ages = ["a", "b", "c", "a"], [1, 2, 3, 4], np.array([1.0, 2.0, 3.0, 0.0], np.float32)
    ids = np.stack([es.hash_ids("user", users), es.hash_ids("item", items)], 1)
    samples = es.Samples.of(ids, np.log1p(ages)[:, None], np.array([1, 0, 1, 0]))
    given = {"whole": INPUTS, "none": None, "other": [], "fewer": es.RowInputs(categorical=INPUTS.categorical)}[inputs]
    return es.RowsDataset(es.Schema(("user", "item"), 1, None), {"train": samples, "test": samples}, inputs=given)
"""


@pytest.mark.parametrize("name", ["Wide", "Drawn"])
def test_a_users_model_and_reader_that_tells_its_inputs_score_rows(make_session, tmp_path, monkeypatch, name):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "served_own.py").write_text(OWN)
    own = {"reader": "served_own:rows"}
    export = ReaderExport(make_session(2), tmp_path, {"class": f"served_own:{name}"}, own)
    before = torch.random.get_rng_state()
    es.load_exported(export.folder)
    assert torch.equal(torch.random.get_rng_state(), before)
    batch = next(export.data.evaluate("test", 0, 1, 9))
    found = export.served.score({"user": ["a", "b", "c", "a"], "item": [1, 2, 3, 4], "age": [1, 2, 3, None]})
    assert_same(found, export.forward(batch.ids, batch.dense).reshape(-1))
    assert make_job(data={**own, "inputs": "none"}).data.open(tmp_path, 0).inputs is None
    for wrong in ("other", "fewer"):
        with pytest.raises(UserCodeFailed):
            make_job(data={**own, "inputs": wrong}).data.open(tmp_path, 0)


def test_many_threads_score_alike(export):
    served, found = es.load_exported(export.folder), {}
    parts = [export.rows.slice(i, 100) for i in range(8)]

    def score(i):
        found[i] = [served.score(parts[i]) for _ in range(10)]

    threads = [threading.Thread(target=score, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(8):
        for scores in found[i]:
            assert_same(scores, export.logits[i : i + 100])


def test_two_towers_give_vectors(make_export):
    export = make_export({"name": "two_tower", "hidden": [6]}, categorical=("user", "item"))
    served = es.load_exported(export.folder)
    ids = export.batch.ids
    assert isinstance(export.model, TwoTower)
    with torch.no_grad():
        wanted = [export.model.user_vectors(ids[:, 0]), export.model.item_vectors(ids[:, 1])]
    users, items = served.user_vectors(ids[:, 0]), served.item_vectors(ids[:, 1])
    assert_same(users, wanted[0])
    assert_same(items, wanted[1])
    assert_same((users * items).sum(1) / 0.1, served.score_ids(ids))


def test_the_dense_part_may_be_of_int8(make_export):  # that of ONNX: test_export.py
    export = make_export(DEEPFM)
    for dense in ("int8", "onnx"):
        with pytest.raises(BadExport):  # it was exported without
            es.load_exported(export.folder, dense=dense)
    quantise(export.model)
    write_tensors(export.folder / INT8, int8_tensors(export.model))
    write_facts(export.folder, export.facts)
    served = es.load_exported(export.folder, dense="int8")
    assert_same(served.score(export.rows), export.forward(export.batch.ids, export.batch.dense))
    with pytest.raises(ValueError, match="dense"):
        es.load_exported(export.folder, dense="int4")


@pytest.mark.parametrize("change", [1, 0])  # 0: by another one and then by one like the first
def test_files_that_another_export_replaces_while_they_are_read_are_not_mixed(export, change, monkeypatch):
    def replaced(path, read=serving._tensors):
        if path.name == TABLES:
            pairs = load_file(path)
            write_tensors(path, {**pairs, "embedding.rows": pairs["embedding.rows"] + change})
            write_facts(export.folder, export.facts)
        return read(path)

    monkeypatch.setattr(serving, "_tensors", replaced)
    with pytest.raises(BadExport, match="another export replaced its files while they were read"):
        es.load_exported(export.folder)
    monkeypatch.undo()
    es.load_exported(export.folder, verify=True)


def change(folder, **values):
    path = folder / "export.json"
    told = json.loads(path.read_text())
    told.pop("sha256", None)
    path.write_text(json.dumps({**told, **values}))


def a_folder(folder):
    (folder / "export.json").unlink()
    (folder / "export.json").mkdir()


def without_model(folder):
    (folder / "model.safetensors").unlink()


def shorter(folder):
    data = (folder / TABLES).read_bytes()
    (folder / TABLES).write_bytes(data[:-1])


def flipped(folder):
    data = bytearray((folder / TABLES).read_bytes())
    data[-1] ^= 1
    (folder / TABLES).write_bytes(data)


def other_digit(folder):
    path = folder / "export.json"
    text, row_seed = path.read_text(), json.loads(path.read_text())["tables"]["embedding"]["row_seed"]
    path.write_text(text.replace(row_seed, f"{row_seed[:-1]}{'1' if row_seed[-1] == '0' else '0'}"))


def other_model(folder):
    state = load_file(folder / "model.safetensors")
    save_file({**state, "output.weight": torch.zeros(1, 9)}, folder / "model.safetensors")
    change(folder, files={})


def other_tables(folder):
    save_file({"embedding.ids": torch.zeros(2)}, folder / TABLES)
    change(folder, files={})


@pytest.mark.parametrize(
    ("damage", "file", "reason"),
    [
        (lambda folder: (folder / "export.json").unlink(), "export.json", "no such file"),
        (lambda folder: (folder / "export.json").write_text("{"), "export.json", "no JSON"),
        (lambda folder: (folder / "export.json").write_bytes(b"\xff\x00"), "export.json", "no JSON"),
        (lambda folder: (folder / "export.json").write_text("[" * 100_000), "export.json", "no JSON"),
        (a_folder, "export.json", "Is a directory"),
        (lambda folder: (folder / "export.json").write_text("[]"), "export.json", "format"),
        (lambda folder: change(folder, format="other"), "export.json", "format"),
        (lambda folder: change(folder, version=3), "export.json", "version"),
        (lambda folder: change(folder, tables={"embedding": {}}), "export.json", "TypeError"),
        (lambda folder: change(folder, job={}), "export.json", "job"),
        (lambda folder: change(folder, inputs={"kind": "other"}), "export.json", "inputs"),
        (other_digit, "export.json", "sha256"),
        (without_model, "model.safetensors", "no such file"),
        (shorter, TABLES, "bytes"),
        (flipped, TABLES, "sha256"),
        (other_model, "model.safetensors", "output.weight"),
        (other_tables, "export.json", "rows"),
    ],
)
def test_a_damaged_or_foreign_folder_is_refused_with_file_and_reason(export, damage, file, reason):
    damage(export.folder)
    with pytest.raises(BadExport) as raised:
        es.load_exported(export.folder, verify=True)
    assert raised.value.fields["path"] == str(export.folder / file)
    assert reason in raised.value.fields["reason"]


def test_a_url_is_told_from_a_folder_that_is_not_there():
    with pytest.raises(BadExport, match="cannot serve memory://out: it is a URL"):
        es.load_exported("memory://out")


def test_inputs_of_another_model_or_without_what_was_learnt_are_refused(make_export):
    folder = make_export({"name": "deepfm", "hidden": [8]}, reader="tabular", features=FEATURES).folder
    inputs = json.loads((folder / "export.json").read_text())["inputs"]
    fewer = {name: one for name, one in inputs["features"].items() if name != "age"}
    for wrong in ({**inputs, "fitted": {}}, {**inputs, "features": fewer}):
        change(folder, inputs=wrong)
        with pytest.raises(BadExport):
            es.load_exported(folder)


def test_what_the_model_does_not_have_is_named(export, tmp_path):
    served = es.load_exported(export.folder)
    dense = np.zeros((1, 2))
    for ids, given in (
        ([[1, 2, 3]], dense),
        ([1, 2], dense),
        ([[1.0, 2.0]], dense),
        ([[-1, 2]], dense),
        ([[1, 2]], None),
        ([[1, 2]], dense[:, :1]),
        ([[1, 2]], np.array([["a", "b"]])),
    ):
        with pytest.raises(BadIds):
            served.score_ids(ids, given)
    with pytest.raises(BadRows):
        served.score({**UNSEEN, "unknown": [1, 2]})
    with pytest.raises(CannotServe):
        served.user_vectors([1])
    with pytest.raises(CannotServe):
        served.embedding("other", [1])
    with pytest.raises(BadExport):
        es.load_exported(tmp_path / "nowhere")
    write_facts(export.folder, replace(export.facts, inputs=None))
    with pytest.raises(CannotServe):
        es.load_exported(export.folder).score(UNSEEN)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_hashed_ids_pool_as_torch_does(mode):
    rows = np.random.default_rng(0).random((5, 3), np.float32)
    bag = torch.nn.EmbeddingBag(5, 3, mode=mode, padding_idx=2, _weight=torch.from_numpy(rows.copy()))
    served = ServedEmbeddingBag(SortedRows(np.arange(5), rows, es.Constant(value=0.0), 1), bag)
    for given in (
        (torch.tensor([[0, 2, 4], [2, 2, 1]]),),
        (torch.tensor([3, 2, 4, 0]), torch.tensor([0, 1])),
        (torch.tensor([[0, 1]]), None, torch.tensor([[2.0, 3.0]])) if mode == "sum" else (torch.tensor([[1]]),),
    ):
        torch.testing.assert_close(served(*given), bag(*given))


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_rows_above_max_norm_are_scaled_and_the_table_stays_as_it_is(kind, tmp_path):
    weight, ids = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 2.0]]), torch.tensor([[0, 1], [2, 0]])
    plain, model = kind(3, 2, max_norm=1.0), torch.nn.ModuleDict({"rows": kind(3, 2, max_norm=1.0)})
    with torch.no_grad():
        plain.weight.copy_(weight)
        state = {"rows.weight": weight.clone()}
        serving._load(model, state, tmp_path)
        torch.testing.assert_close(model["rows"](ids), plain(ids))
        model = torch.nn.ModuleDict({"rows": kind(3, 2, max_norm=1.0)})
        model["rows"].scale = 3.0
        model["rows"].register_forward_hook(lambda rows, given, found: found * rows.scale)
        serving._load(model, state, tmp_path)
        torch.testing.assert_close(model["rows"](ids), 3 * plain(ids))
    assert torch.equal(state["rows.weight"], weight)  # two threads at once would scale a row twice
    assert torch.equal(model["rows"].weight, weight)
    with pytest.raises(IndexError):
        model["rows"](torch.tensor([[-1]]))


def test_a_table_with_max_norm_may_have_another_type_than_float32(tmp_path):
    model = torch.nn.ModuleDict({"rows": torch.nn.Embedding(3, 2, max_norm=1.0, dtype=torch.bfloat16)})
    serving._load(model, {"rows.weight": torch.tensor([[3.0, 4.0]] * 3, dtype=torch.bfloat16)}, tmp_path)
    rows = model["rows"](torch.tensor([1]))
    assert rows.dtype == torch.bfloat16  # which numpy does not have
    torch.testing.assert_close(rows.float(), torch.tensor([[0.6, 0.8]]), rtol=0.01, atol=0)


def test_a_subclass_with_max_norm_keeps_its_forward(tmp_path):
    class Twice(torch.nn.Embedding):
        def forward(self, ids):
            return 2 * super().forward(ids)

    model = torch.nn.ModuleDict({"rows": Twice(3, 2, max_norm=10.0)})
    serving._load(model, {"rows.weight": torch.ones(3, 2)}, tmp_path)
    assert model["rows"](torch.tensor([1])).tolist() == [[2.0, 2.0]]


def test_a_server_loads_neither_shards_nor_compilers(export):
    code = (
        "import sys, embershard as es; es.load_exported(sys.argv[1]); "
        "print(*({'numba', 'grpc', 'pyarrow', 'onnxruntime', 'fsspec'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code, export.folder], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_towers_of_features_give_the_vectors_of_rows_with_the_columns_of_one_side(make_export):
    numbers = {"age": {"type": "number"}, "price": {"type": "number", "transform": "standardise"}}
    tags = {"type": "list", "separator": "|", "weight_separator": ":"}
    features = {"user": {}, "tags": tags, "item": {"ids": "exact", "num_ids": 40}, **numbers}
    towers = {"name": "feature_towers", "item": ["item", "price"]}
    made = make_export(towers, reader="tabular", label=[], features=features, catalogue="a.csv")
    served, columns = es.load_exported(made.folder), made.rows.to_pydict()
    users = served.user_vectors({name: columns[name] for name in ("user", "age", "tags")})
    items = served.item_vectors({name: columns[name] for name in ("price", "item")})
    assert_same((users * items).sum(1) / 0.1, made.logits)
    assert_same(served.item_vectors({name: columns[name] for name in features}), items)
    with pytest.raises(BadRows, match="age"):
        served.user_vectors({"user": ["u1"], "tags": ["t1:0.5"]})
    with pytest.raises(BadRows, match="what"):
        served.item_vectors({"item": [1], "price": [0.5], "what": [1]})
    with pytest.raises(TypeError, match="rows are columns by name"):
        served.user_vectors([1, 2])
