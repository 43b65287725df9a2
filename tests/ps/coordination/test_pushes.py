"""Pushes and loads of a shard: whole or not at all, once, and of ids that a pull has named."""

import re
import tracemalloc
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from embershard.proto.errors import BadOptimizer, UnknownRoute, UpdateFailed, WrongDim
from embershard.proto.messages import Declare, Pull, Pushed, TableGradients, TableIds
from embershard.proto.routing import Placement
from embershard.proto.spec import Constant, Custom
from embershard.ps.coordination import pushes as routes_module
from embershard.ps.coordination.pushes import RouteCache, kept_for
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from harness.held_log import HeldLog
from harness.raises import raises
from harness.shards import gradients, ids_of, join, make_shard, push, rows, table

PICKY = """
from embershard import row_optimizer

@row_optimizer(state_per_dim=1)
def picky(row, state, grad, hyper):
    if grad[0] > 1:
        raise ValueError("too large")
    for j in range(row.size):
        state[j] += 1
        row[j] -= hyper[0] * grad[j]
        grad[j] = 0
"""
IDS = np.arange(200, dtype=np.int64)  # more than the kernels have in flight at once


class TestWholeOrNotAtAll:
    @pytest.fixture
    def shard(self, tmp_path, monkeypatch):
        monkeypatch.syspath_prepend(str(tmp_path))
        (tmp_path / "picky_rows.py").write_text(PICKY)
        shard = Shard(0, Placement.even(1), OptimizerRegistry(["picky_rows"]))
        for name, own in (("plain", {}), ("picky", {"optimizer": Custom(function="picky_rows:picky", lr=1.0)})):
            shard.handle(Declare(table(name, 2, initializer=Constant(value=4.0), **own)))
        return shard

    def part(self, name, last=1.0):
        values = np.ones((len(IDS), 2), np.float32)
        values[-1] = last
        return TableGradients(name, IDS, values)

    def records(self, shard):
        """The rows of both tables with their states."""
        found = {table.spec.name: np.concatenate(table.records(IDS), axis=1) for table in shard.core.tables.opened()}
        return [found[name].tolist() for name in ("plain", "picky")]

    @pytest.mark.parametrize("order", [("plain", "picky"), ("picky", "plain"), ("picky", "picky")])
    def test_a_push_whose_row_function_raises_leaves_no_trace(self, shard, order):
        shard.handle(push(self.part("plain"), self.part("picky")))
        before, good = self.records(shard), [self.part(name) for name in order]
        for at in range(2):  # and is not known as applied
            if order[at] == "picky":
                with raises(BadOptimizer, optimizer=re.compile("picky_rows:picky"), reason=re.compile("table 'picky'")):
                    shard.handle(push(*good[:at], self.part("picky", 2.0), *good[at + 1 :], seq=2))
        assert self.records(shard) == before
        assert shard.handle(push(*good, seq=2)).applied == 2 * len(IDS)

    @pytest.mark.parametrize("kind", ["plain", "equal ids", "bundle", "difference", "raises", "waits for its clock"])
    def test_a_log_has_the_gradients_that_were_applied_of_those_that_may_change(self, shard, kind):
        if kind == "waits for its clock":
            shard.handle(join())
        log, ids, values = HeldLog(), np.arange(600), np.arange(1200, dtype=np.float32)
        shard.log_to(log, 0)
        values[500] = np.nan
        part = TableGradients("plain", ids, values, copy=np.zeros_like(values))
        values.flags.writeable = False
        if kind == "equal ids":
            part = replace(part, ids=ids % 300, unique=False)
        elif kind == "bundle":
            part = replace(part, table="", members=("plain", "other"), counts=(290, 310))
            shard.handle(Declare(table("other", 2)))
        parts = [self.part("picky", 2.0), part] if kind == "raises" else [part]
        with suppress(BadOptimizer):
            shard.handle(push(*parts, difference=kind == "difference"))
        logged = log.events[-1].push.tables[-1].gradients
        np.testing.assert_array_equal(logged, values)
        assert logged.flags.writeable, "a copy"

    def test_a_log_has_the_gradients_that_came_although_a_row_function_writes_to_its_own(self, shard):
        log = HeldLog()
        shard.log_to(log, 0)
        shard.handle(push(self.part("picky")))
        assert log.events[-1].push.tables[0].gradients.all()

    def test_a_bundle_whose_row_function_raises_leaves_no_trace(self, shard):
        def both(last):
            values = np.ones((2 * len(IDS), 2), np.float32)
            values[-1] = last
            members, counts = ("plain", "picky"), (len(IDS), len(IDS))
            return TableGradients("", np.tile(IDS, 2), values, members=members, counts=counts)

        shard.handle(push(both(1.0)))
        before = self.records(shard)
        with raises(BadOptimizer, reason=re.compile("table 'picky'")):
            shard.handle(push(both(2.0), seq=2))
        assert self.records(shard) == before
        assert shard.handle(push(both(1.0), seq=2)).applied == 2 * len(IDS)

    def test_a_clock_whose_row_function_raises_leaves_no_trace(self, shard):
        for worker in (0, 1):
            shard.handle(join(worker, workers=2))
        for worker in (0, 1):
            shard.handle(push(self.part("plain"), self.part("picky", 2.0), worker=worker))
        with pytest.raises(UpdateFailed):
            rows(shard, *IDS, name="plain", worker=0, epoch=1, required_clock=1)
        assert [np.unique(np.array(found)[:, :2]).tolist() for found in self.records(shard)] == [[4], [4]]


