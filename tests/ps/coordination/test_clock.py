"""The clock of a job on one shard: who is waited for, what its pushes become, and who is evicted."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from embershard.proto import spec
from embershard.proto.errors import (
    BadOptimizer,
    ClockAhead,
    InvalidRequest,
    LeaseLost,
    ModeMismatch,
    StaleRun,
    StaleWorker,
    TableFull,
    UpdateFailed,
)
from embershard.proto.messages import (
    Declare,
    Heartbeat,
    HeartbeatAck,
    Join,
    Joined,
    Leave,
    LeaveAck,
    Pull,
    Push,
    Pushed,
    PushToken,
    Rows,
    ShardStatus,
    TableGradients,
    TableIds,
    replace,
)
from embershard.proto.routing import Placement
from embershard.ps.coordination import clock as clock_module
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Table

DIM = 2
LEASE = 10.0
IDS = (1, 2, 3)


def ids_of(*ids: int) -> np.ndarray:
    return np.array(ids, np.int64)


def rows_of(num_rows: int, value: float) -> np.ndarray:
    return np.full((num_rows, DIM), value, np.float32)


@dataclass
class Job:
    """A shard, and workers that speak to it at a time of the test's choice."""

    optimizer: spec.Optimizer = field(default_factory=lambda: spec.SGD(lr=1.0))
    now: float = 100.0
    seqs: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shard = Shard(0, Placement.even(1), OptimizerRegistry())
        self.declare("items")

    def declare(self, name: str, dim: int = DIM) -> None:
        made = spec.TableSpec(name=name, dim=dim, optimizer=self.optimizer, initializer=spec.Constant(value=0.0))
        self.shard.handle(Declare(made), self.now)

    def join(self, worker: int, clock: int = 0, *, epoch: int = 1, workers: int = 1, **settings: object) -> Joined:
        wanted = {"staleness": 0, "lease_ms": round(LEASE * 1000), **settings}
        reply = self.shard.handle(Join(worker=worker, epoch=epoch, clock=clock, workers=workers, **wanted), self.now)  # type: ignore[arg-type]
        assert isinstance(reply, Joined)
        return reply

    def together(self, workers: int, **settings: object) -> None:
        for worker in range(workers):
            self.join(worker, workers=workers, **settings)  # type: ignore[arg-type]

    def leave(self, worker: int, *, epoch: int = 1, rest: bool = False) -> None:
        assert self.shard.handle(Leave(worker=worker, epoch=epoch, pause=rest), self.now) == LeaveAck()

    def beat(self, worker: int, epoch: int = 1) -> HeartbeatAck:
        reply = self.shard.handle(Heartbeat(worker=worker, epoch=epoch), self.now)
        assert isinstance(reply, HeartbeatAck)
        return reply

    def message(self, worker: int, clock: int, *parts: TableGradients, epoch: int = 1, **fields: object) -> Push:
        seq = self.seqs[worker, epoch] = self.seqs.get((worker, epoch), 0) + 1
        return Push(PushToken(worker, epoch, seq, 0), clock, 1, parts, **fields)  # type: ignore[arg-type]

    def send(self, request: Push) -> Pushed:
        reply = self.shard.handle(request, self.now)
        assert isinstance(reply, Pushed)
        return reply

    def push(self, worker: int, clock: int, value: float = 1.0, ids: tuple[int, ...] = IDS, **fields: object) -> Pushed:
        part = TableGradients("items", ids_of(*ids), rows_of(len(ids), value))
        return self.send(self.message(worker, clock, part, **fields))  # type: ignore[arg-type]

    def pull(self, *ids: int, worker: int = 0, epoch: int = 1, after: int = 0, name: str = "items") -> Rows:
        reply = self.shard.handle(Pull(1, (TableIds(name, ids_of(*ids)),), worker, epoch, after), self.now)
        assert isinstance(reply, Rows)
        return reply

    def row(self, id_: int, name: str = "items") -> list[float]:
        return self.pull(id_, worker=99, name=name).tables[0][0].tolist()

    def wait(self, seconds: float, *beating: int) -> None:
        """Time passes; some workers are heard of at its end."""
        self.now += seconds
        for worker in beating:
            self.shard.handle(Heartbeat(worker=worker, epoch=1), self.now)
        self.shard.advance(self.now)

    @property
    def status(self) -> ShardStatus:
        return self.shard.status()


@pytest.fixture
def job():
    return Job()


