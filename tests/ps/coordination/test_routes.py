import numpy as np
import pytest

from embershard.proto.errors import UnknownRoute, WrongDim
from embershard.proto.messages import Declare, Pull, Push, Pushed, PushToken, Rows, TableGradients, TableIds
from embershard.proto.routing import Placement
from embershard.proto.spec import SGD, Constant, TableSpec
from embershard.ps.coordination import pushes as routes_module
from embershard.ps.coordination.pushes import RouteCache
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry

IDS = np.array([1, 2, 3], np.int64)
ONES = np.ones((3, 2), np.float32)
NONE = np.empty(0, np.int64)


@pytest.fixture
def shard():
    shard = Shard(0, Placement.even(1), OptimizerRegistry())
    for name in ("t", "u"):
        shard.handle(Declare(TableSpec(name=name, dim=2, optimizer=SGD(lr=1.0), initializer=Constant())))
    return shard


def pull(shard: Shard, route: int = 0, epoch: int = 1) -> np.ndarray:
    rows = shard.handle(Pull(1, (TableIds("t", IDS, route),), worker=4, epoch=epoch))
    assert isinstance(rows, Rows)
    return rows.tables[0]


def push(shard: Shard, route: int, seq: int = 1, epoch: int = 1, table: str = "t") -> Pushed:
    part = TableGradients(table, NONE, ONES, route=route)
    reply = shard.handle(Push(PushToken(4, epoch, seq, 1), 0, 1, (part,)))
    assert isinstance(reply, Pushed)
    return reply


def test_a_push_may_name_the_ids_of_a_pull(shard):
    pull(shard, route=7)
    assert push(shard, route=7) == Pushed(False, 3, 0)
    assert pull(shard).tolist() == [[-1.0, -1.0]] * 3


def test_a_repeated_push_is_recognised_though_its_route_is_forgotten(shard):
    pull(shard, route=7)
    push(shard, route=7)
    assert push(shard, route=7).duplicate
    with pytest.raises(UnknownRoute):
        push(shard, route=7, seq=2)
    assert pull(shard).tolist() == [[-1.0, -1.0]] * 3


@pytest.mark.parametrize("other", [{"route": 8}, {"route": 7, "epoch": 2}, {"route": 7, "table": "u"}])
def test_a_route_of_another_number_incarnation_or_table_is_unknown_and_nothing_is_applied(shard, other):
    pull(shard, route=7)
    with pytest.raises(UnknownRoute):
        push(shard, **other)  # type: ignore[arg-type]
    assert pull(shard).tolist() == [[0.0, 0.0]] * 3


def test_gradients_must_fit_the_ids_that_are_named(shard):
    pull(shard, route=7)
    part = TableGradients("t", NONE, np.ones((2, 2), np.float32), route=7)
    with pytest.raises(WrongDim):
        shard.handle(Push(PushToken(4, 1, 1, 1), 0, 1, (part,)))


def test_ids_kept_are_a_copy():
    memory, ids = RouteCache(), IDS.copy()
    memory.keep(0, 1, 5, "t", ids)
    ids[:] = 9
    found = memory.find(0, 1, 5, "t")
    assert found is not None
    assert found.tolist() == [1, 2, 3]


def test_the_oldest_routes_are_dropped_by_number_and_by_bytes(monkeypatch):
    memory = RouteCache()
    for number in range(1, routes_module.MAX_ROUTES + 2):
        memory.keep(0, 1, number, "t", NONE)
    assert memory.find(0, 1, 1, "t") is None
    assert memory.find(0, 1, 2, "t") is not None
    monkeypatch.setattr(routes_module, "MAX_BYTES", 2 * IDS.nbytes)
    memory.keep(1, 1, 1, "t", IDS)
    memory.keep(1, 1, 1, "t", IDS)  # the same number twice counts once
    memory.keep(1, 1, 2, "t", IDS)
    assert memory.find(1, 1, 1, "t") is not None
    memory.keep(1, 1, 3, "t", IDS)
    assert memory.find(1, 1, 1, "t") is None
    assert memory.find(1, 1, 3, "t") is not None


def test_the_workers_that_came_first_are_dropped(monkeypatch):
    monkeypatch.setattr(routes_module, "MAX_WORKERS", 2)
    memory = RouteCache()
    for worker in (0, 1, 0, 2):
        memory.keep(worker, 1, 1, "t", IDS)
    assert [memory.find(worker, 1, 1, "t") is None for worker in (0, 1, 2)] == [False, True, False]


def test_all_workers_together_are_bounded(monkeypatch):
    monkeypatch.setattr(routes_module, "MAX_ALL_BYTES", 3 * IDS.nbytes)
    memory = RouteCache()
    for worker in range(5):
        memory.keep(worker, 1, 1, "t", IDS)
    assert [memory.find(worker, 1, 1, "t") is not None for worker in range(5)] == [False, False, True, True, True]
    memory.forget(3, 1, 1)
    memory.keep(5, 1, 1, "t", IDS)  # the place of what was forgotten
    assert [memory.find(worker, 1, 1, "t") is not None for worker in (2, 5)] == [True, True]


def test_who_only_reads_by_the_number_of_a_worker_takes_none_of_its_routes(shard):
    pull(shard, route=7)
    pull(shard, route=7, epoch=2)
    assert push(shard, route=7) == Pushed(False, 3, 0)
