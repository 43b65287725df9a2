"""What a user can get wrong: each mistake ends by its deadline, with one error that says what, where and what to do."""

import gzip
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

import embershard.cli
from embershard.deploy.supervisor import LocalShards
from embershard.proto.errors import NotAShard, ShardUnavailable, WrongShards
from embershard.worker.client import connections as links
from embershard.worker.client.client import Client
from harness.processes import EMBERSHARD, run_command
from harness.raises import raises

JOB = """\
model: {name: fm}
data: {reader: ctr_csv, root: ., train: train.csv}
embedding: {dim: 4, optimizer: {name: sgd, lr: 0.1}}
train: {batch_size: 2, epochs: 1}
"""
CLICKS = """\
model: {name: lr}
data: {reader: clicks, eval_samples: 1000}
embedding: {optimizer: {name: sgd, lr: 0.1}}
train: {batch_size: 64, samples: 1_000_000_000}
"""
LINES = b"label,a,b\n1,x,2\n0,y,3\n1,x,4\n"
CUT_GZIP = gzip.compress(LINES, mtime=0)[:30]  # no time in it: it is part of a test's name
MEETING = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "EMBERSHARD_DATA")

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """The command line, in this process: exit code and stderr. Good data and good job files lie in its folder."""
    for name in MEETING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.csv").write_bytes(LINES)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "clicks.yaml").write_text(CLICKS)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["embershard", *words])
        code = 0
        try:
            embershard.cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        lines = capsys.readouterr().err.splitlines(keepends=True)
        # the first run after a change of a kernel says what it compiles
        return code, "".join(line for line in lines if not re.match(r"\d{4}-\d\d-\d\d .* compil", line))

    return call


def says(err: str, *words: str) -> None:
    """One line, an error, with these words."""
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    for word in words:
        assert word in err


class TestJobFiles:
    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (None, "bad.yaml: cannot be read: No such file"),
            (b"", "bad.yaml:1: a job is a mapping of sections"),
            (b"\xff\xfe\x00binary", "bad.yaml: cannot be read: not UTF-8 text"),
            (b"a: \x00", "bad.yaml:1: not YAML"),
            (b"model: [1, 2", "bad.yaml:1: not YAML"),
        ],
        ids=["missing", "empty", "binary", "zero byte", "cut"],
    )
    def test_a_file_that_is_no_job_is_named(self, run, tmp_path, content, words):
        if content is not None:
            (tmp_path / "bad.yaml").write_bytes(content)
        code, err = run("train", "bad.yaml")
        assert code == 1
        says(err, words)

    def test_a_folder_is_no_job(self, run, tmp_path):
        code, err = run("train", str(tmp_path))
        assert code == 1
        says(err, "cannot be read: Is a directory")

    @pytest.mark.parametrize(
        ("override", "words"),
        [
            ("nonsense", "must read section.field=value"),
            ("=3", "must read section.field=value"),
            ("train.seed=[[", "train.seed: '[[' is not YAML"),
            ("train.seed=soon", "train.seed: input should be a valid integer"),
            ("train=3", "train: is a section of fields, got 3"),
            ("model.name=nobody", "model.name: unknown 'nobody'"),
            ("train.lr_schedule={name: constant, every: 3}", "every: has no meaning for constant; remove it"),
        ],
    )
    def test_an_override_without_sense_is_named(self, run, override, words):
        code, err = run("train", "job.yaml", "--set", override)
        assert code == 1
        says(err, words)

    def test_options_that_contradict_each_other_are_wrong_usage(self, run):
        code, err = run("train", "job.yaml", "--ps", "127.0.0.1:7700", "--shards", "2")
        assert code == 2
        assert "--shards has no meaning" in err


@pytest.mark.parametrize("command", ["train", "worker", "status"])
@pytest.mark.parametrize(
    ("address", "words"),
    [
        (",", "name every shard"),
        ("localhost", "write host:port"),
        (":7700", "write host:port"),
        ("127.0.0.1:99999", "write host:port, with a port of 1..65535"),
        ("127.0.0.1:0", "write host:port, with a port of 1..65535"),
        ("http://127.0.0.1:7700", "is not the address of a shard"),
        ("::1:7700", "[::1]:7700"),
        ("unix:", "unix:/path"),
        ("127.0.0.1:7700,127.0.0.1:7700", "named twice"),
    ],
)
def test_text_that_is_no_address_is_refused_at_once(run, command, address, words):
    code, err = run(command, address) if command == "status" else run(command, "job.yaml", "--ps", address)
    assert code == 1
    says(err, words)  # and not that nobody answers


