"""Pushes and loads on their way to the shards; pushes are kept until they are acknowledged, to be sent again."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

from embershard.proto.arrays import Floats
from embershard.proto.errors import (
    ClockAhead,
    EmbershardError,
    InvalidRequest,
    LeaseLost,
    MemoryLost,
    ShardRestarted,
    ShardUnavailable,
    UnknownRoute,
)
from embershard.proto.messages import Heartbeat, Load, Loaded, Push, Pushed, PushToken, TableGradients, TableKey
from embershard.proto.monitoring import tracing
from embershard.proto.routing import BundleRoute, Placement, Route
from embershard.proto.timing import Deadline
from embershard.worker.client.connections import (
    MESSAGE_OVERHEAD,
    Chunk,
    Outcome,
    ShardConnections,
    fill_messages,
    raise_first,
    split_into_messages,
)
from embershard.worker.client.kept import with_first_incomplete
from embershard.worker.client.membership import Membership
from embershard.worker.compression.compressor import Compressor, LrScale, rate_of

# table, or the members of a bundle; where its rows are; (U, dim) in route order
Gradients = Sequence[tuple[TableKey, Route, Floats]]

Versions = dict[int, int]  # shard -> the lowest Rows.version of what was read from it


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The gradients that one step pushes.

    `weight` is what a member's gradients count among those of its clock: its number of samples. `versions` are the
    lowest of the rows that they were computed on, of each shard that some were read from. A `difference` is added to
    the rows, past their optimizer.
    """

    gradients: Gradients
    clock: int
    lr_scale: LrScale = 1.0
    weight: float = 1.0
    versions: Versions | None = None
    difference: bool = False


