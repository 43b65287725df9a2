"""The threads of a log: one writes it, one makes the files that it will need and watches the folder's lock."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from embershard.proto.clock import SYSTEM_CLOCK, SystemClock
from embershard.proto.errors import LogLocked
from embershard.ps.journal.journal import Journal
from embershard.ps.journal.segments import LOCK_LOST

_RETRY_SECONDS = 0.25  # after a write that failed
_WATCH_SECONDS = 1.0
_NICE = 10  # of the thread that writes zeros: it must not take a core from those that serve

_log = logging.getLogger(__name__)


def end_process(error: BaseException) -> None:
    """End this process at once. What the log says to be safe would no longer be true."""
    _log.critical("the event log can no longer be trusted, so this shard ends: %s", error, exc_info=error)
    os._exit(1)


class LogThread:
    """Writes a journal until it is closed.

    `record_end` is called now and then, as LogFolder has it. `on_fatal` is called, on the thread that found it, with a
    failed sync, a lost lock, or a defect; nothing is written or acknowledged after it.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        record_end: Callable[[], None] = lambda: None,
        on_fatal: Callable[[BaseException], None] = end_process,
        clock: SystemClock = SYSTEM_CLOCK,
    ) -> None:
        self._journal = journal
        self._record_end = record_end
        self._on_fatal = on_fatal
        self._ended = clock.event()
        self._writer = clock.spawn("log", partial(self._until_fatal, self._write))
        self._keeper = clock.spawn("log-files", partial(self._until_fatal, self._keep), nice=_NICE)

    def close(self, timeout: float) -> bool:
        """Write what was appended, at most for so many seconds; whether all of it was written."""
        self._journal.close()
        self._writer.join(timeout)
        done = not self._writer.is_alive() and not self._journal.waiting_bytes
        self._ended.set()
        self._journal.segments.wants_spare.set()
        self._keeper.join(timeout)
        if not self._writer.is_alive():
            self._journal.segments.close()
        return done

    def _until_fatal(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._ended.set()
            self._on_fatal(error)

    def _write(self) -> None:
        is_stalled = False
        while not self._ended.is_set():
            try:
                if not self._journal.write_group(wait=True):
                    return
            except OSError as error:
                if not is_stalled:
                    _log.error("the event log cannot be written, pushes wait: %s", error)
                is_stalled = True
                self._ended.wait(_RETRY_SECONDS)
            else:
                if is_stalled:
                    _log.warning("the event log is written again")
                is_stalled = False

    def _keep(self) -> None:
        segments = self._journal.segments
        while not self._ended.is_set():
            segments.wants_spare.clear()
            if not segments.is_locked:
                raise LogLocked(path=str(segments.folder), holder=LOCK_LOST)
            with suppress(OSError):  # the segments keep it, and it is tried again
                while not self._ended.is_set() and segments.prepare_spare():
                    pass
            if self._ended.is_set():  # the folder may be another process's by now
                return
            with suppress(OSError):  # tried again, too: no event waits for it
                self._record_end()
            segments.wants_spare.wait(_WATCH_SECONDS)
