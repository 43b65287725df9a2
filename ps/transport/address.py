"""Where a shard listens."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import stat
import sys
from dataclasses import dataclass

from embershard.proto.errors import CannotListen
from embershard.proto.wire import local_socket

BACKLOG = 1024  # connections that wait to be taken: hundreds of workers may come at once
_LONGEST_PATH = 103  # 107 on Linux, 103 on macOS

_log = logging.getLogger("embershard.ps")


@dataclass(frozen=True)
class Address:
    """(host, port), or the path of a Unix socket."""

    text: str
    host: str = ""
    port: int = 0
    path: str = ""

    @staticmethod
    def parse(text: str) -> Address:
        """The address of "host:port", "[v6]:port" or "unix:/path"; CannotListen says what is wrong with it."""
        if text.startswith("unix:"):
            if not text[5:]:
                raise CannotListen(address=text, reason="write unix:/path/of/the/socket")
            return Address(text, path=text[5:])
        name, _, port = text.rpartition(":")
        if not (name and port.isascii() and port.isdigit() and int(port) < 65536):
            raise CannotListen(address=text, reason="write host:port, with a port of 0..65535, or unix:/path")
        try:
            # one literal address of those that a name has
            found = socket.getaddrinfo(name.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            reason = (
                f"unknown host {name!r} ({error.strerror}); name an address of this machine, or 0.0.0.0 for all of "
            )
            reason += "them; --advertise names it to clients"
            raise CannotListen(address=text, reason=reason) from None
        found.sort(key=lambda entry: entry[0] != socket.AF_INET)
        return Address(text, host=str(found[0][4][0]), port=int(port))

    @property
    def is_local(self) -> bool:
        """Whether no other machine reaches it."""
        return bool(self.path) or ipaddress.ip_address(self.host).is_loopback

    def check(self, insecure: bool, *, encrypted: bool = False, asks: bool = False) -> None:
        """CannotListen where others than this machine could reach the shard and nobody said that they may.

        `encrypted`: its connections are; `asks`: a peer has to say who it is. With both, others may come.
        """
        if self.is_local or (encrypted and asks):
            return
        missing = [
            text for text, there in (("encryption (--tls)", encrypted), ("access.yaml (--access)", asks)) if not there
        ]
        if not insecure:
            raise CannotListen(
                address=self.text,
                reason=f"it can be reached from other machines, and there is no {' and no '.join(missing)}: "
                "anyone there could read and change the model. Give the shard certificates (--tls), listen on "
                "127.0.0.1, or pass --insecure if the network keeps strangers out",
            )
        who = "anyone who reaches" if not asks else "who listens to the network of"
        _log.warning("--insecure: %s %s can read and change the model", who, self.text)

    def check_free(self) -> None:
        """CannotListen where a TCP port is not to be had now; `listen` comes after what takes long."""
        if not self.path:
            with self._socket() as probe:
                self._bind(probe, (self.host, self.port), listens=False)

    def listen(self) -> list[socket.socket]:
        """The sockets to serve on: the address itself, and for a TCP port a Unix socket beside it, if that works.

        CannotListen where the address is not to be had.
        """
        if self.path:
            return [self._listen_at_path()]
        main = self._socket()
        self._bind(main, (self.host, self.port))
        local = _listen_beside(self.host, main.getsockname()[1])
        return [main, *local]

    def bound(self, main: socket.socket) -> str:
        """The address that was really bound, as workers name it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.text if self.path else f"{host}:{main.getsockname()[1]}"

    def _listen_at_path(self) -> socket.socket:
        if len(os.fsencode(self.path)) > _LONGEST_PATH:
            raise CannotListen(address=self.text, reason=f"a socket's path has at most {_LONGEST_PATH} bytes here")
        if _answers(self.path):
            raise CannotListen(address=self.text, reason="another process listens there; choose another path")
        try:
            if stat.S_ISSOCK(os.stat(self.path).st_mode):
                os.unlink(self.path)  # left by a process that was killed
        except OSError:
            pass  # nothing is there, or bind will say what is
        main = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._bind(main, self.path)
        return main

    def _socket(self) -> socket.socket:
        """A socket for the TCP address."""
        made = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return made

    def _bind(self, main: socket.socket, place: object, *, listens: bool = True) -> None:
        try:
            main.bind(place)  # type: ignore[arg-type]
            if self.path:
                os.chmod(self.path, 0o600)  # nobody connects before listen
            if listens:
                main.listen(BACKLOG)
        except OSError as error:
            main.close()
            raise CannotListen(address=self.text, reason=self._reason(error)) from None

    def _reason(self, error: OSError) -> str:
        """Why the address is not to be had, and what to do."""
        reason = error.strerror or str(error)
        if self.path and error.errno == errno.EADDRINUSE:
            return "something else than a socket has this path; remove it, or choose another path"
        if self.path:
            return f"{reason}; name a path in a folder that is there, and that this user may write"
        if error.errno == errno.EADDRINUSE and self.port:
            return f"port {self.port} is in use; stop the process that has it, or choose another port"
        if error.errno == errno.EADDRNOTAVAIL:
            return f"{reason}; name an address of this machine, or 0.0.0.0 for all of them"
        if error.errno in (errno.EACCES, errno.EPERM):
            return f"{reason}; choose a port from 1024 on"
        return reason


def _listen_beside(host: str, port: int) -> list[socket.socket]:
    """A Unix socket that a worker on this machine finds by the TCP address: half the cost per byte."""
    if sys.platform != "linux":
        return []
    beside = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        beside.bind(local_socket(host, port))
        beside.listen(BACKLOG)
    except OSError as error:
        beside.close()
        _log.warning("no Unix socket beside port %d (%s); workers on this machine use TCP", port, error.strerror)
        return []
    return [beside]


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
