"""A worker's place among others: joining, leases, pausing, rendezvous. Shards' time is the test's."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import nn

import embershard as es
from embershard.proto.errors import (
    ClockAhead,
    LeaseLost,
    ModeMismatch,
    ShardUnavailable,
    StaleRun,
    StaleWorker,
    WorkerLost,
)
from embershard.proto.messages import (
    PUT_BACK_SECONDS,
    Greeting,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Join,
    Joined,
    Leave,
    LeaveAck,
    Pull,
    Push,
    Rendezvous,
    RendezvousResult,
    Reply,
    Request,
)
from embershard.proto.transport.local import LocalTransport
from embershard.proto.transport.transport import Unreachable
from embershard.ps.shard import Shard
from embershard.worker.client import membership as membership_module
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Membership, Terms
from embershard.worker.session.reads import Lookup
from embershard.worker.session.session import Session

Shards = Callable[..., list[Shard]]
PATIENCE = 20.0  # seconds until a test that waits in vain fails
SPEC = es.TableSpec(name="t", dim=2, optimizer=es.SGD(lr=1.0), initializer=es.Constant(value=0.0))
HOURS = 3600.0
LONG = timedelta(hours=1)  # a lease that no beat renews while a test runs
MakeJob = Callable[..., "Job"]


class Job:
    """Shards whose time is told to them, and workers of one job."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards, self.lock, self.now = shards, threading.Lock(), 0.0
        self.heard: list[Request] = []
        self.pulled: list[Pull] = []  # those that were answered
        self.sessions: list[Session] = []

    def worker(self, number: int, terms: Terms, *, local_steps: int | None = None, clock: int = 0) -> Session:
        transports = [LocalTransport(lambda r, it=shard: self.handle(it, r), "local") for shard in self.shards]
        client = Client(transports, worker=number, timeout=timedelta(seconds=PATIENCE))
        client.join(terms, clock)
        self.sessions.append(Session(client, local_steps=local_steps))
        return self.sessions[-1]

    def handle(self, shard: Shard, request: Request) -> Reply:
        with self.lock:
            self.heard.append(request)
            reply = shard.handle(request, self.now)
            if isinstance(request, Pull):
                self.pulled.append(request)
            return reply

    def await_rows(self, session: Session, row: int, times: int) -> None:
        """Wait until it was given a row so many times."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            with self.lock:
                pulls = [pull for pull in self.pulled if pull.worker == session.client.worker]
            if sum(row in part.ids for pull in pulls for part in pull.tables) >= times:
                return
            time.sleep(0.001)
        raise AssertionError(f"row {row} is not pulled {times} times")

    def pass_time(self, seconds: float, alive: Session) -> None:
        """All but `alive` are not heard of."""
        self.now += seconds
        for shard in self.shards:
            member = alive.membership
            assert member is not None
            with self.lock:
                shard.handle(Join(worker=member.worker, epoch=alive.client.epoch, **_terms(member.terms)), self.now - 1)
                shard.advance(self.now)


def _terms(terms: Terms) -> dict[str, int]:
    return {
        "staleness": -1 if terms.staleness is None else terms.staleness,
        "workers": terms.workers,
        "lease_ms": round(terms.lease.total_seconds() * 1000),
        "staleness_aware_lr": terms.staleness_aware_lr,
    }


@pytest.fixture
def make_job(make_shards):
    jobs: list[Job] = []

    def make(shards=2):
        jobs.append(Job(make_shards(shards)))
        return jobs[-1]

    yield make
    for job in jobs:
        for session in job.sessions:
            session.close()


def step(session: Session, ids: list[int], weight: float = 1.0) -> torch.Tensor:
    """Push a gradient of 1 for every id; the rows that were read."""
    rows: torch.Tensor = es.Embedding(session.table(SPEC))(torch.tensor(ids))
    rows.sum().backward()
    session.step(weight=weight)
    return rows.detach()[:, 0]


class Scripted:
    """A shard that answers joins with clocks of its own."""

    def __init__(self, index: int, of: int, joined: Callable[[Join], Joined]) -> None:
        self.joined, self.heard = joined, list[Request]()
        self.greeting = Greeting(
            shard=index, num_shards=of, placement_epoch=1, version="", instance=f"{index}", max_message_bytes=64 * 2**20
        )
        self.beaten = threading.Semaphore(0)

    def handle(self, request: Request) -> Reply:
        self.heard.append(request)
        match request:
            case Hello():
                return self.greeting
            case Join():
                return self.joined(request)
            case Heartbeat():
                self.beaten.release()
                return HeartbeatAck(clock=0, members=(0,))
            case _:
                assert isinstance(request, Leave)
                return LeaveAck()


def member_of(shards: list[Scripted], terms: Terms) -> Membership:
    client = Client([LocalTransport(shard.handle, "scripted") for shard in shards])
    return client.join(terms)


def test_a_late_worker_joins_all_shards_at_one_clock_that_is_closed_on_none():
    opens = [5, 9, 7]
    shards = [
        Scripted(
            i, 3, lambda join, open_=open_: Joined(member=join.clock >= open_, clock=open_, started=True, members=(0,))
        )
        for i, open_ in enumerate(opens)
    ]
    member = member_of(shards, Terms(staleness=0))
    assert member.first > max(opens)
    last = [[r for r in shard.heard if isinstance(r, Join)][-1].clock for shard in shards]
    assert last == [member.first] * 3
    member.leave()


def test_a_worker_catches_up_with_a_clock_that_runs_away():
    opens = iter(range(5, 10_000, 5))

    def joined(join):
        at = next(opens)  # faster than the distance that the first try leaves
        return Joined(member=join.clock >= at, clock=at, started=True, members=(0,))

    member = member_of([Scripted(0, 1, joined)], Terms())
    assert member.first > 5
    member.leave()


def test_a_member_beats_on_every_shard_until_it_leaves():
    shards = [Scripted(i, 2, lambda join: Joined(member=True, clock=0, started=True, members=(0,))) for i in range(2)]
    member = member_of(shards, Terms(lease=timedelta(seconds=0.04)))
    for shard in shards:
        for _ in range(3):
            assert shard.beaten.acquire(timeout=PATIENCE)
    member.leave()
    assert [type(shard.heard[-1]) for shard in shards] == [Leave, Leave]


def test_a_session_that_was_forgotten_stops_beating():
    shard = Scripted(0, 1, lambda join: Joined(member=True, clock=0, started=True, members=(0,)))
    member_of([shard], Terms(lease=timedelta(seconds=0.04)))  # and nobody keeps it
    end = time.monotonic() + PATIENCE
    while any(thread.name == "embershard heartbeat" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_worker_that_others_gave_up_drops_its_step_and_goes_on_at_a_later_clock(make_job, caplog):
    job, terms = make_job(), Terms(workers=2, lease=LONG)
    lost, other = job.worker(0, terms), job.worker(1, terms)
    step(lost, [1, 2, 3])
    rows = es.Embedding(lost.table(SPEC))(torch.tensor([1, 2, 3]))
    job.pass_time(2 * HOURS, other)
    for _ in range(3):
        step(other, [7])
    rows.sum().backward()
    lost.step()
    assert lost.stats.lost_leases == 1
    assert "joined again" in caplog.text
    first = lost.membership.first
    assert first > other.clock - 1
    assert lost.clock == first
    assert lost.table(SPEC).pull(torch.tensor([1, 2, 3]))[:, 0].tolist() == [-1.0] * 3  # of its first step alone
    step(lost, [1])
    pushed = [r for r in job.heard if isinstance(r, Push) and r.token.worker == 0]
    assert pushed[-1].clock == first
    assert lost.table(SPEC).pull(torch.tensor([1]))[0, 0].item() == -2.0
    assert lost.stats.lost_leases == 1


def test_a_pull_that_finds_the_lease_lost_is_answered_after_joining_again(make_job):
    job, terms = make_job(), Terms(workers=2, staleness=3, lease=LONG)
    lost, other = job.worker(0, terms), job.worker(1, terms)
    step(lost, [1])
    job.pass_time(2 * HOURS, other)
    step(other, [1])
    rows = es.Embedding(lost.table(SPEC))(torch.tensor([1]))  # finds out, and joins again
    assert lost.stats.lost_leases == 1
    rows.sum().backward()
    lost.step()  # its rows were asked for by a worker that had lost its lease: dropped
    step(lost, [1])
    assert lost.stats.lost_leases == 1
    pushes = [r for r in job.heard if isinstance(r, Push) and r.token.worker == 0]
    assert [push.clock for push in pushes if push.last] == [0, 0, lost.membership.first, lost.membership.first]


def test_a_push_that_was_under_way_when_the_lease_was_lost_is_not_sent(make_job):
    job, terms = make_job(), Terms(workers=2, lease=LONG)
    lost, other = job.worker(0, terms), job.worker(1, terms)
    table = lost.table(SPEC)
    job.pass_time(2 * HOURS, other)
    step(other, [1])
    table.pull(torch.tensor([1]))  # finds out, and joins again
    assert lost.membership.first > 0
    route = table.route(torch.tensor([2]))
    job.heard.clear()
    lost.client.push([("t", route, np.ones((1, 2), np.float32))], clock=0)
    assert not job.heard


def test_a_rest_outlives_a_lost_lease(make_job):
    job, terms = make_job(1), Terms(workers=2, staleness=0, lease=LONG)
    lost, other = job.worker(0, terms), job.worker(1, terms)
    lost.membership.pause()
    job.pass_time(2 * HOURS, other)
    other.membership.pause()
    came: dict[int, dict[int, bytes]] = {}

    def meet(session):
        member = session.membership
        came[member.worker] = member.rendezvous("m", f"worker {member.worker}".encode())

    threads = [threading.Thread(target=meet, args=(session,)) for session in (lost, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert came[0] == {0: b"worker 0", 1: b"worker 1"} or came[1] == {1: b"worker 1"}
    assert {m.worker: m.paused for m in job.shards[0].status().members} == {0: True, 1: True}
    assert lost.stats.lost_leases == 1


def test_a_resting_worker_is_not_waited_for_and_resumes_where_it_is_told(make_job):
    job, terms = make_job(), Terms(workers=2, staleness=0, lease=LONG)
    paused, other = job.worker(0, terms), job.worker(1, terms)
    paused.membership.pause()
    for _ in range(4):
        step(other, [1])
    assert [status.clock for status in job.shards[0].status().members] == [0, 4]
    assert paused.membership.resume(6) == paused.clock == 6
    for _ in range(2):
        step(other, [1])
    assert job.shards[1].status().clock == 6


def test_a_resting_worker_reads_without_waiting_for_its_clock(make_job):
    worker = make_job().worker(0, Terms(workers=1, staleness=0, lease=LONG))
    worker.membership.resume(6)
    assert worker.membership.required_clock(6) == 6  # to which nobody may ever come
    worker.membership.pause()
    assert worker.membership.required_clock(6) == 0


def test_rendezvous_bring_the_payloads_of_all(make_job):
    job, terms = make_job(), Terms(workers=3, lease=LONG)
    sessions = [job.worker(number, terms) for number in range(3)]
    came: dict[int, dict[int, bytes]] = {}

    def meet(session):
        member = session.membership
        came[member.worker] = member.rendezvous("sum", bytes([member.worker]), want_payloads=member.worker == 0)

    threads = [threading.Thread(target=meet, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert came == {0: {0: b"\0", 1: b"\1", 2: b"\2"}, 1: dict.fromkeys(range(3), b""), 2: dict.fromkeys(range(3), b"")}


def test_splits_are_dealt_once_each(make_job):
    job, terms = make_job(), Terms(workers=2, lease=LONG)
    sessions = [job.worker(number, terms) for number in range(2)]
    dealt: list[int] = []

    def take(session):
        done = -1
        while (split := session.membership.take_split(0, 7, done)).index >= 0:
            dealt.append(split.index)
            done = split.index

    threads = [threading.Thread(target=take, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(dealt) == list(range(7))


def test_wait_timeout_ends_a_wait_and_names_whom_it_was_for(make_job, caplog, monkeypatch):
    monkeypatch.setattr(membership_module, "_SAID_AFTER", timedelta(seconds=0.05))
    terms = Terms(workers=2, staleness=0, lease=LONG, wait_timeout=timedelta(seconds=1))
    job = make_job()
    here, _ = job.worker(0, terms), job.worker(1, terms)
    step(here, [1])
    with pytest.raises(WorkerLost, match="worker 1"):
        step(here, [1])
    said = [record for record in caplog.records if "waiting at clock" in record.message]
    assert [(record.levelno, "worker 1" in record.message) for record in said] == [(logging.WARNING, True)]


@pytest.mark.parametrize(("staleness", "may_rejoin"), [(0, False), (3, False), (None, True)])
def test_a_worker_whose_steps_an_all_reduce_ties_to_the_others_does_not_come_back(make_job, staleness, may_rejoin):
    # at a bound it would wait for their clock, and they for its part of the all-reduce
    job, terms = make_job(), Terms(workers=2, staleness=staleness, lease=LONG)
    lost, other = job.worker(0, terms), job.worker(1, terms)
    model = nn.Sequential(nn.Embedding(8, 2), nn.Linear(2, 1))
    es.wrap(model, lost, optimizer=es.SGD(lr=1.0), dense="ddp")
    job.pass_time(2 * HOURS, other)
    if may_rejoin:
        model(torch.tensor([1]))
        assert lost.stats.lost_leases == 1
    else:
        with pytest.raises(LeaseLost):
            model(torch.tensor([1]))


def test_workers_on_other_terms_are_refused(make_job):
    job = make_job()
    job.worker(0, Terms(workers=2, staleness=0, lease=LONG))
    with pytest.raises(ModeMismatch, match="staleness 4"):
        job.worker(1, Terms(workers=2, staleness=4, lease=LONG))


def test_a_later_run_trains_every_step_while_the_workers_of_the_earlier_one_still_live(make_job):
    job = make_job()
    first, later = (Terms(workers=2, staleness=0, lease=LONG, run=run) for run in (1, 2))
    old = [job.worker(number, first) for number in range(2)]
    for session in (*old, *old):
        step(session, [1])
    new = [job.worker(0, later)]
    with pytest.raises(StaleRun, match="worker 1 belongs to run 1, which is over"):
        step(old[1], [1])  # nobody has its number yet
    with pytest.raises(StaleWorker):
        step(old[0], [1])
    new.append(job.worker(1, later))
    for session in (*new, *new):
        step(session, [1])
    assert [session.membership.first for session in new] == [0, 0]
    assert [status.clock for status in (shard.status() for shard in job.shards)] == [2, 2]
    assert new[0].table(SPEC).pull(torch.tensor([1]))[0, 0] == -4.0  # two clocks of each run, and the same table
    assert new[0].stats.lost_leases == 0


def test_a_worker_that_comes_back_in_its_run_joins_late(make_job):
    job, terms = make_job(), Terms(workers=2, lease=LONG, run=1)
    one, other = job.worker(0, terms), job.worker(1, terms)
    for session in (one, other, one, other):
        step(session, [1])
    assert job.worker(0, terms).membership.first > 2
    assert other.membership.lost_leases == 0


def test_a_lease_that_is_lost_again_and_again_is_an_error(make_job):
    job, terms = make_job(1), Terms(workers=2, lease=LONG)
    session, _ = job.worker(0, terms), job.worker(1, terms)
    table = session.table(SPEC)

    def hopeless(shard, request):
        if isinstance(request, Join):
            return Joined(member=True, clock=0, started=True, members=(0, 1))
        raise LeaseLost(worker=0, lease_ms=1)

    job.handle = hopeless  # type: ignore[method-assign]
    with pytest.raises(LeaseLost):
        table.pull(torch.tensor([1]))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"workers": 0}, "workers"),
        ({"staleness": -1}, "staleness"),
        ({"lease": timedelta(0)}, "lease"),
        ({"wait_timeout": timedelta(days=-1)}, "wait_timeout"),
        ({"staleness": 0, "staleness_aware_lr": True}, "staleness_aware_lr"),
        ({"run": -1}, "run"),
    ],
)
def test_terms_without_sense_are_refused_by_name(settings, name):
    with pytest.raises(ValueError, match=name):
        Terms(**settings)  # type: ignore[arg-type]


def test_a_loop_that_lost_its_lease_goes_on_with_fresh_rows(make_job):
    job, terms = make_job(), Terms(workers=2, staleness=2, lease=LONG)
    lost, other = job.worker(0, terms), job.worker(1, terms)
    table = lost.table(SPEC)
    module, batches = es.Embedding(table), [torch.tensor([k % 3, 5 + k]) for k in range(12)]
    for number, ids in enumerate(lost.prefetch(batches, inputs=lambda ids: {"t": ids})):
        if number == 5:
            job.await_rows(lost, 0, 3)  # of batches 0, 3 and 6: the next one is here
            job.await_rows(lost, 5 + 6, 1)
            job.pass_time(2 * HOURS, other)
        if number != 5:
            step(other, [9])
        module(ids).sum().backward()
        lost.step()
        if number == 5:
            lost.flush()  # it knows now
    assert lost.stats.lost_leases == 1
    assert lost.missed_reads > 0  # what was pulled ahead before is not read
    pushed = [r for r in job.heard if isinstance(r, Push) and r.token.worker == 0 and r.last]
    clocks = sorted({push.clock for push in pushed})
    after = [clock for clock in clocks if clock >= lost.membership.first]
    assert after == list(range(lost.membership.first, lost.clock))  # none is left out: nobody waits for ever
    assert len(after) >= 12 - 5 - 1 - 3  # but for what was under way


def test_a_push_waits_where_too_much_is_kept_for_other_workers(make_job):
    job, terms = make_job(1), Terms(workers=1, staleness=0, lease=LONG)
    session = job.worker(0, terms)
    module = es.Embedding(session.table(SPEC))
    handle, refused = job.handle, []

    def full(shard, request):
        if isinstance(request, Push) and len(refused) < 8:
            refused.append(request.token)
            raise ClockAhead(clock=0, workers="1", seconds=0.0)
        return handle(shard, request)

    job.handle = full  # type: ignore[method-assign]
    session.client.timeout = timedelta(seconds=0.1)  # in which a call that nobody answers is given up
    module(torch.tensor([1])).sum().backward()
    session.step()
    assert len(refused) == 8
    assert module.table.pull(torch.tensor([1]))[0, 0] == -1


def test_a_round_that_began_before_a_lease_was_lost_is_not_pushed(make_job):
    job, terms = make_job(), Terms(workers=2, lease=LONG)
    lost, other = job.worker(0, terms, local_steps=3), job.worker(1, terms)
    step(lost, [1])
    job.pass_time(2 * HOURS, other)
    step(other, [7])
    step(lost, [2])  # finds out, and joins again: this step is dropped, too
    for row in (2, 3, 4):
        step(lost, [row])
    assert lost.stats.lost_leases == 1
    assert other.table(SPEC).pull(torch.tensor([1, 2, 3, 4]))[:, 0].tolist() == [0.0, -0.5, -0.5, -0.5]


def test_rows_of_a_cache_do_not_outlive_a_lost_lease(make_job):
    job, terms = make_job(), Terms(workers=2, staleness=3, lease=LONG)
    lost, other = job.worker(0, terms), job.worker(1, terms)
    lost.cache_rows(rows=10, staleness=3)
    module = es.Embedding(lost.table(SPEC))
    seen: list[float] = []
    for number, ids in enumerate(lost.prefetch([torch.tensor([1])] * 8, inputs=lambda ids: {"t": ids})):
        rows = module(ids)
        seen.append(rows[0, 0].item())
        if number == 3:
            job.pass_time(2 * HOURS, other)
            step(other, [9])  # where it had to join again, too
        step(other, [1 if number == 3 else 9])
        (0.0 * rows).sum().backward()
        lost.step()
        lost.flush()  # it knows now
    assert lost.stats.lost_leases == 1
    assert seen == [0.0] * 4 + [-1.0] * 4


def test_a_pull_does_not_wait_for_a_push_of_its_own_worker(make_job):
    job, terms = make_job(), Terms(workers=1, staleness=0, lease=LONG)
    session = job.worker(0, terms)
    module = es.Embedding(session.table(SPEC))
    handle, silent = job.handle, [True]

    def no_answer(shard, request):
        if silent[0] and isinstance(request, Push) and shard is job.shards[1]:
            raise ShardUnavailable(shard="1", address="local", reason="no answer", seconds=0.1)
        return handle(shard, request)

    job.handle = no_answer  # type: ignore[method-assign]
    session.client.timeout = timedelta(seconds=0.1)
    module(torch.arange(20)).sum().backward()
    with pytest.raises(ShardUnavailable):
        session.step()
    silent[0] = False
    session.client.timeout = timedelta(seconds=PATIENCE)
    assert module(torch.arange(20))[:, 0].tolist() == [-1.0] * 20  # the push that was kept, once


def test_a_snapshot_is_asked_for_at_a_clock_that_can_come(make_job):
    job, terms = make_job(), Terms(workers=2, staleness=0, lease=LONG)
    first = job.worker(0, terms)
    assert first.membership.next_clock == 0
    late = job.worker(1, terms, clock=7)
    assert late.membership.next_clock == 7


def test_rows_that_were_only_looked_at_do_not_make_the_next_step_older(make_job):
    job, terms = make_job(1), Terms(workers=2, lease=LONG)
    one, other = job.worker(0, terms), job.worker(1, terms)
    module = es.Embedding(one.table(SPEC))
    step(other, [2])  # before it the version of all rows is 0, which says nothing
    with torch.no_grad():
        module(torch.tensor([1]))
    step(other, [1])
    one.reset_read_versions()
    step(one, [1])
    assert one.staleness_seen()[:2] == (2, 0)


def test_a_change_of_rows_that_others_have_changed_since_is_dropped(make_job):
    job, terms = make_job(), Terms(workers=2, lease=LONG)
    lost, other = job.worker(0, terms), job.worker(1, terms)
    table = lost.table(SPEC)
    route = table.route(torch.tensor([1, 2, 3]))
    job.pass_time(2 * HOURS, other)
    for _ in range(2):
        step(other, [1, 2, 3])
    lost.client.load("t", route, np.full((3, 2), 5, np.float32), keep_state=True)  # as max_norm does
    assert lost.stats.lost_leases == 1
    assert table.pull(torch.tensor([1, 2, 3]))[:, 0].max() < 0
    lost.client.load("t", route, np.full((3, 2), 5, np.float32), keep_state=True)
    assert table.pull(torch.tensor([1, 2, 3]))[:, 0].tolist() == [5.0] * 3


def test_of_rows_of_several_tables_none_is_taken_back_after_a_lost_lease(make_job):
    job, terms = make_job(), Terms(workers=2, lease=LONG)
    lost, other = job.worker(0, terms), job.worker(1, terms)
    modules = [
        es.Embedding(lost.table(es.TableSpec(name=name, dim=2, optimizer=es.SGD(lr=1.0))), max_norm=0.01)
        for name in ("a", "b")
    ]
    ids = torch.tensor([1, 2, 3])
    with torch.no_grad():
        before = [module.table.pull(ids) for module in modules]
    reads = [Lookup(module.spec, ids, torch.device("cpu")) for module in modules]
    lost.stage(reads)  # as a model with embedding_inputs does
    job.pass_time(2 * HOURS, other)
    step(other, [7])
    for module in modules:
        module(ids)
    assert lost.stats.lost_leases == 1
    for module, rows in zip(modules, before, strict=True):
        assert torch.equal(module.table.pull(ids), rows)


class Answer(Future[Reply]):
    """What comes from afar."""

    num_bytes = 0


class Far:
    """The way to a shard where all wait, 60 ms there and back: it puts requests back shortly before their end."""

    sent_bytes = received_bytes = 0

    def __init__(self, shard: Scripted) -> None:
        self.address, self.shard = "far", shard

    def submit(self, request: Request, timeout: timedelta, into: object = ()) -> Answer:
        answer = Answer()
        if isinstance(request, Rendezvous):
            seconds = timeout.total_seconds()
            put_back = seconds - min(PUT_BACK_SECONDS, seconds / 4) + 0.06
            time.sleep(min(seconds, put_back))
            late = Unreachable("no answer")
            answer.set_exception(late if put_back > seconds else ClockAhead(clock=0, workers="1", seconds=1.0))
        else:
            answer.set_result(self.shard.handle(request))
        return answer

    def close(self) -> None:
        pass


def test_a_wait_for_others_outlasts_the_timeout_on_a_slow_link():
    shard = Scripted(0, 1, lambda join: Joined(member=True, clock=0, started=True, members=(0, 1)))
    client = Client([Far(shard)], timeout=timedelta(seconds=0.8))
    member = client.join(Terms(workers=2, staleness=0, lease=LONG, wait_timeout=timedelta(seconds=2)))
    start = time.monotonic()
    with pytest.raises(WorkerLost, match="waiting at clock"):
        member.rendezvous("never")
    assert 1.9 < time.monotonic() - start < 4
    member.leave()


def test_what_was_answered_as_the_wait_timed_out_counts(monkeypatch):
    monkeypatch.setattr(membership_module, "_SAID_AFTER", timedelta(seconds=0.2))  # until the first call ends
    shard = Scripted(0, 1, lambda join: Joined(member=True, clock=0, started=True, members=(0, 1)))
    replies = iter([(0.25, ClockAhead(clock=0, workers="1", seconds=1.0)), (0.4, RendezvousResult((0, 1), ()))])

    def handle(request):
        if not isinstance(request, Rendezvous):
            return shard.handle(request)
        seconds, reply = next(replies)
        time.sleep(seconds)
        if isinstance(reply, ClockAhead):
            raise reply
        return reply

    client = Client([LocalTransport(handle, "scripted")])
    member = client.join(Terms(workers=2, staleness=0, lease=LONG, wait_timeout=timedelta(seconds=0.5)))
    assert list(member.rendezvous("late", want_payloads=False)) == [0, 1]
    member.leave()


def test_a_member_says_who_it_is_before_what_it_sends_again():
    shard = Scripted(0, 1, lambda join: Joined(member=True, clock=0, started=True, members=(0,)))
    client = Client([LocalTransport(shard.handle, "scripted")])
    member = client.join(Terms(lease=LONG))
    next(iter(client.connections)).suspect = True  # its connection broke
    member.pause()
    assert [type(request) for request in shard.heard[-3:]] == [Hello, Heartbeat, Leave]
    member.leave()