class TestGathering:
    def test_a_clock_is_applied_once_all_members_have_pushed_it(self, job):
        job.together(2)
        assert job.push(0, 0, 1.0) == Pushed(duplicate=False, applied=3, skipped=0)
        assert job.row(1) == [0, 0]
        job.push(1, 0, 3.0)
        assert job.row(1) == [-2, -2]
        assert job.status.clock == 1

    def test_workers_count_by_their_weight(self, job):
        job.together(2)
        job.push(0, 0, 1.0, weight=3.0)
        job.push(1, 0, 5.0, weight=1.0)
        assert job.row(1) == [-2, -2]

    def test_a_row_that_some_workers_did_not_read_counts_as_zero_from_them(self, job):
        job.together(2)
        job.push(0, 0, 1.0, ids=(1, 2))
        job.push(1, 0, 1.0, ids=(2, 3))
        assert [job.row(i)[0] for i in (1, 2, 3)] == [-0.5, -1, -0.5]

    def test_the_sum_is_taken_in_the_order_of_the_workers_whoever_pushes_first(self):
        rng = np.random.default_rng(0)
        gradients = rng.standard_normal((3, 50, DIM)).astype(np.float32)
        weights = [3.0, 1.0, 7.0]
        want = np.zeros((50, DIM), np.float32)
        for gradient, weight in zip(gradients, weights, strict=True):
            want = want + np.float32(weight / sum(weights)) * gradient
        for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
            job = Job()
            job.together(3)
            for worker in order:
                part = TableGradients("items", np.arange(50), gradients[worker])
                job.send(job.message(worker, 0, part, weight=weights[worker]))
            np.testing.assert_array_equal(job.pull(*range(50)).tables[0], -want)

    @pytest.mark.parametrize("optimizer", [spec.Adam(lr=0.1), spec.Adagrad(lr=0.1)], ids=["adam", "adagrad"])
    def test_many_workers_are_as_one_that_pushes_their_weighted_mean(self, optimizer):
        rng = np.random.default_rng(1)
        many, one = Job(optimizer), Job(optimizer)
        many.together(4)
        for clock in range(5):
            gradients = rng.standard_normal((4, 20, DIM)).astype(np.float32)
            for worker in range(4):
                many.send(many.message(worker, clock, TableGradients("items", np.arange(20), gradients[worker])))
            mean = TableGradients("items", np.arange(20), gradients.mean(0))
            one.send(one.message(0, clock, mean))
        got, want = many.pull(*range(20)).tables[0], one.pull(*range(20)).tables[0]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

    def test_the_pushes_of_a_single_member_have_the_bits_of_pushes_of_none(self):
        rng = np.random.default_rng(2)
        member, free = Job(spec.Adam(lr=0.1)), Job(spec.Adam(lr=0.1))
        member.together(1)
        for clock in range(4):
            for last in (False, False, True):  # a push in three messages, of which two have ids in common
                rows = rng.standard_normal((30, DIM)).astype(np.float32)
                part = TableGradients("items", np.arange(30) + (7 if last else 0), rows, 0.7)
                assert member.send(member.message(0, clock, part, last=last, weight=0.3)) == free.send(
                    free.message(0, clock, part, last=last)
                )
        np.testing.assert_array_equal(member.pull(*range(40)).tables[0], free.pull(*range(40)).tables[0])

    def test_a_push_may_come_in_several_messages_of_different_tables(self, job):
        job.declare("users", dim=3)
        job.together(2)
        users = TableGradients("users", ids_of(7), np.full((1, 3), 2.0, np.float32))
        job.push(0, 0, 1.0, last=False)
        job.push(1, 0, 1.0)
        assert job.row(1) == [0, 0]
        job.send(job.message(0, 0, users))
        assert job.row(1) == [-1, -1]
        assert job.row(7, "users") == [-1, -1, -1]

    def test_a_gradient_that_is_not_finite_is_left_out_for_its_worker_alone(self, job):
        job.together(2)
        rows = rows_of(3, 1.0)
        rows[1, 0] = np.nan
        assert job.send(job.message(0, 0, TableGradients("items", ids_of(*IDS), rows))) == Pushed(False, 2, 1)
        job.push(1, 0, 1.0)
        assert [job.row(i)[0] for i in IDS] == [-1, -0.5, -1]
        assert (job.status.pushed_rows, job.status.skipped_rows) == (5, 1)

    def test_differences_are_added_past_the_optimizer(self, job):
        job.together(2)
        job.push(0, 0, 4.0, difference=True, weight=1.0)
        job.push(1, 0, 8.0, difference=True, weight=3.0)
        assert job.row(1) == [7, 7]
        job.leave(1)
        job.push(0, 1, 1.0, difference=True)
        assert job.row(1) == [8, 8]

    def test_a_difference_leaves_the_state_of_the_optimizer_alone(self):
        job, plain = Job(spec.Adagrad(lr=1.0)), Job(spec.Adagrad(lr=1.0))
        job.push(0, 0, 5.0, difference=True)
        job.push(0, 1, 2.0)
        plain.push(0, 0, 2.0)
        np.testing.assert_allclose(np.array(job.row(1)) - 5, plain.row(1))

    def test_a_worker_of_weight_zero_does_not_count(self, job):
        job.together(2)
        job.push(0, 0, 100.0, weight=0.0)
        job.push(1, 0, 2.0, weight=5.0)
        assert job.row(1) == [-2, -2]
        job.push(0, 1, 1.0, weight=0.0)
        job.push(1, 1, 1.0, weight=0.0)
        assert job.row(1) == [-2, -2]
        assert job.status.clock == 2

    def test_nor_does_it_alone(self, job):
        job.together(1)
        job.push(0, 0, 100.0, weight=0.0)
        assert job.row(1) == [0, 0]
        assert job.status.clock == 1

    @pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
    def test_a_weight_without_sense_is_refused(self, job, weight):
        job.together(2)
        with pytest.raises(InvalidRequest, match="weight"):
            job.push(0, 0, weight=weight)

    def test_a_push_that_comes_twice_counts_once_also_after_its_clock_closed(self, job):
        job.together(2)
        message = job.message(0, 0, TableGradients("items", ids_of(1), rows_of(1, 2.0)))
        first = job.send(message)
        assert job.send(message) == replace(first, duplicate=True)
        job.push(1, 0, 2.0)
        assert job.send(message) == replace(first, duplicate=True)
        assert job.row(1) == [-2, -2]
        assert job.status.clock == 1

    def test_what_waits_counts_for_the_memory_of_a_shard(self, job):
        job.together(2)
        budget = job.shard._budget
        many = tuple(range(1000))
        empty = budget.used
        job.push(0, 0, ids=many)
        kept = 1000 * (8 + 4 * DIM)  # ids and gradients
        assert job.status.used_bytes == empty + kept
        table = job.shard._tables.entry("items").table
        budget.limit = budget.used + table.growth(1010) + 1000  # for its rows, and not for another thousand
        with pytest.raises(TableFull):
            job.push(1, 0, ids=tuple(range(1000, 2000)))
        job.push(1, 0, ids=(1, 2))
        assert job.status.tables[0].rows == 1000
        assert job.status.used_bytes == job.status.tables[0].bytes  # what was gathered has left the account

    def test_what_a_worker_left_behind_takes_no_memory(self, job):
        job.together(3)
        before = job.status.used_bytes
        job.push(0, 0, last=False)
        job.leave(0)
        assert job.status.used_bytes == before

    def test_a_worker_too_far_ahead_waits_while_much_is_gathered(self, job, monkeypatch):
        monkeypatch.setattr(clock_module, "GATHER_BYTES", 10)
        job.together(2)
        job.push(0, 0)
        with pytest.raises(ClockAhead, match="worker 1"):
            job.push(0, 1)
        job.push(1, 0)  # what frees it
        job.push(0, 1)
        job.push(1, 1)
        assert job.status.clock == 2

    def test_a_clock_that_is_closed_or_pushed_already_is_refused(self, job):
        job.together(2)
        job.push(0, 3)
        with pytest.raises(InvalidRequest, match="the first that it may push is 4"):
            job.push(0, 3)
        job.push(1, 3)
        with pytest.raises(InvalidRequest, match="the first that it may push is 4"):
            job.push(1, 0)

    def test_a_push_is_answered_for_itself_where_the_update_of_its_clock_fails(self, job, monkeypatch):
        job.together(2)
        job.push(0, 0)

        def broken(*_):
            raise BadOptimizer(optimizer="mine", reason="it raised")

        monkeypatch.setattr(Table, "apply", broken)
        last = job.message(1, 0, TableGradients("items", ids_of(1), rows_of(1, 1.0)))
        assert job.send(last) == Pushed(duplicate=False, applied=1, skipped=0)
        monkeypatch.undo()
        assert job.send(last) == Pushed(duplicate=True, applied=1, skipped=0)
        assert job.status.clock == 1
        job.push(0, 1)
        job.push(1, 1)
        assert job.row(1) == [-1, -1]

    def test_who_waits_for_a_clock_whose_update_failed_is_told(self, job, monkeypatch):
        job.together(2)
        job.push(0, 0)
        job.push(1, 0)
        job.push(0, 1)
        assert job.status.failed_update == ""

        def broken(*_):
            raise BadOptimizer(optimizer="mine", reason="it raised")

        monkeypatch.setattr(Table, "apply", broken)
        job.push(1, 1)
        monkeypatch.undo()
        for worker in (0, 1):
            with pytest.raises(UpdateFailed) as failed:
                job.pull(1, worker=worker, after=2)
            assert failed.value.clock == 1
        assert "mine" in job.status.failed_update
        job.pull(1, after=1)  # what it waits for was applied
        for worker in (0, 1):
            job.leave(worker)
        job.join(0, clock=1, epoch=2)
        job.push(0, 1, epoch=2)
        job.pull(1, after=2, epoch=2)  # of another job
        assert job.status.failed_update == ""

    def test_an_update_that_meets_a_defect_is_told_too(self, job, monkeypatch):
        job.together(2)
        job.push(0, 0)
        monkeypatch.setattr(Table, "apply", lambda *_: 1 / 0)
        job.push(1, 0)
        with pytest.raises(UpdateFailed, match="ZeroDivisionError"):
            job.pull(1, after=1)

    def test_the_clocks_after_one_whose_row_function_raises_are_applied(self, job, monkeypatch):
        job.together(2)
        for clock in range(3):
            job.push(0, clock)
        apply = Table.apply

        def broken_once(*_):
            monkeypatch.setattr(Table, "apply", apply)
            raise BadOptimizer(optimizer="mine", reason="it raised")

        monkeypatch.setattr(Table, "apply", broken_once)
        job.leave(1)
        assert job.status.clock == 3
        assert job.row(1) == [-2, -2]


