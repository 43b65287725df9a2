"""Pushes that were answered before they are safe: the worker keeps them, and sends them to the shard's next process."""

import errno
import os
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from queue import SimpleQueue

import numpy as np
import pytest

import embershard as es
from embershard.proto import errors
from embershard.proto.messages import Greeting, Heartbeat, Hello, Leave, Load, Push, Pushed, Restore, Snapshot
from embershard.proto.routing import Placement, make_route
from embershard.proto.transport.local import LocalTransport
from embershard.proto.transport.transport import Unreachable
from embershard.ps.journal import journal, log_thread
from embershard.ps.recovery import recover
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.worker.checkpoint.snapshots import restore_rows, take_snapshot
from embershard.worker.client import client as client_module
from embershard.worker.client import kept as kept_module
from embershard.worker.client import membership as membership_module
from embershard.worker.client.client import Client
from embershard.worker.client.connections import ShardConnections
from embershard.worker.client.kept import KeptPushes
from embershard.worker.client.membership import Terms
from embershard.worker.client.shard_connection import ShardConnection
from embershard.worker.session.session import Session
from harness.eventually import eventually
from harness.logs import open_log
from harness.raises import raises
from harness.shards import gradients, push, rows
from harness.simulated_disk import SimulatedDisk, Worst

SPEC = es.TableSpec(name="t", dim=2, optimizer=es.SGD(lr=1.0), initializer=es.Constant(value=0.0))


class Ended(Exception):
    pass


class Machine:
    """A shard with a log, whose machine loses its power while the disk is asked to take something, as `lose` says.

    What the log has written, and its disk has not, is gone then; answers that could leave have left. In mode `log` it
    is the process that ends, before anything is written. Who was connected notices it at the next request, or, where
    `silent`, reaches the next process without a word.
    """

    def __init__(self, mode="fsync", silent=False, shard=0, shards=1):
        self.number, self.shards = shard, shards
        self.mode, self.silent, self.disk = mode, silent, SimulatedDisk()
        self.lose = lambda request: False
        self.restarts, self._broken, self._lock = 0, False, threading.RLock()
        self.seen = []
        self._start()

    def _start(self):
        self.shard = Shard(self.number, Placement.even(self.shards), OptimizerRegistry())
        folder = open_log(self.disk, shard=self.number, num_shards=self.shards)
        self.log = recover(self.shard, folder, self.mode, segment_bytes=2**16)

    def handle(self, request):
        with self._lock:
            if self._broken:
                self._broken = False
                raise Unreachable("the connection broke")
            self.seen.append(request)
            return self._handle(request)

    def _handle(self, request):
        outcome, error = None, None
        try:
            outcome = self.shard.handle(request)
        except errors.EmbershardError as refused:
            error = refused
        left = []
        self.shard.when_may_leave(lambda: left.append(outcome))
        if self.lose(request):
            self.disk.before = self._fail
        try:
            while self.log.journal.write_group():
                pass
            assert left
        except Ended:
            if self.mode == "fsync":
                self.disk.lose_power(Worst())
            else:
                self.disk.kill()
            self.restarts += 1
            self._start()
            if not left:
                raise Unreachable("the machine is gone") from None
            self._broken = not self.silent
        if error is not None:
            raise error
        return outcome

    def restart(self):
        """End the process, whose log was written, and start the next one."""
        self.disk.kill()
        self.restarts, self._broken = self.restarts + 1, True
        self._start()

    def _fail(self, operation, path):
        if operation == ("sync" if self.mode == "fsync" else "pwritev") and path.name.startswith("log-"):
            raise Ended

    def client(self, worker=0, **terms):
        client = Client([LocalTransport(self.handle, "machine/0")], worker=worker)
        client.declare(SPEC)
        if terms:
            client.join(Terms(workers=1, lease=timedelta(hours=1), **terms))
        return client


@pytest.fixture(params=["told", "silent", "killed"])
def machine(request):
    return Machine("log" if request.param == "killed" else "fsync", silent=request.param == "silent")


def step(client, number, *ids):
    """A push of ones."""
    ids = np.array(ids or [1], np.int64)
    route = make_route(ids, SPEC.space_key, client.placement)
    return client.push([("t", route, np.ones((len(ids), SPEC.dim), np.float32))], clock=number)


