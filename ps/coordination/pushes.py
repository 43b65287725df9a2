"""Pushes as a shard takes them: each once, all of it checked before any of it is applied."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from embershard.proto.arrays import Ids
from embershard.proto.errors import BadOptimizer, NoAddressSpace, UnknownRoute
from embershard.proto.messages import Load, Pull, Push, PushToken, TableGradients, TableIds
from embershard.ps.coordination.aggregate import Sender
from embershard.ps.coordination.clock import Clock, Member, Plain
from embershard.ps.coordination.dedup import Dedup
from embershard.ps.coordination.outcome import Outcome
from embershard.ps.memory import MemoryBudget
from embershard.ps.security.table_quotas import TableQuotas
from embershard.ps.table.checked import Checked, CheckedBundle, CheckedGradients, own_gradients
from embershard.ps.table.table import Applied, Table
from embershard.ps.table.tables import Tables, apply_parts, single_tables

# A worker names a route within a few steps or never (an evaluation, a forward without a backward). These bound what
# one that never does can make a shard remember; what was dropped is sent again with its ids.
MAX_ROUTES = 1024  # of a worker
MAX_BYTES = 32 * 2**20  # of a worker
MAX_ALL_BYTES = 256 * 2**20  # of all: whoever pulls may say that it is any worker
MAX_WORKERS = 4096
_ROUTE_BYTES = 400  # that a route takes beside its ids and the length of its key

KeptFor = str | bytes  # a table, or a digest of the members of a bundle and of how many ids each of them has


class Pushes:
    """Check and apply pushes, each once, and count them. `max_bytes` is the largest size of an unpacked push."""

    def __init__(self, tables: Tables, clock: Clock, max_bytes: int) -> None:
        self.dedup = Dedup()
        self.rows = 0
        self.skipped_rows = 0
        self._tables, self._clock, self._max_bytes = tables, clock, max_bytes

    def find(self, token: PushToken) -> Applied | None:
        """Return the earlier reply to a push or load that was recorded before; None for one to take.

        StaleWorker, MemoryLost, InvalidRequest. A load that was sent again must not undo the pushes that came since.
        """
        if self._clock.job:
            self._clock.fence(token.worker, token.epoch)
        return self.dedup.find(token)

    def take(self, request: Push, known_ids: Sequence[Ids | None] = (), event: int = 0) -> Outcome:
        """Apply a push that is no duplicate, or keep it for its clock.

        known_ids: of each part, the checked ids that its route number stands for; None where the part has its own.
        event: its number among the shard's.
        The reply says what became of this push alone: an update of its clock that fails is the clock's error.
        """
        token = request.token
        member = self._clock.find_member(token.worker, token.epoch) if self._clock.job else None
        if member is not None:
            self._clock.check_push(member, request)
        gathers = member is not None and self._clock.gathers(member, request)
        parts = self._check(request, known_ids, kept=gathers)
        if member is not None and gathers:
            reply = self._clock.gather(member.sender, request, single_tables(parts), event)
        else:
            try:
                reply = self._apply(member, request, parts)
            except BadOptimizer as error:  # it has left new rows with their first values
                self.dedup.settle(token.worker, token.epoch, token.seq)
                return Outcome(error=error)
        self.dedup.record(token, reply)
        self.rows += reply.rows
        self.skipped_rows += reply.skipped
        if member is not None and request.last:
            self._clock.pushed(member, request.clock)
        return Outcome(reply)

    def gather_again(self, request: Push, known_ids: Sequence[Ids | None], event: int) -> None:
        """Keep a push for its clock that was kept, as `event`, when the state was written."""
        parts = self._check(request, known_ids, kept=True)
        self._clock.gather(Sender(request.token.worker, request.token.epoch), request, single_tables(parts), event)

    def control(self) -> Plain:
        """The windows and the counts in plain values."""
        return {"windows": self.dedup.control(), "rows": self.rows, "skipped_rows": self.skipped_rows}

    def restore(self, control: Plain) -> None:
        """Replace the state by what `control` returned."""
        self.dedup = Dedup.of_control(control["windows"])
        self.rows, self.skipped_rows = control["rows"], control["skipped_rows"]

    def load(self, request: Load) -> Outcome:
        """Assign the rows of a load that is no duplicate."""
        token = request.token
        if token is not None:
            self._clock.find_member(token.worker, token.epoch)
        if self._tables.quotas is not None:
            entry = self._tables.entry(request.table)
            self._tables.check_ids(entry, request.ids)
            self._check_quotas(self._tables.quotas, [(entry.table, request.ids)])
        reply = Applied(self._tables.load(request), skipped=0)
        if token is not None:
            self.dedup.record(token, reply)
        return Outcome(reply)

    def _check(self, request: Push, known_ids: Sequence[Ids | None], *, kept: bool) -> list[Checked]:
        parts: list[Checked] = []
        room = self._max_bytes
        for number, part in enumerate(request.tables):
            known = known_ids[number] if known_ids else None
            parts.append(self._tables.check_gradients(part, known, room))
            room -= parts[-1].gradients.nbytes
        has_copies = any([part.copy is not None for part in parts])
        if has_copies and (kept or any([part.may_raise for part in parts])):  # then what is not applied is needed, too
            parts = [part._replace(gradients=own_gradients(part), copy=None) for part in parts]
        pending = self._clock.pending
        if self._tables.quotas is not None:
            self._check_quotas(self._tables.quotas, [(part.table, part.ids) for part in single_tables(parts)])
        kept_bytes = sum(part.nbytes for part in parts) if kept else 0
        _check_room(parts, pending.waiting_ids, pending.parts, self._tables.budget, kept_bytes)
        return parts

    def _check_quotas(self, quotas: TableQuotas, parts: Sequence[tuple[Table, Ids]]) -> None:
        pending = self._clock.pending
        quotas.check_rows(
            self._tables, parts, pending.waiting_ids, lambda: ((one.table, one.ids) for one in pending.parts())
        )

    def _apply(self, member: Member | None, request: Push, parts: list[Checked]) -> Applied:
        divisor = 1.0 if member is None else self._clock.divisor(request.version)
        reply = apply_parts([(part, request.difference) for part in parts], divisor)
        if request.last:
            self._clock.updates.count([request.version])
        return reply


def _check_room(
    parts: Sequence[Checked],
    waiting: Mapping[Table, int],
    waiting_parts: Callable[[], Iterable[CheckedGradients]],
    budget: MemoryBudget,
    kept_bytes: int,
) -> None:
    """Make sure that all rows of a push can be created, before any is: TableFull, NoAddressSpace.

    waiting: ids per table that are to be applied before, those of `waiting_parts`. kept_bytes: of what is kept of it.
    """
    bundles = [part for part in parts if isinstance(part, CheckedBundle) and not waiting]
    wanted = _sum_sizes(waiting, [part for part in parts if isinstance(part, CheckedGradients) or waiting])
    members = [table for part in bundles for table in part.members.tables]
    if len({*members, *wanted}) < len(members) + len(wanted):  # a table that is in two parts has the rows of both
        bundles, wanted = [], _sum_sizes(waiting, parts)
    most = kept_bytes + sum(table.most_growth * count for table, count in wanted.items())
    if most + sum(part.most_growth() for part in bundles) > budget.limit - budget.used:
        wanted = _sum_sizes(waiting, parts)
        _check_growth(parts, wanted, waiting_parts, budget, kept_bytes)
    try:
        for table, count in wanted.items():
            table.reserve(count)
    except NoAddressSpace:
        for table, count in _count_missing(parts, waiting_parts).items():
            table.reserve(count)
    for part in bundles:
        part.reserve()


def _sum_sizes(waiting: Mapping[Table, int], parts: Iterable[Checked]) -> dict[Table, int]:
    """The number of ids of each table, those that wait included."""
    wanted = dict(waiting)
    for part in parts:
        sizes = [(part.table, len(part.ids))] if isinstance(part, CheckedGradients) else part.sizes()
        for table, count in sizes:
            wanted[table] = wanted.get(table, 0) + count
    return wanted


def _check_growth(
    parts: Sequence[Checked],
    wanted: dict[Table, int],
    waiting_parts: Callable[[], Iterable[CheckedGradients]],
    budget: MemoryBudget,
    kept_bytes: int,
) -> None:
    """TableFull where the budget has no room for so many new rows; first as if all ids were new."""
    asked = kept_bytes + sum(table.growth(count) for table, count in wanted.items())
    if asked > budget.limit - budget.used:  # now as they are
        single = single_tables(parts)
        wanted.update(_count_missing(parts, waiting_parts))
        asked = kept_bytes + sum(table.growth(count) for table, count in wanted.items())
        budget.check(max(single, key=lambda one: len(one.ids)).table.spec.name if single else "", asked)


def _count_missing(
    parts: Sequence[Checked], waiting_parts: Callable[[], Iterable[CheckedGradients]]
) -> dict[Table, int]:
    """The ids of each table that have no row yet, those that wait included."""
    missing: dict[Table, int] = {}
    for one in (*waiting_parts(), *single_tables(parts)):
        missing[one.table] = missing.get(one.table, 0) + one.table.count_missing(one.ids)
    return missing


@dataclass(slots=True)
class _WorkerRoutes:
    """The routes of one worker's incarnation, the oldest first."""

    routes: OrderedDict[int, tuple[KeptFor, Ids]] = field(default_factory=OrderedDict)
    nbytes: int = 0


