"""`embershard export` and `embershard import` as people call them, over shards in this process."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from embershard.cli import export as export_command
from embershard.cli import import_ as import_command
from embershard.cli import source as source_command
from embershard.cli.app import app
from embershard.cli.folders import FolderTaken, kept_from_others
from embershard.local_shards import local
from embershard.proto.errors import SnapshotNotFound
from embershard.worker.checkpoint.checkpoint import OtherJob
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.job.load import load_job
from embershard.worker.trained.export import CannotExport
from embershard.worker.trained.folder import write_facts
from embershard.worker.trained.import_weights import CannotImport
from embershard.worker.trained.onnx import ExportNotInstalled
from embershard.worker.training.trainer import Trainer

JOB = """\
model: {name: deepfm, hidden: [8], batch_norm: true}
data: {reader: ctr_csv, train: clicks.csv, valid: clicks.csv, ids: global}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.1}}
train: {batch_size: 50, epochs: 2}
checkpoint: {folder: checkpoints}
"""
LOCAL = ("--set", "strategy=local")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A job file with its data, here."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    pairs = [(user, 10 + draw.randrange(10)) for user in range(10) for _ in range(30)]
    lines = [f"{int(draw.random() < 0.2 + 0.6 * (user % 2))},{user},{item}" for user, item in pairs]
    (tmp_path / "clicks.csv").write_text("\n".join(["label,user,item", *lines, ""]))
    (tmp_path / "job.yaml").write_text(JOB)


def train(*overrides, session=None):
    job = load_job(Path("job.yaml"), overrides)
    Trainer(job, job.data.open(Path(), 0), session, WorkerGroup()).run()


def embershard(*words):
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def export(*words, source="checkpoints"):
    return embershard("export", "job.yaml", source, "out", *words)


def in_out():
    return {path.name for path in Path("out").iterdir()}


def test_a_checkpoint_is_exported_whole_and_imported(monkeypatch):
    with local(2) as session:
        train(session=session)

    def export_onnx(part, schema, out):  # which takes a quarter of a minute, and is tested in worker/trained
        (out / "dense.onnx").touch()
        return out / "dense.onnx"

    monkeypatch.setattr(export_command, "export_onnx", export_onnx)
    output = export("--onnx", "--int8")
    assert "out/model.safetensors: embedding, 20 rows of 4" in output
    dense = {"dense.onnx", "dense.int8.safetensors"}
    assert in_out() == {"model.safetensors", "trained.safetensors", "export.json", *dense}
    assert "valid auc: 0." in output
    assert abs(json.loads(output.splitlines()[-1])["int8_difference"]["valid"]) < 0.05

    settings = load_job(Path("job.yaml"))
    model = settings.model.build(settings.data.open(Path(), 0).schema, settings.dim, None)
    weights = load_file("out/model.safetensors")
    model.load_state_dict(weights, strict=True)
    assert int(model.get_buffer("deep.1.num_batches_tracked")) == 12  # batch norm's, which are the worker's

    fresh = local(1)
    monkeypatch.setattr(fresh.client, "close", lambda **_: None)  # what the command has put there is read below
    monkeypatch.setattr(import_command, "connect", lambda addresses, tls: fresh)
    assert "table embedding: 20 rows" in embershard("import", "job.yaml", "out", "--ps", "127.0.0.1:7700")
    (table,) = (table for table in fresh.tables if table.spec.name == "embedding")
    assert torch.equal(table.pull(torch.arange(20)), weights["embedding.weight"])


def test_an_export_that_is_not_whole_or_of_other_values_is_not_imported(monkeypatch):
    feature = "data={reader: tabular, train: clicks.csv, label: label}", "features={user: {}, item: {min_count: 1}}"
    job = [word for setting in feature for word in ("--set", setting)]
    with local(1) as session:
        train(*feature, session=session)
    export(*job)
    fresh = local(1)
    monkeypatch.setattr(import_command, "connect", lambda addresses, tls: fresh)
    load = "import", "job.yaml", "out", "--ps", "127.0.0.1:7700", *job
    lines = Path("clicks.csv").read_text()
    Path("clicks.csv").write_text(lines.replace(",1", ",2"))  # as many items, and none of those before
    with pytest.raises(CannotImport, match="its ids of item are of other values"):
        embershard(*load)
    Path("clicks.csv").write_text(lines)
    swapped = "--set", "features={item: {min_count: 1}, user: {}}"
    with pytest.raises(CannotImport, match=r"columns are in another order .item, user; then user, item. than in it"):
        embershard(*load[: -len(job)], *job[:2], *swapped)
    data = bytearray(Path("out/tables.safetensors").read_bytes())
    data[-1] ^= 1
    Path("out/tables.safetensors").write_bytes(data)
    with pytest.raises(CannotImport, match=r"out/tables\.safetensors: its sha256"):
        embershard(*load)
    Path("out/export.json").unlink()
    with pytest.raises(CannotImport, match="one that did not end"):
        embershard(*load)
    assert not fresh.tables


def test_an_export_of_hashed_columns_with_other_names_is_not_imported(monkeypatch):
    hashed = "--set", "data.ids=hashed"
    with local(1) as session:
        train(hashed[1], session=session)
    export(*hashed)
    Path("clicks.csv").write_text(Path("clicks.csv").read_text().replace("user", "user_id"))
    fresh = local(1)
    monkeypatch.setattr(import_command, "connect", lambda addresses, tls: fresh)
    with pytest.raises(CannotImport, match="column 'user_id' of the job's files is called 'user' in it, and the id of"):
        embershard("import", "job.yaml", "out", "--ps", "127.0.0.1:7700", *hashed)
    Path("clicks.csv").write_text(Path("clicks.csv").read_text().replace("user_id,item", "item,user"))
    with pytest.raises(CannotImport, match=r"columns are in another order .item, user; then user, item. than in it"):
        embershard("import", "job.yaml", "out", "--ps", "127.0.0.1:7700", *hashed)
    assert not fresh.tables


def test_a_plain_export_of_a_checkpoint_reads_no_table_into_memory(monkeypatch):
    with local(2) as session:
        train(session=session)
    export("--int8")  # which evaluates
    whole = {path.name: path.read_bytes() for path in Path("out").glob("[mt]*.safetensors")}
    monkeypatch.setattr(source_command, "restore_snapshot", None)  # which cannot be called
    export()
    assert {path.name: path.read_bytes() for path in Path("out").glob("*.safetensors")} == whole


def test_a_run_without_shards_is_exported_and_a_plain_export_leaves_no_dense_part_of_the_one_before():
    train("strategy=local")
    export(*LOCAL, "--int8")
    assert "dense.int8.safetensors" in in_out()
    Path("out/dense.onnx").write_bytes(b"of other weights")
    Path("out/mine.txt").write_text("kept")
    export(*LOCAL)
    assert in_out() == {"model.safetensors", "export.json", "mine.txt"}
    assert load_file("out/model.safetensors")["embedding.weight"].shape == (20, 4)
    Path("out/dense.onnx").mkdir()
    with pytest.raises(CannotExport, match=r"out/dense\.onnx: "):
        export(*LOCAL)


READS_A_WEIGHT = """
import torch
class ReadsAWeight(torch.nn.Module):
    def __init__(self, num_ids):
        super().__init__()
        self.rows, self.head = torch.nn.Embedding(num_ids, 4), torch.nn.Linear(4, 1)
    def forward(self, ids):
        return self.rows(ids).sum(1) @ (2 * self.head.weight).T
