"""The clock of a job on one shard: who is waited for, what its pushes become, and who is evicted."""

from dataclasses import dataclass
from functools import partial
from operator import methodcaller

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from embershard.proto import errors, spec
from embershard.proto.messages import (
    Declare,
    Heartbeat,
    Joined,
    Leave,
    LeaveAck,
    Pull,
    Pushed,
    TableGradients,
    TableIds,
)
from embershard.ps.coordination import clock as clock_module
from embershard.ps.table.table import Table
from harness import shards
from harness.raises import raises
from harness.shards import ids_of, make_shard, table

DIM = 2
LEASE = 10.0
IDS = (1, 2, 3)


class Job:
    """A shard, and workers that speak to it at a time of the test's choice."""

    def __init__(self, optimizer=spec.SGD(lr=1.0)) -> None:  # noqa: B008
        self.shard, self.now, self.seqs = make_shard(table("items", DIM, optimizer=optimizer)), 100.0, {}

    def join(self, worker, clock=0, **fields):
        lease = {"lease_ms": round(LEASE * 1000)}
        return self.shard.handle(shards.join(worker, clock=clock, **lease, **fields), self.now)

    def together(self, workers, **fields):
        for worker in range(workers):
            self.join(worker, workers=workers, **fields)

    def leave(self, worker, *, epoch=1, **fields):
        assert self.shard.handle(Leave(worker=worker, epoch=epoch, **fields), self.now) == LeaveAck()

    def beat(self, worker, epoch=1):
        return self.shard.handle(Heartbeat(worker=worker, epoch=epoch), self.now)

    def message(self, worker, clock, *parts, epoch=1, **fields):
        seq = self.seqs[worker, epoch] = self.seqs.get((worker, epoch), 0) + 1
        return shards.push(*parts, worker=worker, epoch=epoch, seq=seq, first=0, clock=clock, **fields)

    def send(self, request):
        return self.shard.handle(request, self.now)

    def push(self, worker, clock, value=1.0, ids=IDS, **fields):
        return self.send(self.message(worker, clock, shards.gradients(ids, value, dim=DIM), **fields))

    def push_all(self, workers, clock, **fields):
        for worker in range(workers):
            self.push(worker, clock, **fields)

    def pull(self, *ids, worker=0, epoch=1, after=0, name="items"):
        return self.shard.handle(Pull(1, (TableIds(name, ids_of(*ids)),), worker, epoch, after), self.now)

    def row(self, id_, name="items"):
        return self.pull(id_, worker=99, name=name).tables[0][0].tolist()

    def wait(self, seconds, *beating):
        """Time passes; some workers are heard of at its end."""
        self.now += seconds
        for worker in beating:
            self.beat(worker)
        self.shard.advance(self.now)

    @property
    def status(self):
        return self.shard.status()

    @property
    def members(self):
        return [member.worker for member in self.status.members]


def joined(member, clock, started, *members) -> Joined:
    return Joined(member=member, clock=clock, started=started, members=members)


@pytest.fixture
def job():
    return Job()


