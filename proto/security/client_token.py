"""Which token a client shows to which shard."""

from __future__ import annotations

from dataclasses import dataclass

from embershard.proto.security.loopback import find_loopback_token
from embershard.proto.security.tokens import TokenFile


@dataclass(frozen=True)
class ClientToken:
    """The token of a file, and those of this user's own shards on loopback, which write theirs where it is found.

    A file that was `asked_for` goes before these: it is shown to each shard. Another one, as of a shell's environment,
    is for shards that are not this user's.
    """

    file: TokenFile | None = None
    asked_for: bool = False

    @property
    def at_unix_sockets(self) -> bool:
        """Whether a shard is told more than whose process this is, which the system tells it."""
        return self.file is not None and self.asked_for

    def find(self, ip: str, port: int) -> str | None:
        """Return the token for the shard at an address, or None (ip "": at a Unix socket, or inside TLS).

        BadToken where a file cannot be used.
        """
        if self.file is not None and self.asked_for:
            return self.file.token()
        if ip and (own := find_loopback_token(ip, port)) is not None:
            return own
        return None if self.file is None else self.file.token()
