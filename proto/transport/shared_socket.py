"""Sockets that the thread which waits for a reply reads itself, so that no other thread has to wake up for it."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

_MAX_PIECES = 1000  # of one sendmsg; Linux takes 1,024
_MAX_READS = 16  # of one socket in a row; then it is the others' turn
# A thread that reads looks so often whether another one has read its reply: of two that read at once, the wrong one may
# take what was to wake it.
_LONGEST_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 1.0  # for which a thread waits for another one that seems to read

_log = logging.getLogger(__name__)


class Poller:
    """Reads what arrives at all SharedSockets of this process.

    Mostly one thread at a time does: one that waits for a reply (`run_until`), and else the I/O thread of `loop`. Which
    one is only noted, for speed: each socket has a lock, and two that read at once do no harm. So whatever Ctrl-C
    interrupts, replies are read. In a forked child, whose sockets are its parent's, it does nothing. It needs epoll.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._process = os.getpid()
        self._sockets = select.epoll()
        # The loop watches this one, and the sockets through it: one call of the system, which any thread may make,
        # switches whether the loop wakes up.
        self._switch = select.epoll()
        self._switch.register(self._sockets, _armed())
        self._reader = 0  # the thread that reads; 0: the loop
        self._is_polling = False  # whether it waits for the sockets now
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ready: dict[int, Callable[[int], None]] = {self._wake: self._woken}
        self._sockets.register(self._wake, select.EPOLLIN)
        loop.call_soon_threadsafe(loop.add_reader, self._switch.fileno(), self._read_on_loop)

    def begin(self) -> None:
        """Have this thread read, if none does, until `end`: it is about to send, and to wait for the replies.

        Else the loop would wake up for a reply that comes while further requests are sent.
        """
        if not self._reader and self._is_here():
            self._reader = threading.get_ident()
            self._switch.modify(self._sockets, 0)

    def end(self) -> None:
        """Have the loop read again, if this thread has read; another thread may begin."""
        if self._reader == threading.get_ident() and self._is_here():
            self._reader = 0  # before the loop may look: it does not look again until it is told to
            self._switch.modify(self._sockets, _armed())

    def run_until(self, is_done: Callable[[], bool], end: float) -> bool:
        """Read in this thread until `is_done()` or the time `end` (monotonic); False where another thread reads."""
        if not self._is_here():
            return False
        me = threading.get_ident()
        began = self._reader != me
        try:
            self.begin()
            if self._reader != me:
                return False
            self._is_polling = True
            while not is_done() and (left := end - time.monotonic()) > 0:
                self._read(min(left, _LONGEST_POLL_SECONDS))
            return True
        finally:
            if self._reader == me:
                self._is_polling = False
            if began:
                self.end()

    def take_over(self, waited: float) -> None:
        """Let the next thread that waits read: this one has waited for so many seconds for another one to read."""
        if self._is_here() and (not self._is_polling or waited > _PATIENCE_SECONDS):
            self._reader = 0

    def wake(self) -> None:
        """Have the thread that reads look at its `is_done` again."""
        os.eventfd_write(self._wake, 1)

    def add(self, sock: socket.socket, ready: Callable[[int], None]) -> None:
        """Call `ready` with epoll's events when the socket can be read."""
        self._ready[sock.fileno()] = ready
        self._sockets.register(sock, select.EPOLLIN)

    def watch(self, sock: socket.socket, *, writes: bool) -> None:
        """Call `ready` also when the socket can be written, or no more."""
        self._sockets.modify(sock, select.EPOLLIN | select.EPOLLOUT if writes else select.EPOLLIN)

    def remove(self, sock: socket.socket) -> None:
        """Forget a socket that is about to be closed."""
        if self._is_here():
            self._sockets.unregister(sock)
            del self._ready[sock.fileno()]

    def _is_here(self) -> bool:
        return self._process == os.getpid()

    def _read_on_loop(self) -> None:
        self._switch.poll(0)  # switches it off
        if not self._reader:  # else the thread that reads switches it on again when it ends
            try:
                self._read(0)
            finally:
                self._switch.modify(self._sockets, _armed())

    def _read(self, seconds: float) -> None:
        for number, events in self._sockets.poll(seconds):
            if (ready := self._ready.get(number)) is not None:
                ready(events)

    def _woken(self, events: int) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)