"""


def test_a_model_that_reads_a_linear_layers_weight_is_not_written_in_int8(monkeypatch):
    monkeypatch.syspath_prepend(Path.cwd())
    Path("reads_a_weight.py").write_text(READS_A_WEIGHT)
    job = (*LOCAL, "--set", "model={class: reads_a_weight:ReadsAWeight}")
    train(*job[1::2])
    with pytest.raises(CannotExport, match=r"`weight` is no tensor, .*leave --int8 out"):
        export(*job, "--int8")
    assert in_out() == set()


def test_an_export_that_fails_leaves_the_one_before_and_nothing_else(monkeypatch):
    train("strategy=local")
    export(*LOCAL)
    before = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    Path("out/.embershard-unfinished-killed").mkdir()  # by a signal, in an earlier export

    def fail(folder, facts):
        (folder / "export.json").mkdir()
        write_facts(folder, facts)

    monkeypatch.setattr(export_command, "write_facts", fail)
    with pytest.raises(CannotExport, match=r"cannot write out/export\.json: Is a directory"):
        export(*LOCAL)
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == before


def test_two_exports_do_not_write_to_one_folder_at_once():
    train("strategy=local")
    with kept_from_others({"OUT": "out"}), pytest.raises(FolderTaken):
        export(*LOCAL)
    assert in_out() == set()
    export(*LOCAL)


def test_sources_that_are_none_are_named():
    with pytest.raises(SnapshotNotFound, match="there is no such folder"):
        export(source="nowhere")
    Path("empty").mkdir()
    with pytest.raises(SnapshotNotFound, match="no checkpoint in it either"):
        export(source="empty")
    train("strategy=local")
    with pytest.raises(OtherJob, match="strategy is 'ps' here and 'local' there"):
        export()
    assert not Path("out").exists()


def test_onnx_without_its_packages_says_what_to_install(monkeypatch):
    monkeypatch.setattr("embershard.worker.trained.onnx.find_spec", lambda name: None)
    with pytest.raises(ExportNotInstalled, match=r"pip install 'embershard\[export\]'"):
        embershard("export", "job.yaml", "out", "--ps", "127.0.0.1:7700", "--onnx")


def test_a_file_that_is_no_state_is_refused_before_shards_are_asked(monkeypatch):
    monkeypatch.setattr(import_command, "connect", None)
    for name, reason in (("none.safetensors", "no such file"), ("clicks.csv", "no safetensors file")):
        with pytest.raises(CannotImport, match=f"{name}: {reason}"):
            embershard("import", "job.yaml", name, "--ps", "127.0.0.1:7700")
