"""Logs as JSON, a line for each event: `--log-format json`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import IO, Literal

from embershard.proto.monitoring import tracing

LogFormat = Literal["text", "json"]


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
    """Have everything that this process logs go to `stream` as JSON; fields may be added to what is returned."""
    formatter, handler = JsonFormatter(fields), logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    return formatter


def logs_json() -> bool:
    """Whether this process logs as JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)