# steps of a scene: the methods of Job, called later
join, together, leave, push, push_all, wait = (
    partial(methodcaller, name) for name in ("join", "together", "leave", "push", "push_all", "wait")
)
# (what is claimed, every element of every row that was pushed, clock, the steps before)
ROWS = [
    ("workers count by their weight", -2, 1, together(2), push(0, 0, weight=3.0), push(1, 0, 5.0, weight=1.0)),
    ("a worker of weight zero does not count", -2, 2,
     together(2), push(0, 0, 100.0, weight=0.0), push(1, 0, 2.0, weight=5.0), push_all(2, 1, weight=0.0)),
    ("nor does it alone", 0, 1, together(1), push(0, 0, 100.0, weight=0.0)),
    ("differences are added past the optimizer", 8, 2,
     together(2), push(0, 0, 4.0, difference=True, weight=1.0), push(1, 0, 8.0, difference=True, weight=3.0),
     leave(1), push(0, 1, 1.0, difference=True)),
    ("the push of a worker that is here first is kept for the others", -2, 1,
     join(0, workers=2), push(0, 0, 1.0), join(1, workers=2), push(1, 0, 3.0)),
    ("a join that comes again takes no push back", -1, 1, together(2), push(0, 0), join(0, 0), push(1, 0)),
    ("a worker that leaves is not waited for nor is its second leave", -1, 1,
     together(2), push(0, 0), leave(1), leave(1)),
    ("what a worker pushed to the end counts after it left", -5, 1,
     together(3), push(0, 0, 3.0), leave(0), push(1, 0, 6.0), push(2, 0, 6.0)),
    ("what a worker did not push to the end is dropped when it leaves", -3, 1,
     together(2), push(0, 0, 100.0, last=False), push(1, 0, 3.0), leave(0)),
    ("also where it was alone", 0, 0, together(1), push(0, 0, 100.0, last=False), leave(0)),
    ("and when it is paused", -2, 1,
     together(2), push(0, 0, 100.0, last=False), leave(0, pause=True), join(0), push(0, 0), push(1, 0, 3.0)),
    ("and when its lease runs out", -1, 1,
     together(2), push(1, 0, 100.0, last=False), wait(9, 0), wait(9, 0), join(1), push_all(2, 0)),
    ("and when a newer one takes its place", -2, 2,
     together(2), push(0, 0, 100.0, last=False), join(0, 2, epoch=2), push(1, 0), push(1, 1)),
    ("what was pushed to the end is applied when nobody is left", -2, 2,
     together(2), push(0, 0), push(0, 1), leave(0), leave(1)),
    ("a worker that comes back does not push a clock twice", -1, 1,
     together(2), push(0, 0), leave(0), join(0, 1), push(1, 0)),
    ("one that was evicted does not either", -2, 1,
     together(2), push(1, 0), wait(9, 0), wait(9, 0), join(1, 1), push(0, 0, 3.0)),
    ("one that joins late is waited for from its clock on", -3, 3,
     together(1), push(0, 0), join(1, 3), *(push(0, clock) for clock in (1, 2, 3))),
    ("and its pushes count from there", -5, 4,
     together(1), push(0, 0), join(1, 3), *(push(0, clock) for clock in (1, 2, 3)), push(1, 3, 3.0)),
    ("a copy of a pause that comes behind the end of the pause lets no clock close", 0, 0,
     together(2), leave(0, pause=True, number=2), join(0, number=3), leave(0, pause=True, number=2), push(1, 0)),
    ("also after its lease has run out", 0, 0,
     together(2), wait(9, 1), wait(9, 1), join(0, number=3), leave(0, pause=True, number=2), push(1, 0)),
    ("a copy of a join that comes behind a pause does not end it", -1, 1,
     together(2, number=1), leave(0, pause=True, number=2), join(0, number=1), push(1, 0)),
    ("a part of a push closes no clock of paused workers", 0, 0,
     together(2), leave(0, pause=True), leave(1, pause=True), push(0, 0, last=False), leave(1)),
    ("its end does", -2, 1,
     together(2), leave(0, pause=True), leave(1, pause=True), push(0, 0, last=False), leave(1), push(0, 0)),
    ("also a push that comes in one part", -1, 1,
     together(2), leave(0, pause=True), leave(1, pause=True), push(0, 0)),
    ("pushes of workers that never joined are applied at once", -1, 0, together(2), push(7, 0)),
    ("what the earlier incarnation pushed to the end counts", -2, 1,
     together(2), push(0, 0, 4.0), join(0, 0, epoch=2), push(0, 0, epoch=2), push(1, 0)),
    ("one that takes the last place loses nothing of those before", -3, 0,
     together(2), push(1, 0, 3.0), leave(1), join(0, 0, epoch=2)),
    ("what was pushed to the end in an earlier run counts", -4, 0,
     together(2, run=1), push(0, 0, 4.0), push(1, 0, 100.0, last=False), join(0, epoch=2, run=2)),
    ("without staleness aware lr a push counts in full whatever it missed", -1, 1,
     together(2, staleness=-1), *(push(1, clock, 0.0) for clock in range(4)), push(0, 0, version=1)),
]  # fmt: skip