class PushQueue:
    """The pushes and loads of one incarnation of a worker, numbered together, in order, per shard.

    Its owner sees to it that one thread uses it.
    """

    def __init__(
        self,
        connections: ShardConnections,
        worker: int,
        epoch: int,
        limits: Mapping[int, int],
        compressor: Compressor,
    ) -> None:
        self._connections, self._kept = connections, connections.kept
        self._worker, self._epoch = worker, epoch
        self._compressor = compressor
        self._limits = limits  # shard -> bytes of a message to it
        self._waiting: defaultdict[int, deque[Push]] = defaultdict(deque)  # by shard
        # acknowledged by a shard that gathers, and dropped by it unless the last message of their clock comes, too
        self._unconfirmed: defaultdict[int, list[Push]] = defaultdict(list)
        self._next_seq: defaultdict[int, int] = defaultdict(lambda: 1)
        self._ended: defaultdict[int, int] = defaultdict(int)  # shard -> after the last clock that was put whole
        self._refused: EmbershardError | None = None  # that nobody was told of

    @property
    def is_empty(self) -> bool:
        """Whether every push was answered."""
        return not any(tuple(self._waiting.values()))  # in one call: another thread may add a shard

    @property
    def waiting_shards(self) -> list[int]:
        """The shards that have not answered a push, ascending."""
        return sorted(shard for shard, waiting in tuple(self._waiting.items()) if waiting)

    def put(self, update: Update, placement: Placement, *, to_all: bool) -> None:
        """Cut an update into messages; with `to_all` a shard without rows is sent one too, which ends the clock.

        Its routes are of this placement.
        """
        parts = [(table, route) for table, route, _ in update.gradients]
        dims = {table: rows.shape[1] for table, _, rows in update.gradients}
        self._compressor.also_changed = []
        if self._compressor.coded_pushes:
            self._compressor.begin(update.gradients, update.lr_scale)
        # by what they would take as float32, with ids and ages: a payload fits, too
        sizes = [
            (16 if table in self._compressor.coded_pushes else 8) + 4 * rows.shape[1]
            for table, _, rows in update.gradients
        ]
        made: dict[int, list[tuple[TableGradients, ...]]] = {}
        packed: list[tuple[int, TableGradients]] = []
        try:
            for shard in placement.shards:
                limit, messages = self._limits[shard], made.setdefault(shard, [])
                for chunks in split_into_messages(parts, shard, sizes, limit):
                    messages += _fit(self._parts(update, chunks, shard, packed), limit, dims)
                if update.weight > 0 and self._compressor.has_feedback:  # else shards that gather drop it
                    drain = self._compressor.drain(shard, update.lr_scale, limit - 2 * MESSAGE_OVERHEAD)
                    messages += _fit(drain, limit, dims)
        except BaseException:  # of a user's codec: the push is sent to all shards or to none
            for shard, part in packed:  # the step is not taken: what is made of it again counts once
                self._compressor.take_out(part, shard)
            for shard, messages in made.items():
                for tables in messages:
                    self._compressor.restore_residual(tables, shard)
            raise
        for shard, messages in made.items():
            if to_all and not messages:
                messages = [()]
            for number, tables in enumerate(messages, start=1):
                self._append(shard, update, tables, placement.epoch, last=number == len(messages))

    def end_clock(self, clock: int, placement: Placement) -> None:
        """End a clock whose `put` was interrupted: a shard that has no last message of it is sent an empty one."""
        for shard in placement.shards:
            if self._ended[shard] <= clock:
                update = Update(gradients=(), clock=clock, weight=0.0)
                self._append(shard, update, (), placement.epoch, last=True)

    def _parts(
        self, update: Update, chunks: Sequence[Chunk], shard: int, packed: list[tuple[int, TableGradients]]
    ) -> list[TableGradients]:
        """Make the parts of a push from some rows of some tables; those that a codec packs are noted in `packed`."""
        compressor, parts = self._compressor, list[TableGradients]()
        try:
            for chunk in chunks:
                part = _part(update, chunk, shard)
                coded = update.weight > 0 and part.table in compressor.coded_pushes
                parts += compressor.pack(part, shard, chunk.start) if coded else [part]
                packed += [(shard, part)] if coded else []
        except BaseException:
            compressor.restore_residual(parts, shard)
            raise
        return parts

    def _next_token(self, shard: int) -> PushToken:
        """The idempotency key of the next push to a shard; whoever queues it counts on."""
        waiting, seq = self._waiting[shard], self._next_seq[shard]
        first = waiting[0].token.seq if waiting else seq  # pushes leave in order
        return PushToken(self._worker, self._epoch, seq, self._first_incomplete(shard, first))

    def _first_incomplete(self, shard: int, seq: int) -> int:
        return seq if self._kept.is_empty else self._kept.first_incomplete(shard, seq)

    def load(self, whole: Load, route: Route, *, shards: Iterable[int] | None, member: Membership | None) -> bool:
        """Send `whole`, rows of a route that are assigned and not trained, in messages that its shards take.

        False where the change is dropped, because the member's lease was lost. Each message says that those before it
        were answered, or a shard that has lost one of them with its machine's power would take it.
        """
        queues: dict[int, deque[Load]] = {}
        row_bytes = 8 + whole.rows.itemsize * whole.rows.shape[1]
        for shard in self._limits if shards is None else shards:
            messages = split_into_messages([(whole.table, route)], shard, [row_bytes], self._limits[shard])
            rows = [chunk.rows for (chunk,) in messages]
            if whole.last and not rows:
                rows = [slice(0, 0)]  # a shard without rows is told of the end, too
            queues[shard] = deque(
                replace(whole, ids=whole.ids[part], rows=whole.rows[part], last=whole.last and part is rows[-1])
                for part in rows
            )
        while batch := {
            shard: replace(queue.popleft(), token=self._next_load_token(shard), term=self._connections.term(shard))
            for shard, queue in queues.items()
            if queue
        }:
            lost_leases, ask = 0 if member is None else member.lost_leases, partial(self._connections.call, batch)
            outcomes = ask() if member is None or whole.keep_state else member.call_with_rejoin(ask)
            self._loaded(batch, outcomes)
            if member is not None and whole.keep_state and any(isinstance(one, LeaseLost) for one in outcomes.values()):
                member.rejoin(lost_leases)
                return False
            raise_first(outcomes)
        return True

    def _next_load_token(self, shard: int) -> PushToken:
        """The idempotency key of the next load, which ends before the push after it: see `_loaded`."""
        token = self._next_token(shard)
        self._kept.load_begins(shard, token.seq)
        self._next_seq[shard] = token.seq + 1
        return token

    def _loaded(self, loads: Mapping[int, Load], outcomes: Mapping[int, Outcome]) -> None:
        """Note which loads were answered: they and all before them are safe. One that was refused or got no answer is
        not acknowledged: its shard may never have seen it.
        """
        for shard, load in loads.items():
            outcome = outcomes[shard]
            if isinstance(outcome, EmbershardError) and may_be_unhandled(outcome):
                continue
            if load.token is None:
                continue
            self._kept.loads_end(shard, load.token.seq)
            if isinstance(outcome, Loaded):
                self._kept.acknowledge(shard, load.token.seq)

    def _append(
        self, shard: int, update: Update, tables: tuple[TableGradients, ...], placement_epoch: int, *, last: bool
    ) -> None:
        waiting = self._waiting[shard]
        token, term = self._next_token(shard), self._connections.term(shard)
        push = Push(
            token,
            update.clock,
            placement_epoch,
            tables,
            last=last,
            weight=update.weight,
            version=(update.versions or {}).get(shard, 0),
            difference=update.difference,
            early=term > 0,
            term=term,
            trace=tracing.step_trace,
        )
        # A Ctrl-C in between would leave out a number, which the shard would take for an acknowledged push, or end a
        # clock twice. None comes there: Python handles signals after calls and at jumps back.
        if last:
            self._ended[shard] = update.clock + 1
        self._next_seq[shard] = token.seq + 1
        waiting.append(push)

    def deliver(self, member: Membership | None) -> Pushed:
        """Send everything, a message per shard at a time, for a member of the job; the counts of what was acknowledged.

        The first refusal is raised when everything else is done; what got no answer at once, and it is kept, as is a
        refusal of before it.
        """
        gathers = member is not None and member.terms.staleness == 0
        applied = skipped = 0
        duplicate = False
        for shard, push, error in [] if self._kept.is_empty else self._kept.take_refused():
            self._settle(shard, push, error, gathers=gathers)
            if not _is_late(push, error, member) and not isinstance(error, LeaseLost):
                self._refused = self._refused or error
                self._end_refused(shard, push, member)
        while batch := {shard: self._head(shard) for shard, waiting in sorted(self._waiting.items()) if waiting}:
            silent: EmbershardError | None = None
            for shard, outcome in self._send(batch, member).items():
                if isinstance(outcome, EmbershardError) and _is_kept(outcome):
                    # it stays, to be sent again; a loss, which no other try mends, is told first
                    silent = outcome if silent is None or isinstance(outcome, MemoryLost) else silent
                    continue
                if isinstance(outcome, UnknownRoute):
                    self._waiting[shard][0] = self._with_ids(self._waiting[shard][0])
                    continue
                push = self._waiting[shard].popleft()
                self._settle(shard, push, outcome, gathers=gathers)
                if isinstance(outcome, Pushed):
                    applied += outcome.applied
                    skipped += outcome.skipped
                    duplicate |= outcome.duplicate
                elif isinstance(outcome, EmbershardError) and not _is_late(push, outcome, member):
                    self._refused = self._refused or outcome
                    self._end_refused(shard, push, member)
            if silent is not None:
                if isinstance(self._refused, LeaseLost):  # of which its worker has to know first
                    break
                raise silent
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused
        return Pushed(duplicate, applied, skipped)

    def _send(self, pushes: Mapping[int, Push], member: Membership | None) -> dict[int, Outcome]:
        """Send a push to each of these shards, once there is room to keep it until it is safe; the outcomes."""
        if not self._kept.is_empty and (full := [s for s, push in pushes.items() if self._kept.is_full(s, push)]):
            self.await_safe(full, self._connections.timeout)
        for shard, push in pushes.items():
            if push.early:
                self._kept.add(shard, push)
        outcomes = self._call_until_room(pushes, member)
        for shard, outcome in outcomes.items():
            if isinstance(outcome, Pushed) and outcome.early:
                self._kept.answered(shard, pushes[shard])
            elif pushes[shard].early and not _comes_again(outcome):
                outcomes[shard] = self._kept.settle(shard, pushes[shard], outcome)
        return outcomes

    def _call_until_room(self, pushes: Mapping[int, Push], member: Membership | None) -> dict[int, Outcome]:
        outcomes = self._connections.call(pushes)
        ahead = {shard: pushes[shard] for shard, outcome in outcomes.items() if isinstance(outcome, ClockAhead)}
        if ahead and member is not None:  # too much waits there for other workers
            outcomes.update(member.wait(ahead))
        replies = [reply for reply in outcomes.values() if isinstance(reply, Pushed)]
        with self._connections.lock:
            self._connections.stats.pushed_rows += sum(reply.applied for reply in replies)
            self._connections.stats.skipped_rows += sum(reply.skipped for reply in replies)
        return outcomes

    def await_safe(self, shards: Iterable[int], timeout: timedelta, *, awaits_recovery: bool = True) -> None:
        """Wait until every push to these shards is safe there. ShardUnavailable. Any thread may call it."""
        deadline = Deadline(timeout, self._connections.clock)
        while waiting := self._kept.unsafe(shards):
            if deadline.seconds <= 0:
                shard = self._connections[waiting[0]]
                reason = "it has not said that all pushes are safe"
                raise ShardUnavailable(
                    shard=shard.name, seconds=timeout.total_seconds(), reason=reason, address=shard.transport.address
                )
            asked = {
                shard: Heartbeat(worker=self._worker, epoch=self._epoch, flush=True, term=self._connections.term(shard))
                for shard in waiting
            }
            raise_first(self._connections.call(asked, timeout=deadline.remaining, awaits_recovery=awaits_recovery))

    def empty(self) -> None:
        """Take the gradients out of what waits: a restore has put other rows in the place of theirs."""
        self._unconfirmed.clear()
        for waiting in self._waiting.values():
            for place, push in enumerate(waiting):  # whose number, and end of a clock, are to come all the same
                waiting[place] = replace(push, tables=())

    def _end_refused(self, shard: int, push: Push, member: Membership | None) -> None:
        """End the clock of a member's push that a shard refused, by an empty push: all members wait for it.

        A later clock that was put to this shard ends it too. An empty push that is refused is not tried again.
        """
        if member is not None and push.last and push.tables and self._ended[shard] == push.clock + 1:
            update = Update(gradients=(), clock=push.clock, weight=0.0)
            self._append(shard, update, (), push.placement_epoch, last=True)

    def _head(self, shard: int) -> Push:
        """The next push to a shard. It says that those before it were answered, also of the same update."""
        push = self._waiting[shard][0]
        first = self._first_incomplete(shard, push.token.seq)
        if first > push.token.first_incomplete:
            push = self._waiting[shard][0] = with_first_incomplete(push, first)
        return push

    def _with_ids(self, push: Push) -> Push:
        """The same push, with its ids in place of route numbers."""
        tables = (
            replace(part, route=0, packed=self._compressor.packed_ids(part.table, part.ids) if part.codec else None)
            if part.route
            else part
            for part in push.tables
        )
        return replace(push, tables=tuple(tables))

    def _settle(self, shard: int, push: Push, outcome: Outcome, *, gathers: bool) -> None:
        """Give back what a shard will not apply, now that it has answered."""
        if not self._kept.is_empty and not (isinstance(outcome, Pushed) and outcome.early):
            self._kept.loads_end(shard, push.token.seq)
        counts = push.weight > 0 or not gathers  # what weighs nothing in a clock is applied by nobody
        refused, unconfirmed = isinstance(outcome, EmbershardError), self._unconfirmed[shard]
        if gathers and counts and not push.last and not refused:
            unconfirmed.append(push)
        dropped = [push] if refused and counts else []
        if push.last:
            dropped += unconfirmed if refused or not counts else []
            unconfirmed.clear()
        for one in dropped:
            self._compressor.restore_residual(one.tables, shard)


