"""Pull, push and load rows of any number of shards as if they were one."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import numpy as np

from embershard.proto.arrays import MAX_MESSAGE_BYTES, Floats
from embershard.proto.clock import SYSTEM_CLOCK, SystemClock
from embershard.proto.errors import EmbershardError, LeaseLost, UnknownTable, WrongDim
from embershard.proto.messages import (
    Declare,
    Declared,
    GetStatus,
    Load,
    Pull,
    Pushed,
    Request,
    ShardStatus,
    TableKey,
)
from embershard.proto.routing import BundleRoute, Placement, Route
from embershard.proto.security.tls import TLS
from embershard.proto.security.tokens import TokenFile
from embershard.proto.spec import TableSpec
from embershard.proto.timing import Deadline, span
from embershard.proto.transport.addresses import shard_addresses, transport_for
from embershard.proto.transport.emulated_link import EmulatedLink
from embershard.proto.transport.io_thread import io_loop
from embershard.proto.transport.transport import Transport
from embershard.worker.client.byte_counts import ByteCounter
from embershard.worker.client.connections import (
    RECOVERY_TIMEOUT,
    ClientStats,
    Outcome,
    Places,
    ShardConnections,
)
from embershard.worker.client.lineage import Lineage
from embershard.worker.client.membership import Membership, Terms
from embershard.worker.client.pull import Puller
from embershard.worker.client.push import Gradients, PushQueue, Update, Versions
from embershard.worker.client.routes import Directory, Part, Travels, placed_gradients, placed_reads
from embershard.worker.client.shard_connection import handshake
from embershard.worker.compression.compressor import Compressor, LrScale, rate_of

if TYPE_CHECKING:
    from embershard.proto.transport.client_tls import ClientTLS

DEFAULT_TIMEOUT = timedelta(seconds=60)
_FAREWELL = timedelta(seconds=5)
_LAST_WORD = timedelta(seconds=1)  # for shards that have no room for their logs, or have not answered by then

_log = logging.getLogger(__name__)


class Client:
    """Client of all shards of a job: pulls and pushes rows by id, without autograd.

    Every call ends by `timeout`, with an error that names the shard; a call to a shard that is recovering its rows from
    its event log waits up to `recovery_timeout` longer. Several threads may use a client: pulls run in parallel, pushes
    one after the other. A push without an answer in time is kept, and sent again with the same idempotency key before
    the next push, so that it is applied once.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        *,
        worker: int = 0,
        timeout: timedelta = DEFAULT_TIMEOUT,
        recovery_timeout: timedelta = RECOVERY_TIMEOUT,
        clock: SystemClock = SYSTEM_CLOCK,
    ) -> None:
        if not transports:
            raise ValueError("no shards: name at least one address, as host:port")
        if timeout <= timedelta(0):
            raise ValueError(f"timeout must be above zero, got {timeout}")
        self.worker = worker
        self.epoch = int(clock.since_1970() * 1e9)  # a later incarnation of this worker fences this one
        connections = handshake(transports, worker, Deadline(timeout, clock), recovery_timeout)
        self.connections = ShardConnections(connections, worker, timeout, recovery_timeout, clock)
        greetings = [connection.greeting for connection in self.connections]
        self.directory = Directory(Placement.even(len(greetings), greetings[0].placement_epoch))
        # shard -> bytes of a message to it; replies are read up to our own limit, whatever the shard would take
        self.limits = {one.shard: min(one.max_message_bytes, MAX_MESSAGE_BYTES) for one in greetings}
        self.lineage = Lineage(self.connections, worker)
        self._specs: dict[str, TableSpec] = {}
        self.membership: Membership | None = None
        self.restored: Callable[[], None] = lambda: None  # called when this client has restored the shards
        self._numbers = itertools.count(1)  # of this incarnation's joins and pauses
        self.compressor = Compressor(worker, self.placement)
        self.directory.subscribe(self.compressor.follow)
        self._pushes = PushQueue(self.connections, worker, self.epoch, self.limits, self.compressor)
        self._puller = Puller(self.connections, worker, self.epoch, self.limits, self.compressor)
        self._push_lock = clock.lock()

    @classmethod
    def connect(
        cls,
        addresses: str | Sequence[str],
        *,
        worker: int = 0,
        timeout: timedelta = DEFAULT_TIMEOUT,
        recovery_timeout: timedelta = RECOVERY_TIMEOUT,
        bandwidth: int | None = None,
        tls: TLS | None = None,
        token: TokenFile | None = None,
    ) -> Client:
        """Connect to the shards at `addresses` (docs/transports.md), in any order.

        Waits until all of them serve, and, for "file:DIR", until all have announced their addresses. Raises BadAddress,
        NotAnnounced, ShardUnavailable, NotAShard or WrongShards. `bandwidth`, in bits per second, limits sending and
        receiving, each direction separately; BadAddress if a transport cannot do this. `tls` names the certificates;
        BadCertificate if they cannot be used. `token` is sent to the shards.
        """
        link = None if bandwidth is None else EmulatedLink(bandwidth, io_loop())
        transports: list[Transport] = []
        try:
            transports += (transport_for(address, link, tls, token) for address in shard_addresses(addresses, timeout))
            return cls(transports, worker=worker, timeout=timeout, recovery_timeout=recovery_timeout)
        except BaseException:
            for transport in transports:
                transport.close()
            raise

    @property
    def timeout(self) -> timedelta:
        """Maximum time of a call. It may be set; set before `join`, it applies to calls of the membership too."""
        return self.connections.timeout

    @timeout.setter
    def timeout(self, timeout: timedelta) -> None:
        self.connections.timeout = timeout

    @property
    def placement(self) -> Placement:
        """Return the placement: which shard holds which ids."""
        return self.directory.current

    def use_placement(self, placement: Placement) -> None:
        """Switch to a newer placement of the same shards; pushes that wait for a shard move with their ids."""
        assert set(placement.shards) <= set(self.connections.shards)
        with self._push_lock:
            self.directory.move(placement)

    @property
    def num_shards(self) -> int:
        """The number of shards that rows are placed on."""
        return self.placement.num_shards

    def packs_ids(self, table: str) -> bool:
        """Whether ids of a table are packed on the wire: if a codec encodes its rows or its gradients."""
        return table in self.compressor.coded_pushes or table in self.compressor.coded_pulls

    def in_bundles(self, tables: Sequence[str]) -> AbstractSet[str]:
        """Return those of the tables that may be pulled and pushed together, as a bundle."""
        can = all(one.greeting.bundles for one in self.connections)
        return self.compressor.in_bundles(tables) if can else frozenset()

    def _travels(self, placement: Placement, lr_scale: LrScale = 1.0) -> Travels:
        """Whether a route may travel as it is: under this placement, and as a bundle where one rate is that of all."""

        def travels(route: Route) -> bool:
            if route.epoch != placement.epoch or not isinstance(route, BundleRoute):
                return route.epoch == placement.epoch
            if not all(one.greeting.bundles for one in self.connections):
                return False
            is_even = isinstance(lr_scale, float) or len({rate_of(lr_scale, table) for table in route.tables}) == 1
            return is_even and self.compressor.are_plain(route.tables)

        return travels

    @property
    def certificate_expires(self) -> datetime | None:
        """Return when the certificate of the next connection expires; None without TLS."""
        ways: list[ClientTLS | None] = [getattr(one.transport, "tls", None) for one in self.connections]
        return min((tls.credentials().expires for tls in ways if tls is not None), default=None)

    @property
    def stats(self) -> ClientStats:
        """Return a copy of the counters since the start."""
        transports = [connection.transport for connection in self.connections]
        sent = sum(transport.sent_bytes for transport in transports)
        received = sum(transport.received_bytes for transport in transports)
        stats = self.connections.stats
        return replace(
            stats,
            sent_bytes=sent,
            received_bytes=received,
            skipped_rows=stats.skipped_rows + self.compressor.skipped_rows,
            lost_leases=self.lost_leases,
            volume=self.byte_counter.parts(sent + received),
        )

    @property
    def byte_counter(self) -> ByteCounter:
        """Return the counter of bytes, by direction and part of a message."""
        return self.connections.byte_counter

    @property
    def lost_leases(self) -> int:
        """Return how often this worker was evicted."""
        return 0 if self.membership is None else self.membership.lost_leases

    def join(self, terms: Terms, clock: int = 0) -> Membership:
        """Become a member of the job, whose clock pulls and pushes then follow. RowsLost if a shard lost its rows."""
        self.lineage.check()
        self.membership = self._new_membership(terms)
        self.membership.join(clock)
        self.compressor.workers = terms.workers
        self.compressor.share = 1.0 / terms.workers if terms.staleness == 0 else 1.0
        return self.membership

    def enter_run(self, run: int) -> None:
        """Begin a run: shards then refuse workers of earlier runs, and earlier processes of this worker.

        StaleRun if a worker with a higher run number has joined.
        """
        terms = Terms(workers=1, staleness=None, run=run)
        member = self._new_membership(terms)
        member.join(0)
        member.leave()

    def _new_membership(self, terms: Terms) -> Membership:
        return Membership(
            self.connections,
            terms,
            worker=self.worker,
            epoch=self.epoch,
            numbers=self._numbers,
            timeout=self.timeout,
        )

    def declare(self, spec: TableSpec, *, load: bool = False, dense: bool = False) -> frozenset[int]:
        """Create a table on every shard that does not have it; returns the shards on which this call created it.

        With `load` the caller must load first values onto those shards, until a `load` with `last`; other workers wait
        for it. A `dense` table holds dense weights, which more codecs can encode. TableMismatch if the table exists
        with other settings, RowsLost if a shard lost the rows of this job, UnknownOptimizer or UnknownCodec if a shard
        or this process has not imported one, ValueError for a codec that the table cannot use.
        """
        replies = self.declare_on_each(spec, load=load, dense=dense)
        return frozenset(shard for shard, reply in replies.items() if reply.created)

    def declare_on_each(
        self, spec: TableSpec, *, load: bool = False, dense: bool = False, num_rows: int = 0
    ) -> dict[int, Declared]:
        """Create a table as `declare` does; the reply of each shard, which also says whether somebody loads it.

        OtherRows if another worker's table has another `num_rows`; with 0 they are not compared.
        """
        spec = self.compressor.with_codecs(spec, dense=dense)
        replies = self.lineage.declare(Declare(spec, self.worker, load, dense, num_rows=num_rows))
        self.compressor.add(spec, dense=dense)
        self._specs[spec.name] = spec
        return dict(zip(self.connections.shards, replies, strict=True))

    def load(
        self,
        table: str,
        route: Route,
        rows: Floats,
        *,
        shards: frozenset[int] | None = None,
        last: bool = True,
        keep_state: bool = False,
    ) -> None:
        """Assign `rows` ((U, dim) float32, in route order) to the ids of a route, on the shards named (default: all).

        `last` ends the loading that `declare` began. With `keep_state` existing rows keep their optimizer state and
        their residuals; such a change is dropped if this member has lost its lease, as its pushes are.
        """
        _check_rows(table, "loaded rows", rows, len(route.ids), self.spec(table).dim)
        with self._push_lock:  # loads and pushes are numbered together
            self._deliver_waiting()
            if route.epoch != self.placement.epoch:
                ((_, route, rows),) = placed_gradients([(table, route, rows)], self.placement, lambda _: False)
            whole = Load(table, route.epoch, route.ids, rows, self.worker, last=last, keep_state=keep_state)
            loaded = self._pushes.load(whole, route, shards=shards, member=self.membership)
            if loaded and not keep_state:
                self.compressor.forget(table, route)

    def pull(
        self,
        reads: Sequence[tuple[TableKey, Route]],
        out: Sequence[Floats] | None = None,
        *,
        keep: bool = False,
        clock: int | None = None,
        versions: Versions | None = None,
        exact: bool = False,
    ) -> list[Floats]:
        """Pull the rows of every (table, route), (U, dim) float32 in route order; `out` are C-ordered arrays to fill.

        Instead of a table, a read may name the members of a bundle. `keep` asks the shards to keep the ids, so that a
        push with the same route does not send them again. A member's pull for `clock` waits until the clocks are closed
        that its staleness requires. `versions` are lowered to the versions of the rows. With `exact` rows are sent as
        float32, without the pull codec.
        """
        specs = [self.spec(table) for table, _ in reads]
        if out is None:
            out = [
                np.empty((len(route.ids), spec.dim), np.float32) for (_, route), spec in zip(reads, specs, strict=True)
            ]

        def required_clock() -> int:
            return 0 if self.membership is None or clock is None else self.membership.required_clock(clock)

        def send(pulls: Mapping[int, Pull], into: Places) -> Mapping[int, Outcome]:
            if self.membership is None:
                return self.connections.call(pulls, into)
            return self._call_as_member(self.membership, pulls, into, clock)

        placement, mine, into, parts = self.placement, reads, out, list[Part]()
        travels = self._travels(placement)
        if not all(travels(route) for _, route in reads):
            mine, into, parts = placed_reads(reads, out, placement, travels)
        keep = keep and not parts  # a push makes other routes of the same ids
        with span("pull"):
            self._puller.pull(mine, into, placement, send, required_clock, keep=keep, versions=versions, exact=exact)
        for rows, places, pulled in parts:
            rows[places] = pulled
        with self.connections.lock:
            self.connections.stats.pulled_rows += sum(len(route.ids) for _, route in reads)
        return list(out)

    def _call_as_member(
        self, member: Membership, pulls: Mapping[int, Pull], into: Places, clock: int | None
    ) -> Mapping[int, Outcome]:
        """Send pulls, and wait for the clock that they need; again where the lease was lost, for a later clock."""
        if clock is None:
            return member.call_with_rejoin(lambda: self.connections.call(pulls, into))
        if member.required_clock(clock):
            self._resend_pending()

        def ask() -> dict[int, Outcome]:
            required = member.required_clock(clock)
            asked = {shard: replace(pull, required_clock=required) for shard, pull in pulls.items()}
            return member.wait(asked, into, until_error=True)

        return member.call_with_rejoin(ask)

    def _resend_pending(self) -> None:
        """Send a push again that got no answer: the clocks that a pull waits for may wait for it."""
        if not self._pushes.is_empty and self._push_lock.acquire(blocking=False):  # else another thread sends it
            try:
                self._deliver_waiting()
            finally:
                self._push_lock.release()

    def _deliver_waiting(self) -> Pushed:
        """Send all pushes that wait; where a member's lease is lost they are dropped, and it joins again."""
        member = self.membership
        if member is None:
            return self._pushes.deliver(None)
        lost_leases = member.lost_leases
        try:
            return self._pushes.deliver(member)
        except LeaseLost:
            member.rejoin(lost_leases)
            return Pushed(duplicate=False, applied=0, skipped=0)

    def push(
        self,
        gradients: Gradients,
        *,
        clock: int,
        lr_scale: LrScale = 1.0,
        weight: float = 1.0,
        versions: Versions | None = None,
        difference: bool = False,
    ) -> Pushed:
        """Apply gradients ((U, dim) float32 in route order) of every (table, route), once.

        A row may occur once per call. `lr_scale` multiplies the learning rate of all tables, or of each that it names;
        push.Update describes the others. Rows with NaN or Inf are skipped by the shards, and counted. The arrays
        belong to the client from here on: a push that has to be sent again is sent with the same bytes. What a member
        that lost its lease has pushed is dropped.
        """
        for table, route, rows in gradients:
            spec = self.spec(table)
            _check_rows(spec.name, "gradients", rows, len(route.ids), spec.dim)
        with self._push_lock, span("push"):
            placement, member = self.placement, self.membership
            travels = self._travels(placement, lr_scale)
            if not all(travels(route) for _, route, _ in gradients):
                gradients = placed_gradients(gradients, placement, travels)
            update = Update(
                gradients=gradients,
                clock=clock,
                lr_scale=lr_scale,
                weight=weight,
                versions=versions,
                difference=difference,
            )
            if member is None:
                self._pushes.put(update, placement, to_all=False)
                return self._deliver_waiting()
            if clock < member.first:  # of the time before its lease was lost
                return Pushed(duplicate=False, applied=0, skipped=0)
            try:
                member.pushed(clock)
                self._pushes.put(update, placement, to_all=True)
            except BaseException:  # a Ctrl-C, or a codec of the user: the other workers wait for this clock, too
                self._pushes.end_clock(clock, placement)
                member.pushed(clock)
                raise
            return self._deliver_waiting()

    def flush(self) -> None:
        """Wait until every push is safe on its shards; one that got no answer is sent again. ShardUnavailable."""
        if not self._pushes.is_empty:
            with self._push_lock:
                self._deliver_waiting()
        self._pushes.await_safe(self.connections.shards, self.timeout)

    def empty_waiting_pushes(self) -> None:
        """Drop the gradients of pushes that got no answer, after a restore; the pushes are sent empty."""
        with self._push_lock:
            self._pushes.empty()

    def status(self) -> tuple[ShardStatus, ...]:
        """Return health, sizes and counters of every shard, in the order of the shards."""
        return tuple(reply for reply in self.ask_all(GetStatus()) if isinstance(reply, ShardStatus))

    def close(self, *, awaits_room: bool = True) -> None:
        """Wait until all pushes are safe, leave the job and close the connections.

        It waits for a shard that has no room to write its event log as long as a push does, if `awaits_room`.
        """
        timeout = _LAST_WORD
        try:
            self._await_safe(awaits_room)
            timeout = _FAREWELL
        except EmbershardError as error:
            _log.warning("worker %d ends before its last pushes are known to be safe: %s", self.worker, error)
        finally:  # a Ctrl-C, too, which ends a long wait
            self._leave(timeout)

    def _await_safe(self, awaits_room: bool) -> None:
        has_stalled = any(connection.has_stalled for connection in self.connections)
        timeout = _LAST_WORD if has_stalled and not awaits_room else _FAREWELL
        try:
            self._pushes.await_safe(self.connections.shards, min(self.timeout, timeout), awaits_recovery=False)
        except EmbershardError:  # a shard without room may also be one that has not refused again before the timeout
            if not awaits_room or not any(connection.has_stalled for connection in self.connections):
                raise
            self._pushes.await_safe(self.connections.shards, self.timeout)

    def _leave(self, timeout: timedelta) -> None:
        if not self._pushes.is_empty:
            _log.warning(
                "worker %d ends before its last push was acknowledged by shards %s, which may have applied it; "
                "to wait for them, call session.flush() before session.close()",
                self.worker, ", ".join(map(str, self._pushes.waiting_shards)),
            )  # fmt: skip
        if self.membership is not None:
            self.membership.leave(timeout)
        for connection in self.connections:
            connection.transport.close()

    def spec(self, table: TableKey) -> TableSpec:
        """Return the spec of a declared table, or of the first table of a bundle. UnknownTable if there is none."""
        table = table if isinstance(table, str) else table[0]
        spec = self._specs.get(table)
        if spec is None:
            known = ", ".join(self._specs) or "none"
            raise UnknownTable(shard=f"worker {self.worker}", table=table, known=known)
        return spec

    def ask_all(self, request: Request) -> list[Outcome]:
        """Send a request to every shard; return the replies in the order of the shards. Raises the first error."""
        return self.connections.call_all(request)


def _check_rows(table: str, what: str, rows: Floats, count: int, dim: int) -> None:
    if rows.dtype != np.float32:
        raise TypeError(f"table {table!r}: {what} must be float32, got {rows.dtype}")
    if rows.shape != (count, dim):
        raise WrongDim(table=table, what=what, got=rows.size, ids=count, dim=dim, want=count * dim)
