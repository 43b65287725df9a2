"""One worker's training: it reads tables and dense weights at a clock, and pushes the gradients of each step."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, count
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import numpy as np
import torch

from embershard.proto.arrays import Floats
from embershard.proto.codec.name import CodecName
from embershard.proto.errors import ClientClosed
from embershard.proto.messages import TableKey
from embershard.proto.routing import Placement, Route
from embershard.proto.spec import TableSpec
from embershard.proto.timing import span
from embershard.worker.client.client import Client
from embershard.worker.client.connections import ClientStats
from embershard.worker.client.membership import Membership
from embershard.worker.client.push import Versions
from embershard.worker.compression.compressor import LrScale
from embershard.worker.compression.settings import Compression, codec_of
from embershard.worker.session.codec_switch import Switching
from embershard.worker.session.dense import (
    DenseWeights,
    ParameterChanged,
    outside_transforms,
    refuse_trace,
    untraced,
)
from embershard.worker.session.gradients import CollectedGradients, RowGradients, to_arrays
from embershard.worker.session.inputs import Inputs
from embershard.worker.session.local_steps import LocalSteps
from embershard.worker.session.prefetch import Prefetcher, loop_staleness
from embershard.worker.session.reads import Lookup, LookupResult, LookupResults, PrefetchedRows, PullBatch
from embershard.worker.session.row_cache import CachedRows
from embershard.worker.session.row_source import RowSource
from embershard.worker.session.tables import RemoteTable, TableRegistry, Values, WholeTable

B = TypeVar("B")

_TRIAL = 3  # batches after which it is clear that pulling ahead is in vain
_IN_VAIN = (
    "prefetch pulls rows that the model does not read, and the model waits for others: what `inputs`, or the model's "
    "embedding_inputs, gives for a batch must hold the very ids that each embedding is called with"
)

_log = logging.getLogger(__name__)


class Session:
    """A worker's connection to the shards: it pulls rows for the model, pushes gradients, and counts steps.

    One thread trains with a session: forward, backward, `step()`. Because it has `zero_grad()` and `step()`, a
    training loop can use it in place of an optimizer. `lr_scale` multiplies the learning rate of every following
    push.

    Inside `for batch in session.prefetch(loader):` rows are pulled in advance and pushes are sent in the
    background; everywhere else a forward waits for its rows, and a step for its push.
    """

    def __init__(
        self, client: Client, *, local_steps: int | None = None, compression: Compression | None = None
    ) -> None:
        self.client = client
        if compression is not None:
            client.compressor.settings = compression
        self.lr_scale = 1.0
        self.registry = TableRegistry(client)
        self.local_steps = None if local_steps is None else LocalSteps(client, local_steps)  # copies that it trains on
        self.switching = Switching(client, self.settle)
        self._source: RowSource = self.local_steps or client
        client.restored = self._restored
        self._cache: CachedRows | None = None
        self._prefetched = PrefetchedRows()
        self._prefetcher: Prefetcher[Any] | None = None  # inside `prefetch`
        self._collected = CollectedGradients(client)
        self._whole_tables: list[WholeTable] = []  # that this step has read, or the last one
        self._clock = 0
        self._waited = 0.0  # seconds that the training thread waited
        self._waited_for_workers = self._waited_for_data = 0.0  # parts of these
        self._failure: BaseException | None = None  # of a push, in a loop that was left before it was known
        self._exact = False  # inside `exact`, where a codec would round what is read
        self._versions: Versions = {}  # the lowest of the rows that this step has read
        self._lost_leases: int | None = None  # when the first rows of the step were pulled
        self._is_stepping = self._is_closed = False
        self.stepped_by: object = None  # the ShardOptimizer of the last step, by a name that it has for this

    @property
    def clock(self) -> int:
        """Return the number of steps so far; a worker that joins late, or again, starts at the clock of the job."""
        if (member := self.client.membership) is not None:
            self._clock = max(self._clock, member.next_clock)  # a step that was interrupted may have pushed
        return self._clock

    @property
    def membership(self) -> Membership | None:
        """This worker's membership in the job; None for a single worker."""
        return self.client.membership

    @property
    def placement(self) -> Placement:
        """The placement: which shard holds which ids."""
        return self.client.placement

    @property
    def table_names(self) -> frozenset[str]:
        """Return the names of the tables that this session declared."""
        return frozenset(self.registry.tables)

    @property
    def tables(self) -> tuple[RemoteTable, ...]:
        """The tables that this session declared, dense weights included."""
        return tuple(self.registry.tables.values())

    @property
    def dense_weights(self) -> tuple[DenseWeights, ...]:
        """The dense weights that are pulled and pushed with the tables."""
        return tuple(self.registry.dense)

    @property
    def stats(self) -> ClientStats:
        """Counters since the start; `wait_seconds` is what the training thread waited for batches and for pushes.

        A part of it is for other workers' clocks, and inside `prefetch` a part for the loader; the rest is for shards.
        """
        stats = replace(
            self.client.stats,
            wait_seconds=self._waited,
            workers_wait_seconds=self._waited_for_workers,
            data_wait_seconds=self._waited_for_data,
        )
        if self._cache is not None:
            counts = self._cache.counts
            stats = replace(stats, cache_hits=counts.hits, cache_lookups=counts.lookups)
        if self.local_steps is not None:
            stats = replace(stats, skipped_rows=stats.skipped_rows + self.local_steps.skipped_rows)
        return stats

    def staleness_seen(self) -> tuple[int, ...]:
        """Count pushes by staleness (updates that their rows had missed): 0, 1, ...; the last entry counts all above.

        Pushes of rows whose version is not known, as with a cache, are not counted.
        """
        return tuple(map(sum, zip(*(status.staleness_seen for status in self.client.status()), strict=True)))

    def cache_rows(self, rows: int = 100_000, staleness: int = 4) -> None:
        """Keep copies of up to `rows` hot rows per table in this process, and read them for `staleness` clocks.

        A forward at clock t (in `prefetch`: at batch t, beyond its own bound) then shows at least this worker's pushes
        up to t - 1 - staleness. `stats` counts the rows that were looked up and found. Dense weights, `pull`, and what
        a loop reads beyond its prefetched rows are never taken from copies; `load` and `refresh` drop them. Where
        max_norm scales a copy, it may take back pushes that the copy does not show. In a job with a bound, rows are
        pulled so much fresher that copies hold it, too. ValueError unless both are above zero, and where copies would
        break what `connect` promised.
        """
        if self.local_steps is not None:
            raise ValueError("cache_rows and connect(local_steps=...) exclude each other: both keep copies of rows")
        bound = self._bound
        if bound is not None and staleness > bound:
            raise ValueError(
                f"cache_rows(staleness={staleness}) is beyond connect(staleness={bound}), what it promises"
            )
        self._cache = CachedRows(self._source, rows, staleness, is_dense=self.client.compressor.is_dense)

    def compress(
        self, tables: str, *, push: str | CodecName | None = None, pull: str | CodecName | None = None
    ) -> list[str]:
        """Set the codecs of tables from the next push and pull on; returns the names of these tables.

        `tables` is a name, a pattern, or "dense" for all dense weights. A codec is one of docs/compression.md, such as
        "int8" or "topk:0.01+fp16s"; a direction that is not named stays as it is. The new codec
        takes over the residuals, or sends them with the next push. Waits for the pushes in flight. ValueError, before
        anything changes, if no table has such a name, or if a codec is malformed or a table cannot use it; UnknownCodec
        if a shard has not imported it.
        """
        names, check = self.registry.matching(tables), self.client.compressor.check
        to_shards, from_shards = (None if codec is None else codec_of(codec) for codec in (push, pull))
        self.switching.switch({name: check(name, to_shards, from_shards) for name in names})
        return names

    @property
    def missed_reads(self) -> int:
        """Number of reads inside `prefetch` of rows that had not been pulled in advance."""
        return self._prefetched.missed

    def table(self, spec: TableSpec, values: Values | None = None, *, num_rows: int = 0) -> RemoteTable:
        """The table of `spec`, created where it does not exist.

        `values` gives its first (ids, rows) in portions; they are loaded by the worker that created the table, and
        every other worker waits until that is done. TableMismatch where the shards hold other settings, OtherRows where
        another worker has given another `num_rows`, the number of its ids (0: any id is one).
        """
        known = self.registry.tables.get(spec.name)
        if known is None or known.spec != spec:
            if self.local_steps is not None:
                self.local_steps.add(spec)
            self.registry.declare(spec, values, num_rows)
            known = self.registry.tables[spec.name] = RemoteTable(self, spec)
        return known

    def add_dense(self, weights: DenseWeights) -> None:
        """Pull and push these dense weights with the tables."""
        self.registry.dense.append(weights)
        try:
            self.table(weights.spec, lambda: [(weights.ids, weights.values())])  # one that only reads refuses
            self.client.compressor.lay_out(weights.spec.name, weights.layout)
            weights.keep_at(self.read_dense, self.assign)
        except BaseException:
            self.registry.dense.remove(weights)
            raise

    def read(self, spec: TableSpec, ids: torch.Tensor, device: torch.device) -> LookupResult:
        """Rows for a tensor of ids: those pulled ahead for these ids, or pulled now. NotImplementedError in a trace."""
        refuse_trace(spec.name)
        found = self._prefetched.find(spec.name, ids, device, exact=self._exact)
        return self._pull([Lookup(spec, ids, device)], cached=True)[spec.name][0] if found is None else found

    def read_all(self, reader: WholeTable, spec: TableSpec, num_rows: int, device: torch.device) -> LookupResult:
        """Rows 0 to num_rows - 1 of a table for a forward, never from copies; `reader` is told when they change."""
        if all(reader is not known for known in self._whole_tables):
            self._whole_tables.append(reader)
        stale = [weights for weights in self.registry.dense if weights.stale(self.clock)]
        return self._pull([Lookup(spec, torch.arange(num_rows, device="cpu"), device)], stale)[spec.name][0]

    def stage(self, lookups: Sequence[Lookup]) -> None:
        """Pull the rows of a forward that are missing here, and outdated dense weights, in one request per shard."""
        self._prefetched.forward = {}
        find, exact = self._prefetched.find, self._exact
        found = [(its, find(its.spec.name, its.ids, its.device, exact=exact)) for its in lookups]
        missing = [lookup for lookup, result in found if result is None]
        stale = any(weights.stale(self.clock) for weights in self.registry.dense)
        staged = self._pull(missing, cached=True) if missing or stale else {}
        for lookup, result in found:
            if result is not None:
                staged.setdefault(lookup.spec.name, []).append(result)
        self._prefetched.forward = staged

    def unstage(self) -> None:
        """End a forward: drop the rows that were pulled for it."""
        self._prefetched.forward = {}

    def pull(self, lookups: Sequence[Lookup], dense: Sequence[DenseWeights] = ()) -> LookupResults:
        """Pull rows and dense weights as shards have them now, after all earlier pushes, in one request per shard."""
        with self._past_codecs(dense):
            return self._pull(lookups, dense)

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Context manager in which forwards read rows and dense weights as float32, without the tables' pull codecs.

        For evaluations: what training reads before and after keeps its bits.
        """
        with self._past_codecs(self.registry.dense):
            yield

    def load(self, table: str, route: Route, rows: Floats, *, keep_state: bool = False) -> None:
        """Assign rows, after all earlier pushes; rows of the table that were pulled in advance are invalidated."""
        if keep_state and self._lost_leases not in (None, self.client.lost_leases):
            return  # what was read before is changed here, and will not be pushed either
        self._load(table, route, rows, keep_state=keep_state)
        if not keep_state:
            self._expire_batches()

    def assign(self, table: str, route: Route, rows: Floats) -> None:
        """Assign rows, as load_state_dict does: their optimizer state stays, and their residuals are dropped.

        Rows that were pulled in advance are invalidated. In a job with a bound it first waits for the clocks that a
        read now must see.
        """
        lost_leases = None
        try:
            while lost_leases != self.client.lost_leases:  # such a change of a member without its lease is dropped
                self._await_clocks(table, route)  # their pushes would change what is assigned, before this worker reads
                lost_leases = self.client.lost_leases
                # with local steps the copies have the optimizer's state, and the shards have none
                self._load(table, route, rows, keep_state=self.local_steps is None)
            self.client.compressor.forget(table, route)
        finally:  # some of the shards may have them
            self._expire_batches()

    def _await_clocks(self, table: str, route: Route) -> None:
        """Wait until the shards of a route have closed the clocks that this worker's reads must see."""
        member = self.client.membership
        if member is None or member.terms.staleness is None:
            return
        self.settle()
        clock = self.clock if self.local_steps is None else self.local_steps.clock
        is_first = np.zeros(len(route.ids), bool)  # of a shard: one row of each is enough to wait for it
        is_first[route.splits[:-1][np.diff(route.splits) > 0]] = True
        with self._waiting():
            self.client.pull([(table, route.select(is_first))], clock=clock, exact=True)

    def _expire_batches(self) -> None:
        """Let the batches that were pulled ahead be read anew; with a staleness they lack what was just assigned."""
        if self._prefetcher is not None:
            self._prefetcher.assigned()

    def _load(self, table: str, route: Route, rows: Floats, *, keep_state: bool) -> None:
        self.settle()
        with self._waiting():
            (self._cache or self._source).load(table, route, rows, keep_state=keep_state)
        self._prefetched.forget(table)
        for whole in self._whole_tables:
            whole.forget()
        if self._prefetcher is not None:
            self._prefetcher.touch(table, route.ids)

    def collect(self, gradients: RowGradients) -> None:
        """Add gradients of a backward to the next step; a loop that never steps gets a warning."""
        self._collected.add(gradients)

    def gradients(self) -> list[RowGradients]:
        """Return the gradients of the tables since the last step, one part per table; you may change them in place.

        Gradients of an id that was read several times are summed. They are on the device of the module that read. The
        order is that of the tables' names, so that a norm of all has the same bits in whichever order backward came.
        """
        with span("gather"):
            return self._collected.by_table()

    def gradient_of(self, table: str) -> RowGradients | None:
        """Return the gradients of one table, as `gradients` does; None where backward left none."""
        return self._collected.of_table(table)

    def drop_gradients(self, table: str) -> None:
        """Forget the gradients of one table since the last step."""
        self._collected.drop(table)

    @untraced
    def step(self, lr_scales: Mapping[str, float] | None = None, *, weight: float = 1.0) -> None:
        """Push the gradients since the last step to all shards, and advance the clock; `stats` counts the rows.

        `lr_scales` multiplies the learning rate of each table that it names, on top of `lr_scale`. `weight` is the
        weight of these gradients among those of a synchronous job's workers: the number of samples of their mean.

        Gradients are cleared, so that no zero_grad is needed. It waits for the shards; inside `prefetch` it does not,
        unless too many pushes are on their way. There it first raises the error of an earlier push, if there was one,
        and has done nothing then. If a shard gives no answer in time, its part of the push is sent again, once, with
        the next step. RuntimeError while another thread is inside `step`.
        """
        if self._is_stepping:
            raise RuntimeError("another thread is inside step() of this session; give each thread a session of its own")
        try:
            self._is_stepping = True
            self._step(lr_scales, weight)
        finally:
            self._is_stepping = False

    def _step(self, lr_scales: Mapping[str, float] | None, weight: float) -> None:
        self._collected.backwards = 0
        if self._prefetcher is None:
            self.settle()
        else:
            self._prefetcher.check()
        if self.client.connections.settings_revision != self.switching.revision:
            self.switching.follow(self.clock)
        with span("push"):
            with span("gather"):
                collected = self._collected.merged()
                for table in self._whole_tables:
                    table.check_unchanged()
                dense = [part for weights in self.registry.dense if (part := weights.gradients()) is not None]
                gradients = to_arrays([*collected, *dense])
            self._collected.clear()
            lr_scale: LrScale = self.lr_scale
            if lr_scales is not None:
                names = chain.from_iterable([key] if isinstance(key, str) else key for key, _, _ in gradients)
                lr_scale = {table: self.lr_scale * lr_scales.get(table, 1.0) for table in names}
            self._push(gradients, lr_scale, weight)

    def _push(self, gradients: list[tuple[TableKey, Route, Floats]], lr_scale: LrScale, weight: float) -> None:
        """Push a step's gradients and advance the clock; inside a loop without waiting, unless too many are under way.

        A step on rows of the time before the lease was lost is dropped.
        """
        if self._prefetched.forward or self._prefetched.batch is not None:
            self._prefetched.forget()
        clock, versions, lost_leases = self.clock, self._versions, self._lost_leases
        self.reset_read_versions()
        member = self.client.membership
        if member is not None and lost_leases not in (None, member.lost_leases):
            return
        for weights in self.registry.dense:
            weights.expire()
        if self._whole_tables:
            self._whole_tables = [table for table in self._whole_tables if table.stepped()]
        send = partial(self._source.push, gradients, clock=clock, lr_scale=lr_scale, weight=weight, versions=versions)
        with self._waiting():
            if self._prefetcher is None:
                if member is None:
                    self._clock = clock + 1  # also where its push is kept, to be sent again
                send()
            else:
                sends = partial(self._send, send, self._prefetcher)
                self._prefetcher.submit(sends, [(table, route) for table, route, _ in gradients])
        self._clock = clock + 1  # not before: other workers wait for the push of each clock

    def _send(self, send: Callable[[], object], prefetcher: Prefetcher[Any]) -> None:
        """Push, and note which other rows it changed: a codec may add rows of its residual."""
        try:
            send()
        finally:
            prefetcher.mark_changed(self.client.compressor.also_changed)

    @outside_transforms()
    def _pull(
        self, lookups: Sequence[Lookup], dense: Sequence[DenseWeights] = (), *, cached: bool = False
    ) -> LookupResults:
        """Rows and dense weights after every push before, in one request per shard.

        With `cached`, for a forward: rows may come from the cache, and dense weights that are out of date come, too.
        """
        self.settle()
        source, clock = self._source, self.clock
        if cached:
            dense = [weights for weights in self.registry.dense if weights.stale(clock)]
        # the cache of a loop ages by batches, and copies are rounded
        if cached and self._cache is not None and self._prefetcher is None and not self._exact:
            source, self._cache.age = self._cache, clock
        batch = PullBatch(source, lookups)
        with self._waiting():
            batch.pull(dense, clock=clock, exact=self._exact)
        return self._accept(batch)

    def _accept(self, batch: PullBatch) -> LookupResults:
        """Hand rows to the model; they decide how old the gradients of the next step are."""
        if batch.versions is not None:
            for shard, version in batch.versions.items():
                self._versions[shard] = min(self._versions.get(shard, version), version)
        if self._lost_leases is None:
            self._lost_leases = batch.lost_leases
        return batch.accept(self.clock)

    @property
    def _bound(self) -> int | None:
        """The job's, in clocks of this worker; with local steps those of the job are rounds."""
        member = self.client.membership
        return None if member is None or self.local_steps is not None else member.terms.staleness

    def prefetch(
        self,
        loader: Iterable[B],
        *,
        staleness: int | None = None,
        inputs: Inputs[B] | None = None,
    ) -> Iterator[B]:
        """Iterate over the loader's batches: pulls their rows and dense weights in advance, pushes in the background.

        The rows of a batch include this worker's pushes of all earlier batches except the last `staleness` ones; with 0
        the weights have the same bits as without prefetch. It defaults to the `staleness` of `connect`, or to 0. At
        most staleness + 1 pushes are in flight. The loader, and what says which ids a batch reads, run in a thread of
        their own, some batches ahead, so a batch needs memory of its own: `inputs(batch)` gives the ids by embedding
        module (of several models: by table), and defaults to the model's `embedding_inputs`, called with the batch, or
        with the parts of a batch that is a tuple or list. Other rows are pulled when the model reads them.

        Errors of the loader, of pulls and of pushes are raised where the next batch is taken, those of pushes also by
        `step`; after a `break`, by the next use of the session. The end of the loop waits for all pushes in flight, so
        that later reads see every push.

        With a staleness above 0, call backward for each batch before the next one is taken, also if several batches
        make one step: with the next batch, or at the end of the loop, the dense weights may change. max_norm may undo
        a push in flight to the rows that it scales.

        ValueError if neither `inputs` nor the model says what a batch reads, or if the staleness is negative or beyond
        the job's; RuntimeError inside another prefetch of this session.
        """
        staleness = loop_staleness(staleness, self._bound, self._cache)
        prefetcher = Prefetcher(
            self._source if self._cache is None else self._cache.for_another_clock(),
            self.registry.lookups(inputs),
            self.registry.dense,
            staleness,
            # with other workers' pushes, or local steps, no row is safe from a change that nobody here knows of
            overlap_pulls=self.client.membership is None and self.local_steps is None,
        )
        return self._batches(prefetcher, loader)

    def _batches(self, prefetcher: Prefetcher[B], loader: Iterable[B]) -> Iterator[B]:
        if self._prefetcher is not None:
            raise RuntimeError(
                "this session is inside a prefetch loop already; leave that one first, by loop.close() if it has a name"
            )
        self.settle()
        batches = iter(loader)
        self._prefetcher, prefetched = prefetcher, self._prefetched
        missed, found = prefetched.missed, prefetched.found
        for weights in self.registry.dense:
            weights.late = prefetcher.staleness
        try:
            prefetcher.start(batches, self.clock)
            for number in count(1):
                is_open = self._prefetcher is prefetcher
                with self._waiting(prefetcher):
                    ready = prefetcher.next(self.clock)
                if ready is None:
                    if is_open and self._prefetcher is not prefetcher:  # another thread has closed the session
                        raise ClientClosed
                    break
                is_current = ready.pulled.lost_leases == self.client.lost_leases
                is_current = is_current and ready.assignments == prefetcher.assignments
                prefetched.batch = self._accept(ready.pulled) if is_current else {}
                batch = ready.batch
                del ready
                yield batch
                prefetched.batch = {}
                if number == _TRIAL and prefetched.missed > missed and prefetched.found == found:
                    _log.warning(_IN_VAIN)
        except BaseException:
            self._leave_loop(prefetcher)
            self._log_failure()
            raise
        self._leave_loop(prefetcher)
        self.flush()

    def _leave_loop(self, prefetcher: Prefetcher[Any]) -> None:
        self._prefetcher = self._prefetched.batch = None
        self._failure = prefetcher.close()
        # with a staleness, the dense weights of the last batch may lack the last pushes
        for weights in self.registry.dense if prefetcher.staleness else ():
            weights.late = 0
            try:
                weights.forget()
            except (ParameterChanged, ValueError) as error:  # Python drops what is raised as a loop is left by break
                self._failure = self._failure or error

    def _log_failure(self) -> None:
        """Log what cannot be raised, because an error of the loop is, or the session is closed."""
        if self._failure is not None:
            _log.error("an error as the loop was left: %s", self._failure)

    def settle(self) -> None:
        """Wait until every push is acknowledged; raises the error of one that was not."""
        if self._prefetcher is not None:
            with self._waiting():
                self._prefetcher.flush()
        if self._failure is not None:
            try:
                raise self._failure
            finally:
                self._failure = None

    def flush(self) -> None:
        """Wait until every push is safe on its shards; raises the error of a failed push. Ends a local round."""
        self.settle()
        with self._waiting():
            if self.local_steps is not None:
                self.local_steps.flush()
            self.client.flush()

    def zero_grad(self) -> None:
        """Drop the gradients collected since the last step."""
        self._collected.clear()
        for weights in self.registry.dense:
            weights.clear()

    def skip(self) -> None:
        """Make a step without a push: the gradients are dropped, and the clock advances."""
        self.zero_grad()
        self.step(weight=0.0)

    def read_dense(self, weights: DenseWeights | None = None) -> None:
        """Pull the dense weights (all by default) into their parameters, unless they are up to date for the clock.

        A use of a parameter does the same.
        """
        stale = [its for its in self.registry.dense if weights in (None, its) and its.stale(self.clock)]
        if stale:
            self._pull((), stale)

    def refresh(self) -> None:
        """Pull all rows and dense weights again at the next forward, for instance to evaluate other workers' pushes.

        Inside `prefetch`, batches that were pulled ahead already keep their rows.
        """
        if self._cache is not None:
            self._cache.clear()
        if self.local_steps is not None:
            self.local_steps.refresh()
        if self._prefetcher is not None:
            self._prefetcher.forget_copies()
        self._prefetched.forget()
        for weights in self.registry.dense:
            weights.forget()
        for table in self._whole_tables:
            table.forget()

    def _restored(self) -> None:
        """The shards have other rows now: what is here was read of those before, or held back for them."""
        self.client.compressor.clear_residuals()
        if self.local_steps is not None:
            self.local_steps.drop_round()
        self.refresh()
        self._expire_batches()

    def reset_read_versions(self) -> None:
        """Compute the staleness of the next step only from later reads; call it after an evaluation."""
        self._versions, self._lost_leases = {}, None

    @contextmanager
    def _past_codecs(self, dense: Sequence[DenseWeights]) -> Iterator[None]:
        """Read past the tables' codecs; nothing that is read so, dense weights included, is there for training."""
        codecs = {name: directions.pull for name, directions in self.client.compressor.directions().items()}
        rounded: list[DenseWeights | WholeTable] = [its for its in dense if not codecs[its.spec.name].is_lossless]
        before, self._exact = self._exact, not all(codec.is_lossless for codec in codecs.values())
        if self._exact:
            rounded += self._whole_tables
        for weights in rounded:
            weights.forget()
        try:
            yield
        finally:
            self._exact = before
            for weights in rounded:
                weights.forget()

    @contextmanager
    def _waiting(self, prefetcher: Prefetcher[Any] | None = None) -> Iterator[None]:
        """Count time that the training thread waits, by what it waits for; `prefetcher`: for its next batch."""
        client = self.client.connections.stats
        start, held = time.perf_counter(), client.workers_wait_seconds
        loading = 0.0 if prefetcher is None else prefetcher.loading_seconds
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            # who waits for a batch waits for its loader until it has the batch, and only then for its rows
            data = 0.0 if prefetcher is None else min(seconds, prefetcher.loading_seconds - loading)
            self._waited += seconds
            self._waited_for_data += data
            self._waited_for_workers += min(seconds - data, client.workers_wait_seconds - held)

    def close(self) -> None:
        """Wait for requests in flight and close the connections; gradients that were not pushed are dropped.

        Residuals are dropped too: the log says how many rows of which table. It also names a weight that was changed in
        this process since the last step, which the shards do not have.

        While a shard has no room for its event log, the end waits for it as a push does. It does not where an exception
        is on its way, as in a `finally`: an error is told now, a Ctrl-C ends now.
        """
        self._close(awaits_room=sys.exception() is None)

    def _close(self, *, awaits_room: bool) -> None:
        if self._prefetcher is not None:
            self._leave_loop(self._prefetcher)
            self._log_failure()
        if self.clock == 0:
            self._collected.warn_if_unused()
        for name, rows in self.client.compressor.residual_rows().items():
            _log.warning(
                "table %s: the residual of %d rows was not sent before the session was closed; "
                'to send them, call session.compress("%s", push="none") and session.step() before',
                name, rows, name,
            )  # fmt: skip
        held: list[DenseWeights | WholeTable] = [*self.registry.dense, *self._whole_tables]
        for weights in () if self._is_closed else held:
            # of another type, without memory, or after an error of the GPU: nobody wants these values on the shards
            with suppress(ValueError, RuntimeError):
                if (changed := weights.changed()) is not None:
                    change = ParameterChanged(parameter=changed)
                    _log.warning("the session was closed after a change that the shards do not have: %s", change)
        self._is_closed = True
        self._prefetched.forget()
        self._collected.clear()
        self.client.close(awaits_room=awaits_room)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self.local_steps is not None:
                self.flush()
        finally:
            self._close(awaits_room=error is None)

    def __deepcopy__(self, memo: object = None) -> NoReturn:
        raise TypeError("a session holds connections and cannot be copied; copy the model before wrapping it")

    __reduce__ = __deepcopy__
