"""The queue of the parts of a pass over the data: dealt to whoever asks, and again where their worker was lost."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from embershard.proto.errors import InvalidRequest, ModeMismatch
from embershard.proto.messages import Split, TakeSplit
from embershard.ps.coordination.clock import Clock, MustWait, Plain
from embershard.ps.coordination.outcome import Outcome

MAX_SPLITS = 2**31 - 1


@dataclass(slots=True)
class _Assignment:
    """What a worker works on, until its lease runs out."""

    serial: int  # of the member
    split: int


class Splits:
    """One pass over the data at a time. Every part is finished once where no worker is lost, else at least once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begin(-1, 0)

    def _begin(self, data_epoch: int, num_splits: int) -> None:
        self._data_epoch, self._num_splits = data_epoch, num_splits
        self._next = 0  # the first that was never dealt
        self._back: deque[int] = deque()  # those whose worker was lost
        self._assignments: dict[int, _Assignment] = {}
        self._returned = 0

    def take(self, request: TakeSplit) -> Outcome:
        """The next part, or -1 where all are finished; it waits while the last ones are in other workers' hands.

        A worker that asks again without having finished what it has, as after a lost reply, is given the same.
        """
        if not 1 <= request.num_splits <= MAX_SPLITS:
            raise InvalidRequest(reason=f"num_splits must be 1..{MAX_SPLITS}, got {request.num_splits}")
        member = self._clock.member(request.worker, request.epoch)
        if request.data_epoch < self._data_epoch:
            return Outcome(Split(index=-1, returned=0), changed=False)
        if request.data_epoch == self._data_epoch and request.num_splits != self._num_splits:
            what = f"num_splits of epoch {request.data_epoch}"
            raise ModeMismatch(worker=request.worker, what=what, got=request.num_splits, want=self._num_splits)
        changed = request.data_epoch > self._data_epoch
        if changed:
            self._begin(request.data_epoch, request.num_splits)
            self._clock.generation += 1
        changed |= self._take_back()
        assigned = self._assignments.get(member.worker)
        if assigned is not None and assigned.split != request.done:
            return Outcome(Split(index=assigned.split, returned=self._returned), changed)
        if assigned is not None:
            del self._assignments[member.worker]
            self._clock.generation += 1
            changed = True
        if self._back:
            split = self._back.popleft()
            self._returned += 1
        elif self._next < self._num_splits:
            split = self._next
            self._next += 1
        elif self._assignments:
            waiting = MustWait(self._clock.members[worker] for worker in self._assignments)
            return Outcome(changed=changed, waiting=waiting)
        else:
            return Outcome(Split(index=-1, returned=self._returned), changed)
        self._assignments[member.worker] = _Assignment(member.serial, split)
        return Outcome(Split(index=split, returned=self._returned))

    def control(self) -> Plain:
        """All of it in plain values."""
        return {
            "pass": [self._data_epoch, self._num_splits, self._next, self._returned],
            "back": list(self._back),
            "assignments": [[worker, one.serial, one.split] for worker, one in self._assignments.items()],
        }

    def restore(self, control: Plain) -> None:
        """Replace the state by what `control` returned."""
        self._data_epoch, self._num_splits, self._next, self._returned = control["pass"]
        self._back = deque(control["back"])
        self._assignments = {worker: _Assignment(serial, split) for worker, serial, split in control["assignments"]}

    def _take_back(self) -> bool:
        """Take back what members had that are gone; whether there was something."""
        gone = []
        for worker, assigned in self._assignments.items():
            # one whose lease ran out is another member when it joins again: it has dropped a part of its work
            member = self._clock.members.get(worker)
            if member is None or member.serial != assigned.serial:
                gone.append(worker)
        for worker in gone:
            self._back.append(self._assignments.pop(worker).split)
        return bool(gone)
