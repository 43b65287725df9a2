"""A shard whose process or machine ends at any moment comes back from its log with every acknowledged push, once."""

import errno
import itertools
import os
import random
from collections import Counter

import numpy as np
import pytest

from embershard.proto import errors
from embershard.proto.messages import Declare, Heartbeat, Load, Push, Pushed, Snapshot
from embershard.proto.routing import Placement
from embershard.proto.spec import SGD, Adam
from embershard.ps.apply_thread import ApplyThread
from embershard.ps.coordination import pushes
from embershard.ps.coordination.clock import TERM_VERSIONS
from embershard.ps.dispatch import Dispatch
from embershard.ps.events import PushEvent, Term
from embershard.ps.journal import log_thread
from embershard.ps.journal.manifest import MANIFEST
from embershard.ps.journal.progress import RecoveryProgress
from embershard.ps.monitoring.export import MonitoredShard
from embershard.ps.recovery import recover
from embershard.ps.restore import Contents
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Table
from harness.eventually import eventually
from harness.logged_shard import install
from harness.logs import open_log
from harness.raises import raises
from harness.random_job import OPTIMIZERS, RandomJob, empty_core, replay, state_of
from harness.shards import gradients, join, push, rows, table
from harness.simulated_disk import SimulatedDisk

SEGMENT_BYTES = 2**16


def start(disk, mode="log", bases=(), **options):
    """A shard's process: the shard, and its log, which is written when the test says so."""
    shard = Shard(0, Placement.even(1), OptimizerRegistry())
    log = recover(shard, open_log(disk, **options), mode, segment_bytes=SEGMENT_BYTES, **dict(bases))
    return shard, log


class Crash(BaseException):
    pass


class Recorded:
    """Notes what a shard gives its log."""

    def __init__(self, log, events, outcomes):
        self.log, self._events, self._outcomes = log, events, outcomes

    def append(self, event, outcome):
        self._events.append(event)
        self._outcomes.append(outcome)
        return self.log.append(event, outcome)

    def __getattr__(self, name):
        return getattr(self.log, name)


class CrashingJob(RandomJob):
    """Workers whose shard ends at any moment; what was not acknowledged they send again, with the same tokens."""

    def __init__(self, seed, staleness, optimizer, mode):
        self.chance, self.mode_of_log, self.disk = random.Random(seed + 1000), mode, SimulatedDisk()
        self.events, self.outcomes_of_events = [], []
        self.unanswered, self.acknowledged, self.crashes, self.lost = [], set(), 0, 0
        self.works, self.bases, self.gathered = [], 0, 0  # of bases
        small = {"least_cost": 2**12, "cost_share": 0.0, "start": self.works.append}
        self.start = lambda: start(self.disk, mode, small)
        super().__init__(seed, staleness, optimizer, aware=bool(seed % 2))

    def begin(self):
        shard, log = self.start()
        self.log = shard._log = Recorded(log, self.events, self.outcomes_of_events)
        if not self.events:
            self._note_term(shard)
        return shard

    def _note_term(self, shard):
        self.events.append(Term(shard.greeting.term))
        core = shard.core
        self.outcomes_of_events.append(core.apply(Term(1)))
        core.lsn -= 1

    def send(self, request):
        reply = super().send(request)
        done = []
        self.shard.when_may_leave(lambda: done.append(reply))
        self.unanswered.append((request, done))
        action = self.chance.random()
        if action < 0.03:
            self.crash()
        elif action < 0.6 or len(self.unanswered) > 4:
            self.write()
        return reply

    def write(self):
        while self.log.journal.write_group():
            pass
        assert all(done for _, done in self.unanswered)
        self.note_answers()
        if self.works and self.chance.random() < 0.5:
            self.write_base(self.works.pop())

    def write_base(self, work):
        """Write the base that was begun some events ago; the process may end at any step of it."""
        left = itertools.count(self.chance.randrange(60), -1)

        def before(operation, path):
            if next(left) == 0:
                raise Crash

        self.disk.before = before
        try:
            work()
            self.disk.before = lambda operation, path: None
            self.bases += 1
        except Crash:
            self.crash()

    def note_answers(self):
        """Note the pushes that were acknowledged; the requests without an answer."""
        silent = []
        for request, done in self.unanswered:
            if not done:
                silent.append(request)
            # a copy below first_incomplete, which the job's tokens move on at will, is answered without counts
            elif isinstance(done[0], Pushed) and (done[0].applied or not done[0].duplicate):
                token = request.token
                self.acknowledged.add((token.worker, token.epoch, token.seq))
        self.unanswered.clear()
        return silent

    def crash(self):
        """The process ends, and in mode fsync the machine."""
        self.crashes += 1
        silent, before = self.note_answers(), state_of(self.shard.core)
        safe = self.log.journal.safe.lsn
        if self.mode_of_log == "fsync":
            self.disk.lose_power(self.chance)
        else:
            self.disk.kill()
        self.works.clear()
        shard, log = self.start()
        kept = shard.core.lsn - 1
        self.gathered += bool(log.bases.lsn) and log.bases.redo_lsn < log.bases.lsn
        assert kept >= safe
        if kept == len(self.events):  # nothing was lost with the process: its state was that of its log
            now = state_of(replay(empty_core(), self.events, self.outcomes_of_events))
            for part in before:
                assert now[part] == before[part], part
        self.lost += len(self.events) - kept
        del self.events[kept:], self.outcomes_of_events[kept:]
        self.check(shard)
        self.log = shard._log = Recorded(log, self.events, self.outcomes_of_events)
        self.shard = shard
        for request in silent:  # a client sends again what was not answered, and what it was told before is no more
            if isinstance(request, Push | Load) and request.token is not None:
                self.send(request)

    def check(self, shard):
        """The bits are those of the events that were kept, each acknowledged push among them once."""
        core = replay(empty_core(), self.events, self.outcomes_of_events)
        self.outcomes_of_events.append(core.apply(Term(shard.greeting.term)))
        self.events.append(Term(shard.greeting.term))
        want, got = state_of(core), state_of(shard.core)
        for part in want:
            assert got[part] == want[part], part
        tokens = Counter(
            (e.push.token.worker, e.push.token.epoch, e.push.token.seq) for e in self.events if isinstance(e, PushEvent)
        )
        assert set(tokens.values()) <= {1}
        assert not self.acknowledged - tokens.keys()


