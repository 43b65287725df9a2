"""The audit log of a shard: who came, and who changed more than rows; each line carries the hash of the one before.

A line is a JSON object: `n` (its number, from 1), `time` (UTC), `principal`, `role`, `peer`, `verb`, `table`, `outcome`
("done", or the name of an error), `before` (the hash of the line before; 64 zeros in the first) and `hash`, the SHA-256
of the line as it would be without `hash`. No token, id or value is ever in it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from embershard.proto.errors import AuditDamaged, CannotWrite

FIRST = "0" * 64
REFUSALS_PER_MINUTE = 10  # that are written; of the others, how many there were
_MOST_WAITING = 10_000  # lines; more than a disk that does not answer will ever take
_LONGEST = 200  # characters of a field: names are of a peer's choice
_ORDER = ("n", "time", "principal", "role", "peer", "verb", "table", "outcome", "before")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Act:
    """One entry of the audit log; `safe`: synced to the disk at once, as the acts of admins are."""

    verb: str
    outcome: str
    principal: str = ""
    role: str = ""
    peer: str = ""
    table: str = ""
    safe: bool = False


class AuditLog:
    """Appends to a file in a thread of its own: a disk that does not answer holds up nobody. Safe for use by threads.

    A line that a killed process has begun is cut off; AuditDamaged where the last whole one is not what was written,
    CannotWrite where the file cannot be, or another shard writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                _lock(self._file)
                cut = _cut_torn_line(self._file)
                self._number, self._last = _end_of(path)
            except BaseException:
                os.close(self._file)
                raise
        except OSError as error:
            reason = error.strerror or str(error)
            raise CannotWrite(path=str(path), reason=reason, remedy="choose another folder with --audit") from None
        self._queue: queue.SimpleQueue[Act | Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of what follows
        self._closed = False
        self._minute, self._refused, self._unwritten, self._lost = 0, 0, 0, 0
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()
        self.write(Act("start", f"done, {cut} bytes of a line were cut off" if cut else "done", safe=True))

    @property
    def last(self) -> str:
        """The hash of the line that was written last."""
        return self._last

    def write(self, act: Act) -> None:
        """Append a line, soon; where too many wait already, it is lost and counted, unless it is to be `safe`."""
        if act.safe or self._queue.qsize() < _MOST_WAITING:
            self._queue.put(act)
        else:
            with self._lock:
                self._lost += 1

    def when_safe(self, end: Callable[[], None]) -> None:
        """Call `end`, in another thread, once the acts that were written until now are where they are to be.

        Those that are `safe` are on the disk then, unless it has refused them, which the log of the shard says.
        """
        with self._lock:  # close puts nothing behind what ends the thread
            if not self._closed:
                self._queue.put(end)
                return
        end()

    def refuse(self, act: Act) -> None:
        """Append a line about somebody who was refused, unless there were many in this minute."""
        minute = int(time.monotonic() // 60)
        with self._lock:
            if minute != self._minute:
                self._minute, self._refused = minute, 0
            self._refused += 1
            if self._refused > REFUSALS_PER_MINUTE:
                self._unwritten += 1
                return
            more, self._unwritten = self._unwritten, 0
        self.write(act)
        if more:
            self.write(_unwritten(more))

    def close(self) -> None:
        """Write what waits, and end."""
        with self._lock:
            self._closed = True
        self.write(Act("stop", "done", safe=True))
        self._queue.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        while (act := self._queue.get()) is not None:
            if not isinstance(act, Act):
                act()
                continue
            with self._lock:
                lost, self._lost = self._lost, 0
                # of a minute that is over, or the last one: there may be no further refusal to say it with
                more = self._unwritten if self._closed or time.monotonic() // 60 != self._minute else 0
                self._unwritten -= more
            missing = lost + 1
            try:
                if more:
                    self._append(_unwritten(more))
                    more = 0
                if lost:
                    self._append(Act("lost", f"{lost} lines: the disk did not take them"))
                    missing = 1
                self._append(act)
                missing = 0
                if act.safe:
                    os.fsync(self._file)
            except OSError as error:
                with self._lock:  # the next line says so
                    self._lost += missing
                    self._unwritten += more
                _log.error("the audit log %s lacks a line (%s): %s", self.path, error.strerror, act)
        os.close(self._file)

    def _append(self, act: Act) -> None:
        fields = {
            name: getattr(act, name)[:_LONGEST] for name in ("principal", "role", "peer", "verb", "table", "outcome")
        }
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line, digest = _sealed({"n": self._number + 1, "time": now, **fields, "before": self._last})
        written = os.write(self._file, line)
        if written < len(line):
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._number, self._last = self._number + 1, digest


def _unwritten(refusals: int) -> Act:
    return Act("refusals", f"{refusals} more since the one before, not written")


def verify(path: Path, expect: str | None = None) -> tuple[int, str, bool]:
    """Check a whole log: its number of lines, the hash of the last one, and whether a line has the hash `expect`.

    AuditDamaged names the first wrong line. Who can write the file can write all of it anew, or cut its end off: expect
    the hash that was the last one before.
    """
    number, before, found = 0, FIRST, expect is None
    for number, fields in _lines(path):
        if fields["before"] != before or fields["n"] != number:
            reason = "it does not follow the line before: lines were changed, removed or added here"
            raise AuditDamaged(path=str(path), line=number, reason=reason)
        before = str(fields["hash"])
        found = found or before == expect
    return number, before, found


def _lines(path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    """The lines of a file, each checked by itself."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            yield number, _fields(path, number, line)


def _fields(path: Path, number: int, line: bytes) -> Mapping[str, object]:
    try:
        fields = json.loads(line)
        found = _sealed({name: fields[name] for name in _ORDER})[0]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise AuditDamaged(path=str(path), line=number, reason="it is no line of an audit log") from None
    if found != line:
        raise AuditDamaged(path=str(path), line=number, reason="it is not what was written: its hash differs")
    assert isinstance(fields, dict)
    return fields


def _sealed(fields: Mapping[str, object]) -> tuple[bytes, str]:
    """A line of these fields, and its hash."""
    text = json.dumps(fields, ensure_ascii=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{text[:-1]},"hash":"{digest}"}}\n'.encode(), digest


def _lock(file: int) -> None:
    """Keep the file for this process, until it ends; OSError where another one has it.

    Lines of two shards in one file would not follow one another, as if somebody had changed them.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OSError(error.errno, "another shard writes it") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # a file system without locks
            raise


def _cut_torn_line(file: int) -> int:
    """Cut off what follows the last whole line; how many bytes that were."""
    size = os.fstat(file).st_size
    tail = os.pread(file, 2**16, max(0, size - 2**16))
    torn = len(tail) - (tail.rfind(b"\n") + 1)
    if torn:
        os.ftruncate(file, size - torn)
    return torn


def _end_of(path: Path) -> tuple[int, str]:
    """The number and the hash of the last line."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2**16))
        lines = file.read().splitlines(keepends=True)
    if not lines:
        return 0, FIRST
    try:
        fields = _fields(path, 0, lines[-1])
    except AuditDamaged as error:
        with path.open("rb") as file:
            number = sum(1 for _ in file)
        reason = (
            f"{error.fields['reason']}; keep the file as evidence under another name, and the shard begins a new one"
        )
        raise AuditDamaged(path=str(path), line=number, reason=reason) from None
    return int(str(fields["n"])), str(fields["hash"])
