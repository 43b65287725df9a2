"""A worker's place among others: joining, leases, pausing, rendezvous. Shards' time is the test's."""

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import nn

import embershard as es
from embershard.proto import messages
from embershard.proto.errors import (
    ClockAhead,
    InvalidRequest,
    LeaseLost,
    LogStalled,
    ModeMismatch,
    ShardUnavailable,
    WorkerLost,
)
from embershard.proto.routing import make_route
from embershard.proto.transport.local import LocalTransport
from embershard.proto.transport.transport import Unreachable
from embershard.worker.client import membership as membership_module
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms
from embershard.worker.session.reads import Lookup
from harness.eventually import eventually
from harness.shards import join
from harness.wires import PATIENCE, reads

SPEC = es.TableSpec(name="t", dim=2, optimizer=es.SGD(lr=1.0), initializer=es.Constant(value=0.0))
HOURS = 3600.0
LONG = timedelta(hours=1)  # a lease that no heartbeat renews while a test runs


def terms_of(workers=2, lease=LONG, **settings):
    return Terms(workers=workers, lease=lease, **settings)


@pytest.fixture
def make_job(make_wires):
    """Wires to shards whose time is told to them, and one worker for each of some terms."""

    def make(*terms, shards=2):
        job = make_wires(shards, now=0.0)
        return job, *(job.session(number, each) for number, each in enumerate(terms))

    return make


@pytest.fixture
def make_pair(make_job):
    """A worker that will lose its lease, and another one."""

    def make(shards=2, **settings):
        return make_job(terms_of(**settings), terms_of(**settings), shards=shards)

    return make


def test_the_only_worker_of_an_elastic_job_is_a_member_of_it(stream_shard):
    with es.connect(stream_shard) as alone, es.connect(stream_shard, worker=1, elastic=True) as first:
        assert alone.membership is None
        assert first.membership.members == (1,)
        with es.connect(stream_shard, worker=2, elastic=True) as later:
            assert later.membership.members == (1, 2)


def lose_lease(job, alive):
    """Let time pass in which nobody but `alive` is heard of."""
    job.now += 2 * HOURS
    terms, ends = alive.membership.terms, {"epoch": alive.client.epoch, "lease_ms": round(HOURS * 1000)}
    staleness = -1 if terms.staleness is None else terms.staleness
    for wire in job.wires:
        with wire.lock:
            wire.shard.handle(join(alive.client.worker, staleness=staleness, workers=2, **ends), job.now - 1)
            wire.shard.advance(job.now)


def lose_lease_at(shard, job, lost):
    """Let time pass in which one shard does not hear of `lost`, and have its next heartbeat hear of that."""
    beats = [messages.Heartbeat(worker=one.client.worker, epoch=one.client.epoch) for one in job.sessions]
    begin = job.now
    for job.now in (begin + 0.9 * HOURS, begin + 1.8 * HOURS):
        for number, wire in enumerate(job.wires):
            for session, beat in zip(job.sessions, beats, strict=True):
                if session is not lost or number != shard:
                    wire.handle(beat)
    lost.membership._heartbeat(LONG)


def step(session, ids, weight=1.0):
    """Push a gradient of 1 for every id; the rows that were read."""
    rows = es.Embedding(session.table(SPEC))(torch.tensor(ids))
    rows.sum().backward()
    session.step(weight=weight)
    return rows.detach()[:, 0]


def pulled(session, ids):
    return session.table(SPEC).pull(torch.tensor(ids))[:, 0].tolist()


def together(work, sessions):
    with ThreadPoolExecutor(len(sessions)) as pool:
        return [done.result(PATIENCE) for done in [pool.submit(work, session) for session in sessions]]


class Scripted:
    """A shard that answers joins with clocks of its own."""

    def __init__(self, joined, index=0, of=1):
        self.joined, self.heard = joined, []
        of_index = {"shard": index, "num_shards": of, "instance": f"{index}"}
        self.greeting = messages.Greeting(placement_epoch=1, version="", max_message_bytes=64 * 2**20, **of_index)
        self.beaten = threading.Semaphore(0)

    def handle(self, request):
        self.heard.append(request)
        match request:
            case messages.Hello():
                return self.greeting
            case messages.Join():
                return self.joined(request)
            case messages.Heartbeat():
                self.beaten.release()
                return messages.HeartbeatAck(clock=0, members=(0,))
            case _:
                assert isinstance(request, messages.Leave)
                return messages.LeaveAck()


