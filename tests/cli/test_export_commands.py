"""`embershard export` and `embershard import` as people call them, over shards in this process."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from embershard.cli import import_ as import_command
from embershard.cli.app import app
from embershard.local_shards import local
from embershard.proto.errors import BadAddress, SnapshotNotFound
from embershard.worker.checkpoint.checkpoint import OtherJob
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.job.load import load_job
from embershard.worker.session.session import Session
from embershard.worker.trained.export import CannotExport
from embershard.worker.trained.onnx import ExportNotInstalled
from embershard.worker.training.trainer import Trainer

JOB = """\
model: {name: deepfm, hidden: [8], batch_norm: true}
data: {reader: ctr_csv, train: clicks.csv, valid: clicks.csv, ids: global}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.1}}
train: {batch_size: 50, epochs: 2}
"""


@pytest.fixture
def job(tmp_path):
    """A job file with its data."""
    torch.set_num_threads(1)
    draw = random.Random(0)
    lines = [
        f"{draw.random() < 0.2 + 0.6 * (u % 2)},{u},{10 + draw.randrange(10)}" for u in range(10) for _ in range(30)
    ]
    text = "\n".join(["label,user,item", *lines]).replace("True", "1").replace("False", "0")
    (tmp_path / "clicks.csv").write_text(text + "\n")
    path = tmp_path / "job.yaml"
    path.write_text(f"{JOB}checkpoint: {{folder: {tmp_path / 'checkpoints'}}}\n")
    return path


def train(job: Path, *overrides: str, session: Session | None = None) -> None:
    settings = load_job(job, overrides)
    Trainer(settings, settings.data.open(job.parent, 0), session, WorkerGroup()).run()


def embershard(*words: object) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_checkpoint_is_exported_whole(job, tmp_path):
    pytest.importorskip("onnxscript")
    with local(2) as session:
        train(job, session=session)
    result = embershard("export", tmp_path / "checkpoints", job, tmp_path / "out", "--onnx", "--int8")
    assert result.exit_code == 0, result.output
    assert f"{tmp_path}/out/model.safetensors: embedding, 20 rows of 4" in result.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "model.safetensors", "trained.safetensors", "export.json", "dense.onnx", "dense.int8.safetensors"
    }  # fmt: skip
    assert "valid auc: 0." in result.output
    assert abs(json.loads(result.output.splitlines()[-1])["int8_difference"]["valid"]) < 0.05

    settings = load_job(job)
    model = settings.model.build(settings.data.open(tmp_path, 0).schema, settings.dim, None)
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=True)
    assert int(model.get_buffer("deep.1.num_batches_tracked")) == 12  # batch norm's, which are the worker's


def test_a_run_without_shards_is_exported_too(job, tmp_path):
    train(job, "strategy=local")
    result = embershard("export", tmp_path / "checkpoints", job, tmp_path / "out", "--set", "strategy=local", "--int8")
    assert result.exit_code == 0, result.output
    assert load_file(tmp_path / "out" / "model.safetensors")["embedding.weight"].shape == (20, 4)


def test_a_plain_export_leaves_no_dense_part_of_the_one_before(job, tmp_path):
    train(job, "strategy=local")
    out = tmp_path / "out"
    embershard("export", tmp_path / "checkpoints", job, out, "--set", "strategy=local", "--int8")
    (out / "dense.onnx").write_bytes(b"of other weights")
    (out / "mine.txt").write_text("kept")
    embershard("export", tmp_path / "checkpoints", job, out, "--set", "strategy=local")
    assert {path.name for path in out.iterdir()} == {"model.safetensors", "export.json", "mine.txt"}


def test_what_cannot_be_removed_of_an_earlier_export_is_named(job, tmp_path):
    train(job, "strategy=local")
    out = tmp_path / "out"
    (out / "dense.onnx").mkdir(parents=True)
    with pytest.raises(CannotExport, match=f"{out}/dense.onnx: "):
        embershard("export", tmp_path / "checkpoints", job, out, "--set", "strategy=local")


def test_what_was_exported_is_imported(job, tmp_path, monkeypatch):
    with local(2) as session:
        train(job, session=session)
    embershard("export", tmp_path / "checkpoints", job, tmp_path / "out")
    fresh = local(1)
    monkeypatch.setattr(import_command, "connect", lambda addresses: fresh)
    result = embershard("import", tmp_path / "out", job, "127.0.0.1:7700")
    assert result.exit_code == 0, result.output
    assert "table embedding: 20 rows" in result.output
    table = next(table for table in fresh.tables if table.spec.name == "embedding")
    weight = load_file(tmp_path / "out" / "model.safetensors")["embedding.weight"]
    assert torch.equal(table.pull(torch.arange(20)), weight)


def test_sources_that_are_none_are_named(job, tmp_path):
    with pytest.raises(BadAddress, match="'nowhere' is not the address of a shard"):
        embershard("export", "nowhere", job, tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SnapshotNotFound, match="empty holds no snapshot"):
        embershard("export", tmp_path / "empty", job, tmp_path / "out")
    train(job, "strategy=local")
    with pytest.raises(OtherJob, match="strategy is 'ps' here and 'local' there"):
        embershard("export", tmp_path / "checkpoints", job, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_onnx_without_its_packages_says_what_to_install(job, monkeypatch):
    monkeypatch.setattr("embershard.worker.trained.onnx.find_spec", lambda name: None)
    with pytest.raises(ExportNotInstalled, match=r"needs onnx and onnxscript: pip install 'embershard\[export\]'"):
        embershard("export", "127.0.0.1:7700", job, "out", "--onnx")
