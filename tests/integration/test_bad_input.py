"""What a user can get wrong: each mistake ends by its deadline, with one error that says what, where and what to do."""

import os
import re
import shlex
import subprocess
import sys

import pytest

import embershard.cli
from embershard.deploy.supervisor import LocalShards
from harness.processes import EMBERSHARD

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
MEETING = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "EMBERSHARD_DATA")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """The command line, in this process: its stderr. Good data and good job files lie in its folder."""
    for name in MEETING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.csv").write_bytes(LINES)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "clicks.yaml").write_text(CLICKS)

    def call(*words, code=1):
        monkeypatch.setattr(sys, "argv", ["embershard", *words])
        with pytest.raises(SystemExit) as end:
            embershard.cli.main()
        lines = capsys.readouterr().err.splitlines(keepends=True)
        # the first run after a change of a kernel says what it compiles
        err = "".join(line for line in lines if not re.match(r"\d{4}-\d\d-\d\d .* compil", line))
        assert end.value.code == code, err
        return err

    return call


def says(err, *words):
    """One line, an error, with these words."""
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    assert "\x1b" not in err
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("words", "want"),
    [
        ("train missing.yaml", "missing.yaml: cannot be read: No such file"),
        ("train folder", "folder: cannot be read: Is a directory"),
        ("train binary.yaml", "binary.yaml: cannot be read: not UTF-8 text"),
        ("train field.yaml", "field.yaml:1: model.hiden: unknown field"),
        ("train job.yaml --set nonsense", "must read section.field=value"),
        ("train job.yaml --set train.seed=[[", "train.seed: '[[' is not YAML"),
        ("train job.yaml --set train.seed=soon", "train.seed: input should be a valid integer"),
        ("status --ps ,", "name every shard"),
        ("inspect ''", "'' cannot be a folder of snapshots: it is empty"),
        ("status --ps localhost", "write host:port"),
        ("status --ps :7700", "write host:port"),
        ("status --ps 127.0.0.1:99999", "write host:port, with a port of 1..65535"),
        ("status --ps 127.0.0.1:0", "write host:port, with a port of 1..65535"),
        ("status --ps http://127.0.0.1:7700", "is not the address of a shard"),
        ("status --ps ::1:7700", "[::1]:7700"),
        ("worker job.yaml --ps unix:", "unix:/path"),
        ("train job.yaml --ps 127.0.0.1:7700,127.0.0.1:7700", "named twice"),
        # below a file: refused to root, too, and before anything starts
        ("train job.yaml --output train.csv/logs", "cannot write to train.csv/logs: Not a directory; choose another"),
        ("worker job.yaml --ps 127.0.0.1:1 --output train.csv/logs", "cannot write to train.csv/logs: Not a directory"),
    ],
)
def test_a_mistake_is_named_at_once(run, tmp_path, words, want):
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00binary")
    (tmp_path / "field.yaml").write_text(JOB.replace("name: fm", "name: fm, hiden: 3"))
    says(run(*shlex.split(words)), want)


def test_an_environment_with_lines_of_no_width_hides_nothing():
    words = [*EMBERSHARD, "status", "--ps", "127.0.0.1:1"]
    done = subprocess.run(words, env={**os.environ, "COLUMNS": "0"}, stdout=subprocess.PIPE, text=True, timeout=250)
    assert "127.0.0.1:1" in done.stdout
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("words", "want"),
    [
        ("train job.yaml --ps 127.0.0.1:7700 --shards 2", "--shards has no meaning"),
        ("worker job.yaml --ps 127.0.0.1:1 --rank 2 --world-size 2", "rank 2 of 2 does not exist"),
    ],
)
def test_options_that_contradict_each_other_are_wrong_usage(run, words, want):
    assert want in run(*words.split(), code=2)


def test_a_full_disk_is_an_error_and_not_a_defect():
    with open("/dev/full", "w") as full:
        line = [sys.executable, "-c", "from embershard.cli import main; main()", "--help"]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=250)
    assert done.returncode == 1
    says(done.stderr, "cannot write to the output: No space left on device")


@pytest.fixture(scope="module")
def shard():
    """The address of a shard's process."""
    with LocalShards(1) as running:
        yield running.addresses[0]


@pytest.mark.integration
def test_a_run_whose_output_nobody_reads_ends_and_says_so(run, shard, tmp_path):
    words = [*EMBERSHARD, "worker", "clicks.yaml", "--ps", shard, "--set", "prefix=unread/"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=tmp_path, **pipes) as process:
        try:
            assert "1 worker" in process.stdout.readline()
            process.stdout.close()
            says(process.stderr.read(), "the program that read the output has ended")
            assert process.wait(60) == 1
        finally:
            process.kill()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.csv", None, "data.train: no file none.csv; check data.root"),
        ("cut.csv", LINES[:-3], "cut.csv:4: expected 3 fields, got 2 (cut short?)"),
        ("label.csv", LINES + b"7,x,1\n", "label.csv:5: column 'label': label '7' is not 0 or 1"),
        ("control.csv", b"\x1b[2J,b\r,c\n1,2,3\n", "control.csv:1: no column 'label'"),
    ],
)
def test_data_that_cannot_be_trained_on_is_named_with_its_line(run, shard, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    says(run("worker", "job.yaml", "--ps", shard, "--set", f"data.train={name}"), words)


HYBRID = ("--set", "strategy=hybrid")
AWAY = "worker 1 of 2 cannot reach the others at MASTER_ADDR="


@pytest.mark.integration
@pytest.mark.parametrize(
    ("words", "place", "want"),
    [
        ((), (), ("worker 1 of 2 lost another worker: ", "for worker 0 (not here yet)")),
        (HYBRID, (), (f"{AWAY}(not set)",)),
        (HYBRID, ("127.0.0.1", "1"), (f"{AWAY}127.0.0.1 MASTER_PORT=1",)),
        (HYBRID, ("no.such.host.invalid", "29500"), (f"{AWAY}no.such.host.invalid MASTER_PORT=29500",)),
        (HYBRID, ("127.0.0.1", "x"), (f"{AWAY}127.0.0.1 MASTER_PORT=x",)),
    ],
)
def test_a_worker_that_does_not_meet_the_others_says_so_by_the_deadline(run, shard, monkeypatch, words, place, want):
    for name, value in zip(("MASTER_ADDR", "MASTER_PORT"), place, strict=False):
        monkeypatch.setenv(name, value)
    where = ("--rank", "1", "--world-size", "2", "--join-timeout", "1")
    code = 1 if words else 75  # one that was lost, or comes too late, may be started again
    says(run("worker", "job.yaml", "--ps", shard, *where, *words, code=code), *want)
