"""A shard's log: what is written to it as the shard serves, and the state that a replay of it makes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from embershard.proto.clock import SYSTEM_CLOCK, SystemClock
from embershard.proto.errors import BadFrame, EmbershardError, LogDiverged, LogStalled, LogUnusable
from embershard.proto.wire import FrameReader, Header
from embershard.ps.bases.base import ShardBase, make_tables, read_bases
from embershard.ps.bases.bases import BASES_READER, Bases
from embershard.ps.coordination.clock import MustWait
from embershard.ps.coordination.outcome import Outcome
from embershard.ps.core import Core
from embershard.ps.events import Event, PushEvent, decode_event, encode_event, event_name, kind_of
from embershard.ps.journal.folder import DurabilityMode, LogFolder, named_errors
from embershard.ps.journal.journal import Journal
from embershard.ps.journal.log_thread import LogThread, end_process
from embershard.ps.journal.progress import RecoveryProgress, RecoveryRate
from embershard.ps.journal.reader import LoggedRecord
from embershard.ps.journal.record import MAX_BODY_BYTES, LogRecord
from embershard.ps.journal.segments import SEGMENT_BYTES
from embershard.ps.shard import Shard

FAILED = 1  # flag of a record: the event ended with an error after it had changed something
_REPORT_SECONDS = 5.0  # between lines about a long replay: a supervisor waits as long as there are some

_log = logging.getLogger(__name__)


class ShardLog:
    """The log of a running shard; `start` has a thread write it. `on_fatal` ends the process."""

    def __init__(
        self,
        journal: Journal,
        mode: DurabilityMode,
        bases: Bases,
        *,
        rate: RecoveryRate | None = None,
        record_end: Callable[[], None] = lambda: None,
        on_fatal: Callable[[BaseException], None] = end_process,
        clock: SystemClock = SYSTEM_CLOCK,
    ) -> None:
        self.journal, self.bases = journal, bases
        self._clock = clock
        self._mode, self._on_fatal, self._record_end = mode, on_fatal, record_end
        self._rate = rate or RecoveryRate()
        self._began = 0.0  # when the request that is handled began; 0: nothing is known of it
        self._thread: LogThread | None = None

    def start(self) -> None:
        """Write from here on what is appended."""
        self._thread = LogThread(self.journal, record_end=self._record_end, on_fatal=self._on_fatal, clock=self._clock)

    def close(self, timeout: float) -> bool:
        """Write what was appended, at most for so many seconds; whether all of it was written."""
        self.bases.close(timeout / 2)
        return self._thread is None or self._thread.close(timeout)

    def check_room(self, num_bytes: int) -> None:
        """Before a request changes anything: LogStalled, LogTooLong or ShardBusy where it has to come again later."""
        self.journal.check_room(num_bytes)
        self._began = self._clock.now()
        self.bases.check_tail(num_bytes, self._began)

    def append(self, event: Event, outcome: Outcome) -> int:
        """Take an event that has changed the state; its LSN."""
        applied, skipped = outcome.rows
        flags = 0 if outcome.error is None else FAILED
        record = LogRecord(
            kind_of(event), encode_event(event), outcome.version, outcome.clock, applied, skipped, flags=flags
        )
        if self._began:
            self._rate.add(record.num_bytes, self._clock.now() - self._began)
            self._began = 0.0
        return self.journal.append(record)

    @property
    def safe_lsn(self) -> int:
        """The events up to this one are safe."""
        return self.journal.safe.lsn

    def when_safe(self, lsn: int, call: Callable[[], None], refuse: Callable[[LogStalled], None] | None = None) -> None:
        """Call this once the events up to `lsn` are safe: at once, or on the thread that writes; see EventLog."""
        self.journal.when_safe(lsn, call, refuse)

    def fail(self, error: BaseException) -> None:
        """End the process: the state has changed, and the log may not have it."""
        self._on_fatal(error)

    def status(self) -> tuple[str, int, int, float, str]:
        """The mode; bytes of the records that a recovery replays, and of those not written; seconds that it takes.

        Last, why it cannot be written; empty where it can.
        """
        tail, journal = self.bases.tail_bytes, self.journal
        seconds = self._rate.seconds(tail, self.bases.base_bytes)
        return self._mode, tail, journal.waiting_bytes, seconds, journal.stalled()


def recover(
    shard: Shard,
    folder: LogFolder,
    mode: DurabilityMode,
    *,
    segment_bytes: int = SEGMENT_BYTES,
    on_fatal: Callable[[BaseException], None] = end_process,
    progress: RecoveryProgress | None = None,
    rate: RecoveryRate | None = None,
    **bases: Any,
) -> ShardLog:
    """Give a new shard the state that its log says, and have the log go on; it is not written before `start`.

    `progress` shows others how far it is, `rate` is told what it took, `bases` are options of Bases. LogDamaged,
    LogDiverged, LogMismatch, LogUnusable; nothing was changed then. The process must end after another error.
    """
    clock = shard.system
    progress, rate = progress or RecoveryProgress(clock), rate or RecoveryRate()
    found, tail = replay(shard.core, folder, progress, rate)
    progress.total_bytes = progress.done_bytes  # which was an estimate
    journal = folder.begin(mode, segment_bytes=segment_bytes, progress=progress, clock=clock)
    own = Bases(folder, journal, found, tail, on_fatal=on_fatal, clock=clock, **bases)
    record_end = partial(folder.record_end, journal)
    log = ShardLog(journal, mode, own, rate=rate, record_end=record_end, on_fatal=on_fatal, clock=clock)
    for table in shard.core.tables.all():  # what the replay has applied, the processes of before have counted
        table.pushed_rows = table.skipped_rows = 0
    shard.log_to(log, journal.term)
    shard.bases_to(log.bases)

    def write_term() -> None:
        while journal.write_group():
            pass
        record_end()

    try:
        folder.when_room(write_term, progress)  # before anybody sees what it begins with
    except OSError as error:
        raise LogUnusable(path=str(folder.folder), reason=error.strerror or str(error)) from error
    if journal.term > 1:
        _log.info(
            "recovered %d events in %.1f s from %s (term %d): a base of LSN %d, and %d bytes of events",
            shard.core.lsn - 1, progress.elapsed, folder.folder, journal.term, log.bases.lsn, tail[0],
        )  # fmt: skip
    return log


def replay(
    core: Core, folder: LogFolder, progress: RecoveryProgress | None = None, rate: RecoveryRate | None = None
) -> tuple[list[ShardBase], tuple[int, int]]:
    """Give a new core the state of a log: its bases, and the events behind it, applied.

    Returns the bases, and of those events the bytes of their records and the rows that they update. `rate` is told what
    both took. LogDamaged, LogDiverged; LogMismatch, OtherOptimizer.
    """
    progress, rate = progress or RecoveryProgress(), rate or RecoveryRate()
    progress.total_bytes = folder.num_bytes
    budget, decode, num_bytes, num_rows = core.budget, EventReader(), 0, 0
    limit, budget.limit = budget.limit, 2**62  # there was room for each of them, or it is not in the log
    reported = 0.0
    try:
        bases = _load_bases(core, folder)
        base = bases[-1] if bases else None
        base_bytes = sum(one.num_bytes for one in bases)
        progress.total_bytes += base_bytes
        progress.done_bytes = base_bytes
        base_seconds = progress.elapsed
        rate.add_bases(base_bytes, base_seconds)
        pending = set() if base is None else set(base.control["clock"]["pending"])
        for record in folder.records():
            progress.done_bytes += record.header.num_bytes
            if base is not None and record.header.lsn <= base.lsn:
                _gather_again(core, record, decode, pending, is_last=record.header.lsn == base.lsn)
                continue
            _apply_again(core, record, decode)
            num_bytes += record.header.num_bytes
            num_rows += record.header.applied
            if progress.elapsed - reported > _REPORT_SECONDS:
                reported = progress.elapsed
                _log.info(
                    "recovery: %d events, %d of about %d bytes, about %.0f s left",
                    record.header.lsn, progress.done_bytes, progress.total_bytes, progress.seconds_left,
                )  # fmt: skip
    finally:
        budget.limit = limit
    rate.add(num_bytes, progress.elapsed - base_seconds)
    return bases, (num_bytes, num_rows)


def _load_bases(core: Core, folder: LogFolder) -> list[ShardBase]:
    """Give a new core the state of a log's bases; none where it has none."""
    with named_errors(folder.folder):
        bases = read_bases(folder.disk, folder.folder, folder.manifest)
        if bases:
            tables = make_tables(folder.disk, folder.folder, folder.manifest, bases, core.new_table)
            core.restore(bases[-1].control, tables)
            for table in tables:  # so that the next base may be an increment
                table.mark(BASES_READER, folder.manifest.bases[-1].name)
    return bases


