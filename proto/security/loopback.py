"""The token of a shard that listens on loopback, in a file that its user's own clients find without being told.

The file is `IP:PORT.token`, as `127.0.0.1:7700.token`, in /run/user/UID/embershard where the system has /run/user/UID,
else in /tmp/embershard-UID. Both are folders that nobody but that user may enter. The place depends on no variable of
the environment: a shard that a service manager starts and a client of a login must agree on it. The shard writes a new
token at each start, before it answers anybody, and removes the file at its end: what reads a file that a killed shard
has left shows a token that no shard knows any more.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path

from embershard.proto.errors import BadToken
from embershard.proto.security.tokens import TokenFile, new_token, write_private

_LEFT_SECONDS = 3600.0  # after which a file may be one that a killed shard has left


def runtime_folders() -> tuple[Path, ...]:
    """The folders for tokens of this user, those that may be there, the best one first."""
    uid = os.geteuid()
    return Path(f"/run/user/{uid}/embershard"), Path(f"/tmp/embershard-{uid}")


def write_loopback_token(ip: str, port: int) -> tuple[str, Path]:
    """Write a new token for the shard at an address, and return it with its file. BadToken where no place is safe."""
    folder = _safe_folder()
    _remove_left(folder)
    path = folder / _name(ip, port)
    token = new_token()
    try:
        write_private(path, token + "\n")
    except OSError as error:
        raise BadToken(path=str(path), reason=error.strerror or str(error)) from None
    return token, path


def find_loopback_token(ip: str, port: int) -> str | None:
    """The token of this user's shard at an address of loopback; None for other addresses, and where there is none.

    BadToken where its file is not this user's alone.
    """
    if not ipaddress.ip_address(ip.partition("%")[0]).is_loopback:
        return None
    for folder in runtime_folders():
        path = folder / _name(ip, port)
        if _is_safe(folder) and path.exists():
            return TokenFile(path).token()
    return None


def remove_loopback_token(path: Path, token: str) -> None:
    """Remove a token's file, unless another shard has written its own since."""
    with suppress(OSError, BadToken):
        if TokenFile(path).token() == token:
            path.unlink()


def _remove_left(folder: Path) -> None:
    """Remove files of shards that were killed: they are old, and nobody listens where they say."""
    for path in folder.glob("*.token"):
        ip, _, port = path.stem.rpartition(":")
        with suppress(OSError, ValueError):
            if time.time() - path.stat().st_mtime < _LEFT_SECONDS:
                continue
            with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as probe:
                probe.setblocking(False)
                if probe.connect_ex((ip, int(port))) == errno.ECONNREFUSED:
                    path.unlink()


def _name(ip: str, port: int) -> str:
    return f"{ip}:{port}.token"


def _safe_folder() -> Path:
    """This user's folder, which nobody else can enter or has made; BadToken where there is no such place."""
    reason = ""
    for folder in runtime_folders():
        try:
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
        except OSError as error:
            reason = reason or f"{folder}: {error.strerror}"
            continue
        if _is_safe(folder):
            return folder
        reason = f"{folder} is not a folder of mode 0700 that is this user's"
    raise BadToken(path=str(runtime_folders()[-1]), reason=f"no place for a token on loopback: {reason}")


def _is_safe(folder: Path) -> bool:
    """Whether nobody but this user can enter a folder, or has made it; False where there is none."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
