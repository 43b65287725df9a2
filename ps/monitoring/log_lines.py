"""What a shard's process logs on stderr, for people: one line for each record, whatever a peer says."""

from __future__ import annotations

import logging
import sys
from typing import Any


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


# C0, DEL, C1, and what else ends a line
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {0x2028: "\\u2028", 0x2029: "\\u2029"}


def _escaped(text: str) -> str:
    return text.translate(_CONTROLS)
