import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.proto import errors
from embershard.proto.codec.name import CodecName
from embershard.proto.messages import Declare, Greeting, Hello, Leave, Load, Pull, Push
from embershard.proto.protobuf import dumps
from embershard.proto.routing import Placement, Route, make_route
from embershard.proto.spec import SGD, Constant, TableSpec
from embershard.proto.transport.local import LocalTransport
from embershard.proto.wire import MAX_BUFFERS, MAX_HEAD_BYTES
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.worker.client import connections
from embershard.worker.client.client import Client
from embershard.worker.client.connections import (
    MESSAGE_OVERHEAD,
    TABLE_OVERHEAD,
    split_into_messages,
    table_overhead,
)
from embershard.worker.client.membership import Terms
from embershard.worker.session.tables import await_loaded
from harness.raises import raises
from harness.wires import lost

SPEC = TableSpec(name="t", dim=3, optimizer=SGD(lr=1.0), initializer=Constant(value=0.0))
SHORT = timedelta(seconds=0.4)
REFUSED = errors.WrongDim(table="t", what="gradients", got=1, ids=1, dim=3, want=3)


def declared(wires, **arguments):
    client = wires.client(**arguments)
    client.declare(SPEC)
    return client


def route_of(client, *ids):
    return make_route(np.array(ids, np.int64), SPEC.space_key, client.placement)


def ones(route, value=1.0):
    return np.full((len(route.ids), SPEC.dim), value, np.float32)


def push(client, *ids, clock=0):
    return client.push([("t", route_of(client, *ids), ones(route_of(client, *ids)))], clock=clock)


def load(client, *ids, value=2.0, **how):
    client.load("t", route_of(client, *ids), ones(route_of(client, *ids), value), **how)


def rows_of(client, *ids):
    route = route_of(client, *ids)
    return client.pull([("t", route)])[0][route.index]


def fail(error):
    def hook(request):
        raise error

    return hook


def in_turn(*hooks, of=object):
    """One hook for each request of a kind, and none for those that follow."""
    left = iter(hooks)

    def hook(request):
        step = next(left, None) if isinstance(request, of) else None
        return step and step(request)

    return hook


def passes(request):
    return None


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_lost_requests_and_lost_replies_leave_every_push_applied_once(make_wires, seed):
    wires = make_wires(3)
    client = declared(wires)
    dice = random.Random(seed)
    busy = fail(errors.ShardBusy(queued_bytes=1, retry_after_ms=1))
    wires.hold(
        lambda request: dice.choices([passes, lost, busy], [9, 1, 1])[0](request),
        lambda request: dice.choices([passes, lost], [10, 1])[0](request),
    )
    for clock in range(15):
        push(client, *range(clock, clock + 10), clock=clock)
    np.testing.assert_array_equal(rows_of(client, *range(24))[:, 0], [-min(i + 1, 10, 24 - i) for i in range(24)])
    assert client.stats.pushed_rows == 150


def test_a_retry_has_identical_bytes(make_wires):
    wires = make_wires(1)
    client = declared(wires)
    wires.hold(in_turn(lost, of=Push), in_turn(lost, of=Push))
    pushed = push(client, 1, 2)
    sent = [dumps(request) for request in wires.sent(Push)]
    assert (len(sent), len(set(sent))) == (3, 1)
    assert (pushed.duplicate, pushed.applied) == (True, 2)


@pytest.mark.parametrize("hold", ["before", "after"])
def test_a_push_that_timed_out_is_sent_again_under_its_own_number_before_the_next_one(make_wires, hold):
    wires = make_wires(2)
    client = declared(wires, timeout=SHORT)
    push(client, *range(20))
    setattr(wires.wires[1], hold, lambda request: lost() if isinstance(request, Push) else None)
    with pytest.raises(errors.ShardUnavailable):
        push(client, *range(20), clock=1)
    setattr(wires.wires[1], hold, passes)
    for wire in wires.wires:
        wire.seen.clear()
    push(client, *range(20), clock=2)
    tokens = [[(r.token.seq, r.token.first_incomplete) for r in w.seen if isinstance(r, Push)] for w in wires.wires]
    assert tokens == [[(3, 3)], [(2, 2), (3, 3)]]
    np.testing.assert_array_equal(rows_of(client, *range(20)), -3.0)  # the push that timed out counts, once


