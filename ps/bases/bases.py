"""The bases of a running shard: when one is taken, the thread that writes it, and what it frees of the log.

    apply thread   due -> take: the tables are frozen between two events
    base thread    its files -> the log is safe up to it -> MANIFEST names it -> segments and bases before it are freed

A table may have two frozen readers, so a job's snapshot never waits for a base, nor a clock for either.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from embershard.proto.clock import SYSTEM_CLOCK, ClockThread, SystemClock
from embershard.proto.errors import LogLocked, LogTooLong
from embershard.ps.bases.base import ShardBase, range_of, write_base
from embershard.ps.journal.folder import LogFolder, remove_base
from embershard.ps.journal.journal import Journal
from embershard.ps.journal.manifest import LogBase
from embershard.ps.journal.segments import NUM_SPARES, SyncFailed
from embershard.ps.table.frozen import FrozenTable
from embershard.ps.table.table import Table

# What a replay of the tail, the records behind a base, costs is counted in bytes that it reads, of .4 ns each. A row
# that it updates takes as long as so many bytes (`make bar-recovery`), also where its gradient was compressed to a few.
ROW_COST = 300
LEAST_COST = 384 * 2**20  # .15 s: below it no base is taken
COST_SHARE = 1.25  # of the bytes of the state: .5 s for each GB
BYTES_SHARE = 0.6  # of the state at most, for the disk's sake
MOST_TAIL = 1.25  # times the tail with which a base is taken: pushes that are faster than the base are slowed down then
SLOWED_BYTES = 16 * 2**20  # a second that pass nevertheless, or a hundredth of the tail: where a base takes minutes,
# pushes of many workers must pass within their timeouts
SMALL_BYTES = 2**16  # events that are never slowed down: heartbeats, joins
MOST_INCREMENTS = 8  # of an image, and of at most half of its bytes in all: then another image is taken
BASES_READER = "bases"  # of changed rows (Table.mark)
_RETRY_SECONDS = 5.0  # after a base that could not be taken
_SAFE_SECONDS = 0.5  # between looks whether it was cancelled, while the log is not safe up to a base

_log = logging.getLogger(__name__)


class Bases:
    """Takes bases of the shard whose log this is; all but `write` and `publish` belong to the apply thread.

    tail: the bytes of the records behind the last of `bases`, with which the log begins, and the rows that they update.
    The next base is taken once their replay costs more than `least_cost` and than `cost_share` of the state's bytes.
    limit_bytes: of the folder. `start` runs the work of a base, by default in a thread; `on_fatal` ends the process.
    """

    def __init__(
        self,
        folder: LogFolder,
        journal: Journal,
        bases: Sequence[ShardBase],
        tail: tuple[int, int],
        *,
        on_fatal: Callable[[BaseException], None],
        limit_bytes: int | None = None,
        least_cost: int = LEAST_COST,
        cost_share: float = COST_SHARE,
        row_cost: int = ROW_COST,
        start: Callable[[Callable[[], None]], ClockThread | None] | None = None,
        clock: SystemClock = SYSTEM_CLOCK,
    ) -> None:
        self._folder, self._journal = folder, journal
        self.lsn = bases[-1].lsn if bases else 0  # of the last base
        self.redo_lsn = bases[-1].redo_lsn if bases else 0  # of the first event that it needs
        self.taken = 0  # by this process
        self._sizes = [base.num_bytes for base in bases]  # of the image, and of its increments
        # of the tail what this process has not appended; less what a base has freed
        self._before_bytes, self._before_rows = tail
        self._limit_bytes = limit_bytes
        self._least_cost, self._cost_share, self._row_cost = least_cost, cost_share, row_cost
        self._start = start or (lambda work: clock.spawn("base", work))
        self._on_fatal, self._clock = on_fatal, clock
        self._writer: BaseWriter | None = None
        self._thread: ClockThread | None = None
        self._retry_at = 0.0
        self._most_cost = 2**62
        self._next_large_at = 0.0  # when the next large event may come, while the tail is too long
        self._is_held = False
        self._limit_segments()

    @property
    def base_bytes(self) -> int:
        """Bytes of the rows in its bases, which a recovery loads."""
        return sum(self._sizes)

    @property
    def tail_bytes(self) -> int:
        """Bytes of the records behind the last base, which a recovery replays."""
        return self._before_bytes + self._journal.appended_bytes

    @property
    def replay_cost(self) -> int:
        """The cost of replaying the tail, in bytes: those of its records, and `row_cost` for each row they update."""
        return self.tail_bytes + self._row_cost * (self._before_rows + self._journal.appended_rows)

    @property
    def writing(self) -> bool:
        """Whether one is being taken."""
        return self._writer is not None

    def due(self, now: float, state_bytes: int) -> bool:
        """Whether one is to be taken: a replay would take long for this state, or the folder is at its limit."""
        tail = self.tail_bytes
        if tail <= 0 or self._is_held or self._writer is not None or now < self._retry_at:
            return False
        segments = self._journal.segments
        cost, enough = self.replay_cost, max(self._least_cost, int(self._cost_share * state_bytes))
        room = max(self._least_cost, int(BYTES_SHARE * state_bytes))
        if segments.limit_bytes is not None:  # before pushes have to wait for it
            room = min(room, segments.limit_bytes // 2)
        if tail * enough > cost * room:  # its bytes are the first to be too many
            enough = cost * room // tail
        self._most_cost = int(MOST_TAIL * enough)
        return cost > enough or segments.at_limit

    def check_tail(self, num_bytes: int, now: float) -> None:
        """Slow large events down while a base is written and a recovery would read too much: LogTooLong.

        Databases do the same while a checkpoint is late (InnoDB's sync flush, RocksDB's delayed writes).
        """
        if self._writer is None or num_bytes < SMALL_BYTES or self.replay_cost + num_bytes <= self._most_cost:
            return
        tail = self.tail_bytes
        if now < self._next_large_at:
            wait_ms = math.ceil(1000 * (self._next_large_at - now))
            raise LogTooLong(tail_bytes=tail, retry_after_ms=wait_ms)
        self._next_large_at = now + num_bytes / max(SLOWED_BYTES, tail // 100)

    def hold(self, is_held: bool) -> None:
        """Begin none as long as a restore is between its first event and its last, which the limit does not delay.

        A base has none of the rows that the log has of it, and would have their events removed.
        """
        was_held, self._is_held = self._is_held, is_held
        if is_held or was_held:
            self._limit_segments()

    def take(self, now: float, tables: Sequence[Table], control: dict[str, Any]) -> None:
        """Freeze these tables, and have their image written; `control` is the rest of the state, of this moment."""
        self._retry_at = now + _RETRY_SECONDS
        frozen: list[FrozenTable] = []
        path = self._folder.new_base(control["lsn"])
        parent = self._folder.manifest.bases[-1].name if self._folder.manifest.bases else ""
        try:
            for table in tables:
                changed = table.changed_since(BASES_READER, parent)
                frozen.append(FrozenTable(table, table.freeze(), changed))
                table.mark(BASES_READER, path.name)
        except (OSError, MemoryError) as error:
            for table, rows, _ in frozen:
                table.thaw(rows)
            _log.error("no base of the event log was written: no memory for copies of rows: %s", error)
            return
        room = self._sizes[0] // 2 - sum(self._sizes[1:]) if 0 < len(self._sizes) <= MOST_INCREMENTS else 0
        where = self._folder, self._journal, path
        self._writer = BaseWriter(*where, frozen, control, self._on_fatal, self._ended, parent, room, self._clock)
        try:
            self._thread = self._start(self._writer.run)
        except RuntimeError as error:
            self._writer.abandon()
            _log.error("no base of the event log was written: no memory for a thread: %s", error)

    def close(self, timeout: float) -> None:
        """Take none any more; one that is not written yet is dropped."""
        self._retry_at = float("inf")
        writer, thread = self._writer, self._thread
        if writer is not None:
            writer.cancel()
        if thread is not None:
            thread.join(timeout)

    def _ended(self, base: ShardBase | None, before: tuple[int, int]) -> None:
        """The base is the log's now, with these bytes and rows appended before its moment; or there is none."""
        if base is not None:
            self.lsn, self.redo_lsn = base.lsn, base.redo_lsn
            self._sizes = [*(self._sizes if base.parent else ()), base.num_bytes]
            self._before_bytes, self._before_rows = -before[0], -before[1]
            self.taken += 1
            self._limit_segments()
            self._retry_at = 0.0
        self._writer = None

    def _limit_segments(self) -> None:
        """Divide the folder's limit: another image has room in it, since it is written beside those that are there.

        Of the first the size is not known: half is kept for it.

        Behind what no base can free there is always room for more segments: a limit that is too small for them is
        exceeded, as pushes would wait for ever.
        """
        segments = self._journal.segments
        if self._limit_bytes is None:
            return
        if self._is_held:
            segments.limit_bytes = None
            segments.wants_spare.set()
            return
        smallest = segments.bytes_up_to(self.lsn) + NUM_SPARES * segments.segment_bytes
        images = sum(self._sizes) + self._sizes[0] if self._sizes else self._limit_bytes // 2
        limit = self._limit_bytes - images
        if limit < smallest:
            _log.warning("the event log needs more than --log-bytes: %d bytes", smallest + images)
        segments.limit_bytes = max(limit, smallest)
        segments.wants_spare.set()


