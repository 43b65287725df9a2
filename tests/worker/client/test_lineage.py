"""Shards of which one has lost its rows do not go on as one job."""

import dataclasses
from datetime import timedelta

import numpy as np
import pytest

import embershard as es
from embershard.proto.codec.name import CodecName
from embershard.proto.errors import (
    InvalidRequest,
    LoadLost,
    MemoryLost,
    OtherLineage,
    RowsLost,
    ShardRestarted,
    TableLoading,
)
from embershard.proto.messages import Declare, Hello, Pull, Push, Restore, replace
from embershard.proto.routing import Placement, make_route
from embershard.proto.spec import TableSpec
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.worker.checkpoint.snapshots import restore_rows, restore_snapshot, take_snapshot
from embershard.worker.client.membership import Terms
from harness.raises import raises
from harness.wires import Wires, lost

SPEC = TableSpec(name="t", dim=2, optimizer=es.SGD(lr=1.0), initializer=es.Constant())
OTHER = TableSpec(name="other", dim=3, optimizer=es.SGD(lr=1.0))
IDS = np.arange(40)


def empty(index: int, of: int = 2) -> Shard:
    return Shard(index, Placement.even(of), OptimizerRegistry())


def push(client, clock=0):
    route = make_route(IDS, SPEC.space_key, client.placement)
    client.push([("t", route, np.ones((len(route.ids), 2), np.float32))], clock=clock)


class Job(Wires):
    """Two shards, of which one may lose its rows."""

    def __init__(self):
        super().__init__([empty(0), empty(1)])

    def lose(self, index):
        self.wires[index].shard = empty(index)

    def trained(self):
        client = self.client()
        client.declare(SPEC)
        push(client)
        return client

    @property
    def lineages(self):
        return [wire.shard.greeting.lineage for wire in self.wires]

    @property
    def is_one(self):
        return self.lineages[0] == self.lineages[1] != 0


@pytest.fixture
def job():
    return Job()


@pytest.mark.parametrize("lost", [0, 1])
def test_shards_of_which_one_lost_its_rows_refuse_a_declaration_and_a_join(job, lost):
    job.trained()
    job.lose(lost)
    client = job.client(worker=1)
    for refused in (lambda: client.declare(SPEC), lambda: client.declare(OTHER), lambda: client.join(Terms())):
        with raises(RowsLost, lost=f"shard {lost} at wire/{lost}", kept=f"shard {1 - lost} at wire/{1 - lost}"):
            refused()
    status = job.wires[lost].shard.status()
    assert (len(status.tables), len(status.members)) == (0, 0)  # it stays known as the one that lost its rows


def test_a_snapshot_is_not_taken_of_the_rows_that_are_left(job, tmp_path):
    job.trained()
    job.lose(1)
    with pytest.raises(RowsLost):
        take_snapshot(job.client(), str(tmp_path))


def test_a_restore_makes_one_job_of_shards_again(job, tmp_path):
    take_snapshot(job.trained(), str(tmp_path))
    before = job.lineages
    job.lose(1)
    restore_snapshot(job.client(), str(tmp_path), replace_tables=True)
    assert job.is_one
    assert job.lineages != before
    job.client(worker=1).declare(SPEC)


def test_a_client_of_before_a_restore_goes_on_declaring(job, tmp_path):
    client = job.trained()
    take_snapshot(client, str(tmp_path))
    restore_snapshot(job.client(worker=1), str(tmp_path), replace_tables=True)
    client.declare(OTHER)


def test_a_restore_that_reached_one_shard_alone_is_noticed(job, tmp_path):
    take_snapshot(job.trained(), str(tmp_path))

    def refuse(request):
        if isinstance(request, Restore) and request.step == "install":
            raise InvalidRequest(reason="not today")

    fresh = Job()
    fresh.wires[1].before = refuse
    with pytest.raises(InvalidRequest):
        restore_snapshot(fresh.client(), str(tmp_path))
    with pytest.raises(RowsLost):
        fresh.client(worker=1).declare(SPEC)


@pytest.mark.parametrize("reached", [0, 1])
def test_a_first_worker_that_died_between_two_shards_locks_nobody_out(job, reached):
    job.wires[reached].shard.handle(Declare(SPEC, lineage=7, begins_lineage=True))
    job.trained()
    assert job.is_one
    job.client(worker=1).declare(SPEC)


def test_shards_that_lost_only_tables_without_rows_begin_together(job):
    job.client().declare(SPEC)
    job.lose(1)
    job.trained()
    assert job.is_one


def test_two_workers_that_begin_at_once_agree_by_shard_0(job):
    second = job.client(worker=1)
    began = False

    def overtake(request):
        nonlocal began
        if isinstance(request, Declare) and not began:
            began = True
            second.lineage.check()  # as the first one did: no shard has a lineage
            second.declare(SPEC)
            push(second)

    job.hold(overtake)
    job.client().declare(SPEC)
    assert job.is_one


def test_a_worker_that_comes_while_the_first_begins_is_not_refused(job):
    first, came = job.client(), False

    def come(request):
        nonlocal came
        if isinstance(request, Declare) and not came:
            came = True
            job.client(worker=1).join(Terms())
            job.trained()  # shard 0 has rows by now

    job.wires[1].before = come
    first.declare(SPEC)
    assert job.is_one