def row(client, id_=1, **how):
    route = make_route(np.array([id_], np.int64), SPEC.space_key, client.placement)
    return float(client.pull([("t", route)], **how)[0][0, 0])


def unsafe(client):
    return client.connections.kept.unsafe([0])


def every(number, kind=Push):
    """Whether it is the turn of a request to be the last of a process; not of those that are sent again."""
    seen = []

    def lose(request):
        if not isinstance(request, kind) or request.token.seq in seen:
            return False
        seen.append(request.token.seq)
        return request.token.seq % number == 0

    return lose


@contextmanager
def unanswered(machine, client, kind):
    """Inside, a request of this kind reaches no machine, and its sender gives it up."""
    real, patience = machine._handle, client.timeout

    def handle(request):
        if isinstance(request, kind):
            raise Unreachable("the machine is gone")
        return real(request)

    machine._handle = handle
    client.timeout = client.connections.timeout = timedelta(seconds=0.2)
    with pytest.raises(errors.ShardUnavailable):
        yield
    client.timeout = client.connections.timeout = patience
    machine._handle = real


@pytest.mark.parametrize("terms", [{}, {"staleness": None}, {"staleness": 0}], ids=["alone", "asynchronous", "sync"])
def test_what_was_answered_and_is_lost_with_its_machine_is_sent_again_first_and_in_order(machine, terms):
    client = machine.client(**terms)
    machine.lose = every(3)
    for number in range(12):
        step(client, number)
        clock = {"clock": number + 1} if terms else {}
        assert row(client, **clock) == -number - 1  # waits for the clock, which only what is sent again can close
    assert machine.restarts == 4
    assert [r.token.seq for r in machine.seen if isinstance(r, Push)] == [
        1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 9, 10, 11, 12, 12
    ]  # fmt: skip
    client.close()


def test_an_answer_before_the_loss_is_no_promise_without_the_copy(machine, monkeypatch):
    monkeypatch.setattr(KeptPushes, "resend", lambda *_: None)
    client = machine.client()
    machine.lose = every(3)
    for number in range(3):
        step(client, number)
    assert row(client) == -2


def test_a_later_push_does_not_overtake_one_that_is_sent_again(machine):
    client = machine.client(staleness=0)
    machine.lose = every(2)
    for number in range(6):
        step(client, number)
    seqs = [request.token.seq for request in machine.seen if isinstance(request, Push)]
    assert list(dict.fromkeys(seqs)) == sorted(set(seqs))
    client.flush()
    assert row(client, clock=6) == -6.0
    client.close()


def test_a_load_does_not_overtake_a_push_that_is_sent_again(machine):
    client = machine.client()
    machine.lose = every(2)
    step(client, 0)
    step(client, 1)
    route = make_route(np.array([1], np.int64), SPEC.space_key, client.placement)
    client.load("t", route, np.full((1, SPEC.dim), 7.0, np.float32))
    assert row(client) == 7.0


def test_a_push_by_a_route_is_sent_again_with_its_ids(machine):
    client = machine.client()
    route = make_route(np.array([5], np.int64), SPEC.space_key, client.placement)
    client.pull([("t", route)], keep=True)
    machine.lose = every(1)
    client.push([("t", route, np.ones((1, SPEC.dim), np.float32))], clock=0)
    machine.lose = lambda request: False
    assert machine.restarts == 1
    assert machine.seen[-1].tables[0].route
    assert row(client, 5) == -1.0


def test_heartbeats_of_an_idle_worker_send_again_and_say_what_is_safe(machine):
    client = machine.client(staleness=None)
    step(client, 0)
    assert unsafe(client) == [0]
    client.membership._heartbeat(timedelta(seconds=60))
    assert unsafe(client) == []
    machine.lose = every(2)
    step(client, 1)
    machine.lose = lambda request: False
    client.membership._heartbeat(timedelta(seconds=60))
    assert rows(machine.shard, 1, name="t")[0, 0] == -2.0
    client.close()


def test_flush_asks_until_all_is_safe_also_after_a_loss(machine):
    client = machine.client()
    machine.lose = every(2)
    step(client, 0)
    step(client, 1)
    assert unsafe(client) == [0]
    client.flush()
    assert unsafe(client) == []
    assert [r.flush for r in machine.seen if isinstance(r, Heartbeat)][-1]
    if machine.mode == "fsync":
        machine.disk.lose_power(Worst())
    else:
        machine.disk.kill()
    machine._start()
    assert row(client) == -2.0