@pytest.mark.parametrize("mode", ["log", "fsync"])
@pytest.mark.parametrize("staleness", [0, 2, -1])
def test_every_acknowledged_push_is_there_once_whenever_the_process_or_the_machine_ends(mode, staleness):
    crashes = lost = bases = gathered = 0
    for seed in range(1, 3):
        job = CrashingJob(seed, staleness, OPTIMIZERS[(seed + staleness) % len(OPTIMIZERS)], mode).run(100)
        job.crash()
        crashes, lost, bases = crashes + job.crashes, lost + job.lost, bases + job.bases
        gathered += job.gathered
        assert job.acknowledged
        assert job.shard.core.clock.updates.version >= TERM_VERSIONS
        assert job.shard.greeting.lineage == seed + 1
    assert crashes > 6
    assert bases > 2
    assert gathered or staleness
    assert lost  # some events were not safe yet, and their pushes came again


def write(log):
    while log.journal.write_group():
        pass


def test_an_answer_waits_until_its_event_is_safe_as_does_that_to_a_duplicate_and_reads_go_on():
    shard, log = start(SimulatedDisk())
    shard.handle(table_declared())
    write(log)
    answered = []
    for name in ("push", "again"):
        reply = shard.handle(push(gradients([1])))
        shard.when_may_leave(lambda name=name, reply=reply: answered.append((name, reply.duplicate)))
    np.testing.assert_array_equal(rows(shard, 1), [[-1.0] * 3])
    shard.when_may_leave(lambda: answered.append(("pull", False)))
    assert answered == [("pull", False)]
    write(log)
    assert answered == [("pull", False), ("push", False), ("again", True)]


def table_declared():
    return Declare(table(), lineage=5, begins_lineage=True)


def test_a_full_disk_refuses_changes_with_its_cause_while_pulls_and_leases_go_on():
    disk = SimulatedDisk()
    shard, log = start(disk)
    shard.handle(table_declared())
    shard.handle(join(lease_ms=10_000, staleness=-1))
    write(log)
    shard.handle(push(gradients([1])))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(operation, path):
        if operation == "pwritev":
            raise full

    disk.before = refuse
    with pytest.raises(OSError, match="No space"):
        log.journal.write_group()
    with raises(errors.LogStalled, reason="No space left on device"):
        shard.handle(push(gradients([1]), seq=2))
    assert shard.status().waits_for_room == "No space left on device"
    np.testing.assert_array_equal(rows(shard, 1), [[-1.0] * 3])
    disk.before = lambda operation, path: None
    write(log)
    assert not shard.status().waits_for_room
    assert not shard.handle(push(gradients([1]), seq=2)).duplicate


