"""`embershard compare`: what it refuses before anything runs, and how it ends where runs failed."""

import errno
import os
import sys

import pytest
from half_codec import HALF_CODEC
from report_cases import JOB
from typer.testing import CliRunner

from embershard.cli import app as cli
from embershard.cli import compare as command
from embershard.compare.results import read_results
from embershard.compare.run import netns as namespace
from embershard.compare.run import runs
from embershard.proto.errors import EmbershardError

OUT = ("--output", "out", "--seeds", "1")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A job is here, and every run of it fails at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(runs, "COMMAND", (sys.executable, "-S", "-c", "import sys; sys.exit('out of luck')"))
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def run(arms, *words, code=1):
    """What the command says, a space between words."""
    done = CliRunner().invoke(cli.app, ["compare", "job.yaml", *(["--arms", arms] if arms else []), *words])
    assert done.exit_code == code, done.output
    return " ".join((str(done.exception) if isinstance(done.exception, EmbershardError) else done.output).split())


@pytest.mark.parametrize(
    ("arms", "words", "said"),
    [
        ("none,zip", (), "there is no 'zip' (known: none, fp16s"),
        ("none,int8", ("--bandwidth", "100"), "'100' is no bandwidth: write a number with its unit"),
        ("none,int8", ("--bandwidth", "1gbit,1000mbit"), "1gbit and 1000mbit are the same"),
        ("none,int8", ("--seeds", "0"), "Invalid value for '--seeds'"),
        ("none,int8", ("--tune", "a"), "--tune must be numbers"),
        ("none,int8", ("--tune", "1,-2"), "--tune must be multiples above 0"),
        ("none,int8", ("--margin", "0"), "--margin must be above 0"),
        ("", (), "Missing option '--arms'"),
    ],
)
def test_wrong_words_say_what_is_wrong(arms, words, said, folder):
    assert said in run(arms, *words, code=2)
    assert not (folder / "runs").exists()


def kept(folder):
    return {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}


def test_a_report_of_a_folder_without_its_runs_is_refused_and_nothing_is_made(folder):
    said = run("none,int8", "--output", "typo", "--report-only")
    assert said.startswith("there are no runs in typo that this command can report; check --output and --arms")
    assert not (folder / "typo").exists()
    run("none,fp16s", *OUT)
    before = kept(folder)
    assert run("staleness=0,4", "--output", "out", "--report-only").startswith("there are no runs in out ")
    said = run("none,int8", "--set", "shards=3", "--output", "out")
    assert 'these differ: job.shards: 2 there, 3 now overrides: [] there, ["shards=3"]' in said
    assert kept(folder) == before


def test_a_comparison_whose_code_has_changed_is_refused(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for change, said in (("", "3 of 3 runs failed"), ("# changed\n", "code_sha256.mine_changing")):
        (folder / "mine_changing.py").write_text(HALF_CODEC + change)
        monkeypatch.delitem(sys.modules, "mine_changing", raising=False)
        assert said in run("none,mine_changing:half", "--import", "mine_changing", *OUT)


@pytest.mark.parametrize(("tool", "said"), [("/usr/sbin/ip", "needs root"), (None, "no `ip`; install iproute2")])
def test_namespaces_are_refused_with_the_reason(monkeypatch, tool, said):
    monkeypatch.setattr(namespace.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(namespace.shutil, "which", lambda _: tool)
    assert said in run("none,int8", "--netns")


def test_a_missing_package_is_named_before_anything_runs(monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'embershard[compare]'" in run("none,int8")


def test_failed_runs_end_it_with_exit_code_1_and_the_first_one_is_named(folder, monkeypatch):
    log = "out/runs/quality-none-seed0-unlimited/said.txt"
    words = ("job.yaml", "--arms", "none,fp16s", *OUT)
    for more in ((), ("--report-only",)):
        monkeypatch.setattr(command.sys, "argv", ["embershard", "compare", *words, *more])
        said = run("none,fp16s", *OUT, *more)
        assert f"2 of 2 runs failed twice; the first of them: none, seed 0, unlimited; its output: {log};" in said
        report = " ".join((folder / "out" / "report.md").read_text().split())
        assert f"The first of them: none, seed 0, unlimited; its output: `{log[4:]}`." in report
        # that of the runs, and not of the report
        assert read_results(folder / "out" / "results.json").command == ("embershard", "compare", *words)
    assert "out of luck" in (folder / log).read_text()


def test_a_report_that_a_full_disk_does_not_take_names_its_folder(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as write does, without the file's name

    monkeypatch.setattr(command, "write_results", full)
    assert run("none,fp16s", *OUT) == (
        "cannot write to out: No space left on device; mend that and repeat the command, which keeps the runs there"
    )
