"""The contract of proto/transport/transport.py, over every transport: the same claims about one shard in this process,
and about one in a process of its own that serves all transports at once."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import numpy as np
import pytest
from standing_still import standing_still

from embershard.local_shards import InProcessShards
from embershard.proto import spec
from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.codec.ids import encode_ids
from embershard.proto.codec.payload import encode_rows
from embershard.proto.codec.values.registry import find_values
from embershard.proto.errors import ClockAhead, DamagedPayload, EmbershardError, NotAShard, UnknownTable
from embershard.proto.messages import (
    PACKED,
    Declare,
    Declared,
    GetStatus,
    Greeting,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Join,
    Joined,
    Leave,
    LeaveAck,
    Load,
    Loaded,
    Pull,
    Push,
    Pushed,
    PushToken,
    Rendezvous,
    RendezvousResult,
    Reply,
    Request,
    Split,
    TableGradients,
    TableIds,
    TakeSplit,
)
from embershard.proto.routing import make_route
from embershard.proto.transport.addresses import transport_for
from embershard.proto.transport.local import LocalTransport
from embershard.proto.transport.transport import Transport, Unreachable
from embershard.worker.client.client import Client
from harness.raises import raises
from harness.served import shard_process

pytestmark = pytest.mark.integration

SECOND = timedelta(seconds=1)
PATIENCE = timedelta(seconds=100)
# transport -> its address, from what a shard says when it serves
ADDRESSES: dict[str, Callable[[dict[str, str]], str]] = {
    "stream over Unix": lambda ready: ready["address"],
    "stream over TCP": lambda ready: f"tcp://{ready['address']}",
    "grpc": lambda ready: f"grpc://{ready['address']}",
    "rpc": lambda ready: f"rpc://{ready['rpc']}",
}
REMOTE = list(ADDRESSES)
ALL = ["local", *REMOTE]

_numbers = count(1)


def fresh() -> int:
    """A number that no other test uses: of a table, or of a worker."""
    return next(_numbers)


@pytest.fixture(scope="module")
def served():
    with shard_process("--rpc", "127.0.0.1:0") as process:
        yield process


def local_transport() -> LocalTransport:
    (transport,) = InProcessShards(1).transports()
    return transport


@pytest.fixture
def connect():
    """A transport to an address, closed after the test."""
    transports: list[Transport] = []

    def to(address):
        transports.append(transport_for(address))
        return transports[-1]

    yield to
    for transport in transports:
        transport.close()


@pytest.fixture
def transport(request, served, connect):
    """The transport of a test's parameter, with a shard behind it."""
    return local_transport() if request.param == "local" else connect(ADDRESSES[request.param](served.ready))


over_all = pytest.mark.parametrize("transport", ALL, indirect=True)
over_remote = pytest.mark.parametrize("transport", REMOTE, indirect=True)


def ask(transport: Transport, request: Request, timeout: timedelta = PATIENCE) -> Reply:
    return transport.submit(request, timeout).result()


def table(transport: Transport, dim: int = 2, name: str = "", **settings: object) -> str:
    """A new table of zeros, SGD with lr 1."""
    name = name or f"t{fresh()}"
    made = spec.TableSpec(
        name=name, dim=dim, optimizer=spec.SGD(lr=1.0), initializer=spec.Constant(value=0.0), **settings
    )
    assert ask(transport, Declare(made)) == Declared(created=True, loading=False)
    return name


def pulled(transport: Transport, name: str, ids: np.ndarray) -> np.ndarray:
    reply = ask(transport, Pull(1, (TableIds(name, ids),)))
    return reply.tables[0].reshape(len(ids), -1)


def a_push(name: str, ids: np.ndarray, gradients: np.ndarray, worker: int, seq: int = 1) -> Push:
    return Push(PushToken(worker, 1, seq, 1), 0, 1, (TableGradients(name, ids, gradients),))


@over_all
def test_every_request_gets_its_reply(transport):
    ids = np.array([3, -4, 2**62], np.int64)
    greeting = ask(transport, Hello())
    assert (greeting.shard, greeting.num_shards) == (0, 1)
    name = table(transport)
    rows = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    assert ask(transport, Load(name, 1, ids, rows)) == Loaded(rows=3)
    assert ask(transport, a_push(name, ids, rows / 2, fresh())) == Pushed(duplicate=False, applied=3, skipped=0)
    assert pulled(transport, name, ids).tolist() == [[0.5, 1], [1.5, 2], [2.5, 3]]
    status = ask(transport, GetStatus())
    assert [(t.dim, t.rows) for t in status.tables if t.name == name] == [(2, 3)]


