"""Snapshots of real processes: by the command line, with shards and coordinators killed, disks that are full, and after
a shard came back empty.
"""

import json
import os
import re
import resource
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import nn

import embershard as es
from embershard import local_shards as in_process
from embershard.deploy.supervisor import LocalShards, RestartPolicy
from embershard.proto import spec
from embershard.proto.errors import RowsLost, ShardRestarted, ShardUnavailable, SnapshotNotWritten
from embershard.proto.routing import make_route
from embershard.proto.snapshot.stored import list_snapshots, read_manifest
from embershard.worker.checkpoint.snapshots import restore_snapshot, take_snapshot
from embershard.worker.client.client import Client
from harness.processes import EMBERSHARD, run_command

pytestmark = pytest.mark.integration

TABLE = spec.TableSpec(name="items", dim=16, optimizer=spec.Adagrad(lr=0.1))
IDS = np.arange(200_000)  # 27 MB
TIMEOUT = timedelta(seconds=100)


def run(*arguments, code=0):
    """All output of a command that must end with this exit code."""
    done = run_command(*arguments)
    text = done.stdout + done.stderr
    assert done.returncode == code, text
    assert "Traceback" not in text
    return text


def connect(local, worker=0, timeout=TIMEOUT):
    return closing(Client.connect(local.addresses, worker=worker, timeout=timeout))


def push(client, ids=IDS, value=1.0):
    client.declare(TABLE)
    route = make_route(ids, TABLE.space_key, client.placement)
    client.push([("items", route, np.full((len(route.ids), TABLE.dim), value, np.float32))], clock=0)


def rows(client):
    client.declare(TABLE)
    route = make_route(IDS, TABLE.space_key, client.placement)
    return client.pull([("items", route)])[0][route.index]


@contextmanager
def pushing(local):
    """A worker that pushes all the while."""
    stop = threading.Event()

    def work():
        with connect(local, worker=1) as client:
            while not stop.is_set():
                push(client, IDS[::50], 0.5)

    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(work)
        try:
            yield
        finally:
            stop.set()
        worker.result(250)


@pytest.fixture(scope="module")
def shards():
    with LocalShards(2) as local:
        yield local


@pytest.fixture
def client(shards):
    with connect(shards) as client:
        push(client)
        yield client


def test_the_commands_take_show_and_restore_a_snapshot_while_a_worker_pushes(shards, client, tmp_path):
    folder = str(tmp_path / "snaps")
    with pushing(shards):
        said = run("snapshot", folder, "--ps", ",".join(shards.addresses), "--name", "one", "--incremental")
        assert said.startswith(f"{folder}/one: 200,000 rows")
        by_grpc = ",".join(f"grpc://{address}" for address in shards.addresses)
        said = run("snapshot", folder, "--ps", by_grpc, "--name", "two", "--keep", "1", "--incremental")
        assert said.startswith(f"{folder}/two: an increment of one, 200,000 rows")
    said = run("inspect", folder, "--verify")
    assert "snapshots: one, two\n" in said
    assert f"increment of: {folder}/one" in said.replace("\n", "")
    assert "items adagrad    16    16 200,000" in said
    with LocalShards(1) as others:
        (where,) = others.addresses
        assert "two: 200,000 rows of 1 tables, from 2 shards onto 1" in run("restore", folder, "--ps", where)
        with connect(others) as other:
            assert np.array_equal(rows(other)[1::50], rows(client)[1::50])  # those that nobody pushed since
        assert "already has tables (items)" in run("restore", folder, "--ps", where, code=1)


