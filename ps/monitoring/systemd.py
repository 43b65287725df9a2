"""Tell systemd how this process is, where it runs as a service of Type=notify (sd_notify(3))."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def notify(state: str) -> None:
    """Send a state, as "READY=1"; nothing happens where systemd does not ask for it, or cannot be reached."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return
    name = "\0" + path[1:] if path.startswith("@") else path
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect(name)
        sock.sendall(state.encode())