@pytest.mark.parametrize(("row", "clock", "steps"), [(*case[1:3], case[3:]) for case in ROWS], ids=[c[0] for c in ROWS])
def test_the_rows_after(job, row, clock, steps):
    for step in steps:
        step(job)
    assert ([job.row(id_) for id_ in IDS], job.status.clock) == ([[row] * DIM] * len(IDS), clock)


# (who joins, the reply, the steps, of which the last is the join)
JOINS = [
    ("late below the open clock", joined(False, 1, True, 0), together(1), push(0, 0), join(1, 0)),
    ("late", joined(True, 1, True, 0, 1), together(1), push(0, 0), join(1, 3)),
    ("more workers than were expected", joined(True, 0, True, 0, 1, 2), together(2), join(2, 4, workers=3)),
    ("back at a clock that it has pushed", joined(False, 1, True, 1), together(2), push(0, 0), leave(0), join(0, 0)),
    ("back at the next", joined(True, 0, True, 0, 1), together(2), push(0, 0), leave(0), join(0, 1)),
    ("evicted at a clock that it has pushed", joined(False, 1, True, 0),
     together(2), push(1, 0), wait(9, 0), wait(9, 0), join(1, 0)),
    ("evicted at the next", joined(True, 0, True, 0, 1), together(2), push(1, 0), wait(9, 0), wait(9, 0), join(1, 1)),
    ("evicted and alone", joined(False, 1, True), together(1), push(0, 0), wait(LEASE + 1), join(0, 0)),
    ("evicted and alone at the next", joined(True, 1, True, 0), together(1), push(0, 0), wait(LEASE + 1), join(0, 1)),
    ("evicted and alone with other settings", joined(True, 0, True, 0),
     together(1), push(0, 0), wait(LEASE + 1), join(0, 0, staleness=3)),
    ("restarted alone with other settings", joined(True, 0, True, 0),
     together(1), push(0, 0), join(0, 0, epoch=2, staleness=-1)),
    ("a newer incarnation", joined(True, 0, True, 0, 1), together(2), join(0, 2, epoch=2)),
    ("the job after", joined(True, 0, False, 0),
     together(2), push_all(2, 0), leave(0), leave(1), join(0, epoch=2, workers=2, staleness=4)),
    ("the job after by the same workers", joined(True, 0, False, 1),
     together(2), push_all(2, 0), leave(0), leave(1), join(1, workers=2)),
    ("both of them", joined(True, 0, True, 0, 1),
     together(2), push_all(2, 0), leave(0), leave(1), join(1, workers=2), join(0, workers=2)),
    ("back in its run", joined(False, 1, True, 1), together(2, run=7), push_all(2, 0), join(0, epoch=2, run=7)),
    ("back in its run later", joined(True, 1, True, 0, 1),
     together(2, run=7), push_all(2, 0), join(0, epoch=2, run=7), join(0, 3, epoch=2, run=7)),
    ("of no run", joined(True, 0, True, 0, 1), join(0, run=1), join(1)),
    ("of no run again in the next", joined(True, 0, True, 0, 1),
     join(0, run=1), join(1), join(0, epoch=2, run=2), join(1, epoch=2)),
    ("of no run after one without members", joined(True, 0, True, 0),
     join(0, run=1), push(0, 0), leave(0), join(0, epoch=2)),
    ("the next run by the same incarnation", joined(True, 0, True, 0), join(0, run=1), push(0, 0), join(0, run=2)),
]  # fmt: skip


@pytest.mark.parametrize(("reply", "steps"), [(case[1], case[2:]) for case in JOINS], ids=[c[0] for c in JOINS])
def test_a_worker_that_joins(job, reply, steps):
    assert [step(job) for step in steps][-1] == reply
    assert job.members == list(reply.members)