class TestRoutes:
    @pytest.fixture
    def shard(self):
        return make_shard(table("t", 2), table("u", 2))

    def pull(self, shard, route=0, epoch=1):
        reply = shard.handle(Pull(1, (TableIds("t", ids_of(1, 2, 3), route),), worker=4, epoch=epoch))
        return reply.tables[0].tolist()

    def push(self, shard, route=7, name="t", count=3, **fields):
        part = gradients((), name=name, gradients=np.ones((count, 2), np.float32), route=route)
        return shard.handle(push(part, worker=4, **fields))

    def test_a_push_may_name_the_ids_of_a_pull_and_a_repeated_one_is_recognised_though_they_are_forgotten(self, shard):
        self.pull(shard, route=7)
        self.pull(shard, route=7, epoch=2)  # one that only reads by the number of a worker takes none of its routes
        assert [self.push(shard) for _ in range(2)] == [Pushed(False, 3, 0), Pushed(True, 3, 0)]
        with pytest.raises(UnknownRoute):
            self.push(shard, seq=2)
        assert self.pull(shard) == [[-1.0, -1.0]] * 3

    @pytest.mark.parametrize(
        ("error", "other"),
        [
            (UnknownRoute, {"route": 8}),
            (UnknownRoute, {"epoch": 2}),
            (UnknownRoute, {"name": "u"}),
            (WrongDim, {"count": 2}),
        ],
    )
    def test_of_another_number_incarnation_table_or_count_nothing_is_applied(self, shard, other, error):
        self.pull(shard, route=7)
        with pytest.raises(error):
            self.push(shard, **other)
        assert self.pull(shard) == [[0.0, 0.0]] * 3


class TestRouteCache:
    IDS = ids_of(1, 2, 3)
    SIZE = routes_module._size("t", IDS)

    @pytest.fixture
    def routes(self):
        return RouteCache()

    def known(self, routes, *places):
        return [routes.find(worker, 1, number, "t") is not None for worker, number in places]

    def test_ids_kept_are_a_copy(self, routes):
        ids = self.IDS.copy()
        routes.keep(0, 1, 5, "t", ids)
        ids[:] = 9
        assert routes.find(0, 1, 5, "t").tolist() == [1, 2, 3]

    def test_the_oldest_routes_of_a_worker_are_dropped_by_number_and_by_bytes(self, routes, monkeypatch):
        for number in range(1, routes_module.MAX_ROUTES + 2):
            routes.keep(0, 1, number, "t", ids_of(1))
        assert self.known(routes, (0, 1), (0, 2)) == [False, True]
        monkeypatch.setattr(routes_module, "MAX_BYTES", 2 * self.SIZE)
        for number in (1, 1, 2):  # the same number twice counts once
            routes.keep(1, 1, number, "t", self.IDS)
        assert self.known(routes, (1, 1), (1, 2)) == [True, True]
        routes.keep(1, 1, 3, "t", self.IDS)
        assert self.known(routes, (1, 1), (1, 3)) == [False, True]

    def test_the_workers_that_kept_none_for_longest_are_dropped_by_number_and_by_bytes(self, routes, monkeypatch):
        monkeypatch.setattr(routes_module, "MAX_WORKERS", 2)
        for worker in (0, 1, 0, 2):
            routes.keep(worker, 1, 1, "t", self.IDS)
        assert self.known(routes, (0, 1), (1, 1), (2, 1)) == [True, False, True]
        monkeypatch.setattr(routes_module, "MAX_WORKERS", 9)
        monkeypatch.setattr(routes_module, "MAX_ALL_BYTES", 3 * self.SIZE)
        for worker in (3, 4):
            routes.keep(worker, 1, 1, "t", self.IDS)
        assert self.known(routes, (0, 1), (2, 1), (3, 1), (4, 1)) == [False, True, True, True]
        routes.forget(3, 1, 1)
        routes.keep(5, 1, 1, "t", self.IDS)  # the place of what was forgotten
        assert self.known(routes, (2, 1), (4, 1), (5, 1)) == [True, True, True]

    def keep_bundle(self, routes, number, ids):
        """As a message brings it, with names of its own."""
        members = tuple([f"table.{name}" for name in range(300)])
        part = TableIds("", ids, number, members=members, counts=(len(ids),) + (0,) * 299)
        routes.keep(1, 1, number, kept_for(part), ids)

    @pytest.mark.parametrize("ids", [[], [7]], ids=["none", "one"])
    def test_what_bundles_leave_is_counted_whole_and_not_their_members(self, routes, ids):
        tracemalloc.start()
        try:
            for number in range(1, 501):
                self.keep_bundle(routes, number, ids_of(*ids))
            # threads of pytest and of tests before may take memory meanwhile
            own = [tracemalloc.Filter(True, name) for name in (routes_module.__file__, __file__)]
            found = tracemalloc.take_snapshot().filter_traces(own).statistics("filename")
        finally:
            tracemalloc.stop()
        taken = sum(file.size for file in found)
        assert taken <= routes._nbytes + 10_000  # of the cache itself
        assert routes._nbytes == 500 * len(ids) * (routes_module._ROUTE_BYTES + 16 + 8)