class TestWaiting:
    def test_a_pull_is_answered_once_the_clocks_before_it_are_closed(self, job):
        job.together(2)
        job.push(0, 0)
        with pytest.raises(ClockAhead, match=r"clock 0 for worker 1 \(last heartbeat 0\.0 s ago\)"):
            job.pull(1, after=1)
        job.push(1, 0)
        assert job.pull(1, after=1).version == 1

    def test_nothing_closes_before_all_expected_workers_have_joined(self, job):
        job.join(0, workers=3)
        job.join(1, workers=3)
        job.push(0, 0)
        job.push(1, 0)
        job.wait(2.0)
        with pytest.raises(ClockAhead) as caught:
            job.pull(1, after=1)
        assert caught.value.fields == {"clock": 0, "workers": "2 (not here yet)", "seconds": 2.0}
        assert job.join(2, workers=3) == Joined(member=True, clock=0, started=True, members=(0, 1, 2))
        job.push(2, 0, 4.0)
        assert job.row(1) == [-2, -2]

    def test_the_push_of_a_worker_that_is_here_first_is_kept_for_the_others(self, job):
        job.join(0, workers=2)
        job.push(0, 0, 1.0)
        assert job.row(1) == [0, 0]
        job.join(1, workers=2)
        job.push(1, 0, 3.0)
        assert job.row(1) == [-2, -2]

    def test_a_resting_worker_is_not_named_as_one_that_is_waited_for(self, job):
        job.together(3)
        job.leave(2, rest=True)
        job.push(0, 0)
        with pytest.raises(ClockAhead, match="clock 0 for worker 1 "):
            job.pull(1, after=1)

    def test_a_join_that_comes_again_takes_no_push_back(self, job):
        job.together(2)
        job.push(0, 0)
        assert job.join(0, 0).member
        job.push(1, 0)
        assert job.status.clock == 1

    def test_a_worker_that_joins_late_is_waited_for_from_its_clock_on(self, job):
        job.together(1)
        job.push(0, 0)
        assert job.join(1, 0) == Joined(member=False, clock=1, started=True, members=(0,))
        assert job.join(1, 3) == Joined(member=True, clock=1, started=True, members=(0, 1))
        for clock in (1, 2, 3):
            job.push(0, clock)
        assert job.status.clock == 3
        job.push(1, 3, 3.0)
        assert job.row(1) == [-5, -5]

    def test_a_worker_that_leaves_is_not_waited_for(self, job):
        job.together(2)
        job.push(0, 0)
        job.leave(1)
        job.leave(1)  # again, as after a lost reply
        assert job.row(1) == [-1, -1]
        assert [member.worker for member in job.status.members] == [0]

    def test_what_a_worker_pushed_to_the_end_counts_after_it_left(self, job):
        job.together(3)
        job.push(0, 0, 3.0)
        job.leave(0)
        job.push(1, 0, 3.0)
        job.push(2, 0, 3.0)
        assert job.row(1) == [-3, -3]

    def test_what_a_worker_did_not_push_to_the_end_is_dropped_when_it_leaves(self, job):
        job.together(2)
        job.push(0, 0, 100.0, last=False)
        job.push(1, 0, 3.0)
        job.leave(0)
        assert job.row(1) == [-3, -3]

    def test_what_a_worker_alone_did_not_push_to_the_end_is_dropped_too(self, job):
        job.together(1)
        job.push(0, 0, 100.0, last=False)
        job.leave(0)
        assert job.row(1) == [0, 0]

    def test_what_a_worker_did_not_push_to_the_end_is_dropped_when_it_rests(self, job):
        job.together(2)
        job.push(0, 0, 100.0, last=False)
        job.leave(0, rest=True)
        job.join(0)
        job.push(0, 0, 1.0)
        job.push(1, 0, 3.0)
        assert job.row(1) == [-2, -2]

    def test_what_was_pushed_to_the_end_is_applied_when_nobody_is_left(self, job):
        job.together(2)
        job.push(0, 0, 1.0)
        job.push(0, 1, 1.0)
        job.leave(0)
        job.leave(1)
        assert job.row(1) == [-2, -2]

    def test_clocks_that_close_at_once_are_applied_in_their_order(self):
        job, plain = Job(spec.Adagrad(lr=1.0)), Job(spec.Adagrad(lr=1.0))
        job.together(2)
        for clock, value in enumerate((1.0, 5.0)):
            job.push(0, clock, value)
            plain.push(0, clock, value)
        job.leave(1)
        assert job.row(1) == plain.row(1)

    def test_a_worker_that_comes_back_does_not_push_a_clock_twice(self, job):
        job.together(2)
        job.push(0, 0, 1.0)
        job.leave(0)
        assert job.join(0, 0) == Joined(member=False, clock=1, started=True, members=(1,))
        assert job.join(0, 1) == Joined(member=True, clock=0, started=True, members=(0, 1))
        job.push(1, 0, 1.0)
        assert job.row(1) == [-1, -1]

    def test_a_resting_worker_is_not_waited_for_and_keeps_its_place(self, job):
        job.together(2)
        job.leave(1, rest=True)
        job.push(0, 0)
        assert job.status.clock == 1
        assert [(m.worker, m.paused) for m in job.status.members] == [(0, False), (1, True)]
        assert not job.join(1, 0).member
        assert job.join(1, 2).member
        job.push(0, 1)
        job.push(0, 2)
        assert job.status.clock == 2

    def test_a_part_of_a_push_closes_no_clock_of_resting_workers(self, job):
        job.together(2)
        for worker in range(2):
            job.leave(worker, rest=True)
        job.push(0, 0, last=False)
        job.leave(1)
        assert job.status.clock == 0
        job.push(0, 0)
        assert job.status.clock == 1

    def test_a_bound_lets_pushes_be_applied_on_arrival_and_pulls_wait(self, job):
        job.together(2, staleness=2)
        for clock in range(3):
            job.push(0, clock)
        assert job.row(1) == [-3, -3]
        with pytest.raises(ClockAhead):
            job.pull(1, after=1)
        job.push(1, 0)
        assert job.pull(1, after=1).tables[0].tolist() == [[-4, -4]]

    def test_workers_that_never_joined_are_as_before(self, job):
        job.together(2)
        job.push(7, 0, 1.0)
        assert job.row(1) == [-1, -1]
        assert job.status.clock == 0


