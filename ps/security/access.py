"""Who asks a shard, and what they may: one check for every transport, before a request's body is read."""

from __future__ import annotations

import fnmatch
import hmac
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from embershard.proto.errors import BadAccessFile, EmbershardError, NotAllowed, NotAuthenticated
from embershard.proto.messages import (
    METHODS,
    READ_ONLY_WORKER,
    Compress,
    Declare,
    Load,
    Pull,
    Push,
    Request,
    Restore,
    Snapshot,
    ids_by_table,
)
from embershard.proto.security.tokens import token_digest
from embershard.ps.security.access_file import AccessEntry, read_access_file
from embershard.ps.security.audit import Act, AuditLog
from embershard.ps.security.peers import Peer
from embershard.ps.security.quotas import Usage
from embershard.ps.security.roles import ALLOWED, LEAST_ROLE
from embershard.ps.security.table_quotas import TableQuotas

POLL_SECONDS = 5.0  # between looks at access.yaml: a token whose line is gone is of no use ten seconds later
_MOST_SEEN = 10_000  # connections that are remembered, so that a login is noted once
_MOST_TABLES = 4096  # of which it is remembered whether they match: names are of the peer's choice

_UNKNOWN_TOKEN = (
    "it shows a token that the shard does not have: it was revoked, or is another shard's; name the file of one that "
    "the shard's access.yaml has (--token-file, EMBERSHARD_TOKEN_FILE, es.connect(token_file=...))"
)

_log = logging.getLogger(__name__)


class Principal:
    """Somebody whom a shard knows, and what they may do. A connection keeps its own for as long as it lasts."""

    __slots__ = ("_known", "allowed", "entry", "revoked", "table_quotas", "usage")

    def __init__(self, entry: AccessEntry) -> None:
        self.entry = entry
        self.allowed = ALLOWED[entry.role]
        self.revoked = False  # its entry is gone, or another now
        self.usage = Usage(entry.name, entry.quotas)
        limits = entry.quotas.of_tables
        self.table_quotas = TableQuotas(entry.name, self.owns, limits) if limits else None
        self._known: dict[str, bool] = {}

    @property
    def name(self) -> str:
        """The name of its entry in access.yaml."""
        return self.entry.name

    @property
    def role(self) -> str:
        """The role of its entry: read, train or admin."""
        return self.entry.role

    @property
    def is_limited(self) -> bool:
        """Whether what it asks for has to be looked into."""
        return self.entry.tables is not None

    def revocation(self) -> NotAuthenticated:
        """The error of its requests, once it is `revoked`."""
        return NotAuthenticated(
            who=self.name,
            why="its token or certificate was removed from access.yaml; start the client again with a token "
            "(--token-file) or a certificate (--tls) that the file has now",
        )

    def owns(self, table: str) -> bool:
        """Whether a table is among those that its entry gives it."""
        if self.entry.tables is None:
            return True
        known = self._known.get(table)
        if known is None:
            known = any(fnmatch.fnmatchcase(table, pattern) for pattern in self.entry.tables)
            if len(self._known) < _MOST_TABLES:
                self._known[table] = known
        return known


