"""The pushes of clocks that are not closed: kept by worker, added in the workers' order, applied once.

A clock's update is the sum of w_i / (w_1 + ... + w_N) times the gradients of worker i, in float32 and in this order, so
that N synchronous workers take the step of one process on their joint batch.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from embershard.proto.arrays import Floats, Ids
from embershard.proto.compiled import intrinsics
from embershard.proto.compiled.intrinsics import detached, prefetch
from embershard.proto.compiled.jit import compiled, inlined
from embershard.proto.compiled.open_addressing import FREE, cell_of
from embershard.proto.messages import Push
from embershard.proto.routing import mix64
from embershard.ps.memory import Charge, MemoryBudget
from embershard.ps.table.checked import CheckedGradients
from embershard.ps.table.table import Applied, Table
from embershard.ps.table.tables import apply_parts

_U = np.uint64
_KEY = _U(secrets.randbits(64))  # of the sum's hash index: so that nobody can send ids that make its searches long
_BLOCK = 64  # ids in flight, as in kernels.py
_LARGEST = np.finfo(np.float32).max
_IDS = types.Array(types.int64, 1, "C", readonly=True)
_ROWS = types.Array(types.float32, 2, "C", readonly=True)
_AGES = types.Array(types.float32, 1, "C", readonly=True)


class Sender(NamedTuple):
    """One incarnation of a worker; they sort in the workers' order."""

    worker: int
    epoch: int


@dataclass(slots=True)
class ClockPush:
    """The gradients that one worker has pushed of a clock; they count once the push is `complete`."""

    # each with whether its gradients are differences
    messages: list[tuple[list[CheckedGradients], bool]] = field(default_factory=list)
    events: list[int] = field(default_factory=list)  # of each message, the number
    weight: float = 0.0
    version: int = 0
    complete: bool = False


class PendingUpdates:
    """Clock -> what its workers have pushed of it. The arrays are kept as they are, not copied."""

    def __init__(self, budget: MemoryBudget) -> None:
        self.nbytes = 0
        self.waiting_ids: dict[Table, int] = {}  # of all clocks
        self._charge = Charge(budget)
        self._clocks: dict[int, dict[Sender, ClockPush]] = {}

    def __bool__(self) -> bool:
        return bool(self._clocks)

    @property
    def end(self) -> int:
        """One past the last clock that a worker has pushed completely; 0 where there is none."""
        done = (clock + 1 for clock, pushes in self._clocks.items() if any(s.complete for s in pushes.values()))
        return max(done, default=0)

    def add(self, sender: Sender, request: Push, parts: list[CheckedGradients], event: int = 0) -> Applied:
        """Keep a message of a worker's push; the rows that will be applied, and those that are not finite.

        event: its number among the shard's.
        """
        push = self._clocks.setdefault(request.clock, {}).setdefault(sender, ClockPush())
        push.messages.append((parts, request.difference))
        push.events.append(event)
        push.weight = float(np.float32(request.weight))  # as it is on the wire
        push.version, push.complete = request.version, request.last
        self._count(parts, 1)
        skipped = [_count_non_finite(part.gradients) for part in parts]
        for part, count in zip(parts, skipped, strict=True):
            part.table.pushed_rows += len(part.ids) - count
            part.table.skipped_rows += count
        return Applied(sum(len(part.ids) for part in parts) - sum(skipped), sum(skipped))

    def events(self) -> list[int]:
        """The numbers of the events that are kept, ascending."""
        return sorted(event for pushes in self._clocks.values() for push in pushes.values() for event in push.events)

    def parts(self) -> Iterator[CheckedGradients]:
        """Iterate over the gradients of all clocks and workers that are kept."""
        for pushes in self._clocks.values():
            for push in pushes.values():
                for parts, _ in push.messages:
                    yield from parts

    def drop(self, sender: Sender) -> None:
        """Forget what a worker has not pushed to the end: it will not."""
        for clock, pushes in list(self._clocks.items()):
            push = pushes.get(sender)
            if push is not None and not push.complete:
                self._release(pushes.pop(sender))
                if not pushes:
                    del self._clocks[clock]

    def take(self, before: int) -> Iterator[tuple[int, list[ClockPush]]]:
        """Forget the clocks below `before`: each with its complete pushes, in the clocks' and the workers' order."""
        for clock in sorted(clock for clock in self._clocks if clock < before):
            pushes = self._clocks.pop(clock)
            for push in pushes.values():
                self._release(push)
            if complete := [pushes[sender] for sender in sorted(pushes) if pushes[sender].complete]:
                yield clock, complete

    def _release(self, push: ClockPush) -> None:
        for parts, _ in push.messages:
            self._count(parts, -1)

    def _count(self, parts: Sequence[CheckedGradients], sign: int) -> None:
        for part in parts:
            count = self.waiting_ids.pop(part.table, 0) + sign * len(part.ids)
            if count:
                self.waiting_ids[part.table] = count
            self.nbytes += sign * part.nbytes
        self._charge.set(self.nbytes)


