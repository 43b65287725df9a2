"""The log of a shard's events while it runs: what is appended, written in groups, and when that is safe.

    apply thread   check_room -> apply -> append -> when_safe(lsn, answer)
    log thread     write_group: all that waits (at most 8 MiB) -> checksums -> pwritev -> [fdatasync] -> the answers

What is appended is written at once, as one piece if it gathered while the last one was written. In mode `fsync` several
of these are synced as one group, until an answer waits for it (those to pushes that their senders keep do not), or it
has GROUP_BYTES, or is SYNC_SECONDS old.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty
from typing import NamedTuple

from embershard.proto.clock import SYSTEM_CLOCK, SystemClock
from embershard.proto.errors import LogStalled, ShardBusy
from embershard.ps.journal.record import MAX_GROUP, LogRecord, encode_record
from embershard.ps.journal.segments import SegmentWriter

GROUP_BYTES = 8 * 2**20
WAITING_BYTES = 256 * 2**20  # as the apply queue's own
RETRY_MS = 1000  # of a client, while the log cannot be written
SYNC_SECONDS = 0.02  # about a step of training

_SYNC = object()  # in the queue: somebody waits for what was appended

_log = logging.getLogger(__name__)


class _Waiting(NamedTuple):
    """A record that is not written yet."""

    lsn: int
    term: int
    num_bytes: int
    record: LogRecord


class Journal:
    """The log of a shard, at its end. `append` and `check_room` belong to one thread, `write_group` to another one."""

    def __init__(
        self,
        segments: SegmentWriter,
        *,
        next_lsn: int,
        term: int,
        group_bytes: int = GROUP_BYTES,
        waiting_bytes: int = WAITING_BYTES,
        clock: SystemClock = SYSTEM_CLOCK,
    ) -> None:
        self.segments = segments
        self.term = term
        self.last_lsn = next_lsn - 1  # of what was appended
        self.safe = Watermark(self.last_lsn, clock)  # what survives what the mode promises
        self._clock = clock
        self._group_bytes = group_bytes
        self._max_waiting_bytes = waiting_bytes
        self._queue = clock.queue()
        self._group: list[_Waiting] = []  # taken, and not written yet
        self._appended_bytes = self._written_bytes = 0  # each is changed by one thread
        self.appended_rows = 0  # that the appended records update
        self._written_lsn = self.last_lsn
        self._unsynced = 0  # records of the group that is written, and not synced
        self._sync_at = 0.0  # when it has to be
        self._synced_bytes = 0  # of _written_bytes
        self._stalled: OSError | None = None
        self._refused_bytes = 0  # of the largest event that could not be logged since one was
        self._is_closed = False

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the records, arrays included, that are appended and not written."""
        return self._appended_bytes - self._written_bytes

    @property
    def appended_bytes(self) -> int:
        """Bytes of the records that were appended."""
        return self._appended_bytes

    def check_room(self, num_bytes: int) -> None:
        """Before an event is applied: LogStalled where it could not be logged, ShardBusy where too much waits."""
        waiting = self.waiting_bytes
        if reason := self._reason(num_bytes):
            self._refused_bytes = max(self._refused_bytes, num_bytes)
            raise self._log_stalled(reason)
        if waiting and waiting + num_bytes > self._max_waiting_bytes:
            raise ShardBusy(queued_bytes=waiting, retry_after_ms=RETRY_MS // 10)

    def stalled(self) -> str:
        """Why events cannot be logged, as large as the one that was refused; empty where they can."""
        return self._reason(self._refused_bytes)

    def _reason(self, num_bytes: int) -> str:
        error = self._stalled
        if error is None and self.segments.room_bytes < self.waiting_bytes + num_bytes:
            error = self.segments.no_room
        return "" if error is None else error.strerror or str(error)

    def _log_stalled(self, reason: str) -> LogStalled:
        return LogStalled(path=str(self.segments.folder), reason=reason, retry_after_ms=RETRY_MS)

    def append(self, record: LogRecord) -> int:
        """Give an event that was applied its place in the log; its LSN. Its body must not change until it is safe."""
        self.last_lsn += 1
        num_bytes = record.num_bytes
        self._appended_bytes += num_bytes
        self.appended_rows += record.applied
        self._queue.put(_Waiting(self.last_lsn, self.term, num_bytes, record))
        return self.last_lsn

    def when_safe(
        self, lsn: int, call: Callable[[], object], refuse: Callable[[LogStalled], object] | None = None
    ) -> None:
        """Call once everything up to `lsn` is safe: now, or on the thread that writes the log.

        Where the log cannot be written meanwhile, `refuse` is called in its place, if there is one.
        """
        if not self.safe.when(lsn, call, refuse) and self.segments.syncs:
            self._queue.put(_SYNC)

    def write_group(self, *, wait: bool = False) -> bool:
        """Write what was appended, and call who waits for it; whether there was anything.

        With `wait`, wait for a record; it is False then once the journal is closed. After an OSError nothing of what
        was not written is lost: the next call tries again. SyncFailed, after which the process has to end.
        """
        if not self._group:
            self._group = self._take(wait)
        if not self._group and not self._unsynced:
            return False
        try:
            while self._group:
                self._write_part()
        except OSError as error:
            self._stalled = error
            self.safe.refuse(self._log_stalled(self._reason(0)))
            raise
        self._stalled = None
        if self._unsynced and (not wait or self._is_closed or self._is_sync_due()):
            self._sync()
        return True

    def close(self) -> None:
        """Take no more records; `write_group` still writes those that wait."""
        self._queue.put(None)

    def _take(self, wait: bool) -> list[_Waiting]:
        taken: list[_Waiting] = []
        num_bytes = 0
        while not self._is_closed and num_bytes < self._group_bytes and len(taken) + self._unsynced < MAX_GROUP:
            block = wait and not taken
            timeout = max(0.0, self._sync_at - self._clock.now()) if block and self._unsynced else None
            try:
                waiting = self._queue.get(block, timeout)
            except Empty:
                break
            if waiting is None:
                self._is_closed = True
            elif waiting is _SYNC:
                if self._unsynced and not taken:
                    break
            else:
                taken.append(waiting)
                num_bytes += waiting.num_bytes
        return taken

    def _write_part(self) -> None:
        """Write as much of the group as one segment takes: what a segment synced is a group to its readers."""
        segments, group = self.segments, self._group
        if group[0].num_bytes > segments.left_bytes:
            if self._unsynced:
                self._sync()
            segments.rotate(group[0].lsn, group[0].num_bytes)
        pieces: list[bytes | memoryview] = []
        num_bytes = count = 0
        for lsn, term, record_bytes, record in group:
            if num_bytes + record_bytes > segments.left_bytes:
                break
            pieces += encode_record(record, lsn, term, self._unsynced + count, segments.id)
            num_bytes += record_bytes
            count += 1
        segments.write(pieces, num_bytes)
        self._written_lsn = group[count - 1].lsn
        self._written_bytes += num_bytes
        self._group = group[count:]
        if not segments.syncs:
            self.safe.advance(self._written_lsn)
            return
        if not self._unsynced:
            self._sync_at, self._synced_bytes = self._clock.now() + SYNC_SECONDS, self._written_bytes - num_bytes
        self._unsynced += count

    def _is_sync_due(self) -> bool:
        gathered = self._written_bytes - self._synced_bytes
        return self.safe.is_awaited or gathered >= self._group_bytes or self._clock.now() >= self._sync_at

    def _sync(self) -> None:
        self.segments.sync()
        self._unsynced = 0
        self.safe.advance(self._written_lsn)


class Watermark:
    """An LSN that grows, and those who wait for it."""

    def __init__(self, lsn: int, clock: SystemClock = SYSTEM_CLOCK) -> None:
        self.lsn = lsn
        self._lock = clock.lock()
        self._waiting: list[_Awaiting] = []

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for it."""
        return bool(self._waiting)

    def when(self, lsn: int, call: Callable[[], object], refuse: Callable[[LogStalled], object] | None = None) -> bool:
        """Call once it is `lsn` or higher; whether it is that now."""
        with self._lock:
            if lsn > self.lsn:
                self._waiting.append(_Awaiting(lsn, call, refuse))
                return False
        call()
        return True

    def advance(self, lsn: int) -> None:
        """Raise it, and call who waited for that, in the order in which they came."""
        with self._lock:
            self.lsn = lsn
            ready = [one.call for one in self._waiting if one.lsn <= lsn]
            self._waiting = [one for one in self._waiting if one.lsn > lsn]
        _call_each(ready, lsn)

    def refuse(self, error: LogStalled) -> None:
        """Tell those who wait, and can be told, that it does not grow now; they wait no more."""
        with self._lock:
            told = [partial(one.refuse, error) for one in self._waiting if one.refuse is not None]
            self._waiting = [one for one in self._waiting if one.refuse is None]
        _call_each(told, self.lsn)


class _Awaiting(NamedTuple):
    """Who waits for an LSN."""

    lsn: int
    call: Callable[[], object]
    refuse: Callable[[LogStalled], object] | None


def _call_each(calls: Sequence[Callable[[], object]], lsn: int) -> None:
    for call in calls:
        try:
            call()
        except Exception:  # one answer that cannot be given must not keep back the others
            _log.exception("while LSN %d was acknowledged", lsn)
