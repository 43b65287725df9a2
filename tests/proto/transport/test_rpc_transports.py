"""The `grpc` and `rpc` transports, with servers that are no shards of this version."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta

import grpc
import pytest

from embershard.proto.errors import InternalError, InvalidRequest, NotAShard, WrongVersion
from embershard.proto.messages import METHODS, SERVICE, GetStatus, Hello
from embershard.proto.protobuf import dumps, loads
from embershard.proto.transport.addresses import transport_for
from embershard.proto.transport.grpc import GrpcTransport
from embershard.proto.transport.transport import Unreachable
from embershard.proto.wire import OLDEST_VERSION, VERSION
from embershard.worker.client.client import Client
from harness.raises import raises

PATIENCE = timedelta(seconds=60)


@pytest.fixture
def serve():
    """Start a gRPC server on loopback that answers every method of the contract with a function over bytes."""
    servers = []

    def start(answer, address="127.0.0.1:0", service=SERVICE):
        def handler(kind):
            return grpc.unary_unary_rpc_method_handler(lambda data, _: answer(kind, data))

        servers.append(grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)]))
        handlers = {name: handler(kind) for kind, (name, _) in METHODS.items()}
        servers[-1].add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        place = f"127.0.0.1:{servers[-1].add_insecure_port(address)}"
        servers[-1].start()
        return servers[-1], place

    yield start
    for server in servers:
        server.stop(0).wait()


@pytest.fixture
def ask():
    transports = []

    def asked(address, timeout=PATIENCE):
        transports.append(GrpcTransport(address))
        return transports[-1].submit(Hello(), timeout).result()

    yield asked
    for transport in transports:
        transport.close()


def test_what_no_shard_of_this_version_answers_has_the_error_of_its_kind(serve, ask):
    def defect(kind, data):
        raise ZeroDivisionError("oops")

    older = {"lowest": 1, "highest": 1, "own_lowest": OLDEST_VERSION, "own_highest": VERSION}
    for answer, service, error, fields in [
        (lambda kind, data: b"\xff\xff\xff", SERVICE, NotAShard, {}),  # no message
        (lambda kind, data: b"", "someone.elses.Service", NotAShard, {}),
        (lambda kind, data: b"", "embershard.v1.Shard", WrongVersion, older),
        (defect, SERVICE, InternalError, {}),
        (lambda kind, data: bytes(66 * 2**20), SERVICE, InvalidRequest, {}),  # over the limit: not worth a retry
    ]:
        with raises(error, **fields):
            ask(serve(answer, service=service)[1])


def test_a_server_that_never_answers_ends_at_the_deadline(serve, ask):
    released = threading.Event()
    _, address = serve(lambda kind, data: released.wait(60) and b"")
    with pytest.raises(Unreachable, match="no answer"):
        ask(address, timedelta(seconds=0.3))
    released.set()


def test_a_server_that_starts_later_or_again_is_found_and_a_closed_client_says_so(make_shards, serve):
    (shard,) = make_shards(1)

    def later(address):
        answer = lambda kind, data: dumps(shard.handle(loads(kind, data)))  # noqa: E731
        timer = threading.Timer(0.2, lambda: servers.append(serve(answer, address)[0]))
        timer.start()
        return timer

    servers = []
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))  # nobody else is given the port
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        first = later(address)
        transport = transport_for(f"grpc://{address}")
        client = Client([transport], timeout=PATIENCE)
        first.join()
        servers[0].stop(0).wait()
        again = later(address)
        assert client.status()[0].instance == shard.greeting.instance
        again.join()
    transport.close()
    with pytest.raises(Unreachable, match="closed by this worker"):
        transport.submit(GetStatus(), PATIENCE)


def test_an_rpc_shard_of_version_1_is_told_from_something_else():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with closing(transport_for(f"rpc://127.0.0.1:{listener.getsockname()[1]}")) as transport:
            answer = transport.submit(Hello(), PATIENCE)
            sock, _ = listener.accept()
            with sock:
                sock.recv(100)
                sock.sendall(b"embershard rpc 1 tcp://127.0.0.1:1\n")
            with raises(WrongVersion, lowest=1, highest=1, own_lowest=OLDEST_VERSION, own_highest=VERSION):
                answer.result()
