"""A connection passed on to a Unix socket, byte for byte, no faster than either side takes them."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import cast

_log = logging.getLogger(__name__)
_connecting: set[asyncio.Task[None]] = set()  # the loop itself holds tasks only weakly


def pipe_to(path: str, transport: asyncio.Transport, received: bytes) -> None:
    """Pipe `transport` to the Unix socket at `path`, which first gets what was `received` already."""
    near = _End()
    near.transport = transport
    transport.pause_reading()
    transport.set_protocol(near)
    task = asyncio.get_running_loop().create_task(_connect(path, near, received))
    _connecting.add(task)
    task.add_done_callback(_connecting.discard)


async def _connect(path: str, near: _End, received: bytes) -> None:
    far = _End()
    far.other = near  # before it connects: a gRPC server speaks first
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.connect(path)  # at once, or not at all; uvloop itself does not know abstract names
        await asyncio.get_running_loop().create_unix_connection(lambda: far, sock=sock)
    except OSError as error:
        sock.close()
        _log.warning("cannot pass a connection on to %s: %s", path, error)
        near.transport.abort()
        return
    near.other = far
    far.transport.write(received)
    if near.transport.is_closing():
        far.transport.close()
    else:
        near.transport.resume_reading()


class _End(asyncio.Protocol):
    """One end of a pipe: what arrives here leaves at the other."""

    transport: asyncio.Transport
    other: _End | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop has classes of its own

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def eof_received(self) -> bool:
        if self.other is not None and self.other.transport.can_write_eof():
            self.other.transport.write_eof()
        return True  # the other direction goes on until its own end

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.close()
