"""Pushes that are answered before they are safe: which of a worker's are safe by now, its later replies say."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from embershard.proto.messages import PushToken


@dataclass(slots=True)
class _Answered:
    """The pushes of one incarnation of a worker that were answered early, in order."""

    epoch: int
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # number of the event (LSN), seq
    last: int = 0  # the highest seq
    acknowledged: int = 0  # up to this one they are safe


class EarlyAnswers:
    """The pushes of all workers that were answered early. A replay does not have them: its events are safe."""

    def __init__(self) -> None:
        self._workers: dict[int, _Answered] = {}

    def __len__(self) -> int:
        """Workers of whom a push was answered early."""
        return len(self._workers)

    def add(self, token: PushToken, lsn: int) -> bool:
        """Note a push whose event has this LSN; whether it may be answered early.

        One that came behind a later one may not: a worker takes `acknowledged` for all up to it.
        """
        answered = self._workers.get(token.worker)
        if answered is None or answered.epoch != token.epoch:
            answered = self._workers[token.worker] = _Answered(token.epoch)
        if token.seq <= answered.last:
            return False
        answered.last = token.seq
        answered.waiting.append((lsn, token.seq))
        return True

    def last(self, worker: int, epoch: int) -> int:
        """The highest seq of a worker's push that was answered early; 0 where none was."""
        answered = self._workers.get(worker)
        return answered.last if answered is not None and answered.epoch == epoch else 0

    def acknowledged(self, worker: int, epoch: int, safe_lsn: int) -> int:
        """Up to which seq all of a worker's pushes that were answered are safe; 0 where none was answered early."""
        answered = self._workers.get(worker)
        if answered is None or answered.epoch != epoch:
            return 0
        waiting = answered.waiting
        while waiting and waiting[0][0] <= safe_lsn:
            answered.acknowledged = waiting.popleft()[1]
        return answered.acknowledged
