"""Exports of a trained model, and models from elsewhere brought in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from embershard.proto.arrays import Floats, Ids
from embershard.proto.errors import EmbershardError, JobError, TableMismatch
from embershard.proto.messages import Declare
from embershard.proto.spec import SGD, TableSpec
from embershard.proto.transport.local import LocalTransport
from embershard.worker.checkpoint.snapshots import read_table, take_snapshot
from embershard.worker.client.client import Client
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.data.batch import Batch, RowsDataset, Samples, Schema
from embershard.worker.job.job import Job
from embershard.worker.session.session import Session
from embershard.worker.strategy.protocol import Strategy
from embershard.worker.trained.export import CannotExport, TableFacts, export_weights, write_bytes, write_tensors
from embershard.worker.trained.import_weights import CannotImport, import_state
from embershard.worker.trained.onnx import dense_part, export_onnx
from embershard.worker.trained.quantise import int8_tensors, load_int8, quantise
from embershard.worker.trained.reading import NotTrained, OnlyInWorkers, ReadOnlySession, trained
from embershard.worker.training.trainer import Trainer
from harness.job import make_job
from harness.raises import raises

F, PER_FIELD, D = 3, 20, 2
IDS = F * PER_FIELD
MakeSession = Callable[..., Session]


def dataset(num_ids: int | None = IDS) -> RowsDataset:
    rng = np.random.default_rng(1)
    # of each field a half occurs: the other rows are never trained
    ids = rng.integers(0, PER_FIELD // 2, (400, F)) + np.arange(F) * PER_FIELD
    rows = Samples(ids, rng.random((400, D), np.float32), (rng.random(400) < 0.5).astype(np.float32))
    return RowsDataset(Schema(tuple("abc"), D, num_ids), {"train": rows, "valid": rows}, where="made up")


def job(name: str = "deepfm", **model: object) -> Job:
    return make_job(
        model={"name": name, **({"hidden": [16, 8]} if name == "deepfm" else {}), **model},
        embedding={"dim": 4, "optimizer": {"name": "adagrad", "lr": 0.1}},
        train={"epochs": 1, "linear": "torch"},
    )


def batch(data: RowsDataset) -> Batch:
    return next(data.evaluate("valid", 0, 1, 64))


def plain_logits(job: Job, data: RowsDataset, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the model with nn.Embedding, as anyone would build it."""
    model = job.model.build(data.schema, job.dim, None)
    model.load_state_dict(state, strict=True)
    one = batch(data)
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(one.ids, one.dense)
    return logits


def logits(strategy: Strategy, data: RowsDataset) -> torch.Tensor:
    one = batch(data)
    with torch.no_grad():
        found: torch.Tensor = strategy.model.eval()(one.ids, one.dense)
    return found


def reader(folder: Path) -> Callable[[str], Iterator[tuple[Ids, Floats]]]:
    return lambda table: ((ids, rows) for ids, rows, _ in read_table(str(folder), table, "last"))


class Run:
    """A short training, its shards, and a snapshot of them."""

    def __init__(self, session: Session, folder: Path, job: Job, data: RowsDataset) -> None:
        self.job, self.data, self.session = job, data, session
        self.trainer = Trainer(job, data, session, WorkerGroup())
        self.trainer.run()
        take_snapshot(session.client, str(folder), "last")
        self.read_table = reader(folder)

    def trained(self) -> Strategy:
        return trained(self.job, self.data.schema, ReadOnlySession(self.session.client), None)

    def export(self, out: Path) -> dict[str, TableFacts]:
        strategy = self.trained()
        return export_weights(strategy.model, self.job, out, self.read_table, strategy.table_rows())


@pytest.fixture
def run(make_session, tmp_path):
    return Run(make_session(2), tmp_path / "snapshots", job(), dataset())


