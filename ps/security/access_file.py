"""access.yaml: who may do what. Checked whole before any of it counts; every mistake is named with its line."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from embershard.proto.errors import BadAccessFile
from embershard.ps.security.roles import ROLES

_LARGEST_FILE = 2**20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@/\-]{0,99}")
_CERTIFICATE = re.compile(r"spiffe://[^\s/]+(/\S+)?|[^\s@/]+@[^\s@/]+|[A-Za-z0-9*]([A-Za-z0-9.\-]*[A-Za-z0-9])?")
# host:port, [host]:port, an IPv6 address or a URL: not what a certificate names its holder by
_ADDRESS = re.compile(r"(?!spiffe:)([A-Za-z0-9+]+://)?\S*[:\]]\S*")
# names of tables (proto/spec.py), with * and ? for parts of them
_PATTERN = re.compile(r"[A-Za-z0-9_*?][A-Za-z0-9_.\-/*?]{0,199}")
_FIELDS = ("name", "role", "token_sha256", "certificate", "tables", "quotas")


@dataclass(frozen=True, kw_only=True)
class TableLimits:
    """Limit what tables may have together, on one shard; None: no limit."""

    pattern: str = "*"  # of these tables, as far as they are the principal's
    rows_held: int | None = None
    bytes_held: int | None = None  # rows, their optimizer's state, and the index


@dataclass(frozen=True, kw_only=True)
class Quotas:
    """Limit what one principal may use of one shard; None: no limit."""

    rows_per_second: int | None = None  # whose ids it sends, over ten seconds
    connections: int | None = None  # of the stream transport
    bytes_in_flight: int | None = None  # of its requests that are not answered
    rows_held: int | None = None  # in all tables that are its own; it makes none beyond
    bytes_held: int | None = None  # of these tables
    tables: tuple[TableLimits, ...] = ()  # the same by pattern

    @property
    def of_tables(self) -> tuple[TableLimits, ...]:
        """All that bounds what tables may have."""
        whole = TableLimits(rows_held=self.rows_held, bytes_held=self.bytes_held)
        return self.tables if whole == TableLimits() else (whole, *self.tables)


@dataclass(frozen=True, kw_only=True)
class AccessEntry:
    """One line of who may do what."""

    name: str
    role: str
    token_sha256: bytes | None = None
    certificate: str = ""  # its SPIFFE id, else its email address, else its common name
    tables: tuple[str, ...] | None = None  # patterns with * and ?; None: all
    quotas: Quotas = Quotas()


def read_access_file(path: Path) -> tuple[AccessEntry, ...]:
    """The entries of a file. BadAccessFile with all of its mistakes, a line each; none of them shows a secret."""
    try:
        with path.open("rb") as file:
            state = path.stat()
            data = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        remedy = "name a file of entries as `embershard keys token` prints them"
        raise BadAccessFile(mistakes=f"{path}: cannot be read: {error.strerror}; {remedy}", count=1) from None
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = f"others can write it (mode {stat.S_IMODE(state.st_mode):04o}), and so give themselves any role"
        raise BadAccessFile(mistakes=f"{path}: {reason}; chmod go-w it", count=1)
    if len(data) > _LARGEST_FILE:
        raise BadAccessFile(mistakes=f"{path}: it has more than {_LARGEST_FILE:,} bytes", count=1)
    return parse_access(data.decode("utf-8", "replace"), str(path))


def parse_access(text: str, where: str) -> tuple[AccessEntry, ...]:
    """The entries in a text; see `read_access_file`."""
    return _Parser(where).parse(text)


class _Parser:
    """Collects mistakes, so that one run shows all of them."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._mistakes: list[tuple[int, str]] = []
        self._seen: dict[object, int] = {}  # names, tokens and certificates -> the line where they stand

    def parse(self, text: str) -> tuple[AccessEntry, ...]:
        items = self._load(text)
        entries = [entry for index in range(len(items)) if (entry := self._entry(items, index)) is not None]
        if not items and not self._mistakes:
            self._add(0, "it has no entries; write a list of {name, role, token_sha256 or certificate}")
        if self._mistakes:
            lines = [f"{self._where}:{line + 1}: {reason}" for line, reason in sorted(self._mistakes)]
            raise BadAccessFile(mistakes="\n".join(lines), count=len(lines))
        return tuple(entries)

    def _add(self, line: int, reason: str) -> None:
        self._mistakes.append((line, reason))

    def _load(self, text: str) -> list[Any]:
        from ruamel.yaml import YAML  # most shards have no such file
        from ruamel.yaml.error import YAMLError
        from ruamel.yaml.events import AliasEvent

        loader = YAML()  # rt: the mode that keeps lines
        try:
            for event in loader.parse(text):
                if isinstance(event, AliasEvent):  # they nest without bound
                    self._add(event.start_mark.line, f"the alias *{event.anchor}: write its value out")
            found = [] if self._mistakes else loader.load(text)
        except (YAMLError, ValueError) as error:
            mark = getattr(error, "problem_mark", None)
            self._add(
                mark.line if mark else 0, f"not YAML: {' '.join(str(getattr(error, 'problem', None) or error).split())}"
            )
            return []
        if found is None or isinstance(found, list):
            return found or []
        self._add(0, "it is a list of entries, each with - before it")
        return []

    def _entry(self, items: Any, index: int) -> AccessEntry | None:
        item, line = items[index], items.lc.item(index)[0]
        if not isinstance(item, dict):
            self._add(line, f"an entry has fields ({', '.join(_FIELDS)})")
            return None
        for key in item:
            if key not in _FIELDS:
                self._add(_line(item, key, line), f"unknown field {key!r} (known: {', '.join(_FIELDS)})")
        before = len(self._mistakes)
        name = self._text(item, "name", line, _NAME, "letters, digits and _ . @ / -")
        role = self._role(item, line)
        digest = self._text(
            item, "token_sha256", line, _DIGEST, "the 64 hex digits that `embershard keys token` prints"
        )
        want = "a spiffe:// id, an email address, or a common name (letters, digits, . and -)"
        certificate = self._text(item, "certificate", line, _CERTIFICATE, want)
        if "token_sha256" not in item and "certificate" not in item:
            self._add(line, "it has neither token_sha256 nor certificate, so that nobody could be it")
        tables, quotas = self._tables(item, line), self._quotas(item, line)
        if len(self._mistakes) > before:
            return None
        return AccessEntry(
            name=name,
            role=role,
            token_sha256=bytes.fromhex(digest) if digest else None,
            certificate=certificate,
            tables=tables,
            quotas=quotas,
        )

    def _text(self, item: Any, key: str, line: int, form: re.Pattern[str], want: str) -> str:
        """A field that is unique in the file; empty where it is missing, or wrong."""
        if key not in item:
            if key == "name":
                self._add(line, "its name is missing")
            return ""
        value, at = item[key], _line(item, key, line)
        if not isinstance(value, str) or not form.fullmatch(value):
            # a token that got here by mistake must not get into a log
            self._add(at, f"{key} is not {want}{_hint(key, value)}")
            return ""
        if (key, value) in self._seen:
            self._add(at, f"this {key} stands in line {self._seen[key, value] + 1} already")
        self._seen.setdefault((key, value), at)
        return value

    def _role(self, item: Any, line: int) -> str:
        role = item.get("role")
        if role not in ROLES:
            known = ", ".join(ROLES)
            at = _line(item, "role", line)
            self._add(
                at, f"unknown role {str(role)[:50]!r} (known: {known})" if "role" in item else "its role is missing"
            )
        return str(role)

    def _tables(self, item: Any, line: int) -> tuple[str, ...] | None:
        if "tables" not in item:
            return None
        patterns: Any = item["tables"]
        lines, at = getattr(patterns, "lc", None), _line(item, "tables", line)
        if not isinstance(patterns, list) or not patterns:
            self._add(
                at, "tables is a list of names and patterns with * and ?, as [ads_*]; leave it out for all tables"
            )
            return None
        for index, pattern in enumerate(patterns):
            if not _is_pattern(pattern):
                self._add(lines.item(index)[0] if lines else at, _matches_none(pattern))
        return tuple(map(str, patterns))

    def _quotas(self, item: Any, line: int) -> Quotas:
        values = item.get("quotas", {})
        if not isinstance(values, dict):
            self._add(_line(item, "quotas", line), "quotas has fields")
            return Quotas()
        numbers = {key: value for key, value in values.items() if key != "tables"}
        known = [field.name for field in fields(Quotas)]
        given = self._numbers(values, numbers, known, line)
        return Quotas(**given, tables=self._table_limits(values, line))

    def _table_limits(self, quotas: Any, line: int) -> tuple[TableLimits, ...]:
        values = quotas.get("tables", {})
        if not isinstance(values, dict):
            at = _line(quotas, "tables", line)
            self._add(at, "tables of quotas has patterns with limits, as {ads_*: {rows_held: 1_000_000}}")
            return ()
        known, found = [field.name for field in fields(TableLimits) if field.name != "pattern"], []
        for pattern, limits in values.items():
            at = _line(values, pattern, line)
            if not _is_pattern(pattern):
                self._add(at, _matches_none(pattern))
            elif not isinstance(limits, dict) or not limits:
                self._add(at, f"the quotas of {pattern[:50]!r} have fields ({', '.join(known)})")
            else:
                found.append(TableLimits(pattern=pattern, **self._numbers(limits, limits, known, at)))
        return tuple(found)

    def _numbers(self, section: Any, values: Mapping[str, Any], known: Sequence[str], line: int) -> dict[str, int]:
        """Those fields of a section whose name is known and that are whole numbers; the others are mistakes."""
        given: dict[str, int] = {}
        for key, value in values.items():
            at = _line(section, key, line)
            if key not in known:
                self._add(at, f"unknown quota {key!r} (known: {', '.join(known)})")
            elif isinstance(value, bool) or not isinstance(value, int) or value < 0:
                self._add(at, f"{key} is a whole number from 0 on, got {str(value)[:50]!r}")
            else:
                given[key] = int(value)
        return given