def test_answers_of_before_and_after_the_first_push_are_not_taken_for_a_loss(job):
    job.trained()
    wire, hellos = job.wires[1], 0
    there = wire.shard

    def answer_early(request):
        nonlocal hellos
        hellos += isinstance(request, Hello)
        wire.shard = empty(1) if hellos == 1 else there  # as it was before the job began

    client = job.client(worker=1)
    wire.before = answer_early
    client.declare(SPEC)
    assert hellos == 2


def test_clients_without_a_lineage_share_the_shards_with_those_that_have_one(job):
    for wire in job.wires:
        wire.shard.handle(Declare(SPEC))
    assert job.lineages == [0, 0]
    job.trained()
    before = job.lineages
    for wire in job.wires:
        wire.shard.handle(Declare(OTHER))
    assert job.lineages == before
    job.client(worker=1).declare(OTHER)


def test_a_shard_refuses_a_declaration_for_another_lineage(job):
    job.trained()
    for shard in job.wires[0].shard, empty(0):
        with pytest.raises(OtherLineage):
            shard.handle(Declare(OTHER, lineage=7))
        assert OTHER.name not in [table.name for table in shard.status().tables]
    with pytest.raises(OtherLineage):  # with rows it takes no other
        job.wires[1].shard.handle(Declare(OTHER, lineage=7, begins_lineage=True))


def recover(wire, **changes):
    """Have the shard answer as the process that recovered its rows, or what `changes` say of them."""
    greeting = wire.shard.greeting
    wire.shard.greeting = replace(greeting, **{"instance": "another", "term": greeting.term + 1, **changes})


def dies_once(wire, kind, **changes):
    """A hook: the shard dies after it handled a request of this kind, and comes back before it is asked again."""
    died = []

    def die(request):
        if isinstance(request, kind) and not died:
            died.append(request)
            recover(wire, **changes)
            lost()

    return die


def rows_of(client):
    route = make_route(IDS, SPEC.space_key, client.placement)
    return client.pull([("t", route)])[0]


def test_a_shard_that_recovered_our_rows_is_asked_again_with_the_same_tokens(job):
    client = job.trained()
    wire = job.wires[1]
    wire.after = dies_once(wire, Push)
    push(client, clock=1)
    sent = [request for request in wire.seen if isinstance(request, Push)]
    assert [request.token.seq for request in sent] == [1, 2, 2]
    assert sent[1] is sent[2]
    np.testing.assert_array_equal(rows_of(client), -2.0)
    assert client.connections.recoveries == 1
    push(client, clock=2)
    np.testing.assert_array_equal(rows_of(client), -3.0)


def test_a_shard_that_recovered_while_nothing_was_under_way_goes_on(job):
    client = job.trained()
    wire = job.wires[0]
    wire.before = dies_once(wire, Pull)
    np.testing.assert_array_equal(rows_of(client), -1.0)
    assert client.connections.recoveries == 1


def test_a_process_of_another_lineage_is_not_the_shard(job):
    client = job.trained()
    wire = job.wires[1]
    wire.before = dies_once(wire, Pull, lineage=7)
    with raises(ShardRestarted, shard="shard 1 at wire/1"):
        rows_of(client)
    assert client.connections.recoveries == 0


def test_a_recovered_shard_that_lost_acknowledged_pushes_refuses_the_next_one(job):
    client = job.trained()
    push(client, clock=1)
    wire = job.wires[1]
    lineage, wire.shard = wire.shard.greeting.lineage, empty(1)
    wire.shard.handle(Declare(SPEC, lineage=lineage, begins_lineage=True))
    with raises(MemoryLost, worker=0):
        push(client, clock=2)


def test_a_table_that_waits_for_a_load_of_this_worker_which_is_lost_says_so_at_once(job):
    client, other = job.client(), job.client(worker=1, timeout=timedelta(seconds=0.1))
    client.declare(SPEC, load=True)  # as if by an earlier process, and its end of the load were lost
    with raises(LoadLost, table="t", worker=0, shard="shard 0 at wire/0"):
        rows_of(client)
    other.declare(SPEC)
    with raises(TableLoading, table="t", worker=0):  # which may be loading it
        rows_of(other)


def test_what_a_restore_gave_the_shards_is_theirs_when_one_comes_back(job, tmp_path):
    client = job.trained()
    take_snapshot(client, str(tmp_path))
    push(client, clock=1)
    restore_rows(client, str(tmp_path), replace_tables=True)
    wire = job.wires[0]
    wire.before = dies_once(wire, Pull)
    np.testing.assert_array_equal(rows_of(client), -1.0)


def test_rows_that_are_pulled_as_changes_are_pulled_whole_after_a_recovery(job):
    client = job.client()
    client.declare(dataclasses.replace(SPEC, pull_codec=CodecName.parse("delta")), dense=True)
    push(client)
    route = make_route(IDS, SPEC.space_key, client.placement)
    for _ in range(2):
        client.pull([("t", route)])
    wire = job.wires[1]
    wire.before = dies_once(wire, Push)
    push(client, clock=1)
    client.pull([("t", route)])
    since = [[r.tables[0].since for r in one.seen if isinstance(r, Pull)] for one in job.wires]
    assert [(told[0], told[1] > 0, told[2]) for told in since] == [(0, True, 0)] * 2
