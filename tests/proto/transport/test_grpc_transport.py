import http.server
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import grpc
import numpy as np
import pytest

from embershard.proto import errors
from embershard.proto.errors import (
    EmbershardError,
    InternalError,
    InvalidRequest,
    NotAShard,
    ShardUnavailable,
    UnknownTable,
    WrongVersion,
)
from embershard.proto.messages import METHODS, SERVICE, GetStatus, Hello, Pull, Reply, Request, TableIds
from embershard.proto.protobuf import dumps, loads
from embershard.proto.routing import make_route
from embershard.proto.spec import SGD, Constant, TableSpec
from embershard.proto.transport.grpc import GrpcTransport
from embershard.proto.transport.transport import Unreachable
from embershard.proto.wire import OLDEST_VERSION, VERSION
from embershard.ps.shard import Shard
from embershard.worker.client.client import Client

SECOND = timedelta(seconds=1)
PATIENCE = timedelta(seconds=60)
Bytes = Callable[[type[Request], bytes], bytes]


def answer_with(shard: Shard) -> Bytes:
    return lambda kind, data: dumps(shard.handle(loads(kind, data)))


class Server:
    """A gRPC server on loopback that answers every method of the contract with a function over bytes."""

    def __init__(self, answer: Bytes | None, address: str = "127.0.0.1:0", service: str = SERVICE) -> None:
        self.server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        if answer is not None:
            handlers = {name: self._handler(kind, answer) for kind, (name, _) in METHODS.items()}
            self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        self.address = f"127.0.0.1:{self.server.add_insecure_port(address)}"
        self.server.start()

    @staticmethod
    def _handler(kind: type[Request], answer: Bytes) -> grpc.RpcMethodHandler:
        def method(data, context):
            try:
                return answer(kind, data)
            except EmbershardError as error:
                status, detail = errors.to_wire(error)
                context.set_trailing_metadata((("embershard-error-bin", detail),))
                context.abort(grpc.StatusCode[status.value], str(error))
                raise AssertionError from error

        return grpc.unary_unary_rpc_method_handler(method)

    def stop(self) -> None:
        self.server.stop(0).wait()


@pytest.fixture
def serve():
    servers: list[Server] = []

    def start(answer, address="127.0.0.1:0", service=SERVICE):
        servers.append(Server(answer, address, service))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def transport_to():
    transports: list[GrpcTransport] = []

    def connect(address):
        transports.append(GrpcTransport(address))
        return transports[-1]

    yield connect
    for transport in transports:
        transport.close()


Serve = Callable[..., Server]
TransportTo = Callable[[str], GrpcTransport]
Shards = Callable[..., list[Shard]]


def ask(transport: GrpcTransport, request: Request, timeout: timedelta = PATIENCE) -> Reply:
    return transport.submit(request, timeout).result()


def test_rows_cross_grpc_bit_for_bit(make_shards, serve):
    servers = [serve(answer_with(shard)) for shard in make_shards(2)]
    client = Client.connect([f"grpc://{server.address}" for server in servers])
    spec = TableSpec(name="t", dim=3, optimizer=SGD(lr=1.0), initializer=Constant(value=0.0))
    client.declare(spec)
    route = make_route(np.arange(50, dtype=np.int64), spec.space_key, client.placement)
    gradients = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    assert client.push([("t", route, gradients)], clock=0).applied == 50
    np.testing.assert_array_equal(client.pull([("t", route)])[0], -gradients)
    stats = client.stats
    assert stats.sent_bytes > gradients.nbytes
    assert stats.received_bytes > gradients.nbytes
    client.close()


def test_an_error_keeps_its_type_and_fields(make_shards, serve, transport_to):
    transport = transport_to(serve(answer_with(*make_shards(1))).address)
    with pytest.raises(UnknownTable) as caught:
        ask(transport, Pull(1, (TableIds("x", np.array([1], np.int64)),)))
    assert caught.value.fields == {"table": "x", "known": "none"}


def garbage(kind: type[Request], data: bytes) -> bytes:
    return b"\xff\xff\xff"


def test_garbage_in_a_reply_is_no_shard(serve, transport_to):
    with pytest.raises(NotAShard, match="not as an embershard shard"):
        ask(transport_to(serve(garbage).address), Hello())


def test_a_grpc_server_of_something_else_is_no_shard(serve, transport_to):
    address = serve(None).address
    with pytest.raises(NotAShard, match=address):
        ask(transport_to(address), Hello())


def test_a_shard_of_an_older_version_is_told_from_something_else(serve, transport_to):
    old = serve(lambda kind, data: b"", service="embershard.v1.Shard")
    with pytest.raises(WrongVersion) as refused:
        transport_to(old.address).submit(Hello(), PATIENCE).result()
    own = {"own_lowest": OLDEST_VERSION, "own_highest": VERSION}
    assert refused.value.fields == {"lowest": 1, "highest": 1, **own}


def test_a_web_server_is_no_shard(transport_to):
    web = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    try:
        start = time.monotonic()
        with pytest.raises(NotAShard, match=f"127.0.0.1:{web.server_port} answers, but not as an embershard shard"):
            Client.connect([f"grpc://127.0.0.1:{web.server_port}"], timeout=timedelta(seconds=100))
        assert time.monotonic() - start < 50  # long before the deadline
    finally:
        web.shutdown()
        thread.join()
        web.server_close()


def test_a_closed_port_is_named_at_the_deadline():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(ShardUnavailable, match=f"no answer within 1.0 s .*embershard status {address}"):
            Client.connect([f"grpc://{address}"], timeout=SECOND)


def test_a_server_that_never_answers_ends_at_the_deadline(serve, transport_to):
    released = threading.Event()

    def hang(kind, data):
        released.wait(60)
        return b""

    transport = transport_to(serve(hang).address)
    with pytest.raises(Unreachable, match="no answer"):
        ask(transport, Hello(), timedelta(seconds=0.3))
    released.set()


def test_a_defect_of_the_server_is_reported_as_one(serve, transport_to):
    def fail(kind, data):
        raise ZeroDivisionError("oops")

    with pytest.raises(InternalError, match="oops"):
        ask(transport_to(serve(fail).address), GetStatus())


def test_a_reply_over_the_limit_is_refused_and_not_retried(serve, transport_to):
    def huge(kind, data):
        return bytes(66 * 2**20)

    with pytest.raises(InvalidRequest, match="larger than max"):
        ask(transport_to(serve(huge).address), GetStatus())


def test_a_client_finds_a_server_that_starts_later(make_shards, serve):
    (shard,) = make_shards(1)
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))  # nobody else is given the port
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        timer = threading.Timer(0.5, lambda: serve(answer_with(shard), address))
        timer.start()
        client = Client.connect([f"grpc://{address}"], timeout=PATIENCE)
        timer.join()
    assert client.status()[0].instance == shard.greeting.instance
    client.close()


def test_a_connection_that_broke_is_made_again(make_shards, serve):
    (shard,) = make_shards(1)
    server = serve(answer_with(shard))
    client = Client.connect([f"grpc://{server.address}"], timeout=PATIENCE)
    server.stop()
    timer = threading.Timer(0.3, lambda: serve(answer_with(shard), server.address))
    timer.start()
    assert client.status()[0].shard == 0
    timer.join()
    client.close()


def test_a_closed_transport_says_so(make_shards, serve, transport_to):
    transport = transport_to(serve(answer_with(*make_shards(1))).address)
    ask(transport, Hello())
    transport.close()
    with pytest.raises(Unreachable, match="closed by this worker"):
        ask(transport, Hello())
