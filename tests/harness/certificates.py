"""Folders of certificates, good and bad, of authorities that a test makes."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from embershard.deploy.authority import Authority, pem
from embershard.proto.security.tls import AUTHORITIES, REVOKED, TLS

DAY = timedelta(days=1)
COVERED = ("localhost", "127.0.0.1")
AUTHORITY = Authority.create("the tests' authority")  # one for all: keys take their time


def issue(
    folder: Path,
    name: str = "worker",
    covered: Sequence[str] = COVERED,
    *,
    authority: Authority = AUTHORITY,
    days: float = 30,
    start: timedelta = -DAY,
    trusts: Authority | None = None,
) -> TLS:
    """Write a certificate, its key and the authority that this side trusts, over what is there."""
    files = authority.issue(name, covered, days * DAY, datetime.now(UTC) + start)
    if trusts is not None:
        files[AUTHORITIES] = pem(trusts.certificate)
    replace(folder, files)
    return TLS(folder)


def replace(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / f".{name}").write_bytes(data)
        (folder / f".{name}").rename(folder / name)


def revoke(folder: Path, *revoked: Path, authority: Authority = AUTHORITY) -> None:
    """Have a side know that the certificates of other folders were revoked."""
    data = b""
    for other in revoked:
        data = authority.revoke(x509.load_pem_x509_certificate((other / "tls.crt").read_bytes()), data)
    replace(folder, {REVOKED: data})