class TestStaleness:
    def test_the_version_counts_updates_and_the_histogram_what_pushes_missed(self, job):
        job.together(2, staleness=-1)
        job.push(0, 0)
        seen = job.pull(1).version
        assert seen == 1
        job.push(0, 1, version=seen)
        job.push(1, 0, version=seen)
        job.push(1, 1, version=seen, last=False)  # the same push
        job.push(1, 1, version=seen)
        assert job.pull(1).version == 4
        assert job.status.staleness_seen[:4] == [1, 1, 1, 0]

    def test_the_last_place_of_the_histogram_takes_all_beyond(self, job):
        job.push(0, 0)
        for clock in range(50):
            job.push(1, clock)
        job.push(0, 1, version=1)
        assert len(job.status.staleness_seen) == 32
        assert job.status.staleness_seen[31] == 1

    def test_a_closed_clock_is_one_update_that_misses_nothing(self, job):
        job.together(2)
        for clock in range(3):
            version = job.pull(1, after=clock).version
            for worker in range(2):
                job.push(worker, clock, version=version)
        assert job.pull(1).version == 3
        assert job.status.staleness_seen[:2] == [4, 0]  # those of clock 0 saw version 0, which says nothing

    def test_staleness_aware_lr_divides_the_learning_rate_by_what_a_push_missed(self, job):
        job.together(2, staleness=-1, staleness_aware_lr=True)
        job.push(0, 0, 0.0)
        for clock in range(4):
            job.push(1, clock, 0.0, version=1)
        job.push(0, 1, 1.0, version=1)
        assert job.row(1) == [-0.25, -0.25]
        job.push(0, 2, 1.0, version=6)
        assert job.row(1) == [-1.25, -1.25]
        job.push(0, 3, 1.0)  # nobody knows of which version its rows were
        assert job.row(1) == [-2.25, -2.25]

    def test_without_staleness_aware_lr_a_push_counts_in_full_whatever_it_missed(self, job):
        job.together(2, staleness=-1)
        for clock in range(4):
            job.push(1, clock, 0.0)
        job.push(0, 0, 1.0, version=1)
        assert job.row(1) == [-1, -1]


