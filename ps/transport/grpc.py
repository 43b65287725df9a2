"""The `grpc` transport's side of a shard: bytes in, bytes out, every error with its status and its fields."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from embershard.proto import errors
from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.errors import EmbershardError, InvalidRequest, NotAllowed, UntrustedCertificate, WrongVersion
from embershard.proto.messages import METHODS, OTHER_SERVICES, SERVICE, Request
from embershard.proto.protobuf import dumps, loads
from embershard.proto.transport.grpc import ERROR_KEY, INSTANCE_KEY
from embershard.proto.wire import OLDEST_VERSION, VERSION
from embershard.ps.dispatch import Dispatch
from embershard.ps.security.access import Principal
from embershard.ps.security.peers import Peer

if TYPE_CHECKING:
    from embershard.proto.security.credentials import CertificateFolder, Credentials

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES + 2**20),  # the shard refuses a pull that is too large itself
    # Calls of one connection. Without a limit, one that opens calls and resets them has those of others cancelled, as
    # gRPC keeps about a thousand that it has not begun. A proxy may bring the waiting pulls of many workers over one.
    ("grpc.max_concurrent_streams", 1000),
    ("grpc.so_reuseport", 0),  # on by default, and then two shards share a port without a word
    # Clients ping every 30 s while they wait for a reply; by default the third ping would end their connection.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_time_ms", 60_000),  # a worker's machine that vanished is noticed, and its calls are dropped
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.server_handshake_timeout_ms", 10_000),  # for who connects and says nothing, as on the other transport
    ("grpc.max_connection_idle_ms", 300_000),  # without a call; clients connect again when they have one
]
_log = logging.getLogger(__name__)

_AGE_GRACE_MS = 300_000  # for the calls of a connection that is too old
_NO_DEADLINE = 24 * 3600.0  # seconds for a caller that set none

_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


class ShardService:
    """Handlers for one shard, on the event loop.

    `peers` are those whose pipes lead here, by the pipes' names: a call that comes by another way is refused. Without
    them gRPC itself is at the other end of every connection. With `certificates`, those of its TLS port.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        peers: Mapping[str, Peer] | None = None,
        certificates: CertificateFolder | None = None,
    ) -> None:
        self._dispatch = dispatch
        self._peers = peers
        self._certificates = certificates

    @property
    def is_open(self) -> bool:
        """Whether nobody is asked who they are."""
        return self._dispatch.access is None

    def handlers(self) -> grpc.GenericRpcHandler:
        """The service as gRPC wants it. Generic, since generated stubs would tie us to one version of grpcio.

        A unary call is a stream of one message to a server that asks for it: who may not call sends no more than what
        fits gRPC's window.
        """
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {name: grpc.stream_unary_rpc_method_handler(self._method(kind)) for kind, (name, _) in METHODS.items()},
        )

    def _method(self, kind: type[Request]) -> Callable[[object, _Context], Awaitable[bytes]]:
        counters = self._dispatch.counters.transports["grpc"]

        async def method(_: object, context: _Context) -> bytes:
            arrived = time.monotonic()
            if self._is_for_another(context):
                await context.abort(grpc.StatusCode.UNAVAILABLE, "another process of the shard answers now")
            try:
                identity = self._peer_identity(context)
                peer = self._peer_of(context)
                principal = self._principal(peer, identity, context)
                data = await context.read()
                remaining, arrived = context.time_remaining(), time.monotonic()
                if data is grpc.aio.EOF:
                    raise InvalidRequest(reason="the call brought no message")
                counters.received_bytes += len(data)
                deadline = arrived + (_NO_DEADLINE if remaining is None else remaining)
                answer = self._dispatch.submit(
                    kind,
                    lambda: loads(kind, data),
                    dumps,
                    num_bytes=len(data),
                    deadline=deadline,
                    peer=peer.address,
                    principal=principal,
                )
                reply = await asyncio.wrap_future(answer)
            except EmbershardError as error:
                counters.answered(kind, time.monotonic() - arrived, error)
                if isinstance(error, UntrustedCertificate):  # revoked, which gRPC's handshake does not look at
                    self._dispatch.counters.rejected["tls"] += 1
                await _abort(context, error)
            except asyncio.CancelledError:
                counters.expired(kind)
                raise
            counters.answered(kind, time.monotonic() - arrived, None)
            counters.sent_bytes += len(reply)
            return reply

        return method

    def _is_for_another(self, context: _Context) -> bool:
        """Whether the caller means another process of the shard, whose rows this one may not have."""
        instance = self._dispatch.instance
        return any(key == INSTANCE_KEY and value != instance for key, value in context.invocation_metadata() or ())

    def _peer_identity(self, context: _Context) -> str:
        """Whom the caller's certificate names; nobody without TLS. UntrustedCertificate where it was revoked."""
        if self._certificates is None:
            return ""
        pem = context.auth_context().get("x509_pem_cert")
        if not pem:
            return ""  # by a Unix socket
        from embershard.proto.security.credentials import identity_of, read_certificate
        from embershard.proto.security.problems import explain

        try:
            certificate = read_certificate(bytes(pem[0]))
            identity = identity_of(certificate)
        except ValueError as error:
            raise explain(error, f"the client at {context.peer()}") or error from None
        self._certificates.current.check_peer(certificate, f"the client {identity!r}")
        return identity

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

    def _principal(self, peer: Peer, identity: str, context: _Context) -> Principal | None:
        """Who calls; None where the shard asks nobody who they are. NotAuthenticated where it does not know them."""
        access = self._dispatch.access
        if access is None:
            return None
        token = None
        for key, value in context.invocation_metadata() or ():
            if key == "authorization":
                scheme, _, token = str(value).partition(" ")
                token = token.strip() if scheme.lower() == "bearer" else ""  # which nobody has
        return access.identify(peer, token, [identity] if identity else ())


