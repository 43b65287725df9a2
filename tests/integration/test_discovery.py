"""Shards that announce themselves in a folder, with the ranks that a cluster gives them: real processes."""

import json
import os
import signal
import threading
from contextlib import ExitStack
from datetime import timedelta

import numpy as np
import pytest

import embershard as es
from embershard.proto.routing import make_route
from embershard.worker.client.client import Client
from harness.eventually import PATIENCE
from harness.processes import run_command
from harness.served import shard_process

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

TABLE = es.TableSpec(name="items", dim=4, optimizer=es.SGD(lr=1.0), initializer=es.Constant(value=0.0))
IDS = np.arange(100)


def shard(folder, index, *options, of=2, variable="EMBERSHARD_INDEX"):
    env = {**os.environ, variable: str(index)}
    return shard_process("--announce", str(folder), *options, shard="auto", of=of, env=env)


def push(client):
    route = make_route(IDS, TABLE.space_key, client.placement)
    client.push([(TABLE.name, route, np.ones((len(IDS), 4), np.float32))], clock=0)


def rows(client):
    route = make_route(IDS, TABLE.space_key, client.placement)
    return client.pull([(TABLE.name, route)])[0][route.index]


@pytest.mark.parametrize("variable", ["EMBERSHARD_INDEX", "JOB_COMPLETION_INDEX", "SLURM_PROCID"])
def test_a_client_finds_shards_that_start_later_and_one_that_comes_back_at_another_port(variable, tmp_path):
    folder, log = tmp_path / "shards", ("--log-dir", str(tmp_path / "log"))
    found = []

    def connect():
        found.append(Client.connect(f"file:{folder}", timeout=timedelta(seconds=PATIENCE)))

    thread = threading.Thread(target=connect)
    thread.start()
    with ExitStack() as stack:
        first = stack.enter_context(shard(folder, 0, *log, variable=variable))
        second = stack.enter_context(shard(folder, 1, *log, variable=variable))
        thread.join(PATIENCE)
        (client,) = found
        stack.callback(client.close)
        client.declare(TABLE)
        push(client)
        second.popen.send_signal(signal.SIGKILL)
        second.popen.wait(PATIENCE)
        again = stack.enter_context(shard(folder, 1, *log, variable=variable))
        assert again.address not in (first.address, second.address)
        push(client)
        assert np.array_equal(rows(client), np.full((len(IDS), 4), -2, np.float32))


def test_a_place_that_is_taken_and_one_that_nobody_has_are_said(tmp_path):
    with shard(tmp_path, 0) as first:
        words = ("ps", "--announce", str(tmp_path), "--shard", "0", "--of", "2", "--listen", "127.0.0.1:0")
        second = run_command(*words)
        assert second.returncode == 1
        assert "AnnouncedTwice" in second.stderr or first.address in second.stderr
        missing = run_command("status", "--ps", f"file:{tmp_path}")
        assert missing.returncode == 1
        assert "missing: 1" in missing.stderr
        assert "Traceback" not in second.stderr + missing.stderr
        first.popen.terminate()
        first.popen.wait(PATIENCE)
    assert list(tmp_path.iterdir()) == []


def test_an_index_that_no_variable_says_is_asked_for():
    env = {name: value for name, value in os.environ.items() if "INDEX" not in name and "SLURM" not in name}
    for extra in ({}, {"SLURM_PROCID": "first"}, {"EMBERSHARD_INDEX": "2"}):
        ended = run_command("ps", "--shard", "auto", "--of", "2", env={**env, **extra})
        assert ended.returncode == 2
        assert "Traceback" not in ended.stderr


def test_a_job_trains_on_announced_shards_and_they_are_seen_by_their_folder(tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text(
        "model: {name: dlrm, bottom: [8], hidden: [8]}\n"
        "data: {reader: clicks, eval_samples: 100, loader_processes: 0}\n"
        "embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.05}}\n"
        "train: {batch_size: 256, samples: 2048}\nworkers: 2\n"
    )
    folder = tmp_path / "shards"
    with shard(folder, 0, "--listen", "0.0.0.0:0", "--insecure", "--advertise", "localhost"), shard(folder, 1):
        trained = run_command("train", str(job), "--ps", f"file:{folder}", "--output", str(tmp_path / "out"))
        assert trained.returncode == 0, trained.stderr
        status = run_command("status", "--json", env={**os.environ, "EMBERSHARD_PS": f"file:{folder}"})
        assert [one["serving"] for one in json.loads(status.stdout)["shards"]] == [True, True]
        looked = run_command("doctor", "--ps", f"file:{folder}")
        assert looked.returncode == 0, looked.stdout