def test_a_refused_push_does_not_come_back_and_is_told_though_another_shard_was_silent(make_wires):
    wires = make_wires(2)
    first, second = wires.wires
    client = declared(wires, timeout=SHORT)
    push(client, *range(20))
    first.before = fail(REFUSED)
    with raises(errors.WrongDim, shard="shard 0 at wire/0"):
        push(client, *range(20), clock=1)
    second.before = lost
    with raises(errors.ShardUnavailable, shard="shard 1 at wire/1"):
        push(client, *range(20), clock=2)
    wires.hold(passes)
    with raises(errors.WrongDim, shard="shard 0 at wire/0"):
        push(client, *range(20), clock=3)
    push(client, *range(20), clock=4)
    rows = client.pull([("t", route := route_of(client, *range(20)))])[0]
    assert set(rows[route.slice_of(0)].flat) == {-3.0}  # neither push that it refused, and each other one once
    assert set(rows[route.slice_of(1)].flat) == {-5.0}


def test_a_wait_for_other_workers_is_told_from_one_for_shards(make_wires):
    wires = make_wires(2)
    client = declared(wires, timeout=timedelta(hours=1))

    def waits(*held):
        """Seconds of a pull, and those for other workers, where each shard says that it held it so long."""
        for wire, seconds in zip(wires.wires, held, strict=True):
            wire.before = partial(answer, wire, seconds)
        before = client.stats
        rows_of(client, *range(20))
        after = client.stats
        return after.wait_seconds - before.wait_seconds, after.workers_wait_seconds - before.workers_wait_seconds

    def answer(wire, seconds, request):
        return replace(wire.shard.handle(request), held_seconds=seconds) if isinstance(request, Pull) else None

    seconds, for_workers = waits(0.0, 0.0)
    assert (seconds > 0, for_workers) == (True, 0.0)
    seconds, for_workers = waits(1e-9, 2e-9)
    assert for_workers == pytest.approx(2e-9)  # the longer one: they wait side by side
    seconds, for_workers = waits(0.0, 3600.0)
    assert for_workers == seconds  # no more than the call took


def test_a_request_that_was_put_back_has_waited_for_other_workers(make_wires):
    wires = make_wires(1)
    client = declared(wires)
    wires.hold(fail(errors.ClockAhead(clock=1, workers="1", seconds=0.1)))
    client.timeout = SHORT
    with raises(errors.ClockAhead):
        rows_of(client, 1)
    assert 0.5 * SHORT.total_seconds() < client.stats.workers_wait_seconds <= client.stats.wait_seconds


def test_a_busy_shard_is_given_the_pause_it_asks_for_and_named_at_the_deadline_that_is_set_last(make_wires):
    wires = make_wires(2)
    client = declared(wires, timeout=timedelta(hours=1))
    wires.hold(in_turn(fail(errors.ShardBusy(queued_bytes=1, retry_after_ms=150)), of=Pull))
    waited = client.stats.wait_seconds
    rows_of(client, *range(20))
    assert client.stats.wait_seconds - waited >= 0.15
    client.timeout = SHORT
    wires.wires[1].before = fail(errors.ShardBusy(queued_bytes=7, retry_after_ms=1))
    with raises(errors.ShardBusy, shard="shard 1 at wire/1"):
        rows_of(client, *range(20))


@pytest.mark.parametrize("fault", [lost, fail(errors.ShuttingDown())], ids=["lost", "shutting down"])
def test_a_dead_shard_ends_every_call_by_the_deadline(make_wires, fault):
    wires = make_wires(2)
    timeout = SHORT / 4
    client = declared(wires, timeout=timeout)
    wires.wires[1].before = fault
    for call in (
        lambda: rows_of(client, *range(20)),
        lambda: push(client, *range(20)),
        lambda: load(client, *range(20)),
        lambda: client.declare(SPEC),
        client.status,
    ):
        start = time.monotonic()
        with pytest.raises(errors.EmbershardError, match="shard 1 at wire/1") as caught:
            call()
        assert time.monotonic() - start > 0.7 * timeout.total_seconds()
        assert type(caught.value) is (errors.ShardUnavailable if fault is lost else errors.ShuttingDown)


def recovering(until):
    """A hook: the shard recovers its rows until a moment."""

    def hook(request):
        if time.monotonic() < until:
            raise errors.ShardRecovering(done_bytes=1, total_bytes=2, seconds=1.0, retry_after_ms=5)

    return hook


def test_a_shard_that_makes_its_rows_again_is_waited_for_beyond_the_timeout_of_a_call(make_wires):
    wires = make_wires(2)
    client = declared(wires, timeout=SHORT / 4)
    wires.wires[1].before = recovering(time.monotonic() + SHORT.total_seconds())
    assert rows_of(client, *range(20)).shape == (20, 3)
    assert client.stats.wait_seconds > 0.7 * SHORT.total_seconds()
    assert not client.connections[1].recovering_since


