"""The log of a shard's events while it runs: what is appended, written in groups, and when that is safe.

    apply thread   check_room -> apply -> append -> when_safe(lsn, answer)
    log thread     write_group: all that waits (at most 8 MiB) -> checksums -> pwritev -> [fdatasync] -> the answers

There is no timer: a group is what gathered while the last one was written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import Empty
from typing import NamedTuple

from embershard.proto.clock import SYSTEM_CLOCK, SystemClock
from embershard.proto.errors import LogStalled, ShardBusy
from embershard.ps.journal.record import MAX_GROUP, LogRecord, encode_record
from embershard.ps.journal.segments import SegmentWriter

GROUP_BYTES = 8 * 2**20
WAITING_BYTES = 256 * 2**20  # as the apply queue's own
RETRY_MS = 1000  # of a client, while the log cannot be written

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
        self.written = Watermark(self.last_lsn, clock)  # what survives this process
        self.safe = Watermark(self.last_lsn, clock)  # what survives what the mode promises
        self._group_bytes = group_bytes
        self._max_waiting_bytes = waiting_bytes
        self._queue = clock.queue()
        self._group: list[_Waiting] = []  # taken, and not written yet
        self._appended_bytes = self._written_bytes = 0  # each is changed by one thread
        self._stalled: OSError | None = None
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
        error = self._stalled
        if error is None and self.segments.room_bytes < waiting + num_bytes:
            error = self.segments.no_room
        if error is not None:
            reason = error.strerror or str(error)
            raise LogStalled(path=str(self.segments.folder), reason=reason, retry_after_ms=RETRY_MS)
        if waiting and waiting + num_bytes > self._max_waiting_bytes:
            raise ShardBusy(queued_bytes=waiting, retry_after_ms=RETRY_MS // 10)

    def append(self, record: LogRecord) -> int:
        """Give an event that was applied its place in the log; its LSN. Its body must not change until it is safe."""
        self.last_lsn += 1
        num_bytes = record.num_bytes
        self._appended_bytes += num_bytes
        self._queue.put(_Waiting(self.last_lsn, self.term, num_bytes, record))
        return self.last_lsn

    def when_safe(self, lsn: int, call: Callable[[], object]) -> None:
        """Call once everything up to `lsn` is safe: now, or on the thread that writes the log."""
        self.safe.when(lsn, call)

    def when_written(self, lsn: int, call: Callable[[], object]) -> None:
        """Call once everything up to `lsn` survives the end of this process."""
        self.written.when(lsn, call)

    def write_group(self, *, wait: bool = False) -> bool:
        """Write what was appended, and call who waits for it; whether there was anything.

        With `wait`, wait for a record; it is False then once the journal is closed. After an OSError nothing of what
        was not written is lost: the next call tries again. SyncFailed, after which the process has to end.
        """
        if not self._group:
            self._group = self._take(wait)
        if not self._group:
            return False
        try:
            while self._group:
                self._write_part()
        except OSError as error:
            self._stalled = error
            raise
        self._stalled = None
        return True

    def close(self) -> None:
        """Take no more records; `write_group` still writes those that wait."""
        self._queue.put(None)

    def _take(self, wait: bool) -> list[_Waiting]:
        taken: list[_Waiting] = []
        num_bytes = 0
        while not self._is_closed and num_bytes < self._group_bytes and len(taken) < MAX_GROUP:
            try:
                waiting = self._queue.get(block=wait and not taken)
            except Empty:
                break
            if waiting is None:
                self._is_closed = True
                break
            taken.append(waiting)
            num_bytes += waiting.num_bytes
        return taken

    def _write_part(self) -> None:
        """Write as much of the group as one segment takes: what a segment synced is a group to its readers."""
        segments, group = self.segments, self._group
        if group[0].num_bytes > segments.left_bytes:
            segments.rotate(group[0].lsn, group[0].num_bytes)
        pieces: list[bytes | memoryview] = []
        num_bytes = count = 0
        for lsn, term, record_bytes, record in group:
            if num_bytes + record_bytes > segments.left_bytes:
                break
            pieces += encode_record(record, lsn, term, count, segments.id)
            num_bytes += record_bytes
            count += 1
        segments.write(pieces, num_bytes)
        last = group[count - 1].lsn
        self._written_bytes += num_bytes
        self._group = group[count:]
        self.written.advance(last)
        if segments.syncs:
            segments.sync()
        self.safe.advance(last)


class Watermark:
    """An LSN that grows, and those who wait for it."""

    def __init__(self, lsn: int, clock: SystemClock = SYSTEM_CLOCK) -> None:
        self.lsn = lsn
        self._lock = clock.lock()
        self._waiting: list[tuple[int, Callable[[], object]]] = []

    def when(self, lsn: int, call: Callable[[], object]) -> None:
        """Call once it is `lsn` or higher."""
        with self._lock:
            if lsn > self.lsn:
                self._waiting.append((lsn, call))
                return
        call()

    def advance(self, lsn: int) -> None:
        """Raise it, and call who waited for that, in the order in which they came."""
        with self._lock:
            self.lsn = lsn
            ready = [call for want, call in self._waiting if want <= lsn]
            self._waiting = [(want, call) for want, call in self._waiting if want > lsn]
        for call in ready:
            try:
                call()
            except Exception:  # one answer that cannot be given must not keep back the others
                _log.exception("while LSN %d was acknowledged", lsn)
