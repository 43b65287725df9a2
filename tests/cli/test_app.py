"""The `embershard` command: what it imports, how it exits, and what small commands make of their options."""

import errno
import json
import logging
import math
import os
import subprocess
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import typer
from report_cases import JOB
from typer.testing import CliRunner

from embershard.cli import app as cli
from embershard.cli import evaluate, local_job, main, monitoring, signals, train, up
from embershard.cli.dash import NoPanel
from embershard.cli.sizes import memory_bytes
from embershard.cli.source import Source
from embershard.deploy.workers import WorkerFailed
from embershard.proto.errors import (
    BadCertificate,
    CannotWrite,
    JobError,
    OutputClosed,
    ShardUnavailable,
    TracingNotInstalled,
    UnknownTable,
)
from embershard.proto.monitoring import memory
from embershard.worker.checkpoint import checkpoint
from embershard.worker.client import shard_connection
from embershard.worker.client.client import Client
from harness.eventually import eventually
from harness.processes import EMBERSHARD, run_command

HELP = """
import sys
sys.argv = ["embershard", "--help"]
from embershard.cli import main
try:
    main()
finally:
    print("heavy:", *{"torch", "pyarrow", "torchmetrics"} & set(sys.modules))
"""


def test_the_list_of_commands_imports_none_of_them():
    said = subprocess.check_output([sys.executable, "-c", HELP], text=True, timeout=250)
    assert said.splitlines()[-1] == "heavy:"


def test_a_worker_ends_with_its_launcher_from_before_its_imports_on(monkeypatch):
    called = []

    def load(name):
        called.append(name)
        sys.exit(0)

    monkeypatch.setattr(signals, "end_with_parent", lambda pid, end: called.append(pid))
    monkeypatch.setattr(cli, "_load", load)
    for words in (["worker", "job.yaml", "--parent-pid", "77"], ["worker", "job.yaml", "--parent-pid", "x"]):
        assert CliRunner().invoke(cli.app, words).exit_code == 0
    assert called == [77, "worker", "worker"]


@pytest.mark.parametrize("module", ["embershard", "embershard.cli"])
def test_the_command_line_runs_as_a_module(module):
    words = [sys.executable, "-m", module, "tokens"]
    said = subprocess.run(words, text=True, timeout=250, capture_output=True)
    assert (said.returncode, said.stdout) == (2, "")  # wrong usage: there is no such command
    assert f"python -m {module}" in said.stderr


def test_a_command_that_does_not_exist_is_answered_by_the_nearest_that_does():
    done = CliRunner().invoke(cli.app, ["trian", "job.yaml"])
    assert (done.exit_code, "Did you mean 'train'" in done.output) == (2, True)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_a_help_page(name):
    done = CliRunner().invoke(cli.app, [name, "--help"])
    assert done.exit_code == 0, done.output
    assert f"{name} [OPTIONS]" in done.output
    assert "--install-completion" not in done.output  # an option of `embershard` alone


def test_every_option_for_shards_names_the_ways_to_give_their_addresses():
    group = typer.main.get_command(cli.app)
    commands = {name: group.resolve_command(None, [name])[1] for name in cli.COMMANDS}
    for name, command in list(commands.items()):
        commands |= {f"{name} {part}": own for part, own in getattr(command, "commands", {}).items()}
    helps = {name: own.help for name, command in commands.items() for own in command.params if own.name == "ps"}
    assert {"train", "worker", "compare", "dash", "compression set"} <= helps.keys()
    assert [name for name, said in helps.items() if "host:port" not in said or "file:DIR" not in said] == []


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (UnknownTable(table="t", known="none"), 1, "error: no table 't' here"),
        (KeyboardInterrupt(), 130, ""),
        (BlockingIOError(errno.EAGAIN, "busy"), 1, "error: the system gives this command no more processes: raise the"),
        (OSError(errno.EMFILE, "too many"), 1, "error: the system gives this command no more open files: raise the"),
        (RuntimeError("can't start new thread"), 1, "error: the system gives this command no more threads and"),
        (OSError(errno.EFBIG, "too large", "a"), 1, "error: cannot write to a: too large; raise the limit on"),
        (OSError(errno.EACCES, "denied", "a"), 1, "error: cannot use a: denied; name another place, or correct that"),
    ],
)
def test_errors_are_messages_and_exit_codes(raised, code, words, monkeypatch, capsys):
    def fail():
        raise raised

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == code
    assert words in capsys.readouterr().err


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A command in a folder with a job."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    return lambda *words: CliRunner().invoke(cli.app, words)