def stalled(until):
    """A hook: the shard cannot write its log until a moment."""

    def hook(request):
        if isinstance(request, Push) and time.monotonic() < until:
            raise errors.LogStalled(path="/logs", reason="No space left on device", retry_after_ms=5)

    return hook


def test_a_shard_without_room_for_its_log_is_waited_for_beyond_the_timeout_of_a_call(make_wires, caplog):
    wires = make_wires(2)
    client = declared(wires, timeout=SHORT / 4)
    wires.wires[1].before = stalled(time.monotonic() + SHORT.total_seconds())
    push(client, *range(20))
    assert caplog.text.count("No space left on device") == 1
    client.connections.recovery_timeout = SHORT / 2
    wires.wires[1].before = stalled(time.monotonic() + 1000)
    with pytest.raises(errors.LogStalled):
        push(client, *range(20))


def test_a_dead_shard_is_given_up_although_another_one_is_waited_for_longer(make_wires):
    wires = make_wires(2)
    client = declared(wires, timeout=SHORT / 4)
    client.connections.recovery_timeout = 4 * SHORT
    wires.wires[0].before = stalled(time.monotonic() + 1000)
    wires.wires[1].before = lost
    with raises(errors.ShardUnavailable, address="wire/1"):
        push(client, *range(20))


def test_a_client_that_starts_meanwhile_waits_for_it_too(make_wires):
    wires = make_wires(2)
    wires.wires[1].before = recovering(time.monotonic() + SHORT.total_seconds())
    assert declared(wires, timeout=SHORT / 4).num_shards == 2


def test_the_wait_for_a_shard_that_makes_its_rows_again_ends_where_the_user_says(make_wires):
    wires = make_wires(2)
    client = declared(wires, timeout=SHORT / 4)
    client.connections.recovery_timeout = SHORT
    wires.wires[1].before = recovering(time.monotonic() + 1000)
    start = time.monotonic()
    with raises(errors.ShardUnavailable, shard="shard 1 at wire/1", reason=re.compile("train.recovery_timeout")):
        rows_of(client, *range(20))
    assert 0.9 * SHORT.total_seconds() < time.monotonic() - start < 100
    with raises(errors.ShardUnavailable, address="wire/1"):
        wires.client(timeout=SHORT / 4, recovery_timeout=SHORT / 4)


def test_a_heartbeat_and_a_farewell_do_not_wait_for_a_shard_that_makes_its_rows_again(make_wires):
    wires = make_wires(2)
    client = declared(wires, timeout=timedelta(seconds=60))
    client.join(Terms(workers=1, staleness=0, lease=SHORT))
    assert client.membership is not None
    wires.wires[1].before = recovering(time.monotonic() + 1000)
    client.membership._heartbeat(SHORT / 4)
    client.timeout = client.membership._timeout = SHORT / 4
    client.close()
    assert wires.sent(Leave)


def test_large_calls_are_split_into_messages_the_shard_takes(make_wires):
    wires = make_wires(2, max_message_bytes=600)
    client = declared(wires)
    route = route_of(client, *range(200))
    client.load("t", route, ones(route, 5.0))
    push(client, *range(200))
    np.testing.assert_array_equal(client.pull([("t", route)])[0], 4.0)
    for wire in wires.wires:
        assert all(len(dumps(request)) <= 600 for request in wire.seen)
        assert sum(isinstance(request, Push) for request in wire.seen) > 2
        assert sum(isinstance(request, Pull) for request in wire.seen) > 2
    wires.heard.clear()
    for name, dim in (("wide", 20), ("widest", 200)):
        client.declare(replace(SPEC, name=name, dim=dim, initializer=Constant(value=2.0), id_space="t"))
    ids = route_of(client, *range(30))  # 240 bytes of ids, 2400 bytes of rows
    np.testing.assert_array_equal(client.pull([("wide", ids)])[0], np.full((30, 20), 2.0))
    assert len(wires.sent(Pull)) >= 5
    wires.heard.clear()
    with raises(errors.MessageTooLarge, limit=600):
        client.pull([("widest", ids)])
    assert not wires.heard


