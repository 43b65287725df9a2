"""This process's certificate, key and trusted authorities: read from a folder, checked, and read again on change."""

from __future__ import annotations

import codecs
import logging
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, SECP384R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID, PublicKeyAlgorithmOID

from embershard.proto.errors import BadCertificate, UntrustedCertificate
from embershard.proto.security.handshake import HandshakeContext
from embershard.proto.security.problems import WRONG_CLOCK, Problem
from embershard.proto.security.tls import AUTHORITIES, CERTIFICATE, KEY, REVOKED, TLS

_EXPIRES_SOON = timedelta(days=7)
_FOLDER = f"A folder of certificates holds {CERTIFICATE}, {KEY} and {AUTHORITIES} (`embershard keys issue`)"
_LONGEST_CHAIN = 100_000  # bytes; OpenSSL ends a handshake at 100 KiB, which the message's other fields count in
_CHAIN_ENTRY_BYTES = 5  # beside each certificate: its length, and that of its extensions
_READS = 3  # of files that are replaced meanwhile

_log = logging.getLogger(__name__)
_told: set[str] = set()  # warnings of dates


@dataclass(frozen=True, eq=False)
class Credentials:
    """The certificate, key and authorities of a folder, read at one moment and checked."""

    certificate: bytes  # PEM, as the following
    key: bytes
    authorities: bytes
    leaf: x509.Certificate  # the first of `certificate`
    revoked: Sequence[x509.CertificateRevocationList]
    server_context: HandshakeContext = field(repr=False)
    client_context: HandshakeContext = field(repr=False)

    @classmethod
    def load(cls, folder: Path) -> Credentials:
        """Read a folder. BadCertificate where its files cannot be used together, now."""
        for _ in range(_READS):
            certificate, key = _read(folder / CERTIFICATE), _read(folder / KEY)
            authorities, revoked = _read(folder / AUTHORITIES), _read_optional(folder / REVOKED)
            chain, trusted = (
                _certificates(folder / CERTIFICATE, certificate),
                _certificates(folder / AUTHORITIES, authorities),
            )
            leaf = chain[0]
            _check_chain(folder / CERTIFICATE, chain)
            _check_key(folder, leaf, _private_key(folder / KEY, key))
            _check_dates(folder / CERTIFICATE, leaf)
            lists = _revocation_lists(folder / REVOKED, revoked, trusted)
            try:
                contexts = [_context(side, folder, trusted) for side in (True, False)]
            except (OSError, ssl.SSLError) as error:
                if certificate == _read(folder / CERTIFICATE) and key == _read(folder / KEY):
                    _refuse(folder / CERTIFICATE, Problem.UNREADABLE, str(error), "Issue it again")
                continue
            # OpenSSL takes a key from a file alone: what it has read must be what was checked
            if certificate == _read(folder / CERTIFICATE) and key == _read(folder / KEY):
                return cls(certificate, key, authorities, leaf, lists, *contexts)
        _refuse(folder, Problem.UNREADABLE, "its files change while they are read", "Replace them all at once")

    @property
    def expires(self) -> datetime:
        """When this side's certificate ceases to be valid."""
        return self.leaf.not_valid_after_utc

    def check_peer(self, certificate: x509.Certificate, peer: str) -> None:
        """UntrustedCertificate where the other side's certificate was revoked; all else the handshake has checked."""
        for revoked in self.revoked:
            if revoked.issuer != certificate.issuer:
                continue
            if revoked.get_revoked_certificate_by_serial_number(certificate.serial_number) is not None:
                raise UntrustedCertificate(
                    peer=peer,
                    problem=Problem.REVOKED,
                    reason=f"{REVOKED} of this side lists it as revoked (serial {certificate.serial_number:x})",
                    remedy="Issue it a new one, if it is to take part again",
                )


