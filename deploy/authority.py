"""A certificate authority for labs and tests: its own certificate, and those that it issues to shards and workers."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from embershard.proto.errors import EmbershardError
from embershard.proto.security.tls import AUTHORITIES, CERTIFICATE, KEY, TLS

AUTHORITY_KEY = "ca.key"
AUTHORITY_LIFETIME = timedelta(days=3650)
RUN_NAME = "shards.embershard"  # in place of their machines' names, which nobody knows beforehand
RUN_LIFETIME = timedelta(days=365)  # longer than any run
_EARLIER = timedelta(minutes=5)  # a certificate is valid from then on: clocks differ
_LIST_LIFETIME = timedelta(days=3650)  # nobody renews that of a lab


class CannotIssue(EmbershardError):
    """A folder that holds no authority, or files that would be overwritten."""

    template = "{path}: {reason}"


@dataclass(frozen=True)
class Authority:
    """A certificate whose key signs others."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def create(cls, name: str, lifetime: timedelta = AUTHORITY_LIFETIME) -> Authority:
        """A new self-signed authority of this name, with a new key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _subject(name)
        begin = datetime.now(UTC) - _EARLIER
        builder = _builder(subject, subject, key.public_key(), begin, begin + lifetime)
        usage = _usage(key_cert_sign=True, crl_sign=True)
        signed = (
            builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(signed, key)

    @classmethod
    def load(cls, folder: Path) -> Authority:
        """Return the authority of a folder. CannotIssue where there is none."""
        try:
            key = load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), password=None)
            certificate = x509.load_pem_x509_certificate((folder / AUTHORITIES).read_bytes())
            if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
                raise ValueError(f"{AUTHORITY_KEY} is not the elliptic-curve key of {AUTHORITIES}")
        except (OSError, ValueError, TypeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise CannotIssue(
                path=str(folder),
                reason=f"no authority can be read there ({reason}); make one with `embershard keys init {folder}`",
            ) from None
        return cls(certificate, key)

    def save(self, folder: Path) -> None:
        """Write ca.crt and ca.key. CannotIssue where one of them is there."""
        write_new(folder, {AUTHORITIES: pem(self.certificate), AUTHORITY_KEY: pem(self.key)})

    def issue(
        self, name: str, covered: Sequence[str], lifetime: timedelta, start: datetime | None = None
    ) -> dict[str, bytes]:
        """The files of a folder for one side, `name` its common name.

        `covered` are the host names and IP addresses that it may be reached by, and spiffe:// or e-mail identities.
        The certificate ends with the authority's own at the latest. CannotIssue where that has ended.
        """
        last = self.certificate.not_valid_after_utc
        begin = start or datetime.now(UTC) - _EARLIER
        if begin >= last or datetime.now(UTC) >= last:
            raise CannotIssue(
                path=AUTHORITIES,
                reason=f"the authority was valid until {last:%Y-%m-%d}: nobody would trust its certificate; make a new "
                "authority with `embershard keys init` in another folder",
            )
        key = ec.generate_private_key(ec.SECP256R1())
        end = min(begin + lifetime, last)
        builder = _builder(_subject(name), self.certificate.subject, key.public_key(), begin, end)
        certificate = (
            builder.add_extension(x509.SubjectAlternativeName(map(general_name, covered)), critical=False)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(self.key, hashes.SHA256())
        )
        return {CERTIFICATE: pem(certificate), KEY: pem(key), AUTHORITIES: pem(self.certificate)}

    def revoke(self, certificate: x509.Certificate, before: bytes = b"") -> bytes:
        """The revocation list with one more certificate than the one of `before`."""
        now = datetime.now(UTC)
        builder = x509.CertificateRevocationListBuilder().issuer_name(self.certificate.subject)
        builder = builder.last_update(now).next_update(now + _LIST_LIFETIME)
        known = list(x509.load_pem_x509_crl(before)) if before else []
        for entry in known:
            builder = builder.add_revoked_certificate(entry)
        if all(entry.serial_number != certificate.serial_number for entry in known):
            entry = (
                x509.RevokedCertificateBuilder().serial_number(certificate.serial_number).revocation_date(now).build()
            )
            builder = builder.add_revoked_certificate(entry)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM)


def issue_for_run(folder: Path) -> TLS:
    """Make the certificate that all shards and workers of one run use, on whatever machines, and trust alone.

    `folder` is a new one. The authority's key is kept nowhere.
    """
    write_new(folder, Authority.create("embershard run").issue("embershard run", [RUN_NAME], RUN_LIFETIME))
    return TLS(folder, RUN_NAME)


def general_name(text: str) -> x509.GeneralName:
    """The kind of name that a text is: a URI, an e-mail address, an IP address, or else a host name.

    ValueError where it can be none of them.
    """
    if not text.isascii():
        raise ValueError(f"{text!r} is not ASCII: write it as it is looked up (a host name as xn--...)")
    if "://" in text:
        return x509.UniformResourceIdentifier(text)
    if "@" in text:
        return x509.RFC822Name(text)
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        if not text or any(char.isspace() or char in "/:" for char in text):
            raise ValueError(
                f"{text!r} is no host name, IP address, e-mail address or URI such as spiffe://lab/worker"
            ) from None
        return x509.DNSName(text)


def pem(part: x509.Certificate | ec.EllipticCurvePrivateKey) -> bytes:
    """A certificate or a key as text."""
    if isinstance(part, x509.Certificate):
        return part.public_bytes(Encoding.PEM)
    return part.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def write_new(folder: Path, files: dict[str, bytes]) -> None:
    """Write files to a folder, keys for their owner alone: all, or none where one is there or fails (CannotIssue)."""
    made: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in files:
            if (folder / name).exists() or (folder / name).is_symlink():
                raise CannotIssue(
                    path=str(folder / name), reason="it is there already, and is not overwritten; choose another folder"
                )
        for name, data in files.items():
            mode = 0o600 if name.endswith(".key") else 0o644
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            made.append(folder / name)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
    except OSError as error:
        for path in made:
            path.unlink(missing_ok=True)
        raise _cannot_write(Path(error.filename or folder), error) from None


def replace_file(path: Path, data: bytes) -> None:
    """Write a file anew, so that a reader sees the one of before or this one. CannotIssue where that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise _cannot_write(path, error) from None


def _cannot_write(path: Path, error: OSError) -> CannotIssue:
    return CannotIssue(
        path=str(path), reason=f"cannot be written ({error.strerror or error}); correct that, or choose another folder"
    )


def _subject(name: str) -> x509.Name:
    if not 1 <= len(name.encode()) <= 64:  # X.520's upper bound
        raise CannotIssue(
            path=repr(name), reason="a certificate's NAME has 1 to 64 bytes; a longer name of a host goes with --name"
        )
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    begin: datetime,
    end: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(**used: bool) -> x509.KeyUsage:
    kinds = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    )
    return x509.KeyUsage(**{kind: used.get(kind, False) for kind in kinds})
