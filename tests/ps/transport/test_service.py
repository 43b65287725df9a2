"""A shard behind gRPC, in this process: what goes over the wire, and what answers while the apply thread is busy."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from embershard.proto import embershard_pb2 as pb
from embershard.proto import spec
from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.errors import (
    InternalError,
    ShardBusy,
    ShuttingDown,
    TableMismatch,
    UnknownTable,
    WrongVersion,
    from_wire,
)
from embershard.proto.messages import (
    METHODS,
    SERVICE,
    Declare,
    Declared,
    GetStatus,
    Greeting,
    Hello,
    Load,
    Loaded,
    Pull,
    Push,
    Pushed,
    PushToken,
    Reply,
    Request,
    Rows,
    ShardStatus,
    TableGradients,
    TableIds,
)
from embershard.proto.protobuf import dumps, loads
from embershard.proto.routing import Placement
from embershard.proto.wire import OLDEST_VERSION, VERSION
from embershard.ps.apply_thread import ApplyThread
from embershard.ps.dispatch import Dispatch
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.transport.grpc import ERROR_KEY, ShardService, make_server

R = TypeVar("R", bound=Reply)
TABLE = spec.TableSpec(name="items", dim=2, optimizer=spec.SGD(lr=1.0), initializer=spec.Constant(value=0.0))
IDS = np.array([1, 2], np.int64)
PULL = Pull(1, (TableIds("items", IDS),))


def push(seq: int, num_rows: int = 2) -> Push:
    part = TableGradients("items", np.arange(num_rows, dtype=np.int64), np.ones((num_rows, 2), np.float32))
    return Push(PushToken(0, 1, seq, 1), 0, 1, (part,))


class Served:
    """A served shard with one client."""

    def __init__(self, shard: Shard, apply: ApplyThread, channel: grpc.aio.Channel) -> None:
        self.shard, self.apply, self.channel = shard, apply, channel

    async def raw(self, method: str, data: bytes, timeout: float = 60.0) -> bytes:
        return await self.channel.unary_unary(f"/{SERVICE}/{method}")(data, timeout=timeout)  # type: ignore[no-any-return]

    async def ask(self, request: Request, kind: type[R], timeout: float = 60.0) -> R:
        """The reply; the shard's error as the client raises it."""
        try:
            return loads(kind, await self.raw(METHODS[type(request)][0], dumps(request), timeout))
        except grpc.aio.AioRpcError as error:
            detail = dict(error.trailing_metadata() or ()).get(ERROR_KEY)
            if detail is None:
                raise
            made = from_wire(detail, "")
            raise (made if error.code().name == made.status.value else error) from None

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        """The apply thread is held up inside."""
        entered, gate = threading.Event(), threading.Event()

        def hold():
            entered.set()
            gate.wait(100)
            return b""

        self.apply.submit(hold, 0, float("inf"))
        await asyncio.to_thread(entered.wait, 60)
        try:
            yield
        finally:
            gate.set()

    async def queued(self) -> None:
        """Until a request waits for the apply thread."""
        async with asyncio.timeout(60):
            while not self.apply.queued_bytes:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def served(**bounds: int) -> AsyncIterator[Served]:
    shard = Shard(0, Placement.even(1), OptimizerRegistry(), version="1.2.3")
    shard.handle(Declare(TABLE))
    apply = ApplyThread(**bounds)
    healthy = health.aio.HealthServicer()
    server = make_server(ShardService(Dispatch(shard, apply)), healthy)
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield Served(shard, apply, channel)
    apply.close()
    await server.stop(5)
    assert apply.join(60)


def run(test: Callable[[Served], Awaitable[None]], **bounds: int) -> None:
    async def scene():
        async with asyncio.timeout(200), served(**bounds) as here:
            await test(here)

    asyncio.run(scene())


def test_every_method_answers_with_its_reply():
    async def test(here):
        assert (await here.ask(Hello(), Greeting)).version == "1.2.3"
        assert await here.ask(Declare(TABLE), Declared) == Declared(created=False, loading=False)
        assert await here.ask(push(1), Pushed) == Pushed(duplicate=False, applied=2, skipped=0)
        assert await here.ask(Load("items", 1, IDS[1:], np.full(2, 7, np.float32)), Loaded) == Loaded(rows=1)
        assert (await here.ask(PULL, Rows)).tables[0].tolist() == [-1, -1, 7, 7]
        assert (await here.ask(GetStatus(), ShardStatus)).tables[0].rows == 3

    run(test)


def test_status_counts_every_kind_of_request():
    async def test(here):
        before = (await here.ask(GetStatus(), ShardStatus)).requests
        await here.ask(Hello(), Greeting)
        await here.ask(PULL, Rows)
        assert (await here.ask(GetStatus(), ShardStatus)).requests == before + 3

    run(test)


def test_an_error_arrives_with_its_type_and_fields():
    async def test(here):
        with pytest.raises(UnknownTable) as caught:
            await here.ask(Pull(1, (TableIds("nope", IDS),)), Rows)
        assert caught.value.fields == {"table": "nope", "known": "items"}

    run(test)


def test_bytes_that_are_no_message_are_refused():
    async def test(here):
        for name, reply in METHODS.values():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                loads(reply, await here.raw(name, b"\xff\xff\xff"))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(test)