class CertificateFolder:
    """The credentials of a folder, swapped for new ones when its files change; for use by several threads."""

    def __init__(self, tls: TLS) -> None:
        self.tls = tls
        self._seen = _signature(tls.path)
        self._refused: tuple[object, ...] | None = None  # what was reported of the files, where they cannot be used
        self.current = Credentials.load(tls.path)
        self._warn_of_dates()

    def refresh(self) -> bool:
        """Read the files again if they have changed; whether there are new credentials.

        Files that cannot be used are reported, once, and the ones of before stay in use. They are tried again, for a
        certificate may become valid, and a file readable, without a change. Dates that come closer are reported, too:
        a process may run for longer than a certificate is valid.
        """
        seen = _signature(self.tls.path)
        if seen == self._seen and self._refused is None:
            self._warn_of_dates()
            return False
        self._seen = seen
        try:
            self.current = Credentials.load(self.tls.path)
        except BadCertificate as error:
            refused = seen, error.fields["path"], error.fields["problem"]
            if refused != self._refused:
                _log.error("%s. The certificate of before stays in use until %s", error, _day(self.current.expires))
            self._refused = refused
            self._warn_of_dates()
            return False
        self._refused = None
        _log.info("new certificates are in use: %s, valid until %s", self.tls.path, _day(self.current.expires))
        self._warn_of_dates()
        return True

    def _warn_of_dates(self) -> None:
        now, path, expires = _now(), self.tls.path, self.current.expires
        if expires < now:
            text = f"the certificate of {path} has expired at {_day(expires)}: new connections fail; renew it"
            _warn_once(text, logging.ERROR)
        elif expires - now < _EXPIRES_SOON:
            _warn_once(f"the certificate of {path} expires at {_day(expires)}; renew it")
        for revoked in self.current.revoked:
            due = revoked.next_update_utc
            if due is not None and due < now:
                what = f"{path / REVOKED} was due for an update at {_day(due)}"
                _warn_once(f"{what}: what was revoked since is still trusted")


def _warn_once(text: str, level: int = logging.WARNING) -> None:
    """Log a text, unless this process has: a client looks at its files for each of its shards, again and again."""
    if text not in _told:
        _told.add(text)
        _log.log(level, "%s", text)


def identity_of(certificate: x509.Certificate) -> str:
    """Return the name of a certificate's holder: its spiffe:// URI, else e-mail address, else common name, else "".

    A common name is no SPIFFE id: authorities often check the URIs that a client asks for, and not its common name.
    Where one of the names cannot be read, none counts.
    """
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    except (ValueError, x509.UnsupportedGeneralNameType, x509.DuplicateExtension):
        return ""
    uris = [uri for uri in names.get_values_for_type(x509.UniformResourceIdentifier) if uri.startswith("spiffe://")]
    common = [str(name.value) for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    common = [name for name in common if not name.startswith("spiffe://")]
    return next(iter([*uris, *names.get_values_for_type(x509.RFC822Name), *common]), "")


def grpc_knows_key(certificate: x509.Certificate) -> bool:
    """Whether gRPC, whose TLS library knows fewer kinds of keys, can use a certificate."""
    if certificate.public_key_algorithm_oid == PublicKeyAlgorithmOID.RSAES_PKCS1_v1_5:
        return True
    key = certificate.public_key()
    return isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1 | SECP384R1)


@lru_cache(maxsize=4096)
def read_certificate(data: bytes) -> x509.Certificate:
    """The certificate of PEM or DER that the other side of a verified connection has sent."""
    return (x509.load_pem_x509_certificate if data.startswith(b"-----") else x509.load_der_x509_certificate)(data)


def _signature(folder: Path) -> tuple[object, ...]:
    """What changes when one of the files is replaced, by a link's new target too."""
    found: list[object] = []
    for name in (CERTIFICATE, KEY, AUTHORITIES, REVOKED):
        try:
            stat = (folder / name).stat()
            found.append((stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size))
        except OSError:
            found.append(None)
    return tuple(found)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes().removeprefix(codecs.BOM_UTF8)  # which gRPC takes for no PEM
    except FileNotFoundError:
        _refuse(path, Problem.MISSING, "there is no such file", _FOLDER)
    except NotADirectoryError:
        _refuse(path.parent, Problem.MISSING, "it is a file; name its folder", _FOLDER)
    except OSError as error:
        _refuse(path, Problem.UNREADABLE, error.strerror or str(error), "Let this user read it")


def _read_optional(path: Path) -> bytes:
    """The bytes of a file that may be missing; it may be blank, too, but a file of no bytes is one half written."""
    if not os.path.lexists(path):
        return b""
    data = _read(path) if path.exists() else b""  # a link to a volume that is not mounted, say
    if not data:
        _refuse(path, Problem.UNREADABLE, "it is empty, or a link to no file", "Write it again, or delete it")
    return data


def _certificates(path: Path, data: bytes) -> list[x509.Certificate]:
    try:
        found = x509.load_pem_x509_certificates(data)
        for one in found:
            _ = one.subject  # which is read only when it is asked for
    except (ValueError, x509.InvalidVersion) as error:
        _refuse(path, Problem.UNREADABLE, f"it holds no certificate in PEM ({error})", "Issue it again")
    return found


