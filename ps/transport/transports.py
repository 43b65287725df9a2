"""All that brings requests to one shard, started and closed together."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckResponse

from embershard.proto.errors import BadCertificate, CannotListen, TLSRequired
from embershard.proto.messages import SERVICE
from embershard.ps.dispatch import Dispatch
from embershard.ps.options import ServerOptions
from embershard.ps.security.hidden_socket import HiddenSocket
from embershard.ps.security.peers import Peer
from embershard.ps.transport.address import BACKLOG, Address
from embershard.ps.transport.grpc import Refuses, ShardService, make_server, server_credentials
from embershard.ps.transport.pipe import PipedServer
from embershard.ps.transport.stream import StreamServer

if TYPE_CHECKING:
    from embershard.proto.security.credentials import CertificateFolder
    from embershard.ps.transport.tls import TLSPort
    from embershard.ps.transport.torch_rpc import RpcServer

_REPLY_SECONDS = 2.0  # for the last replies; a health check's open stream would use all of a longer time


@dataclass(frozen=True)
class Transports:
    """Bring requests to a shard: gRPC and streams at its one address, torch.distributed.rpc at its own if asked for."""

    grpc: list[grpc.aio.Server]
    health: health.aio.HealthServicer
    stream: StreamServer
    listeners: list[asyncio.Server]
    rpc: RpcServer | None
    hidden: list[HiddenSocket]  # at which gRPC listens: others come by the shard's own address
    following: asyncio.Task[None] | None  # of the files of certificates

    @classmethod
    async def start(
        cls,
        dispatch: Dispatch,
        sockets: list[socket.socket],
        options: ServerOptions,
        certificates: CertificateFolder | None,
    ) -> Transports:
        """Listen at the sockets, and answer that the shard does not serve yet, until `open`.

        CannotListen where gRPC cannot, or where torch.distributed.rpc is asked for at an address that is not to be had;
        BadCertificate where gRPC cannot use the certificate. No file is left behind then.
        """
        async with contextlib.AsyncExitStack() as undo:
            started = await cls._start(dispatch, sockets, options, certificates, undo)
            undo.pop_all()
            return started

    @classmethod
    async def _start(
        cls,
        dispatch: Dispatch,
        sockets: list[socket.socket],
        options: ServerOptions,
        certificates: CertificateFolder | None,
        undo: contextlib.AsyncExitStack,
    ) -> Transports:
        """Start all; where that fails `undo` removes what would outlive this process."""
        rpc = await _start_rpc(dispatch, options) if options.rpc else None
        if rpc is not None:
            undo.push_async_callback(rpc.close)
        healthy = health.aio.HealthServicer()
        for name in ("", SERVICE):
            await healthy.set(name, HealthCheckResponse.NOT_SERVING)
        is_tls = certificates is not None and sockets[0].family != socket.AF_UNIX
        hidden = [undo.enter_context(contextlib.closing(HiddenSocket())) for _ in range(3 if is_tls else 1)]
        piped = PipedServer(hidden[0].path)
        server = make_server(ShardService(dispatch, piped.peers, certificates), healthy, certificates)
        _bind(server, hidden[0])
        hidden[0].hide()
        piped.path = hidden[0].path
        servers, tls, following = [server], None, None
        if certificates is not None and is_tls:
            tls, refusing = _tls_port(server, certificates, hidden[1:], piped.peers)
            servers.append(refusing)
        for one in servers:
            await one.start()
        stream = StreamServer(dispatch, foreign=piped, tls=tls, max_connections=options.connections)
        if certificates is not None:
            from embershard.ps.transport.tls import follow

            following = asyncio.create_task(follow(certificates, stream.check_certificates))
        listeners = [await _listen(stream, sock) for sock in sockets]
        return cls(servers, healthy, stream, listeners, rpc, hidden, following)

    async def open(self) -> None:
        """Say to those who ask about the health of this server that it serves."""
        for name in ("", SERVICE):
            await self.health.set(name, HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Stop listening, and send the last replies."""
        for listener in self.listeners:
            listener.close()
        if self.following is not None:
            self.following.cancel()
        servers = (server.stop(_REPLY_SECONDS) for server in self.grpc)
        await asyncio.gather(self.stream.close(_REPLY_SECONDS), *servers)
        for hidden in self.hidden:
            hidden.close()
        if self.rpc is not None:
            await self.rpc.close()


async def _start_rpc(dispatch: Dispatch, options: ServerOptions) -> RpcServer:
    from embershard.ps.transport.torch_rpc import RpcServer  # imports torch, which a shard does not need otherwise

    place = Address.parse(options.rpc)
    return await RpcServer.start(dispatch, place.host, place.port, executes_pickles=options.rpc_executes_pickles)


def _tls_port(
    server: grpc.aio.Server, certificates: CertificateFolder, hidden: list[HiddenSocket], peers: dict[str, Peer]
) -> tuple[TLSPort, grpc.aio.Server]:
    """What connections over TCP go through, with a second gRPC server, which refuses those without TLS.

    They listen at the two `hidden` sockets; `peers` are the server's.
    """
    from embershard.ps.transport.tls import TLSPort  # a shard without TLS need not load this

    try:
        server.add_secure_port(hidden[0].target, server_credentials(certificates))
    except RuntimeError:  # gRPC has a TLS library of its own, which is stricter, and says why on stderr alone
        raise BadCertificate(
            path=str(certificates.tls.path),
            problem="unreadable",
            reason="gRPC cannot use its certificate or its key",
            remedy="Issue one with a key of RSA, P-256 or P-384, and its usage digitalSignature (`keys issue`)",
        ) from None
    refusing = grpc.aio.server()
    refusing.add_generic_rpc_handlers((Refuses(TLSRequired()),))
    _bind(refusing, hidden[1])
    for one in hidden:
        one.hide()
    return TLSPort(certificates, PipedServer(hidden[0].path, peers), PipedServer(hidden[1].path)), refusing


def _bind(server: grpc.aio.Server, hidden: HiddenSocket) -> None:
    """Have gRPC listen at a socket that has its name still; CannotListen where it cannot."""
    try:
        server.add_insecure_port(hidden.target)
    except RuntimeError as error:
        reason = (
            f"{str(error).partition(';')[0]}. `embershard doctor` checks the limits and the folders of this machine"
        )
        raise CannotListen(address="the socket of gRPC", reason=reason) from None


async def _listen(stream: StreamServer, sock: socket.socket) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    if sock.family == socket.AF_UNIX:
        return await loop.create_unix_server(stream.protocol, sock=sock, backlog=BACKLOG)
    return await loop.create_server(stream.protocol, sock=sock, backlog=BACKLOG)