def member_of(shards, terms, **settings):
    return Client([LocalTransport(shard.handle, "scripted") for shard in shards], **settings).join(terms)


def joined(request, clock=0, members=(0,)):
    return messages.Joined(member=request.clock >= clock, clock=clock, started=True, members=members)


def test_a_late_worker_joins_all_shards_at_one_clock_that_is_closed_on_none():
    opens = [5, 9, 7]
    shards = [Scripted(lambda request, clock=clock: joined(request, clock), i, 3) for i, clock in enumerate(opens)]
    member = member_of(shards, Terms(staleness=0))
    assert member.first > max(opens)
    assert [[r for r in shard.heard if isinstance(r, messages.Join)][-1].clock for shard in shards] == [
        member.first
    ] * 3
    member.leave()


def test_a_worker_catches_up_with_a_clock_that_runs_away():
    opens = iter(range(5, 10_000, 5))  # faster than the distance that the first try leaves
    member = member_of([Scripted(lambda request: joined(request, next(opens)))], Terms())
    assert member.first > 5
    member.leave()


def test_a_worker_whose_join_waits_for_a_shard_keeps_its_lease_on_the_others():
    beats = threading.Semaphore(0)

    def late(request):
        for _ in range(2):
            assert beats.acquire(timeout=PATIENCE)
        return joined(request)

    shards = [Scripted(joined, 0, 2), Scripted(late, 1, 2)]
    shards[0].beaten = beats
    member_of(shards, Terms(lease=timedelta(seconds=0.04))).leave()


def test_a_worker_that_a_shard_refuses_is_no_member_of_the_others(make_wires):
    wires = make_wires(2)
    client = wires.client()

    def refuse(request):
        if isinstance(request, messages.Join):
            raise InvalidRequest(reason="no")

    wires.wires[1].before = refuse
    with pytest.raises(InvalidRequest):
        client.join(Terms(workers=2))
    assert not wires.wires[0].shard.status().members
    assert client.membership._ended.is_set()  # no heartbeat comes later


def test_a_member_beats_on_every_shard_until_it_leaves_or_its_session_is_forgotten():
    shards = [Scripted(joined, i, 2) for i in range(2)]
    member = member_of(shards, Terms(lease=timedelta(seconds=0.04)))
    for shard in shards:
        for _ in range(3):
            assert shard.beaten.acquire(timeout=PATIENCE)
    member.leave()
    assert [type(shard.heard[-1]) for shard in shards] == [messages.Leave, messages.Leave]
    member_of([Scripted(joined)], Terms(lease=timedelta(seconds=0.04)))  # and nobody keeps it
    assert eventually(lambda: all(thread.name != "embershard heartbeat" for thread in threading.enumerate()))


def test_a_member_that_is_left_open_beats_no_more_as_python_ends(monkeypatch):
    shard = Scripted(joined)
    member = member_of([shard], Terms(lease=timedelta(seconds=0.04)))
    assert shard.beaten.acquire(timeout=PATIENCE)
    monkeypatch.setattr(membership_module, "has_ended", lambda: True)  # what it sent would be refused, with a traceback
    assert eventually(lambda: all(thread.name != "embershard heartbeat" for thread in threading.enumerate()))
    member.leave()


def test_a_worker_that_others_gave_up_drops_its_step_and_goes_on_at_a_later_clock(make_pair):
    job, lost, other = make_pair()
    step(lost, [1, 2, 3])
    rows = es.Embedding(lost.table(SPEC))(torch.tensor([1, 2, 3]))
    lose_lease(job, other)
    for _ in range(3):
        step(other, [7])
    rows.sum().backward()
    lost.step()
    first = lost.membership.first
    assert lost.clock == first > other.clock - 1
    assert pulled(lost, [1, 2, 3]) == [-1.0] * 3  # of its first step alone
    step(lost, [1])
    assert job.sent(messages.Push, worker=0)[-1].clock == first
    assert pulled(lost, [1]) == [-2.0]
    assert lost.stats.lost_leases == 1


