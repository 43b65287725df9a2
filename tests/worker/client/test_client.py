import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.proto.arrays import Floats
from embershard.proto.errors import (
    EmbershardError,
    MessageTooLarge,
    NotAShard,
    ShardBusy,
    ShardRestarted,
    ShardUnavailable,
    ShuttingDown,
    StaleWorker,
    TableLoading,
    TableMismatch,
    UnknownTable,
    WrongDim,
    WrongShards,
)
from embershard.proto.messages import Declare, GetStatus, Greeting, Hello, Load, Pull, Push, Reply, Request
from embershard.proto.protobuf import dumps
from embershard.proto.routing import Placement, Route, make_route
from embershard.proto.spec import SGD, Adam, Constant, TableSpec
from embershard.proto.transport.local import LocalTransport
from embershard.proto.transport.transport import Unreachable
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.worker.client.client import Client
from embershard.worker.client.connections import MESSAGE_OVERHEAD, TABLE_OVERHEAD, split_into_messages
from embershard.worker.session.tables import await_loaded

SPEC = TableSpec(name="t", dim=3, optimizer=SGD(lr=1.0), initializer=Constant(value=0.0))
SHORT = timedelta(seconds=0.4)
Shards = Callable[..., list[Shard]]
Handle = Callable[[Request], Reply]


class Wire:
    """A transport to `handle` that loses what `fault(request)` says: "request", "reply", an error to raise, or None."""

    def __init__(self, handle: Handle, address: str = "wire/0") -> None:
        self.address, self.sent_bytes, self.received_bytes = address, 0, 0
        self.handle = handle
        self.fault: Callable[[Request], str | EmbershardError | None] = lambda _: None
        self.seen: list[Request] = []

    def submit(self, request: Request, timeout: timedelta, into: Sequence[Floats] = ()) -> "Wire.Answer":
        self.seen.append(request)
        return Wire.Answer(self, request, self.fault(request))

    def close(self) -> None:
        self.fault = lambda _: "request"

    class Answer:
        num_bytes = 0

        def __init__(self, wire: "Wire", request: Request, fault: str | EmbershardError | None) -> None:
            self.outcome: Reply | Exception
            if fault == "request":
                self.outcome = Unreachable("lost")
            elif isinstance(fault, EmbershardError):
                self.outcome = fault
            else:
                try:
                    self.outcome = wire.handle(request)
                except EmbershardError as error:
                    self.outcome = error
            if fault == "reply":
                self.outcome = Unreachable("lost")

        def result(self) -> Reply:
            if isinstance(self.outcome, Exception):
                raise self.outcome
            return self.outcome


def wired(shards: list[Shard], **arguments: object) -> tuple[Client, list[Wire]]:
    wires = [Wire(shard.handle, f"wire/{i}") for i, shard in enumerate(shards)]
    return Client(wires, **arguments), wires  # type: ignore[arg-type]


def route_of(client: Client, *ids: int) -> Route:
    return make_route(np.array(ids, np.int64), SPEC.space_key, client.placement)


def ones(route: Route, value: float = 1.0) -> np.ndarray:
    return np.full((len(route.ids), SPEC.dim), value, np.float32)


def rows_of(client: Client, *ids: int) -> np.ndarray:
    route = route_of(client, *ids)
    return client.pull([("t", route)])[0][route.index]


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_pull_sees_what_was_pushed_whatever_the_number_of_shards(make_shards, n):
    client, _ = wired(make_shards(n))
    client.declare(SPEC)
    route = route_of(client, *range(40), 7, 7)
    gradients = route.ids[:, None].astype(np.float32) * np.ones(3, np.float32)
    pushed = client.push([("t", route, gradients)], clock=0)
    assert (pushed.applied, pushed.skipped, pushed.duplicate) == (40, 0, False)
    np.testing.assert_array_equal(rows_of(client, 5, 39, 1000), [[-5.0] * 3, [-39.0] * 3, [0.0] * 3])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_lost_requests_and_lost_replies_leave_every_push_applied_once(make_shards, seed):
    client, wires = wired(make_shards(3))
    client.declare(SPEC)
    dice = random.Random(seed)
    for wire in wires:
        wire.fault = lambda _: dice.choices(
            [None, "request", "reply", ShardBusy(queued_bytes=1, retry_after_ms=1)], [8, 1, 1, 1]
        )[0]
    for clock in range(30):
        route = route_of(client, *range(clock, clock + 10))
        client.push([("t", route, ones(route))], clock=clock)
    np.testing.assert_array_equal(rows_of(client, *range(39))[:, 0], [-min(i + 1, 10, 39 - i) for i in range(39)])
    assert client.stats.pushed_rows == 300