@pytest.mark.parametrize(("port", "shards"), [("65535", "2"), ("65000", "537")])
def test_a_base_port_without_room_for_the_shards_is_wrong_usage(run, port, shards, monkeypatch):
    monkeypatch.setattr(up, "signal", None)  # whoever comes so far would change this process
    done = run("up", "--base-port", port, "--shards", shards)
    assert done.exit_code == 2
    assert f"no {shards} ports" in done.output


def test_that_nobody_serves_at_an_address_is_said_while_it_waits_and_no_worker_starts(run, monkeypatch, caplog):
    monkeypatch.setattr(shard_connection, "_SILENT_WAIT", timedelta(0))
    connect = Client.connect
    soon = timedelta(seconds=0.2)
    monkeypatch.setattr(Client, "connect", lambda addresses, **_: connect(addresses, timeout=soon))
    monkeypatch.setattr(local_job, "LocalWorkers", None)
    with caplog.at_level(logging.WARNING):
        error = run("train", "job.yaml", "--ps", "127.0.0.1:1", "--output", "out").exception
    assert isinstance(error, ShardUnavailable)
    assert error.fields["address"] == "127.0.0.1:1"
    (record,) = caplog.records
    assert record.getMessage().startswith("waiting for the server at 127.0.0.1:1 (")


def test_a_job_whose_panel_cannot_be_served_says_so_before_it_reads_its_data(run, monkeypatch, tmp_path):
    def refuse():
        raise NoPanel(what="the panel", package="starlette", extra="dash")

    monkeypatch.setattr(train, "check_panel", refuse)
    monkeypatch.setattr(train, "load_job", None)
    assert isinstance(run("train", "job.yaml", "--dash", "--output", "out").exception, NoPanel)
    assert not (tmp_path / "out").exists()


def test_certificates_that_are_missing_are_named_before_anything_starts(run, monkeypatch, tmp_path):
    monkeypatch.setattr(local_job.LocalJob, "train", None)
    error = run("train", "job.yaml", "--tls", "nothing", "--output", "out").exception
    assert isinstance(error, BadCertificate)
    assert error.fields["path"] == "nothing/tls.crt"
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


def test_a_job_that_does_not_begin_leaves_no_folder_of_its_own(run, monkeypatch, tmp_path):
    (tmp_path / "mine").mkdir()
    data = "data={reader: ctr_csv, train: gone.csv}"
    for words in ((), ("--output", "a/b"), ("--output", "mine")):
        assert isinstance(run("train", "job.yaml", "--set", data, *words).exception, JobError)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml", "mine"]

    def refuse(*_, **__):
        raise JobError(where="data", reason="no rows")

    monkeypatch.setattr(train, "_preprocessing", refuse)
    assert isinstance(run("train", "job.yaml").exception, JobError)
    assert not (tmp_path / "runs").exists()


INTERRUPTED = [
    ((), None, "the workers and shards have ended. No checkpoint was written; to keep some, name checkpoint.folder"),
    ((), 40, "from {0}/out/best/x (step 40): embershard train job.yaml --resume out/best"),
    (("--set", "checkpoint.folder=kept"), None, "No checkpoint was written\n"),
    (("--set", "checkpoint.folder=kept"), 40, "from {0}/kept/x (step 40): embershard train job.yaml --resume latest"),
    (("--set", "strategy=local"), None, "the workers have ended. No checkpoint"),
    (("--ps", "127.0.0.1:1"), None, "the workers have ended; the shards at 127.0.0.1:1 run on. No checkpoint"),
]


