"""Exactly once, as in RIFL (Lee et al. 2015): which pushes of which worker were applied, and what was answered.

A worker numbers its pushes to this shard from 1 within one incarnation (epoch) and says with each below which number
every push is acknowledged; records below it are forgotten, so that memory is bounded by the pushes in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from embershard.proto.errors import InvalidRequest, MemoryLost, StaleWorker
from embershard.proto.messages import PushToken
from embershard.proto.snapshot.manifest import WorkerWindow
from embershard.ps.table.table import Applied

# Far more than any client keeps in flight; they bound what a broken or hostile one can make a shard remember.
MAX_IN_FLIGHT = 4096
MAX_WORKERS = 65_536


@dataclass(slots=True)
class _Window:
    """The applied pushes of one incarnation of a worker that may come again."""

    epoch: int
    first_incomplete: int = 0
    settled: int = 0  # the highest seq that was applied or refused
    replies: dict[int, Applied] = field(default_factory=dict)  # seq >= first_incomplete -> what was answered


class Dedup:
    """The completion records of every worker. `find`, then apply and `record`, or `settle` a push that was refused.

    An incarnation is known from its first push on, whatever became of that one. So an unknown incarnation with
    acknowledged pushes had them from a shard that has lost its memory since: it must not go on as if nothing happened.
    """

    def __init__(self) -> None:
        self._windows: dict[int, _Window] = {}

    def __len__(self) -> int:
        """Completion records held."""
        return sum(len(window.replies) for window in self._windows.values())

    def find(self, token: PushToken) -> Applied | None:
        """Return the earlier reply to a push that was applied before, None for one to apply; changes nothing.

        StaleWorker for an earlier incarnation, MemoryLost for one whose acknowledged pushes are not known here,
        InvalidRequest for numbers that no client sends.
        """
        window = self._windows.get(token.worker)
        self._check(token, window)
        if window is None or window.epoch < token.epoch:
            if token.first_incomplete > 1:
                raise MemoryLost(worker=token.worker, first_incomplete=token.first_incomplete)
            return None
        if token.seq < window.first_incomplete:
            # Its sender had the reply long ago: this copy was late in the network, and nobody waits for the counts.
            return Applied(rows=0, skipped=0)
        return window.replies.get(token.seq)

    def check_known(self, worker: int, epoch: int, first_incomplete: int) -> None:
        """MemoryLost where a worker says that more of its pushes is acknowledged (all below this one) than is known.

        An earlier incarnation is not judged: it is fenced.
        """
        window = self._windows.get(worker)
        known = 0 if window is None or window.epoch < epoch else window.settled
        is_earlier = window is not None and window.epoch > epoch
        if not is_earlier and first_incomplete > known + 1:
            raise MemoryLost(worker=worker, first_incomplete=first_incomplete)

    @classmethod
    def of(cls, windows: Sequence[WorkerWindow]) -> Dedup:
        """The records that `windows` gave."""
        dedup = cls()
        for one in windows:
            replies = {seq: Applied(applied, skipped) for seq, applied, skipped in one.replies}
            dedup._windows[one.worker] = _Window(one.epoch, one.first_incomplete, max(replies, default=0), replies)
        return dedup

    def restored(self, windows: Sequence[WorkerWindow]) -> Dedup:
        """The records of a snapshot that takes the place of the rows. What the same incarnations pushed since is gone
        with these, but known: one of them may have restored, and goes on.
        """
        dedup = Dedup.of(windows)
        for worker, window in dedup._windows.items():
            before = self._windows.get(worker)
            if before is not None and before.epoch == window.epoch:
                window.settled = max(window.settled, before.settled)
        return dedup

    def control(self) -> list[list[Any]]:
        """All windows, in plain values."""
        return [
            [worker, one.epoch, one.first_incomplete, one.settled,
             [[seq, *reply] for seq, reply in one.replies.items()]]
            for worker, one in self._windows.items()
        ]  # fmt: skip

    @classmethod
    def of_control(cls, control: Sequence[Sequence[Any]]) -> Dedup:
        """The records that `control` said."""
        dedup = cls()
        for worker, epoch, first_incomplete, settled, replies in control:
            kept = {seq: Applied(applied, skipped) for seq, applied, skipped in replies}
            dedup._windows[worker] = _Window(epoch, first_incomplete, settled, kept)
        return dedup

    def windows(self) -> tuple[WorkerWindow, ...]:
        """All records, for a snapshot."""
        return tuple(
            WorkerWindow(
                worker,
                window.epoch,
                window.first_incomplete,
                tuple((seq, *reply) for seq, reply in window.replies.items()),
            )
            for worker, window in self._windows.items()
        )

    def epochs(self) -> dict[int, int]:
        """Worker -> its incarnation that is known."""
        return {worker: window.epoch for worker, window in self._windows.items()}

    def fence(self, worker: int, epoch: int) -> None:
        """StaleWorker for an earlier incarnation of a worker than the one that pushed last."""
        window = self._windows.get(worker)
        if window is not None and epoch < window.epoch:
            raise StaleWorker(worker=worker, got=epoch, want=window.epoch, by="")

    def settle(self, worker: int, epoch: int, seq: int) -> bool:
        """Note that push `seq` was refused, from which its incarnation is known; whether any of that is new.

        The worker counts on, so that a later push says that this one needs no reply any more. 0: its first was put off.
        """
        if self.knows(worker, epoch, seq):
            return False
        window = self._window(worker, epoch)
        window.settled = max(window.settled, seq)
        return True

    def knows(self, worker: int, epoch: int, seq: int) -> bool:
        """Whether push `seq`, or a later one, of this incarnation was applied or refused."""
        window = self._windows.get(worker)
        return window is not None and window.epoch == epoch and seq <= window.settled

    def record(self, token: PushToken, reply: Applied) -> None:
        """Keep what is answered for a push that `find` did not know and that is applied now."""
        window = self._window(token.worker, token.epoch)
        window.replies[token.seq] = reply
        window.settled = max(window.settled, token.seq)
        if token.first_incomplete > window.first_incomplete:
            window.first_incomplete = token.first_incomplete
            for seq in [seq for seq in window.replies if seq < token.first_incomplete]:
                del window.replies[seq]

    def _window(self, worker: int, epoch: int) -> _Window:
        """The window of an incarnation, which may be its first; it ends that of an earlier one."""
        window = self._windows.get(worker)
        if window is None or window.epoch < epoch:
            window = self._windows[worker] = _Window(epoch)
        return window

    def _check(self, token: PushToken, window: _Window | None) -> None:
        if token.worker >= MAX_WORKERS:  # which bounds the windows, too
            raise InvalidRequest(reason=f"the worker of a push must be 0..{MAX_WORKERS - 1}, got {token.worker}")
        self.fence(token.worker, token.epoch)
        if token.epoch < 1:
            raise InvalidRequest(
                reason=f"push {token.seq} of worker {token.worker} has epoch 0; send the time at which its process "
                "began, in ns since 1970: without it, the pushes of its next process would be taken for repeated ones"
            )
        if token.seq < 1:
            raise InvalidRequest(reason=f"push {token.seq} of worker {token.worker}: the seq of pushes counts from 1")
        if not 0 <= token.first_incomplete <= token.seq:
            raise InvalidRequest(
                reason=f"push {token.seq} of worker {token.worker} says that every push below "
                f"{token.first_incomplete} is acknowledged, and so itself; its first_incomplete is at most its seq"
            )
        if token.seq - token.first_incomplete >= MAX_IN_FLIGHT:
            raise InvalidRequest(
                reason=f"worker {token.worker} has pushes {token.first_incomplete} to {token.seq} in flight; at most "
                f"{MAX_IN_FLIGHT} may be: first_incomplete names the first push without an answer"
            )