def test_each_message_of_a_push_says_that_those_before_it_were_answered(make_wires):
    """Else a shard that has lost one of them with its machine's power takes the next."""
    wires = make_wires(1, max_message_bytes=600)
    push(declared(wires), *range(200))
    tokens = [request.token for request in wires.sent(Push)]
    assert len(tokens) > 2
    assert all(token.first_incomplete == token.seq for token in tokens)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 100)), max_size=6),
    st.integers(MESSAGE_OVERHEAD + TABLE_OVERHEAD + 110, 3000),
)
@settings(max_examples=100)
def test_messages_cover_every_row_once_in_order_and_within_the_limit(tables, limit):
    counts, sizes = [n for n, _ in tables], [size for _, size in tables]
    nothing, before = np.empty(0, np.int64), 3  # rows of shard 0
    parts = [
        (f"{k}", Route(nothing, np.array([0, before, before + n]), nothing, space_key=0, epoch=1))
        for k, n in enumerate(counts)
    ]
    messages = split_into_messages(parts, 1, sizes, limit)
    assert all(messages)
    for message in messages:
        used = [TABLE_OVERHEAD + 1 + (p.rows.stop - p.rows.start) * sizes[p.part] for p in message]
        assert MESSAGE_OVERHEAD + sum(used) <= limit
    chunks = [chunk for message in messages for chunk in message]
    rows = [(p.part, row - before) for p in chunks for row in range(p.rows.start, p.rows.stop)]
    assert rows == [(part, row) for part, count in enumerate(counts) for row in range(count)]
    assert all(p.start == p.rows.start - before for p in chunks)
    assert all(p.is_whole == (p.rows.stop - p.rows.start == counts[p.part]) for p in chunks)


@pytest.mark.parametrize(
    "tables", [[f"{k}" for k in range(3000)], [tuple(f"{k}/{i:0>190}" for i in range(2000)) for k in range(3)]]
)
def test_messages_have_no_more_tables_and_names_than_a_frame_takes(tables):
    one = Route(np.zeros(1, np.int64), np.array([0, 1]), np.zeros(1, np.int64), space_key=0, epoch=1)
    messages = split_into_messages([(table, one) for table in tables], 0, [8] * len(tables), 2**26)
    assert [chunk.part for message in messages for chunk in message] == list(range(len(tables)))
    assert len(messages) == 2
    for message in messages:
        members = [tables[chunk.part] for chunk in message]
        assert 2 * len(message) <= MAX_BUFFERS
        assert sum(map(table_overhead, members)) <= MAX_HEAD_BYTES


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_push_and_a_pull_of_more_tables_than_a_frame_takes(codec, make_wires, monkeypatch):
    monkeypatch.setattr(connections, "MAX_BUFFERS", 8)
    wires = make_wires(2)
    client = wires.client()
    names = [f"table{k}" for k in range(9)]
    for name in names:
        client.declare(replace(SPEC, name=name, push_codec=CodecName.parse(codec), id_space="t"))
    route = route_of(client, *range(20))
    client.push([(name, route, ones(route)) for name in names], clock=0)
    for rows in client.pull([(name, route) for name in names]):
        np.testing.assert_allclose(rows, -1.0, rtol=0.01)
    for kind in (Push, Pull):
        assert [len(request.tables) for request in wires.sent(kind)] == [4, 4, 4, 4, 1, 1]


def greeter(shard, num_shards, epoch=1, address="", instance=""):
    fields = {"placement_epoch": epoch, "version": "", "instance": instance or f"i{shard}", "max_message_bytes": 2**26}
    greeting = Greeting(shard=shard, num_shards=num_shards, **fields)
    return LocalTransport(lambda _: greeting, address or f"host{shard}:1")


@pytest.mark.parametrize(
    ("transports", "text"),
    [
        ([greeter(0, 2), greeter(0, 2, address="other:1")], "host0:1 and other:1 are both shard 0; one process"),
        (
            [greeter(0, 2), greeter(0, 2, address="other:1", instance="other")],
            "host0:1 and other:1 are both shard 0; start each",
        ),
        ([greeter(0, 3), greeter(2, 3)], "of 3 shards, 1 is not among the addresses host0:1, host2:1"),
        ([greeter(0, 2), greeter(1, 3)], "host0:1 and host1:1 were started for 2 and 3 shards"),
        ([greeter(0, 2), greeter(1, 2, epoch=4)], "host0:1 and host1:1 hold placement epochs 1 and 4"),
    ],
)
def test_shards_that_do_not_make_one_placement_are_named(transports, text):
    with pytest.raises(errors.WrongShards, match=text):
        Client(transports)


def test_a_client_waits_for_a_shard_that_starts_later_and_refuses_at_once_what_is_none(make_wires):
    wires = make_wires(1)
    wires.hold(in_turn(lost, lost, lost))
    assert wires.client().num_shards == 1
    wires.heard.clear()
    wires.hold(fail(errors.NotAShard(address="web:80", reason="it speaks HTTP/1")))
    with raises(errors.NotAShard, address="web:80"):
        wires.client()
    assert len(wires.sent(Hello)) == 1