@pytest.mark.parametrize("again", [False, True])
def test_answers_that_wait_for_a_log_that_cannot_be_written_are_refused_and_asked_for_again(again, tmp_path):
    disk = SimulatedDisk()
    shard, log = start(disk)
    shard.handle(table_declared())
    shard.handle(join(lease_ms=10_000, staleness=-1))
    write(log)
    left, cancel = [], Snapshot(url=str(tmp_path), name="one", id=7, step="cancel")
    one = push(gradients([1]), early=True)
    requests = [one, Heartbeat(worker=1, epoch=1, flush=True), one, cancel]

    def ask(request):
        reply = shard.handle(request)
        shard.when_may_leave(lambda: left.append(reply), left.append)

    for request in requests:
        ask(request)
    disk.before = refuse
    for _ in range(1 + again):
        with pytest.raises(OSError, match="No space"):
            log.journal.write_group()
    kinds = ["Pushed", "Snapshotted", "LogStalled", "LogStalled"]  # an early answer, and one that changes nothing
    assert [type(one).__name__ for one in left] == kinds
    assert [error.fields["reason"] for error in left[2:]] == ["No space left on device"] * 2
    disk.before = lambda operation, path: None
    write(log)
    del left[:]
    for request in requests[1:3]:
        ask(request)
    assert [type(one).__name__ for one in left] == ["HeartbeatAck", "Pushed"]
    assert left[1].duplicate
    np.testing.assert_array_equal(rows(shard, 1), [[-1.0] * 3])


def refuse(operation, path):
    if operation == "pwritev":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_replay_that_does_something_else_than_the_process_did_is_named_and_changes_nothing(monkeypatch):
    disk = SimulatedDisk()
    shard, log = start(disk)
    shard.handle(table_declared())
    shard.handle(push(gradients([1, 2])))
    write(log)
    disk.kill()
    original = pushes.apply_parts

    def one_more(parts, divisor):
        done = original(parts, divisor)
        return done._replace(rows=done.rows + 1)

    monkeypatch.setattr(pushes, "apply_parts", one_more)
    names = disk.copy().list(open_log(disk).folder)
    disk.kill()
    with raises(errors.LogDiverged, lsn=3, got="3", want="2"):
        start(disk)
    assert disk.list(open_log(disk.copy()).folder) == names


def test_members_have_a_whole_lease_after_a_recovery_and_versions_are_of_another_term():
    disk = SimulatedDisk()
    shard, log = start(disk)
    shard.handle(table_declared())
    shard.handle(join(lease_ms=10_000, staleness=-1))
    shard.handle(push(gradients([1]), version=1))
    write(log)
    disk.kill()
    shard, log = start(disk)
    (member,) = shard.status().members
    assert 9.0 < member.lease_seconds <= 10.0
    assert shard.core.clock.updates.version == TERM_VERSIONS
    assert (shard.greeting.term, shard.greeting.lineage, shard.status().durability) == (2, 5, "log")
    assert shard.core.clock.updates.missed(1) == 0  # of another history: not known
    shard.handle(push(gradients([1]), seq=2, first=2, version=TERM_VERSIONS))
    np.testing.assert_array_equal(rows(shard, 1), [[-2.0] * 3])


def test_a_log_that_lost_acknowledged_pushes_of_a_known_worker_is_noticed():
    disk = SimulatedDisk()
    shard, log = start(disk)
    shard.handle(table_declared())
    shard.handle(push(gradients([1])))
    write(log)
    disk.kill()
    shard, log = start(disk)
    with raises(errors.MemoryLost, worker=0):
        shard.handle(push(gradients([1]), seq=5, first=5))
    with raises(errors.MemoryLost, worker=0):
        shard.handle(push(gradients([1]), seq=5, first=5))
    shard.handle(push(gradients([1]), seq=2, first=2))
    with raises(errors.MemoryLost, worker=0):  # of push 3, whose answer its sender read after it had sent push 2 again
        shard.handle(push(gradients([1]), seq=4, first=4))


def test_a_push_that_was_refused_as_its_lease_had_ended_is_not_taken_after_a_recovery():
    """Taken, acknowledged and lost with the machine's power, it would count as refused: nobody would be told."""
    disk = SimulatedDisk()
    shard, log = start(disk)
    shard.handle(table_declared())
    shard.handle(join(staleness=-1))
    later = shard.system.now() + 100
    shard.advance(later)
    with raises(errors.LeaseLost, worker=0):  # an answer that gets lost: its sender sends the push again
        shard.handle(push(gradients([1])), later)
    shard.handle(join(staleness=-1, clock=1), later)
    for _ in range(2):
        with raises(errors.InvalidRequest, reason="worker 0 pushes clock 0; the first that it may push is 1"):
            shard.handle(push(gradients([1])))
        write(log)
        disk.kill()
        shard, log = start(disk)
    shard.handle(push(gradients([1]), seq=2, first=2, clock=1))
    np.testing.assert_array_equal(rows(shard, 1), [[-1.0] * 3])