def test_a_retry_has_identical_bytes(make_shards):
    client, (wire,) = wired(make_shards(1))
    client.declare(SPEC)
    faults = iter(["request", "reply", None])
    wire.fault = lambda request: next(faults) if isinstance(request, Push) else None
    route = route_of(client, 1, 2)
    pushed = client.push([("t", route, ones(route))], clock=0)
    pushes = [dumps(request) for request in wire.seen if isinstance(request, Push)]
    assert len(pushes) == 3
    assert len(set(pushes)) == 1
    assert pushed.duplicate
    assert pushed.applied == 2


def test_tokens_number_the_pushes_of_each_shard_and_name_the_first_that_is_open(make_shards):
    client, wires = wired(make_shards(2), timeout=SHORT)
    client.declare(SPEC)
    route = route_of(client, *range(20))
    client.push([("t", route, ones(route))], clock=0)
    wires[1].fault = lambda request: "request"
    with pytest.raises(ShardUnavailable):
        client.push([("t", route, ones(route))], clock=1)
    wires[1].fault = lambda request: None
    for wire in wires:
        wire.seen.clear()
    client.push([("t", route, ones(route))], clock=2)
    tokens = [[(r.token.seq, r.token.first_incomplete) for r in w.seen if isinstance(r, Push)] for w in wires]
    assert tokens == [[(3, 3)], [(2, 2), (3, 2)]]
    np.testing.assert_array_equal(rows_of(client, *range(20)), -3.0)  # the push that timed out counts, once


def test_a_push_that_timed_out_after_it_was_applied_is_not_applied_again(make_shards):
    client, (wire,) = wired(make_shards(1), timeout=SHORT)
    client.declare(SPEC)
    wire.fault = lambda request: "reply" if isinstance(request, Push) else None
    route = route_of(client, 1)
    with pytest.raises(ShardUnavailable):
        client.push([("t", route, ones(route))], clock=0)
    wire.fault = lambda request: None
    client.push([("t", route, ones(route))], clock=1)
    np.testing.assert_array_equal(rows_of(client, 1), [[-2.0] * 3])


def test_a_refused_push_does_not_come_back(make_shards):
    client, (wire,) = wired(make_shards(1))
    client.declare(SPEC)
    route = route_of(client, 1)
    client.push([("t", route, ones(route))], clock=0)
    wire.fault = lambda request: WrongDim(table="t", what="gradients", got=1, ids=1, dim=3, want=3)
    with pytest.raises(WrongDim, match="shard 0 at wire/0"):
        client.push([("t", route, ones(route))], clock=0)
    wire.fault = lambda request: None
    client.push([("t", route, ones(route))], clock=1)
    np.testing.assert_array_equal(rows_of(client, 1), [[-2.0] * 3])


def test_a_refusal_is_told_though_another_shard_was_silent(make_shards):
    client, (first, second) = wired(make_shards(2), timeout=SHORT)
    client.declare(SPEC)
    route = route_of(client, *range(20))
    client.push([("t", route, ones(route))], clock=0)
    first.fault = lambda request: WrongDim(table="t", what="gradients", got=1, ids=1, dim=3, want=3)
    second.fault = lambda request: "request"
    with pytest.raises(ShardUnavailable, match="shard 1"):
        client.push([("t", route, ones(route))], clock=1)
    first.fault = second.fault = lambda request: None
    with pytest.raises(WrongDim, match="shard 0 at wire/0"):
        client.push([("t", route, ones(route))], clock=2)
    client.push([("t", route, ones(route))], clock=3)  # once
    want = np.full((20, 3), -4.0)
    want[route.slice_of(0)] = -3.0
    np.testing.assert_array_equal(client.pull([("t", route)])[0], want)


