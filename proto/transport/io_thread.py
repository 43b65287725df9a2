"""The I/O thread of this process, and how it finds a shard that runs on the same machine."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
import threading

import uvloop

from embershard.proto.transport.shared_socket import Poller
from embershard.proto.wire import local_socket

_END_SECONDS = 5.0  # for what the thread does now

_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None
_poller: Poller | None = None
_lock = threading.Lock()
_has_ended = False


def io_loop() -> asyncio.AbstractEventLoop:
    """The loop of this process's I/O thread, started at the first call; a forked child starts its own.

    RuntimeError where gevent has replaced threads: the loop would keep all of them waiting for ever.
    """
    global _loop, _thread
    with _lock:
        if _loop is None:
            gevent = sys.modules.get("gevent.monkey")
            if gevent is not None and gevent.is_module_patched("threading"):
                raise RuntimeError(
                    "a client of shards needs threads, which gevent.monkey has replaced by greenlets in this process; "
                    "connect in a process without gevent.monkey.patch_all()"
                )
            _loop = uvloop.new_event_loop()
            _thread = threading.Thread(target=_loop.run_forever, name="embershard-io", daemon=True)
            _thread.start()
        return _loop


def io_poller() -> Poller | None:
    """Return what reads the sockets that all threads of this process share; None where the system has no epoll."""
    global _poller
    loop = io_loop()
    with _lock:
        if _poller is None and sys.platform == "linux":
            _poller = Poller(loop)
        return _poller


def runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether a loop is this process's, and not that of the parent which forked it."""
    return loop is _loop


def _forget() -> None:
    """In a forked child: its parent's thread is not here, and may have held the lock."""
    global _loop, _thread, _poller, _lock
    _loop, _thread, _poller, _lock = None, None, None, threading.Lock()


def has_ended() -> bool:
    """Whether the thread has ended, because the interpreter ends: what waits for its loop would wait in vain."""
    return _has_ended


def end() -> None:
    """End the thread: uvloop crashes the process where a timer or a socket wakes it behind the interpreter's end."""
    global _has_ended
    if _loop is not None and _thread is not None:
        _has_ended = True
        _loop.call_soon_threadsafe(_loop.stop)
        _thread.join(_END_SECONDS)


os.register_at_fork(after_in_child=_forget)


async def connect_beside(host: str, port: int) -> socket.socket | None:
    """A connection to the Unix socket beside a TCP address of this machine; None where there is none."""
    if sys.platform != "linux":
        return None
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    own = [str(place[0]) for family, _, _, _, place in found if _is_own(family, str(place[0]))]
    # the last ones stand for every address of this machine
    for ip in [*own, "0.0.0.0", "::"] if own else []:
        if (sock := connect_local(local_socket(ip, port))) is not None:
            return sock
    return None


def _is_own(family: int, ip: str) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((ip, 0))  # the system gives nobody else's address
        except OSError:
            return False
    return True


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end of a Unix socket, as the system says; -1, -1 where it does not."""
    if not hasattr(socket, "SO_PEERCRED"):
        return -1, -1
    process, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process, uid


def connect_local(name: str) -> socket.socket | None:
    """A connection to a Unix socket of this user; None where there is none.

    Anyone may take a free name, and a shard of root's serves no other user at a Unix socket: both are for TCP.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.connect(name)  # at once, or not at all; uvloop itself does not know abstract names
        if peer_credentials(sock)[1] == os.getuid():
            return sock
    except OSError:
        pass
    sock.close()
    return None