@pytest.mark.parametrize(("words", "step", "said"), INTERRUPTED)
def test_an_interrupt_says_what_has_ended_what_is_kept_and_how_to_go_on(run, monkeypatch, tmp_path, words, step, said):
    def interrupt(*_):
        raise KeyboardInterrupt

    def found(place):
        manifest = SimpleNamespace(step=step, time=time.time())
        return None if step is None else SimpleNamespace(url=f"{os.path.abspath(place)}/x", manifest=manifest)

    monkeypatch.setattr(local_job.LocalJob, "train", interrupt)
    monkeypatch.setattr(checkpoint, "checkpoint_at", found)
    monkeypatch.setattr(sys, "argv", ["embershard", "train", "job.yaml", "--resume", "before"])
    done = run("train", "job.yaml", "--output", "out", *words)
    assert done.exit_code == 130
    (line,) = (line for line in done.output.splitlines(keepends=True) if line.startswith("interrupted: "))
    assert said.format(tmp_path) in line


@pytest.mark.parametrize(("free", "named"), [(0, CannotWrite), (2**30, WorkerFailed)])
def test_a_run_that_ended_on_a_full_disk_names_it_on_the_terminal(run, monkeypatch, free, named):
    def fail(*_, **__):
        raise WorkerFailed(worker=0, how="exit code 1", log="worker-0.log", lines="(nothing)")

    monkeypatch.setattr(local_job.LocalJob, "train", fail)
    monkeypatch.setattr(train.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    assert type(run("train", "job.yaml", "--output", "out").exception) is named


@pytest.mark.parametrize("free", [0, 2**30])
@pytest.mark.parametrize("reads", ["nobody", "a pipe", "a file"])
def test_a_worker_that_could_not_write_to_stdout_is_no_failed_worker(run, monkeypatch, tmp_path, reads, free):
    def fail(*_, **__):
        raise WorkerFailed(worker=0, how="exit code 1", log="worker-0.log", lines="(nothing)")

    monkeypatch.setattr(local_job.LocalJob, "train", fail)
    monkeypatch.setattr(
        train.shutil, "disk_usage", lambda place: SimpleNamespace(free=free if isinstance(place, int) else 2**30)
    )
    reader, writer = os.pipe()
    if reads == "nobody":
        os.close(reader)
    before, place = os.dup(1), os.open(tmp_path / "said", os.O_WRONLY | os.O_CREAT) if reads == "a file" else writer
    os.dup2(place, 1)
    try:
        error = run("train", "job.yaml", "--output", "out").exception
    finally:
        os.dup2(before, 1)
    named = {"nobody": OutputClosed, "a pipe": WorkerFailed, "a file": WorkerFailed if free else CannotWrite}
    assert type(error) is named[reads]


def test_a_figure_that_is_not_defined_is_null(run, monkeypatch):
    figures = {"valid": {"auc": math.nan, "logloss": 0.5}}  # of a split with one class alone
    monkeypatch.setattr(evaluate, "trained_evaluator", lambda *_, **__: SimpleNamespace(evaluate=lambda: figures))
    monkeypatch.setattr(evaluate, "open_source", lambda *_, **__: Source(None, None, None))
    done = run("evaluate", "job.yaml", "--ps", "127.0.0.1:1")
    assert done.exit_code == 0, done.output
    assert "NaN" not in done.output
    assert json.loads(done.output)["valid"] == {"auc": None, "logloss": 0.5}


@pytest.mark.parametrize(
    ("text", "size"),
    [("1048576", 2**20), ("4GiB", 4 * 2**30), ("500MB", 500 * 10**6), (" 1.5 gib ", 3 * 2**29), ("2TB", 2 * 10**12)],
)
def test_a_size_has_a_unit_of_1000_or_of_1024(text, size):
    assert memory_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "4 giga", "nan", "10", "1e9", "99999999999TiB", "101 %"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(typer.BadParameter):
        memory_bytes(text)


@pytest.mark.parametrize("limit", [2**28, 2**62, None])
def test_a_part_is_of_the_containers_limit_or_else_of_the_machine(monkeypatch, limit):
    monkeypatch.setattr(memory, "smallest_memory_limit", lambda: limit)
    machine = memory.physical_memory()
    assert memory_bytes("40%") == int(40 * 0.01 * min(limit or machine, machine))


@pytest.mark.parametrize("words", [("--log-format", "json"), ("--log-format=json", "--shard", "9", "--of", "2")])
def test_wrong_usage_is_a_line_of_json_where_the_log_is(words):
    done = run_command("ps", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--shard" in json.loads(done.stderr)["event"]


def test_a_help_page_shows_the_defaults_that_its_texts_name(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    said = CliRunner().invoke(cli.app, ["export", "--help"]).output
    assert "[default: the shards of --ps]" in said
    assert "[required]" in next(line for line in said.splitlines() if " OUT " in line and "Folder" in line)


def test_a_shard_whose_output_is_closed_ends_when_it_is_told_to(tmp_path):
    address = tmp_path / "socket"
    words = [*EMBERSHARD, "ps", "--shard", "0", "--of", "1", "--listen", f"unix:{address}"]
    shard = subprocess.Popen(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words])
    try:
        eventually(address.exists)
        shard.terminate()
        assert shard.wait(timeout=60) == 0
    finally:
        shard.kill()
        shard.wait()


def test_a_current_folder_that_was_removed_is_named(tmp_path):
    words = 'mkdir gone; cd gone; rmdir ../gone; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", words, "sh", *EMBERSHARD, "status"], cwd=tmp_path, text=True, timeout=250, capture_output=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: the current folder was removed")


@pytest.mark.parametrize("name", ["a\x1b[31mb", "a\nb", "a\udcffb"])
def test_a_folder_whose_name_nothing_can_show_is_refused(run, tmp_path, name):
    error = run("train", "job.yaml", "--output", name).exception
    assert isinstance(error, CannotWrite)
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


@pytest.mark.parametrize(("value", "code"), [("banana", 1), ("", 0), ("ON", 0), ("off", 0)])
def test_a_variable_with_a_value_that_it_cannot_have_is_refused(value, code):
    done = run_command("--version", env={**os.environ, "EMBERSHARD_SHARED_MEMORY": value})
    assert done.returncode == code
    assert ("EMBERSHARD_SHARED_MEMORY" in done.stderr) is bool(code)


def test_a_locale_without_the_characters_of_a_name_ends_no_command(tmp_path):
    (tmp_path / "日本.csv").write_text("label,ü\n1,2\n0,3\n1,4\n", encoding="utf-8")
    words = ("manifests", "kubernetes", "--name", "a", "--image", "e", "--job", "日.yaml")
    for encoding, command in (("latin1", ("init", "日本.csv", "-o", "日.yaml")), ("ascii:strict", words)):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        done = run_command(*command, cwd=tmp_path, env=environment, encoding="utf-8")
        assert (done.returncode, done.stderr) == (0, "")
    assert "日本.csv" in (tmp_path / "日.yaml").read_text(encoding="utf-8")
    assert "日本.csv" in done.stdout


def test_a_job_file_is_utf_8_whatever_the_locale_is(tmp_path):
    (tmp_path / "rows.csv").write_text("läbel,ü\n1,2\n0,3\n1,4\n", encoding="utf-8")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run_command("init", "rows.csv", "-o", "job.yaml", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "läbel" in (tmp_path / "job.yaml").read_text(encoding="utf-8")
    os.rename(os.fsencode(tmp_path / "rows.csv"), os.path.join(os.fsencode(tmp_path), "ü.csv".encode()))
    done = run_command("init", "ü.csv", "-o", "other.yaml", cwd=tmp_path, env=environment)
    assert done.returncode == 1
    assert "LC_ALL=C.UTF-8" in done.stderr
    assert not (tmp_path / "other.yaml").exists()


@pytest.mark.parametrize("url", ["localhost:4318", "collector", "http://", "ftp://host:1", "http://host:port"])
@pytest.mark.parametrize(
    "command", [["train", "job.yaml"], ["worker", "job.yaml"], ["up"], ["ps", "--shard", "0", "--of", "1"]]
)
def test_a_collector_that_is_no_url_is_refused_before_anything_starts(command, url):
    done = CliRunner().invoke(cli.app, [*command, "--trace", url], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert f"'{url}' is no URL of a collector; write http://host:port" in done.output


def test_the_packages_of_tracing_are_looked_for_before_anything_starts(monkeypatch):
    monkeypatch.setattr(monitoring, "is_tracing_installed", lambda: False)
    done = CliRunner().invoke(cli.app, ["up", "--trace", "http://localhost:4318/"])
    assert isinstance(done.exception, TracingNotInstalled)
