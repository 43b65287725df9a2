"""A shard behind gRPC, in this process: what goes over the wire, and what answers while the apply thread is busy."""

import socket
import struct
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from embershard.proto import spec
from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.errors import (
    ClockAhead,
    InternalError,
    InvalidRequest,
    MessageTooLarge,
    NotAllowed,
    ShuttingDown,
    TableMismatch,
    UnknownTable,
    WrongVersion,
)
from embershard.proto.errors import from_wire as error_from
from embershard.proto.messages import (
    METHODS,
    SERVICE,
    Compress,
    Declare,
    Declared,
    GetStatus,
    Hello,
    Load,
    Loaded,
    Pull,
    Pushed,
    TableCodecs,
)
from embershard.proto.messages import TableIds as Ids
from embershard.proto.protobuf import dumps
from embershard.proto.transport.grpc import ERROR_KEY, GrpcTransport
from embershard.proto.transport.transport import Unreachable
from embershard.proto.wire import MAX_BUFFERS, OLDEST_VERSION, VERSION
from embershard.ps.monitoring.log_lines import PER_MINUTE
from embershard.ps.transport.grpc import ShardService
from harness.eventually import eventually
from harness.hostile_peers import push
from harness.raises import raises
from harness.shards import ids_of, join, table

PATIENCE = timedelta(seconds=60)
PULL = Pull(1, (Ids("items", ids_of(0, 1)),))
PUSH = push(2, 2)
APPLIED = Pushed(duplicate=False, applied=2, skipped=0)


class Served:
    """A served shard with one client."""

    def __init__(self, service):
        self.service, self.apply = service, service.apply
        self.transport = GrpcTransport(service.address)
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self.channel = grpc.insecure_channel(service.address, options=options)

    def ask(self, request, timeout=PATIENCE):
        return self.transport.submit(request, timeout).result()

    def refused(self, method, data) -> grpc.RpcError:
        """The error of a call with these bytes."""
        with pytest.raises(grpc.RpcError) as caught:
            self.channel.unary_unary(method)(data, timeout=60.0)
        return caught.value

    @contextmanager
    def busy(self):
        """The apply thread is held up inside."""
        entered, gate = threading.Event(), threading.Event()
        self.apply.submit(lambda: entered.set() or gate.wait(100), 0, float("inf"))
        entered.wait(60)
        try:
            yield
        finally:
            gate.set()


@pytest.fixture
def here(serve_grpc):
    made = Served(serve_grpc())
    yield made
    made.transport.close()
    made.channel.close()


def test_every_method_answers_with_its_reply_and_is_counted(here):
    assert here.ask(Hello()).version == "1.2.3"
    assert here.ask(Declare(table(dim=2))) == Declared(created=False, loading=False)
    assert here.ask(PUSH) == APPLIED
    assert here.ask(Load("items", 1, ids_of(1, 2), np.full(4, 7, np.float32))) == Loaded(rows=2)
    assert here.ask(PULL).tables[0].tolist() == [-1, -1, 7, 7]
    status = here.ask(GetStatus())
    assert (status.tables[0].rows, status.requests) == (3, 7)  # with the first declaration


def test_a_request_for_an_earlier_process_waits_for_a_hello(serve_grpc):
    first = serve_grpc()
    with closing(GrpcTransport(first.address)) as transport:
        greeted = transport.submit(Hello(), PATIENCE).result()
        assert transport.submit(PULL, PATIENCE).result().tables[0].size == 4
        first.stop()
        later = serve_grpc(first.address)
        assert eventually(lambda: _instance(transport) == later.shard.greeting.instance != greeted.instance)
        with pytest.raises(Unreachable, match="another process of the shard"):
            transport.submit(PULL, PATIENCE).result()
        transport.submit(Hello(), PATIENCE).result()
        assert transport.submit(PULL, PATIENCE).result().tables[0].size == 4


def _instance(transport):
    try:
        return transport.submit(GetStatus(), PATIENCE).result().instance
    except Unreachable:  # gRPC connects again after a pause
        return ""


def test_an_error_arrives_with_its_type_and_fields_whatever_its_length(here):
    with raises(UnknownTable, table="nope", known="items"):
        here.ask(Pull(1, (Ids("nope", ids_of(1)),)))
    settings = {f"setting_with_a_long_name_{i}": float(i) for i in range(2000)}
    other = table(dim=2, optimizer=spec.Custom(function="a:b", lr=1.0, settings=settings))
    with pytest.raises(TableMismatch, match=r" \.\.\.; use another name"):
        here.ask(Declare(other))


def test_bytes_that_are_no_message_are_refused(here):
    for name, _ in METHODS.values():
        code = here.refused(f"/{SERVICE}/{name}", b"\xff\xff\xff").code()
        assert code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Pull(1, (Ids("", ids_of()),) * (MAX_BUFFERS + 1)), InvalidRequest),
        (Compress(revision=0, tables=[TableCodecs(table="items", push="int8")] * 100_000), MessageTooLarge),
    ],
    ids=["tables", "codecs"],
)
def test_a_message_that_no_frame_could_hold_is_refused_before_it_makes_work(here, message, error):
    with pytest.raises(InvalidRequest) as caught:
        here.ask(message)
    assert type(caught.value) is error


