"""`embershard compare`: what it refuses before anything runs, and how it ends where runs failed."""

import errno
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from embershard.cli import app as cli
from embershard.cli import compare as command
from embershard.compare.results import read_results
from embershard.compare.run import netns as namespace
from embershard.compare.run import runs
from embershard.proto.errors import EmbershardError

JOB = """\
model: {name: dlrm, bottom: [16], hidden: [16]}
data: {reader: clicks, eval_samples: 3000}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.05}}
train: {batch_size: 256, samples: 10_000}
"""


@pytest.fixture(autouse=True)
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


@pytest.fixture
def failing(monkeypatch):
    """Every run fails at once."""
    monkeypatch.setattr(runs, "COMMAND", (sys.executable, "-c", "import sys; sys.exit('out of luck')"))


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["compare", *words])
    text = str(done.exception) if isinstance(done.exception, EmbershardError) else done.output
    return done.exit_code, " ".join(text.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--arms", "none,none"], "arm none: it is the same as none"),
        (["--arms", "none,zip"], "there is no 'zip' (known: none, fp16s"),
        (["--arms", "none,topk:0"], "its ratio must be above 0 and at most 1, got 0"),
        (["--arms", "none,push=onebit"], "a row that is exactly zero"),
        (["--arms", "none"], "needs at least two"),
        (["--arms", "none,int8", "--bandwidth", "100"], "'100' is no bandwidth: write a number with its unit"),
        (["--arms", "none,int8", "--bandwidth", "100mbit,fast"], "'fast' is no bandwidth"),
        (["--arms", "none,int8", "--bandwidth", "1gbit,1000mbit"], "1gbit and 1000mbit are the same"),
        (["--arms", "none,int8", "--seeds", "0"], "Invalid value for '--seeds'"),
        (["--arms", "none,int8", "--tune", "a"], "--tune must be numbers"),
        (["--arms", "none,int8", "--tune", "1,-2"], "--tune must be multiples above 0"),
        (["--arms", "none,int8", "--margin", "0"], "--margin must be above 0"),
        ([], "Missing option '--arms'"),
    ],
)
def test_wrong_words_say_what_is_wrong(words, said, tmp_path):
    code, output = run("job.yaml", *words)
    assert code == 2
    assert said in output
    assert not (tmp_path / "runs").exists()


def test_a_job_that_does_not_exist_is_named():
    code, output = run("none.yaml", "--arms", "none,int8")
    assert code == 1
    assert output.startswith("none.yaml: cannot be read: No such file or directory")


def test_mistakes_of_the_job_are_named_with_their_lines(job):
    job.write_text(JOB.replace("hidden", "hiden"))
    assert run("job.yaml", "--arms", "none,int8")[1].startswith("job.yaml:1: model.hiden: unknown field")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    code, output = run("job.yaml", "--arms", "none,int8", "--output", "file/out")
    assert code == 1
    assert "file/out" in output


@pytest.mark.usefixtures("failing")
def test_a_folder_of_another_comparison_is_refused_with_the_difference(tmp_path):
    run("job.yaml", "--arms", "none,int8", "--output", "out", "--seeds", "1")
    kept = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.json*")}
    code, output = run("job.yaml", "--arms", "none,int8", "--set", "shards=3", "--output", "out")
    assert code == 1
    assert (
        'holds another comparison; these differ: job.shards: 2 there, 3 now overrides: [] there, ["shards=3"]' in output
    )
    assert kept == {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.json*")}


@pytest.mark.usefixtures("failing")
def test_a_report_of_a_folder_without_its_runs_is_refused_and_nothing_is_made(tmp_path):
    code, output = run("job.yaml", "--arms", "none,int8", "--output", "typo", "--report-only")
    assert code == 1
    assert output.startswith("there are no runs in typo that this command can report; check --output and --arms")
    assert not (tmp_path / "typo").exists()
    run("job.yaml", "--arms", "none,fp16s", "--output", "out", "--seeds", "1")
    kept = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.*")}
    code, output = run("job.yaml", "--arms", "staleness=0,4", "--output", "out", "--report-only")
    assert code == 1
    assert output.startswith("there are no runs in out ")
    assert kept == {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.*")}


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    code, output = run("job.yaml", "--arms", "none,int8", "--output", str(tmp_path))
    assert code == 1
    assert "holds other files and no comparison" in output
    assert not (tmp_path / "experiment.json").exists()


def test_namespaces_are_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(namespace.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(namespace.shutil, "which", lambda tool: f"/usr/sbin/{tool}")
    code, output = run("job.yaml", "--arms", "none,int8", "--netns")
    assert code == 1
    assert "--netns cannot be used here: it needs root" in output
    monkeypatch.setattr(namespace.shutil, "which", lambda tool: None)
    assert "there is no `ip`; install iproute2" in run("job.yaml", "--arms", "none,int8", "--netns")[1]


def test_a_missing_package_is_named_before_anything_runs(monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'embershard[compare]'" in run("job.yaml", "--arms", "none,int8")[1]


@pytest.mark.usefixtures("failing")
def test_the_command_of_a_report_makes_the_runs(tmp_path, monkeypatch):
    words = ["job.yaml", "--arms", "none,int8", "--output", "out", "--seeds", "1"]
    run(*words)
    monkeypatch.setattr(command.sys, "argv", ["embershard", "compare", *words, "--report-only"])
    run(*words, "--report-only")
    assert read_results(tmp_path / "out" / "results.json").command == ("embershard", "compare", *words)


@pytest.mark.usefixtures("failing")
def test_failed_runs_end_it_with_exit_code_1_and_the_first_one_is_named(tmp_path):
    words = ("job.yaml", "--arms", "none,fp16s", "--seeds", "1", "--output", "out")
    log = "out/runs/quality-none-seed0-unlimited/said.txt"
    for more in ((), ("--report-only",)):
        code, output = run(*words, *more)
        assert code == 1
        assert f"2 of 2 runs failed twice; the first of them: none, seed 0, unlimited; its log: {log};" in output
        assert f"The first of them: none, seed 0, unlimited; its log: `{log[4:]}`." in report(tmp_path / "out")
    assert "out of luck" in (tmp_path / log).read_text()


@pytest.mark.usefixtures("failing")
def test_a_report_that_a_full_disk_does_not_take_names_its_folder(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as write does, without the file's name

    monkeypatch.setattr(command, "write_results", full)
    code, output = run("job.yaml", "--arms", "none,fp16s", "--seeds", "1", "--output", "out")
    assert code == 1
    assert output == "cannot write to out: No space left on device; choose another folder with --output"


def report(folder: Path) -> str:
    return " ".join((folder / "report.md").read_text().split())