@over_all
@pytest.mark.parametrize(
    ("num_rows", "dim"),
    [(0, 4), (1, 1), (7, 3), (1000, 33), pytest.param(MAX_MESSAGE_BYTES // 4104 - 1, 1024, id="near the limit")],
)
def test_arrays_arrive_as_they_were_sent(transport, num_rows, dim):
    name = table(transport, dim)
    ids = np.arange(num_rows, dtype=np.int64) * 7919
    rows = np.random.default_rng(0).standard_normal((num_rows, dim), np.float32)
    assert ask(transport, Load(name, 1, ids, rows)) == Loaded(rows=num_rows)
    got = ask(transport, Pull(1, (TableIds(name, ids),)))
    np.testing.assert_array_equal(got.tables[0].reshape(num_rows, dim), rows)


@over_all
def test_many_tables_travel_in_one_message(transport):
    names = [table(transport, dim) for dim in range(1, 41)]
    ids = [np.arange(i % 5, dtype=np.int64) for i in range(len(names))]  # some of them empty
    values = [np.full((i % 5, dim), i + 1, np.float32) for i, dim in enumerate(range(1, 41))]
    gradients = tuple(TableGradients(*part) for part in zip(names, ids, values, strict=True))
    worker = fresh()
    applied = ask(transport, Push(PushToken(worker, 1, 1, 1), 0, 1, gradients))
    assert applied == Pushed(duplicate=False, applied=sum(map(len, ids)), skipped=0)
    reply = ask(transport, Pull(1, tuple(TableIds(*part) for part in zip(names, ids, strict=True))))
    for got, want in zip(reply.tables, values, strict=True):
        np.testing.assert_array_equal(got.reshape(want.shape), -want)


@over_remote  # the local transport hands them over as they are, and the shard wants its ids contiguous
def test_arrays_may_be_views_of_others_and_read_only(transport):
    name = table(transport)
    ids = np.arange(20, dtype=np.int64)[::2]
    values = np.arange(40, dtype=np.float32).reshape(10, 4)[:, ::2]
    values.flags.writeable = False
    ask(transport, a_push(name, ids, values, fresh()))
    np.testing.assert_array_equal(pulled(transport, name, ids), -values)


@over_all
def test_rows_may_be_wanted_in_the_callers_memory(transport):
    name = table(transport)
    ids = np.arange(5, dtype=np.int64)
    values = np.arange(10, dtype=np.float32).reshape(5, 2)
    ask(transport, Load(name, 1, ids, values))
    into = np.full((5, 2), np.nan, np.float32)
    reply = transport.submit(Pull(1, (TableIds(name, ids),)), PATIENCE, [into]).result()
    np.testing.assert_array_equal(reply.tables[0].reshape(5, 2), values)


@over_all
def test_rows_may_be_wanted_compressed_in_the_callers_memory(transport):
    names, ids = [table(transport, 8), table(transport, 4)], np.arange(5, dtype=np.int64)
    values = [np.arange(5 * dim, dtype=np.float32).reshape(5, dim) for dim in (8, 4)]
    for name, rows in zip(names, values, strict=True):
        ask(transport, Load(name, 1, ids, rows))
    codec = find_values("int8")
    into: list[np.ndarray] = [np.zeros(codec.nbytes(5, 8), np.uint8), np.full((5, 4), np.nan, np.float32)]
    wanted = Pull(1, (TableIds(names[0], ids, codec="int8"), TableIds(names[1], ids)))
    for places in (into, ()):
        reply = transport.submit(wanted, PATIENCE, places).result()
        assert reply.codecs == ("int8", "")
        payload = np.empty(codec.nbytes(5, 8), np.uint8)
        codec.encode(values[0], payload, None)
        np.testing.assert_array_equal(reply.tables[0], payload)
        np.testing.assert_array_equal(reply.tables[1].reshape(5, 4), values[1])


@over_all
def test_ids_may_travel_packed_both_ways_of_a_row(transport):
    name, ids, worker = table(transport), np.array([-(2**63), -4, 3, 2**62], np.int64), fresh()
    packed = encode_ids(ids)
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    push = Push(PushToken(worker, 1, 1, 1), 0, 1, (TableGradients(name, ids, rows, packed=packed),))
    assert ask(transport, push) == Pushed(duplicate=False, applied=4, skipped=0)
    reply = ask(transport, Pull(1, (TableIds(name, ids, route=worker, packed=packed),), worker, 1))
    np.testing.assert_array_equal(reply.tables[0].reshape(4, 2), -rows)
    again = TableGradients(name, ids, rows, route=worker, packed=packed)
    ask(transport, Push(PushToken(worker, 1, 2, 1), 1, 1, (again,)))
    np.testing.assert_array_equal(pulled(transport, name, ids), -2 * rows)


@over_all
def test_gradients_may_travel_as_a_payload_and_a_damaged_one_is_refused_whole(transport):
    name, ids, worker = table(transport), np.arange(6, dtype=np.int64), fresh()
    rows = np.ones((2, 2), np.float32)
    payload = encode_rows(rows, find_values("bf16"), None, positions=np.array([1, 4]), num_ids=6)
    plain = TableGradients(name, ids, np.ones((6, 2), np.float32))
    for seq, sent in enumerate((payload[:-1], payload), start=1):
        parts = plain, TableGradients(name, ids, sent, codec=PACKED)
        push = Push(PushToken(worker, 1, seq, 1), 0, 1, parts)
        if seq == 1:
            with pytest.raises(DamagedPayload, match=name):
                ask(transport, push)
        else:
            assert ask(transport, push) == Pushed(duplicate=False, applied=8, skipped=0)
    assert pulled(transport, name, ids)[:, 0].tolist() == [-1, -2, -1, -1, -2, -1]


def refused(number: int) -> list[Request]:
    """Requests in order, each of which a shard refuses in its own way, or needs for the next."""
    name, ids = f"refused{number}", np.arange(2, dtype=np.int64)
    made = spec.TableSpec(name=name, dim=2, optimizer=spec.SGD(lr=1.0))
    loading = spec.TableSpec(name=f"{name}-loading", dim=2, optimizer=spec.SGD(lr=1.0))
    rows = np.ones((2, 2), np.float32)
    worker = 1000 + number
    return [
        Declare(made),
        Declare(spec.TableSpec(name=name, dim=3, optimizer=spec.SGD(lr=1.0))),  # TableMismatch
        Declare(spec.TableSpec(name="other", dim=2, optimizer=spec.Custom(function="no:where", lr=1.0))),
        Pull(7, (TableIds(name, ids),)),  # WrongPlacement
        a_push(name, ids, np.ones(5, np.float32), worker),  # WrongDim
        Load(name, 1, ids, np.full((2, 2), np.nan, np.float32)),  # NonFiniteValue
        Declare(loading, worker, load=True),
        Pull(1, (TableIds(loading.name, ids),)),  # TableLoading
        Push(PushToken(worker, 5, 9, 9), 0, 1, (TableGradients(name, ids, rows),)),  # MemoryLost
        Push(PushToken(worker + 500, 5, 1, 1), 0, 1, (TableGradients(name, ids, rows),)),
        Push(PushToken(worker + 500, 4, 1, 1), 0, 1, (TableGradients(name, ids, rows),)),  # StaleWorker
    ]


def outcome(transport: Transport, request: Request) -> tuple[type, object]:
    try:
        return (type(reply := ask(transport, request)), reply)
    except EmbershardError as error:
        return (type(error), error.fields)


@over_remote
def test_an_error_arrives_as_the_type_that_the_shard_raised_with_its_fields(transport):
    number, reference = fresh(), local_transport()
    outcomes = [(outcome(transport, request), outcome(reference, request)) for request in refused(number)]
    for got, want in outcomes:
        for _, fields in (got, want):
            if isinstance(fields, dict):
                fields.pop("by", None)  # when and from where: another for each
        assert got == want
    assert len({want[0] for _, want in outcomes if issubclass(want[0], EmbershardError)}) == 8


@over_all
def test_an_unknown_table_is_an_error_and_the_transport_goes_on(transport):
    name = f"nowhere{fresh()}"
    with pytest.raises(UnknownTable) as caught:
        pulled(transport, name, np.arange(3, dtype=np.int64))
    assert caught.value.fields["table"] == name
    assert isinstance(ask(transport, Hello()), Greeting)


@over_all
def test_a_push_that_is_sent_twice_is_applied_once(transport):
    name, ids = table(transport), np.arange(4, dtype=np.int64)
    push = a_push(name, ids, np.ones((4, 2), np.float32), fresh())
    first, second = transport.submit(push, PATIENCE), transport.submit(push, PATIENCE)
    replies = [reply for reply in (first.result(), second.result()) if isinstance(reply, Pushed)]
    assert sorted(reply.duplicate for reply in replies) == [False, True]
    assert pulled(transport, name, ids).tolist() == [[-1, -1]] * 4


@over_all
def test_each_of_many_calls_in_flight_gets_its_own_reply(transport):
    name, ids = table(transport), np.arange(64, dtype=np.int64)
    ask(transport, Load(name, 1, ids, np.repeat(ids[:, None], 2, 1).astype(np.float32)))
    calls = [transport.submit(Pull(1, (TableIds(name, ids[i : i + 1]),)), PATIENCE) for i in range(64)]
    for i, call in reversed(list(enumerate(calls))):
        reply = call.result()
        assert reply.tables[0].reshape(-1).tolist() == [i, i]


@over_all
def test_several_threads_may_use_a_transport(transport):
    def work(worker):
        name, ids = table(transport), np.arange(worker % 7, 50, dtype=np.int64)
        for seq in range(1, 11):
            ask(transport, a_push(name, ids, np.ones((len(ids), 2), np.float32), worker, seq))
        return pulled(transport, name, ids)

    with ThreadPoolExecutor(4) as threads:
        for rows in threads.map(work, [fresh() for _ in range(4)]):
            assert (rows == -10).all()


@over_all
def test_bytes_are_counted_both_ways(transport):
    name, ids = table(transport), np.arange(1000, dtype=np.int64)
    sent, received = transport.sent_bytes, transport.received_bytes
    pulled(transport, name, ids)
    assert transport.sent_bytes - sent >= ids.nbytes
    assert transport.received_bytes - received >= 4 * 2 * len(ids)


@over_remote
def test_a_call_to_a_shard_that_stands_still_ends_at_its_deadline(transport, served):
    ask(transport, Hello())
    with standing_still(served.popen.pid):
        for request in (Hello(), Pull(1, (TableIds("t", np.arange(10, dtype=np.int64)),))):
            with pytest.raises(Unreachable):
                ask(transport, request, timedelta(seconds=0.2))
    assert isinstance(eventually(transport, Hello()), Greeting)


@over_remote
def test_a_first_call_to_a_shard_that_stands_still_ends_at_its_deadline(transport, served):
    with standing_still(served.popen.pid), pytest.raises(Unreachable):
        ask(transport, Hello(), timedelta(seconds=0.2))
    assert isinstance(eventually(transport, Hello()), Greeting)


@over_remote
def test_closing_ends_a_call_that_is_under_way(transport, served):
    ask(transport, Hello())
    with standing_still(served.popen.pid):
        call = transport.submit(Hello(), timedelta(minutes=5))
        threading.Timer(0.1, transport.close).start()
        with pytest.raises(Unreachable):
            call.result()
    with pytest.raises(Unreachable):
        ask(transport, Hello())


@pytest.fixture
def members(transport):
    """Two workers of a synchronous job, which has just begun."""
    workers = fresh(), fresh()
    for number, worker in enumerate(workers):
        started = number == 1
        joined = ask(transport, Join(worker=worker, epoch=1, clock=0, staleness=0, workers=2, lease_ms=60_000))
        assert joined == Joined(member=True, clock=0, started=started, members=workers[: number + 1])
    yield workers
    for worker in workers:
        assert ask(transport, Leave(worker=worker, epoch=1)) == LeaveAck()


@over_all
def test_a_pull_waits_until_a_clock_is_closed(transport, members):
    name, ids = table(transport), np.arange(3, dtype=np.int64)
    into = np.full((3, 2), np.nan, np.float32)
    pull = Pull(1, (TableIds(name, ids),), members[0], 1, required_clock=1)
    waiting = transport.submit(pull, PATIENCE, [into])
    for worker in members:
        assert ask(transport, a_push(name, ids, np.ones((3, 2), np.float32), worker)) == Pushed(False, 3, 0)
    reply = waiting.result()
    assert reply.version > 0
    assert reply.tables[0].reshape(-1).tolist() == [-1] * 6
    assert ask(transport, Heartbeat(worker=members[0], epoch=1)) == HeartbeatAck(clock=1, members=members)


@over_all
def test_a_pull_that_waits_in_vain_says_for_whom(transport, members):
    name, ids = table(transport), np.arange(3, dtype=np.int64)
    ask(transport, a_push(name, ids, np.ones((3, 2), np.float32), members[0]))
    with raises(ClockAhead, clock=0, workers=str(members[1])):
        ask_in_vain(transport, Pull(1, (TableIds(name, ids),), members[0], 1, required_clock=1))


@over_all
def test_workers_meet(transport, members):
    first, second = members
    payloads = np.arange(5, dtype=np.uint8), np.zeros(0, np.uint8)
    waiting = transport.submit(Rendezvous(first, 1, "a", payloads[0]), PATIENCE)
    quiet = ask(transport, Rendezvous(second, 1, "a", payloads[1], want_payloads=False))
    assert quiet == RendezvousResult(members, ())
    met = waiting.result()
    assert (met.workers, [part.tolist() for part in met.payloads]) == (members, [[0, 1, 2, 3, 4], []])
    with raises(ClockAhead, workers=str(second)):
        ask_in_vain(transport, Rendezvous(first, 1, "b", payloads[0]))


@over_all
def test_splits_of_the_data_are_dealt(transport, members):
    first, second = members
    assert ask(transport, TakeSplit(worker=first, epoch=1, data_epoch=0, num_splits=2, done=-1)) == Split(
        index=0, returned=0
    )
    assert ask(transport, TakeSplit(worker=second, epoch=1, data_epoch=0, num_splits=2, done=-1)) == Split(
        index=1, returned=0
    )
    waiting = transport.submit(TakeSplit(worker=first, epoch=1, data_epoch=0, num_splits=2, done=0), PATIENCE)
    assert ask(transport, TakeSplit(worker=second, epoch=1, data_epoch=0, num_splits=2, done=1)) == Split(
        index=-1, returned=0
    )
    assert waiting.result() == Split(index=-1, returned=0)


def ask_in_vain(transport: Transport, request: Request) -> None:
    """Ask what a shard refuses a quarter of the time before its deadline, until its answer comes in time."""
    for seconds in (1, 2, 2, 4, 8):
        with suppress(Unreachable):
            ask(transport, request, timedelta(seconds=seconds))


def eventually(transport: Transport, request: Request) -> Reply:
    """The reply, however often it has to be asked for."""
    end = time.monotonic() + 100
    while True:
        try:
            return ask(transport, request, SECOND)
        except Unreachable:
            assert time.monotonic() < end, "the shard was not found again"
            time.sleep(0.05)


@pytest.mark.parametrize("name", REMOTE)
def test_nobody_at_an_address_is_unreachable(name, connect):
    with socket.socket() as taken:  # bound, so that nobody else listens there, but not listening
        taken.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unreachable):
            ask(connect(ADDRESSES[name]({"address": place, "rpc": place})), Hello(), timedelta(seconds=0.5))


@pytest.fixture(scope="module")
def website():
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        host, port = web.server_address
        yield f"{host}:{port}"
        web.shutdown()


@pytest.mark.parametrize("name", REMOTE)
def test_a_web_server_is_no_shard(name, website, connect):
    with pytest.raises(NotAShard, match=website):
        ask(connect(ADDRESSES[name]({"address": website, "rpc": website})), Hello())


@pytest.fixture(scope="module")
def restarted():
    """Transports to a shard that was killed and started again, and the instance that each of them knew before."""
    with ExitStack() as stack:
        # nobody else is given its ports while it is away
        reserved = [stack.enter_context(socket.socket()) for _ in range(2)]
        for sock in reserved:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", 0))
        places = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in reserved]
        yield from restart(*places)


