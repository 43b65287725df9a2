"""Two jobs at a time in one folder: the second one is refused before it writes anything."""

import pytest
from typer.testing import CliRunner

from embershard.cli import app as cli
from embershard.cli import local_job
from embershard.cli.folders import FolderTaken, kept_from_others

JOB = """\
model: {name: lr}
data: {reader: clicks, eval_samples: 100, loader_processes: 0}
embedding: {optimizer: {name: sgd, lr: 0.1}}
train: {batch_size: 256, samples: 512}
"""


@pytest.mark.parametrize(("taken", "setting"), [("out", "--output"), ("checkpoints", "checkpoint.folder")])
def test_a_folder_that_a_job_writes_to_is_refused_to_another_job_until_it_ends(taken, setting, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.setattr(local_job.LocalJob, "train", lambda self, checkpoint: None)

    def train():
        words = ("train", "job.yaml", "--output", "out", "--set", "checkpoint.folder=checkpoints")
        return CliRunner().invoke(cli.app, words)

    with kept_from_others({"--output": taken}):
        refused = train().exception
    assert isinstance(refused, FolderTaken)
    assert (refused.fields["folder"], refused.fields["setting"]) == (taken, setting)
    assert train().exit_code == train().exit_code == 0


def test_one_folder_for_two_purposes_a_url_and_no_folder_are_left_to_a_job(tmp_path):
    folders = {"--output": tmp_path, "checkpoint.folder": f"{tmp_path}/../{tmp_path.name}"}
    with kept_from_others(folders), kept_from_others({"a": None, "b": "s3://bucket/x", "c": tmp_path / "none"}):
        pass


@pytest.mark.parametrize(
    ("command", "option"),
    [("up", "--log-dir"), ("up", "--audit"), ("ps", "--log-dir"), ("ps", "--audit"), ("ps", "--announce")],
)
def test_a_folder_without_a_name_is_not_the_current_one(command, option):
    result = CliRunner().invoke(cli.app, [command, option, ""])
    assert (result.exit_code, "it is empty" in result.output) == (2, True)


@pytest.mark.parametrize(
    "words", [("export", "job.yaml", "best"), ("train", "job.yaml", "--output"), ("compare", "job.yaml", "--output")]
)
def test_a_url_is_not_written_to_as_a_folder_with_a_colon_in_its_name(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    result = CliRunner().invoke(cli.app, [*words, "memory://out"])
    assert (result.exit_code, "is a URL" in result.output) == (2, True)
    assert {path.name for path in tmp_path.iterdir()} == {"job.yaml"}
