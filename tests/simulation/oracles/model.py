"""A shard as docs/consistency.md and docs/durability.md describe it, in plain Python: dicts of rows, fed by its events.

It is written beside the package, not with it: what both have in common are the formulas of the optimizers, the decoding
of payloads, and the messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from embershard.proto.codec.payload import decode
from embershard.proto.messages import Declare, Join, Leave, Load, Push, TakeSplit
from embershard.proto.spec import Custom
from embershard.ps.events import Event, Expired, PushEvent, Settled, Term
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.reference import ReferenceTable, sum_gradients

TERM_VERSIONS = 2**32
OPTIMIZERS = OptimizerRegistry(["simulation.raising_rows"])


@dataclass
class ModelMember:
    worker: int
    epoch: int
    clock: int
    run: int
    paused: bool = False
    lost: bool = False
    number: int = 0  # of its last join or pause


@dataclass
class ModelPush:
    """What a worker has pushed of a clock."""

    parts: list = field(default_factory=list)
    difference: bool = False
    weight: float = 0.0
    complete: bool = False


@dataclass
class ModelSplits:
    """The parts of one pass over the data. A member that comes back after its eviction is another one here."""

    data_epoch: int = -1
    never_given: int = 0
    back: list[int] = field(default_factory=list)  # from members that are gone
    held: dict[int, tuple[ModelMember, int]] = field(default_factory=dict)  # by worker

    def take(self, member: ModelMember, request: TakeSplit, members: dict[int, ModelMember]) -> int:
        """The part that a member is given; -1: none is left, or it has to wait."""
        if request.data_epoch > self.data_epoch:
            self.data_epoch, self.never_given, self.back, self.held = request.data_epoch, 0, [], {}
        for worker, (holder, split) in list(self.held.items()):
            if members.get(worker) is not holder:
                self.back.append(split)
                del self.held[worker]
        if member.worker in self.held:
            if (split := self.held[member.worker][1]) != request.done:
                return split
            del self.held[member.worker]
        if self.back:
            split = self.back.pop(0)
        elif self.never_given < request.num_splits:
            split, self.never_given = self.never_given, self.never_given + 1
        else:
            return -1
        self.held[member.worker] = member, split
        return split


@dataclass
class ModelWindow:
    epoch: int
    first: int = 0
    settled: int = 0
    replies: dict = field(default_factory=dict)


class ModelShard:
    """The state after some events."""

    def __init__(self) -> None:
        self.tables: dict[str, ReferenceTable] = {}
        self.version = self.open = 0
        self.staleness, self.aware, self.started, self.workers, self.run = -1, False, False, 1, 0
        self.members: dict[int, ModelMember] = {}
        self.gone: dict[int, ModelMember] = {}
        self.joined: set[int] = set()
        self.windows: dict[int, ModelWindow] = {}
        self.pending: dict[int, dict[tuple[int, int], ModelPush]] = {}
        self.splits = ModelSplits()
        self.given = -1  # the part of the data that the last event gave

    def apply(self, event: Event) -> tuple[int, int]:
        """Take an event; the rows that it applied and skipped."""
        match event:
            case PushEvent():
                return self._push(event)
            case Load():
                return self._load(event)
            case Declare():
                if event.spec.name not in self.tables:
                    self.tables[event.spec.name] = ReferenceTable(event.spec, OPTIMIZERS.find(event.spec.optimizer))
            case Join():
                self._join(event)
            case Leave():
                self._leave(event)
            case TakeSplit():
                self.given = self.splits.take(self.members[event.worker], event, self.members)
            case Expired():
                self._remove(event.worker, lost=True)
                self._close()
            case Settled():
                window = self._window(event.worker, event.epoch)
                window.settled = max(window.settled, event.seq)
            case Term():
                if event.term > 1:
                    self.version = (self.version // TERM_VERSIONS + 1) * TERM_VERSIONS
        return 0, 0

    def _push(self, event: PushEvent) -> tuple[int, int]:
        push = event.push
        member = self._member(push.token.worker, push.token.epoch)
        parts = [self._decoded(part, ids) for part, ids in zip(push.tables, event.ids or [None] * len(push.tables),
                                                               strict=True)]  # fmt: skip
        finite = [np.isfinite(rows).all(axis=1) for _, _, rows, _, _ in parts]
        applied, skipped = (int(sum(np.sum(one == want) for one in finite)) for want in (True, False))
        if member is not None and self.staleness == 0:
            kept = self.pending.setdefault(push.clock, {}).setdefault((member.worker, member.epoch), ModelPush())
            kept.parts += parts
            kept.difference = push.difference
            kept.weight, kept.complete = float(np.float32(push.weight)), push.last
        else:
            divisor = 1.0 if member is None or not self.aware else float(max(1, self._missed(push.version)))
            if not self._apply_parts(parts, push.difference, divisor):
                window = self._window(push.token.worker, push.token.epoch)
                window.settled = max(window.settled, push.token.seq)
                return 0, 0
            self.version += push.last
        window = self._window(push.token.worker, push.token.epoch)
        self._record(window, push, applied, skipped)
        if member is not None and push.last:
            member.clock = max(member.clock, push.clock + 1)
            self._close()
        return applied, skipped

    def _apply_parts(self, parts: list, difference: bool, divisor: float = 1.0) -> bool:
        """Apply all of them or none; False where a row function raises, which leaves new rows."""
        raising, others = [], []
        for part in parts:
            (raising if isinstance(self.tables[part[0]].spec.optimizer, Custom) else others).append(part)
        before = [(name, id_, *self._record_of(name, id_)) for name, ids, *_ in raising for id_ in ids.tolist()]
        try:
            for name, ids, rows, rate, ages in [
                *raising,
                *(part for part in parts if not any(part is one for one in raising)),
            ]:
                if difference:
                    self._add(name, ids, rows)
                else:
                    self.tables[name].apply(ids, rows, rate / divisor, ages)
        except ValueError:
            for name, id_, weights, state in before:
                self.tables[name]._rows[id_] = weights, state
            return False
        return True

    def _record_of(self, name: str, id_: int) -> tuple[np.ndarray, np.ndarray]:
        """Copies of a row and its state, or those that it would begin with."""
        table = self.tables[name]
        if id_ in table._rows:
            weights, state = table._rows[id_]
            return weights.copy(), state.copy()
        return table.gather(np.array([id_]))[0], table._optimizer.initial(table.spec.dim, table._params)

    def _add(self, name: str, ids: np.ndarray, rows: np.ndarray) -> None:
        for id_, row in zip(ids.tolist(), rows, strict=True):
            if np.isfinite(row).all():
                weights, state = self._record_of(name, id_)
                self.tables[name]._rows[id_] = weights + row, state

    def _load(self, load: Load) -> tuple[int, int]:
        self.tables[load.table].load(
            load.ids, load.rows.reshape(len(load.ids), self.tables[load.table].spec.dim), keep_state=load.keep_state
        )
        if load.token is not None:
            window = self._window(load.token.worker, load.token.epoch)
            self._record(window, load, len(load.ids), 0)
        return len(load.ids), 0

    def _record(self, window: ModelWindow, request: Push | Load, applied: int, skipped: int) -> None:
        token = request.token
        window.replies[token.seq] = applied, skipped
        window.settled = max(window.settled, token.seq)
        window.first = max(window.first, token.first_incomplete)
        window.replies = {seq: reply for seq, reply in window.replies.items() if seq >= window.first}

    def _decoded(self, part, ids):
        ids = part.ids if ids is None else ids
        dim, ages = self.tables[part.table].spec.dim, None
        if part.codec:
            found = decode(part.gradients, len(ids), dim)
            ids = ids if found.positions is None else ids[found.positions]
            rows, ages = found.rows, found.ages
        else:
            rows = part.gradients.reshape(len(ids), dim)
        return part.table, ids.copy(), rows.copy(), part.lr_scale, ages

    def _missed(self, version: int) -> int:
        known = version > 0 and version // TERM_VERSIONS == self.version // TERM_VERSIONS
        return max(0, self.version - version) if known else 0

    def _window(self, worker: int, epoch: int) -> ModelWindow:
        if worker not in self.windows or self.windows[worker].epoch < epoch:
            self.windows[worker] = ModelWindow(epoch)
        return self.windows[worker]

    def _member(self, worker: int, epoch: int) -> ModelMember | None:
        member = self.members.get(worker)
        return member if member is not None and member.epoch == epoch else None

    def _join(self, join: Join) -> None:
        gone = self.gone.get(join.worker)
        run = join.run or (gone.run if gone is not None and gone.epoch == join.epoch else self.run)
        if run > self.run:
            self.run = run
            for worker in list(self.members):
                self._remove(worker, lost=True)
            self._close()
        member = self.members.get(join.worker)
        if gone is not None and (gone.epoch, gone.run) != (join.epoch, self.run):
            gone = None
        if member is not None and member.epoch != join.epoch:
            self._remove(join.worker)
            self._close()
            member = None
        if member is not None and join.number < member.number:
            return  # a pause came after it
        comes_back = gone is not None and gone.lost and (
            (self.staleness, self.aware) == (join.staleness, join.staleness_aware_lr))  # fmt: skip
        if not self.members and not comes_back:  # a new job
            self.open, self.staleness, self.aware = join.clock, join.staleness, join.staleness_aware_lr
            self.started, self.workers = False, join.workers
            self.joined.clear()
            self.splits = ModelSplits()
            for one in self.gone.values():
                one.clock = 0
        first = self.open if gone is None else max(self.open, gone.clock)
        if join.clock < first:
            return
        if member is None:
            member = self.members[join.worker] = ModelMember(join.worker, join.epoch, join.clock, self.run)
        member.clock, member.paused, member.number = max(member.clock, join.clock), False, join.number
        self.gone.pop(join.worker, None)
        self.joined.add(join.worker)
        self.started |= len(self.joined) >= self.workers
        self._close()

    def _leave(self, leave: Leave) -> None:
        member = self._member(leave.worker, leave.epoch)
        if member is not None and leave.pause:
            if leave.number < member.number:
                return  # it has joined again since
            member.paused, member.number = True, leave.number
            self._drop((member.worker, member.epoch))
        elif member is not None:
            self._remove(member.worker)
        self._close()

    def _remove(self, worker: int, *, lost: bool = False) -> None:
        member = self.gone[worker] = self.members.pop(worker)
        member.lost = lost
        self._drop((worker, member.epoch))

    def _drop(self, sender: tuple[int, int]) -> None:
        for clock, pushes in list(self.pending.items()):
            if sender in pushes and not pushes[sender].complete:
                del pushes[sender]
                if not pushes:
                    del self.pending[clock]

    def _close(self) -> None:
        if self.members and not self.started:
            return
        active = [member.clock for member in self.members.values() if not member.paused]
        done = [clock + 1 for clock, pushes in self.pending.items() if any(one.complete for one in pushes.values())]
        end = min(active) if active else max(done, default=0)
        if end <= self.open:
            return
        self.open = end
        for clock in sorted(clock for clock in self.pending if clock < end):
            pushes = self.pending.pop(clock)
            complete = [pushes[sender] for sender in sorted(pushes) if pushes[sender].complete]
            if complete:
                self._apply_clock([push for push in complete if push.weight > 0])
                self.version += 1

    def _apply_clock(self, pushes: list[ModelPush]) -> None:
        if len(pushes) == 1:
            self._apply_parts(pushes[0].parts, pushes[0].difference)
            return
        total = sum(push.weight for push in pushes)
        by_table: dict[str, list] = {}
        for push in pushes:
            for name, ids, rows, rate, ages in push.parts:
                by_table.setdefault(name, []).append((np.float32(push.weight / total), ids, rows, rate, ages))
        for name, parts in by_table.items():
            ones = [np.ones(len(ids), np.float32) if ages is None else ages for _, ids, _, _, ages in parts]
            scaled = [(scale, ids, rows, age) for (scale, ids, rows, _, _), age in zip(parts, ones, strict=True)]
            sums, ages = sum_gradients(scaled)
            if not sums:
                continue
            ids = np.array(list(sums), np.int64)
            aged = any(part[4] is not None for part in parts)
            counts = np.array([ages[one] for one in ids.tolist()], np.float32) if aged else None
            self._apply_parts([(name, ids, np.stack(list(sums.values())), parts[0][3], counts)], pushes[0].difference)
