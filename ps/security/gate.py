"""How a shard decides, at its start, whom it asks who they are."""

from __future__ import annotations

import logging
from pathlib import Path

from embershard.proto.errors import BadToken, CannotListen
from embershard.proto.security.loopback import remove_loopback_token, write_loopback_token
from embershard.ps.security.access import Access
from embershard.ps.security.audit import AuditLog

_log = logging.getLogger("embershard.ps")


class Gate:
    """Access control of one shard (`access`; None: everything is allowed), and its loopback token."""

    def __init__(self, access: Access | None, token: tuple[str, Path] | None = None) -> None:
        self.access = access
        self._token = token
        if access is not None:
            access.watch()

    @classmethod
    def at_unix_socket(cls, file: Path | None, audit: AuditLog | None = None) -> Gate:
        """Make the gate of a shard that listens at a Unix socket alone, whose peers the system knows."""
        return cls(Access(file, audit=audit))

    @classmethod
    def on_loopback(
        cls, ip: str, port: int, file: Path | None, audit: AuditLog | None = None, *, insecure: bool
    ) -> Gate:
        """Make the gate of a shard on this machine's loopback, where the system does not say whose process a peer is.

        CannotListen where no file for its token is safe.
        """
        if insecure:
            if file is None:
                _log.warning("--insecure-loopback: any user of this machine can read and change the model")
            return cls(None if file is None else Access(file, audit=audit))
        try:
            written = write_loopback_token(ip, port)
        except BadToken as error:
            if file is None:
                raise CannotListen(
                    address=f"{ip}:{port}",
                    reason=f"{error.fields['path']}: {error.fields['reason']}. Make that place safe, or say who may do "
                    "what (--access), or pass --insecure-loopback if no other user of this machine is a stranger",
                ) from None
            _log.warning("clients on this machine need a token of access.yaml: %s", error)
            return cls(Access(file, audit=audit))
        return cls(Access(file, written[0], audit), written)

    @classmethod
    def on_network(cls, file: Path | None, audit: AuditLog | None = None) -> Gate:
        """Make the gate of a shard that other machines reach; without a file it asks nobody who they are."""
        return cls(None if file is None else Access(file, audit=audit))

    def close(self) -> None:
        """Remove the file with the loopback token."""
        if self._token is not None:
            remove_loopback_token(self._token[1], self._token[0])
        if self.access is not None:
            self.access.close()