def test_a_push_whose_route_a_shard_has_forgotten_does_not_count_as_answered_while_another_shard_is_silent():
    """It was taken for answered, and a shard that was started again told its worker that it had lost it."""
    machines = [Machine(shard=number, shards=2) for number in range(2)]
    client = Client([LocalTransport(one.handle, f"machine/{one.number}") for one in machines], worker=0)
    client.declare(SPEC)
    client.join(Terms(workers=1, lease=timedelta(hours=1)))
    step(client, 0, *range(20))
    client.flush()
    with unanswered(machines[1], client, Push):
        real = machines[0]._handle

        def forgetful(request):
            if isinstance(request, Push):
                machines[0]._handle = real
                raise errors.UnknownRoute(worker=0, route=1, table="t")
            return real(request)

        machines[0]._handle = forgetful
        step(client, 1, *range(20))
    machines[0].restart()
    row(client, 0)  # a pull, or a heartbeat, asks who is there
    step(client, 2, *range(20))
    assert {row(client, id_) for id_ in range(20)} == {-3.0}
    client.close()


def test_a_load_follows_the_pushes_that_got_no_answer():
    machine = Machine()
    client = machine.client()
    with unanswered(machine, client, Push):
        step(client, 0)
    route = make_route(np.array([1], np.int64), SPEC.space_key, client.placement)
    client.load("t", route, np.full((1, SPEC.dim), 7.0, np.float32))
    step(client, 1)
    assert row(client) == 6.0
    client.close()


def test_a_push_that_was_answered_early_says_nothing_of_a_load_before_it_that_got_no_answer():
    """The load was given up; a shard that had lost the push, and never seen the load, told of lost memory."""
    machine = Machine()
    client = machine.client()
    route = make_route(np.array([1], np.int64), SPEC.space_key, client.placement)
    with unanswered(machine, client, Load):
        client.load("t", route, np.full((1, SPEC.dim), 7.0, np.float32))
    machine.lose = every(1)
    step(client, 0)
    machine.lose = lambda request: False
    assert machine.restarts == 1
    assert row(client) == -1.0
    client.close()


@pytest.mark.parametrize("what", ["push", "messages of one load", "load"])
def test_what_follows_says_that_a_load_and_all_before_it_are_safe(what):
    """Else a shard that has lost them with its machine's power would take it, and nobody be told."""
    machine = Machine()
    client = machine.client()
    real = machine._handle
    machine._handle = lambda request: (
        replace(reply, acknowledged=0) if isinstance(reply := real(request), Pushed) else reply
    )
    if what == "messages of one load":
        client.limits.update(dict.fromkeys(client.limits, 360))
    step(client, 0)
    route = make_route(np.arange(20, dtype=np.int64), SPEC.space_key, client.placement)
    client.load("t", route, np.zeros((20, SPEC.dim), np.float32))
    if what == "push":
        step(client, 1)
    client.load("t", route, np.zeros((20, SPEC.dim), np.float32))
    tokens = [request.token for request in machine.seen if isinstance(request, (Load, Push))]
    assert len(tokens) > (8 if what == "messages of one load" else 2)
    later = tokens[2:-1] if what == "push" else tokens[2:]
    assert all(token.first_incomplete == token.seq for token in later)
    client.close()


def test_what_one_shard_has_answered_of_a_load_counts_although_another_shard_did_not_answer():
    """Else the shard could lose it with its machine's power, and nobody be told."""
    shards = [Shard(index, Placement.even(2), OptimizerRegistry()) for index in range(2)]
    said = {}

    def handle(shard, request):
        if isinstance(request, Load) and shard.greeting.shard == 1:
            raise Unreachable("the machine is gone")
        if isinstance(request, Push):
            said[shard.greeting.shard] = request.token.first_incomplete
        return shard.handle(request)

    transports = [LocalTransport(partial(handle, shard), f"shard/{number}") for number, shard in enumerate(shards)]
    client = Client(transports, worker=0, timeout=timedelta(seconds=0.2))
    client.declare(SPEC)
    route = make_route(np.arange(20, dtype=np.int64), SPEC.space_key, client.placement)
    with pytest.raises(errors.ShardUnavailable):
        client.load("t", route, np.zeros((20, SPEC.dim), np.float32))
    client.push([("t", route, np.ones((20, SPEC.dim), np.float32))], clock=0)
    assert said == {0: 2, 1: 1}
    client.close()


