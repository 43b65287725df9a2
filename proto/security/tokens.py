"""Tokens: what a client shows to be known to a shard, as text, as a file, and as bytes of a stream."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from pathlib import Path

from embershard.proto.errors import BadToken

PREFIX = "ember_"  # so that scanners of code and logs find one that got there
# In the stream (docs/wire.md): the text, and zeros behind it. All zeros: the client has none.
RECORD_BYTES = 64
_FORM = re.compile(PREFIX + r"[A-Za-z0-9_-]{43}")  # 32 random bytes in base64url
_LARGEST_FILE = 4096

# As Postgres has it for keys: root may give one to a group, which is how Kubernetes mounts a secret.
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_OF_ROOT = stat.S_IWGRP | stat.S_IXGRP | stat.S_IRWXO


def new_token() -> str:
    """A token that nobody has, of 32 random bytes."""
    return f"{PREFIX}{secrets.token_urlsafe(32)}"


def token_digest(token: str) -> bytes:
    """Return the SHA-256 of a token, which a shard stores and compares in its place."""
    return hashlib.sha256(token.encode()).digest()


def pack_token(token: str | None) -> bytes:
    """The RECORD_BYTES in which a token, or that there is none, travels."""
    return (token or "").encode().ljust(RECORD_BYTES, b"\0")


def unpack_token(record: bytes) -> str | None:
    """The text of a record, a token's or not; None where the client has none."""
    return record.rstrip(b"\0").decode("ascii", "replace") or None


class TokenFile:
    """A file with a token in its first line, read again when it changes; safe for use by several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: tuple[tuple[int, ...], str] | None = None  # what the file was, and the token in it

    def token(self) -> str:
        """The token. BadToken where the file holds none, or others than its owner may read it."""
        try:
            with open(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                found = os.fstat(file.fileno())
                state = found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode, found.st_uid
                if self._read is not None and self._read[0] == state:
                    return self._read[1]
                self._check(found)
                text = file.read(_LARGEST_FILE)
        except OSError as error:
            remedy = "name a file that this user can read, as `embershard keys token` writes it"
            raise BadToken(path=str(self.path), reason=f"{error.strerror or error}; {remedy}") from None
        token = text.partition(b"\n")[0].strip().decode("ascii", "replace")
        if not _FORM.fullmatch(token):
            raise BadToken(
                path=str(self.path), reason=f"its first line is no token, {PREFIX} and 43 letters, digits, _ and -"
            )
        self._read = state, token
        return token

    def _check(self, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise BadToken(path=str(self.path), reason="it is no file")
        if found.st_uid not in (0, os.geteuid()):
            raise BadToken(path=str(self.path), reason=f"user {found.st_uid} owns it; it must be yours, or root's")
        forbidden = _OTHERS_OF_ROOT if found.st_uid == 0 != os.geteuid() else _OTHERS
        if found.st_mode & forbidden:
            mode = stat.S_IMODE(found.st_mode)
            raise BadToken(path=str(self.path), reason=f"others can read or write it (mode {mode:04o}); chmod 600 it")


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, in place of the one before, whole or not at all."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w") as file:
            file.write(text)
        os.replace(draft, path)
    except OSError:
        os.unlink(draft)
        raise
