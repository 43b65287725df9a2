"""The state of a shard: one event after the other changes it, and nothing else does.

It knows no time, no thread, no socket, no file, and no random number that would show. So the same events in the same
order give the same rows, bit for bit, in another process and on another machine: what a replay, a recovery and a
replica rely on. How much memory there is, and whose lease ran out, is decided before an event is applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.codec.user_defined import CodecRegistry
from embershard.proto.errors import OtherLineage
from embershard.proto.messages import Compress, Declare, Join, Leave, Load, Rendezvous, TakeSplit, replace
from embershard.proto.routing import Placement
from embershard.proto.spec import TableSpec
from embershard.ps.compression_settings import CompressionSettings
from embershard.ps.coordination.clock import Clock, Plain
from embershard.ps.coordination.data_splits import Splits
from embershard.ps.coordination.outcome import Outcome
from embershard.ps.coordination.pushes import Pushes
from embershard.ps.coordination.rendezvous import RendezvousRegistry
from embershard.ps.events import Event, Expired, PushEvent, RestoredRows, Settled, TablesRestored, Term
from embershard.ps.memory import MemoryBudget
from embershard.ps.restore import Contents
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Table
from embershard.ps.table.tables import Tables


class Core:
    """The state of shard `shard` of a placement, for one thread.

    `decoding` runs while payloads are decoded, for whoever measures it.
    """

    def __init__(
        self,
        shard: int,
        placement: Placement,
        optimizers: OptimizerRegistry,
        *,
        codecs: CodecRegistry | None = None,
        budget: MemoryBudget | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        decoding: AbstractContextManager[None] | None = None,
    ) -> None:
        self.shard = shard
        self.lineage = 0
        self.lsn = 0  # events that have changed the state
        self.budget = MemoryBudget() if budget is None else budget
        self.tables = Tables(shard, placement, optimizers, decoding or nullcontext(), codecs, self.budget)
        self.compression = CompressionSettings(self.tables, self.tables.check_codec)
        self.clock = Clock(self.budget)
        self.pushes = Pushes(self.tables, self.clock, max_message_bytes)
        self.rendezvous = RendezvousRegistry(self.clock, max_message_bytes)
        self.splits = Splits(self.clock)
        self._max_message_bytes = max_message_bytes
        self._optimizers = optimizers
        self._restoring: dict[str, Table] = {}  # tables that a log's RestoredRows have begun, and their lineage
        self._restoring_lineage = 0

    def apply(self, event: Event) -> Outcome:
        """Apply an event to the state; EmbershardError or MustWait where it is refused and changes nothing."""
        outcome = self._apply(event)
        self.lsn += outcome.changed
        outcome.version, outcome.clock = self.clock.updates.version, self.clock.open
        return outcome

    def control(self, *, payloads: bool = True) -> Plain:
        """All of the state but the rows, in values that msgpack can say.

        Of gradients that wait for their clock there are only the numbers of their events ("clock", "pending"): see
        `gather_again`. Without `payloads` rendezvous are left out that workers still ask for, which may be large.
        """
        return {
            "lsn": self.lsn,
            "lineage": self.lineage,
            "tables": self.tables.flags(),
            "clock": self.clock.control(),
            "pushes": self.pushes.control(),
            "rendezvous": self.rendezvous.control(payloads=payloads),
            "splits": self.splits.control(),
            "compression": self.compression.control(),
        }

    def restore(self, control: Plain, tables: Sequence[Table]) -> None:
        """Be, as a new one, in the state that `control` and the rows of these tables say."""
        self.lsn, self.lineage = control["lsn"], control["lineage"]
        self.tables.restore(tables, control["tables"])
        for name in ("clock", "pushes", "rendezvous", "splits", "compression"):
            getattr(self, name).restore(control[name])

    def new_table(self, spec: TableSpec) -> Table:
        """An empty table, of no shard yet, within the budget of this one."""
        return Table(spec, self._optimizers.find(spec.optimizer), self.budget)

    def gather_again(self, lsn: int, event: PushEvent) -> None:
        """Keep event number `lsn` for its clock, as `control` says that it was; after `restore`, in their order."""
        self.pushes.gather_again(event.push, event.ids, lsn)

    def only_compares(self, request: Declare) -> bool:
        """Whether a declare is answered without any change: its table is there, as it says."""
        begins = request.begins_lineage and request.lineage != self.lineage
        return not begins and self.tables.only_compares(request)

    def _apply(self, event: Event) -> Outcome:
        match event:
            case PushEvent():
                return self.pushes.take(event.push, event.ids, self.lsn + 1)
            case Load():
                return self.pushes.load(event)
            case Declare():
                return self._declare(event)
            case Join():
                return self._join(event)
            case Leave():
                return self._leave(event)
            case Expired():
                return Outcome(changed=self.clock.expire(event.worker, event.epoch))
            case Settled():
                return Outcome(changed=self.pushes.dedup.settle(event.worker, event.epoch, event.seq))
            case Rendezvous():
                return self.rendezvous.join(event)
            case TakeSplit():
                return self.splits.take(event)
            case Compress():
                return self.compression.answer(event, job_goes_on=bool(self.clock.members))
            case Term():
                self._restoring, self._restoring_lineage = {}, 0  # the process that began that restore has ended
                if event.term > 1:
                    self.clock.updates.begin_term()
                return Outcome()
            case RestoredRows():
                self._restore_rows(event)
                return Outcome()
            case TablesRestored():
                self._restore(event.contents)
                return Outcome()

    def _declare(self, request: Declare) -> Outcome:
        lineage, before = self._lineage_after(request), self.lineage
        reply, changed = self.tables.declare(request, job_goes_on=bool(self.clock.members))
        self.lineage = lineage
        return Outcome(replace(reply, lineage=lineage), changed or lineage != before)

    def _lineage_after(self, request: Declare) -> int:
        """The lineage once a table is declared; OtherLineage. Shard 0 keeps what it has: the others take that of it."""
        own, first = self.lineage, self.shard == 0
        if request.lineage in (0, own):
            return own
        if request.begins_lineage and (not own or (not first and not self.tables.have_rows())):
            return request.lineage
        if request.begins_lineage and first:
            return own
        raise OtherLineage(got=own, want=request.lineage)

    def _join(self, request: Join) -> Outcome:
        self.pushes.dedup.fence(request.worker, request.epoch)
        job = self.clock.job
        reply = self.clock.join(request)
        if self.clock.job != job:  # what the last one left behind
            self.rendezvous = RendezvousRegistry(self.clock, self._max_message_bytes)
            self.splits = Splits(self.clock)
            self.compression.forget()
            self.tables.begin_job()
        return Outcome(reply)

    def _leave(self, request: Leave) -> Outcome:
        generation = self.clock.generation
        reply = self.clock.leave(request)
        return Outcome(reply, self.clock.generation != generation)

    def _restore_rows(self, event: RestoredRows) -> None:
        """Keep restored rows until their tables take the place of those that are here."""
        if event.lineage != self._restoring_lineage:  # what was begun before was never ended
            self._restoring, self._restoring_lineage = {}, event.lineage
        spec = event.spec
        table = self._restoring.get(spec.name)
        if table is None:
            table = self._restoring[spec.name] = self.new_table(spec)
        if len(event.ids):
            table.restore(event.ids, event.rows, event.state.reshape(len(event.ids), table.num_state))

    def _restore(self, contents: Contents) -> None:
        staged = list(self._restoring.values()) if contents.lineage == self._restoring_lineage else []
        self._restoring, self._restoring_lineage = {}, 0
        self.tables.replace(contents.tables or staged, contents.flags)
        self.lineage = contents.lineage
        self.pushes.dedup = self.pushes.dedup.restored(contents.workers)
        self.compression.forget()
        self.clock.failed = None  # the rows that it left half changed are gone
        self.clock.updates.version += 1  # what anybody read before is of another version
