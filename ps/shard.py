"""The shard: one state machine from a request to its reply, that knows no transport, no socket and no thread.

It is not safe for use by several threads, but for `greeting` and `status`, which may be read at any time. Requests are
checked here, once; what lies below relies on it.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.codec.user_defined import CodecRegistry
from embershard.proto.errors import ClockAhead, InvalidRequest, OtherLineage, StaleRun, StaleWorker, WrongPlacement
from embershard.proto.messages import (
    Compress,
    Declare,
    Declared,
    GetStatus,
    Greeting,
    Heartbeat,
    Hello,
    Join,
    Joined,
    Leave,
    Load,
    Loaded,
    Pull,
    Push,
    Rendezvous,
    Reply,
    Request,
    Restore,
    Rows,
    ShardStatus,
    Snapshot,
    TakeSplit,
    replace,
)
from embershard.proto.routing import Placement
from embershard.ps.compression_settings import CompressionSettings
from embershard.ps.coordination.clock import Clock
from embershard.ps.coordination.data_splits import Splits
from embershard.ps.coordination.dedup import Dedup
from embershard.ps.coordination.fencing import Fences
from embershard.ps.coordination.pushes import Pushes
from embershard.ps.coordination.rendezvous import RendezvousRegistry
from embershard.ps.memory import MemoryBudget
from embershard.ps.restore import Contents, Restores
from embershard.ps.snapshot import ShardImage, Snapshots
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.reads import Stopwatch, read_all
from embershard.ps.table.tables import Tables


class Shard:
    """One shard's part of every table.

    `codecs` are the user-defined ones beside the built-in. `instance` is random at each start, so that a client notices
    a shard that lost its rows. `memory` bytes are what its tables may take, by default 80 % of the machine's.
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
    ) -> None:
        if not 0 <= index < placement.num_shards:
            raise ValueError(f"shard must be 0..{placement.num_shards - 1} of {placement.num_shards}, got {index}")
        self.greeting = Greeting(
            shard=index,
            num_shards=placement.num_shards,
            placement_epoch=placement.epoch,
            version=version,
            instance=secrets.token_hex(8),
            max_message_bytes=max_message_bytes,
        )
        self._placement = placement
        self._coding = Stopwatch()  # of payloads
        self._budget = MemoryBudget(memory)
        self._tables = Tables(index, placement, optimizers, self._coding, codecs, self._budget)
        self._compression = CompressionSettings(self._tables, self._tables.check_codec)
        self._clock = Clock(self._budget)
        self._pushes = Pushes(self._tables, self._clock, max_message_bytes)
        self._rendezvous = RendezvousRegistry(self._clock, max_message_bytes)
        self._splits = Splits(self._clock)
        self._snapshots = Snapshots(self._moment, lambda: bool(self._clock.pending.waiting_ids))
        self._restores = Restores(index, placement, optimizers, self._tables.names, self._install, self._budget)
        self._fences = Fences()
        self._started = time.monotonic()
        self._requests = 0
        self._pulled_rows = 0

    def handle(self, request: Request, now: float | None = None, peer: str = "") -> Reply:
        """The reply to a request, or an EmbershardError that says why there is none; nothing was changed then.

        ClockAhead says that others have to move first: handle the same request again once `generation` has grown.
        It is then, too, that `now`, on time.monotonic()'s clock, is when it arrived: leases go by it. `peer` is where
        it came from, as far as its transport knows.
        """
        if now is None:
            now = time.monotonic()
        self.advance(now)
        self._requests += 1
        self._coding.seconds = 0.0  # the request before may have failed
        try:
            first = request if isinstance(request, Push | Join) and self._may_begin(request) else None
            if first is not None:
                self._fences.check(first)
            reply = self._answer(request, now)
            if first is not None:
                self._fences.note(first, peer)
            return reply
        except ClockAhead:
            self._requests -= 1  # it comes again
            raise
        except (StaleWorker, StaleRun) as error:
            raise self._fences.named(error) from None
        finally:
            if self._snapshots.asked is not None:
                self._snapshots.clock_moved(self._clock.open)

    @property
    def generation(self) -> int:
        """Grows with whatever may let a request be answered that had to wait."""
        return self._clock.generation

    @property
    def is_synchronous(self) -> bool:
        """Whether pushes may have to wait for those of other workers; their arrays are kept then."""
        return self._clock.staleness == 0

    def advance(self, now: float) -> None:
        """Let time pass: every request that arrived before `now` has been handled."""
        try:
            self._clock.expire(now)
        finally:
            if self._snapshots.asked is not None:
                self._snapshots.clock_moved(self._clock.open)

    def set_activity_probe(self, last_sign: Callable[[int, int], float]) -> None:
        """Ask when anything of a worker (number, epoch) arrived last, before its lease ends.

        A request that takes long on a slow link delays the heartbeats behind it.
        """
        self._clock.last_sign = last_sign

    def extend_leases(self, seconds: float) -> None:
        """Extend all leases by `seconds`, in which this process received nothing."""
        self._clock.extend_leases(seconds)

    def status(self) -> ShardStatus:
        """Sizes and counters. They are read, never changed, so that health does not wait behind the pushes."""
        return ShardStatus(
            shard=self.greeting.shard,
            num_shards=self.greeting.num_shards,
            placement_epoch=self.greeting.placement_epoch,
            version=self.greeting.version,
            instance=self.greeting.instance,
            uptime_seconds=time.monotonic() - self._started,
            resident_bytes=_resident_bytes(),
            requests=self._requests,
            pulled_rows=self._pulled_rows,
            pushed_rows=self._pushes.rows,
            duplicate_pushes=self._pushes.duplicates,
            skipped_rows=self._pushes.skipped_rows,
            queued_bytes=0,
            tables=self._tables.status(),
            clock=self._clock.open,
            staleness=self._clock.staleness,
            members=self._clock.status(),
            staleness_seen=self._clock.updates.seen,
            expired_leases=self._clock.expired,
            rendezvous=self._rendezvous.last,
            used_bytes=self._budget.used,
            budget_bytes=self._budget.limit,
            failed_update="" if self._clock.failed is None else self._clock.failed.message,
            lineage=self.greeting.lineage,
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
                # a retry is known under any placement: its push was applied where its rows were then
                reply = self._pushes.duplicate_of(request, now)
                if reply is None:
                    self._check_placement(request.placement_epoch)
                    reply = self._pushes.take(request, now)
                seconds = self._coding.seconds
                return dataclasses.replace(reply, settings=self._compression.revision, coding_seconds=seconds)
            case Load():
                done = self._pushes.duplicate_of(request, now)
                if done is not None:
                    return Loaded(rows=done.applied)
                self._check_placement(request.placement_epoch)
                return self._pushes.load(request, now)
            case Declare():
                return self._declare(request, now)
            case Hello():
                return self.greeting
            case GetStatus():
                return self.status()
            case Join():
                return self._join(request, now)
            case Leave():
                return self._clock.leave(request, now)
            case Heartbeat():
                return self._clock.heartbeat(request, now)
            case Rendezvous():
                return self._rendezvous.join(request, now)
            case TakeSplit():
                return self._splits.take(request, now)
            case Snapshot():
                return self._snapshots.answer(request, self._clock.open)
            case Restore():
                return self._restores.answer(request)
            case Compress():
                return self._compression.answer(request, job_goes_on=bool(self._clock.members))
            case _:
                raise InvalidRequest(reason=f"this shard cannot {type(request).__name__} yet")

    def _declare(self, request: Declare, now: float) -> Declared:
        lineage = self._lineage_after(request)
        reply = self._tables.declare(request, now)
        if lineage != self.greeting.lineage:
            self.greeting = replace(self.greeting, lineage=lineage)
        return replace(reply, lineage=lineage)

    def _lineage_after(self, request: Declare) -> int:
        """The lineage once a table is declared; OtherLineage. Shard 0 keeps what it has: the others take that of it."""
        own, first = self.greeting.lineage, self.greeting.shard == 0
        if request.lineage in (0, own):
            return own
        if request.begins_lineage and (not own or (not first and not self._tables.have_rows())):
            return request.lineage
        if request.begins_lineage and first:
            return own
        raise OtherLineage(got=own, want=request.lineage)

    def _moment(self) -> ShardImage:
        """What a snapshot holds; TableLoading while a table has not all of its first values."""
        return ShardImage(
            self.greeting.shard,
            self.greeting.num_shards,
            self.greeting.placement_epoch,
            self._clock.open,
            self._pushes.dedup.windows(),
            self._tables.opened(),
        )

    def _install(self, contents: Contents) -> None:
        """Put what was restored in place of what is here."""
        self._tables.replace(contents.tables)
        self.greeting = replace(self.greeting, lineage=contents.lineage)
        self._pushes.begin_again(Dedup.of(contents.workers))
        self._compression.forget()
        self._clock.failed = None  # the rows that it left half changed are gone
        self._clock.updates.version += 1  # what anybody read before is of another version

    def _join(self, request: Join, now: float) -> Joined:
        self._pushes.dedup.fence(request.worker, request.epoch)
        job = self._clock.job
        try:
            return self._clock.join(request, now)
        finally:
            if self._clock.job != job:  # what the last one left behind
                self._rendezvous = RendezvousRegistry(self._clock, self.greeting.max_message_bytes)
                self._splits = Splits(self._clock)
                self._compression.forget()

    def _pull(self, request: Pull, now: float) -> Rows:
        self._check_placement(request.placement_epoch)
        self._clock.renew_lease(request.worker, request.epoch, now)
        if request.required_clock:
            self._clock.fence(request.worker, request.epoch)  # it must not wait for what is another's clock by now
            self._clock.await_closed(request.required_clock)
        reads = [self._tables.check_read(part) for part in request.tables]
        updates = self._clock.updates
        tables, codecs = read_all(reads, lambda: updates.version, self._coding, self.greeting.max_message_bytes)
        # arrivals alone: what the shard itself takes to apply the clock is no wait for other workers
        held = max(0.0, self._clock.closed_at - now) if request.required_clock else 0.0
        rows = Rows(tables, updates.version, codecs, self._compression.revision, self._coding.seconds, held)
        self._pulled_rows += sum(len(read.ids) for read in reads)
        for part in request.tables:
            if part.route:
                self._pushes.routes.keep(request.worker, request.epoch, part.route, part.table, part.ids)
        return rows

    def _check_placement(self, epoch: int) -> None:
        if epoch != self._placement.epoch:
            raise WrongPlacement(got=epoch, want=self._placement.epoch)


def _resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