def test_a_busy_shard_is_given_the_pause_it_asks_for(make_shards):
    client, (wire,) = wired(make_shards(1))
    client.declare(SPEC)
    faults = iter([ShardBusy(queued_bytes=1, retry_after_ms=150), None])
    wire.fault = lambda request: next(faults)
    start = time.monotonic()
    client.pull([("t", route_of(client, 1))])
    assert time.monotonic() - start >= 0.15
    assert client.stats.wait_seconds >= 0.15


def test_a_shard_that_stays_busy_is_named_at_the_deadline_that_is_set_last(make_shards):
    client, (_, wire) = wired(make_shards(2), timeout=timedelta(hours=1))
    client.declare(SPEC)
    client.timeout = SHORT
    wire.fault = lambda request: ShardBusy(queued_bytes=7, retry_after_ms=1)
    with pytest.raises(ShardBusy, match="shard 1 at wire/1: the apply queue is full"):
        client.pull([("t", route_of(client, *range(20)))])


@pytest.mark.parametrize("fault", ["request", ShuttingDown()])
def test_a_dead_shard_ends_every_call_by_the_deadline(make_shards, fault):
    client, (_, wire) = wired(make_shards(2), timeout=SHORT)
    client.declare(SPEC)
    wire.fault = lambda request: fault
    route = route_of(client, *range(20))
    calls: list[Callable[[], object]] = [
        lambda: client.pull([("t", route)]),
        lambda: client.push([("t", route, ones(route))], clock=0),
        lambda: client.load("t", route, ones(route)),
        lambda: client.declare(SPEC),
        client.status,
    ]
    for call in calls:
        start = time.monotonic()
        with pytest.raises(EmbershardError, match="shard 1 at wire/1") as caught:
            call()
        assert time.monotonic() - start > SHORT.total_seconds() - 0.1
        assert isinstance(caught.value, ShardUnavailable | ShuttingDown)
    if fault == "request":
        assert "no answer within 0.4 s (lost)" in str(caught.value)
        assert "embershard status wire/1" in str(caught.value)


def test_large_calls_are_split_into_messages_the_shard_takes(make_shards):
    client, wires = wired(make_shards(2, max_message_bytes=600))
    client.declare(SPEC)
    route = route_of(client, *range(200))
    client.load("t", route, ones(route, 5.0))
    client.push([("t", route, ones(route))], clock=0)
    np.testing.assert_array_equal(client.pull([("t", route)])[0], 4.0)
    for wire in wires:
        assert all(len(dumps(request)) <= 600 for request in wire.seen)
        assert sum(isinstance(request, Push) for request in wire.seen) > 2
        assert sum(isinstance(request, Pull) for request in wire.seen) > 2


def test_a_pull_is_split_by_the_size_of_its_rows(make_shards):
    client, (wire,) = wired(make_shards(1, max_message_bytes=1000))
    client.declare(TableSpec(name="wide", dim=40, optimizer=SGD(lr=1.0), initializer=Constant(value=2.0)))
    ids = np.arange(30, dtype=np.int64)  # 240 bytes of ids, 4800 bytes of rows
    np.testing.assert_array_equal(client.pull([("wide", route_of(client, *ids))])[0], np.full((30, 40), 2.0))
    assert sum(isinstance(request, Pull) for request in wire.seen) >= 5


def test_a_row_over_the_message_limit_is_refused(make_shards):
    client, _ = wired(make_shards(1, max_message_bytes=600))
    client.declare(TableSpec(name="wide", dim=200, optimizer=SGD(lr=1.0)))
    with pytest.raises(MessageTooLarge, match="over the limit of 600"):
        client.pull([("wide", route_of(client, 1))])


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 100)), max_size=6),
    st.integers(MESSAGE_OVERHEAD + TABLE_OVERHEAD + 110, 3000),
)
@settings(max_examples=200, deadline=None)
def test_cut_covers_every_row_once_in_order_and_within_the_limit(tables, limit):
    counts, sizes = [n for n, _ in tables], [size for _, size in tables]
    nothing, before = np.empty(0, np.int64), 3  # rows of shard 0
    parts = [(f"{k}", Route(nothing, np.array([0, before, before + n]), nothing)) for k, n in enumerate(counts)]
    messages = split_into_messages(parts, 1, sizes, limit)
    assert all(messages)
    for message in messages:
        used = MESSAGE_OVERHEAD + sum(
            TABLE_OVERHEAD + 1 + (p.rows.stop - p.rows.start) * sizes[p.part] for p in message
        )
        assert used <= limit
    chunks = [chunk for message in messages for chunk in message]
    rows = [(p.part, row - before) for p in chunks for row in range(p.rows.start, p.rows.stop)]
    assert rows == [(part, row) for part, count in enumerate(counts) for row in range(count)]
    assert all(p.start == p.rows.start - before for p in chunks)
    assert all(p.is_whole == (p.rows.stop - p.rows.start == counts[p.part]) for p in chunks)