def fresh(wire, of):
    wire.shard = Shard(of - 1, Placement.even(of), OptimizerRegistry())
    return wire.shard


def test_a_shard_that_came_back_empty_stops_the_training(make_wires):
    wires = make_wires(2)
    client = declared(wires)
    push(client, *range(20))
    shard = fresh(wires.wires[1], 2)
    with raises(errors.ShardRestarted, shard="shard 1 at wire/1"):
        rows_of(client, *range(20))
    shard.handle(Declare(SPEC))  # another worker declares the table again: still not our rows
    with pytest.raises(errors.ShardRestarted):
        push(client, *range(20), clock=1)


def test_a_broken_connection_goes_on_with_the_same_process_and_sends_nothing_to_another(make_wires):
    wires = make_wires(1)
    (wire,) = wires.wires
    client = declared(wires)
    wire.before = in_turn(lost, lost)
    assert rows_of(client, 1).shape == (1, 3)
    shard = fresh(wire, 1)
    shard.handle(Declare(SPEC))
    wire.before = lambda request: None if isinstance(request, Hello) else lost()
    with pytest.raises(errors.ShardRestarted):
        push(client, 1)
    assert shard.status().pushed_rows == 0


def test_only_the_creator_loads_and_the_others_wait(make_wires):
    wires = make_wires(2)
    first, second = wires.client(0), wires.client(1)
    assert first.declare(SPEC, load=True) == {0, 1}
    assert second.declare(SPEC, load=True) == frozenset()
    with ThreadPoolExecutor(1) as pool:
        load(first, *range(10), last=False)
        wires.heard.clear()
        seen = pool.submit(rows_of, second, 3)
        wires.wait("sent", lambda request: isinstance(request, Pull), times=2)
        assert not seen.done()
        load(first)
        np.testing.assert_array_equal(seen.result(60), [[2.0] * 3])


@pytest.mark.parametrize("how", [{"keep_state": True}, {}], ids=["as max_norm does", "first values"])
def test_a_retried_load_does_not_undo_what_another_worker_pushed_meanwhile(make_wires, how):
    wires = make_wires(1)
    first, second = wires.client(0), wires.client(1)
    first.declare(SPEC, load=not how)
    second.declare(SPEC)

    def push_and_lose(request):
        push(second, 3)
        lost()

    last = lambda request: isinstance(request, Load) and request.last  # noqa: E731
    hook = in_turn(push_and_lose)
    wires.hold(after=lambda request: hook(request) if last(request) else None)
    load(first, 3, **how)
    ends = [dumps(request) for request in wires.sent(Load) if last(request)]
    assert (len(ends), len(set(ends))) == (2, 1)
    np.testing.assert_array_equal(rows_of(first, 3), [[1.0] * 3])


def test_a_table_that_nobody_finishes_loading_is_named_at_the_deadline(make_wires):
    wires = make_wires(2)
    wires.client(0).declare(SPEC, load=True)
    second = wires.client(1, timeout=SHORT / 4)
    second.declare(SPEC, load=True)
    for wait in (lambda: rows_of(second, 1), lambda: await_loaded(second, "t")):
        with raises(errors.TableLoading, worker=0):
            wait()


def test_waiting_for_a_load_lasts_as_long_as_rows_arrive(make_wires):
    wires = make_wires(2)
    first, second = wires.client(0), wires.client(1, timeout=SHORT)
    first.declare(SPEC, load=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(await_loaded, second, "t")
        for i in range(10):
            time.sleep(0.1)
            load(first, *range(10 * i, 10 * i + 10), last=False)
        assert not waiting.done()
        load(first)
        waiting.result(60)


def test_bad_arguments_are_refused_before_anything_is_sent(make_wires):
    wires = make_wires(1)
    client = declared(wires)
    wires.heard.clear()
    route = route_of(client, 1, 2)
    with raises(errors.UnknownTable, table="x", known="t"):
        client.pull([("x", route)])
    with raises(errors.WrongDim, table="t", got=4, want=6):
        client.push([("t", route, np.zeros((2, 2), np.float32))], clock=0)
    with pytest.raises(TypeError, match="table 't': gradients must be float32, got float64"):
        client.push([("t", route, np.zeros((2, 3)))], clock=0)
    assert not wires.heard
    with pytest.raises(ValueError, match="timeout must be above zero"):
        wires.client(timeout=timedelta(0))
    with pytest.raises(ValueError, match="name at least one address"):
        Client([])