@pytest.mark.parametrize("optimizer", [SGD(lr=1.0), Adam(lr=0.1)])
def test_restored_tables_come_back_with_their_states_and_pushes_that_follow(optimizer):
    disk = SimulatedDisk()
    shard, log = start(disk)
    shard.handle(table_declared())
    one = Table(table("other", 2, optimizer=optimizer), OptimizerRegistry().find(optimizer))
    states = np.random.default_rng(0).random((50, one.num_state), np.float32)
    one.restore(np.arange(50), np.ones((50, 2), np.float32), states)
    empty = Table(table("empty", 2), OptimizerRegistry().find(SGD(lr=1.0)))
    install(shard, log, Contents([one, empty], [], 7, {"other": (True, ("int8", ""))}))
    shard.handle(push(gradients([1, 60], name="other", dim=2)))
    write(log)
    want = state_of(shard.core)
    disk.kill()
    again, _ = start(disk)
    got = state_of(again.core)
    assert got["rows"] == want["rows"]
    assert got["pushes"] == want["pushes"]
    assert again.greeting.lineage == 7
    assert again.core.tables.flags() == shard.core.tables.flags()


def test_a_restore_that_the_end_of_the_process_ended_takes_no_memory_of_the_next_one(monkeypatch):
    disk = SimulatedDisk()
    shard, log = start(disk)
    shard.handle(table_declared())
    one = Table(table("other", 2), OptimizerRegistry().find(SGD(lr=1.0)))
    one.restore(np.arange(10_000), np.ones((10_000, 2), np.float32), np.empty((10_000, 0), np.float32))
    used, contents = shard.core.budget.used, Contents([one], lineage=7)

    def end(event):
        raise Crash

    monkeypatch.setattr(shard, "_record", end)  # its rows are in the log, and nothing says that they are all
    with pytest.raises(Crash):
        install(shard, log, contents)
    write(log)
    disk.kill()
    again, log = start(disk)
    assert again.core.budget.used == used
    install(again, log, contents)
    write(log)
    disk.kill()
    np.testing.assert_array_equal(rows(start(disk)[0], 1, name="other"), [[1.0, 1.0]])


@pytest.mark.parametrize("mode", ["log", "fsync"])
def test_a_log_whose_only_segment_is_gone_is_damaged(mode):
    """The shard began with no rows, without a word."""
    disk = SimulatedDisk()
    shard, log = start(disk, mode)
    shard.handle(table_declared())
    write(log)
    disk.kill()
    (name,) = log.journal.segments.names
    disk.remove(log.journal.segments.folder / str(name))
    with pytest.raises(errors.LogDamaged, match=r"it went up to LSN 1: log-.* with that is missing"):
        start(disk, mode)


@pytest.mark.parametrize("mode", ["log", "fsync"])
@pytest.mark.parametrize("number", [-1, 1], ids=["newest", "middle"])
def test_a_log_without_a_segment_of_several_is_damaged(number, mode, monkeypatch):
    """The shard began without the last pushes, without a word."""
    monkeypatch.setattr(log_thread, "_WATCH_SECONDS", 0.05)
    disk = SimulatedDisk()
    shard = Shard(0, Placement.even(1), OptimizerRegistry())
    folder = open_log(disk)
    log = recover(shard, folder, mode, segment_bytes=2048)
    log.start()  # the thread, which has the manifest say how far the log goes
    shard.handle(table_declared())
    seqs = itertools.count(1)
    while len(log.journal.segments.names) < 4:
        shard.handle(push(gradients([1]), seq=(seq := next(seqs)), first=seq))
    names = log.journal.segments.names  # once: the thread may still begin another one
    newest, lost = names[-1], names[number]
    assert eventually(lambda: folder.manifest.end_lsn > newest.first_lsn)
    assert log.close(60)
    disk.kill()
    disk.remove(folder.folder / str(lost))
    for _ in range(2):
        with raises(errors.LogDamaged, lsn=lost.first_lsn):
            start(disk, mode)
        disk.kill()
        disk.boot += 1  # a loss of power does not take the file, either


