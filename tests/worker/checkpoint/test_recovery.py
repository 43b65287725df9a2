"""Which run the workers of a cluster take part in, by what the shards and the folder of checkpoints hold."""

import time
from pathlib import Path

import numpy as np
import pytest

from embershard.local_shards import InProcessShards
from embershard.proto import spec
from embershard.proto.errors import EmbershardError, JobError, StaleRun, StaleWorker, TablesInTheWay
from embershard.proto.routing import make_route
from embershard.worker.checkpoint.checkpoint import checkpoint_at
from embershard.worker.checkpoint.folder import CheckpointFolder
from embershard.worker.checkpoint.recovery import FILE, FirstWorkerMissing, NoProgress, Run, RunFile
from embershard.worker.checkpoint.tensors import pack
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms
from embershard.worker.job.job import Job
from harness.raises import raises

TABLE = spec.TableSpec(name="items", dim=2, optimizer=spec.SGD(lr=1.0))
IDS = np.arange(8)


def job_in(folder, **settings):
    sections = {"model": {"name": "lr"}, "data": {"reader": "clicks"}, "train": {"epochs": 1, "batch_size": 8}}
    optimizers = {"embedding": {"dim": 2, "optimizer": {"name": "sgd", "lr": 1.0}}}
    optimizers["dense"] = {"optimizer": {"name": "sgd", "lr": 1.0}}
    return Job.model_validate({**sections, **optimizers, "checkpoint": {"folder": str(folder)}, **settings})


@pytest.fixture
def shards():
    return InProcessShards(2)


@pytest.fixture
def connect(shards):
    clients = []

    def connected(worker=0):
        clients.append(Client(shards.transports(), worker=worker))
        return clients[-1]

    yield connected
    for client in clients:
        client.close()


def push(client, value, clock=0):
    client.declare(TABLE)
    route = make_route(IDS, TABLE.space_key, client.placement)
    client.push([("items", route, np.full((len(route.ids), 2), value, np.float32))], clock=clock)
    client.flush()


def rows_of(client):
    route = make_route(IDS, TABLE.space_key, client.placement)
    (rows,) = client.pull([("items", route)], keep=True)
    return np.array(rows)


def checkpoint(client, folder, step=1, **settings):
    whole = CheckpointFolder(str(folder))
    of = {
        "job": job_in(folder, **settings),
        "step": step,
        "world_size": 1,
        "best": None,
        "output": None,
        "shards": client,
    }
    return whole.begin({"shared": pack({})}, url=whole.new_url(step), **of).wait()


def test_without_a_checkpoint_the_second_run_begins_with_empty_shards(connect, tmp_path):
    client, runs = connect(), RunFile(job_in(tmp_path))
    first = runs.begin(client, attempts=3)
    assert (first.checkpoint, first.failures, first.is_ready) == (None, 0, True)
    push(client, 1)
    assert runs.begin(connect(), attempts=3).number > first.number
    assert not any(status.tables for status in client.status())


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_tables_of_others_are_left_alone(connect, tmp_path, has_checkpoint):
    client, runs = connect(), RunFile(job_in(tmp_path, prefix="ads/"))
    if has_checkpoint:
        checkpoint(client, tmp_path, prefix="ads/")
    else:
        runs.begin(client, attempts=3)
    push(client, 1)
    with pytest.raises(TablesInTheWay):
        runs.begin(connect(), attempts=3)
    assert [table.name for table in client.status()[0].tables] == ["items"]


def test_all_shards_get_the_latest_checkpoint(connect, tmp_path):
    client = connect()
    push(client, 1)
    url, then = checkpoint(client, tmp_path), rows_of(client)
    push(client, 1)
    assert not np.array_equal(rows_of(client), then)
    run = RunFile(job_in(tmp_path)).begin(client, attempts=3)
    assert run.checkpoint == url
    assert run.resume.manifest.step == 1
    client.declare(TABLE)
    assert np.array_equal(rows_of(client), then)


@pytest.mark.parametrize("worker", [0, 1])
def test_once_a_run_begins_those_of_before_change_nothing_any_more(connect, tmp_path, worker):
    runs = RunFile(job_in(tmp_path))
    run = runs.begin(connect(), attempts=3)
    old = connect(worker=worker)
    old.join(Terms(workers=1, staleness=None, run=run.number))
    push(old, 1)
    checkpoint(old, tmp_path)
    new = connect()
    runs.begin(new, attempts=3)
    new.declare(TABLE)
    then = rows_of(new)
    with pytest.raises((StaleRun, StaleWorker)):
        push(old, 1, clock=1)
    assert np.array_equal(rows_of(new), then)


def test_another_worker_waits_for_the_first_one_to_be_there(connect, tmp_path):
    runs = RunFile(job_in(tmp_path))
    with raises(FirstWorkerMissing, worker=1):
        runs.wait(connect(worker=1), 1, seconds=0.01)
    first = connect()
    run = runs.begin(first, attempts=3)
    with raises(FirstWorkerMissing, worker=1):  # it has not joined yet
        runs.wait(connect(worker=1), 1, seconds=0.01)
    first.join(Terms(workers=2, staleness=None, run=run.number))
    assert runs.wait(connect(worker=1), 1, seconds=5) == run


def test_runs_without_a_new_checkpoint_are_counted(connect, tmp_path):
    client, runs = connect(), RunFile(job_in(tmp_path))
    assert [runs.begin(client, attempts=3).failures for _ in range(3)] == [0, 1, 2]
    with raises(NoProgress, failures=3):
        runs.begin(client, attempts=3)
    push(client, 1)
    checkpoint(client, tmp_path)
    assert runs.begin(client, attempts=3).failures == 0


def test_a_restore_that_fails_counts(connect, tmp_path):
    client, runs = connect(), RunFile(job_in(tmp_path))
    push(client, 1)
    url = checkpoint(client, tmp_path)
    for file in Path(url).glob("shards/**/*.safetensors"):
        file.unlink()
    for _ in range(2):
        with pytest.raises(EmbershardError):
            runs.begin(connect(), attempts=2)
    assert not runs.read().is_ready
    with raises(NoProgress, failures=2):
        runs.begin(connect(), attempts=2)


def test_the_number_of_a_run_is_above_all_before_also_where_a_clock_is_behind(connect, tmp_path, monkeypatch):
    ahead = time.time_ns() + 60 * 10**9
    RunFile(job_in(tmp_path, train={"epochs": 9, "batch_size": 8}))._write(Run(ahead, None, "another job"))
    client, runs = connect(), RunFile(job_in(tmp_path))
    assert runs.begin(client, attempts=3).number == ahead + 1
    (tmp_path / FILE).unlink()
    assert runs.begin(client, attempts=3).number == ahead + 2  # the shards know it, too


def test_a_job_that_is_done_is_not_begun_again_unless_it_is_another(connect, tmp_path):
    client, runs = connect(), RunFile(job_in(tmp_path))
    runs.end(runs.begin(client, attempts=3))
    assert runs.begin(client, attempts=3).is_done
    assert RunFile(job_in(tmp_path, train={"epochs": 1, "batch_size": 8, "threads": 2})).read().is_done
    longer = RunFile(job_in(tmp_path, train={"epochs": 2, "batch_size": 8}))
    assert longer.read() is None
    assert not longer.begin(client, attempts=3).is_done


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / FILE).write_text("{")
    with pytest.raises(JobError, match="RUN"):
        RunFile(job_in(tmp_path)).read()
    assert checkpoint_at(str(tmp_path)) is None