class TestGathering:
    def test_the_sum_is_taken_in_the_order_of_the_workers_whoever_pushes_first(self):
        gradients = np.random.default_rng(0).standard_normal((3, 50, DIM)).astype(np.float32)
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
            one.send(one.message(0, clock, TableGradients("items", np.arange(20), gradients.mean(0))))
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
                got = member.send(member.message(0, clock, part, last=last, weight=0.3))
                assert got == free.send(free.message(0, clock, part, last=last))
        np.testing.assert_array_equal(member.pull(*range(40)).tables[0], free.pull(*range(40)).tables[0])

    def test_a_push_may_come_in_several_messages_of_different_tables(self, job):
        job.send(Declare(table("users", dim=3)))
        job.together(2)
        job.push(0, 0, last=False)
        job.push(1, 0)
        assert job.row(1) == [0, 0]
        job.send(job.message(0, 0, shards.gradients([7], 2.0, "users")))
        assert (job.row(1), job.row(7, "users")) == ([-1, -1], [-1, -1, -1])

    def test_a_gradient_that_is_not_finite_is_left_out_for_its_worker_alone(self, job):
        job.together(2)
        part = shards.gradients(IDS, dim=DIM)
        part.gradients[1, 0] = np.nan
        assert job.send(job.message(0, 0, part)) == Pushed(False, 2, 1)
        job.push(1, 0)
        assert [job.row(i)[0] for i in IDS] == [-1, -0.5, -1]
        assert (job.status.pushed_rows, job.status.skipped_rows) == (5, 1)

    def test_a_difference_leaves_the_state_of_the_optimizer_alone(self):
        job, plain = Job(spec.Adagrad(lr=1.0)), Job(spec.Adagrad(lr=1.0))
        job.push(0, 0, 5.0, difference=True)
        job.push(0, 1, 2.0)
        plain.push(0, 0, 2.0)
        np.testing.assert_allclose(np.array(job.row(1)) - 5, plain.row(1))

    def test_what_waits_counts_for_the_memory_of_a_shard(self, job):
        job.together(3)
        budget = job.shard.core.budget
        empty = budget.used
        job.push(2, 0, last=False)
        job.leave(2)  # what it left behind takes no memory
        job.push(0, 0, ids=range(1000))
        assert job.status.used_bytes == empty + 1000 * (8 + 4 * DIM)  # ids and gradients
        table = job.shard.core.tables.entry("items").table
        budget.limit = budget.used + table.growth(1010) + 1000  # for its rows, and not for another thousand
        with pytest.raises(errors.TableFull):
            job.push(1, 0, ids=range(1000, 2000))
        job.push(1, 0, ids=(1, 2))
        assert job.status.tables[0].rows == 1000
        assert job.status.used_bytes == job.status.tables[0].bytes  # what was gathered has left the account

    def test_what_was_accepted_is_applied_though_the_memory_is_needed_for_something_else_since(self, job):
        job.together(2)
        job.push(0, 0, ids=range(1000))
        job.shard.core.budget.limit = 0
        job.leave(1)
        assert (job.status.failed_update, job.row(999)) == ("", [-1, -1])
        with pytest.raises(errors.TableFull):
            job.push(0, 1, ids=range(1000, 2000))

    def test_a_worker_too_far_ahead_waits_while_much_is_gathered(self, job, monkeypatch):
        monkeypatch.setattr(clock_module, "GATHER_BYTES", 10)
        job.together(3)
        job.leave(2, pause=True)  # it is not waited for
        job.push(0, 0)
        with raises(errors.ClockAhead, workers="1"):
            job.push(0, 1)
        job.push(1, 0)  # what frees it
        job.push_all(2, 1)
        assert job.status.clock == 2

    def test_a_push_of_a_closed_clock_or_of_one_pushed_already_or_of_a_senseless_weight_is_refused(self, job):
        job.together(2)
        for weight in (-1.0, float("nan"), float("inf")):
            with pytest.raises(errors.InvalidRequest, match="weight"):
                job.push(0, 0, weight=weight)
        job.push(0, 3)
        with pytest.raises(errors.InvalidRequest, match="first that it may push is 4"):
            job.push(0, 3)
        job.push(1, 3)
        with pytest.raises(errors.InvalidRequest, match="first that it may push is 4"):
            job.push(1, 0)