def _gather_again(core: Core, record: LoggedRecord, decode: EventReader, pending: set[int], *, is_last: bool) -> None:
    """Keep the push of a record for its clock where a base says so; the last one's outcome is that of the base."""
    header, updates = record.header, core.clock.updates
    if header.lsn in pending:
        event = decode(record.body)
        assert isinstance(event, PushEvent)
        core.gather_again(header.lsn, event)
    for what, got, want in (
        ("the version", updates.version, header.version),
        ("the clock", core.clock.open, header.clock),
    ):
        if is_last and got != want:
            raise LogDiverged(lsn=header.lsn, kind=header.kind, what=what, got=str(got), want=str(want))


def _apply_again(core: Core, record: LoggedRecord, decode: EventReader) -> None:
    """Apply the event of a record; LogDiverged where that has another outcome than it had."""
    header = record.header
    try:
        outcome = core.apply(decode(record.body))
        problem = ""
    except (EmbershardError, MustWait) as error:
        outcome, problem = Outcome(), f"{type(error).__name__}: {error}"
    applied, skipped = outcome.rows
    for what, got, want in (
        ("an error", problem, ""),
        ("the rows applied", applied, header.applied),
        ("the rows skipped", skipped, header.skipped),
        ("a failure", outcome.error is not None, bool(header.flags & FAILED)),
        ("the version", outcome.version, header.version),
        ("the clock", outcome.clock, header.clock),
        ("the LSN", core.lsn, header.lsn),
    ):
        if got != want:
            raise LogDiverged(
                lsn=header.lsn, kind=event_name(header.kind), what=what, got=str(got), want=str(want) or "none"
            )


class EventReader:
    """Makes events of their bytes, which it copies."""

    def __init__(self) -> None:
        self._reader = FrameReader(MAX_BODY_BYTES, _place, checksum=False)

    def __call__(self, body: memoryview) -> Event:
        """The event of a record's body. BadFrame, InvalidRequest."""
        done, frames = 0, []
        while done < len(body):
            target = self._reader.buffer()
            count = min(len(target), len(body) - done)
            target[:count] = body[done : done + count]
            frames += self._reader.received(count)
            done += count
        if len(frames) != 1 or self._reader.in_frame:
            raise BadFrame(what="the body of a record", got=f"{len(frames)} frames", want="one")
        return decode_event(frames[0])


def _place(header: Header) -> list[memoryview]:
    return [np.empty(length, np.uint8).data for length in header.lengths]
