"""How far the recovery of a shard is, and how long one takes."""

from __future__ import annotations

from embershard.proto.clock import SYSTEM_CLOCK, SystemClock
from embershard.proto.errors import ShardRecovering

_LEAST_RETRY_MS, _MOST_RETRY_MS = 20, 1000
_FIRST_RATE, _FIRST_BASE_RATE = 100e6, 1e9  # bytes of events and of bases per second, before anything is measured
_REMEMBERED_BYTES = 512 * 2**20  # of events
_ENOUGH_SECONDS = 0.1  # after which a rate is believed
_SLOW_START_SECONDS = 1.0  # in which kernels are loaded, and the first events say nothing of the others


class RecoveryRate:
    """Estimates the time of a recovery from that of this process's start, of its events and of loading bases.

    A recovery applies the events again, so it is measured while they are applied, for the first time or again. Later
    ones count for more: the first ones create rows, which takes longer. A base is measured when one is loaded.
    """

    def __init__(self, start_seconds: float = 0.0) -> None:
        self._start_seconds = start_seconds  # of a process, until it begins to read its log
        self._bytes, self._seconds = 0.0, 0.0
        self._base_bytes, self._base_seconds = 0, 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """So many bytes of the log were applied in so many seconds."""
        if num_bytes:  # to open an empty log takes time, too
            self._bytes += num_bytes
            self._seconds += seconds
        if self._bytes > _REMEMBERED_BYTES:
            self._bytes, self._seconds = self._bytes / 2, self._seconds / 2

    def add_bases(self, num_bytes: int, seconds: float) -> None:
        """Bases of so many bytes were loaded in so many seconds."""
        if num_bytes:  # bases without a row, or none, say nothing of others
            self._base_bytes, self._base_seconds = num_bytes, seconds

    def seconds(self, num_bytes: int, base_bytes: int = 0) -> float:
        """Estimated seconds of a recovery that applies so many bytes of events, and loads so many of bases."""
        each = self._seconds / self._bytes if self._seconds > _ENOUGH_SECONDS else 1 / _FIRST_RATE
        of_base = (
            self._base_seconds / self._base_bytes if self._base_seconds > _ENOUGH_SECONDS else 1 / _FIRST_BASE_RATE
        )
        return self._start_seconds + each * num_bytes + of_base * base_bytes


class RecoveryProgress:
    """Progress of a recovery in bytes; one thread updates it, others read it."""

    def __init__(self, clock: SystemClock = SYSTEM_CLOCK) -> None:
        self.total_bytes = 0  # to be read, about; 0 until it is known
        self.done_bytes = 0
        self.waits_for_room = ""  # why the log cannot go on; empty where it can
        self._clock = clock
        self._began = clock.now()

    @property
    def elapsed(self) -> float:
        """Return the seconds since the recovery began, without those in which it waited for room."""
        return self._clock.now() - self._began

    def wait_for_room(self, reason: str, seconds: float) -> None:
        """Wait until the disk may have room for the log."""
        self.waits_for_room = reason
        began = self._clock.now()
        self._clock.sleep(seconds)
        self._began += self._clock.now() - began

    @property
    def seconds_left(self) -> float:
        """Estimate the seconds that the recovery still takes, by its rate until now."""
        elapsed = self.elapsed
        rate = self.done_bytes / elapsed if self.done_bytes and elapsed > _SLOW_START_SECONDS else _FIRST_RATE
        return max(0, self.total_bytes - self.done_bytes) / rate

    def error(self) -> ShardRecovering:
        """Return the error for requests meanwhile; the pause that it asks for grows with the time that has passed."""
        pause = min(max(_LEAST_RETRY_MS, round(250 * self.elapsed)), _MOST_RETRY_MS)
        pause = _MOST_RETRY_MS if self.waits_for_room else pause
        return ShardRecovering(
            done_bytes=self.done_bytes,
            total_bytes=self.total_bytes,
            seconds=round(self.seconds_left, 1),
            waits_for_room=self.waits_for_room,
            retry_after_ms=pause,
        )