class TestHeld:
    """How long a pull waited for other workers: from its arrival to that of the push that closed its clock."""

    @pytest.mark.parametrize("staleness", [0, 2])
    def test_a_pull_says_how_long_it_waited_for_the_others(self, job, staleness):
        job.together(2, staleness=staleness)
        job.push(0, 0)
        arrived = job.now
        with raises(errors.ClockAhead, workers="1"):
            job.pull(1, after=1)
        job.wait(1.5, 0, 1)
        job.push(1, 0)
        job.now, closed = arrived, job.now  # it is tried again with the time of its arrival
        assert closed - arrived == 1.5
        assert job.pull(1, after=1).held_seconds == 1.5
        assert job.pull(1).held_seconds == 0.0  # asks for no clock

    def test_a_pull_of_a_clock_that_is_closed_has_not_waited(self, job):
        job.together(2)
        job.push_all(2, 0)
        job.wait(0.5)
        assert job.pull(1, after=1).held_seconds == 0.0

    def test_the_end_of_a_lease_ends_the_wait(self, job):
        job.together(2)
        job.push(0, 0)
        arrived = job.now
        job.wait(9, 0)
        job.wait(9, 0)
        assert job.members == [0]
        job.now = arrived
        assert job.pull(1, after=1).held_seconds == 18.0


class TestFailedUpdates:
    @pytest.fixture
    def break_apply(self, monkeypatch):
        """The next update fails with this error."""
        apply = Table.apply

        def broken(error):
            def once(*_, **__):
                monkeypatch.setattr(Table, "apply", apply)
                raise error

            monkeypatch.setattr(Table, "apply", once)

        return broken

    def test_a_push_is_answered_for_itself_and_who_waits_for_its_clock_is_told(self, job, break_apply):
        job.together(2)
        job.push_all(2, 0)
        job.push(0, 1)
        assert job.status.failed_update == ""
        break_apply(errors.BadOptimizer(optimizer="mine", reason="it raised"))
        last = job.message(1, 1, shards.gradients([1], dim=DIM))
        assert job.send(last) == Pushed(duplicate=False, applied=1, skipped=0)
        assert job.send(last) == Pushed(duplicate=True, applied=1, skipped=0)
        for worker in (0, 1):
            with raises(errors.UpdateFailed, clock=1):
                job.pull(1, worker=worker, after=2)
        assert "mine" in job.status.failed_update
        job.pull(1, after=1)  # what it waits for was applied
        job.push_all(2, 2)
        assert job.row(1) == [-2, -2]
        for worker in (0, 1):
            job.leave(worker)
        job.join(0, clock=1, epoch=2)
        job.push(0, 1, epoch=2)
        job.pull(1, after=2, epoch=2)  # of another job
        assert job.status.failed_update == ""

    def test_a_defect_is_told_too_and_the_clocks_after_it_are_applied(self, job, break_apply):
        job.together(2)
        for clock in range(3):
            job.push(0, clock)
        break_apply(ZeroDivisionError())
        job.leave(1)
        with pytest.raises(errors.UpdateFailed, match="ZeroDivisionError"):
            job.pull(1, after=1)
        assert (job.row(1), job.status.clock) == ([-2, -2], 3)