@pytest.mark.parametrize("is_silent", [False, True], ids=["told", "silent"])
def test_a_worker_that_waits_for_a_clock_which_was_lost_with_the_power_is_told(is_silent, monkeypatch):
    """Its push was written, and acknowledged; the kernel had not given it to the disk."""
    monkeypatch.setattr(membership_module, "_SAID_AFTER", timedelta(seconds=0.2))  # until the first call ends
    machine = Machine("log")
    client = machine.client(staleness=0)
    on_disk = machine.disk.copy()
    step(client, 0)
    client.flush()
    machine.disk, on_disk.boot = on_disk, on_disk.boot + 1
    machine._start()
    machine._broken = not is_silent
    with raises(errors.MemoryLost, worker=0, first_incomplete=2):
        row(client, clock=1)
    client.membership._ended.set()


def test_a_worker_that_waits_at_one_shard_is_told_of_pushes_that_another_has_lost(monkeypatch):
    """The others may wait for it at that shard, and it hears of the loss by its heartbeats alone."""
    monkeypatch.setattr(membership_module, "_SAID_AFTER", timedelta(seconds=0.2))  # until the first call ends
    machines = [Machine("log", shard=number, shards=2) for number in range(2)]
    client = Client([LocalTransport(one.handle, f"machine/{one.number}") for one in machines], worker=0)
    client.declare(SPEC)
    client.join(Terms(workers=2, staleness=0, lease=timedelta(hours=1), wait_timeout=timedelta(seconds=2)))
    on_disk = machines[0].disk.copy()
    step(client, 0, *range(20))
    client.flush()
    machines[0].disk, on_disk.boot = on_disk, on_disk.boot + 1
    machines[0]._start()
    machines[0]._broken = True
    asked = len(machines[0].seen)
    client.membership._heartbeat(timedelta(seconds=5))  # the first notices that the connection broke
    # it ends with the first answer: a call that asks on until its timeout may end with no answer at all
    assert [type(request) for request in machines[0].seen[asked:]] == [Hello, Heartbeat]
    route = make_route(np.arange(20), SPEC.space_key, client.placement)
    there = int(route.ids[route.splits[1]])  # a row of the shard that has lost nothing
    for _ in range(2):
        with raises(errors.MemoryLost, worker=0, first_incomplete=2):
            row(client, there, clock=1)
    client.membership._ended.set()


def test_what_the_next_process_refuses_is_told_of(machine, monkeypatch):
    client = machine.client()
    machine.lose = every(2)
    step(client, 0)
    step(client, 1)

    def refuse(*_):
        raise errors.WrongDim(table="t", what="gradients", got=1, ids=1, dim=2, want=2)

    with monkeypatch.context() as patch:
        patch.setattr(machine.shard.core.tables, "check_gradients", refuse)
        client.flush()
    assert unsafe(client) == []
    with pytest.raises(errors.WrongDim):
        step(client, 2)
    step(client, 3)
    assert row(client) == -3.0  # all but the refused one


def test_what_is_kept_is_bounded_and_a_push_waits_for_the_disk(monkeypatch):
    monkeypatch.setattr(kept_module, "KEPT_PUSHES", 3)
    kept, asked = [], []
    machine = Machine()
    client = machine.client()
    original = machine._handle

    def handle(request):  # a disk that is asked for, and takes nothing before
        if isinstance(request, Heartbeat):
            asked.append(client.connections.kept.first_incomplete(0, 99))
        reply = original(request)
        return replace(reply, acknowledged=0) if isinstance(reply, Pushed) else reply

    machine._handle = handle
    for number in range(10):
        step(client, number)
        kept.append(len(client.connections.kept._kept[0]))
    assert (max(kept), asked) == (3, [1, 4, 7])
    tokens = [r.token.first_incomplete for r in machine.seen if isinstance(r, Push)]
    assert tokens == [1, 1, 1, 1, 4, 4, 4, 7, 7, 7]