class TestLeases:
    def test_a_worker_that_is_not_heard_of_is_given_up(self, job):
        job.together(2)
        job.push(0, 0, 1.0)
        job.wait(9.0, 0)
        job.wait(0.9, 0)
        assert job.status.clock == 0
        job.wait(0.2, 0)
        assert (job.status.clock, job.status.expired_leases) == (1, 1)
        assert job.row(1) == [-1, -1]
        assert job.beat(0) == HeartbeatAck(clock=1, members=(0,))

    def test_every_request_of_a_member_renews_its_lease(self, job):
        job.together(3)
        for clock in range(4):
            job.now += LEASE * 0.9
            job.pull(1, worker=0, after=clock)
            job.push(1, clock)
            job.beat(2)
            job.shard.advance(job.now)
            job.push(0, clock)
            job.push(2, clock)
        assert [m.lease_seconds for m in job.status.members] == [pytest.approx(LEASE)] * 3
        assert job.status.expired_leases == 0

    def test_a_push_that_comes_again_renews_the_lease_too(self, job):
        job.together(2)
        message = job.message(0, 0, TableGradients("items", ids_of(1), rows_of(1, 1.0)))
        job.send(message)
        job.now += 6
        job.beat(1)
        job.send(message)
        job.now += 6
        job.beat(1)
        assert [m.worker for m in job.status.members] == [0, 1]

    def test_requests_of_a_member_that_was_given_up_are_refused(self, job):
        job.together(2)
        job.push(1, 0, 1.0)
        job.wait(LEASE + 1)
        job.join(2, 5)
        for request in (
            job.message(1, 1, TableGradients("items", ids_of(1), rows_of(1, 1.0))),
            Pull(1, (), 1, 1),
            Heartbeat(worker=1, epoch=1),
            Leave(worker=1, epoch=1),
        ):
            with pytest.raises(LeaseLost, match=r"worker 1 .*10000 ms"):
                job.shard.handle(request, job.now)
        assert job.row(1) == [-1, -1]

    def test_a_push_that_was_taken_before_the_lease_ran_out_is_known_after(self, job):
        job.together(2)
        message = job.message(1, 0, TableGradients("items", ids_of(1), rows_of(1, 1.0)))
        job.send(message)
        job.wait(6.0, 0)
        job.wait(6.0, 0)
        assert job.send(message) == Pushed(duplicate=True, applied=1, skipped=0)

    def test_it_joins_again_at_a_clock_that_it_has_not_pushed(self, job):
        job.together(2)
        job.push(1, 0, 1.0)
        job.wait(9.0, 0)
        job.wait(9.0, 0)
        assert job.join(1, 0) == Joined(member=False, clock=1, started=True, members=(0,))
        assert job.join(1, 1) == Joined(member=True, clock=0, started=True, members=(0, 1))
        job.push(0, 0, 3.0)
        assert job.row(1) == [-2, -2]

    def test_a_part_pushed_before_the_lease_ran_out_does_not_come_back(self, job):
        job.together(2)
        job.push(1, 0, 100.0, last=False)
        job.wait(9.0, 0)
        job.wait(9.0, 0)
        assert job.join(1, 0).member
        job.push(0, 0, 1.0)
        job.push(1, 0, 1.0)
        assert job.row(1) == [-1, -1]

    def test_the_same_worker_alone_goes_on_where_it_was(self, job):
        job.together(1)
        job.push(0, 0)
        job.wait(LEASE + 1)
        assert job.join(0, 0) == Joined(member=False, clock=1, started=True, members=())
        assert job.join(0, 1) == Joined(member=True, clock=1, started=True, members=(0,))
        job.push(0, 1)
        assert job.status.clock == 2

    def test_a_worker_of_whom_a_part_of_a_request_has_arrived_is_not_given_up(self, job):
        job.together(2)
        signs = {0: job.now + 5, 1: job.now - 5}
        job.shard.set_activity_probe(lambda worker, epoch: signs[worker])
        job.wait(LEASE + 1)
        assert [(m.worker, m.lease_seconds) for m in job.status.members] == [(0, LEASE - 6)]

    def test_time_in_which_nobody_could_be_heard_does_not_count(self, job):
        job.together(2)
        job.now += 100
        job.shard.extend_leases(95.0)
        job.shard.advance(job.now)
        assert len(job.status.members) == 2
        job.wait(6.0)
        assert not job.status.members