def greeter(shard: int, num_shards: int, epoch: int = 1, address: str = "") -> LocalTransport:
    greeting = Greeting(
        shard=shard,
        num_shards=num_shards,
        placement_epoch=epoch,
        version="",
        instance=f"i{shard}",
        max_message_bytes=64 * 2**20,
    )
    return LocalTransport(lambda _: greeting, address or f"host{shard}:1")


@pytest.mark.parametrize(
    ("transports", "text"),
    [
        ([greeter(0, 2), greeter(0, 2, address="other:1")], "host0:1 and other:1 are both shard 0"),
        ([greeter(0, 3), greeter(2, 3)], "of 3 shards, 1 is not among the addresses host0:1, host2:1"),
        ([greeter(0, 2), greeter(1, 3)], "host0:1 and host1:1 were started for 2 and 3 shards"),
        ([greeter(0, 2), greeter(1, 2, epoch=4)], "host0:1 and host1:1 hold placement epochs 1 and 4"),
    ],
)
def test_shards_that_do_not_make_one_placement_are_named(transports, text):
    with pytest.raises(WrongShards, match=text):
        Client(transports)


def test_a_shard_that_does_not_answer_does_not_keep_the_others_from_being_asked(make_shards):
    asked: list[tuple[int, type[Request]]] = []
    silent = False

    def handle(shard, request):
        number = shard.greeting.shard
        asked.append((number, type(request)))
        if number == 0 and silent:
            raise Unreachable("no answer")
        return shard.handle(request)

    shards = make_shards(2)
    transports = [LocalTransport(lambda r, it=shard: handle(it, r), f"host{i}:1") for i, shard in enumerate(shards)]
    client = Client(transports, timeout=timedelta(seconds=0.1))
    silent = True
    for _ in range(2):  # the second time it is known to be silent
        asked.clear()
        with pytest.raises(ShardUnavailable):
            client.status()
    assert asked[:2] == [(1, GetStatus), (0, Hello)]


def test_shards_are_found_in_any_order(make_shards):
    shards = make_shards(3)
    client, _ = wired([shards[2], shards[0], shards[1]])
    client.declare(SPEC)
    route = route_of(client, *range(30))
    client.push([("t", route, ones(route))], clock=0)  # a shard refuses rows of another one
    assert [status.shard for status in client.status()] == [0, 1, 2]


def test_a_client_waits_for_a_shard_that_starts_later(make_shards):
    (shard,) = make_shards(1)
    wire = Wire(shard.handle)
    serving = time.monotonic() + 0.3
    wire.fault = lambda _: None if time.monotonic() > serving else "request"
    assert Client([wire], timeout=timedelta(seconds=60)).num_shards == 1


def test_something_else_than_a_shard_is_refused_at_once():
    asked: list[Request] = []

    def refuse(request):
        asked.append(request)
        raise NotAShard(address="web:80", reason="it speaks HTTP/1")

    with pytest.raises(NotAShard, match="web:80 answers, but not as an embershard shard"):
        Client([LocalTransport(refuse, "web:80")])
    assert len(asked) == 1


def test_a_shard_that_came_back_empty_stops_the_training(make_shards):
    client, wires = wired(make_shards(2), timeout=timedelta(seconds=60))
    client.declare(SPEC)
    route = route_of(client, *range(20))
    client.push([("t", route, ones(route))], clock=0)
    wires[1].handle = Shard(1, Placement.even(2), OptimizerRegistry()).handle
    with pytest.raises(ShardRestarted, match=r"shard 1 at wire/1.*lost"):
        client.pull([("t", route)])
    wires[1].handle(Declare(SPEC))  # another worker declares the table again: still not our rows
    with pytest.raises(ShardRestarted):
        client.push([("t", route, ones(route))], clock=1)