def test_bytes_are_bounded_too_but_for_one_push_that_is_larger():
    kept = KeptPushes()
    large, small = (push(gradients(range(count), dim=2), seq=seq) for count, seq in ((2_800_000, 1), (400_000, 2)))
    assert not kept.is_full(0, large)
    kept.add(0, large)
    assert kept.num_bytes(0) == 16 * 2_800_000
    assert not kept.is_full(0, small)
    kept.add(0, replace(small))
    kept.answered(0, large)
    assert kept.is_full(0, large)
    kept.acknowledge(0, 1)
    assert (kept.first_incomplete(0, 99), kept.num_bytes(0)) == (2, 16 * 400_000)


def test_a_push_whose_answer_was_safe_says_so_of_those_before_it():
    kept, first, second = KeptPushes(), push(gradients([1])), push(gradients([1]), seq=2)
    for one in (first, second):
        kept.add(0, one)
    kept.answered(0, first)
    kept.settle(0, second, Pushed(True, 1, 0))
    assert kept.first_incomplete(0, 99) == 99


def test_a_reply_that_overtakes_the_answer_of_a_push_is_not_forgotten():
    kept, one = KeptPushes(), push(gradients([1]))
    kept.add(0, one)
    kept.acknowledge(0, 1)
    assert kept.first_incomplete(0, 99) == 1  # it is on its way
    kept.answered(0, one)
    assert kept.first_incomplete(0, 99) == 99


def test_a_push_that_is_sent_again_is_kept_until_the_next_process_says_that_it_is_safe():
    """The process before had said so, its machine lost power, and then its answer came, late."""
    kept, one = KeptPushes(), push(gradients([1]))
    kept.add(0, one)
    kept.acknowledge(0, 1)
    assert kept.resend(0, 2, lambda push: Pushed(False, 1, 0, early=True)) is None
    kept.answered(0, one)
    assert (kept.first_incomplete(0, 99), kept.unsafe([0])) == (1, [0])
    kept.acknowledge(0, 1, term=1)  # another answer of it, read later still
    assert (kept.first_incomplete(0, 99), kept.unsafe([0])) == (1, [0])
    kept.acknowledge(0, 1, term=2)
    assert (kept.first_incomplete(0, 99), kept.unsafe([0])) == (99, [])


@pytest.mark.parametrize("outcome", [Pushed(True, 1, 0), errors.LeaseLost(worker=0, lease_ms=1)])
def test_a_push_that_was_sent_again_before_its_sender_knew_its_early_answer_is_not_kept_for_ever(outcome):
    """The shard's next process has it, or refuses it; it does not speak of it in later replies."""
    kept, one = KeptPushes(), push(gradients([1]))
    kept.add(0, one)
    assert kept.resend(0, 2, lambda push: outcome) is None  # while the call waits for another shard
    assert kept.first_incomplete(0, 99) == 1
    kept.answered(0, one)
    assert (kept.first_incomplete(0, 99), kept.unsafe([0])) == (99, [])
    assert [error for _, _, error in kept.take_refused()] == [outcome] * isinstance(outcome, errors.LeaseLost)


@pytest.mark.parametrize("early", [True, False])
def test_a_push_that_one_process_refused_and_the_next_one_took_is_not_told_of_as_refused(early):
    """Its table was lost with the power, and declared again by another worker, while another shard was waited for."""
    kept, one, took = KeptPushes(), push(gradients([1])), Pushed(False, 1, 0, early=early)
    kept.add(0, one)
    assert kept.resend(0, 2, lambda push: took) is None
    assert kept.settle(0, one, errors.UnknownTable(shard="", table="t", known="")) is took
    assert (kept.first_incomplete(0, 99), kept.unsafe([0])) == ((1, [0]) if early else (99, []))
    kept.acknowledge(0, 1, term=2)
    assert (kept.first_incomplete(0, 99), kept.unsafe([0])) == (99, [])


def test_a_push_that_was_refused_as_it_was_kept_and_is_sent_once_more_by_its_sender_is_kept():
    """Its call had timed out; a heartbeat met the shard's next process, to which the worker came back by a new join."""
    kept, one = KeptPushes(), push(gradients([1]))
    kept.add(0, one)
    assert kept.resend(0, 2, lambda push: errors.LeaseLost(worker=0, lease_ms=1)) is None
    kept.first_incomplete(0, 1)  # as it is sent once more, perhaps within the call in which it was sent first
    kept.answered(0, one)
    assert (kept.first_incomplete(0, 99), kept.unsafe([0]), kept.take_refused()) == (1, [0], [])


