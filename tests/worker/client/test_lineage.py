"""Shards of which one has lost its rows do not go on as one job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

import embershard as es
from embershard.proto.errors import InvalidRequest, OtherLineage, RowsLost
from embershard.proto.messages import Declare, Hello, Request, Restore
from embershard.proto.routing import Placement, make_route
from embershard.proto.spec import TableSpec
from embershard.proto.transport.local import LocalTransport
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.worker.checkpoint.snapshots import restore_snapshot, take_snapshot
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms
from embershard.worker.session.session import Session

SPEC = TableSpec(name="t", dim=2, optimizer=es.SGD(lr=1.0), initializer=es.Constant())
OTHER = TableSpec(name="other", dim=3, optimizer=es.SGD(lr=1.0))
IDS = np.arange(40)


def empty(index: int, of: int = 2) -> Shard:
    return Shard(index, Placement.even(of), OptimizerRegistry())


@dataclass
class Job:
    """Two shards, which clients reach by their numbers; one may be replaced by an empty one."""

    shards: list[Shard] = field(default_factory=lambda: [empty(0), empty(1)])
    before: Callable[[int, Request], None] = lambda shard, request: None  # called before a shard handles a request

    def client(self, worker: int = 0) -> Client:
        def handle(request, index):
            self.before(index, request)
            return self.shards[index].handle(request)

        transports = [
            LocalTransport(lambda request, i=i: handle(request, i), f"host{i}:1") for i in range(len(self.shards))
        ]
        return Client(transports, worker=worker)

    @property
    def lineages(self) -> list[int]:
        return [shard.greeting.lineage for shard in self.shards]


def push(client: Client, clock: int = 0) -> None:
    route = make_route(IDS, SPEC.space_key, client.placement)
    client.push([("t", route, np.ones((len(route.ids), 2), np.float32))], clock=clock)


def trained(job: Job) -> Client:
    client = job.client()
    client.declare(SPEC)
    push(client)
    return client


@pytest.fixture
def job():
    return Job()


@pytest.mark.parametrize("lost", [0, 1])
def test_shards_of_which_one_lost_its_rows_refuse_a_declaration_and_a_join(job, lost):
    trained(job)
    job.shards[lost] = empty(lost)
    client = job.client(worker=1)
    for refused in (lambda: client.declare(SPEC), lambda: client.declare(OTHER), lambda: client.join(Terms())):
        with pytest.raises(RowsLost) as caught:
            refused()
        assert caught.value.fields["lost"] == f"shard {lost} at host{lost}:1"
        assert caught.value.fields["kept"] == f"shard {1 - lost} at host{1 - lost}:1"
    assert not job.shards[lost].status().tables  # it stays known as the one that lost its rows
    assert not job.shards[lost].status().members


def test_a_model_is_not_wrapped_on_shards_of_which_one_lost_its_rows(job):
    def begin():
        session = Session(job.client())
        model = es.wrap(nn.Sequential(nn.EmbeddingBag(50, 4), nn.Linear(4, 2)), session, optimizer=es.SGD(lr=0.1))
        model(torch.arange(50)[:, None]).sum().backward()
        session.step()

    begin()
    begin()  # a job that is started again goes on
    job.shards[1] = empty(1)
    with pytest.raises(RowsLost):
        begin()


def test_a_snapshot_is_not_taken_of_the_rows_that_are_left(job, tmp_path):
    trained(job)
    job.shards[1] = empty(1)
    with pytest.raises(RowsLost):
        take_snapshot(job.client(), str(tmp_path))


def test_a_restore_makes_one_job_of_shards_again(job, tmp_path):
    first = trained(job)
    take_snapshot(first, str(tmp_path))
    before = job.lineages
    job.shards[1] = empty(1)
    restore_snapshot(job.client(), str(tmp_path), replace_tables=True)
    assert job.lineages[0] == job.lineages[1] != before[0]
    job.client(worker=1).declare(SPEC)


def test_a_client_of_before_a_restore_goes_on_declaring(job, tmp_path):
    client = trained(job)
    take_snapshot(client, str(tmp_path))
    restore_snapshot(job.client(worker=1), str(tmp_path), replace_tables=True)
    client.declare(OTHER)


def test_a_restore_that_reached_one_shard_alone_is_noticed(job, tmp_path):
    take_snapshot(trained(job), str(tmp_path))

    def refuse(index, request):
        if index == 1 and isinstance(request, Restore) and request.step == "install":
            raise InvalidRequest(reason="not today")

    fresh = Job(before=refuse)
    with pytest.raises(InvalidRequest):
        restore_snapshot(fresh.client(), str(tmp_path))
    with pytest.raises(RowsLost):
        fresh.client(worker=1).declare(SPEC)


def test_a_second_job_with_other_tables_shares_the_shards(job):
    trained(job)
    before = job.lineages
    job.client(worker=1).declare(OTHER)
    assert job.lineages == before
    assert before[0] == before[1] != 0


@pytest.mark.parametrize("reached", [0, 1])
def test_a_first_worker_that_died_between_two_shards_locks_nobody_out(job, reached):
    job.shards[reached].handle(Declare(SPEC, lineage=7, begins_lineage=True))
    trained(job)
    assert job.lineages[0] == job.lineages[1] != 0
    job.client(worker=1).declare(SPEC)


def test_shards_that_lost_only_tables_without_rows_begin_together(job):
    job.client().declare(SPEC)
    job.shards[1] = empty(1)
    trained(job)
    assert job.lineages[0] == job.lineages[1] != 0


def test_two_workers_that_begin_at_once_agree_by_shard_0(job):
    second = job.client(worker=1)
    began = False

    def overtake(index, request):
        nonlocal began
        if isinstance(request, Declare) and not began:
            began = True
            second.lineage.check()  # as the first one did: no shard has a lineage
            second.declare(SPEC)
            push(second)

    job.before = overtake
    job.client().declare(SPEC)
    assert job.lineages[0] == job.lineages[1] != 0


def test_a_worker_that_comes_while_the_first_begins_is_not_refused(job):
    first, came = job.client(), False

    def come(index, request):
        nonlocal came
        if isinstance(request, Declare) and index == 1 and not came:
            came = True
            job.client(worker=1).join(Terms())
            trained(job)  # shard 0 has rows by now

    job.before = come
    first.declare(SPEC)
    assert job.lineages[0] == job.lineages[1] != 0


def test_answers_of_before_and_after_the_first_push_are_not_taken_for_a_loss(job):
    trained(job)
    there, hellos = job.shards[1], 0

    def answer_early(index, request):
        nonlocal hellos
        if index == 1:
            hellos += isinstance(request, Hello)
            job.shards[1] = empty(1) if hellos == 1 else there  # as it was before the job began

    client = job.client(worker=1)
    job.before = answer_early
    client.declare(SPEC)
    assert hellos == 2


def test_clients_without_a_lineage_share_the_shards_with_those_that_have_one(job):
    for shard in job.shards:
        shard.handle(Declare(SPEC))
    assert job.lineages == [0, 0]
    trained(job)
    before = job.lineages
    for shard in job.shards:
        shard.handle(Declare(OTHER))
    assert job.lineages == before
    job.client(worker=1).declare(OTHER)


def test_a_shard_refuses_a_declaration_for_another_lineage(job):
    trained(job)
    for shard in job.shards[0], empty(0):
        with pytest.raises(OtherLineage):
            shard.handle(Declare(OTHER, lineage=7))
        assert OTHER.name not in [table.name for table in shard.status().tables]
    with pytest.raises(OtherLineage):  # with rows it takes no other
        job.shards[1].handle(Declare(OTHER, lineage=7, begins_lineage=True))
