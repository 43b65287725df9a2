"""The contract of proto/transport/transport.py, over every transport: the same claims about one shard in this process,
and about one in a process of its own that serves all transports at once."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import numpy as np
import pytest

from embershard.local_shards import InProcessShards
from embershard.proto import messages as m
from embershard.proto import shared_memory, spec
from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.codec.ids import encode_ids
from embershard.proto.codec.values.registry import find_values
from embershard.proto.errors import ClockAhead, EmbershardError, NotAShard
from embershard.proto.shared_memory import empty_floats
from embershard.proto.transport import stream
from embershard.proto.transport.addresses import transport_for
from embershard.proto.transport.transport import Unreachable
from harness import shards
from harness.certificates import issue
from harness.processes import paused
from harness.raises import raises
from harness.served import shard_process

pytestmark = pytest.mark.integration

SECOND = timedelta(seconds=1)
PATIENCE = timedelta(seconds=100)
# transport -> its address, from what a shard says when it serves
ADDRESSES = {
    "stream over Unix": lambda ready: ready["address"],
    "stream over shared memory": lambda ready: ready["address"],
    "stream over shared memory, with a log": lambda ready: ready["address"],
    "stream over TCP": lambda ready: f"tcp://{ready['address']}",
    "grpc": lambda ready: f"grpc://{ready['address']}",
    "rpc": lambda ready: f"rpc://{ready['rpc']}",
}
ENCRYPTED = {f"{name} with TLS": ADDRESSES[name] for name in ("stream over TCP", "grpc")}
REMOTE = [*ADDRESSES, *ENCRYPTED]
ALL = ["local", *REMOTE]

_numbers = count(1)


def fresh():
    """A number that no other test uses: of a table, or of a worker."""
    return next(_numbers)


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """Certificates, for either side."""
    return issue(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def services(tmp_path_factory, tls):
    """A shard that asks for tokens, one for torch rpc, which cannot, one with a log, and one with certificates."""
    log = "--durability", "log", "--log-dir", str(tmp_path_factory.mktemp("log"))
    with (
        shard_process() as first,
        shard_process("--rpc", "127.0.0.1:0", "--insecure-loopback") as second,
        shard_process(*log) as third,
        shard_process("--tls", str(tls.path)) as fourth,
    ):
        yield {"": first, "rpc": second, "log": third, "tls": fourth}


@pytest.fixture
def served(request, services):
    """The shard behind the transport of a test."""
    name = request.node.callspec.params["transport"]
    if name in ENCRYPTED:
        return services["tls"]
    return services["rpc" if name == "rpc" else "log" if name.endswith("with a log") else ""]


def local_transport():
    (transport,) = InProcessShards(1).transports()
    return transport


@pytest.fixture
def connect():
    """A transport to an address, closed after the test."""
    with ExitStack() as stack:

        def to(address, tls=None):
            transport = transport_for(address, tls=tls)
            stack.callback(transport.close)
            return transport

        yield to


@pytest.fixture
def transport(request, served, connect, tls, monkeypatch):
    """The transport of a test's parameter, with a shard behind it."""
    if request.param == "local":
        return local_transport()
    if request.param in ENCRYPTED:
        return connect(ENCRYPTED[request.param](served.ready), tls)
    shares = "shared memory" in request.param  # every array then, not large ones alone, as by default
    monkeypatch.setattr(shared_memory, "_is_possible", shares)
    monkeypatch.setattr(shared_memory, "SHARED_FROM_BYTES", 1)
    monkeypatch.setattr(stream, "SHARED_FROM_BYTES", 1)
    connected = connect(ADDRESSES[request.param](served.ready))
    if shares:
        ask(connected, m.Hello())
        assert connected._connection._heap is not None
    return connected


over_all = pytest.mark.parametrize("transport", ALL, indirect=True)
over_remote = pytest.mark.parametrize("transport", REMOTE, indirect=True)