class Access:
    """The principals of a shard: those of access.yaml, the owner of a loopback token, and users of this machine.

    `file` is read anew when it changes, once `watch` was called; a file with mistakes leaves things as they are. An
    `audit` log is told who comes, and who is refused.
    """

    def __init__(
        self, file: Path | None = None, loopback_token: str | None = None, audit: AuditLog | None = None
    ) -> None:
        self.audit = audit
        self._file = file
        self._own: dict[bytes, Principal] = {}
        if loopback_token is not None:
            digest = token_digest(loopback_token)
            self._own[digest] = Principal(AccessEntry(name="loopback", role="admin", token_sha256=digest))
        self._users: dict[int, Principal] = {}
        self._by_token: dict[bytes, Principal] = {}
        self._by_certificate: dict[str, Principal] = {}
        self._state: object = None
        self._entries: dict[AccessEntry, Principal] = {}
        self._seen: set[tuple[str, str]] = set()
        # how often somebody was refused, by the reasons of ShardStatus.rejected
        self.refusals: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._stop = threading.Event()
        if file is not None:
            self._state = _state_of(file)
            self._use(read_access_file(file))

    def identify(self, peer: Peer, token: str | None = None, certificate: Iterable[str] = ()) -> Principal:
        """Return the principal of a peer: by its token, else its certificate's names, else as a user of this machine.

        NotAuthenticated where it is none of these. A token that is shown has to be a known one.
        """
        try:
            principal = self._identified(peer, token, certificate)
        except NotAuthenticated as error:
            self.refused(None, peer.address, "login", error)
            raise
        if self.audit is not None and self._is_new(peer, principal):
            self.audit.write(Act("login", "done", principal.name, principal.role, peer.address))
        return principal

    def refused(self, principal: Principal | None, peer: str, verb: str, error: EmbershardError) -> None:
        """Count, and note, that somebody was refused."""
        if isinstance(error, NotAllowed):
            with self._counting:
                self.refusals["not_authenticated" if isinstance(error, NotAuthenticated) else "not_allowed"] += 1
        if self.audit is not None:
            name, role = ("", "") if principal is None else (principal.name, principal.role)
            self.audit.refuse(Act(verb, type(error).__name__, name, role, peer))

    def note(self, principal: Principal, peer: str, request: Request, outcome: str) -> None:
        """Note what somebody has done, or tried to."""
        if self.audit is not None:
            verb, table = METHODS[type(request)][0], ",".join(tables_of(request))
            step = getattr(request, "step", "")
            verb = f"{verb} {step}" if step else verb
            self.audit.write(
                Act(verb, outcome, principal.name, principal.role, peer, table, safe=principal.role == "admin")
            )

    def _is_new(self, peer: Peer, principal: Principal) -> bool:
        """Whether a connection has not been seen: gRPC shows its token with each call."""
        key = peer.address, principal.name
        if key in self._seen:
            return False
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen.add(key)
        return True

    def _identified(self, peer: Peer, token: str | None, certificate: Iterable[str]) -> Principal:
        if token is not None:
            digest = token_digest(token)
            principal = self._by_token.get(digest) or self._own.get(digest)
            # the lookup has compared hashes of what the peer chose; this one takes the same time for any of them
            if principal is None or not hmac.compare_digest(digest, principal.entry.token_sha256 or b""):
                raise NotAuthenticated(who=peer.address, why=_UNKNOWN_TOKEN)
            return principal
        for name in certificate:
            if (found := self._by_certificate.get(name)) is not None:
                return found
        if peer.uid is not None and peer.is_admitted:
            return self._user(peer.uid)
        raise NotAuthenticated(who=peer.address, why=_remedy(certificate))

    def known_again(self, principal: Principal) -> Principal:
        """Look a principal up in the current file; returns the same, `revoked`, where its token or certificate is gone.

        Of an entry with both it is not known which of them was shown: it has to have both still.
        """
        old = principal.entry
        for new, found in self._entries.items():
            if (new.token_sha256, new.certificate) == (old.token_sha256, old.certificate):
                return found
        return principal

    def check(self, principal: Principal | None, kind: type[Request]) -> None:
        """NotAllowed, or NotAuthenticated, where a principal may not make requests of this kind at all.

        Asked before a request is decoded, whatever transport brought it.
        """
        if principal is None:
            raise NotAuthenticated(who="the peer", why="it has not said who it is")
        if principal.revoked:
            raise principal.revocation()
        if kind not in principal.allowed:
            raise NotAllowed(
                who=principal.name,
                what=METHODS[kind][0],
                why=f"its role is {principal.role}, and that needs {LEAST_ROLE[kind]}",
            )

    def admit(self, principal: Principal, request: Request, tables: Callable[[Restore], Sequence[str]]) -> None:
        """NotAllowed where a request is about tables that are not its principal's.

        `tables` gives those that a restore would remove, or put in place.
        """
        if principal.entry.tables is None:
            return
        for table in tables_of(request) if not isinstance(request, Restore) else tables(request):
            if not principal.owns(table):
                raise NotAllowed(
                    who=principal.name,
                    what=METHODS[type(request)][0],
                    why=f"table {table[:100]!r} is none of its tables ({', '.join(principal.entry.tables)})",
                )

    def admit_declare(self, principal: Principal, request: Declare, compares: Callable[[Declare], bool]) -> None:
        """NotAllowed where a principal that only reads asks for more than to compare a table with the one there."""
        if principal.role == "read" and not compares(request):
            raise NotAllowed(
                who=principal.name,
                what=METHODS[Declare][0],
                why=f"its role is read, and table {request.spec.name[:100]!r} is not there, or this would change it: "
                "that needs train",
            )

    def watch(self) -> None:
        """Look at the file every POLL_SECONDS, in a thread, until `close`."""
        if self._file is not None:
            threading.Thread(target=self._watch, args=(self._file,), name="access", daemon=True).start()

    def close(self) -> None:
        """Watch no more, and end the audit log."""
        self._stop.set()
        if self.audit is not None:
            self.audit.close()

    def reload(self) -> bool:
        """Read the file again if it has changed; whether other entries count now."""
        if self._file is None or (state := _state_of(self._file)) == self._state:
            return False
        self._state = state
        try:
            entries = read_access_file(self._file)
        except BadAccessFile as error:
            _log.error("who may do what stays as it was, for access.yaml has mistakes:\n%s", error)
            self._note_reload(type(error).__name__)
            return False
        self._use(entries)
        self._note_reload("done")
        _log.info("%s: %d entries count now", self._file, len(entries))
        return True

    def _note_reload(self, outcome: str) -> None:
        if self.audit is not None:
            self.audit.write(Act("reload", outcome, safe=True))

    def _watch(self, file: Path) -> None:
        while not self._stop.wait(POLL_SECONDS):
            try:
                self.reload()
            except Exception:  # who may do what must not stay for ever for one bad moment
                _log.exception("cannot look at %s", file)

    def _use(self, entries: Sequence[AccessEntry]) -> None:
        """Have these entries count. Who has the same one as before stays who it is, with its connections."""
        before, self._entries = self._entries, {}
        for entry in entries:
            self._entries[entry] = before.pop(entry) if entry in before else Principal(entry)
        now = self._entries.values()
        self._by_certificate = {p.entry.certificate: p for p in now if p.entry.certificate}
        self._by_token = {p.entry.token_sha256: p for p in now if p.entry.token_sha256 is not None}
        for principal in before.values():
            principal.revoked = True

    def _user(self, uid: int) -> Principal:
        if uid not in self._users:
            self._users[uid] = Principal(AccessEntry(name=f"uid:{uid}", role="admin"))
        return self._users[uid]