def test_arrays_of_half_a_number_are_refused():
    async def test(here):
        data = pb.PullRequest(placement_epoch=1, tables=[pb.PullRequest.TableIds(table="items", ids=bytes(15))])
        with pytest.raises(grpc.aio.AioRpcError, match="15 bytes of ids") as caught:
            await here.raw("Pull", data.SerializeToString())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(test)


def test_an_error_of_any_length_fits_the_metadata():
    async def test(here):
        settings = {f"setting_with_a_long_name_{i}": float(i) for i in range(2000)}
        other = spec.TableSpec(name="items", dim=2, optimizer=spec.Custom(function="a:b", lr=1.0, settings=settings))
        with pytest.raises(TableMismatch, match=r" \.\.\.; use another name"):
            await here.ask(Declare(other), Declared)

    run(test)


def test_a_defect_is_an_internal_error_and_the_log_has_its_traceback(caplog):
    async def test(here):
        here.shard.handle = lambda *_: [][1]  # type: ignore[method-assign]
        with pytest.raises(InternalError, match=r"IndexError in Pull.*see the shard's log"):
            await here.ask(PULL, Rows)

    run(test)
    assert "Traceback" in caplog.text
    assert "[][1]" in caplog.text


def test_hello_and_status_do_not_wait_behind_the_queue():
    async def test(here):
        async with here.busy():
            waiting = asyncio.create_task(here.ask(push(1), Pushed))
            await here.queued()
            await here.ask(Hello(), Greeting)
            status = await here.ask(GetStatus(), ShardStatus)
            assert status.queued_bytes == len(dumps(push(1)))
            assert not waiting.done()
        assert (await waiting).applied == 2
        async with asyncio.timeout(60):  # it is counted until after its reply has left
            while (await here.ask(GetStatus(), ShardStatus)).queued_bytes:
                await asyncio.sleep(0.001)

    run(test)


def test_a_full_queue_answers_busy_at_once_and_takes_work_again_later():
    async def test(here):
        async with here.busy():
            accepted = asyncio.create_task(here.ask(push(1), Pushed))
            await here.queued()
            with pytest.raises(ShardBusy) as caught:
                await here.ask(push(2), Pushed)
            assert caught.value.fields["retry_after_ms"] > 0  # type: ignore[operator]
        assert not (await accepted).duplicate
        assert not (await here.ask(push(2), Pushed)).duplicate

    run(test, max_requests=2)


def test_a_push_whose_caller_gave_up_in_the_queue_is_not_applied():
    async def test(here):
        async with here.busy():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await here.ask(push(1), Pushed, timeout=0.1)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await asyncio.sleep(0.5)  # the shard counts from when the push came to it
        assert (await here.ask(PULL, Rows)).tables[0].tolist() == [0, 0, 0, 0]
        # its retry is the first to be applied
        assert await here.ask(push(1), Pushed) == Pushed(duplicate=False, applied=2, skipped=0)

    run(test)


def test_the_deadline_of_the_caller_travels_to_the_queue(monkeypatch):
    deadlines: list[float] = []

    async def test(here):
        submit = here.apply.submit
        monkeypatch.setattr(here.apply, "submit", lambda *args: deadlines.append(args[2]) or submit(*args))
        before = time.monotonic()
        await here.ask(PULL, Rows, timeout=70)
        assert before + 69 < deadlines[0] < time.monotonic() + 71

    run(test)


def test_a_closed_queue_answers_that_the_shard_is_shutting_down():
    async def test(here):
        here.apply.close()
        with pytest.raises(ShuttingDown):
            await here.ask(PULL, Rows)

    run(test)


def test_a_message_over_the_limit_is_refused_and_the_next_one_answered():
    async def test(here):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.raw("Push", bytes(MAX_MESSAGE_BYTES + 1))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in str(caught.value.details())
        await here.ask(Hello(), Greeting)

    run(test)


def test_a_message_at_the_limit_is_read():
    async def test(here):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.raw("Push", bytes(MAX_MESSAGE_BYTES))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # it was read, and is no push

    run(test)


def test_health_and_reflection_answer():
    async def test(here):
        checked = await health_pb2_grpc.HealthStub(here.channel).Check(health_pb2.HealthCheckRequest())
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
        requests = iter(
            [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
            ]
        )
        stub = reflection_pb2_grpc.ServerReflectionStub(here.channel)
        listed, described = [reply async for reply in stub.ServerReflectionInfo(requests)]
        names = {service.name for service in listed.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names
        assert any(b"PushRequest" in file for file in described.file_descriptor_response.file_descriptor_proto)

    run(test)


@pytest.mark.parametrize("version", [1, VERSION + 1])
@pytest.mark.parametrize("method", ["Hello", "Push", "AMethodThatThisVersionHasNot"])
def test_a_client_of_another_version_gets_an_error_that_names_both(version, method):
    async def test(here):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await here.channel.unary_unary(f"/embershard.v{version}.Shard/{method}")(b"", timeout=60.0)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        error = from_wire(dict(refused.value.trailing_metadata() or ())[ERROR_KEY], "")
        assert isinstance(error, WrongVersion)
        theirs = {"own_lowest": version, "own_highest": version}  # it is the client that reads this
        assert error.fields == {"lowest": OLDEST_VERSION, "highest": VERSION, **theirs}

    run(test)


def test_a_method_of_another_service_is_unimplemented():
    async def test(here):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await here.channel.unary_unary("/embershard.v1.Other/Hello")(b"", timeout=60.0)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run(test)
