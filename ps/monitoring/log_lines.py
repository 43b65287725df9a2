"""What a shard's process logs on stderr, for people: one line for each record, whatever a peer says."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

PER_MINUTE = 10


def log_as_lines(shard: int) -> None:
    """Have everything that this process logs go to stderr as lines that name the shard."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(f"%(asctime)s shard {shard} %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class LineFormatter(logging.Formatter):
    """One line for each record, and indented ones for a traceback: no text of a peer can look like another record."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The record, its control characters escaped."""
        return _escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """The traceback, its lines indented and their control characters escaped."""
        return "\n".join(f"    {_escaped(line)}" for line in super().formatException(ei).split("\n"))


class LinesPerMinute:
    """Bounds what peers can have a shard write: ten lines a minute, and how many more there were. For all threads."""

    def __init__(self, log: logging.Logger, more: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`more` is the line about the others, with a %d for their number."""
        self._log, self._more, self._clock = log, more, clock
        self._lock = threading.Lock()
        self._minute, self._asked = 0, 0

    def may_log(self) -> bool:
        """Whether there is room for one more line in this minute."""
        minute = int(self._clock() // 60)
        with self._lock:
            left_out = 0
            if minute != self._minute:
                left_out, self._minute, self._asked = self._asked - PER_MINUTE, minute, 0
            self._asked += 1
            room = self._asked <= PER_MINUTE
        if left_out > 0:
            self._log.warning(self._more, left_out)
        return room


# C0, DEL, C1, and what else ends a line
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {0x2028: "\\u2028", 0x2029: "\\u2029"}


def _escaped(text: str) -> str:
    return text.translate(_CONTROLS)