@pytest.fixture
def long_log():
    """A disk, and the folder and journal of a log of mode log; MANIFEST does not know of its newest segment."""
    disk = SimulatedDisk()
    shard = Shard(0, Placement.even(1), OptimizerRegistry())
    folder = open_log(disk)
    log = recover(shard, folder, "log", segment_bytes=2048)
    shard.handle(table_declared())
    for seq in range(1, 20):
        shard.handle(push(gradients([1]), seq=seq, first=seq))
        write(log)
    assert log.journal.segments.names[-1].id != folder.manifest.segment
    return disk, folder, log.journal


def test_a_process_that_has_lost_its_log_leaves_the_manifest_of_the_next_one(long_log):
    disk, folder, journal = long_log
    disk._locks.clear()  # as a network drive does, for another process
    before = bytes(disk.content(folder.folder / MANIFEST))
    with raises(errors.LogLocked):
        folder.record_end(journal)
    assert disk.content(folder.folder / MANIFEST) == before


def test_the_manifest_names_a_segment_once_its_name_is_on_the_disk(long_log):
    """Not every file system brings names to the disk in their order."""
    disk, folder, journal = long_log
    newest = folder.folder / str(journal.segments.names[-1])
    known = []

    def before(operation, path):
        if operation == "rename":
            known.append(newest in disk._durable_names)

    disk.before = before
    folder.record_end(journal)
    assert known == [True]


def test_a_loss_of_power_that_takes_known_events_of_mode_log_says_how_many(caplog):
    disk = SimulatedDisk()
    shard, log = start(disk)
    shard.handle(table_declared())
    write(log)
    disk.kill()
    (name,) = log.journal.segments.names
    disk.content(log.journal.segments.folder / str(name))[:] = b""  # it had its name on the disk, and no records
    disk.boot += 1
    assert start(disk)[0].core.lsn == 1  # of its term
    assert "the event log ends before LSN 1, and 1 later events or more are lost" in caplog.text


def test_a_module_that_changed_since_the_log_was_written_is_refused():
    disk = SimulatedDisk()
    start(disk, modules={"mine": "aa"})
    disk.kill()
    with raises(errors.LogMismatch, got="aa", want="bb"):
        start(disk, modules={"mine": "bb"})


def test_an_event_that_may_not_be_in_the_log_ends_the_process():
    fatal = []
    shard = Shard(0, Placement.even(1), OptimizerRegistry())
    recover(shard, open_log(SimulatedDisk()), "log", segment_bytes=SEGMENT_BYTES, on_fatal=fatal.append)
    shard.handle(table_declared())
    defect = RuntimeError("a defect")

    def fail(event):
        raise defect

    shard.core.apply = fail
    with pytest.raises(RuntimeError):
        shard.handle(push(gradients([1])))
    assert fatal == [defect]


def test_a_status_during_a_recovery_has_the_shards_own_memory_budget(monkeypatch):
    disk = SimulatedDisk()
    shard, log = start(disk)
    shard.handle(Declare(table()))
    while log.journal.write_group():
        pass
    disk.kill()
    fresh = Shard(0, Placement.even(1), OptimizerRegistry(), memory=2**30)
    dispatch, apply, seen = Dispatch(fresh, ApplyThread(), RecoveryProgress()), fresh.core.apply, []
    monkeypatch.setattr(fresh.core, "apply", lambda event: seen.append(dispatch.status()) or apply(event))
    recover(fresh, open_log(disk), "log", segment_bytes=SEGMENT_BYTES)
    assert {(status.recovering, status.budget_bytes) for status in seen} == {(True, 2**30)}


def test_counters_of_a_table_begin_with_the_process_and_a_replay_is_not_exported(monkeypatch):
    disk = SimulatedDisk()
    shard, log = start(disk)
    shard.handle(table_declared())
    broken = np.full((2, 3), [[1.0], [np.nan]], np.float32)
    for seq in (1, 2):
        shard.handle(push(gradients([1, 2], gradients=broken), seq=seq, first=seq))
    write(log)
    disk.kill()
    fresh = Shard(0, Placement.even(1), OptimizerRegistry())
    dispatch, apply, seen = Dispatch(fresh, ApplyThread(), RecoveryProgress()), fresh.core.apply, set()
    shown = MonitoredShard(dispatch.status, dispatch.counters, dict)
    names = "embershard_shard_table_pushed_rows_total", "embershard_shard_table_skipped_rows_total"

    def counted():
        return {(sample.metric, sample.value) for sample in shown.samples() if sample.metric in names}

    monkeypatch.setattr(fresh.core, "apply", lambda event: (apply(event), seen.update(counted()))[0])
    recover(fresh, open_log(disk), "log", segment_bytes=SEGMENT_BYTES)
    assert seen == set()
    dispatch.open()
    assert counted() == {(name, 0) for name in names}
