"""Decide whether a job goes on from its latest checkpoint after a worker or a shard of it has ended; no clock, no I/O.

An attempt is a job from the start of its processes to the first of them that ends before the job is done: then all of
them are ended. Events say what was seen, in order; the end of an attempt is answered with what to do next.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import timedelta

from embershard.proto.errors import (
    EmbershardError,
    JobOver,
    LeaseLost,
    MemoryLost,
    RowsLost,
    ShardRestarted,
    ShardUnavailable,
    WorkerLost,
)

# the exit code of a worker that lost a shard or another worker: EX_TEMPFAIL of sysexits.h, for which a retry may help
LOST_EXIT_CODE = 75
NO_PROGRESS_EXIT_CODE = 76  # of a worker that recovers: no retry helped
LOST_ERRORS: tuple[type[EmbershardError], ...] = (
    JobOver, LeaseLost, MemoryLost, RowsLost, ShardRestarted, ShardUnavailable, WorkerLost,
)  # fmt: skip


class ErrorKind(enum.Enum):
    """Classify why a worker or a shard ended, by its exit code; the policy restarts it or not by this."""

    KILLED = "killed"  # by a signal
    LOST = "lost"  # it lost a shard or another worker
    OWN = "own"  # an error of its own, to which a restart would come again

    @classmethod
    def of(cls, exit_code: int) -> ErrorKind:
        """Classify the exit code of a process, as subprocess gives it (below 0: the signal)."""
        return cls.KILLED if exit_code < 0 else cls.LOST if exit_code == LOST_EXIT_CODE else cls.OWN


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    """The processes of a job were started."""

    seconds: float  # of any clock that only grows


@dataclass(frozen=True, slots=True)
class CheckpointSeen:
    """The latest whole checkpoint of the job; seen again it changes nothing."""

    url: str
    step: int


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker ended before the job was done."""

    seconds: float
    kind: ErrorKind


@dataclass(frozen=True, slots=True)
class ShardEnded:
    """A shard ended before the job was done."""

    seconds: float
    kind: ErrorKind


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A person, or whoever runs the command, ended it."""


Event = AttemptStarted | CheckpointSeen | WorkerEnded | ShardEnded | Interrupted


@dataclass(frozen=True, slots=True)
class Restart:
    """Begin another attempt after a pause, from the latest checkpoint; from the beginning where there is none yet."""

    checkpoint: CheckpointSeen | None
    pause: timedelta


class GiveUp(enum.Enum):
    """Let the job end, and why."""

    OFF = "train.recover is off"
    INTERRUPTED = "it was interrupted"
    OWN_ERROR = "the error is one of the job itself"
    NO_PROGRESS = "it reached no new checkpoint between two failures"
    NO_CHECKPOINT = "it has no checkpoint yet, and shards that were not started here keep the rows of this attempt"


@dataclass(frozen=True, kw_only=True)
class AttemptPolicy:
    """When a job is started again.

    `recovers` is the job's train.recover, `owns_shards` whether each attempt begins with shards of its own. There is no
    pause before the first restart; then it doubles from `first_pause` to `longest_pause`, until an attempt lasted for
    `quick`.
    """

    recovers: bool = True
    owns_shards: bool = True
    first_pause: timedelta = timedelta(seconds=1)
    longest_pause: timedelta = timedelta(minutes=1)
    quick: timedelta = timedelta(minutes=10)

    def pause(self, quick_ends: int) -> timedelta:
        """The wait before the restart that follows this many quick attempts in a row."""
        return timedelta(0) if quick_ends <= 1 else min(self.first_pause * (1 << quick_ends - 2), self.longest_pause)


class Attempts:
    """The attempts of one job."""

    def __init__(self, policy: AttemptPolicy) -> None:
        self._policy = policy
        self._began = 0.0
        self._ended = False  # the present attempt
        self._failed = False  # any attempt
        self._quick_ends = 0  # in a row
        self._latest: CheckpointSeen | None = None
        self._latest_at_failure: CheckpointSeen | None = None

    def on(self, event: Event) -> Restart | GiveUp | None:
        """Take note of an event; a decision where it is the first that ends an attempt."""
        match event:
            case AttemptStarted(seconds):
                self._began, self._ended = seconds, False
            case CheckpointSeen():
                self._latest = event
            case Interrupted():
                self._ended = True
                return GiveUp.INTERRUPTED
            case WorkerEnded(seconds, kind) | ShardEnded(seconds, kind) if not self._ended:
                self._ended = True
                return self._decide(seconds, kind)
        return None

    def _decide(self, seconds: float, kind: ErrorKind) -> Restart | GiveUp:
        if not self._policy.recovers:
            return GiveUp.OFF
        if kind is ErrorKind.OWN:
            return GiveUp.OWN_ERROR
        if self._failed and self._latest == self._latest_at_failure:
            return GiveUp.NO_PROGRESS
        if self._latest is None and not self._policy.owns_shards:
            return GiveUp.NO_CHECKPOINT
        self._failed, self._latest_at_failure = True, self._latest
        was_quick = seconds - self._began < self._policy.quick.total_seconds()
        self._quick_ends = self._quick_ends + 1 if was_quick else 1
        return Restart(self._latest, self._policy.pause(self._quick_ends))