def apply_clock(pushes: Sequence[ClockPush]) -> None:
    """Apply what the workers of one clock have pushed, once; a single worker's as if it had been applied directly."""
    pushes = [push for push in pushes if push.weight > 0]
    if len(pushes) == 1:
        apply_parts([(part, difference) for parts, difference in pushes[0].messages for part in parts], count=False)
        return
    total = sum(push.weight for push in pushes)
    gathered: dict[tuple[str, bool], list[tuple[np.float32, CheckedGradients]]] = {}
    for push in pushes:
        scale = np.float32(push.weight / total)
        for parts, difference in push.messages:
            for part in parts:
                gathered.setdefault((part.table.spec.name, difference), []).append((scale, part))
    summed = [(sum_gradients(scaled), difference) for (_, difference), scaled in gathered.items()]
    apply_parts(summed, count=False)


def sum_gradients(scaled: Sequence[tuple[np.float32, CheckedGradients]]) -> CheckedGradients:
    """The sum of several workers' gradients of one table, a row per id, each times its scale and in this order.

    A worker's row with a NaN or Inf is left out. The learning rate is that of the first, as one schedule drives all. A
    sum's age is that of each of its gradients times its scale, rounded, and at least 1: so many of the clock's pushes
    would have led to it.
    """
    first = scaled[0][1]
    aged = any(part.ages is not None for _, part in scaled)
    size = sum(len(part.ids) for _, part in scaled)
    cells = np.full(max(2, 1 << (2 * size - 1).bit_length()), FREE, np.int32)  # at most half full
    ids, sums = np.empty(size, np.int64), np.empty((size, first.table.spec.dim), np.float32)
    ages = np.zeros(size if aged else 0, np.float32)
    count = 0
    for scale, part in scaled:
        counts = np.ones(len(part.ids) if aged else 0, np.float32) if part.ages is None else part.ages
        count = _add((cells, ids, sums, ages), count, part.ids, part.gradients, counts, scale, _KEY)
    rounded = np.maximum(np.floor(ages[:count] + np.float32(0.5)), np.float32(1)) if aged else None
    return CheckedGradients(first.table, ids[:count], sums[:count], first.lr_scale, rounded)


@inlined
def _is_finite(gradients: Floats, i: int) -> bool:
    bad = False
    for j in range(gradients.shape[1]):
        bad |= not np.abs(gradients[i, j]) <= _LARGEST
    return not bad


_SUMS = types.Tuple((types.int32[::1], types.int64[::1], types.float32[:, ::1], types.float32[::1]))


@compiled(types.int64(_SUMS, types.int64, _IDS, _ROWS, _AGES, types.float32, types.uint64), intrinsics)
def _add(
    out: tuple[npt.NDArray[np.int32], Ids, Floats, Floats],
    count: int,
    ids: Ids,
    gradients: Floats,
    ages: Floats,
    scale: np.float32,
    key: np.uint64,
) -> int:
    """Add scale * gradients to the sums of their ids; the number of ids that there are then.

    out: a hash index's cells; the ids that they lead to; their sums; and the sums of scale * ages, from 0, or (0,)
    where nobody asks.
    """
    cells, out_ids, sums, out_ages = detached(out[0]), detached(out[1]), detached(out[2]), detached(out[3])
    ids, gradients, ages = detached(ids), detached(gradients), detached(ages)
    mask, dim = _U(cells.size - 1), _U(gradients.shape[1])
    homes = np.empty(_BLOCK, np.uint64)
    for start in range(0, ids.size, _BLOCK):
        stop = min(start + _BLOCK, ids.size)
        for i in range(start, stop):
            homes[i - start] = mix64(_U(ids[i]), key) & mask
            prefetch(cells, homes[i - start])
        for i in range(start, stop):
            if not _is_finite(gradients, i):
                continue
            row, cell = _U(i), cell_of(ids[i], homes[i - start], cells, out_ids)
            if cells[cell] == FREE:
                at = _U(count)
                cells[cell], out_ids[at] = count, ids[i]
                count += 1
                for j in range(dim):
                    sums[at, j] = scale * gradients[row, j]
            else:
                at = _U(cells[cell])
                for j in range(dim):
                    sums[at, j] += scale * gradients[row, j]
            if out_ages.size > 0:
                out_ages[at] += scale * ages[row]
    return count


@compiled(types.int64(_ROWS))
def _count_non_finite(gradients: Floats) -> int:
    """Rows that hold a NaN or Inf."""
    count = 0
    for i in range(gradients.shape[0]):
        count += not _is_finite(gradients, i)
    return count
