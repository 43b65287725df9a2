"""TLS at a shard's TCP port: handshakes of the `stream` transport here, those of gRPC passed on to its server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from cryptography import x509

from embershard.proto.security.credentials import CertificateFolder, identity_of, read_certificate
from embershard.proto.security.handshake import start_tls
from embershard.proto.security.problems import explain
from embershard.ps.transport.pipe import PipedServer

MAX_HANDSHAKES = 1000  # at once
_OVERDUE_SECONDS = 300.0  # for a connection at the end of its life to be idle for a moment
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class TLSPort:
    """TLS of a shard's TCP connections: its certificates, and the handshakes under way.

    `grpc` is where gRPC terminates its own TLS, `refusing_grpc` where it tells clients without TLS to use it.
    """

    certificates: CertificateFolder
    grpc: PipedServer | None = None
    refusing_grpc: PipedServer | None = None
    max_handshakes: int = MAX_HANDSHAKES
    handshakes: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)  # the loop itself holds them only weakly

    def is_full(self) -> bool:
        """Whether there are so many handshakes that no further one begins."""
        return self.handshakes >= self.max_handshakes

    def begin(self, handshake: Coroutine[None, None, None]) -> None:
        """Run a handshake as a task, which counts as under way until it ends."""
        self.handshakes += 1
        task = asyncio.get_running_loop().create_task(handshake)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.handshakes -= 1

    async def handshake(
        self, outer: asyncio.Transport, protocol: asyncio.BaseProtocol, peer: str
    ) -> tuple[asyncio.Transport, Inside]:
        """Have a connection go on inside TLS; UntrustedCertificate, CertificateRefused, or OSError where it breaks."""
        try:
            transport = await start_tls(outer, protocol, self.certificates.current.server_context)
            certificate = read_certificate(transport.get_extra_info("ssl_object").getpeercert(True))
            return transport, Inside(self.certificates, certificate, outer, f"the client at {peer}")
        except (OSError, ValueError) as error:
            raise explain(error, f"the client at {peer}") or error from None


class Inside:
    """A connection inside TLS: who its peer is, and how long it may last."""

    def __init__(
        self, certificates: CertificateFolder, certificate: x509.Certificate, outer: asyncio.Transport, peer: str
    ) -> None:
        self.identity = identity_of(certificate)
        self._certificates, self._certificate, self._outer, self._peer = certificates, certificate, outer, peer
        self._end = time.monotonic() + certificates.tls.connection_lifetime.total_seconds()

    @property
    def unsent_bytes(self) -> int:
        """Bytes, encrypted, that the system has not taken."""
        return self._outer.get_write_buffer_size()

    def check(self) -> None:
        """UntrustedCertificate where the peer's certificate was revoked."""
        self._certificates.current.check_peer(self._certificate, self._peer)

    def is_over(self, now: float, idle_seconds: float) -> bool:
        """Whether it has to end; `now` is of the monotonic clock. Between two calls, if that can be."""
        return now > self._end and (idle_seconds > 0.1 or now > self._end + _OVERDUE_SECONDS)


async def follow(certificates: CertificateFolder, changed: Callable[[], None]) -> None:
    """Look at the files of certificates for ever, and say when new ones are in use."""
    while True:
        await asyncio.sleep(certificates.tls.poll_interval.total_seconds())
        try:
            if await asyncio.to_thread(certificates.refresh):
                changed()
        except Exception:  # certificates must not stay for ever for one bad moment
            _log.exception("cannot look at %s", certificates.tls.path)
