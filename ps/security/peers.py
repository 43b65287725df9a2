"""Who is at the other end of a connection, by what the system says of it."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection: its address, for people, and the user of a Unix socket's."""

    address: str  # "10.0.0.2:51234"; "uid:1000" at a Unix socket
    uid: int | None = None  # of a Unix socket, where the system tells it

    @property
    def is_admitted(self) -> bool:
        """Whether it may speak at all: a Unix socket is for the shard's own user and for root.

        Systems that do not tell the user have sockets with a path only, whose mode keeps others out.
        """
        return self.uid is None or self.uid in (0, os.geteuid())


def peer_of(sock: socket.socket) -> Peer:
    """The peer of a connected socket. PermissionError where the system cannot say whose it is."""
    if sock.family != socket.AF_UNIX:
        try:
            host, port = sock.getpeername()[:2]
        except OSError:  # it has left already
            return Peer("")
        return Peer(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    if not hasattr(socket, "SO_PEERCRED"):
        return Peer("unix")
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return Peer(f"uid:{uid}", uid)