def _armed() -> int:
    """The events that wake the loop up once."""
    return select.EPOLLIN | select.EPOLLONESHOT


class SocketProtocol(asyncio.BufferedProtocol):
    """The protocol of a connection whose socket is shared: asyncio's, and told at once when the socket is closed."""

    def ended(self, reason: str) -> None:
        """Learn that nothing more is sent or received, for this reason; `connection_lost` follows soon."""


class SharedSocket:
    """Receives and sends on the socket of a connection, in place of its asyncio transport, from any thread.

    The transport stays the connection's owner: it ends it, and tells the protocol. All calls of the protocol, and all
    of these methods, happen with `lock` held.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        protocol: SocketProtocol,
        lock: threading.RLock,
        poller: Poller,
    ) -> None:
        self._transport, self._protocol, self._lock, self._poller = transport, protocol, lock, poller
        transport.pause_reading()
        sock = transport.get_extra_info("socket")
        self._socket = socket.socket(sock.family, sock.type, fileno=os.dup(sock.fileno()))
        self._socket.setblocking(False)
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._is_open = True
        poller.add(self._socket, self._on_ready)

    def get_write_buffer_size(self) -> int:
        """Bytes that wait until the system takes them."""
        return self._unsent_bytes

    def writelines(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Send these, or as much as the system takes now; the rest leaves from its memory as soon as it can."""
        views = [memoryview(piece) for piece in pieces if len(piece)]
        num_bytes = sum(map(len, views))
        try:
            waits = bool(self._unsent)  # then others are sent before
            self._unsent.extend(views)
            self._unsent_bytes += num_bytes
            if not waits:
                self._send()
                if self._unsent and self._is_open:
                    self._poller.watch(self._socket, writes=True)
        except BaseException:  # Ctrl-C: what was sent is not known
            self.abort()
            raise

    def abort(self, reason: str = "") -> None:
        """End the connection; the protocol's connection_lost follows soon, on the loop."""
        if self._is_open:
            self._is_open = False
            self._protocol.ended(reason)
            self._poller.remove(self._socket)
            self._socket.close()
            self._unsent.clear()
            self._unsent_bytes = 0
            self._poller.loop.call_soon_threadsafe(self._transport.abort)

    def _on_ready(self, events: int) -> None:
        with self._lock:
            try:
                if events & ~select.EPOLLOUT and self._is_open:  # first: it may say why it ends
                    self._receive()
                if events & select.EPOLLOUT and self._is_open:
                    self._send()
                    if not self._unsent and self._is_open:
                        self._poller.watch(self._socket, writes=False)
            except BaseException as error:  # bytes were taken and not counted: nothing that follows could be understood
                self.abort()
                if not isinstance(error, Exception):
                    raise
                _log.exception("a defect while reading a connection, which ends")

    def _send(self) -> None:
        unsent = self._unsent
        while unsent:
            pieces = list(unsent) if len(unsent) < _MAX_PIECES else [unsent[i] for i in range(_MAX_PIECES)]
            try:
                sent = self._socket.sendmsg(pieces)
            except BlockingIOError:
                return
            except OSError as error:
                unsent.clear()
                self._receive()  # the shard may have said why it ended the connection
                self.abort(error.strerror or str(error))
                return
            self._unsent_bytes -= sent
            while unsent and sent >= len(unsent[0]):
                sent -= len(unsent.popleft())
            if sent:
                unsent[0] = unsent[0][sent:]

    def _receive(self) -> None:
        for _ in range(_MAX_READS):
            buffer = cast(memoryview, self._protocol.get_buffer(-1))
            try:
                num_bytes = self._socket.recv_into(buffer)
            except BlockingIOError:
                return
            except OSError as error:
                self.abort(error.strerror or str(error))
                return
            if not num_bytes:
                self.abort()
                return
            self._protocol.buffer_updated(num_bytes)
            if num_bytes < len(buffer) or not self._is_open:
                return