class TestIncarnations:
    def test_an_earlier_one_is_fenced(self, job):
        job.join(0, epoch=2)
        for request in (
            Join(worker=0, epoch=1, clock=0, staleness=0, workers=1, lease_ms=1000),
            Leave(worker=0, epoch=1),
            Heartbeat(worker=0, epoch=1),
            job.message(0, 0, epoch=1),
        ):
            with pytest.raises(StaleWorker):
                job.shard.handle(request, job.now)
        assert job.status.members[0].worker == 0

    def test_one_that_has_pushed_is_known_without_having_joined(self, job):
        job.push(0, 0, epoch=5)
        with pytest.raises(StaleWorker):
            job.join(0, epoch=4)

    def test_a_newer_one_takes_the_place_at_once(self, job):
        job.together(2)
        job.push(0, 0, 100.0, last=False)
        assert job.join(0, 2, epoch=2) == Joined(member=True, clock=0, started=True, members=(0, 1))
        job.push(1, 0, 1.0)
        job.push(1, 1, 1.0)
        assert job.status.clock == 2
        assert job.row(1) == [-2, -2]

    def test_what_the_earlier_one_pushed_to_the_end_counts(self, job):
        job.together(2)
        job.push(0, 0, 4.0)
        job.join(0, 0, epoch=2)
        job.push(0, 0, 1.0, epoch=2)
        job.push(1, 0, 1.0)
        assert job.row(1) == [-2, -2]

    def test_one_that_takes_the_last_place_loses_nothing_of_those_before(self, job):
        job.together(2)
        job.push(1, 0, 3.0)
        job.leave(1)
        job.join(0, 0, epoch=2)
        assert job.row(1) == [-3, -3]


class TestModes:
    @pytest.mark.parametrize(
        ("what", "settings"),
        [
            ("staleness", {"staleness": 3}),
            ("staleness_aware_lr", {"staleness_aware_lr": True}),
            ("workers", {"workers": 4}),
        ],
    )
    def test_a_worker_with_other_settings_is_refused(self, job, what, settings):
        job.join(0, workers=3)
        with pytest.raises(ModeMismatch, match=f"worker 1 joins with {what}"):
            job.join(1, **{"workers": 3, **settings})  # type: ignore[arg-type]
        assert len(job.status.members) == 1

    def test_a_job_that_has_begun_takes_more_workers_than_were_expected(self, job):
        job.together(2)
        assert job.join(2, 4, workers=3).member

    def test_a_shard_serves_one_job_after_the_other(self, job):
        job.together(2)
        for worker in range(2):
            job.push(worker, 0)
            job.leave(worker)
        assert job.status.clock == 1
        assert job.join(0, 0, epoch=2, workers=2, staleness=4) == Joined(
            member=True, clock=0, started=False, members=(0,)
        )
        assert job.status.staleness == 4

    def test_workers_of_the_job_before_may_begin_the_next(self, job):
        job.together(2)
        for worker in range(2):
            job.push(worker, 0)
        for worker in range(2):
            job.leave(worker)
        assert job.join(1, 0, workers=2) == Joined(member=True, clock=0, started=False, members=(1,))
        assert job.join(0, 0, workers=2) == Joined(member=True, clock=0, started=True, members=(0, 1))

    def test_one_whose_lease_ran_out_may_begin_another_with_other_settings(self, job):
        job.together(1)
        job.push(0, 0)
        job.wait(LEASE + 1)
        assert job.join(0, 0, staleness=3) == Joined(member=True, clock=0, started=True, members=(0,))
        assert job.status.staleness == 3

    def test_a_worker_alone_may_be_restarted_with_other_settings(self, job):
        job.together(1)
        job.push(0, 0)
        assert job.join(0, 0, epoch=2, staleness=-1) == Joined(member=True, clock=0, started=True, members=(0,))

    @pytest.mark.parametrize(
        "field",
        [
            {"worker": 2**20},
            {"clock": 2**63},
            {"staleness": -2},
            {"workers": 0},
            {"lease_ms": 0},
            {"lease_ms": 2**32 - 1},
            {"run": 2**63},
        ],
        ids=str,
    )
    def test_a_join_without_sense_is_refused(self, job, field):
        with pytest.raises(InvalidRequest, match=next(iter(field))):
            job.shard.handle(
                replace(Join(worker=0, epoch=1, clock=0, staleness=0, workers=1, lease_ms=1000), **field), job.now
            )

    def test_a_stranger_is_told_to_join(self, job):
        with pytest.raises(InvalidRequest, match="worker 5 is no member"):
            job.beat(5)
        job.leave(5)  # nobody waits for it


