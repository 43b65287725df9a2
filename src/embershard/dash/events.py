"""What happened: to a run, to its shards and to its workers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How much an event matters to who watches a job; the panel colours it so."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened; `time` is in seconds since 1970."""

    time: float
    severity: Severity
    text: str
