"""What the panel says of shards and workers: rates, waits, and who is down."""

import socket
import time
from contextlib import closing
from datetime import timedelta

import numpy as np
import pytest

from embershard.dash.events import Severity
from embershard.dash.run_log import FollowedLog
from embershard.dash.sampler import Sampler
from embershard.dash.shards import ShardWatch, health_of, problem_of
from embershard.dash.workers import WorkersWatch
from embershard.proto.errors import NotAllowed
from embershard.proto.messages import Declare, GetStatus, Pull, ShardStatus, TableIds, replace
from embershard.proto.security.tokens import TokenFile, new_token, token_digest, write_private
from embershard.proto.transport.addresses import transport_for
from embershard.proto.transport.transport import Unreachable
from embershard.ps.security.access import Access
from harness.eventually import eventually
from harness.served import ServedShard
from harness.shards import make_shard, table

_SOON = timedelta(seconds=20)
READER = new_token()


def _black_hole() -> socket.socket:
    """Takes connections, and never answers."""
    return socket.create_server(("127.0.0.1", 0))


@pytest.fixture
def served():
    shard = ServedShard(shard=make_shard(table()))
    yield shard
    if not shard.loop.is_closed():
        shard.stop()


@pytest.fixture
def sampler(served):
    made = Sampler([served.address])
    yield made
    made.close()


def pull(address, count=100):
    transport = transport_for(address)
    for _ in range(count):
        transport.submit(Pull(1, (TableIds("items", np.arange(50)),)), _SOON).result()
    transport.close()


def test_a_shard_that_serves_has_rates_and_latencies(sampler, served):
    sampler.sample()
    pull(served.address)
    (row,) = sampler.sample().shards
    assert (row.health, row.stale, row.shard) == ("serving", False, 0)
    assert row.pulled_rows > 0
    assert row.requests > 0
    assert row.received > 0
    assert 0 < row.pull_p50 <= row.pull_p99
    assert 0 <= row.busy <= 1


def test_bytes_of_a_step_have_the_codecs_of_their_tables(sampler, served, tmp_path, monkeypatch):
    parts = [{"direction": "push", "part": part, "wire": 1, "raw": 4} for part in ("rows", "dense", "ids")]
    monkeypatch.setattr(sampler, "_run", FollowedLog(tmp_path, wait=True))
    monkeypatch.setattr(FollowedLog, "workers", lambda log: {0: {"bytes": parts}})
    assert [part["codec"] for part in sampler.sample().bytes] == ["float32", "", ""]


def test_a_shard_that_is_gone_is_stale_with_the_age_of_its_last_answer_and_without_rates(sampler, served):
    sampler.sample()
    pull(served.address)
    sampler.sample()
    served.stop()
    assert eventually(lambda: sampler.sample().shards[0].stale)
    (row,) = sampler.last.shards
    assert row.health == "down"
    assert row.age > 1
    assert (row.requests, row.busy, row.pull_p99, row.received) == (None,) * 4
    assert sampler.last.series["pulled_rows"] is None
    assert [event.severity for event in sampler.events] == [Severity.ERROR]


def test_one_that_does_not_answer_holds_up_no_other(served):
    hole = _black_hole()
    sampler = Sampler([served.address, f"127.0.0.1:{hole.getsockname()[1]}"])
    begun = time.monotonic()
    rows = [sampler.sample().shards for _ in range(3)][-1]
    assert [row.health for row in rows] == ["serving", "starting"]
    assert time.monotonic() - begun < 2 * 3  # that is the timeout of one question
    sampler.close()
    hole.close()


def test_a_shard_that_comes_back_as_another_process_is_told(served):
    watch = ShardWatch(served.address)
    old = ShardStatus(instance="a", term=0)
    old.tables.add(name="t", rows=5)
    (lost,) = watch._compare(old, replace(old, instance="b"), 0.0, True)
    assert lost.severity is Severity.WARNING
    assert "without its rows" in lost.text
    watch.close()


def test_refused_logins_are_told_with_their_shard_and_their_kind(tmp_path):
    write_private(tmp_path / "reader.token", READER)
    digest = token_digest(READER).hex()
    write_private(tmp_path / "access.yaml", f"- {{name: reader, role: read, token_sha256: '{digest}'}}\n")
    write_private(tmp_path / "wrong.token", new_token())
    shard = ServedShard(shard=make_shard(table()), access=Access(tmp_path / "access.yaml"))
    watch = ShardWatch(shard.address)
    before = shard.dispatch.status()
    for name, request in (("wrong", GetStatus()), ("reader", Declare(table("more")))):
        with closing(transport_for(shard.address, token=TokenFile(tmp_path / f"{name}.token"))) as transport:
            with pytest.raises(NotAllowed):
                transport.submit(request, _SOON).result()
    events = watch._compare(before, shard.dispatch.status(), 0.0, False)
    assert sorted(event.text for event in events) == [
        "shard 0 refused logins without a token or a certificate that it knows (NotAuthenticated): 1",
        "shard 0 refused requests that their sender's role or tables do not allow (NotAllowed): 1",
    ]
    assert {event.severity for event in events} == {Severity.WARNING}
    watch.close()
    shard.stop()


def test_a_shard_that_refuses_its_watcher_is_not_said_to_be_down(tmp_path):
    write_private(tmp_path / "access.yaml", f"- {{name: a, role: read, token_sha256: '{'a' * 64}'}}\n")
    write_private(tmp_path / "wrong.token", new_token())
    shard = ServedShard(shard=make_shard(table()), access=Access(tmp_path / "access.yaml"))
    sampler = Sampler([shard.address])
    (watch,) = sampler._shards.watches
    watch.close()
    watch._transport = transport_for(shard.address, token=TokenFile(tmp_path / "wrong.token"))
    assert eventually(lambda: sampler.sample().shards[0].health == "no access")
    (event,) = sampler.events
    assert "does not say how it is" in event.text
    assert "token" in event.text
    sampler.close()
    shard.stop()


