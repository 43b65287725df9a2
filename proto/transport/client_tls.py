"""A client's TLS to one shard: whose certificate it must be, and whether both sides trust each other."""

from __future__ import annotations

import asyncio
import socket
import time

from cryptography import x509

from embershard.proto.errors import BadFrame, CertificateRefused, EmbershardError, TLSNotOffered, UntrustedCertificate
from embershard.proto.security.credentials import CertificateFolder, Credentials, grpc_knows_key, read_certificate
from embershard.proto.security.handshake import HANDSHAKE_SECONDS, start_tls
from embershard.proto.security.problems import Problem, explain
from embershard.proto.security.tls import TLS
from embershard.proto.wire import HELLO_BYTES, Agreed, Feature, client_hello, read_server_hello

_UNKNOWN_KEY = {
    "problem": Problem.OTHER,
    "reason": "gRPC does not know the kind of its key",
    "remedy": "Issue one with an RSA key or a key of the curve P-256 or P-384, or use the transport stream",
}


class ClientTLS:
    """TLS of a client's connections to `address`. BadCertificate where its certificates cannot be used."""

    def __init__(self, tls: TLS, address: str) -> None:
        self.address = address
        host = address.rpartition("://")[2].rpartition(":")[0].strip("[]")
        self.server_name = tls.server_name or host
        self._folder = CertificateFolder(tls)
        self._looked = time.monotonic()

    def credentials(self) -> Credentials:
        """The current certificates, read again when a connection is made, at most once in a poll_interval."""
        now = time.monotonic()
        if now - self._looked > self._folder.tls.poll_interval.total_seconds():
            self._looked = now
            self._folder.refresh()
        return self._folder.current

    async def handshake(self, outer: asyncio.Transport, protocol: asyncio.BaseProtocol) -> asyncio.Transport:
        """Have a connection go on inside TLS; UntrustedCertificate, CertificateRefused, or OSError where it breaks."""
        credentials = self.credentials()
        try:
            inner = await start_tls(outer, protocol, credentials.client_context, server_hostname=self.server_name)
        except OSError as error:
            raise self.explain(error) or error from None
        certificate = inner.get_extra_info("ssl_object").getpeercert(True)
        credentials.check_peer(read_certificate(certificate), self._peer)
        return inner

    def explain(self, error: Exception) -> EmbershardError | None:
        """Turn an error of the connection into one that names the certificate's problem; None where there is none."""
        return explain(error, self._peer, self.server_name)

    @property
    def _peer(self) -> str:
        return f"the shard at {self.address}"

    def diagnose(self) -> EmbershardError | None:
        """Why gRPC's handshake failed, which it does not say: the `stream` transport's one, at the same port, does.

        None where that one succeeds with certificates that gRPC can use, too, or where nobody answers it.
        """
        try:
            if not grpc_knows_key(self.certificate_of_shard()):
                return UntrustedCertificate(peer=self._peer, **_UNKNOWN_KEY)
            if not grpc_knows_key(self.credentials().leaf):
                return CertificateRefused(peer=self._peer, **_UNKNOWN_KEY)
        except EmbershardError as error:
            return None if isinstance(error, BadFrame) else error
        except OSError:
            pass
        return None

    def certificate_of_shard(self) -> x509.Certificate:
        """Return the shard's certificate once both sides trust each other; an error, or OSError, says why not."""
        host, _, port = self.address.rpartition("://")[2].rpartition(":")
        credentials = self.credentials()
        try:
            with socket.create_connection((host.strip("[]"), int(port)), HANDSHAKE_SECONDS) as outer:
                outer.settimeout(HANDSHAKE_SECONDS)
                if Feature.TLS not in _say_hello(outer, Feature.TLS).features:
                    raise TLSNotOffered(address=self.address, reason="it was started without certificates")
                with credentials.client_context.wrap_socket(outer, server_hostname=self.server_name) as inner:
                    data = inner.getpeercert(True)
                    assert data is not None
                    certificate = read_certificate(data)
                    credentials.check_peer(certificate, self._peer)
                    _say_hello(inner, Feature(0))  # only now comes what the shard says to our certificate
                    return certificate
        except OSError as error:
            raise self.explain(error) or error from None


def _say_hello(sock: socket.socket, features: Feature) -> Agreed:
    sock.sendall(client_hello(features))
    answer = b""
    while len(answer) < HELLO_BYTES:
        received = sock.recv(HELLO_BYTES - len(answer))
        if not received:
            raise ConnectionResetError
        answer += received
    return read_server_hello(answer)