def test_a_broken_connection_to_another_process_is_noticed_before_anything_is_sent(make_shards):
    client, (wire,) = wired(make_shards(1), timeout=timedelta(seconds=60))
    client.declare(SPEC)
    fresh = Shard(0, Placement.even(1), OptimizerRegistry())
    fresh.handle(Declare(SPEC))
    wire.fault = lambda request: None if isinstance(request, Hello) else "request"
    wire.handle = fresh.handle
    route = route_of(client, 1)
    with pytest.raises(ShardRestarted):
        client.push([("t", route, ones(route))], clock=0)
    assert fresh.status().pushed_rows == 0


def test_a_broken_connection_to_the_same_process_goes_on(make_shards):
    client, (wire,) = wired(make_shards(1))
    client.declare(SPEC)
    faults = iter(["request", "request", None, None])
    wire.fault = lambda request: next(faults, None)
    assert rows_of(client, 1).shape == (1, 3)


def test_a_worker_that_was_replaced_cannot_push(make_shards):
    shards = make_shards(1)
    old, _ = wired(shards)
    new, _ = wired(shards)
    old.declare(SPEC)
    new.declare(SPEC)
    route = route_of(new, 1)
    new.push([("t", route, ones(route))], clock=0)
    with pytest.raises(StaleWorker, match="two processes run with the same worker number"):
        old.push([("t", route, ones(route))], clock=0)
    np.testing.assert_array_equal(rows_of(new, 1), [[-1.0] * 3])


def test_only_the_creator_loads_and_the_others_wait(make_shards):
    shards = make_shards(2)
    first, _ = wired(shards, worker=0)
    second, _ = wired(shards, worker=1)
    assert first.declare(SPEC, load=True) == {0, 1}
    assert second.declare(SPEC, load=True) == frozenset()
    seen: list[np.ndarray] = []
    reader = threading.Thread(target=lambda: seen.append(rows_of(second, 3)))
    reader.start()
    route = route_of(first, *range(10))
    first.load("t", route, ones(route, 2.0), last=False)
    time.sleep(0.1)
    assert not seen
    first.load("t", route_of(first), np.empty((0, 3), np.float32))
    reader.join(60)
    np.testing.assert_array_equal(seen[0], [[2.0] * 3])


def test_a_retried_load_does_not_undo_what_another_worker_pushed_meanwhile(make_shards):
    shards = make_shards(1)
    first, (wire,) = wired(shards, worker=0)
    second, _ = wired(shards, worker=1)
    for client in (first, second):
        client.declare(SPEC)
    lost: list[Request] = []

    def handle(request):
        reply = shards[0].handle(request)
        if isinstance(request, Load) and not lost:
            lost.append(request)
            second.push([("t", route_of(second, 3), ones(route_of(second, 3)))], clock=0)
        return reply

    wire.handle = handle
    wire.fault = lambda request: "reply" if isinstance(request, Load) and not lost else None
    first.load("t", route_of(first, 3), ones(route_of(first, 3), 2.0), keep_state=True)  # as max_norm does
    assert [dumps(request) for request in wire.seen if isinstance(request, Load)] == [dumps(lost[0])] * 2
    np.testing.assert_array_equal(rows_of(first, 3), [[1.0] * 3])


def test_loads_and_pushes_are_numbered_together(make_shards):
    client, (wire,) = wired(make_shards(1))
    client.declare(SPEC)
    route = route_of(client, 1)
    for _ in range(2):
        client.load("t", route, ones(route), last=False)
        client.push([("t", route, ones(route))], clock=0)
    tokens = [r.token for r in wire.seen if isinstance(r, Push | Load)]
    assert [token and (token.seq, token.first_incomplete) for token in tokens] == [(n, n) for n in range(1, 5)]