def kept_for(part: TableIds | TableGradients) -> KeptFor:
    """Return the table whose ids a part of a request has; of a bundle a digest (16 bytes) of its members and counts."""
    if not part.members:
        return part.table
    text = "\0".join(part.members).encode() + array("q", part.counts).tobytes()  # no table's name has a zero in it
    return blake2b(text, digest_size=16).digest()


class RouteCache:
    """Number -> (what it is for, ids), per worker's incarnation; bounded, the oldest are dropped.

    An earlier incarnation keeps its own: who only reads may have the number of a worker that trains.
    """

    def __init__(self) -> None:
        # the one that pulled last at the end
        self._workers: OrderedDict[tuple[int, int], _WorkerRoutes] = OrderedDict()
        self._nbytes = 0

    def keep_all(self, request: Pull) -> None:
        """Remember the ids of a pull that has numbered them."""
        for part in request.tables:
            if part.route:
                self.keep(request.worker, request.epoch, part.route, kept_for(part), part.ids)

    def ids_of(self, request: Push, tables: Tables) -> tuple[Ids | None, ...]:
        """Return the ids that the numbers of a push stand for, see Pushes.take; UnknownRoute, TableLoading."""
        token, ids, has_routes = request.token, list[Ids | None](), False
        for part in request.tables:
            known = None
            if part.route:
                has_routes = True
                tables.check_open(part)
                known = self.find(token.worker, token.epoch, part.route, kept_for(part))
                if known is None:
                    table = part.table or ", ".join(part.members[:3])
                    raise UnknownRoute(worker=token.worker, route=part.route, table=table)
            ids.append(known)
        return tuple(ids) if has_routes else ()

    def forget_all(self, request: Push) -> None:
        """Drop the routes of a push that was applied."""
        for part in request.tables:
            if part.route:
                self.forget(request.token.worker, request.token.epoch, part.route)

    def keep(self, worker: int, epoch: int, number: int, kept_for: KeptFor, ids: Ids) -> None:
        """Remember a copy of ids ((U,) int64) of a table or a bundle, if there are any."""
        if not len(ids):
            self.forget(worker, epoch, number)
            return
        kept = self._workers.setdefault((worker, epoch), _WorkerRoutes())
        self._workers.move_to_end((worker, epoch))
        self._drop(kept, number)
        kept.routes[number] = (kept_for, ids.copy())  # the array may be a part of a whole message
        kept.nbytes += _size(kept_for, ids)
        self._nbytes += _size(kept_for, ids)
        while len(kept.routes) > MAX_ROUTES or kept.nbytes > MAX_BYTES:
            self._drop(kept, next(iter(kept.routes)))
        while len(self._workers) > MAX_WORKERS or self._nbytes > MAX_ALL_BYTES:
            self._drop_worker(next(iter(self._workers)))

    def find(self, worker: int, epoch: int, number: int, kept_for: KeptFor) -> Ids | None:
        """The ids kept under a number; None where they are not known, or are another table's, or divided otherwise."""
        kept = self._workers.get((worker, epoch))
        if kept is None:
            return None
        found, ids = kept.routes.get(number, (None, None))
        return ids if found == kept_for else None

    def forget(self, worker: int, epoch: int, number: int) -> None:
        """Drop a route whose push was applied."""
        if kept := self._workers.get((worker, epoch)):
            self._drop(kept, number)

    def _drop(self, kept: _WorkerRoutes, number: int) -> None:
        route = kept.routes.pop(number, None)
        if route is not None:
            kept.nbytes -= _size(*route)
            self._nbytes -= _size(*route)

    def _drop_worker(self, worker: tuple[int, int]) -> None:
        kept = self._workers.pop(worker, None)
        if kept is not None:
            self._nbytes -= kept.nbytes


def _size(kept_for: KeptFor, ids: Ids) -> int:
    return _ROUTE_BYTES + len(kept_for) + ids.nbytes