def test_an_exported_state_dict_loads_into_the_plain_model_and_scores_alike(run, tmp_path):
    facts = run.export(tmp_path / "out")
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1  # that of the user's other files
    want = logits(run.trainer.strategy, run.data)
    torch.testing.assert_close(plain_logits(run.job, run.data, load_file(tmp_path / "out" / "model.safetensors")), want)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers opens no file without it
    assert facts["embedding"] == TableFacts("model.safetensors", 4, IDS, IDS // 2)
    told = json.loads((tmp_path / "out" / "export.json").read_text())
    assert told["tables"]["linear"]["dim"] == 1
    assert told["job"] == run.job.model_dump(mode="json")  # defaults, too


@pytest.mark.parametrize("prefix", ["", "a/"])
def test_rows_that_were_never_trained_are_named_and_have_their_first_values(make_session, tmp_path, prefix):
    prefixed = job().model_copy(update={"prefix": prefix})  # of tables, but not of the model's parameters
    run = Run(make_session(2), tmp_path / "snapshots", prefixed, dataset())
    run.export(tmp_path / "out")
    marks = load_file(tmp_path / "out" / "trained.safetensors")["embedding"]
    assert marks.tolist() == [i % PER_FIELD < PER_FIELD // 2 for i in range(IDS)]
    initial = torch.arange(IDS)[~marks]
    weight = load_file(tmp_path / "out" / "model.safetensors")["embedding.weight"]
    table = next(table for table in run.session.tables if table.spec.name == f"{prefix}embedding")
    assert torch.equal(weight[initial], table.pull(initial))


def test_tables_of_hashed_ids_are_written_as_pairs(make_session, tmp_path):
    run = Run(make_session(2), tmp_path / "snapshots", job(), dataset(num_ids=None))
    facts = run.export(tmp_path / "out")
    pairs = load_file(tmp_path / "out" / "tables.safetensors")
    assert sorted(pairs["embedding.ids"].tolist()) == [i for i in range(IDS) if i % PER_FIELD < PER_FIELD // 2]
    table = next(table for table in run.session.tables if table.spec.name == "embedding")
    assert torch.equal(pairs["embedding.rows"], table.pull(pairs["embedding.ids"]))
    assert facts["embedding"].file == "tables.safetensors"
    assert "embedding.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    with pytest.raises(CannotExport, match="the ids of table 'embedding' are hashes, which only a snapshot lists"):
        export_weights(run.trained().model, run.job, tmp_path / "other", None, {})


def test_without_a_snapshot_nothing_says_which_rows_were_trained(run, tmp_path):
    out = tmp_path / "of" / "today"
    first = run.export(out)
    strategy = run.trained()
    # again into the same folder, where the marks of the last export would be wrong
    facts = export_weights(strategy.model, run.job, out, None, {"embedding": 7})
    assert sorted(path.name for path in out.iterdir()) == ["export.json", "model.safetensors"]
    assert (facts["embedding"].trained, facts["linear"].trained) == (7, 0)  # as many as the shards say
    assert (facts["embedding"].rows, facts["linear"].dim) == (IDS, 1)
    assert first["embedding"].trained == IDS // 2


def test_a_table_of_hashed_ids_without_rows_is_written_empty(make_session, tmp_path):
    run = Run(make_session(2), tmp_path / "snapshots", job(), dataset(num_ids=None))
    facts = export_weights(run.trained().model, run.job, tmp_path / "out", lambda table: iter(()), {"embedding": 30})
    pairs = load_file(tmp_path / "out" / "tables.safetensors")
    assert (pairs["embedding.ids"].shape, pairs["embedding.rows"].shape) == ((0,), (0, 4))
    assert (pairs["embedding.ids"].dtype, pairs["embedding.rows"].dtype) == (torch.int64, torch.float32)
    assert facts["embedding"] == TableFacts("tables.safetensors", 4, 0, 0)  # what the file holds, not the shards
    told = json.loads((tmp_path / "out" / "export.json").read_text())
    assert told["tables"]["embedding"] == {"file": "tables.safetensors", "dim": 4, "rows": 0, "trained": 0}


@pytest.mark.parametrize("name", ["a.safetensors", "a.json"])
def test_a_file_that_cannot_take_its_place_is_named_and_leaves_no_part_of_it(tmp_path, name):
    (tmp_path / name / "taken").mkdir(parents=True)
    with pytest.raises(CannotExport, match=rf"cannot write .*/{name}: Is a directory"):
        write_tensors(tmp_path / name, {"a": torch.ones(2)}) if "tensors" in name else write_bytes(tmp_path / name, b"")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_full_disk_leaves_the_export_before_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": torch.ones(2)})

    def fill(tensors, file, metadata):
        file.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("embershard.worker.trained.export.save_file", fill)
    with pytest.raises(CannotExport, match=r"a\.safetensors: I/O error: No space left on device"):
        write_tensors(path, {"a": torch.zeros(2)})
    assert [path.name for path in tmp_path.iterdir()] == [path.name]
    assert load_file(path)["a"].tolist() == [1.0, 1.0]


def test_shards_without_the_tables_are_refused_and_left_as_they_are(make_session):
    session = make_session(2)
    with raises(NotTrained, table="embedding", known="none"):
        trained(job(), dataset().schema, ReadOnlySession(session.client), None)
    assert not any(status.tables for status in session.client.status())


def test_shards_of_another_job_are_refused(run):
    other = run.job.model_copy(update={"embedding": run.job.embedding.model_copy(update={"dim": 8})})
    with raises(TableMismatch, difference="dim: 4, not 8"):
        trained(other, run.data.schema, ReadOnlySession(run.session.client), None)


def test_shards_with_other_dense_weights_are_refused_in_one_line(run):
    other = job(hidden=[16, 16])
    with pytest.raises(EmbershardError) as raised:
        trained(other, run.data.schema, ReadOnlySession(run.session.client), None)
    assert str(raised.value).startswith("table 'dense' holds the dense weights of a model with other parameters")
    assert "\n" not in str(raised.value)


def test_shards_without_the_dense_weights_of_a_job_are_refused_and_left_as_they_are(make_session):
    session, data = make_session(2), dataset()
    hybrid = Job.model_validate({**job().model_dump(exclude_unset=True), "dense": {"mode": "ddp"}})
    Trainer(hybrid, data, session, WorkerGroup()).run()
    before = [status.tables for status in session.client.status()]
    with raises(NotTrained, table="dense", known="embedding, linear"):
        trained(job(), data.schema, ReadOnlySession(session.client), None)
    assert [status.tables for status in session.client.status()] == before


def test_a_table_that_one_shard_lacks_is_not_created_there(make_shards):
    shards = make_shards(2)
    spec = TableSpec(name="t", dim=2, optimizer=SGD(lr=0.1))
    shards[0].handle(Declare(spec))
    client = Client([LocalTransport(shard.handle, f"local/{i}") for i, shard in enumerate(shards)])
    with pytest.raises(NotTrained):
        ReadOnlySession(client).table(spec)
    assert not client.status()[1].tables


def test_statistics_of_batch_norm_are_asked_for_where_only_shards_are_named(make_session, tmp_path):
    run = Run(make_session(1), tmp_path / "snapshots", job(batch_norm=True), dataset())
    with pytest.raises(OnlyInWorkers, match=r"buffers \(deep\.1\.running_mean.*name a checkpoint of the run"):
        run.trained()


def test_a_folder_that_cannot_be_written_is_named(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotExport, match=r"cannot write .*file/out: Not a directory"):
        run.export(tmp_path / "file" / "out")


def test_onnx_scores_as_torch_does(run, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    state = dict(run.trained().model.state_dict())
    path = export_onnx(dense_part(run.job, run.data.schema, state), run.data.schema, tmp_path)
    session = runtime.InferenceSession(str(path))
    assert {i.name for i in session.get_inputs()} == {"index", "dense", "embedding.rows", "linear.rows"}
    one = batch(run.data)
    ids, index = torch.unique(one.ids, return_inverse=True)
    tables = {table.spec.name: table for table in run.session.tables}
    assert one.dense is not None
    given = {
        "index": index.numpy(),
        "dense": one.dense.numpy(),
        **{f"{name}.rows": tables[name].pull(ids).numpy() for name in ("embedding", "linear")},
    }
    (found,) = session.run(["logits"], given)
    torch.testing.assert_close(torch.from_numpy(found), logits(run.trainer.strategy, run.data), rtol=1e-4, atol=1e-5)


def test_int8_layers_are_restored_from_plain_tensors_and_score_nearly_alike(run):
    full = logits(run.trainer.strategy, run.data)
    strategy = run.trained()
    assert quantise(strategy.model) == 3
    tensors = int8_tensors(strategy.model)
    assert tensors["output.weight"].dtype == torch.int8
    rounded = logits(strategy, run.data)
    assert 0 < float((rounded - full).abs().max()) < 0.1
    other = run.trained()
    for layer in other.model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.zeros_(layer.weight)
    load_int8(other.model, tensors)
    torch.testing.assert_close(logits(other, run.data), rounded, rtol=0, atol=0)


def test_an_int8_layer_is_what_the_format_says():
    weight = torch.tensor([[-128, 0, 7], [3, 4, 127]], dtype=torch.int8)
    scale = torch.tensor(0.1, dtype=torch.float64)
    model = load_int8(
        nn.Sequential(nn.Linear(3, 2, bias=False)),
        {"0.weight": weight, "0.scale": scale, "0.zero_point": torch.tensor(3)},
    )
    torch.testing.assert_close(model[0].weight().dequantize(), (weight.float() - 3) * 0.1)


@pytest.mark.parametrize("num_ids", [IDS, None])
def test_an_export_comes_back_into_other_shards(make_session, tmp_path, num_ids):
    run = Run(make_session(2), tmp_path / "snapshots", job(), dataset(num_ids))
    run.export(tmp_path / "out")
    session = make_session(3)
    loaded = import_state(tmp_path / "out", run.job, run.data.schema, session)
    assert loaded["embedding"] == (IDS if num_ids else IDS // 2)
    strategy = trained(run.job, run.data.schema, ReadOnlySession(session.client), None)
    assert torch.equal(logits(strategy, run.data), logits(run.trainer.strategy, run.data))


def test_a_plain_checkpoint_is_trained_on(make_session, tmp_path):
    torch.manual_seed(3)
    data, theirs = dataset(), job().model.build(dataset().schema, 4, None)
    save_file({name: value.half() for name, value in theirs.state_dict().items()}, tmp_path / "model.safetensors")
    session = make_session(2)
    import_state(tmp_path / "model.safetensors", job(), data.schema, session)
    trainer = Trainer(job(), data, Session(session.client), WorkerGroup())
    want = plain_logits(job(), data, {name: value.half().float() for name, value in theirs.state_dict().items()})
    torch.testing.assert_close(logits(trainer.strategy, data), want)


def test_all_that_does_not_fit_is_named_before_anything_is_changed(make_session, tmp_path):
    state = {name: value.clone() for name, value in job().model.build(dataset().schema, 4, None).state_dict().items()}
    del state["output.bias"]
    state["embedding.weight"] = torch.zeros(IDS, 8)
    state["output.extra"] = torch.zeros(1)
    save_file(state, tmp_path / "model.safetensors")
    session = make_session(1)
    with pytest.raises(CannotImport) as raised:
        import_state(tmp_path / "model.safetensors", job(), dataset().schema, session)
    text = str(raised.value)
    assert f"embedding.weight has shape ({IDS}, 8), the model's is ({IDS}, 4)" in text
    assert "output.bias (1,) is missing" in text
    assert "output.extra (1,) is not in the model" in text
    assert not session.client.status()[0].tables


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no such file"), (b"", "no safetensors file"), (b"\x80\x04pickle", "no safetensors file")],
    ids=["missing", "empty", "pickle"],
)
def test_a_file_of_another_kind_is_refused(make_session, tmp_path, content, words):
    path = tmp_path / "model.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EmbershardError, match=rf"cannot import .*model.safetensors: {words}"):
        import_state(path, job(), dataset().schema, make_session(1))


@pytest.mark.parametrize("section", ["embedding", "dense"])
def test_a_group_that_fits_nothing_is_named_before_anything_is_changed(make_session, tmp_path, section):
    save_file(dict(job().model.build(dataset().schema, 4, None).state_dict()), tmp_path / "model.safetensors")
    group = {"match": "embeding*", "optimizer": {"name": "sgd", "lr": 0.1}}
    given = job().model_dump()
    other = Job.model_validate({**given, section: {**given[section], "groups": [group]}})
    session = make_session(1)
    with pytest.raises(JobError, match=rf"{section}\.groups: .*embeding"):
        import_state(tmp_path / "model.safetensors", other, dataset().schema, session)
    assert not session.client.status()[0].tables


def test_whole_numbers_are_no_weights(make_session, tmp_path):
    state = dict(job().model.build(dataset().schema, 4, None).state_dict())
    state["embedding.weight"] = torch.zeros(IDS, 4, dtype=torch.int32)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CannotImport, match=r"embedding\.weight holds I32, the model floats"):
        import_state(tmp_path / "model.safetensors", job(), dataset().schema, make_session(1))