def ask(transport, request, timeout=PATIENCE):
    return transport.submit(request, timeout).result()


def table(transport, dim=2):
    """The name of a new table of zeros, SGD with lr 1."""
    made = shards.table(f"t{fresh()}", dim)
    assert ask(transport, m.Declare(made)) == m.Declared(created=True, loading=False)
    return made.name


def pull(name, ids, **fields):
    return m.Pull(1, (m.TableIds(name, ids, **fields),))


def pulled(transport, name, ids, dim=2):
    """The rows of a table, in the memory given for them where the transport can write there."""
    reply = transport.submit(pull(name, ids), PATIENCE, [empty_floats(len(ids), dim)]).result()
    return reply.tables[0].reshape(len(ids), dim)


def a_push(name, ids, gradients, worker, seq=1, **fields):
    return shards.push(m.TableGradients(name, ids, gradients, **fields), worker=worker, seq=seq, clock=seq - 1)


def applied(rows):
    return m.Pushed(duplicate=False, applied=rows, skipped=0)


@over_all
def test_every_request_gets_its_reply(transport):
    ids = shards.ids_of(3, -4, 2**62)
    greeting = ask(transport, m.Hello())
    assert (greeting.shard, greeting.num_shards) == (0, 1)
    name = table(transport)
    rows = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    assert ask(transport, m.Load(name, 1, ids, rows)) == m.Loaded(rows=3)
    assert ask(transport, a_push(name, ids, rows / 2, fresh())) == applied(3)
    assert pulled(transport, name, ids).tolist() == [[0.5, 1], [1.5, 2], [2.5, 3]]
    status = ask(transport, m.GetStatus())
    assert [(t.dim, t.rows) for t in status.tables if t.name == name] == [(2, 3)]


@over_all
def test_a_bundle_is_read_and_changed_as_its_tables_one_after_the_other(transport):
    members, worker, counts = (table(transport), table(transport), table(transport)), fresh(), (2, 0, 3)
    ids, rows = shards.ids_of(3, -4, 3, 5, 6), np.arange(10, dtype=np.float32).reshape(5, 2)
    for seq, route in enumerate((0, 7), start=1):
        reads = m.Pull(1, (m.TableIds("", ids, route, members=members, counts=counts),), worker, 1)
        before = transport.submit(reads, PATIENCE, [empty_floats(5, 2)]).result().tables[0].reshape(5, 2)
        part = m.TableGradients("", ids[: 0 if route else 5], rows, route=route, members=members, counts=counts)
        assert ask(transport, shards.push(part, worker=worker, seq=seq, clock=seq - 1)) == applied(5)
        assert np.array_equal(ask(transport, reads).tables[0].reshape(5, 2), before - rows)
    assert pulled(transport, members[0], ids[:2]).tolist() == (-2 * rows[:2]).tolist()
    assert pulled(transport, members[2], ids[2:]).tolist() == (-2 * rows[2:]).tolist()


