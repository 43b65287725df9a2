"""A connection passed on to a Unix socket, byte for byte, no faster than either side takes them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import cast

_FLUSH_SECONDS = 30.0  # for what one end had not yet read when the other one left

_log = logging.getLogger(__name__)
_connecting: set[asyncio.Task[None]] = set()  # the loop itself holds tasks only weakly


def pipe_to(path: str, transport: asyncio.Transport, received: bytes, ended: Callable[[], None] = lambda: None) -> None:
    """Pipe `transport` to the Unix socket at `path`, which first gets `received`; call `ended` at the end."""
    near = _End(ended)
    near.transport = transport
    transport.pause_reading()
    transport.set_protocol(near)
    transport.set_write_buffer_limits()  # the usual ones: what is read there waits for what is read here
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
    ended = False  # whether its peer has sent everything

    def __init__(self, closed: Callable[[], None] = lambda: None) -> None:
        self._closed = closed

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
        self.ended = True
        if self.other is not None and not self.other.ended:
            self.other.transport.write_eof()
            return True  # the other direction goes on until its own end
        return False  # closes it, and with it the other

    def connection_lost(self, error: Exception | None) -> None:
        self._closed()
        if self.other is not None:
            self.other.transport.close()
            asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self.other.transport.abort)