def test_a_kept_push_of_a_table_that_is_lost_ends_with_an_error():
    """A loss of power, in mode log, may take the declare of a table, and leave the lineage."""
    asked, terms = [], iter(range(1, 1000))

    def handle(request):
        asked.append(request)
        if isinstance(request, Push):
            raise errors.UnknownTable(shard="", table="t", known="")
        term = next(terms)
        process = {"instance": f"{min(term, 2)}", "term": min(term, 2), "lineage": 5}
        return Greeting(num_shards=1, placement_epoch=1, max_message_bytes=2**20, **process)

    transport, timeout = LocalTransport(handle, "here"), timedelta(seconds=2)
    connections = ShardConnections([ShardConnection(transport, handle(None))], 0, timeout)
    connections.kept.add(0, one := push(gradients([1])))
    connections[0].suspect = True
    assert isinstance(connections.call({0: one})[0], errors.UnknownTable)
    assert len(asked) < 10


def test_close_waits_until_all_is_safe():
    machine = Machine()
    client = machine.client(staleness=None)
    step(client, 0)
    client.close()
    assert unsafe(client) == []


def test_an_answer_does_not_wait_for_a_slow_disk_and_a_flush_does():
    machine = Machine()
    client = machine.client()
    gate = threading.Event()
    machine.disk.before = lambda operation, path: operation != "sync" or gate.wait(60)
    machine.log.start()
    pool_done = []

    def handle(request):
        reply, released = machine.shard.handle(request), threading.Event()
        machine.shard.when_may_leave(released.set)
        if not released.wait(60):
            raise Unreachable("waited in vain")
        return reply

    client.connections[0].transport._handle = handle
    assert step(client, 0).applied == 1
    assert unsafe(client) == [0]
    flush = threading.Thread(target=lambda: (client.flush(), pool_done.append(True)))
    flush.start()
    assert row(client) == -1.0
    assert not pool_done
    gate.set()
    assert eventually(lambda: pool_done)
    flush.join(60)
    assert unsafe(client) == []
    assert machine.log.close(60)


def test_a_shard_that_comes_back_without_room_for_what_is_kept_is_waited_for(monkeypatch):
    machine = Machine("log")
    client, real = machine.client(), machine._handle
    step(client, 0)
    machine.restart()
    client.timeout, end = timedelta(seconds=0.2), time.monotonic() + 0.5

    def handle(request):
        if isinstance(request, Push) and time.monotonic() < end:
            raise errors.LogStalled(path="/logs", reason="No space left on device", retry_after_ms=5)
        return real(request)

    machine._handle = handle
    assert row(client) == -1.0
    assert time.monotonic() > end