def status(*members, clock=5, staleness=0, **fields) -> ShardStatus:
    made = ShardStatus(clock=clock, staleness=staleness, **fields)
    for worker, at in members:
        made.members.add(worker=worker, clock=at, lease_seconds=5.0)
    return made


def states(watch, *statuses, down=()):
    return {row.worker: (row.state, row.waits_for) for row in watch.rows(statuses, down, {}, False)}


def test_a_worker_waits_for_the_one_that_is_behind(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("embershard.dash.workers.time.monotonic", lambda: now[0])
    watch, waiting = WorkersWatch(), status((0, 6), (1, 5))
    assert states(watch, waiting) == {0: ("trains", []), 1: ("trains", [])}  # as in every step
    now[0] += 2
    assert states(watch, waiting) == {0: ("waits", [1]), 1: ("waited for", [])}
    assert states(watch, status((0, 6), (1, 6), clock=6)) == {0: ("trains", []), 1: ("trains", [])}


def test_without_a_bound_nobody_waits_and_one_that_stands_still_is_silent(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("embershard.dash.workers.time.monotonic", lambda: now[0])
    watch = WorkersWatch()
    states(watch, status((0, 9), (1, 5), staleness=-1))
    now[0] += 10
    assert states(watch, status((0, 20), (1, 5), staleness=-1)) == {0: ("trains", []), 1: ("silent", [])}
    assert states(watch, status((0, 20), (1, 5), staleness=-1), down=(1,))[1] == ("waits", [])


@pytest.mark.parametrize(
    ("statuses", "age", "ended", "state"),
    [
        ([status()], 0, False, "trains"),
        ([], 0, False, "trains"),
        ([status()], 60, False, "gone"),
        ([status((1, 5))], 0, False, "gone"),  # it has left the others
        ([status()], 0, True, "ended"),
    ],
)
def test_a_worker_that_is_no_member_is_known_by_its_record(statuses, age, ended, state):
    record = {"worker": 0, "time": time.time() - age, "parts_ms": {"forward": 1.0}, "waits": {}}
    row = WorkersWatch().rows(statuses, (), {0: record}, ended)[0]
    assert (row.worker, row.state) == (0, state)


def test_a_worker_that_is_no_member_waits_for_the_shard_that_does_not_answer():
    for age in (5, 60):  # no shard says that it is gone
        record = {"worker": 0, "time": time.time() - age, "parts_ms": {}, "waits": {}}
        (row,) = WorkersWatch().rows([], (1,), {0: record}, False)
        assert (row.state, row.waits_for_shards, round(row.seconds)) == ("waits", [1], age)


def test_what_a_recovering_shard_replays_is_no_event_and_no_rate(monkeypatch):
    serving = {"instance": "b", "skipped_rows": 7, "pushed_rows": 900, "expired_leases": 3}
    answers = iter(
        [
            status((0, 5), **{**serving, "instance": "a"}),
            status(instance="b", recovering=True),
            status(instance="b", recovering=True, skipped_rows=5, pushed_rows=600, expired_leases=1),
            status((0, 5), **serving),
            status((0, 5), **serving),
        ]
    )
    monkeypatch.setattr(ShardWatch, "_ask", lambda self: next(answers))
    one = Sampler(["127.0.0.1:1"])
    samples = [one.sample() for _ in range(5)]
    texts = [event.text.split(", ")[0] for sample in samples for event in sample.events]
    assert texts == ["shard 0 was started again", "shard 0 has recovered its rows"]
    assert [sample.series["pushed_rows"] for sample in samples] == [None, None, None, None, 0.0]
    one.close()


def test_a_shard_that_waits_for_room_on_its_disk_after_a_recovery_says_so_once(monkeypatch):
    waits = status(recovering=True, waits_for_room="No space left on device")
    answers = iter([status(recovering=True), waits, waits])
    monkeypatch.setattr(ShardWatch, "_ask", lambda self: next(answers))
    one = Sampler(["127.0.0.1:1"])
    samples = [one.sample() for _ in range(3)]
    (event,) = [event for sample in samples for event in sample.events]
    assert event.severity is Severity.ERROR
    assert "No space left on device; it waits for room" in event.text
    assert [sample.shards[0].problem == "" for sample in samples] == [True, False, False]
    one.close()


def test_a_shard_that_is_silent_may_be_stopped(monkeypatch):
    def ask(watch):
        raise Unreachable("no answer")

    monkeypatch.setattr(ShardWatch, "_ask", ask)
    one = Sampler(["127.0.0.1:1"])
    sample = one.sample()
    assert [event.text for event in sample.events] == [
        "the shard at 127.0.0.1:1 does not answer: nothing came within 2 s; it may be stopped"
    ]
    assert sample.shards[0].health == "down"
    one.close()


def test_a_shard_that_serves_and_cannot_write_its_log_says_so():
    stalled = status(waits_for_room="No space left on device")
    assert health_of(stalled, lost=False) == "log stalled"
    assert "log cannot be written: No space left on device" in problem_of(stalled)


def test_who_comes_and_goes_is_an_event_and_an_eviction_a_warning():
    watch = WorkersWatch()
    assert watch.events([status((0, 1))], True) == []
    (joined,) = watch.events([status((0, 1), (1, 1))], True)
    assert joined.severity is Severity.INFO
    (evicted,) = watch.events([status((0, 1), expired_leases=1)], True)
    assert evicted.severity is Severity.WARNING
    assert watch.events([], False) == []  # shards that do not answer tell of nobody