def _line(section: Any, key: str, default: int) -> int:
    lines = section.lc.data or {}
    return int(lines[key][0]) if key in lines else default


def _is_pattern(pattern: object) -> bool:
    return isinstance(pattern, str) and _PATTERN.fullmatch(pattern) is not None


def _matches_none(pattern: object) -> str:
    return (
        f"the pattern {str(pattern)[:50]!r} matches no table: tables are named by letters, digits and _ . - /, and "
        "* and ? stand for parts of a name"
    )


def _hint(key: str, value: object) -> str:
    if isinstance(value, int | float):
        return "; write it in quotes"
    if key == "token_sha256" and isinstance(value, str) and value.startswith("ember_"):
        return ", but a token itself: take it out of this file, and make another"
    if key == "certificate" and isinstance(value, str) and _ADDRESS.fullmatch(value):
        return ", but an address; name what is in the client's certificate, wherever it connects from"
    return ""


def shown(entry: AccessEntry) -> Iterator[tuple[str, str]]:
    """The fields of an entry for people, without what a token could be checked by."""
    yield "name", entry.name
    yield "role", entry.role
    yield (
        "known by",
        " and ".join(
            [
                *(["a token"] if entry.token_sha256 else []),
                *([f"certificate {entry.certificate}"] if entry.certificate else []),
            ]
        ),
    )
    yield "tables", "all" if entry.tables is None else ", ".join(entry.tables)
    quotas = [*_shown_limits(entry.quotas), *(text for one in entry.quotas.tables for text in _shown_limits(one))]
    yield "quotas", ", ".join(quotas) or "none"


def _shown_limits(limits: Quotas | TableLimits) -> list[str]:
    of = f" of {limits.pattern}" if isinstance(limits, TableLimits) else ""
    return [f"{name} {value:,}{of}" for name, value in vars(limits).items() if isinstance(value, int)]