def tables_of(request: Request) -> list[str]:
    """The tables that a request reads or changes by their names."""
    match request:
        case Pull() | Push():
            return [table for table, _ in ids_by_table(request.tables)]
        case Compress():
            return [part.table for part in request.tables]
        case Load():
            return [request.table]
        case Declare():
            return [request.spec.name]
    return []


def of_nobody(request: Pull) -> Pull:
    """The pull as one of who only reads, whatever worker it says it is of.

    As this worker's it would renew its lease, tell its worker epoch, and put ids in the place of those that its next
    push names by their route.
    """
    tables = tuple([replace(part, route=0) if part.route else part for part in request.tables])
    return replace(request, worker=READ_ONLY_WORKER, epoch=0, tables=tables)


AUDITED = (Declare, Load, Compress, Snapshot, Restore)  # of which some requests are acts


def is_audited(request: Request) -> bool:
    """Whether an act is noted: what makes tables, loads them, moves them, or changes how they travel."""
    match request:
        case Declare():
            return True
        case Load():
            return request.last
        case Compress():
            return len(request.tables) > 0
        case Snapshot():
            return request.step in ("begin", "cancel")
        case Restore():
            return request.step in ("begin", "install", "cancel")
    return False


def _remedy(certificate: Iterable[str]) -> str:
    names = ", ".join(certificate)
    if names:
        return f"no entry of access.yaml has its certificate ({names})"
    return (
        "it shows no token; name the file of one (--token-file, EMBERSHARD_TOKEN_FILE, es.connect(token_file=...)), "
        "or, on this machine, be the user that the shard runs as"
    )


def _state_of(file: Path) -> object:
    """What changes whenever a file does, its owner, its mode or a link to it included, as Kubernetes swaps them."""
    try:
        found = file.stat()
    except OSError as error:
        return error.errno
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
