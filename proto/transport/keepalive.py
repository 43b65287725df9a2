"""TCP connections that end soon after the machine at the other end, or the way to it, is gone.

The system's own defaults are hours: to ask first after two of them, and to send again for a quarter of one.
"""

from __future__ import annotations

import socket
from contextlib import suppress

_IDLE_SECONDS, _PAUSE_SECONDS, _PROBES = 10, 5, 3  # also sooner than firewalls forget a connection
_UNANSWERED_SECONDS = 25  # less than half of a call's timeout: a call still has time for another connection


def keep_alive(sock: socket.socket) -> None:
    """Have the system ask the other end's system whether it is there while nothing is sent."""
    with suppress(OSError):  # the connection has ended
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("KEEPIDLE", _IDLE_SECONDS), ("KEEPINTVL", _PAUSE_SECONDS), ("KEEPCNT", _PROBES)):
            _set(sock, name, value)


def end_unanswered(sock: socket.socket) -> None:
    """Have the system end the connection once the other end's system has long not taken what was sent."""
    with suppress(OSError):
        _set(sock, "USER_TIMEOUT", 1000 * _UNANSWERED_SECONDS)


def _set(sock: socket.socket, name: str, value: int) -> None:
    option = getattr(socket, f"TCP_{name}", None)  # which only some systems have
    if option is not None:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