class TestStaleness:
    def test_a_bound_lets_pushes_be_applied_on_arrival_and_pulls_wait_for_workers_that_are_named(self, job):
        job.join(0, workers=2, staleness=2)
        for clock in range(3):
            job.push(0, clock)
        assert job.row(1) == [-3, -3]
        job.wait(2.0, 0)
        with raises(errors.ClockAhead, clock=0, workers="1 (not here yet)", seconds=2.0):
            job.pull(1, after=1)
        job.join(1, workers=2, staleness=2)
        job.wait(3.0)
        with raises(errors.ClockAhead, clock=0, workers="1", seconds=3.0):
            job.pull(1, after=1)
        job.push(1, 0)
        assert job.pull(1, after=1).tables[0].tolist() == [[-4, -4]]

    def test_the_version_counts_updates_and_the_histogram_what_pushes_missed(self, job):
        job.together(2, staleness=-1)
        job.push(0, 0)
        assert job.pull(1).version == 1
        job.push(0, 1, version=1)
        job.push(1, 0, version=1)
        job.push(1, 1, version=1, last=False)  # the same push
        job.push(1, 1, version=1)
        assert job.pull(1).version == 4
        for clock in range(2, 50):
            job.push(0, clock)
        job.push(1, 2, version=1)  # the last place takes all beyond
        assert job.status.staleness_seen == [1, 1, 1, *[0] * 28, 1]

    def test_a_closed_clock_is_one_update_that_misses_nothing(self, job):
        job.together(2)
        for clock in range(3):
            job.push_all(2, clock, version=job.pull(1, after=clock).version)
        assert job.pull(1).version == 3
        assert job.status.staleness_seen[:2] == [4, 0]  # those of clock 0 saw version 0, which says nothing

    def test_staleness_aware_lr_divides_the_learning_rate_by_what_a_push_missed(self, job):
        job.together(2, staleness=-1, staleness_aware_lr=True)
        job.push(0, 0, 0.0)
        for clock in range(4):
            job.push(1, clock, 0.0, version=1)
        for clock, (version, row) in enumerate([(1, -0.25), (6, -1.25), (0, -2.25)], start=1):  # 0: nobody knows
            job.push(0, clock, version=version)
            assert job.row(1) == [row, row]


class TestLeases:
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

    def test_requests_of_a_member_that_was_evicted_are_refused_but_for_pushes_that_were_taken_before(self, job):
        job.together(2)
        taken = job.message(1, 0, shards.gradients([1], dim=DIM))
        for _ in range(2):
            job.send(taken)
            job.wait(6.0, 0)
        assert job.members == [0, 1]  # a push that comes again renews the lease too
        job.wait(LEASE + 1)
        job.join(2, 5)
        part = shards.gradients([1], dim=DIM)
        ends = (Heartbeat(worker=1, epoch=1), Leave(worker=1, epoch=1))
        for request in (job.message(1, 1, part), Pull(1, (), 1, 1), *ends):
            with raises(errors.LeaseLost, worker=1, lease_ms=10_000):
                job.send(request)
        assert job.row(1) == [-1, -1]
        assert job.send(taken) == Pushed(duplicate=True, applied=1, skipped=0)

    def test_a_worker_of_whom_a_part_of_a_request_has_arrived_is_not_evicted(self, job):
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
        assert job.members == [0, 1]
        job.wait(6.0)
        assert job.members == []


class TestWhoMayJoin:
    def test_an_earlier_incarnation_is_fenced(self, job):
        job.join(0, epoch=2)
        old = {"worker": 0, "epoch": 1}
        for request in (shards.join(**old), Leave(**old), Heartbeat(**old), job.message(0, 0, epoch=1)):
            with pytest.raises(errors.StaleWorker):
                job.send(request)
        assert job.members == [0]
        job.push(7, 0, epoch=5)  # known without having joined
        for refused in ({"worker": 7, "epoch": 4}, {"worker": 0, "run": 2}):  # nor does it begin a run
            with pytest.raises(errors.StaleWorker):
                job.join(**refused)
        assert job.beat(0, epoch=2).members == [0]

    @pytest.mark.parametrize("other", [{"staleness": 3}, {"staleness_aware_lr": True}, {"workers": 4}], ids=str)
    def test_a_worker_with_other_settings_is_refused(self, job, other):
        job.join(0, workers=3)
        with raises(errors.ModeMismatch, worker=1, what=next(iter(other))):
            job.join(1, **{"workers": 3, **other})
        assert job.members == [0]

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            *(("worker", 2**20), ("epoch", 0), ("clock", 2**63), ("staleness", -2), ("workers", 0), ("run", 2**63)),
            *(("lease_ms", 0), ("lease_ms", 2**32 - 1)),
        ],
    )
    def test_a_join_without_sense_is_refused(self, job, field, value):
        with pytest.raises(errors.InvalidRequest, match=field):
            job.send(shards.join(**{field: value}))


