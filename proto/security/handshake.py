"""The TLS handshake of a connection that has begun without TLS, the same for both of its sides."""

from __future__ import annotations

import asyncio
import os
import ssl
import weakref
from contextlib import suppress
from typing import Any

HANDSHAKE_SECONDS = 5.0
_SHUTDOWN_SECONDS = 5.0  # for the other side to end the session, too


class HandshakeContext(ssl.SSLContext):
    """A context whose handshakes, where they fail, tell the other side why before its connection is cut.

    asyncio and uvloop cut it without sending the alert that OpenSSL has written: the other side would never learn that
    its certificate has expired.
    """

    def for_connection(self, transport: asyncio.Transport) -> ssl.SSLContext:
        """This context, for the handshake of one connection."""
        return _OneHandshake(self, transport)


class _OneHandshake(ssl.SSLContext):
    def __new__(cls, shared: HandshakeContext, transport: asyncio.Transport) -> _OneHandshake:
        return super().__new__(cls, shared.protocol)

    def __init__(self, shared: HandshakeContext, transport: asyncio.Transport) -> None:
        self._shared, self._transport = shared, transport

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **options: Any) -> ssl.SSLObject:
        connection = self._shared.wrap_bio(incoming, outgoing, *args, **options)
        held = weakref.ref(connection)  # which holds this function: a cycle would keep both until a collection

        def do_handshake() -> None:
            known = held()
            assert known is not None  # it is what calls
            try:
                type(known).do_handshake(known)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError:
                self._send(outgoing.read())
                raise

        connection.do_handshake = do_handshake  # type: ignore[method-assign]
        return connection

    def _send(self, alert: bytes) -> None:
        """Write to the socket itself: what the transport holds is dropped when it is cut."""
        if alert and not self._transport.get_write_buffer_size():
            with suppress(OSError):
                os.write(self._transport.get_extra_info("socket").fileno(), alert)


async def start_tls(
    transport: asyncio.Transport,
    protocol: asyncio.BaseProtocol,
    context: HandshakeContext,
    *,
    server_hostname: str | None = None,
) -> asyncio.Transport:
    """Have a connection go on inside TLS; as the server where there is no `server_hostname` to expect.

    OSError, which ssl.SSLError is, where the handshake fails; `protocol` may then have had its connection_lost, or not.
    """
    inner = await asyncio.get_running_loop().start_tls(
        transport,
        protocol,
        context.for_connection(transport),
        server_side=server_hostname is None,
        server_hostname=server_hostname,
        ssl_handshake_timeout=HANDSHAKE_SECONDS,
        ssl_shutdown_timeout=_SHUTDOWN_SECONDS,
    )
    if inner is None or inner.get_extra_info("ssl_object") is None or inner.is_closing():
        # uvloop: an end without an error during the handshake looks like its success
        raise ConnectionResetError("the other side ended the connection during the TLS handshake")
    return inner
