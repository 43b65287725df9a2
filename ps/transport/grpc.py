"""The `grpc` transport's side of a shard: bytes in, bytes out, every error with its status and its fields."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NoReturn, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from embershard.proto import errors
from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.errors import EmbershardError, NotAllowed, WrongVersion
from embershard.proto.messages import METHODS, OTHER_SERVICES, SERVICE, Request
from embershard.proto.protobuf import dumps, loads
from embershard.proto.wire import OLDEST_VERSION, VERSION
from embershard.ps.dispatch import Dispatch
from embershard.ps.security.access import Principal
from embershard.ps.security.peers import Peer

ERROR_KEY = "embershard-error-bin"
SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES + 2**20),  # the shard refuses a pull that is too large itself
    ("grpc.so_reuseport", 0),  # on by default, and then two shards share a port without a word
    # Clients ping every 30 s while they wait for a reply; by default the third ping would end their connection.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_time_ms", 60_000),  # a worker's machine that vanished is noticed, and its calls are dropped
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.server_handshake_timeout_ms", 10_000),  # for who connects and says nothing, as on the other transport
    ("grpc.max_connection_idle_ms", 300_000),  # without a call; clients connect again when they have one
]
_NO_DEADLINE = 24 * 3600.0  # seconds for a caller that set none

_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


class ShardService:
    """Handlers for one shard, on the event loop.

    `peers` are those whose pipes lead here, by the pipes' names: a call that comes by another way is refused. Without
    them gRPC itself is at the other end of every connection.
    """

    def __init__(self, dispatch: Dispatch, peers: Mapping[str, Peer] | None = None) -> None:
        self._dispatch = dispatch
        self._peers = peers

    @property
    def is_open(self) -> bool:
        """Whether nobody is asked who they are."""
        return self._dispatch.access is None

    def handlers(self) -> grpc.GenericRpcHandler:
        """The service as gRPC wants it. Generic, since generated stubs would tie us to one version of grpcio."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {name: grpc.unary_unary_rpc_method_handler(self._method(kind)) for kind, (name, _) in METHODS.items()},
        )

    def _method(self, kind: type[Request]) -> Callable[[bytes, _Context], Awaitable[bytes]]:
        async def method(data: bytes, context: _Context) -> bytes:
            remaining = context.time_remaining()
            deadline = time.monotonic() + (_NO_DEADLINE if remaining is None else remaining)
            try:
                peer = self._peer_of(context)
                answer = self._dispatch.submit(
                    kind,
                    lambda: loads(kind, data),
                    dumps,
                    num_bytes=len(data),
                    deadline=deadline,
                    peer=peer.address,
                    principal=self._principal(peer, context),
                )
                return await asyncio.wrap_future(answer)
            except EmbershardError as error:
                await _abort(context, error)

        return method

    def _peer_of(self, context: _Context) -> Peer:
        """Who calls; NotAllowed where it is not known."""
        address = context.peer()
        if self._peers is None:
            return Peer(address)
        peer = self._peers.get(address)
        if peer is None:
            raise NotAllowed(
                what="a call", who=f"a peer at {address}", why="it did not come by the shard's own address"
            )
        return peer

    def _principal(self, peer: Peer, context: _Context) -> Principal | None:
        """Who calls; None where the shard asks nobody who they are. NotAuthenticated where it does not know them."""
        access = self._dispatch.access
        if access is None:
            return None
        token = None
        for key, value in context.invocation_metadata() or ():
            if key == "authorization":
                scheme, _, token = str(value).partition(" ")
                token = token.strip() if scheme.lower() == "bearer" else ""  # which nobody has
        return access.identify(peer, token)


class OtherVersions(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers clients of other versions of the contract with WrongVersion, which both of them know."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """A handler of any method of such a version's service."""
        other = re.match(OTHER_SERVICES, details.method)
        if other is None:
            return None
        theirs = int(other[1])
        error = WrongVersion(lowest=OLDEST_VERSION, highest=VERSION, own_lowest=theirs, own_highest=theirs)

        async def refuse(data: bytes, context: _Context) -> bytes:
            await _abort(context, error)

        return grpc.unary_unary_rpc_method_handler(refuse)


async def _abort(context: _Context, error: EmbershardError) -> NoReturn:
    error = errors.clipped(error)
    status, detail = errors.to_wire(error)
    await context.abort(grpc.StatusCode[status.value], error.message, trailing_metadata=((ERROR_KEY, detail),))
    raise AssertionError("abort raises")


def make_server(service: ShardService, healthy: health.aio.HealthServicer) -> grpc.aio.Server:
    """A server, not yet listening, of this service, of grpc.health.v1, and, where anyone may ask, of reflection."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((service.handlers(), OtherVersions()))
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    if service.is_open:
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server