class TestRuns:
    def test_a_later_one_begins_anew_whatever_is_left_of_the_leases(self, job):
        job.together(2, run=1)
        job.push_all(2, 0)
        later = {"epoch": 2, "workers": 2, "run": 2, "staleness": 3}
        assert job.join(0, **later) == joined(True, 0, False, 0)
        assert (job.status.clock, job.status.staleness, job.status.expired_leases) == (0, 3, 0)
        assert job.row(1) == [-1, -1]  # it is the same table
        job.push(0, 0, epoch=2)
        assert job.status.clock == 0  # the other worker of this run is still to come
        assert job.join(1, **later) == joined(True, 0, True, 0, 1)

    def test_an_evicted_worker_of_a_job_that_another_incarnation_began_anew_is_told(self, job):
        job.together(2)
        job.push_all(2, 0)
        job.wait(2 * LEASE)  # nobody is left
        job.join(0, epoch=2)
        with raises(errors.JobOver, worker=1):
            job.join(1, 1)
        assert job.join(1, epoch=2) == joined(True, 0, True, 0, 1)

    def test_evicted_workers_that_come_back_first_go_on(self, job):
        job.together(2)
        job.push_all(2, 0)
        job.wait(2 * LEASE)
        assert job.join(1, 1).member
        assert job.join(0, 1, epoch=2).member
        assert job.status.clock == 1

    def test_what_is_left_of_an_earlier_one_is_refused(self, job):
        job.together(2, run=1)
        job.push(0, 0)
        of_earlier = [
            (Heartbeat(worker=worker, epoch=1), Pull(1, (TableIds("items", ids_of(1)),), worker, 1, 1),
             job.message(worker, 1)) for worker in range(2)
        ]  # fmt: skip
        job.join(0, epoch=2, run=2)
        for requests, error in zip(of_earlier, (errors.StaleWorker, errors.LeaseLost), strict=True):
            for request in requests:
                with pytest.raises(error):
                    job.send(request)
        for epoch in (1, 3):
            with raises(errors.StaleRun, worker=1, got=1, want=2):
                job.join(1, 9, epoch=epoch, run=1)
        with raises(errors.StaleRun, got=1, want=2):
            job.join(1)  # of none: it belongs to the run that it took part in
        assert job.members == [0]
        job.leave(0, epoch=2)
        with pytest.raises(errors.StaleRun):
            job.join(1, run=1)  # nor when nobody is left of the later one


@dataclass
class _Worker:
    epoch: int = 1
    next: int = 0
    member: bool = False
    paused: bool = False
    heard: float = 0.0
    gone_at: int = 0  # its clock when it left, or its lease ran out


