"""A push or load of a shard, whole or not at all, and once."""

import numpy as np
import pytest

from embershard.proto.errors import BadOptimizer, UpdateFailed, WrongPlacement
from embershard.proto.messages import (
    Declare,
    GetStatus,
    Join,
    Load,
    Loaded,
    Pull,
    Push,
    PushToken,
    TableGradients,
    TableIds,
)
from embershard.proto.routing import Placement
from embershard.proto.spec import SGD, Constant, Custom, TableSpec
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry

PICKY = """
from embershard import row_optimizer

@row_optimizer(state_per_dim=1)
def picky(row, state, grad, hyper):
    if grad[0] > 1:
        raise ValueError("too large")
    for j in range(row.size):
        state[j] += 1
        row[j] -= hyper[0] * grad[j]
"""
IDS = np.arange(200, dtype=np.int64)  # more than the kernels have in flight at once


@pytest.fixture
def shard(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "picky_rows.py").write_text(PICKY)
    shard = Shard(0, Placement.even(1), OptimizerRegistry(["picky_rows"]))
    for name, optimizer in (("plain", SGD(lr=1.0)), ("picky", Custom(function="picky_rows:picky", lr=1.0))):
        shard.handle(Declare(TableSpec(name=name, dim=2, optimizer=optimizer, initializer=Constant(value=4.0))))
    return shard


def gradients(name, last=1.0):
    rows = np.ones((len(IDS), 2), np.float32)
    rows[-1] = last
    return TableGradients(name, IDS, rows)


def push(seq, *parts, worker=0, **fields):
    return Push(PushToken(worker, 1, seq, 1), fields.pop("clock", 0), 1, parts, **fields)


def records(shard, name):
    """The rows of a table with their states."""
    (table,) = (table for table in shard._tables.opened() if table.spec.name == name)
    return np.concatenate(table.records(IDS), axis=1)


@pytest.mark.parametrize("order", [("plain", "picky"), ("picky", "plain"), ("picky", "picky")])
def test_a_push_whose_row_function_raises_leaves_no_trace(shard, order):
    shard.handle(push(1, gradients("plain"), gradients("picky")))
    before = [records(shard, name) for name in ("plain", "picky")]
    bad = push(2, *(gradients(name, 2.0 if name == "picky" else 1.0) for name in order))
    for _ in range(2):  # and is not known as applied
        with pytest.raises(BadOptimizer):
            shard.handle(bad)
    assert all(map(np.array_equal, before, [records(shard, name) for name in ("plain", "picky")]))
    assert shard.handle(push(2, *map(gradients, order))).applied == 2 * len(IDS)


def test_the_second_of_two_parts_of_one_table_takes_the_first_back(shard):
    with pytest.raises(BadOptimizer):
        shard.handle(push(1, gradients("picky"), gradients("picky", 2.0)))
    assert np.array_equal(records(shard, "picky"), np.tile(np.float32([4, 4, 0, 0]), (len(IDS), 1)))


def test_a_clock_whose_row_function_raises_leaves_no_trace(shard):
    for worker in (0, 1):
        shard.handle(Join(worker=worker, epoch=1, clock=0, staleness=0, workers=2, lease_ms=60_000))
    for worker in (0, 1):
        shard.handle(push(1, gradients("plain"), gradients("picky", 2.0), worker=worker))
    with pytest.raises(UpdateFailed):
        shard.handle(Pull(1, (TableIds("plain", IDS),), worker=0, epoch=1, required_clock=1))
    assert (records(shard, "plain") == 4).all()
    assert (records(shard, "picky")[:, :2] == 4).all()


def test_the_retry_of_an_applied_load_is_known_under_another_placement(shard):
    def load(seq):
        return Load("plain", 1, IDS, np.zeros((len(IDS), 2), np.float32), token=PushToken(0, 1, seq, 1))

    shard.handle(load(1))
    shard._placement = Placement.even(1, epoch=2)
    assert shard.handle(load(1)) == Loaded(rows=len(IDS))
    assert shard.handle(GetStatus()).duplicate_pushes == 1
    with pytest.raises(WrongPlacement):
        shard.handle(load(2))