def restart(listen: str, rpc: str) -> Iterator[tuple[dict[str, Transport], dict[str, str]]]:
    with shard_process("--rpc", rpc, listen=listen) as first:
        transports = {name: transport_for(address(first.ready)) for name, address in ADDRESSES.items()}
        greetings = {name: ask(transport, Hello()) for name, transport in transports.items()}
    with shard_process("--rpc", rpc, listen=listen):
        yield transports, {name: g.instance for name, g in greetings.items() if isinstance(g, Greeting)}
        for transport in transports.values():
            transport.close()


@pytest.mark.parametrize("name", REMOTE)
def test_a_shard_that_was_restarted_is_reached_again(name, restarted):
    transports, before = restarted
    greeting = eventually(transports[name], Hello())
    assert greeting.instance != before[name]


def trained(transport: Transport, name: str) -> bytes:
    """The rows, to the bit, after some pulls and pushes of one client."""
    made = spec.TableSpec(name=name, dim=5, optimizer=spec.Adagrad(lr=0.1), initializer=spec.Normal(std=0.1), seed=3)
    client = Client([transport], worker=fresh())
    client.declare(made)
    rng = np.random.default_rng(0)
    for clock in range(10):
        route = make_route(rng.integers(0, 500, 200), made.space_key, client.placement)
        (rows,) = client.pull([(made.name, route)])
        client.push([(made.name, route, np.tanh(rows) + np.float32(0.1 * clock))], clock=clock)
    everything = make_route(np.arange(500, dtype=np.int64), made.space_key, client.placement)
    return client.pull([(made.name, everything)])[0].tobytes()


@over_remote
def test_weights_are_those_of_the_local_transport_to_the_bit(transport):
    name = f"t{fresh()}"  # a row's first value depends on it
    assert trained(transport, name) == trained(local_transport(), name)
