"""`embershard train` before any worker starts."""

import logging
from datetime import timedelta
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from embershard.cli import app as cli
from embershard.cli import train as command
from embershard.deploy.workers import WorkerFailed
from embershard.proto.errors import CannotWrite, ShardUnavailable
from embershard.worker.client import connections as links
from embershard.worker.client.client import Client

JOB = """\
model: {name: lr}
data: {reader: clicks, eval_samples: 1000}
embedding: {optimizer: {name: sgd, lr: 0.1}}
train: {batch_size: 64, samples: 1_000}
"""


def test_that_nobody_serves_at_an_address_is_said_while_it_waits_and_no_worker_starts(tmp_path, monkeypatch, caplog):
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.setattr(links, "_SILENT_WAIT", timedelta(0))
    connect = Client.connect
    monkeypatch.setattr(Client, "connect", lambda addresses: connect(addresses, timeout=timedelta(seconds=0.2)))
    monkeypatch.setattr(command, "LocalWorkers", None)
    words = ["train", str(tmp_path / "job.yaml"), "--ps", "127.0.0.1:1", "--output", str(tmp_path / "run")]
    with caplog.at_level(logging.WARNING):
        result = CliRunner().invoke(cli.app, words)
    assert isinstance(result.exception, ShardUnavailable)
    assert "the server at 127.0.0.1:1" in str(result.exception)
    (record,) = caplog.records
    assert record.getMessage().startswith("waiting for the server at 127.0.0.1:1 (")


@pytest.mark.parametrize(("free", "named"), [(0, CannotWrite), (2**30, WorkerFailed)])
def test_a_run_that_ended_on_a_full_disk_names_it_on_the_terminal(tmp_path, monkeypatch, free, named):
    (tmp_path / "job.yaml").write_text(JOB)

    def run(*_, **__):
        raise WorkerFailed(worker=0, how="exit code 1", log="worker-0.log", lines="(nothing)")

    monkeypatch.setattr(command, "_run", run)
    monkeypatch.setattr(command.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    result = CliRunner().invoke(cli.app, ["train", str(tmp_path / "job.yaml"), "--output", str(tmp_path / "run")])
    assert type(result.exception) is named