def test_a_pull_that_finds_the_lease_lost_is_answered_after_joining_again(make_pair):
    job, lost, other = make_pair(staleness=3)
    step(lost, [1])
    lose_lease(job, other)
    step(other, [1])
    rows = es.Embedding(lost.table(SPEC))(torch.tensor([1]))  # finds out, and joins again
    rows.sum().backward()
    lost.step()  # its rows were asked for by a worker that had lost its lease: dropped
    step(lost, [1])
    assert lost.stats.lost_leases == 1
    first = lost.membership.first
    assert [push.clock for push in job.sent(messages.Push, worker=0) if push.last] == [0, 0, first, first]
    route = lost.table(SPEC).route(torch.tensor([2]))
    job.heard.clear()
    lost.client.push([("t", route, np.ones((1, 2), np.float32))], clock=0)  # was under way as the lease was lost
    assert not job.heard


def test_a_pause_outlives_a_lost_lease(make_pair):
    job, lost, other = make_pair(shards=1, staleness=0)
    lost.membership.pause()
    lose_lease(job, other)
    other.membership.pause()
    came = together(lambda session: session.membership.rendezvous("m", b"%d" % session.client.worker), (lost, other))
    assert came[0] == {0: b"0", 1: b"1"} or came[1] == {1: b"1"}
    assert {m.worker: m.paused for m in job.wires[0].shard.status().members} == {0: True, 1: True}
    assert lost.stats.lost_leases == 1


def test_a_paused_worker_that_lost_its_lease_joins_again_with_its_next_heartbeat(make_pair):
    """No request of its own tells it, and a job that others begin anew on the shard would wait for it."""
    job, lost, other = make_pair(staleness=0)
    lost.membership.pause()
    lose_lease(job, other)
    lost.membership._heartbeat(LONG)
    for wire in job.wires:
        assert {m.worker: m.paused for m in wire.shard.status().members} == {0: True, 1: False}
    assert lost.stats.lost_leases == 1


@pytest.mark.parametrize("stalled", [True, False], ids=["stalled", "silent"])
def test_a_pause_that_waits_for_a_shard_keeps_no_heartbeat_back(make_pair, stalled):
    job, paused, _ = make_pair(staleness=0)
    hold, told = threading.Event(), threading.Event()

    def before(request):
        if not isinstance(request, messages.Leave) or hold.is_set():
            return
        told.set()
        if stalled:
            raise LogStalled(path="/logs", reason="No space left on device", retry_after_ms=1)
        hold.wait(60)

    job.wires[1].before = before
    with ThreadPoolExecutor(1) as pool:
        pauses = pool.submit(paused.membership.pause)
        assert told.wait(60)
        for _ in range(2):  # the lock is the pause's
            paused.membership._heartbeat(timedelta(seconds=0.01))
        assert len(job.sent(messages.Heartbeat, worker=0)) == 2 * len(job.wires)
        hold.set()
        pauses.result(60)
    assert all(member.paused == (member.worker == 0) for wire in job.wires for member in wire.shard.status().members)


def test_a_worker_that_leaves_is_not_joined_again_by_its_heartbeat(make_pair):
    job, lost, other = make_pair(staleness=0)
    lost.membership.pause()
    lose_lease(job, other)
    came, left = threading.Event(), threading.Event()

    def before(request):
        if isinstance(request, messages.Join):
            came.set()
            left.wait(0.05)

    job.wires[1].before = before
    with ThreadPoolExecutor(2) as pool:
        beats = pool.submit(lost.membership._heartbeat, LONG)
        assert came.wait(PATIENCE)
        pool.submit(lost.membership.leave).result(PATIENCE)
        left.set()
        beats.result(PATIENCE)
    for wire in job.wires:
        assert [member.worker for member in wire.shard.status().members] == [1]


def test_a_heartbeat_that_says_a_pause_again_does_not_wait_for_room_as_a_pause_does(make_pair):
    job, paused, other = make_pair(staleness=0)
    paused.membership.pause()
    lose_lease(job, other)
    full = LogStalled(path="/logs", reason="No space left on device", retry_after_ms=1)
    begin = time.monotonic()

    def before(request):
        assert time.monotonic() < begin + 30
        if isinstance(request, messages.Join):
            raise full

    job.wires[1].before = before
    paused.membership._heartbeat(timedelta(seconds=0.02))  # which is to join again
    assert paused.stats.lost_leases == 0
    job.wires[1].before = lambda request: None
    paused.membership._heartbeat(LONG)
    assert paused.stats.lost_leases == 1