class ClockModel(RuleBasedStateMachine):
    """Random joins, pushes, rests, leaves and lost leases of three workers, against a list of what was pushed."""

    WORKERS = 3
    members = st.integers(0, WORKERS - 1)

    @initialize(late=st.booleans())
    def begin(self, late):
        self.job, self.workers = Job(), [_Worker() for _ in range(self.WORKERS)]
        self.pushed = {}  # complete ones: clock -> (worker, epoch) -> values, weight
        self.parts = {}  # values of a worker's incomplete push
        self.open, self.joined = 0, set()
        for worker in range(self.WORKERS - late):
            self._join(worker, 0)

    @property
    def here(self):
        return [it for it in self.workers if it.member]

    def _join(self, worker, clock):
        it = self.workers[worker]
        if self.job.join(worker, clock, epoch=it.epoch, workers=self.WORKERS).member:
            self.joined.add(worker)
            it.next = max(it.next, clock) if it.member else clock
            it.member, it.paused, it.heard = True, False, self.job.now
            self.parts.pop(worker, None)

    def _gone(self, worker):
        it = self.workers[worker]
        it.member, it.gone_at = False, it.next
        self.parts.pop(worker, None)

    def _settle(self):
        """Who has to push which clock decides what is closed."""
        if self.here and len(self.joined) < self.WORKERS:
            return
        active = [it.next for it in self.here if not it.paused]
        self.open = max(self.open, min(active) if active else max((clock + 1 for clock in self.pushed), default=0))

    @rule(
        worker=members,
        value=st.sampled_from([0.1, -0.7, 1 / 3, 12.34, 0.0123]),
        weight=st.sampled_from([1.0, 0.3]),
        last=st.sampled_from([True, True, False]),
    )
    def push(self, worker, value, weight, last):
        it = self.workers[worker]
        if not it.member or it.paused:
            return
        part = shards.gradients([1], value, dim=DIM)
        message = self.job.message(worker, it.next, part, epoch=it.epoch, last=last, weight=weight)
        assert [self.job.send(message).duplicate for _ in range(2)] == [False, True]
        it.heard = self.job.now
        self.parts.setdefault(worker, []).append(value)
        if last:
            self.pushed.setdefault(it.next, {})[worker, it.epoch] = (self.parts.pop(worker), weight)
            it.next += 1
        self._settle()

    @rule()
    def all_push(self):
        for worker in range(self.WORKERS):
            self.push(worker, 0.1 * (worker + 1), 1.0, True)

    @rule(worker=members, pause=st.booleans())
    def leave(self, worker, pause):
        it = self.workers[worker]
        if not it.member or len(self.here) == 1:
            return  # the last one's would begin another job
        self.job.leave(worker, epoch=it.epoch, pause=pause)
        it.heard = self.job.now
        if pause:
            it.paused = True
            self.parts.pop(worker, None)
        else:
            self._gone(worker)
        self._settle()

    @precondition(lambda self: self.here)
    @rule(worker=members, ahead=st.integers(0, 2), again=st.booleans())
    def join(self, worker, ahead, again):
        it = self.workers[worker]
        if it.member and (len(self.here) == 1 if again else not it.paused):
            return
        if again:
            it.epoch += 1
            self._gone(worker)
            it.next = it.gone_at = 0
            self._settle()
        pushed = 0 if it.member else it.gone_at
        self._join(worker, self.open + ahead)
        assert it.member == (self.open + ahead >= pushed)
        self._settle()

    @rule(seconds=st.sampled_from([1.0, 4.0, 7.0]), beating=st.sets(members))
    def pass_time(self, seconds, beating):
        beating = sorted(worker for worker in beating if self.workers[worker].member)
        if not beating:
            return  # the last ones would be evicted
        self.job.now += seconds
        order = list(self.job.shard.core.clock.members)  # leases end one after the other: a clock may close in between
        for worker in beating:
            it = self.workers[worker]
            try:
                self.job.beat(worker, it.epoch)
            except errors.LeaseLost:
                assert self.job.now - it.heard > LEASE
            else:
                it.heard = self.job.now
        self.job.shard.advance(self.job.now)
        for worker in order:
            it = self.workers[worker]
            if it.member and self.job.now - it.heard > LEASE:
                self._gone(worker)
                self._settle()

    @invariant()
    def the_clock_is_where_it_should_be(self):
        assert self.job.status.clock == self.open
        here = [(w, it.next, it.paused) for w, it in enumerate(self.workers) if it.member]
        assert [(m.worker, m.clock, m.paused) for m in self.job.status.members] == here

    @invariant()
    def the_row_is_what_the_closed_clocks_make_of_it(self):
        row = np.float32(0)
        for clock in sorted(clock for clock in self.pushed if clock < self.open):
            shares = [self.pushed[clock][sender] for sender in sorted(self.pushed[clock])]
            if len(shares) == 1:
                for value in shares[0][0]:
                    row = row - np.float32(value)
                continue
            weights, total = [float(np.float32(weight)) for _, weight in shares], np.float32(0)
            for (values, _), weight in zip(shares, weights, strict=True):
                for value in values:
                    total = total + np.float32(weight / sum(weights)) * np.float32(value)
            row = row - total
        assert self.job.row(1) == [row, row]


ClockModel.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestClockModel = ClockModel.TestCase
