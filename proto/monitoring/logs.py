"""Logs as JSON, a line for each event: `--log-format json`."""

from __future__ import annotations

import atexit
import io
import json
import logging
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import IO, Any, Literal

from embershard.proto.monitoring import tracing

LogFormat = Literal["text", "json"]

_log = logging.getLogger(__name__)


class JsonFormatter(logging.Formatter):
    """One JSON object for each record: `ts` (UTC), `level`, `event`, and `fields`, which say whose log it is.

    A record's own fields (`extra={"fields": {...}}`) follow, `trace_id` and `span_id` where it is logged in a step or a
    request that is traced, and its traceback.
    """

    def __init__(self, fields: Mapping[str, object]) -> None:
        super().__init__()
        self.fields = dict(fields)

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "logger": record.name,
            **self.fields,
            **getattr(record, "fields", {}),
        }
        if (context := tracing.current()) is not None:
            line["trace_id"], line["span_id"] = context.trace.hex(), context.span.hex()
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, separators=(",", ":"), default=str)


def log_as_json(stream: IO[str], **fields: object) -> JsonFormatter:
    """Have everything that this process logs go to `stream` as JSON; fields may be added to what is returned.

    So do Python's warnings, exceptions that nobody catches, of each thread, and where `stream` is stdout, lines that
    are printed.
    """
    stream = stream.stream if isinstance(stream, _Printed) else stream
    formatter, handler = JsonFormatter(fields), _JsonHandler(stream)
    handler.setFormatter(formatter)
    if stream is getattr(sys.stdout, "stream", sys.stdout):  # what a user's code prints would not be JSON
        sys.stdout = _Printed(handler)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    sys.unraisablehook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    return formatter


class _JsonHandler(logging.StreamHandler[IO[str]]):
    """Writes to a stream; one that takes nothing any more is said on stderr, once, and lines are lost from then on."""

    _said = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Say why a line could not be written."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._said and sys.stderr is not None and self.stream is not sys.stderr:
            self._said = True
            text = f"log lines cannot be written: {error.strerror}; this process continues, and its log lines are lost"
            said = logging.LogRecord(__name__, logging.ERROR, __file__, 0, text, None, None)
            with suppress(OSError):
                sys.stderr.write(self.format(said) + self.terminator)


class _Printed(io.TextIOBase):
    """Takes the place of a handler's stream, and gives each line that is printed to the handler.

    Not to a logger: a user's handler that writes to stdout would log its own lines again, without end.
    """

    def __init__(self, handler: _JsonHandler) -> None:
        self._handler, self.stream = handler, handler.stream
        self._rest = ""
        atexit.register(self._end)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)  # such as buffer, whose bytes are not logged

    def write(self, text: str, /) -> int:
        """Log the lines that end with this text."""
        assert self._handler.lock is not None
        with self._handler.lock:  # of one thread, as what is logged may print
            *lines, rest = (self._rest + text).split("\n")
            # of a line that is printed over and over, such as a progress bar, the last state
            self._rest = rest if rest.endswith("\r") else rest.rpartition("\r")[2]
            for line in lines:
                shown = line.rstrip("\r").rpartition("\r")[2]
                self._handler.handle(logging.LogRecord("stdout", logging.INFO, "", 0, shown, None, None))
        return len(text)

    def flush(self) -> None:
        """Flush the stream; the beginning of a line waits for its end."""
        self.stream.flush()

    def fileno(self) -> int:
        """The stream's file descriptor, for a child process, whose lines are not logged."""
        return self.stream.fileno()

    def writable(self) -> bool:
        """Return True, so that libraries which wrap stdout accept this object."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream that this object replaces."""
        return self.stream.encoding  # type: ignore[attr-defined, no-any-return]

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """How the stream that this object replaces handles characters that it cannot encode."""
        return self.stream.errors  # type: ignore[attr-defined, no-any-return]

    def _end(self) -> None:
        if self._rest:
            self.write("\n")


def _log_uncaught(kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None, /) -> None:
    if issubclass(kind, KeyboardInterrupt | SystemExit):
        return
    error = kind() if error is None else error
    _log.error("%s: %s", kind.__name__, error, exc_info=(kind, error, traceback))


def logs_json() -> bool:
    """Whether this process logs as JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)