class TestRuns:
    def test_a_later_one_begins_anew_whatever_is_left_of_the_leases(self, job):
        job.together(2, run=1)
        for worker in range(2):
            job.push(worker, 0)
        assert job.join(0, epoch=2, workers=2, run=2, staleness=3) == Joined(
            member=True, clock=0, started=False, members=(0,)
        )
        assert (job.status.clock, job.status.staleness, job.status.expired_leases) == (0, 3, 0)
        assert job.row(1) == [-1, -1]  # it is the same table
        job.push(0, 0, epoch=2)
        assert job.status.clock == 0  # the other worker of this run is still to come
        assert job.join(1, epoch=2, workers=2, run=2, staleness=3) == Joined(
            member=True, clock=0, started=True, members=(0, 1)
        )

    def test_what_was_pushed_to_the_end_in_the_earlier_one_counts(self, job):
        job.together(2, run=1)
        job.push(0, 0, 4.0)
        job.push(1, 0, 100.0, last=False)
        job.join(0, epoch=2, run=2)
        assert job.row(1) == [-4, -4]

    def test_what_is_left_of_an_earlier_one_is_refused(self, job):
        job.together(2, run=1)
        job.push(0, 0)
        pulls = [Pull(1, (TableIds("items", ids_of(1)),), worker, 1, 1) for worker in range(2)]
        pushes = [job.message(worker, 1) for worker in range(2)]
        job.join(0, epoch=2, run=2)
        for request in (Heartbeat(worker=0, epoch=1), pulls[0], pushes[0]):
            with pytest.raises(StaleWorker, match="its job was started again"):
                job.shard.handle(request, job.now)
        for request in (Heartbeat(worker=1, epoch=1), pulls[1], pushes[1]):
            with pytest.raises(LeaseLost):
                job.shard.handle(request, job.now)
        for epoch in (1, 3):
            with pytest.raises(StaleRun, match="worker 1 belongs to run 1, which is over: run 2 has begun"):
                job.join(1, 9, epoch=epoch, run=1)
        assert [member.worker for member in job.status.members] == [0]

    def test_an_earlier_one_does_not_come_back_after_the_later_one(self, job):
        job.join(0, run=1)
        job.join(1, run=2)
        job.leave(1)
        with pytest.raises(StaleRun):
            job.join(0, run=1)
        assert not job.status.members

    def test_a_worker_that_is_started_again_goes_on_with_its_own(self, job):
        job.together(2, run=7)
        for worker in range(2):
            job.push(worker, 0)
        assert job.join(0, epoch=2, run=7) == Joined(member=False, clock=1, started=True, members=(1,))
        assert job.join(0, 3, epoch=2, run=7) == Joined(member=True, clock=1, started=True, members=(0, 1))

    def test_a_worker_of_none_takes_part_in_the_one_that_goes_on_and_in_no_other(self, job):
        job.join(0, run=1)
        assert job.join(1) == Joined(member=True, clock=0, started=True, members=(0, 1))
        job.join(0, epoch=2, run=2)
        with pytest.raises(StaleRun, match="run 1, which is over: run 2"):
            job.join(1)
        assert job.join(1, epoch=2).members == [0, 1]

    def test_one_without_members_leaves_the_shard_to_workers_of_none(self, job):
        job.join(0, run=1)
        job.push(0, 0)
        job.leave(0)
        assert job.join(0, epoch=2) == Joined(member=True, clock=0, started=True, members=(0,))

    def test_a_worker_may_begin_the_next_one_itself(self, job):
        job.join(0, run=1)
        job.push(0, 0)
        assert job.join(0, run=2) == Joined(member=True, clock=0, started=True, members=(0,))

    def test_an_incarnation_that_is_refused_begins_none(self, job):
        job.join(0, epoch=2, run=1)
        with pytest.raises(StaleWorker):
            job.join(0, epoch=1, run=2)
        assert job.beat(0, epoch=2).members == [0]


@dataclass
class _Worker:
    epoch: int = 0
    next: int = 0
    member: bool = False
    paused: bool = False
    heard: float = 0.0
    gone_at: int = 0  # its clock when it left, or its lease ran out