class FullMachine(Machine):
    """A machine whose disk is full until `room` is set; its log has a thread of its own, and answers wait for it."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(journal, "RETRY_MS", 5)
        monkeypatch.setattr(log_thread, "_RETRY_SECONDS", 0.002)
        self.room = threading.Event()
        self.room.set()
        super().__init__("log")
        self.disk.before = self._refuse
        self.log.start()

    def _refuse(self, operation, path):
        if operation == "pwritev" and not self.room.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _handle(self, request):
        left = SimpleQueue()
        reply = self.shard.handle(request)
        self.shard.when_may_leave(lambda: left.put(reply), left.put)
        outcome = left.get(timeout=60)
        if isinstance(outcome, errors.EmbershardError):
            raise outcome
        return outcome

    def fill(self, client, seconds):
        """Fill the disk until so long after the client says that it waits; the subjects of the lines that it says."""
        said = []

        def say(line):
            said.append(line.partition(":")[0])
            if line.startswith("waiting"):
                threading.Timer(seconds, self.room.set).start()

        client.connections.say = say
        self.room.clear()
        return said


WAITED = ["waiting for shard 0 at machine/0", "shard 0 at machine/0 writes its event log again"]


@pytest.mark.parametrize("end", [Client.flush, Client.close])
def test_a_flush_and_the_end_of_a_client_wait_for_room_beyond_the_timeout_of_a_call(end, monkeypatch, caplog):
    machine = FullMachine(monkeypatch)
    client = machine.client()
    client.timeout = timedelta(seconds=0.02)
    said = machine.fill(client, 0.08)
    step(client, 0)
    assert unsafe(client) == [0]
    end(client)
    assert machine.room.is_set()
    assert unsafe(client) == []
    assert "before its last pushes are known to be safe" not in caplog.text
    assert said == WAITED
    assert machine.log.close(60)


def test_the_end_of_a_client_waits_for_room_where_the_shard_is_silent_at_the_timeout(monkeypatch, caplog):
    machine = FullMachine(monkeypatch)
    client, real = machine.client(), machine._handle
    monkeypatch.setattr(client_module, "_FAREWELL", timedelta(seconds=0.05))
    said = machine.fill(client, 0.2)

    def handle(request):  # as a shard does whose log thread tries again only behind the end of the timeout
        if isinstance(request, Heartbeat) and said and not machine.room.is_set():
            raise Unreachable("no reply in time")
        return real(request)

    machine._handle = handle
    step(client, 0)
    client.close()
    assert machine.room.is_set()
    assert "before its last pushes are known to be safe" not in caplog.text
    assert said == WAITED
    assert machine.log.close(60)


def test_who_waits_for_room_is_told_once_and_again_when_there_is_some(monkeypatch):
    machine = FullMachine(monkeypatch)
    client = machine.client()
    for number in range(2):
        said = machine.fill(client, 0.02)
        step(client, 2 * number)  # of which the log's thread finds that it cannot be written
        while machine.shard.status().waits_for_room == "":
            time.sleep(0.001)
        assert row(client) < 0
        assert said == []
        step(client, 2 * number + 1)
        assert said == WAITED
    client.close()
    assert machine.log.close(60)


def test_a_snapshot_that_is_cancelled_does_not_show_that_there_is_room(monkeypatch):
    machine = FullMachine(monkeypatch)
    client, said = machine.client(), []
    client.connections.say = said.append
    machine.room.clear()
    step(client, 0)
    flush = Heartbeat(worker=client.worker, epoch=client.epoch, flush=True)
    client.connections.call({0: flush}, timeout=timedelta(seconds=0.05), awaits_recovery=False)
    client.connections.call({0: Snapshot(url="/", name="one", id=7, step="cancel")})
    assert [line.partition(":")[0] for line in said] == WAITED[:1]
    machine.room.set()
    client.close()
    assert machine.log.close(60)


def test_a_client_that_ends_at_once_waits_a_second_for_shards_without_room_and_one_to_leave_them(monkeypatch):
    machine, timeouts = FullMachine(monkeypatch), {}
    client = machine.client(staleness=None)
    monkeypatch.setattr(client_module, "_LAST_WORD", timedelta(seconds=0.01))
    call = client.connections.call

    def note(requests, **options):
        timeouts[type(requests[0])] = options["timeout"]
        return call(requests, **options)

    machine.room.clear()
    step(client, 0)
    client.connections[0].has_stalled = True
    monkeypatch.setattr(client.connections, "call", note)
    client.close(awaits_room=False)
    assert max(timeouts[Heartbeat], timeouts[Leave]) <= timedelta(seconds=0.01)
    machine.room.set()
    assert machine.log.close(60)


@pytest.mark.parametrize("until_left", [lambda session: session, closing], ids=["entered", "closed"])
def test_a_session_that_is_left_by_an_error_or_a_ctrl_c_does_not_wait_for_room(until_left, monkeypatch, caplog):
    machine = FullMachine(monkeypatch)
    client = machine.client()
    monkeypatch.setattr(client_module, "_FAREWELL", timedelta(seconds=0.02))
    machine.room.clear()
    late = threading.Timer(30, machine.room.set)
    late.start()
    step(client, 0)
    with pytest.raises(KeyboardInterrupt), until_left(Session(client)):
        raise KeyboardInterrupt
    assert not machine.room.is_set()
    assert "before its last pushes are known to be safe" in caplog.text
    late.cancel()
    machine.room.set()
    assert machine.log.close(60)


@pytest.mark.parametrize("old", ["client", "shard"])
def test_an_old_client_and_an_old_shard_are_answered_when_it_is_safe(old):
    machine = Machine()
    original = machine._handle

    def handle(request):
        if isinstance(request, Push):  # the fields that an earlier version does not know
            request = replace(request, early=False, term=0)
        return original(request)

    machine._handle = handle
    client = machine.client()
    if old == "client":
        client.connections[0].greeting.ClearField("term")
    machine.lose = every(2)
    for number in range(4):
        step(client, number)
        assert unsafe(client) == []
    assert row(client) == -4.0


def test_what_is_known_to_be_safe_while_it_is_sent_again_says_nothing_of_pushes_behind_it():
    """Another thread's reply came in between: the push said that itself was safe, and was refused."""
    kept, said = KeptPushes(), []
    for seq in (1, 2, 3):
        kept.add(0, push(gradients([1]), seq=seq, first=1))
        kept.answered(0, push(gradients([1]), seq=seq, first=1))
    kept.load_begins(0, 4)

    def send(sent):
        said.append((sent.token.seq, sent.token.first_incomplete))
        kept.acknowledge(0, 2)
        return Pushed(True, 0, 0, early=True)

    assert kept.resend(0, 2, send) is None
    assert said == [(1, 1), (2, 2), (3, 3)]