def test_arrays_count_for_nothing_of_what_a_message_says_beside_them(here):
    many = 200_000  # 1.6 MB
    assert here.ask(Pull(1, (Ids("items", np.arange(many)),))).tables[0].size == 2 * many


def test_a_defect_is_an_internal_error_and_the_log_has_its_traceback(here, caplog):
    here.service.shard.handle = lambda *_: [][1]
    with pytest.raises(InternalError, match=r"IndexError in Pull.*see the shard's output"):
        here.ask(PULL)
    assert "[][1]" in caplog.text


def test_a_defect_that_a_client_meets_again_and_again_does_not_fill_the_log(here, caplog):
    here.service.shard.handle = lambda *_: [][1]
    for _ in range(3 * PER_MINUTE):
        with pytest.raises(InternalError):
            here.ask(PULL)
    assert 1 <= caplog.text.count("Traceback") <= 2 * PER_MINUTE  # a minute may end meanwhile


def test_hello_and_status_do_not_wait_behind_the_queue(here):
    with here.busy():
        waiting = here.transport.submit(PUSH, PATIENCE)
        assert eventually(lambda: here.apply.queued_bytes)
        here.ask(Hello())
        assert here.ask(GetStatus()).queued_bytes == len(dumps(PUSH))
    assert waiting.result() == APPLIED
    assert eventually(lambda: not here.ask(GetStatus()).queued_bytes)  # it is counted until its reply has left


def test_a_push_whose_caller_gave_up_in_the_queue_is_not_applied(here):
    with here.busy():
        with pytest.raises(Unreachable):
            here.ask(PUSH, timedelta(seconds=0.1))
        time.sleep(0.4)  # the shard counts from when the push came to it
    assert here.ask(PULL).tables[0].tolist() == [0, 0, 0, 0]
    assert here.ask(PUSH) == APPLIED  # its retry is the first to be applied


def test_a_pull_that_waits_in_vain_is_put_back_before_its_deadline(here):
    for worker in range(2):
        here.ask(join(worker, workers=2))
    with pytest.raises(ClockAhead):
        here.ask(replace(PULL, epoch=1, required_clock=1), timedelta(seconds=0.6))


def test_a_closed_queue_answers_that_the_shard_is_shutting_down(here):
    here.apply.close()
    with pytest.raises(ShuttingDown):
        here.ask(PULL)


@pytest.mark.parametrize(("more", "code"), [(1, "RESOURCE_EXHAUSTED"), (0, "INVALID_ARGUMENT")])
def test_a_message_over_the_limit_is_refused_and_one_at_the_limit_read(here, more, code):
    """What is read is no push."""
    assert here.refused(f"/{SERVICE}/Push", bytes(MAX_MESSAGE_BYTES + more)).code().name == code
    here.ask(Hello())


def test_a_connection_is_told_how_many_calls_it_may_have_at_once(here):
    """One with more of them would have the calls of others cancelled."""
    with socket.create_connection(here.service.address.rsplit(":", 1)) as peer:
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        start = peer.recv(9, socket.MSG_WAITALL)
        assert start[3] == 4  # SETTINGS
        settings = peer.recv(int.from_bytes(start[:3]), socket.MSG_WAITALL)
    assert dict(struct.iter_unpack(">HI", settings))[3] == 1000  # SETTINGS_MAX_CONCURRENT_STREAMS


def test_health_and_reflection_answer(here):
    checked = health_pb2_grpc.HealthStub(here.channel).Check(health_pb2.HealthCheckRequest())
    assert checked.status == health_pb2.HealthCheckResponse.SERVING
    asks = [{"list_services": ""}, {"file_containing_symbol": SERVICE}]
    requests = iter([reflection_pb2.ServerReflectionRequest(**fields) for fields in asks])
    listed, described = reflection_pb2_grpc.ServerReflectionStub(here.channel).ServerReflectionInfo(requests)
    names = {service.name for service in listed.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names
    assert any(b"PushRequest" in file for file in described.file_descriptor_response.file_descriptor_proto)


@pytest.mark.parametrize("version", [1, VERSION + 1])
@pytest.mark.parametrize("method", ["Hello", "Push", "AMethodThatThisVersionHasNot"])
def test_a_client_of_another_version_gets_an_error_that_names_both(here, version, method):
    refused = here.refused(f"/embershard.v{version}.Shard/{method}", b"")
    assert refused.code() is grpc.StatusCode.FAILED_PRECONDITION
    theirs = {"own_lowest": version, "own_highest": version}  # it is the client that reads this
    with raises(WrongVersion, lowest=OLDEST_VERSION, highest=VERSION, **theirs):
        raise error_from(dict(refused.trailing_metadata())[ERROR_KEY], "")


@pytest.mark.parametrize("method", ["/embershard.v1.Other/Hello", f"/{SERVICE}/AMethodThatThisVersionHasNot"])
def test_a_method_that_there_is_not_is_unimplemented(here, method):
    assert here.refused(method, b"").code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_call_that_came_by_no_pipe_of_the_shard_is_refused(serve_grpc, monkeypatch):
    init = ShardService.__init__
    monkeypatch.setattr(ShardService, "__init__", lambda self, dispatch: init(self, dispatch, {}))
    error = Served(serve_grpc()).refused(f"/{SERVICE}/Hello", dumps(Hello()))
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert isinstance(error_from(dict(error.trailing_metadata())[ERROR_KEY], ""), NotAllowed)
