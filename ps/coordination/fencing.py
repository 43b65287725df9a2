"""Which incarnations and runs a shard has seen: none of the future, and who fenced whom."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

from embershard.proto.errors import FutureEpoch, StaleRun, StaleWorker
from embershard.proto.messages import Join, Push

AHEAD_MINUTES = 5  # that a worker's clock may be ahead of the shard's: what fences others must not be of next year


class _Seen(NamedTuple):
    """What fences those before it: an incarnation, or a run, and where it came from."""

    number: int  # epoch or run
    worker: int
    peer: str
    at: float  # seconds since 1970, on the shard's clock


class Fences:
    """The newest incarnation of each worker, and the newest run; `clock` gives seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.newest: dict[int, _Seen] = {}  # of each worker that sent anything that was not refused
        self._run = _Seen(0, 0, "", 0.0)

    def check(self, request: Push | Join) -> None:
        """Refuse a run or an epoch that is more than AHEAD_MINUTES ahead: FutureEpoch."""
        worker, epoch, run = _claim(request)
        for what, number in (("epoch", epoch), ("run", run)):
            if self.is_ahead(number):
                now = _text(self._clock())
                raise FutureEpoch(worker=worker, what=what, got=_text(number / 1e9), now=now, minutes=AHEAD_MINUTES)

    def is_ahead(self, number: int) -> bool:
        """Whether an epoch or a run, in nanoseconds since 1970, is more than AHEAD_MINUTES ahead."""
        return number > (self._clock() + 60 * AHEAD_MINUTES) * 1e9

    def note(self, request: Push | Join, peer: str) -> None:
        """Remember whose request it was that was not refused, if it is the newest of its worker or run."""
        worker, epoch, run = _claim(request)
        known = self.newest.get(worker)
        if known is None or epoch > known.number:
            self.newest[worker] = _Seen(epoch, worker, peer, self._clock())
        if run > self._run.number:
            self._run = _Seen(run, worker, peer, self._clock())

    def named(self, error: StaleWorker | StaleRun) -> StaleWorker | StaleRun:
        """The error with who fenced its worker, as far as that is known."""
        seen = self._run if isinstance(error, StaleRun) else self.newest.get(_int(error.fields["worker"]))
        if seen is None or seen.number != error.fields["want"]:
            return error
        where = f" from {seen.peer}" if seen.peer else ""
        who = f" by worker {seen.worker}" if isinstance(error, StaleRun) else ""
        return type(error)(**{**error.fields, "by": f"{who} at {_text(seen.at)}{where}"})  # type: ignore[arg-type]


def _claim(request: Push | Join) -> tuple[int, int, int]:
    """Worker, epoch and run, 0 without one."""
    if isinstance(request, Join):
        return request.worker, request.epoch, request.run
    return request.token.worker, request.token.epoch, 0


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value


def _text(seconds: float) -> str:
    """A time since 1970 for people."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(" ", "seconds")
    except (OverflowError, ValueError, OSError):
        return f"{seconds:.0f} s after 1970"