class ClockModel(RuleBasedStateMachine):
    """Random joins, pushes, rests, leaves and lost leases of three workers, against a list of what was pushed."""

    WORKERS = 3

    @initialize(late=st.booleans())
    def begin(self, late: bool) -> None:
        self.job = Job()
        self.workers = [_Worker() for _ in range(self.WORKERS)]
        self.pushed: dict[int, dict[tuple[int, int], tuple[list[float], float]]] = {}  # complete ones
        self.parts: dict[int, list[float]] = {}  # values of a worker's incomplete push
        self.open = 0
        self.joined: set[int] = set()
        for worker in range(self.WORKERS - late):
            self._join(worker, 0)

    def _join(self, worker: int, clock: int) -> None:
        it = self.workers[worker]
        joined = self.job.join(worker, clock, epoch=it.epoch, workers=self.WORKERS)
        if joined.member:
            self.joined.add(worker)
            it.next = max(it.next, clock) if it.member else clock
            it.member, it.paused, it.heard = True, False, self.job.now
            self.parts.pop(worker, None)

    def _gone(self, worker: int) -> None:
        self.workers[worker].member = False
        self.workers[worker].gone_at = self.workers[worker].next
        self.parts.pop(worker, None)

    def _expire(self) -> None:
        for worker, it in enumerate(self.workers):
            if it.member and self.job.now - it.heard > LEASE:
                self._gone(worker)

    def _settle(self) -> None:
        """Who has to push which clock decides what is closed."""
        here = any(it.member for it in self.workers)
        if here and len(self.joined) < self.WORKERS:
            return
        if not here:
            self.open = max([self.open, *(clock + 1 for clock in self.pushed)])
            return
        active = [it.next for it in self.workers if it.member and not it.paused]
        ends = active or [clock + 1 for clock in self.pushed]
        self.open = max(self.open, min(active) if active else max(ends, default=0))

    members = st.integers(0, WORKERS - 1)

    @rule(
        worker=members,
        value=st.sampled_from([0.1, -0.7, 1 / 3, 12.34, 0.0123]),
        weight=st.sampled_from([1.0, 0.3]),
        last=st.sampled_from([True, True, False]),
    )
    def push(self, worker: int, value: float, weight: float, last: bool) -> None:
        it = self.workers[worker]
        if not it.member or it.paused:
            return
        part = TableGradients("items", ids_of(1), rows_of(1, value))
        message = self.job.message(worker, it.next, part, epoch=it.epoch, last=last, weight=weight)
        assert not self.job.send(message).duplicate
        assert self.job.send(message).duplicate
        it.heard = self.job.now
        values = self.parts.setdefault(worker, [])
        values.append(value)
        if last:
            self.pushed.setdefault(it.next, {})[worker, it.epoch] = (values, weight)
            del self.parts[worker]
            it.next += 1
        self._settle()

    @rule()
    def all_push(self) -> None:
        for worker in range(self.WORKERS):
            self.push(worker, 0.1 * (worker + 1), 1.0, True)

    @rule(worker=members, rest=st.booleans())
    def leave(self, worker: int, rest: bool) -> None:
        it = self.workers[worker]
        if not it.member or sum(other.member for other in self.workers) == 1:
            return  # the last one's would begin another job
        self.job.leave(worker, epoch=it.epoch, rest=rest)
        it.heard = self.job.now
        if rest:
            it.paused = True
            self.parts.pop(worker, None)
        else:
            self._gone(worker)
        self._settle()

    @precondition(lambda self: any(it.member for it in self.workers))
    @rule(worker=members, ahead=st.integers(0, 2), again=st.booleans())
    def join(self, worker: int, ahead: int, again: bool) -> None:
        it = self.workers[worker]
        if it.member and not it.paused and not again:
            return
        if again:
            if it.member and sum(other.member for other in self.workers) == 1:
                return
            it.epoch += 1
            self._gone(worker)
            it.next = it.gone_at = 0
            self._settle()
        pushed = 0 if it.member else it.gone_at
        self._join(worker, self.open + ahead)
        assert it.member == (self.open + ahead >= pushed)
        self._settle()

    @rule(seconds=st.sampled_from([1.0, 4.0, 7.0]), beating=st.sets(members))
    def pass_time(self, seconds: float, beating: set[int]) -> None:
        beating = {worker for worker in beating if self.workers[worker].member}
        if not beating:
            return  # the last ones would be given up
        self.job.now += seconds
        for worker in sorted(beating):
            it = self.workers[worker]
            try:
                self.job.beat(worker, it.epoch)
            except LeaseLost:
                assert self.job.now - it.heard > LEASE
                continue
            it.heard = self.job.now
        self.job.shard.advance(self.job.now)
        self._expire()
        self._settle()

    @invariant()
    def the_clock_is_where_it_should_be(self) -> None:
        assert self.job.status.clock == self.open
        here = [(w, it.next, it.paused) for w, it in enumerate(self.workers) if it.member]
        assert [(m.worker, m.clock, m.paused) for m in self.job.status.members] == here

    @invariant()
    def the_row_is_what_the_closed_clocks_make_of_it(self) -> None:
        row = np.float32(0)
        for clock in sorted(clock for clock in self.pushed if clock < self.open):
            shares = [self.pushed[clock][sender] for sender in sorted(self.pushed[clock])]
            weights = [float(np.float32(weight)) for _, weight in shares]
            total = np.float32(0)
            if len(shares) == 1:
                for value in shares[0][0]:
                    row = row - np.float32(value)
                continue
            for (values, _), weight in zip(shares, weights, strict=True):
                for value in values:
                    total = total + np.float32(weight / sum(weights)) * np.float32(value)
            row = row - total
        assert self.job.row(1) == [row, row]


ClockModel.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestClockModel = ClockModel.TestCase