def test_a_copy_of_a_pause_that_arrives_once_its_worker_goes_on_does_not_pause_it(make_pair):
    job, late, _ = make_pair(staleness=0)
    late.membership.pause()
    (copy, _) = job.sent(messages.Leave, worker=0)
    late.membership.resume()
    for wire in job.wires:
        wire.shard.handle(copy, job.now)
        assert [status.paused for status in wire.shard.status().members] == [False, False]


def test_a_paused_worker_is_not_waited_for_waits_for_nobody_and_resumes_where_it_is_told(make_pair):
    job, paused, other = make_pair(staleness=0)
    paused.membership.resume(6)
    assert paused.membership.required_clock(6) == 6  # to which nobody may ever come
    paused.membership.pause()
    assert paused.membership.required_clock(6) == 0
    for _ in range(4):
        step(other, [1])
    assert [status.clock for status in job.wires[0].shard.status().members][1] == 4
    assert paused.membership.resume(7) == paused.clock == 7
    for _ in range(3):
        step(other, [1])
    assert job.wires[1].shard.status().clock == 7


def test_wait_timeout_ends_a_wait_and_names_whom_it_was_for(make_pair, caplog, monkeypatch):
    monkeypatch.setattr(membership_module, "_SAID_AFTER", timedelta(seconds=0.05))
    _, here, _ = make_pair(staleness=0, wait_timeout=timedelta(seconds=0.3))
    step(here, [1])
    with pytest.raises(WorkerLost, match="worker 1"):
        step(here, [1])
    assert [record.levelno for record in caplog.records if "worker 1" in record.message] == [logging.WARNING]


def test_a_pull_that_one_shard_refuses_does_not_wait_for_others_at_another(make_pair, monkeypatch):
    # a machine's power took the join there; the others may wait for this worker, which has to hear of it
    monkeypatch.setattr(membership_module, "_SAID_AFTER", timedelta(seconds=0.05))
    job, here, _ = make_pair(staleness=0, wait_timeout=timedelta(seconds=5))
    step(here, list(range(20)))
    job.wires[1].handle(messages.Leave(worker=0, epoch=here.client.epoch))
    with pytest.raises(InvalidRequest, match="it has to join first"):
        step(here, list(range(20)))


def test_a_worker_that_one_shard_evicted_joins_again_where_it_waits_at_another(make_pair, monkeypatch):
    """Those for whom it waits may wait at the shard that evicted it, and none of its requests goes there."""
    monkeypatch.setattr(membership_module, "_SAID_AFTER", timedelta(seconds=0.05))
    job, lost, other = make_pair(staleness=0, wait_timeout=timedelta(seconds=5))
    lose_lease_at(1, job, lost)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(lost.membership.rendezvous, "m", b"lost")
        eventually(lambda: lost.stats.lost_leases == 1 or waits.done())
        assert other.membership.rendezvous("m", b"other") == waits.result() == {0: b"lost", 1: b"other"}
    assert lost.stats.lost_leases == 1


def test_a_long_wait_goes_on_however_often_another_shard_evicts_its_worker(make_pair, monkeypatch):
    monkeypatch.setattr(membership_module, "_SAID_AFTER", timedelta(seconds=0.05))
    job, lost, other = make_pair(staleness=0, wait_timeout=timedelta(seconds=30))
    lost.membership._timeout = timedelta(seconds=0.05)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(lost.membership.rendezvous, "m", b"lost")
        for count in range(1, 6):
            lose_lease_at(1, job, lost)
            eventually(lambda count=count: lost.stats.lost_leases == count or waits.done())
        assert other.membership.rendezvous("m", b"other") == waits.result() == {0: b"lost", 1: b"other"}