def _part(update: Update, chunk: Chunk, shard: int) -> TableGradients:
    table, route, rows = update.gradients[chunk.part]
    # named once: the shard forgets it with the push
    kept = route.numbers.pop((table, shard), 0) if chunk.is_whole else 0
    first = table if isinstance(table, str) else table[0]  # all tables of a bundle have one rate
    rate = update.lr_scale if isinstance(update.lr_scale, float) else rate_of(update.lr_scale, first)
    ids, gradients = route.ids[chunk.rows], rows[chunk.rows]
    if isinstance(table, str):
        return TableGradients(table, ids, gradients, rate, kept)
    assert isinstance(route, BundleRoute)
    return TableGradients("", ids, gradients, rate, kept, members=table, counts=route.counts_of(shard, chunk.rows))


def _fit(parts: list[TableGradients], limit: int, dims: Mapping[TableKey, int]) -> list[tuple[TableGradients, ...]]:
    """Messages of parts that each fit, at most `limit` bytes also when decoded: evicted residuals add rows."""
    sized = list[tuple[TableGradients, TableKey, int]]()
    for part in parts:
        ids = 0 if part.route else (part.ids if part.packed is None else part.packed).nbytes
        key = part.members or part.table
        rows = max(part.gradients.nbytes, 4 * len(part.ids) * dims.get(key, 0))
        sized.append((part, key, ids + rows))
    return fill_messages(sized, limit)


def may_be_unhandled(outcome: EmbershardError) -> bool:
    """Whether a push or load may still have to be applied: nobody answered, or the shard put it off."""
    return isinstance(outcome, ShardUnavailable | ShardRestarted) or outcome.retryable


def _is_kept(outcome: EmbershardError) -> bool:
    """Whether a push with this outcome is kept: it may still have to be applied.

    MemoryLost may be what a shard has said of those before it, to the heartbeat of a new connection.
    """
    return may_be_unhandled(outcome) or isinstance(outcome, MemoryLost)


def _comes_again(outcome: Outcome) -> bool:
    """Whether a push with this outcome is sent again, as it was or with its ids in place of a forgotten route."""
    return isinstance(outcome, EmbershardError) and (_is_kept(outcome) or isinstance(outcome, UnknownRoute))


def _is_late(push: Push, outcome: EmbershardError, member: Membership | None) -> bool:
    """Whether a push is of a clock before its worker joined again, perhaps on some shards only."""
    return isinstance(outcome, InvalidRequest) and member is not None and push.clock < member.asked
