"""Where the certificates of this process are, and what it expects of the other side's."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

CERTIFICATE, KEY = "tls.crt", "tls.key"  # as in a Kubernetes secret of cert-manager
AUTHORITIES = "ca.crt"
REVOKED = "crl.pem"  # may be missing


@dataclass(frozen=True)
class TLS:
    """Use mutual TLS 1.3 with the certificates of a folder, for `connect(tls=...)`.

    The folder holds tls.crt (this side's certificate and the intermediate certificates), tls.key, ca.crt (the
    trusted authorities) and, optionally, crl.pem (revocation lists). They are read again when they change.
    `server_name` is the name that a shard's certificate must cover, by default the host of its address. A shard
    checks the files for changes every `poll_interval`, and closes connections older than `connection_lifetime`.
    """

    folder: str | os.PathLike[str]
    server_name: str = ""
    poll_interval: timedelta = field(default=timedelta(seconds=10), kw_only=True)
    connection_lifetime: timedelta = field(default=timedelta(hours=24), kw_only=True)

    def __post_init__(self) -> None:
        for name in ("poll_interval", "connection_lifetime"):
            if getattr(self, name) <= timedelta(0):
                raise ValueError(f"{name} must be above zero, got {getattr(self, name)}")

    @property
    def path(self) -> Path:
        """The folder with the certificates."""
        return Path(self.folder)