def test_a_push_that_waits_at_one_shard_is_refused_once_another_has_evicted_its_worker(make_pair, monkeypatch):
    monkeypatch.setattr(membership_module, "_SAID_AFTER", timedelta(seconds=0.05))
    job, lost, _ = make_pair(staleness=0, wait_timeout=timedelta(seconds=5))
    route = lost.table(SPEC).route(torch.tensor([1, 2, 3, 4]))
    lose_lease_at(1, job, lost)
    taken = messages.Pushed(duplicate=False, applied=0, skipped=0)  # before its worker was evicted

    def full(request):
        if isinstance(request, messages.Push) and not lost.stats.lost_leases:
            raise ClockAhead(clock=0, workers="1", seconds=0.0)

    lost.client.timeout = timedelta(seconds=0.1)
    job.wires[0].before = full
    job.wires[1].before = lambda request: taken if isinstance(request, messages.Push) else None
    assert lost.client.push([("t", route, np.ones((4, 2), np.float32))], clock=0) == taken
    assert lost.stats.lost_leases == 1
    assert all(wire.shard.status().tables[0].rows == 0 for wire in job.wires)


@pytest.mark.parametrize(("staleness", "may_rejoin"), [(0, False), (3, False), (None, True)])
def test_a_worker_whose_steps_an_all_reduce_ties_to_the_others_does_not_come_back(make_pair, staleness, may_rejoin):
    # at a bound it would wait for their clock, and they for its part of the all-reduce
    job, lost, other = make_pair(staleness=staleness)
    model = nn.Sequential(nn.Embedding(8, 2), nn.Linear(2, 1))
    es.wrap(model, lost, optimizer=es.SGD(lr=1.0), dense="ddp")
    lose_lease(job, other)
    if may_rejoin:
        model(torch.tensor([1]))
        assert lost.stats.lost_leases == 1
    else:
        with pytest.raises(LeaseLost):
            model(torch.tensor([1]))


def test_workers_on_other_terms_are_refused(make_job):
    with pytest.raises(ModeMismatch):
        make_job(terms_of(staleness=0), terms_of(staleness=4))


def test_a_lease_that_is_lost_again_and_again_is_an_error(make_pair):
    job, session, _ = make_pair(shards=1)
    session.table(SPEC)

    def hopeless(request):
        if isinstance(request, messages.Join):
            return joined(request, members=(0, 1))
        raise LeaseLost(worker=0, lease_ms=1)

    job.hold(hopeless)
    with pytest.raises(LeaseLost):
        pulled(session, [1])


WRONG = [{"workers": 0}, {"staleness": -1}, {"lease": timedelta(0)}, {"wait_timeout": timedelta(days=-1)}, {"run": -1}]


@pytest.mark.parametrize("settings", [*WRONG, {"staleness": 0, "staleness_aware_lr": True}], ids=str)
def test_terms_without_sense_are_refused_by_name(settings):
    with pytest.raises(ValueError, match=list(settings)[-1]):
        Terms(**settings)


def test_a_loop_that_lost_its_lease_goes_on_with_fresh_rows(make_pair):
    job, lost, other = make_pair(staleness=2)
    module, batches = es.Embedding(lost.table(SPEC)), [torch.tensor([k % 3, 5 + k]) for k in range(12)]
    for number, ids in enumerate(lost.prefetch(batches, inputs=lambda ids: {"t": ids})):
        if number == 5:
            job.wait("answered", lambda r: reads("t", 0)(r) and r.worker == 0, 3)  # of 0, 3 and 6: the next one is here
            job.wait("answered", lambda r: reads("t", 5 + 6)(r) and r.worker == 0)
            lose_lease(job, other)
        else:
            step(other, [9])
        module(ids).sum().backward()
        lost.step()
        if number == 5:
            lost.flush()  # it knows now
    assert lost.stats.lost_leases == 1
    assert lost.missed_reads > 0  # what was pulled ahead before is not read
    clocks = sorted({push.clock for push in job.sent(messages.Push, worker=0) if push.last})
    after = [clock for clock in clocks if clock >= lost.membership.first]
    assert after == list(range(lost.membership.first, lost.clock))  # none is left out: nobody waits for ever
    assert len(after) >= 12 - 5 - 1 - 3  # but for what was under way


def test_a_push_waits_where_too_much_is_kept_for_other_workers(make_job):
    job, session = make_job(terms_of(1, staleness=0), shards=1)
    session.table(SPEC)
    refused = []

    def full(request):
        if isinstance(request, messages.Push) and len(refused) < 8:
            refused.append(request.token)
            raise ClockAhead(clock=0, workers="1", seconds=0.0)

    job.hold(full)
    session.client.timeout = timedelta(seconds=0.1)  # in which a call that nobody answers is given up
    step(session, [1])
    assert len(refused) == 8
    assert pulled(session, [1]) == [-1]


