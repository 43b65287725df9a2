"""Which run the workers of a cluster take part in, by what the shards and the folder of checkpoints hold."""

import numpy as np
import pytest

from embershard.local_shards import InProcessShards
from embershard.proto import spec
from embershard.proto.errors import JobError
from embershard.proto.routing import make_route
from embershard.worker.checkpoint.checkpoint import CheckpointFolder, checkpoint_at
from embershard.worker.checkpoint.recovery import FILE, FirstWorkerMissing, NoProgress, RunFile
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


def push(client, value):
    client.declare(TABLE)
    route = make_route(IDS, TABLE.space_key, client.placement)
    client.push([("items", route, np.full((len(route.ids), 2), value, np.float32))], clock=0)
    client.flush()


def rows_of(client):
    route = make_route(IDS, TABLE.space_key, client.placement)
    (rows,) = client.pull([("items", route)], keep=True)
    return np.array(rows)


def checkpoint(client, folder, step=1):
    whole = CheckpointFolder(str(folder))
    of = {"job": job_in(folder), "step": step, "world_size": 1, "best": None, "output": None, "shards": client}
    return whole.begin({"shared": pack({})}, url=whole.new_url(step), **of).wait()


def test_without_a_checkpoint_a_run_begins_with_empty_shards(connect, tmp_path):
    client = connect()
    push(client, 1)
    run = RunFile(job_in(tmp_path)).begin(client, attempts=3)
    assert (run.checkpoint, run.failures) == (None, 0)
    assert not any(status.tables for status in client.status())


def test_where_nobody_trains_all_shards_get_the_latest_checkpoint(connect, tmp_path):
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


def test_where_another_worker_trains_the_first_one_takes_part(connect, tmp_path):
    client = connect()
    runs = RunFile(job_in(tmp_path))
    run = runs.begin(client, attempts=3)
    other = connect(worker=1)
    other.join(Terms(workers=2, staleness=None, run=run.number))
    push(other, 1)
    checkpoint(other, tmp_path)
    assert runs.begin(client, attempts=3) == run
    assert runs.wait(connect(worker=2), 2, seconds=5) == run


def test_another_worker_waits_for_the_first(connect, tmp_path):
    runs = RunFile(job_in(tmp_path))
    with raises(FirstWorkerMissing, worker=1):
        runs.wait(connect(worker=1), 1, seconds=0.01)
    runs.begin(connect(), attempts=3)
    with raises(FirstWorkerMissing, worker=1):  # it has not joined yet
        runs.wait(connect(worker=1), 1, seconds=0.01)


def test_runs_without_a_new_checkpoint_are_counted(connect, tmp_path):
    client, runs = connect(), RunFile(job_in(tmp_path))
    assert [runs.begin(client, attempts=2).failures for _ in range(3)] == [0, 1, 2]
    with raises(NoProgress, failures=3):
        runs.begin(client, attempts=2)
    push(client, 1)
    checkpoint(client, tmp_path)
    assert runs.begin(client, attempts=2).failures == 0


def test_a_job_that_is_done_is_not_begun_again_unless_it_changed(connect, tmp_path):
    client, runs = connect(), RunFile(job_in(tmp_path))
    runs.end(runs.begin(client, attempts=3))
    assert runs.begin(client, attempts=3).is_done
    longer = RunFile(job_in(tmp_path, train={"epochs": 2, "batch_size": 8}))
    assert longer.read() is None
    assert not longer.begin(client, attempts=3).is_done


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / FILE).write_text("{")
    with pytest.raises(JobError, match="RUN"):
        RunFile(job_in(tmp_path)).read()
    assert checkpoint_at(str(tmp_path)) is None
