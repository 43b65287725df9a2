"""The bases of a running shard: when one is taken, the thread that writes it, and what it frees of the log.

    apply thread   due -> take: the tables are frozen between two events
    base thread    its files -> the log is safe up to it -> MANIFEST names it -> segments and bases before it are freed

A table may have two frozen readers, so a job's snapshot never waits for a base, nor a clock for either.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from embershard.proto.errors import LogLocked
from embershard.ps.bases.base import ShardBase, range_of, write_base
from embershard.ps.journal.folder import LogFolder, remove_base
from embershard.ps.journal.journal import Journal
from embershard.ps.journal.manifest import LogBase
from embershard.ps.journal.segments import NUM_SPARES, SyncFailed
from embershard.ps.table.frozen import CopyOnWriteRows
from embershard.ps.table.table import Table

TAIL_BYTES = 256 * 2**20  # of records behind a base, below which none is taken
TAIL_SHARE = 0.5  # of the state: a recovery reads at most so much beside it, and bases write at most twice the log
_RETRY_SECONDS = 5.0  # after a base that could not be taken
_SAFE_SECONDS = 0.5  # between looks whether it was cancelled, while the log is not safe up to a base

_log = logging.getLogger(__name__)


def _start(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name="base", daemon=True)
    thread.start()
    return thread


class Bases:
    """Takes bases of the shard whose log this is; all but `write` and `publish` belong to the apply thread.

    tail_bytes: of the records behind `base`, the one that the log begins with (`base_bytes`: of its rows); the next is
    taken once they are more than `smallest_tail_bytes` and than `tail_share` of the state. limit_bytes: of the folder.
    `start` runs the work of a base, by default in a thread; `on_fatal` ends the process.
    """

    def __init__(
        self,
        folder: LogFolder,
        journal: Journal,
        base: ShardBase | None,
        tail_bytes: int,
        *,
        on_fatal: Callable[[BaseException], None],
        limit_bytes: int | None = None,
        smallest_tail_bytes: int = TAIL_BYTES,
        tail_share: float = TAIL_SHARE,
        start: Callable[[Callable[[], None]], threading.Thread | None] = _start,
    ) -> None:
        self._folder, self._journal = folder, journal
        self.lsn = 0 if base is None else base.lsn  # of the last base
        self.redo_lsn = 0 if base is None else base.redo_lsn  # of the first event that it needs
        self.taken = 0  # by this process
        self.base_bytes = 0 if base is None else base.num_bytes
        self._before_bytes = tail_bytes  # of the tail that this process has not appended; less what a base has freed
        self._limit_bytes = limit_bytes
        self._smallest_tail_bytes, self._tail_share = smallest_tail_bytes, tail_share
        self._start, self._on_fatal = start, on_fatal
        self._writer: BaseWriter | None = None
        self._thread: threading.Thread | None = None
        self._retry_at = 0.0
        self._limit_segments()

    @property
    def tail_bytes(self) -> int:
        """Bytes of the records behind the last base, which a recovery replays."""
        return self._before_bytes + self._journal.appended_bytes

    @property
    def writing(self) -> bool:
        """Whether one is being taken."""
        return self._writer is not None

    def due(self, now: float, state_bytes: int) -> bool:
        """Whether one is to be taken: the tail is half of the state, or the folder is at its limit."""
        tail = self.tail_bytes
        if tail <= 0 or self._writer is not None or now < self._retry_at:
            return False
        segments = self._journal.segments
        enough = max(self._smallest_tail_bytes, int(self._tail_share * state_bytes))
        if segments.limit_bytes is not None:  # before pushes have to wait for it
            enough = min(enough, segments.limit_bytes // 2)
        return tail > enough or segments.at_limit

    def take(self, now: float, tables: Sequence[Table], control: dict[str, Any]) -> None:
        """Freeze these tables, and have their image written; `control` is the rest of the state, of this moment."""
        self._retry_at = now + _RETRY_SECONDS
        frozen: list[tuple[Table, CopyOnWriteRows]] = []
        try:
            for table in tables:
                frozen.append((table, table.freeze()))
        except (OSError, MemoryError) as error:
            for table, rows in frozen:
                table.thaw(rows)
            _log.error("no base of the log was taken: no memory for copies of rows: %s", error)
            return
        self._writer = BaseWriter(self._folder, self._journal, frozen, control, self._on_fatal, self._ended)
        self._thread = self._start(self._writer.run)

    def close(self, timeout: float) -> None:
        """Take none any more; one that is not written is given up."""
        self._retry_at = float("inf")
        writer, thread = self._writer, self._thread
        if writer is not None:
            writer.cancel()
        if thread is not None:
            thread.join(timeout)

    def _ended(self, base: ShardBase | None, before_bytes: int) -> None:
        """The base is the log's now, with `before_bytes` appended before its moment; or there is none."""
        if base is not None:
            self.lsn, self.redo_lsn, self.base_bytes = base.lsn, base.redo_lsn, base.num_bytes
            self._before_bytes = -before_bytes
            self.taken += 1
            self._limit_segments()
            self._retry_at = 0.0
        self._writer = None

    def _limit_segments(self) -> None:
        """Divide the folder's limit: two images have room in it, since the next is written beside the last.

        Of the first the size is not known: half is kept for it.

        Behind what no base can free there is always room for more segments: a limit that is too small for them is
        exceeded, as pushes would wait for ever.
        """
        segments = self._journal.segments
        if self._limit_bytes is None:
            return
        smallest = segments.bytes_up_to(self.lsn) + NUM_SPARES * segments.segment_bytes
        limit = self._limit_bytes - (2 * self.base_bytes or self._limit_bytes // 2)
        if limit < smallest:
            _log.warning("the log needs more than --log-bytes: %d bytes", smallest + 2 * self.base_bytes)
        segments.limit_bytes = max(limit, smallest)
        segments.wants_spare.set()


class BaseWriter:
    """Writes one base, and has the log begin with it. `ended` is told of it, or None where it failed."""

    def __init__(
        self,
        folder: LogFolder,
        journal: Journal,
        tables: Sequence[tuple[Table, CopyOnWriteRows]],
        control: dict[str, Any],
        on_fatal: Callable[[BaseException], None],
        ended: Callable[[ShardBase | None, int], None],
    ) -> None:
        self._folder, self._journal, self._tables, self._control = folder, journal, tables, control
        self._on_fatal, self._tell = on_fatal, ended
        self._before_bytes = journal.appended_bytes
        self._lsn, _ = range_of(control)
        self._path: Path = folder.new_base(self._lsn)
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Write no more; nobody is told of it."""
        self._cancelled.set()

    def run(self) -> None:
        """Take the base, whatever comes of it."""
        base = None
        try:
            written = self.write()
            self._wait_until_safe()
            self.publish(written)
            base = written
        except _Cancelled:
            pass
        except OSError as error:
            _log.error("no base of the log was taken, and its folder goes on growing: %s", error)
        except (SyncFailed, LogLocked) as error:
            self._on_fatal(error)
        except Exception:
            _log.exception("a defect while a base of the log was taken")
        finally:
            for table, rows in self._tables:
                table.thaw(rows)
            self._tell(base, self._before_bytes)

    def write(self) -> ShardBase:
        """Write its files; they are on the disk then. OSError, with nothing left."""
        disk = self._folder.disk
        try:
            return write_base(disk, self._path, self._folder.manifest, self._control, self._tables, self._go_on)
        except (OSError, _Cancelled):
            with suppress(OSError):  # what counts is the error above; on a full disk others want the room
                remove_base(disk, self._path)
            raise

    def publish(self, base: ShardBase) -> None:
        """Have the log begin with it. Its folder stays after an error: the manifest on the disk may name it."""
        self._folder.recycle(self._journal, LogBase(self._path.name, base.lsn, base.redo_lsn))

    def _wait_until_safe(self) -> None:
        safe = threading.Event()
        self._journal.when_safe(self._lsn, safe.set)
        while not safe.wait(_SAFE_SECONDS):
            self._go_on()
        self._go_on()

    def _go_on(self) -> None:
        if self._cancelled.is_set():
            raise _Cancelled


class _Cancelled(Exception):
    """Nobody wants the base any more."""