def test_a_push_that_is_answered_late_says_nothing_of_a_load_behind_it():
    """The load was given up without an answer, and the next push said that it was acknowledged."""
    kept = KeptPushes()
    kept.add(0, push(gradients([1]), seq=6, first=6))
    kept.load_begins(0, 7)
    kept.settle(0, push(gradients([1]), seq=6, first=6), errors.LeaseLost(worker=0, lease_ms=1000))
    kept.loads_end(0, 6)
    assert kept.first_incomplete(0, 8) == 7
    kept.loads_end(0, 8)
    assert kept.first_incomplete(0, 9) == 9
    assert kept.is_empty


def test_a_push_that_is_lost_after_an_early_answer_says_nothing_of_a_load_before_it_that_got_none():
    """The load was given up; a shard that had lost the push, and never seen the load, told of lost memory."""
    kept, said = KeptPushes(), []
    kept.load_begins(0, 5)
    kept.add(0, push(gradients([1]), seq=6, first=5))
    kept.answered(0, push(gradients([1]), seq=6, first=5))
    kept.resend(0, 2, lambda sent: said.append(sent.token.first_incomplete) or Pushed(False, 1, 0, early=True))
    kept.acknowledge(0, 6)
    assert (said, kept.first_incomplete(0, 7), kept.is_empty) == ([5], 7, True)


def test_a_heartbeat_of_a_worker_that_has_only_loaded_says_that_its_load_was_acknowledged():
    """Its shard had lost the load with the power, and the worker waited for others without being told."""
    kept = KeptPushes()
    kept.load_begins(0, 1)
    assert kept.first_incomplete(0) == 1
    kept.loads_end(0, 1)
    kept.acknowledge(0, 1)
    assert kept.first_incomplete(0) == 2


@pytest.mark.parametrize("moment", ["in it", "after it"])
def test_a_shard_that_ends_in_or_after_a_restore_has_the_restored_rows_and_no_push_of_before(moment, tmp_path):
    """The pushes that the client had kept were sent to its next process, and changed the restored rows."""
    machine = Machine("log")
    handle = machine.handle

    def handle_and_end(request):
        reply = handle(request)
        if moment == "in it" and isinstance(request, Restore) and reply.state == "installed":
            machine.restart()
        return reply

    machine.handle = handle_and_end
    client = machine.client()
    step(client, 0)
    take_snapshot(client, str(tmp_path))
    for number in range(1, 4):
        step(client, number)  # of the last one no reply has said yet that it is safe
    restore_rows(client, str(tmp_path), replace_tables=True)
    if moment == "after it":
        machine.restart()
    route = make_route(np.array([1]), SPEC.space_key, client.placement)
    np.testing.assert_array_equal(client.pull([("t", route)])[0], [[-1.0, -1.0]])
    step(client, 4)
    np.testing.assert_array_equal(client.pull([("t", route)])[0], [[-2.0, -2.0]])
    assert machine.restarts == 1


def test_a_push_that_got_no_answer_before_a_restore_changes_no_restored_row(tmp_path):
    """It was sent with the next push: where the shard takes requests, and no pushes, the restore cannot deliver it."""
    machine = Machine("log")
    client = machine.client()
    step(client, 0)
    take_snapshot(client, str(tmp_path))
    with unanswered(machine, client, Push):
        try:
            step(client, 1)
        finally:
            restore_rows(client, str(tmp_path), replace_tables=True)
    assert row(client) == -1.0
    step(client, 2)
    assert row(client) == -2.0
    machine.restart()
    step(client, 3)
    assert row(client) == -3.0
