"""What can be wrong with a certificate, and in which words it is told: state, cause, remedy."""

from __future__ import annotations

import enum
import ssl

from embershard.proto.errors import CertificateRefused, EmbershardError, UntrustedCertificate

WRONG_CLOCK = "if that time is not the real one, correct the clock (NTP)"


class Problem(enum.StrEnum):
    """The field `problem` of BadCertificate, UntrustedCertificate and CertificateRefused."""

    MISSING = "missing"  # no certificate, or no file
    UNREADABLE = "unreadable"
    EXPIRED = "expired"
    NOT_YET_VALID = "not_yet_valid"
    FOREIGN = "foreign"  # of an authority that is not trusted
    SELF_SIGNED = "self_signed"
    WRONG_NAME = "wrong_name"
    WRONG_KEY = "wrong_key"
    REVOKED = "revoked"
    WRONG_PURPOSE = "wrong_purpose"  # one for servers alone, say
    OTHER = "other"


_TRUST = "Trust its authority in ca.crt of this side, or give it a certificate of the authority that is trusted"
# OpenSSL's X509_V_ERR_* -> what it means here
_UNTRUSTED: dict[int, tuple[Problem, str, str]] = {
    9: (
        Problem.NOT_YET_VALID,
        "by the clock of this machine, it is not valid yet",
        f"Compare the clocks of the two machines, and of who issued it: {WRONG_CLOCK}",
    ),
    10: (
        Problem.EXPIRED,
        "by the clock of this machine, it, or the certificate of its authority, has expired",
        f"Issue a new one; {WRONG_CLOCK}",
    ),
    18: (Problem.SELF_SIGNED, "it is self-signed, by no authority", _TRUST),
    19: (Problem.FOREIGN, "its authority is not among those of ca.crt", _TRUST),
    20: (Problem.FOREIGN, "its authority is not among those of ca.crt", _TRUST),
    21: (Problem.FOREIGN, "its authority is not among those of ca.crt", _TRUST),
    26: (
        Problem.WRONG_PURPOSE,
        "it is not made for this side of a connection",
        "Issue it for clients and servers (extended key usage clientAuth, serverAuth)",
    ),
    **dict.fromkeys(
        (62, 64),
        (
            Problem.WRONG_NAME,
            "it does not cover the name {name!r}",
            "Issue it with that name, connect by a name that it covers, or say which one to expect "
            "(--tls-server-name, es.TLS(server_name=...))",
        ),
    ),
}
# the name of a TLS alert -> what the other side means by it
_REFUSED: dict[str, tuple[Problem, str, str]] = {
    "CERTIFICATE_REQUIRED": (Problem.MISSING, "it got none", "Give this side a certificate"),
    "CERTIFICATE_EXPIRED": (
        Problem.EXPIRED,
        "by its clock, it has expired",
        "Renew the certificate of this side, and compare the clocks of the two machines",
    ),
    "UNKNOWN_CA": (
        Problem.FOREIGN,
        "no authority that it trusts has issued it",
        "Use a certificate of an authority that is in ca.crt of that side, or add this side's authority there",
    ),
    "CERTIFICATE_REVOKED": (Problem.REVOKED, "it was revoked", "Issue a new one"),
    "BAD_CERTIFICATE": (
        Problem.OTHER,
        "it is damaged, covers another name than is expected, or, by the clock of that machine, is not valid yet",
        "See the output of that side, and compare the clocks of the two machines",
    ),
    "UNSUPPORTED_CERTIFICATE": (
        Problem.WRONG_PURPOSE,
        "it is not made for this side of a connection",
        "Issue it for clients and servers (extended key usage clientAuth, serverAuth)",
    ),
}
_OTHER_ALERT = (Problem.OTHER, "it says {alert}", "See the output of that side")


def explain(error: Exception, peer: str, name: str = "") -> EmbershardError | None:
    """The error of this project for one of a handshake with `peer`; None where the connection just ended.

    `name` is what the certificate of the other side had to cover.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        problem, reason, remedy = _UNTRUSTED.get(
            error.verify_code, (Problem.OTHER, error.verify_message, "Issue it again, or trust its authority in ca.crt")
        )
        return UntrustedCertificate(peer=peer, problem=problem, reason=reason.format(name=name), remedy=remedy)
    if isinstance(error, ValueError):  # of what reads a certificate that OpenSSL has verified
        reason = f"it is malformed ({error})"
        return UntrustedCertificate(peer=peer, problem=Problem.UNREADABLE, reason=reason, remedy="Issue it again")
    if not isinstance(error, ssl.SSLError):
        return None
    words = error.reason or str(error)
    if "DID_NOT_RETURN_A_CERTIFICATE" in words:
        return UntrustedCertificate(
            peer=peer,
            problem=Problem.MISSING,
            reason="it sent none",
            remedy="Give it one (--tls DIR, es.connect(tls=...))",
        )
    if "ALERT_" in words:
        alert = words.partition("ALERT_")[2]
        problem, reason, remedy = _REFUSED.get(alert, _OTHER_ALERT)
        return CertificateRefused(peer=peer, problem=problem, reason=reason.format(alert=alert), remedy=remedy)
    return UntrustedCertificate(
        peer=peer,
        problem=Problem.OTHER,
        reason=f"the TLS 1.3 handshake failed ({words})",
        remedy="Use TLS 1.3 on both sides",
    )