class TestOutput:
    @pytest.mark.parametrize("command", ["train", "worker"])
    def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(self, run, tmp_path, command):
        folder = tmp_path / "train.csv" / "logs"  # below a file: refused to root, too
        words = ("--ps", "127.0.0.1:1") if command == "worker" else ()
        code, err = run(command, "job.yaml", "--output", str(folder), *words)
        assert code == 1
        says(err, f"cannot write to {folder}: Not a directory; choose another folder with --output")

    def test_a_current_folder_that_cannot_be_written_is_refused(self, run, tmp_path, monkeypatch):
        monkeypatch.chdir("/proc")  # read-only, to root, too
        code, err = run("train", str(tmp_path / "job.yaml"))
        assert code == 1
        says(err, "cannot write to runs/job-", "choose another folder with --output")

    @pytest.mark.integration
    def test_a_run_whose_output_nobody_reads_ends_and_says_so(self, run, shards, tmp_path):
        words = ["worker", "clicks.yaml", "--ps", shards.addresses[0], "--set", "prefix=unread/"]
        process = subprocess.Popen(
            [*EMBERSHARD, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert "1 worker" in process.stdout.readline()
            process.stdout.close()
            says(process.stderr.read(), "whoever read the output is gone")
            assert process.wait(60) == 1
        finally:
            process.kill()
            process.wait()

    def test_a_full_disk_is_an_error_and_not_a_defect(self, run):
        if not Path("/dev/full").exists():
            pytest.skip("no /dev/full here")
        program = "from embershard.cli import main; main()"
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-c", program, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=250
            )
        assert done.returncode == 1
        assert done.stderr.startswith("error: cannot write to the output: No space left on device"), done.stderr


@pytest.fixture(scope="module")
def shards():
    """One shard, of one, as a process."""
    with LocalShards(1) as running:
        yield running


@pytest.mark.integration
class TestDataFiles:
    @pytest.mark.parametrize(
        ("name", "content", "words"),
        [
            ("none.csv", None, "data.train: no file none.csv; check data.root"),
            ("empty.csv", b"", "empty.csv: the file is empty"),
            ("header.csv", LINES[:10], "header.csv: no line of data"),
            ("cut.csv", LINES[:-3], "cut.csv:4: expected 3 fields, got 2 (cut short?)"),
            ("label.csv", LINES + b"7,x,1\n", "label.csv:5: column 'label': label '7' is not 0 or 1"),
            ("text.csv", LINES + b"1,\xff,1\n", "text.csv:5: not UTF-8 text"),
            ("binary.csv", b"\x1b[2J\xff\xfe\x00\n", "binary.csv:1: not UTF-8 text"),
            ("control.csv", b"\x1b[2J,b\r,c\n1,2,3\n", "control.csv:1: no column 'label'"),
            ("cut.csv.gz", CUT_GZIP, "cut.csv.gz: after 0 bytes of text: the gzip file is cut"),
            ("plain.csv.gz", LINES, "plain.csv.gz: it is named .gz but is not gzipped"),
        ],
    )
    def test_a_file_that_cannot_be_trained_on_is_named_with_its_line(self, run, shards, tmp_path, name, content, words):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        code, err = run("worker", "job.yaml", "--ps", shards.addresses[0], "--set", f"data.train={name}")
        assert code == 1
        says(err, words)
        assert "\x1b" not in err

    @pytest.mark.parametrize("name", ["zipped.csv.gz", "zipped.csv"])
    def test_a_gzipped_file_is_read_whatever_its_name(self, run, shards, tmp_path, name):
        (tmp_path / name).write_bytes(gzip.compress(LINES))
        code, err = run("worker", "job.yaml", "--ps", shards.addresses[0], "--set", f"data.train={name}")
        assert code == 0, err


def silent(connection: socket.socket) -> None:
    while connection.recv(4096):
        pass


def random_bytes(connection: socket.socket) -> None:
    connection.sendall(os.urandom(4096).replace(b"\0", b"x"))
    silent(connection)


def web(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    silent(connection)


@contextmanager
def listener(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a server that talks in its own way to whoever connects."""
    server = socket.create_server(("127.0.0.1", 0))

    def accept():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    def serve(connection):
        try:
            with connection:
                connection.settimeout(20)
                talk(connection)
        except OSError:
            pass

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


@pytest.mark.parametrize("talk", [web, random_bytes])
def test_an_address_where_something_else_answers_is_named_at_once(talk):
    with listener(talk) as address:
        start = time.monotonic()
        with raises(NotAShard, address=address):
            Client.connect([address], timeout=timedelta(seconds=100))
        assert time.monotonic() - start < 50  # long before the deadline


def test_an_address_that_takes_connections_and_says_nothing_is_named_at_the_deadline():
    # not refused before: a shard whose machine is busy, or that was paused, looks the same
    with listener(silent) as address:
        with raises(ShardUnavailable, address=address, seconds=3.0):
            Client.connect([address], timeout=timedelta(seconds=3))


@pytest.mark.integration
def test_one_address_of_something_else_among_shards_is_the_one_that_is_named(shards):
    with listener(web) as address, raises(NotAShard, address=address):
        Client.connect([shards.addresses[0], address], timeout=timedelta(seconds=30))


@pytest.mark.integration
def test_two_shards_with_the_same_index_are_both_named(shards):
    with LocalShards(1) as others:
        first, second = shards.addresses[0], others.addresses[0]
        with pytest.raises(WrongShards, match="start each with its own --shard") as caught:
            Client.connect([first, second], timeout=timedelta(seconds=30))
        assert first in str(caught.value)
        assert second in str(caught.value)


def test_a_shard_that_is_down_at_the_start_is_waited_for_aloud(caplog, monkeypatch):
    monkeypatch.setattr(links, "_SILENT_WAIT", timedelta(seconds=0.3))
    with raises(ShardUnavailable, address="127.0.0.1:1", seconds=3.0, reason=re.compile("Connection refused")):
        Client.connect(["127.0.0.1:1"], timeout=timedelta(seconds=3))
    assert [
        record.getMessage() for record in caplog.records if record.name == "embershard.worker.client.connections"
    ] == ["waiting for the server at 127.0.0.1:1 (Connection refused)"]


@pytest.mark.integration
class TestWorkersThatDoNotMeet:
    """Launched by hand, or by torchrun with a wrong address."""

    def join(self, run: Run, shards: LocalShards, *words: str) -> tuple[int, str]:
        return run("worker", "job.yaml", "--ps", shards.addresses[0], "--meet-within", "1", *words)

    def test_who_did_not_come_is_named(self, run, shards):
        code, err = self.join(run, shards, "--rank", "1", "--world-size", "2")
        assert code == 1
        says(err, "worker 1 of 2 lost another worker: ")
        says(err, "for worker 0 (not here yet)")

    def test_without_an_address_the_variable_is_named(self, run, shards):
        code, err = self.join(run, shards, "--rank", "1", "--world-size", "2", "--set", "strategy=hybrid")
        assert code == 1
        says(err, "worker 1 of 2 cannot reach the others at MASTER_ADDR=(not set)")

    @pytest.mark.parametrize(
        ("host", "port"), [("127.0.0.1", "1"), ("no.such.host.invalid", "29500"), ("127.0.0.1", "x")]
    )
    def test_a_wrong_address_ends_by_the_deadline(self, run, shards, monkeypatch, host, port):
        monkeypatch.setenv("MASTER_ADDR", host)
        monkeypatch.setenv("MASTER_PORT", port)
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        code, err = self.join(run, shards, "--set", "strategy=hybrid")
        assert code == 1
        says(err, f"worker 1 of 2 cannot reach the others at MASTER_ADDR={host} MASTER_PORT={port}")

    def test_a_rank_outside_of_the_world_is_wrong_usage(self, run, shards):
        code, err = self.join(run, shards, "--rank", "2", "--world-size", "2")
        assert code == 2
        assert "rank 2 of 2 does not exist" in err


@pytest.mark.integration
def test_more_workers_than_samples_are_refused(tmp_path):
    (tmp_path / "train.csv").write_bytes(LINES[:16])  # one sample
    (tmp_path / "job.yaml").write_text(JOB)
    words = ["train", "job.yaml", "--output", "out", "--workers", "2", "--shards", "1"]
    done = run_command(*words, cwd=tmp_path)
    assert done.returncode == 1
    assert "train.csv: 1 samples cannot be split over 2 workers; start fewer workers" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.integration
@pytest.mark.parametrize("strategy", ["ps", "hybrid"])
def test_a_worker_without_a_batch_for_batch_norm_ends_the_others(tmp_path, strategy):
    (tmp_path / "train.csv").write_bytes(LINES)  # one of two workers has one sample
    (tmp_path / "job.yaml").write_text(JOB.replace("{name: fm}", "{name: deepfm, batch_norm: true, hidden: [4]}"))
    words = ["train", "job.yaml", "--output", "out", "--workers", "2", "--set", f"strategy={strategy}"]
    words += ["--set", "train.steps=4"]  # it would look for a batch in one epoch after the other
    done = run_command(*words, cwd=tmp_path)
    assert done.returncode == 1
    assert "train.batch_size: epoch 1 has no batch of 2 samples or more for worker 1 of 2; use larger" in done.stderr
    assert "Traceback" not in done.stderr