def test_a_round_that_began_before_a_lease_was_lost_is_not_pushed(make_job):
    job, other = make_job(terms_of())
    lost = job.session(1, terms_of(), local_steps=3)
    step(lost, [1])
    lose_lease(job, other)
    step(other, [7])
    step(lost, [2])  # finds out, and joins again: this step is dropped, too
    for row in (2, 3, 4):
        step(lost, [row])
    assert lost.stats.lost_leases == 1
    assert pulled(other, [1, 2, 3, 4]) == [0.0, -0.5, -0.5, -0.5]


def test_rows_of_a_cache_do_not_outlive_a_lost_lease(make_pair):
    job, lost, other = make_pair(staleness=3)
    lost.cache_rows(rows=10, staleness=3)
    module = es.Embedding(lost.table(SPEC))
    seen = []
    for number, ids in enumerate(lost.prefetch([torch.tensor([1])] * 8, inputs=lambda ids: {"t": ids})):
        rows = module(ids)
        seen.append(rows[0, 0].item())
        if number == 3:
            lose_lease(job, other)
            step(other, [9])  # where it had to join again, too
        step(other, [1 if number == 3 else 9])
        (0.0 * rows).sum().backward()
        lost.step()
        lost.flush()  # it knows now
    assert lost.stats.lost_leases == 1
    assert seen == [0.0] * 4 + [-1.0] * 4


@pytest.mark.parametrize("silent", [0, 1])
def test_a_wait_for_others_that_a_silent_shard_ends_names_that_shard(make_pair, silent):
    def no_answer(request):
        if isinstance(request, messages.Pull):
            raise ShardUnavailable(shard=str(silent), address="local", reason="no answer", seconds=0.1)

    job, one, _ = make_pair(staleness=0)
    one.table(SPEC)
    job.wires[silent].before = no_answer
    job.wires[1 - silent].before = lambda request: time.sleep(0.01)
    one.membership._timeout = one.client.timeout = timedelta(seconds=0.05)
    with pytest.raises(ShardUnavailable):
        one.client.pull([(SPEC.name, make_route(np.arange(20), SPEC.space_key, one.placement))], clock=1)


@pytest.fixture
def unanswered(make_job):
    """The only worker of a job, with a push of 20 rows that one shard did not answer; it would now."""
    job, session = make_job(terms_of(1, staleness=0))
    session.table(SPEC)

    def no_answer(request):
        if isinstance(request, messages.Push):
            raise ShardUnavailable(shard="1", address="local", reason="no answer", seconds=0.1)

    job.wires[1].before = no_answer
    session.client.timeout = timedelta(seconds=0.1)
    with pytest.raises(ShardUnavailable):
        step(session, list(range(20)))
    job.hold(lambda request: None)
    session.client.timeout = timedelta(seconds=PATIENCE)
    return job, session


def test_a_pull_does_not_wait_for_a_push_of_its_own_worker(unanswered):
    _, session = unanswered
    rows = es.Embedding(session.table(SPEC))(torch.arange(20))
    assert rows[:, 0].tolist() == [-1.0] * 20  # the push that was kept, once


def test_flush_sends_a_push_again_that_got_no_answer(unanswered):
    job, session = unanswered
    session.flush()
    assert [wire.shard.status().members[0].clock for wire in job.wires] == [1, 1]


def test_close_says_which_shards_have_not_answered_the_last_push(unanswered, caplog):
    _, session = unanswered
    session.close()
    assert [record.args for record in caplog.records] == [(0, "1")]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_worker_goes_on_after_a_shard_refused_its_push(make_pair, staleness):
    """As where a table is full: the clock is over there too, or this worker and the other would wait for it."""
    job, here, other = make_pair(staleness=staleness, wait_timeout=timedelta(seconds=2))
    ids, refused = list(range(20)), []

    def refuse(request):
        if isinstance(request, messages.Push) and request.token.worker == 0 and request.tables and not refused:
            refused.append(request)
            job.wires[1].shard.handle(replace(request, weight=-1.0), job.now)

    for session in (here, other):
        session.table(SPEC)
    job.wires[1].before = refuse
    with pytest.raises(InvalidRequest, match="weight"):
        step(here, ids)
    step(other, ids)
    for _ in range(3):
        together(lambda session: step(session, ids), [here, other])
    clocks = [[member.clock for member in wire.shard.status().members] for wire in job.wires]
    assert clocks == [[4, 4], [4, 4]]