class BaseWriter:
    """Writes one base, and has the log begin with it. `ended` is told of it, or None where it failed.

    It is an increment of `parent` where that takes at most `room` bytes.
    """

    def __init__(
        self,
        folder: LogFolder,
        journal: Journal,
        path: Path,
        tables: Sequence[FrozenTable],
        control: dict[str, Any],
        on_fatal: Callable[[BaseException], None],
        ended: Callable[[ShardBase | None, tuple[int, int]], None],
        parent: str,
        room: int,
        clock: SystemClock = SYSTEM_CLOCK,
    ) -> None:
        self._folder, self._journal, self._tables, self._control = folder, journal, tables, control
        self._on_fatal, self._tell = on_fatal, ended
        self._before = journal.appended_bytes, journal.appended_rows
        self._lsn, _ = range_of(control)
        self._path, self._parent, self._room = path, parent, room
        self._clock, self._cancelled = clock, clock.event()

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
        except _BaseCancelled:
            pass
        except OSError as error:
            _log.error("no base of the event log was written, and its folder keeps growing: %s", error)
        except MemoryError:
            _log.error("no base of the event log was written, and its folder keeps growing: no memory to write it")
        except (SyncFailed, LogLocked) as error:
            self._on_fatal(error)
        except Exception:
            _log.exception("a defect while a base of the event log was written")
        finally:
            self._end(base)

    def abandon(self) -> None:
        """Write no base: no thread could be started for it."""
        self._end(None)

    def _end(self, base: ShardBase | None) -> None:
        for table, rows, _ in self._tables:
            table.thaw(rows)
        self._tell(base, self._before)

    def write(self) -> ShardBase:
        """Write its files; they are on the disk then. OSError or MemoryError, with nothing left."""
        disk, log = self._folder.disk, self._folder.manifest
        is_small = sum(table.increment_bytes for table in self._tables) <= self._room
        parent = self._parent if self._room and is_small else ""
        try:
            return write_base(disk, self._path, log, self._control, self._tables, parent, self._go_on)
        except Exception:  # also for want of memory
            with suppress(OSError):  # what counts is the error above; on a full disk others want the room
                remove_base(disk, self._path)
            raise

    def publish(self, base: ShardBase) -> None:
        """Have the log begin with it. Its folder stays after an error: the manifest on the disk may name it."""
        before = self._folder.manifest.bases if base.parent else ()
        self._folder.recycle(self._journal, (*before, LogBase(self._path.name, base.lsn, base.redo_lsn)))

    def _wait_until_safe(self) -> None:
        safe = self._clock.event()
        self._journal.when_safe(self._lsn, safe.set)
        while not safe.wait(_SAFE_SECONDS):
            self._go_on()
        self._go_on()

    def _go_on(self) -> None:
        if self._cancelled.is_set():
            raise _BaseCancelled


class _BaseCancelled(Exception):
    """The base that is being made is not needed any more."""
