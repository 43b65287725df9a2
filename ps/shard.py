"""The shard: one state machine from a request to its reply, that knows no transport, no socket and no thread.

It turns requests into reads of its state (ps/core.py) and into events, which change it. What goes by the time is here:
leases, rates, measured seconds. It is not safe for use by several threads, but for `greeting` and `status`, which may
be read at any time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress

from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.clock import SYSTEM_CLOCK, SystemClock
from embershard.proto.codec.user_defined import CodecRegistry
from embershard.proto.errors import (
    EmbershardError,
    InvalidRequest,
    LeaseLost,
    LogStalled,
    OtherTerm,
    ShardBusy,
    StaleRun,
    StaleWorker,
    TooManyDeclares,
    UnknownRoute,
    WrongPlacement,
)
from embershard.proto.messages import (
    Compress,
    Declare,
    GetStatus,
    Greeting,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Join,
    Joined,
    Leave,
    Load,
    Loaded,
    Pull,
    Push,
    Pushed,
    PushToken,
    Rendezvous,
    Reply,
    Request,
    Restore,
    Rows,
    ShardStatus,
    Snapshot,
    TakeSplit,
    arrays,
    replace,
)
from embershard.proto.routing import Placement
from embershard.ps.bases.bases import Bases
from embershard.ps.coordination.clock import MustWait
from embershard.ps.coordination.early_answers import EarlyAnswers
from embershard.ps.coordination.fencing import Fences
from embershard.ps.coordination.leases import Leases
from embershard.ps.coordination.outcome import Outcome
from embershard.ps.coordination.pushes import RouteCache
from embershard.ps.core import Core
from embershard.ps.events import (
    Event,
    EventLog,
    Expired,
    PushEvent,
    RestoredRows,
    Settled,
    TablesRestored,
    Term,
    applied,
    check_size,
)
from embershard.ps.memory import MemoryBudget, resident_memory
from embershard.ps.restore import Contents, Restores, UnloggedRows
from embershard.ps.security.places import SnapshotPlaces
from embershard.ps.security.table_quotas import TableQuotas
from embershard.ps.snapshot import ShardImage, Snapshots
from embershard.ps.table.checked import Stopwatch, read_all
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Applied

DECLARES_PER_SECOND = 1000  # that make a table; a job declares its tables once
_DECLARE_RETRY_MS = 100
_CHANGES = (Push, Load, Declare, Join, Leave, Rendezvous, TakeSplit, Compress)
_EVENT_BYTES = 4096  # of an event's record in a log, beside its arrays
_PIECES_AT_ONCE = 4  # events of restored rows, between which the shard serves others
_QUICK_FLOATS = 2**17  # of a pull or push: half a MiB


class Shard:
    """One shard's part of every table.

    `codecs` are the user-defined ones beside the built-in. `instance` is random at each start, so that a client notices
    a shard that lost its rows. `memory` bytes are what its tables may take, by default 80 % of the container's or
    else of the machine's. `log` is given every event that has changed the state. Snapshots may lie in `places`, by
    default in any.
    """

    def __init__(
        self,
        index: int,
        placement: Placement,
        optimizers: OptimizerRegistry,
        *,
        codecs: CodecRegistry | None = None,
        version: str = "",
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        memory: int | None = None,
        log: EventLog | None = None,
        clock: SystemClock = SYSTEM_CLOCK,
        places: SnapshotPlaces | None = None,
    ) -> None:
        if not 0 <= index < placement.num_shards:
            raise ValueError(f"shard must be 0..{placement.num_shards - 1} of {placement.num_shards}, got {index}")
        self.greeting = Greeting(
            shard=index,
            num_shards=placement.num_shards,
            placement_epoch=placement.epoch,
            version=version,
            instance=f"{clock.random_bits(64):016x}",
            max_message_bytes=max_message_bytes,
            bundles=True,
        )
        self.system = clock  # core.clock is that of the workers
        self._placement = placement
        self._coding = Stopwatch()  # of payloads
        self.core = core = Core(
            index,
            placement,
            optimizers,
            codecs=codecs,
            budget=MemoryBudget(memory),
            max_message_bytes=max_message_bytes,
            decoding=self._coding,
        )
        self._log = log
        self._bases: Bases | None = None
        self._lsn = self._awaited = 0  # of the last event in the log; of the one that the last answer waits for
        self._recovered: dict[int, int] = {}  # worker -> its incarnation, as the log had it
        self._early = EarlyAnswers()
        self._is_early = False  # whether the last answer may leave before its event is safe
        self._leases = Leases(core.clock)
        self._routes = RouteCache()
        self._new_tables = _Rate()
        self._snapshots = Snapshots(self._moment, lambda: bool(core.clock.pending.waiting_ids), places)
        self._restores = Restores(index, placement, optimizers, core.tables.names, self._install, core.budget, places)
        self._fences = Fences(clock.since_1970)
        self._started = clock.now()
        self._requests = self._pulled_rows = self._duplicates = 0

    def handle(
        self, request: Request, now: float | None = None, peer: str = "", quotas: TableQuotas | None = None
    ) -> Reply:
        """The reply to a request, or an EmbershardError that says why there is none; nothing was changed then.

        ClockAhead says that others have to move first: handle the same request again once `generation` has grown.
        It is then, too, that `now`, in the clock's seconds, is when it arrived: leases go by it. `peer` is where
        it came from, as far as its transport knows, and `quotas` bound what its sender may make of the tables.
        """
        if now is None:
            now = self.system.now()
        self.advance(now)
        if self._log is not None and isinstance(request, _CHANGES):
            self._awaited = 0
            self._log.check_room(_EVENT_BYTES + sum(array.nbytes for array in arrays(request)))
        self._requests += 1
        self._coding.seconds = 0.0  # the request before may have failed
        self._is_early = False
        self.core.tables.quotas = quotas
        try:
            first = request if isinstance(request, (Push, Join)) and self._may_begin(request) else None
            if first is not None:
                self._fences.check(first)
            reply = self._answer(request, now)
            if first is not None:
                self._fences.note(first, peer)
            return reply
        except MustWait as waiting:
            self._requests -= 1  # it comes again
            raise self._leases.error(waiting) from None
        except (StaleWorker, StaleRun) as error:
            raise self._fences.named(error) from None
        finally:
            self.core.tables.quotas = None
            if self._snapshots.asked is not None:
                self._snapshots.clock_moved(self.core.clock.open)
            if self._log is not None:
                self._awaited = self._lsn if _shows_events(request) else 0

    def is_quick(self, request: Request) -> bool:
        """Whether a pull or push takes a millisecond at most: few floats, no codec, and no clock that may close."""
        if not isinstance(request, (Pull, Push)) or self._may_apply_clock(request):
            return False
        if any([part.codec for part in request.tables]):
            return False
        if isinstance(request, Push):
            return sum([part.gradients.size for part in request.tables]) <= _QUICK_FLOATS
        return sum([self.core.tables.num_floats(part) for part in request.tables]) <= _QUICK_FLOATS

    def _may_apply_clock(self, request: Pull | Push) -> bool:
        """Whether all workers' gradients of a clock may be applied first: by a push, or because a lease has ended."""
        is_synchronous = self.core.clock.staleness == 0
        return is_synchronous and (isinstance(request, Push) or self.system.now() > self._leases.next_end)

    def bases_to(self, bases: Bases) -> None:
        """Have these bases of the log taken when they are due."""
        self._bases = bases

    def log_to(self, log: EventLog, term: int) -> None:
        """Have this log keep what is done from here on. It has made the core what it is; `term` is this process's.

        All members begin with a whole lease.
        """
        self.advance(self.system.now())
        self._log, self._lsn = log, self.core.lsn
        self._recovered = self.core.pushes.dedup.epochs()
        self._record(Term(term))
        self.greeting = replace(self.greeting, lineage=self.core.lineage, term=term)

    def when_may_leave(self, end: Callable[[], None], refuse: Callable[[LogStalled], None] | None = None) -> None:
        """Call `end` once the answer to the request that was handled last may leave.

        That is at once without a log, for pulls and heartbeats, which may show what is not safe yet, and for a push
        whose sender keeps it until it is safe. All other answers wait for the events before them too: so does that to a
        duplicate, for the event of the original.

        Where the log cannot be written meanwhile, `refuse` is called in place of `end`, if there is one. The request
        has to come again then, as if its answer was lost.
        """
        if self._log is None or not self._awaited or self._is_early:
            end()
        else:
            self._log.when_safe(self._awaited, end, refuse)

    @property
    def generation(self) -> int:
        """Grows with whatever may let a request be answered that had to wait."""
        return self.core.clock.generation

    @property
    def num_members(self) -> int:
        """The workers that are members of the job; may be read by any thread."""
        return len(self.core.clock.members)

    @property
    def keeps_arrays(self) -> bool:
        """Whether arrays of a request may be needed after its reply: for the push's clock, or for the log."""
        return self.core.clock.staleness == 0 or self._log is not None

    def advance(self, now: float) -> None:
        """Let time pass: every request that arrived before `now` has been handled."""
        if self._bases is not None:
            self._take_base(now, self._bases)
        if self._restores.reader is not None:
            self._restores.advance(now)
        leases = self._leases
        leases.now = max(leases.now, now)
        if leases.now <= leases.next_end:
            return
        try:
            for member in leases.ended():
                self._record(Expired(member.worker, member.epoch))
        finally:
            if self._snapshots.asked is not None:
                self._snapshots.clock_moved(self.core.clock.open)

    def tables_of_restore(self, request: Restore) -> list[str]:
        """The tables that a restore would remove, and those that it has read and would put in their place."""
        removed = list(self.core.tables.names()) if request.replace or not request.url else []
        return removed + (self._restores.table_names(request.id) if request.step == "install" else [])

    def set_activity_probe(self, last_seen: Callable[[int, int], float]) -> None:
        """Ask when anything of a worker (number, epoch) arrived last, before its lease ends.

        A request that takes long on a slow link delays the heartbeats behind it.
        """
        self._leases.find_last_seen = last_seen

    def extend_leases(self, seconds: float) -> None:
        """Extend all leases by `seconds`, in which this process received nothing."""
        self._leases.extend(seconds)
        self._restores.extend(seconds)

    def status(self) -> ShardStatus:
        """Sizes and counters. They are read, never changed, so that health does not wait behind the pushes."""
        core, clock = self.core, self.core.clock
        log = ("memory", 0, 0, 0.0, "") if self._log is None else self._log.status()
        mode, log_bytes, waiting, recovery, stalled = log
        return ShardStatus(
            shard=self.greeting.shard,
            num_shards=self.greeting.num_shards,
            placement_epoch=self.greeting.placement_epoch,
            version=self.greeting.version,
            instance=self.greeting.instance,
            uptime_seconds=self.system.now() - self._started,
            system_time=self.system.since_1970(),
            resident_bytes=resident_memory(),
            requests=self._requests,
            pulled_rows=self._pulled_rows,
            pushed_rows=core.pushes.rows,
            duplicate_pushes=self._duplicates,
            skipped_rows=core.pushes.skipped_rows,
            queued_bytes=0,
            tables=core.tables.status(),
            clock=clock.open,
            staleness=clock.staleness,
            members=self._leases.status(),
            staleness_seen=clock.updates.seen,
            expired_leases=clock.expired,
            rendezvous=core.rendezvous.last,
            used_bytes=core.budget.used,
            budget_bytes=core.budget.limit,
            failed_update="" if clock.failed is None else clock.failed.message,
            lineage=self.greeting.lineage,
            base_lsn=0 if self._bases is None else self._bases.lsn,
            durability=mode,
            log_bytes=log_bytes,
            log_waiting_bytes=waiting,
            term=self.greeting.term,
            recovery_seconds=recovery,
            waits_for_room=stalled,
            last_snapshot=self._snapshots.last_success,
        )

    def _may_begin(self, request: Push | Join) -> bool:
        """Whether a request may be the first of an incarnation or of a run."""
        if isinstance(request, Join):
            return True
        newest = self._fences.newest.get(request.token.worker)
        return newest is None or request.token.epoch > newest.number

    def _answer(self, request: Request, now: float) -> Reply:
        match request:
            case Pull():
                return self._pull(request, now)
            case Push():
                return self._push(request, now)
            case Load():
                return self._load(request, now)
            case Declare():
                return self._declare(request, now)
            case Hello():
                return self.greeting
            case GetStatus():
                return self.status()
            case Join():
                return self._join(request, now)
            case Leave():
                self.core.clock.fence(request.worker, request.epoch)
                self._leases.renew(request.worker, request.epoch, now)
                return self._apply(request)
            case Heartbeat():
                return self._heartbeat(request, now)
            case Rendezvous() | TakeSplit():
                self._renew(request, now)
                return self._apply(request)
            case Compress():
                return self._apply(request)
            case Snapshot():
                return self._snapshots.answer(request, self.core.clock.open)
            case Restore():
                return self._restores.answer(request, max(now, self.system.now()))  # it may have waited for long
            case _:
                raise InvalidRequest(reason=f"this shard cannot {type(request).__name__} yet")

    def _apply(self, event: Event) -> Reply:
        """The reply to a request that is an event; MustWait, or an EmbershardError."""
        reply = self._reply_of(event)
        assert not isinstance(reply, Applied)
        return reply

    def _apply_rows(self, event: PushEvent | Load) -> Applied:
        """Apply a push or a load, and return its reply; MustWait, or an EmbershardError."""
        reply = self._reply_of(event)
        assert isinstance(reply, Applied)
        return reply

    def _reply_of(self, event: Event) -> Reply | Applied:
        outcome = self._record(event)
        if outcome.waiting is not None:
            raise outcome.waiting
        if outcome.error is not None:
            raise outcome.error
        assert outcome.reply is not None
        return outcome.reply

    def _record(self, event: Event) -> Outcome:
        """Apply an event to the state, write it to the event log, and return its outcome."""
        if self._log is None:
            outcome = self.core.apply(event)
        else:
            check_size(event)  # before it has changed anything
            outcome = self._apply_to_log(event, self._log)
        if self.core.clock.job:
            self._leases.clock_moved()
        return outcome

    def _apply_to_log(self, event: Event, log: EventLog) -> Outcome:
        """Apply an event, and have the log keep it where it has changed the state."""
        try:
            outcome = self.core.apply(event)
        except (EmbershardError, MustWait):  # nothing was changed
            raise
        except Exception as error:
            log.fail(error)
            raise
        if outcome.changed:
            self._append(applied(event), outcome, log)
        return outcome

    def _append(self, event: Event, outcome: Outcome, log: EventLog) -> None:
        try:
            self._lsn = log.append(event, outcome)
        except Exception as error:
            log.fail(error)
            raise

    def _renew(self, request: Heartbeat | Rendezvous | TakeSplit, now: float) -> None:
        """Renew the lease of a member; StaleWorker, LeaseLost, InvalidRequest where it is none."""
        self.core.clock.member(request.worker, request.epoch)
        self._leases.renew(request.worker, request.epoch, now)

    def _heartbeat(self, request: Heartbeat, now: float) -> HeartbeatAck:
        self._check_term(request.term)
        worker, epoch = request.worker, request.epoch
        if request.first_incomplete:  # others may wait for a push that was lost: this worker must not wait for them
            self.core.pushes.dedup.check_known(worker, epoch, request.first_incomplete)
        if request.flush:  # its answer waits until all of them are safe
            with suppress(LeaseLost):  # what it pushed before is safe nevertheless
                self._leases.renew(worker, epoch, now)
            acknowledged = self._early.last(worker, epoch)
        else:
            self._renew(request, now)
            acknowledged = self._acknowledged(worker, epoch)
        clock = self.core.clock
        return HeartbeatAck(clock=clock.open, members=clock.workers_here(), acknowledged=acknowledged)

    def _acknowledged(self, worker: int, epoch: int) -> int:
        """Up to which of its pushes a worker need keep none; 0 where it keeps none."""
        if self._log is None or not self._early:
            return 0
        return self._early.acknowledged(worker, epoch, self._log.safe_lsn)

    def _check_term(self, term: int) -> None:
        """OtherTerm where a request is meant for an earlier process, or a later one."""
        if term and term != self.greeting.term:
            raise OtherTerm(got=term, want=self.greeting.term)

    def _push(self, request: Push, now: float) -> Pushed:
        self._check_term(request.term)
        token = request.token
        if self._recovered:
            self._check_recovered(token)
        done = self._duplicate_of(token, now)
        is_duplicate = done is not None
        if done is None:
            done = self._apply_once(request, token, now)
            self._routes.forget_all(request)
        revision, seconds = self.core.compression.revision, self._coding.seconds
        if not request.early or self._log is None:
            return Pushed(is_duplicate, done.rows, done.skipped, revision, seconds)
        acknowledged = self._acknowledged(token.worker, token.epoch)
        self._is_early = not is_duplicate and self._early.add(token, self._lsn)
        return Pushed(is_duplicate, done.rows, done.skipped, revision, seconds, self._is_early, acknowledged)

    def _load(self, request: Load, now: float) -> Reply:
        self._check_term(request.term)
        token = request.token
        if token is None:
            self._check_placement(request.placement_epoch)
            return Loaded(self._apply_rows(request).rows)
        if self._recovered:
            self._check_recovered(token)
        done = self._duplicate_of(token, now)
        if done is None:
            done = self._apply_once(request, token, now)
        return Loaded(done.rows)

    def _duplicate_of(self, token: PushToken, now: float) -> Applied | None:
        """The recorded reply to a push or load that comes again; it is found under any placement. None: it is new."""
        found = self.core.pushes.find(token)
        if found is not None:
            self._duplicates += 1
            with suppress(LeaseLost):  # it was applied in time
                self._leases.renew(token.worker, token.epoch, now)
        return found

    def _apply_once(self, request: Push | Load, token: PushToken, now: float) -> Applied:
        """Apply a push or a load that is no duplicate; one that is refused is settled."""
        try:
            self._check_placement(request.placement_epoch)
            if self.core.clock.job:
                member = self._leases.renew(token.worker, token.epoch, now)
                if member is not None and isinstance(request, Push):
                    self.core.clock.check_late(member, request)
            if isinstance(request, Push):
                return self._apply_rows(PushEvent(request, self._routes.ids_of(request, self.core.tables)))
            return self._apply_rows(request)
        except MustWait:
            self._settle(token, 0)
            raise
        except EmbershardError as error:
            comes_again = error.retryable or isinstance(error, UnknownRoute)
            self._settle(token, 0 if comes_again else token.seq)
            raise

    def _check_recovered(self, token: PushToken) -> None:
        """MemoryLost where a worker of before the recovery says that more was acknowledged than is known.

        It may say so later than with its first push: one that is sent again comes before its sender has read the answer
        to a load, which is lost.
        """
        if self._recovered.get(token.worker) == token.epoch:
            self.core.pushes.dedup.check_known(token.worker, token.epoch, token.first_incomplete)

    def _settle(self, token: PushToken, seq: int) -> None:
        if not self.core.pushes.dedup.knows(token.worker, token.epoch, seq):
            self._record(Settled(token.worker, token.epoch, seq))

    def _declare(self, request: Declare, now: float) -> Reply:
        is_new = request.spec.name not in self.core.tables
        if is_new:
            self._new_tables.check(now)
        reply = self._apply(request)
        if is_new:
            self._new_tables.count()
        self._show_lineage()
        return reply

    def _join(self, request: Join, now: float) -> Reply:
        reply = self._apply(request)
        assert isinstance(reply, Joined)
        if reply.member:
            self._leases.begin(request.worker, request.epoch, now)
        return reply

    def _moment(self) -> ShardImage:
        """Take an image of the shard for a snapshot; TableLoading while a table has not all of its first values."""
        return ShardImage(
            self.greeting.shard,
            self.greeting.num_shards,
            self.greeting.placement_epoch,
            self.core.clock.open,
            self.core.pushes.dedup.windows(),
            self.core.tables.opened(),
            self.core.control(payloads=False),
        )

    def _take_base(self, now: float, bases: Bases) -> None:
        """Take a base of the log where one is due; a snapshot that somebody waits for comes first."""
        bases.hold(self._restores.is_installing)
        if bases.due(now, self.core.budget.used) and not self._snapshots.running:
            bases.take(now, self.core.tables.all(), self.core.control())

    def _install(self, contents: Contents, unlogged: UnloggedRows) -> bool:
        """Put what was restored in place of what is here; False where the log has to take more of its rows first."""
        if (quotas := self.core.tables.quotas) is not None:
            quotas.check_restored(contents.tables)
        if self._log is not None and not self._log_rows(unlogged, contents.lineage, self._log):
            self._is_early = True  # the answer that more is to come waits for nothing
            return False
        known = self.core.pushes.dedup.epochs()
        # a system time that was corrected since: such a worker epoch is refused here, and would refuse all later ones
        workers = [
            window
            for window in contents.workers
            if not self._fences.is_ahead(window.epoch) or known.get(window.worker) == window.epoch
        ]
        self._record(TablesRestored(dataclasses.replace(contents, workers=workers)))
        self._routes = RouteCache()  # what pulls left is of rows that are gone
        self._show_lineage()
        return True

    def _log_rows(self, unlogged: UnloggedRows, lineage: int, log: EventLog) -> bool:
        """Have the log keep more of the rows that are restored; whether it has all of them, and they are safe.

        LogStalled where it has no room; what it has, it keeps.
        """
        for _ in range(_PIECES_AT_ONCE):
            piece = unlogged.next
            try:
                log.check_room(_EVENT_BYTES + (0 if piece is None else piece.num_bytes))
            except LogStalled:
                raise
            except ShardBusy:
                return False
            if piece is None:
                return log.safe_lsn >= unlogged.last_lsn
            outcome = Outcome(version=self.core.clock.updates.version, clock=self.core.clock.open)
            self._append(RestoredRows(lineage, *piece), outcome, log)
            self.core.lsn = self._lsn
            unlogged.logged(piece, self._lsn)
        return False

    def _show_lineage(self) -> None:
        """Greet with the lineage that the shard has now, once that outlives the process."""
        lineage = self.core.lineage
        if lineage == self.greeting.lineage:
            return

        def show() -> None:
            self.greeting = replace(self.greeting, lineage=lineage)

        if self._log is None:
            show()
        else:
            self._log.when_safe(self._lsn, show)

    def _pull(self, request: Pull, now: float) -> Rows:
        self._check_term(request.term)
        self._check_placement(request.placement_epoch)
        core, clock = self.core, self.core.clock
        if clock.job:
            self._leases.renew(request.worker, request.epoch, now)
        if request.required_clock:
            # it must not wait for another's clock, or as a member whose join was lost with the machine's power
            clock.member(request.worker, request.epoch)
            clock.await_closed(request.required_clock)
        reads = [core.tables.check_read(part) for part in request.tables]
        updates = clock.updates
        tables, codecs = read_all(reads, lambda: updates.version, self._coding, self.greeting.max_message_bytes)
        # arrivals alone: what the shard itself takes to apply the clock is no wait for other workers
        held = max(0.0, self._leases.closed_at - now) if request.required_clock else 0.0
        acknowledged = self._acknowledged(request.worker, request.epoch)
        rows = Rows(
            tables, updates.version, codecs, core.compression.revision, self._coding.seconds, held, acknowledged
        )
        self._pulled_rows += sum([read.count_pulled() for read in reads])
        self._routes.keep_all(request)
        return rows

    def _check_placement(self, epoch: int) -> None:
        if epoch != self._placement.epoch:
            raise WrongPlacement(got=epoch, want=self._placement.epoch)


def _shows_events(request: Request) -> bool:
    """Whether the answer to a request has to wait until the events before it are safe."""
    match request:
        case Pull():
            return False
        case Heartbeat():
            return request.flush
        case Snapshot() | Restore():
            return request.step != "cancel"  # which changes nothing that is logged, and gives room to a full disk
    return True


class _Rate:
    """How many tables may still be made: DECLARES_PER_SECOND, and as many at once."""

    def __init__(self) -> None:
        self._allowed, self._refilled = float(DECLARES_PER_SECOND), 0.0  # and when it was counted

    def check(self, now: float) -> None:
        """TooManyDeclares where there were too many."""
        passed = max(0.0, now - self._refilled)
        self._refilled = max(self._refilled, now)
        self._allowed = min(self._allowed + passed * DECLARES_PER_SECOND, DECLARES_PER_SECOND)
        if self._allowed < 1:
            raise TooManyDeclares(per_second=DECLARES_PER_SECOND, retry_after_ms=_DECLARE_RETRY_MS)

    def count(self) -> None:
        """Count a new table against the limit of tables made in a second."""
        self._allowed -= 1