class OtherVersions(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers clients of other versions of the contract with WrongVersion, which both of them know."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """A handler of any method of such a version's service."""
        other = re.match(OTHER_SERVICES, details.method)
        if other is None or (theirs := int(other[1])) == VERSION:  # a method that this version has not
            return None
        error = WrongVersion(lowest=OLDEST_VERSION, highest=VERSION, own_lowest=theirs, own_highest=theirs)
        return Refuses(error).service(details)


async def _abort(context: _Context, error: EmbershardError) -> NoReturn:
    error = errors.clipped(error)
    status, detail = errors.to_wire(error)
    await context.abort(grpc.StatusCode[status.value], error.message, trailing_metadata=((ERROR_KEY, detail),))
    raise AssertionError("abort raises")


class Refuses(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers every call with one error."""

    def __init__(self, error: EmbershardError) -> None:
        self._error = error

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """A handler of any method."""

        async def refuse(_: object, context: _Context) -> bytes:
            await _abort(context, self._error)

        return grpc.stream_unary_rpc_method_handler(refuse)


def make_server(
    service: ShardService, healthy: health.aio.HealthServicer, certificates: CertificateFolder | None = None
) -> grpc.aio.Server:
    """A server, not yet listening, of this service, of grpc.health.v1, and, where anyone may ask, of reflection."""
    options = list(SERVER_OPTIONS)
    if certificates is not None:
        age_ms = int(certificates.tls.connection_lifetime.total_seconds() * 1000)
        options += [("grpc.max_connection_age_ms", age_ms), ("grpc.max_connection_age_grace_ms", _AGE_GRACE_MS)]
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((service.handlers(), OtherVersions()))
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    if service.is_open:
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server


def server_credentials(certificates: CertificateFolder) -> grpc.ServerCredentials:
    """Credentials of a port that demands certificates of its clients, and follows those of the folder."""

    from embershard.proto.security.credentials import grpc_knows_key

    def config(current: Credentials) -> grpc.ServerCertificateConfiguration:
        if not grpc_knows_key(current.leaf):
            what = f"gRPC does not know the kind of key of the certificate of {certificates.tls.path}"
            _log.warning("%s: its clients cannot connect with it; issue one of RSA, P-256 or P-384", what)
        pair = current.key, current.certificate
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=current.authorities)

    used = certificates.current

    def fetch() -> grpc.ServerCertificateConfiguration | None:  # at every handshake, in a thread of gRPC's
        nonlocal used
        if certificates.current is used:
            return None  # as before
        used = certificates.current
        return config(used)

    return grpc.dynamic_ssl_server_credentials(config(used), fetch, require_client_authentication=True)