def test_the_killed_coordinator_leaves_the_snapshot_before_and_shards_that_take_the_next(shards, client, tmp_path):
    folder = str(tmp_path)
    take_snapshot(client, folder, "before")
    command = [*EMBERSHARD, "snapshot", folder, "--ps", ",".join(shards.addresses), "--name", "x"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as coordinator:
        while not list(tmp_path.glob("x/shard-*/*")):  # it has begun
            time.sleep(0.001)
        coordinator.kill()
    assert list_snapshots(folder) in (["before"], ["before", "x"])  # it may have been quick
    assert take_snapshot(client, folder, "after", keep=5).rows == len(IDS)
    assert "x" in list_snapshots(folder) or not list(tmp_path.glob("x/shard-*"))


@pytest.mark.parametrize("delay", [pytest.param(0.0, marks=pytest.mark.long), 0.1])
def test_a_killed_shard_leaves_the_snapshot_before(delay, tmp_path):
    folder = str(tmp_path)
    with LocalShards(2) as local, connect(local) as client, connect(local, timeout=timedelta(seconds=5)) as hasty:
        push(client)
        then = rows(client)
        take_snapshot(client, folder, "before")
        push(client)
        killer = threading.Timer(delay, os.kill, (local.pids[0], signal.SIGKILL))
        killer.start()
        with suppress(ShardUnavailable, ShardRestarted):
            take_snapshot(hasty, folder, "during")
        killer.join()
    name = read_manifest(folder).name
    assert name in ("before", "during")
    fresh = in_process.local(1).client
    restore_snapshot(fresh, folder)
    assert np.array_equal(rows(fresh), then) == (name == "before")
    restore_snapshot(fresh, folder, "before", replace_tables=True)
    assert np.array_equal(rows(fresh), then)


def test_a_full_disk_is_named_and_the_snapshot_before_stays(shards, client, tmp_path):
    folder = str(tmp_path)
    take_snapshot(client, folder, "before")
    resource.prlimit(shards.pids[1], resource.RLIMIT_FSIZE, (4 << 20, resource.RLIM_INFINITY))
    try:
        with pytest.raises(SnapshotNotWritten, match=r"shard 1 at .*cannot write .*safetensors: .*too large"):
            take_snapshot(client, folder, "during")
    finally:
        resource.prlimit(shards.pids[1], resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    push(client)
    assert read_manifest(folder).name == "before"
    assert take_snapshot(client, folder, "after").rows == len(IDS)


def test_a_folder_that_cannot_be_written_is_named(shards):
    said = run("snapshot", "/proc/snapshots", "--ps", ",".join(shards.addresses), code=1)
    assert "cannot write /proc/snapshots" in said


JOB = """\
model: {name: lr}
data: {reader: clicks, samples: 200}
embedding: {optimizer: {name: sgd, lr: 0.1}}
train: {batch_size: 10, epochs: 1}
"""
ROWS = torch.arange(1000)


@contextmanager
def begin(addresses):
    """A session, its model, and how many rows differ from their first value."""
    with es.connect(addresses, timeout=timedelta(seconds=100)) as session:
        model = nn.Sequential(nn.EmbeddingBag(1000, 4, mode="sum"), nn.Linear(4, 300))
        model = es.wrap(model, session, optimizer=es.SGD(lr=0.01), initializer=es.Constant(value=0.0))
        yield session, model, int((model[0].table.pull(ROWS) != 0).any(1).sum())


def train(session, model):
    for _ in range(3):
        (model(ROWS[:, None]) - 1).pow(2).mean().backward()
        session.step()


def test_a_job_does_not_go_on_with_a_shard_that_lost_its_rows_until_they_are_restored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    with LocalShards(2, restart=RestartPolicy(first_pause=timedelta(seconds=0.1))) as shards:
        where = ",".join(shards.addresses)
        with begin(shards.addresses) as (session, model, _):
            train(session, model)
        with begin(shards.addresses) as (_, _, trained):  # a second start finds all rows
            assert trained == len(ROWS)
        run("snapshot", "snapshots", "--ps", where)

        os.kill(shards.pids[1], signal.SIGKILL)
        with pytest.raises(RowsLost) as caught, begin(shards.addresses):
            pass
        assert caught.value.fields["lost"] == f"shard 1 at {shards.addresses[1]}"
        assert "--resume latest" in run("train", "job.yaml", "--ps", where, "--output", "out", code=1)
        run("snapshot", "snapshots", "--ps", where, code=1)
        assert re.search("shard 1 lost its rows [0-9]+ minutes? ago", " ".join(run("status", "--ps", where).split()))
        (_, empty) = json.loads(run("status", "--ps", where, "--json"))["shards"]
        assert not empty["status"]["tables"]

        run("restore", "snapshots", "--ps", where, "--replace")
        with begin(shards.addresses) as (session, model, trained):
            assert trained == len(ROWS)
            train(session, model)
        assert "lost" not in run("status", "--ps", where)
