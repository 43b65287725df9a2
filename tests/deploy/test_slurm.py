"""Places on the nodes of a Slurm allocation. A whole cluster runs in bench/bar_slurm.py."""

import json
import os
import signal
import subprocess
from contextlib import ExitStack

import pytest
from typer.testing import CliRunner

from embershard.cli.app import app
from embershard.deploy import slurm
from embershard.deploy.engine import LOCAL, meeting
from embershard.deploy.slurm import NotInSlurm, SlurmEngine
from harness.eventually import PATIENCE, eventually
from harness.processes import run_command

# they stand for commands of Slurm, whose words are those of Slurm 22.05
SINFO = """#!/bin/sh
cat "$STATES"
"""
SCONTROL = """#!/bin/sh
test "$1 $2 $3" = "show hostnames n[1-3]" || exit 1
printf 'n1\\nn2\\nn3\\n'
"""
SRUN = """#!/bin/sh
while case "$1" in --*) true;; *) false;; esac; do shift; done
exec "$@"
"""


@pytest.fixture
def commands(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("sinfo", SINFO), ("scontrol", SCONTROL), ("srun", SRUN)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (tmp_path / "states").write_text("n1 mixed\nn2 allocated\nn3 idle\n")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STATES", str(tmp_path / "states"))
    return folder


@pytest.fixture
def engine(commands, tmp_path):
    return SlurmEngine.of_allocation(tmp_path / "shards", shards=2, environment={"SLURM_JOB_NODELIST": "n[1-3]"})


def test_shards_and_workers_are_spread_over_the_nodes(engine):
    shards, workers = engine.shards(2), engine.workers(4)
    assert [place.host for place in shards] == ["n1", "n2"]
    assert [place.host for place in workers] == ["n3", "n1", "n2", "n3"]
    assert [(place.number, place.of) for place in workers] == [(0, 2), (0, 1), (0, 1), (1, 2)]
    for place in (*shards, *workers):
        assert "srun" in place.prefix
        assert f"--nodelist={place.host}" in place.prefix
    assert meeting(workers[0], 7)["MASTER_ADDR"] == "n3"
    assert meeting(LOCAL.workers(1)[0], 7)["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_workers_have_a_terminal_only_where_this_command_has_one(is_terminal, engine, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    assert all(("--unbuffered" in place.prefix) == is_terminal for place in engine.workers(2))


def test_an_exit_code_of_srun_is_that_of_its_process(engine):
    place = engine.shards(1)[0]
    assert [engine.exit_code(code, place) for code in (0, 1, 75, 137, 143, 255)] == [0, 1, 75, -9, -15, 255]
    assert LOCAL.exit_code(-9, place) == -9


@pytest.mark.parametrize("state", ["down", "down*", "powering_down"])
def test_what_ran_on_a_lost_node_was_killed_and_is_started_again_on_another_one(state, engine, tmp_path):
    place = engine.shards(2)[1]
    assert engine.again(place) == place
    (tmp_path / "states").write_text("n1 mixed\nn2 allocated*\nn3 idle\n")
    assert engine.again(place) == place
    (tmp_path / "states").write_text(f"n1 mixed\nn2 {state}\nn3 idle\n")
    assert engine.exit_code(1, place) == -signal.SIGKILL
    assert engine.exit_code(0, place) == 0
    again = engine.again(place)
    assert again.host != "n2"
    assert f"--nodelist={again.host}" in again.prefix
    assert [one.host for one in engine.shards(3)] == ["n1", "n3", "n1"]


def test_processes_of_lost_nodes_are_spread_over_the_others(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "_LOOK_SECONDS", 0.05)
    places = [*engine.shards(2), *engine.workers(1)]
    with ExitStack() as stack:
        for place in places:
            process = stack.enter_context(subprocess.Popen(["sleep", "60"]))
            stack.callback(process.kill)
            engine.watch(process, place)
        (tmp_path / "states").write_text("n1 mixed\nn2 down\nn3 down\n")
        again = engine.again(places[1])
        assert (again.host, again.number, again.of) == ("n1", 1, 2)
        lost = [process for process, host in engine._watched if host != "n1"]
        assert eventually(lambda: all(process.poll() is not None for process in lost))  # srun would wait for ever
        engine.close()


def test_another_worker_is_on_the_node_where_the_fewest_processes_run(engine, tmp_path):
    with subprocess.Popen(["sleep", "60"]) as process:
        engine.watch(process, engine.shards(1)[0])
        assert engine.another_worker(1, 2).host == "n2"
        (tmp_path / "states").write_text("n1 mixed\nn2 down\nn3 idle\n")
        assert engine.another_worker(1, 2).host == "n3"
        process.kill()
    assert engine.another_worker(1, 2).host == "n1"
    engine.close()


def test_where_no_node_is_left_or_slurm_does_not_answer_the_place_stays(engine, commands, tmp_path):
    place = engine.shards(1)[0]
    (tmp_path / "states").write_text("n1 down\nn2 down\nn3 down\n")
    assert engine.again(place) == place
    (commands / "sinfo").write_text("#!/bin/sh\nexit 1\n")
    assert engine.again(place) == place
    assert engine.exit_code(1, place) == 1


def test_outside_of_an_allocation_the_error_says_so(commands, tmp_path, monkeypatch):
    with pytest.raises(NotInSlurm):
        SlurmEngine.of_allocation(tmp_path, shards=1, environment={})
    with pytest.raises(NotInSlurm, match="another"):
        SlurmEngine.of_allocation(tmp_path, shards=1, environment={"SLURM_JOB_NODELIST": "another"})
    (commands / "srun").unlink()
    monkeypatch.setenv("PATH", str(commands))  # this machine may have Slurm
    with pytest.raises(NotInSlurm, match="srun"):
        SlurmEngine.of_allocation(tmp_path, shards=1, environment={"SLURM_JOB_NODELIST": "n[1-3]"})


JOB = """\
model: {name: dlrm, bottom: [8], hidden: [8]}
data: {reader: clicks, eval_samples: 100, loader_processes: 0}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.05}}
train: {batch_size: 256, samples: 2048}
checkpoint: {folder: checkpoints}
workers: 2
"""


@pytest.fixture
def job(commands, tmp_path, monkeypatch):
    (tmp_path / "job.yaml").write_text(JOB)
    (commands / "scontrol").write_text("#!/bin/sh\nprintf 'localhost\\n'\n")
    (tmp_path / "states").write_text("localhost allocated\n")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "localhost")
    command = ("train", "job.yaml", "--engine", "slurm", "--output", "out", "--resume", "auto")

    def train(*words):
        done = run_command(*command, *words, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr

    return train


@pytest.mark.integration
@pytest.mark.timeout(4 * PATIENCE)
def test_a_job_trains_on_the_places_of_an_engine_and_goes_on_from_its_checkpoint(job, tmp_path):
    job()
    assert list((tmp_path / "out").glob("keys-*/tls.key"))
    assert not list((tmp_path / "out" / "shards").iterdir())
    job("--set", "train.samples=4096")
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [one.get("resumed_step") for one in log if one["record"] == "config"] == [None, 4]


@pytest.mark.integration
@pytest.mark.timeout(2 * PATIENCE)
def test_a_job_whose_network_keeps_strangers_out_needs_no_certificates(job, tmp_path):
    job("--insecure", "--set", "train.samples=512")
    assert not list((tmp_path / "out").glob("keys-*"))


@pytest.mark.parametrize(
    "words",
    [
        ("--insecure",),
        ("--engine", "slurm", "--metrics", "127.0.0.1:7790"),
        ("--engine", "slurm", "--insecure", "--tls", "keys", "--tls-server-name", "shards"),
        ("--engine", "slurm", "--tls", "keys"),
        ("--engine", "slurm", "--output", "a,b"),
        ("--engine", "kubernetes"),
    ],
)
def test_options_that_an_engine_cannot_follow_are_refused(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    assert CliRunner().invoke(app, ["train", "job.yaml", *words]).exit_code == 2