def test_a_change_of_rows_that_others_have_changed_since_is_dropped(make_pair):
    job, lost, other = make_pair()
    route = lost.table(SPEC).route(torch.tensor([1, 2, 3]))
    lose_lease(job, other)
    for _ in range(2):
        step(other, [1, 2, 3])
    for want in (-2.0, 5.0):
        lost.client.load("t", route, np.full((3, 2), 5, np.float32), keep_state=True)  # as max_norm does
        assert lost.stats.lost_leases == 1
        assert max(pulled(lost, [1, 2, 3])) == want


def test_rows_that_a_user_assigns_are_assigned_after_a_lost_lease_too(make_pair):
    job, lost, other = make_pair()
    table = lost.table(SPEC)
    lose_lease(job, other)
    for _ in range(2):
        step(other, [1, 2, 3])
    table.assign(torch.full((4, 2), 5.0))
    assert lost.stats.lost_leases == 1
    assert torch.equal(table.pull(torch.arange(5)), torch.tensor([[5.0, 5.0]] * 4 + [[0.0, 0.0]]))


def test_of_rows_of_several_tables_none_is_taken_back_after_a_lost_lease(make_pair):
    job, lost, other = make_pair()
    specs = [es.TableSpec(name=name, dim=2, optimizer=es.SGD(lr=1.0)) for name in ("a", "b")]
    modules = [es.Embedding(lost.table(spec), max_norm=0.01) for spec in specs]
    ids = torch.tensor([1, 2, 3])
    before = [module.table.pull(ids) for module in modules]
    lost.stage([Lookup(spec, ids, torch.device("cpu")) for spec in specs])  # as a model with embedding_inputs does
    lose_lease(job, other)
    step(other, [7])
    for module in modules:
        module(ids)
    assert lost.stats.lost_leases == 1
    assert all(torch.equal(module.table.pull(ids), rows) for module, rows in zip(modules, before, strict=True))


class Far(LocalTransport):
    """The way to a shard where all wait, 60 ms there and back: it puts requests back shortly before their end."""

    def submit(self, request, timeout, into=()):
        if not isinstance(request, messages.Rendezvous):
            return super().submit(request, timeout, into)
        seconds, answer = timeout.total_seconds(), Future()
        answer.num_bytes = 0
        put_back = seconds - min(messages.PUT_BACK_SECONDS, seconds / 4) + 0.06
        time.sleep(min(seconds, put_back))
        late = Unreachable("no answer")
        answer.set_exception(late if put_back > seconds else ClockAhead(clock=0, workers="1", seconds=1.0))
        return answer


def test_a_wait_for_others_outlasts_the_timeout_on_a_slow_link():
    shard = Scripted(lambda request: joined(request, members=(0, 1)))
    client = Client([Far(shard.handle, "far")], timeout=timedelta(seconds=0.4))
    member, start = client.join(terms_of(staleness=0, wait_timeout=timedelta(seconds=1))), time.monotonic()
    with pytest.raises(WorkerLost):
        member.rendezvous("never")
    assert time.monotonic() - start > 0.95
    member.leave()


def test_what_was_answered_as_the_wait_timed_out_counts(monkeypatch):
    monkeypatch.setattr(membership_module, "_SAID_AFTER", timedelta(seconds=0.2))  # until the first call ends
    shard = Scripted(lambda request: joined(request, members=(0, 1)))
    replies = iter([0.25, 0.4])

    def handle(request):
        if not isinstance(request, messages.Rendezvous):
            return shard.handle(request)
        seconds = next(replies)
        time.sleep(seconds)
        if seconds == 0.25:
            raise ClockAhead(clock=0, workers="1", seconds=1.0)
        return messages.RendezvousResult((0, 1), ())

    terms = terms_of(staleness=0, wait_timeout=timedelta(seconds=0.5))
    member = Client([LocalTransport(handle, "scripted")]).join(terms)
    assert list(member.rendezvous("late", want_payloads=False)) == [0, 1]
    member.leave()