def test_a_load_whose_last_reply_was_lost_does_not_undo_a_push_that_came_since(make_shards):
    shards = make_shards(1)
    first, (wire,) = wired(shards, worker=0)
    second, _ = wired(shards, worker=1)
    first.declare(SPEC, load=True)
    second.declare(SPEC)
    ends: list[Load] = []

    def handle(request):
        reply = shards[0].handle(request)
        if isinstance(request, Load) and request.last and not ends:
            ends.append(request)
            second.push([("t", route_of(second, 3), ones(route_of(second, 3)))], clock=0)
        return reply

    wire.handle = handle
    wire.fault = lambda request: "reply" if isinstance(request, Load) and request.last and not ends else None
    first.load("t", route_of(first, 3), ones(route_of(first, 3), 2.0))
    assert len([request for request in wire.seen if isinstance(request, Load) and request.last]) == 2
    np.testing.assert_array_equal(rows_of(first, 3), [[1.0] * 3])


def test_a_table_that_nobody_finishes_loading_is_named_at_the_deadline(make_shards):
    shards = make_shards(1)
    wired(shards, worker=0)[0].declare(SPEC, load=True)
    second, _ = wired(shards, worker=1, timeout=SHORT)
    second.declare(SPEC, load=True)
    with pytest.raises(TableLoading, match="being loaded by worker 0"):
        second.pull([("t", route_of(second, 1))])


def test_waiting_for_a_load_lasts_as_long_as_rows_arrive(make_shards):
    shards = make_shards(2)
    first, _ = wired(shards, worker=0)
    timeout = timedelta(seconds=1)
    second, _ = wired(shards, worker=1, timeout=timeout)
    first.declare(SPEC, load=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(await_loaded, second, "t")
        for i in range(15):
            time.sleep(0.1 * timeout.total_seconds())
            route = route_of(first, *range(10 * i, 10 * i + 10))
            first.load("t", route, ones(route), last=False)
        assert not waiting.done()
        first.load("t", route_of(first), np.empty((0, 3), np.float32))
        waiting.result(60)


def test_waiting_for_a_loader_that_died_ends(make_shards):
    shards = make_shards(2)
    wired(shards, worker=0)[0].declare(SPEC, load=True)
    second, _ = wired(shards, worker=1, timeout=SHORT)
    with pytest.raises(TableLoading, match="shard 0 at wire/0: table 't' is being loaded by worker 0"):
        await_loaded(second, "t")


def test_a_different_declaration_names_the_difference(make_shards):
    client, _ = wired(make_shards(2))
    client.declare(SPEC)
    other = TableSpec(name="t", dim=3, optimizer=Adam(lr=0.1), initializer=Constant(value=0.0))
    with pytest.raises(TableMismatch, match="optimizer: sgd, not adam"):
        client.declare(other)


def test_gradients_with_nan_are_counted_and_the_others_applied(make_shards):
    client, _ = wired(make_shards(2))
    client.declare(SPEC)
    route = route_of(client, *range(10))
    gradients = ones(route)
    gradients[route.index[3], 1] = np.nan
    assert client.push([("t", route, gradients)], clock=0).skipped == 1
    assert client.stats.skipped_rows == 1
    np.testing.assert_array_equal(rows_of(client, 3, 4), [[0.0] * 3, [-1.0] * 3])


def test_bad_arguments_are_refused_before_anything_is_sent(make_shards):
    client, (wire,) = wired(make_shards(1))
    client.declare(SPEC)
    wire.seen.clear()
    route = route_of(client, 1, 2)
    with pytest.raises(UnknownTable, match=r"no table 'x' here \(declared: t\)"):
        client.pull([("x", route)])
    with pytest.raises(WrongDim, match="table 't': gradients hold 4 floats, but 2 ids of dim 3 need 6"):
        client.push([("t", route, np.zeros((2, 2), np.float32))], clock=0)
    with pytest.raises(TypeError, match="table 't': gradients must be float32, got float64"):
        client.push([("t", route, np.zeros((2, 3)))], clock=0)  # type: ignore[list-item]
    assert not wire.seen


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"timeout": timedelta(0)}, "timeout must be above zero"), ({}, "name at least one address")],
)
def test_a_client_needs_shards_and_time(arguments, text):
    with pytest.raises(ValueError, match=text):
        Client([greeter(0, 1)] if arguments else [], **arguments)  # type: ignore[arg-type]