@over_all
@pytest.mark.parametrize(
    ("num_rows", "dim"),
    [(0, 4), (1, 1), (7, 3), (1000, 33), pytest.param(MAX_MESSAGE_BYTES // 4104 - 1, 1024, id="near the limit")],
)
def test_arrays_arrive_as_they_were_sent_and_their_bytes_are_counted(transport, num_rows, dim):
    name = table(transport, dim)
    ids = np.arange(num_rows, dtype=np.int64) * 7919
    rows = np.random.default_rng(0).standard_normal((num_rows, dim), np.float32)
    sent, received = transport.sent_bytes, transport.received_bytes
    assert ask(transport, m.Load(name, 1, ids, rows)) == m.Loaded(rows=num_rows)
    np.testing.assert_array_equal(pulled(transport, name, ids, dim), rows)
    np.testing.assert_array_equal(ask(transport, pull(name, ids)).tables[0].reshape(num_rows, dim), rows)
    assert transport.sent_bytes - sent >= 2 * ids.nbytes + rows.nbytes
    assert transport.received_bytes - received >= 2 * rows.nbytes


@over_all
def test_many_tables_travel_in_one_message(transport):
    dims = range(1, 41)
    names = [table(transport, dim) for dim in dims]
    ids = [np.arange(dim % 5, dtype=np.int64) for dim in dims]  # some of them empty
    values = [np.full((dim % 5, dim), dim, np.float32) for dim in dims]
    gradients = (m.TableGradients(*part) for part in zip(names, ids, values, strict=True))
    assert ask(transport, shards.push(*gradients, worker=fresh())) == applied(sum(map(len, ids)))
    wanted = m.Pull(1, tuple(m.TableIds(*part) for part in zip(names, ids, strict=True)))
    reply = transport.submit(wanted, PATIENCE, [empty_floats(dim % 5, dim) for dim in dims]).result()
    for got, want in zip(reply.tables, values, strict=True):
        np.testing.assert_array_equal(got.reshape(want.shape), -want)


@over_all
def test_rows_may_be_wanted_compressed_in_the_callers_memory(transport):
    names, ids = [table(transport, 8), table(transport, 4)], np.arange(5, dtype=np.int64)
    values = [np.arange(5 * dim, dtype=np.float32).reshape(5, dim) for dim in (8, 4)]
    for name, rows in zip(names, values, strict=True):
        ask(transport, m.Load(name, 1, ids, rows))
    codec = find_values("int8")
    payload = np.empty(codec.nbytes(5, 8), np.uint8)
    codec.encode(values[0], payload, None)
    into = [np.zeros(codec.nbytes(5, 8), np.uint8), empty_floats(5, 4)]
    wanted = m.Pull(1, (m.TableIds(names[0], ids, codec="int8"), m.TableIds(names[1], ids)))
    for places in (into, ()):
        reply = transport.submit(wanted, PATIENCE, places).result()
        assert reply.codecs == ("int8", "")
        np.testing.assert_array_equal(reply.tables[0], payload)
        np.testing.assert_array_equal(reply.tables[1].reshape(5, 4), values[1])


@over_all
def test_ids_may_travel_packed_both_ways_of_a_row(transport):
    name, ids, worker = table(transport), shards.ids_of(-(2**63), -4, 3, 2**62), fresh()
    packed = encode_ids(ids)
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    assert ask(transport, a_push(name, ids, rows, worker, packed=packed)) == applied(4)
    wanted = m.Pull(1, (m.TableIds(name, ids, route=worker, packed=packed),), worker, 1)
    np.testing.assert_array_equal(ask(transport, wanted).tables[0].reshape(4, 2), -rows)
    ask(transport, a_push(name, ids, rows, worker, seq=2, route=worker, packed=packed))
    np.testing.assert_array_equal(pulled(transport, name, ids), -2 * rows)


def refused(number):
    """Requests in order, each of which a shard refuses in its own way, or needs for the next."""
    name, ids, worker = f"refused{number}", np.arange(2, dtype=np.int64), 1000 + number
    loading = shards.table(f"{name}-loading", 2)
    part = m.TableGradients(name, ids, np.ones((2, 2), np.float32))
    return [
        m.Declare(shards.table(name, 2)),
        m.Declare(shards.table(name, 3)),  # TableMismatch
        m.Declare(shards.table("other", 2, optimizer=spec.Custom(function="no:where", lr=1.0))),
        m.Pull(7, (m.TableIds(name, ids),)),  # WrongPlacement
        a_push(name, ids, np.ones(5, np.float32), worker),  # WrongDim
        m.Load(name, 1, ids, np.full((2, 2), np.nan, np.float32)),  # NonFiniteValue
        m.Declare(loading, worker, load=True),
        pull(loading.name, ids),  # TableLoading
        shards.push(part, worker=worker, epoch=5, seq=9, first=9),  # MemoryLost
        shards.push(part, worker=worker + 500, epoch=5),
        shards.push(part, worker=worker + 500, epoch=4),  # StaleWorker
    ]


def outcome(transport, request):
    """The reply, or the error's type and fields but for those that say when and from where."""
    try:
        return ask(transport, request)
    except EmbershardError as error:
        return type(error), {name: value for name, value in error.fields.items() if name != "by"}


@over_remote
def test_an_error_arrives_as_the_type_that_the_shard_raised_with_its_fields(transport):
    number, reference = fresh(), local_transport()
    wanted = [outcome(reference, request) for request in refused(number)]
    assert [outcome(transport, request) for request in refused(number)] == wanted
    assert len({found[0] for found in wanted if isinstance(found, tuple)}) == 8


@over_all
def test_a_push_that_is_sent_twice_is_applied_once(transport):
    name, ids = table(transport), np.arange(4, dtype=np.int64)
    push = a_push(name, ids, np.ones((4, 2), np.float32), fresh())
    calls = [transport.submit(push, PATIENCE) for _ in range(2)]
    assert sorted(call.result().duplicate for call in calls) == [False, True]
    assert pulled(transport, name, ids).tolist() == [[-1, -1]] * 4


@over_all
def test_each_of_many_calls_in_flight_gets_its_own_reply(transport):
    name, ids = table(transport), np.arange(64, dtype=np.int64)
    ask(transport, m.Load(name, 1, ids, np.repeat(ids[:, None], 2, 1).astype(np.float32)))
    calls = [transport.submit(pull(name, ids[i : i + 1]), PATIENCE) for i in range(64)]
    for i, call in reversed(list(enumerate(calls))):
        assert call.result().tables[0].reshape(-1).tolist() == [i, i]


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


@over_remote
def test_calls_to_a_shard_that_stands_still_end_at_their_deadline(transport, served):
    with paused(served.popen.pid), pytest.raises(Unreachable):
        ask(transport, m.Hello(), timedelta(seconds=0.2))
    assert isinstance(eventually(transport, m.Hello()), m.Greeting)
    with paused(served.popen.pid):  # and where there is a connection
        for request in (m.Hello(), pull("t", np.arange(10, dtype=np.int64))):
            with pytest.raises(Unreachable):
                ask(transport, request, timedelta(seconds=0.2))
    assert isinstance(eventually(transport, m.Hello()), m.Greeting)


@over_remote
def test_closing_ends_a_call_that_is_under_way(transport, served):
    ask(transport, m.Hello())
    with paused(served.popen.pid):
        call = transport.submit(m.Hello(), timedelta(minutes=5))
        threading.Timer(0.1, transport.close).start()
        with pytest.raises(Unreachable):
            call.result()
    with pytest.raises(Unreachable):
        ask(transport, m.Hello())


@pytest.fixture
def members(transport):
    """Two workers of a synchronous job, which has just begun."""
    workers = fresh(), fresh()
    # torch rpc may be refused a connection on a busy machine; clients ask again then
    assert isinstance(eventually(transport, m.Hello()), m.Greeting)
    for number, worker in enumerate(workers):
        joined = ask(transport, shards.join(worker, workers=2))
        assert joined == m.Joined(member=True, clock=0, started=number == 1, members=workers[: number + 1])
    yield workers
    for worker in workers:
        assert ask(transport, m.Leave(worker=worker, epoch=1)) == m.LeaveAck()


@over_all
def test_a_pull_waits_until_a_clock_is_closed(transport, members):
    name, ids = table(transport), np.arange(3, dtype=np.int64)
    wanted = m.Pull(1, (m.TableIds(name, ids),), members[0], 1, required_clock=1)
    waiting = transport.submit(wanted, PATIENCE, [empty_floats(3, 2)])
    for worker in members:
        assert ask(transport, a_push(name, ids, np.ones((3, 2), np.float32), worker)) == applied(3)
    reply = waiting.result()
    assert reply.version > 0
    assert reply.tables[0].reshape(-1).tolist() == [-1] * 6
    assert ask(transport, m.Heartbeat(worker=members[0], epoch=1)) == m.HeartbeatAck(clock=1, members=members)


@over_all
def test_a_pull_that_waits_in_vain_says_for_whom(transport, members):
    name, ids = table(transport), np.arange(3, dtype=np.int64)
    ask(transport, a_push(name, ids, np.ones((3, 2), np.float32), members[0]))
    with raises(ClockAhead, clock=0, workers=str(members[1])):
        ask_in_vain(transport, m.Pull(1, (m.TableIds(name, ids),), members[0], 1, required_clock=1))


@over_all
def test_workers_meet(transport, members):
    first, second = members
    payloads = np.arange(5, dtype=np.uint8), np.zeros(0, np.uint8)
    waiting = transport.submit(m.Rendezvous(first, 1, "a", payloads[0]), PATIENCE)
    quiet = ask(transport, m.Rendezvous(second, 1, "a", payloads[1], want_payloads=False))
    assert quiet == m.RendezvousResult(members, ())
    met = waiting.result()
    assert (met.workers, [part.tolist() for part in met.payloads]) == (members, [[0, 1, 2, 3, 4], []])
    with raises(ClockAhead, workers=str(second)):
        ask_in_vain(transport, m.Rendezvous(first, 1, "b", payloads[0]))


def ask_in_vain(transport, request):
    """Ask what a shard refuses a quarter of the time before its deadline, until its answer comes in time."""
    for seconds in (1, 2, 2, 4, 8):
        with suppress(Unreachable):
            ask(transport, request, timedelta(seconds=seconds))


def eventually(transport, request):
    """The reply, however often it has to be asked for."""
    end = time.monotonic() + 100
    while True:
        try:
            return ask(transport, request, SECOND)
        except Unreachable:
            assert time.monotonic() < end, "the shard was not found again"
            time.sleep(0.05)


@pytest.mark.parametrize("name", ADDRESSES)
def test_nobody_at_an_address_is_unreachable(name, connect):
    with socket.socket() as taken:  # bound, so that nobody else listens there, but not listening
        taken.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unreachable):
            ask(connect(ADDRESSES[name]({"address": place, "rpc": place})), m.Hello(), timedelta(seconds=0.5))


@pytest.mark.parametrize("name", ADDRESSES)
def test_a_web_server_is_no_shard(name, connect):
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as web:
        threading.Thread(target=web.serve_forever, args=(0.01,), daemon=True).start()
        place = f"127.0.0.1:{web.server_port}"
        with pytest.raises(NotAShard, match=place):
            ask(connect(ADDRESSES[name]({"address": place, "rpc": place})), m.Hello())
        web.shutdown()


@pytest.fixture(scope="module")
def restarted():
    """Transports to a shard that was killed and started again, and the instance that each of them knew before."""
    with ExitStack() as stack:
        reserved = [stack.enter_context(socket.socket()) for _ in range(2)]
        for sock in reserved:  # nobody else is given its ports while it is away
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", 0))
        listen, rpc = (f"127.0.0.1:{sock.getsockname()[1]}" for sock in reserved)
        with shard_process(listen=listen), shard_process("--rpc", rpc, "--insecure-loopback"):
            ready = {"address": listen, "rpc": rpc}
            transports = {name: transport_for(address(ready)) for name, address in ADDRESSES.items()}
            before = {name: ask(transport, m.Hello()).instance for name, transport in transports.items()}
        with shard_process(listen=listen), shard_process("--rpc", rpc, "--insecure-loopback"):  # with other tokens
            yield transports, before
            for transport in transports.values():
                transport.close()


@pytest.mark.parametrize("name", ADDRESSES)
def test_a_shard_that_was_restarted_is_reached_again(name, restarted):
    transports, before = restarted
    assert eventually(transports[name], m.Hello()).instance != before[name]
