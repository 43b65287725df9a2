"""Checks of certificates: this side's, and whether it and the shards trust each other."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta

from embershard.doctor.case import Case
from embershard.doctor.check import Finding, check, fail, ok, some, warn
from embershard.proto.errors import BadCertificate, EmbershardError, TLSNotOffered
from embershard.proto.security.tls import KEY

_SOON = timedelta(days=7)


@check(
    "own certificate",
    asks="whether the files of --tls can be used together, for longer than a week, and whether others can read the key",
    remedy="issue the certificate again (embershard keys issue, cert-manager), and chmod 600 tls.key; docs/security.md",
)
def own(case: Case) -> Finding | None:
    """Read the folder as a shard or a worker would."""
    if case.tls is None:
        return None
    from embershard.proto.security.credentials import Credentials, identity_of

    try:
        credentials = Credentials.load(case.tls.path)
    except BadCertificate as error:
        return fail(str(error))
    leaf = credentials.leaf
    name = identity_of(leaf) or "a certificate without a name"
    text = f"{name}, valid until {leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    mode = (case.tls.path / KEY).stat().st_mode
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        return warn(f"{text}; users other than its owner can read {case.tls.path / KEY} ({stat.filemode(mode)})")
    return warn(text) if credentials.expires - datetime.now(UTC) < _SOON else ok(text)


@check(
    "shards' certificates",
    asks="whether both sides trust each other, the shards' certificates cover their addresses, and they are valid for "
    "a week",
    remedy="issue the certificates again, with the names that the addresses use; docs/security.md",
    seconds=15.0,
)
def of_shards(case: Case) -> Finding | None:
    """Make a handshake with every shard that is reached over TCP."""
    open_ports = [probe for probe in case.probes if not probe.port_problem and not probe.is_rpc]
    probes = [probe for probe in open_ports if not probe.bare.startswith("unix:")]
    if case.tls is None or not probes:
        return None
    from embershard.proto.transport.client_tls import ClientTLS

    problems, ends, unencrypted = list[str](), list[datetime](), list[str]()
    for probe in probes:
        try:
            ends.append(ClientTLS(case.tls, probe.address).certificate_of_shard().not_valid_after_utc)
        except BadCertificate:
            return None  # the check before has said so
        except TLSNotOffered as error:
            (unencrypted if probe.beside else problems).append(f"{probe.name}: {error}")
        except EmbershardError as error:
            problems.append(f"{probe.name}: {error}")
        except OSError as error:
            problems.append(f"{probe.name}: the handshake did not end ({error.strerror or error})")
    if problems:
        return fail(some(problems))
    if unencrypted:
        return ok(f"{len(unencrypted)} of {len(probes)} shards without certificates, on this machine by Unix sockets")
    text = f"{len(ends)} trusted, valid until {min(ends):%Y-%m-%d %H:%M} UTC"
    return warn(text) if min(ends) - datetime.now(UTC) < _SOON else ok(text)


CHECKS = (own, of_shards)