def _check_chain(path: Path, chain: Sequence[x509.Certificate]) -> None:
    """Refuse what OpenSSL takes from a file, and the other side then does not."""
    try:
        _ = chain[0].extensions  # which are read now
    except x509.UnsupportedGeneralNameType:
        pass  # an X.400 address, say, which OpenSSL takes
    except (ValueError, x509.DuplicateExtension) as error:
        _refuse(path, Problem.UNREADABLE, f"the certificate is malformed ({error})", "Issue it again")
    size = sum(len(one.public_bytes(Encoding.DER)) + _CHAIN_ENTRY_BYTES for one in chain)
    if size > _LONGEST_CHAIN:
        reason = f"its {len(chain)} certificates take {size:,} bytes, and the other side takes {_LONGEST_CHAIN:,}"
        _refuse(path, Problem.OTHER, reason, "Keep this side's certificate and the intermediate ones alone there")


def _private_key(path: Path, data: bytes) -> PrivateKeyTypes:
    try:
        return load_pem_private_key(data, password=None)
    except TypeError:
        _refuse(
            path,
            Problem.UNREADABLE,
            "it is encrypted with a passphrase",
            "Give it without one, readable by its user alone",
        )
    except (ValueError, UnsupportedAlgorithm) as error:
        _refuse(path, Problem.UNREADABLE, f"it holds no private key in PEM ({error})", "Issue it again")


def _check_key(folder: Path, leaf: x509.Certificate, key: PrivateKeyTypes) -> None:
    try:
        certified = leaf.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        _refuse(folder / CERTIFICATE, Problem.UNREADABLE, f"its key cannot be read ({error})", "Issue it again")
    if certified != key.public_key():
        _refuse(
            folder / KEY,
            Problem.WRONG_KEY,
            f"the key does not fit the certificate in {CERTIFICATE}",
            "Put the two files of one issue there; where they are just being replaced, wait",
        )


def _check_dates(path: Path, leaf: x509.Certificate) -> None:
    now = _now()
    if now > leaf.not_valid_after_utc:
        _refuse(
            path,
            Problem.EXPIRED,
            f"the certificate expired at {_day(leaf.not_valid_after_utc)}; the clock of this machine says {_day(now)}",
            f"Issue a new one; {WRONG_CLOCK}",
        )
    if now < leaf.not_valid_before_utc:
        _refuse(
            path,
            Problem.NOT_YET_VALID,
            f"the certificate is valid from {_day(leaf.not_valid_before_utc)} on, and the clock of this machine says "
            f"{_day(now)}",
            f"Wait until then; {WRONG_CLOCK}",
        )


def _revocation_lists(
    path: Path, data: bytes, authorities: Sequence[x509.Certificate]
) -> list[x509.CertificateRevocationList]:
    found = []
    begin = b"-----BEGIN X509 CRL-----"
    for part in data.split(begin)[1:]:
        try:
            revoked = x509.load_pem_x509_crl(begin + part)
            signers = [one for one in authorities if one.subject == revoked.issuer]
        except (ValueError, x509.InvalidVersion) as error:
            _refuse(path, Problem.UNREADABLE, f"it holds no revocation list in PEM ({error})", "Write it again")
        if not any(_has_signed(one, revoked) for one in signers):
            _refuse(
                path, Problem.FOREIGN, f"no authority in {AUTHORITIES} signed it", "Put the list of its issuer there"
            )
        found.append(revoked)
    if data.strip() and not found:
        _refuse(path, Problem.UNREADABLE, "it holds no revocation list in PEM", "Write it again, or delete it")
    return found


def _has_signed(authority: x509.Certificate, revoked: x509.CertificateRevocationList) -> bool:
    try:
        return revoked.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
    except (ValueError, UnsupportedAlgorithm):  # ca.crt may have authorities whose keys are not known here
        return False


def _context(server: bool, folder: Path, authorities: Sequence[x509.Certificate]) -> HandshakeContext:
    context = HandshakeContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY, password=b"")  # never ask a terminal for it
    # not the file's text, whose comments may be in any language
    context.load_verify_locations(cadata=b"".join(one.public_bytes(Encoding.DER) for one in authorities))
    context.verify_mode = ssl.CERT_REQUIRED
    # an authority below another one may be trusted by itself, as cert-manager writes into ca.crt
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if server:  # a session that is resumed skips the certificate: rotation would not reach it
        context.num_tickets = 0
    else:
        context.set_alpn_protocols(["h2"])  # gRPC demands it; the other transport does not look at it
    return context


def _refuse(path: Path, problem: Problem, reason: str, remedy: str) -> NoReturn:
    raise BadCertificate(path=str(path), problem=problem, reason=reason, remedy=remedy) from None


def _now() -> datetime:
    return datetime.now(UTC)


def _day(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"
