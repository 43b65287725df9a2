"""What goes between one training thread and the shards: rows that it reads, and pushes that its steps leave."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

import numpy as np

from embershard.proto.messages import Floats
from embershard.proto.routing import Route
from embershard.worker.client.client import Client
from embershard.worker.client.connections import ClientStats
from embershard.worker.client.push import Gradients, LrScale, no_versions
from embershard.worker.session.dense import DenseWeights
from embershard.worker.session.local_steps import LocalSteps
from embershard.worker.session.prefetch import Prefetcher
from embershard.worker.session.reads import Lookup, PrefetchedRows, PullBatch, Read, Reads
from embershard.worker.session.row_cache import RowCaches

B = TypeVar("B")

_TRIAL = 3  # batches after which it is clear that pulling ahead is in vain
_IN_VAIN = (
    "prefetch pulls rows that the model does not read, and the model waits for others: what `inputs`, or the model's "
    "embedding_inputs, gives for a batch must hold the very ids that each embedding is called with"
)

_log = logging.getLogger(__name__)


class Traffic:
    """The reads and pushes of a session, at its clock, and the loop in which they run ahead."""

    def __init__(self, client: Client, local: LocalSteps | None = None) -> None:
        self.local = local
        self.ahead = PrefetchedRows()
        self.pipeline: Prefetcher[Any] | None = None  # inside `prefetch`
        self.caches: RowCaches | None = None
        self.waited = 0.0  # seconds that the training thread spent for the shards
        self._client = client
        self._source: Client | LocalSteps = local or client
        self._clock = 0
        self._failure: BaseException | None = None  # of a push, in a loop that was left before it was known
        self._exact = False  # inside `exact`, where a codec would round what is read
        self.reset_read_versions()

    def reset_read_versions(self) -> None:
        """Let what is read from here on decide how old the gradients of the next step are."""
        self._versions = no_versions(self._client.num_shards)
        self._lost_leases: int | None = None  # when the first rows of the step were pulled

    @property
    def clock(self) -> int:
        """That of the next push; a worker that joined again is at the clock at which it did."""
        if self._client.membership is not None:
            self._clock = max(self._clock, self._client.membership.first)
        return self._clock

    @property
    def stats(self) -> ClientStats:
        """The client's, with what is counted here."""
        stats = replace(self._client.stats, wait_seconds=self.waited)
        if self.caches is not None:
            stats = replace(stats, cache_hits=self.caches.counts.hits, cache_lookups=self.caches.counts.lookups)
        if self.local is not None:
            stats = replace(stats, skipped_rows=stats.skipped_rows + self.local.skipped_rows)
        return stats

    def keep_copies(self, rows: int, staleness: int) -> None:
        """Read rows through caches from here on; see Session.cache_rows."""
        if self.local is not None:
            raise ValueError("cache_rows and connect(local_steps=...) exclude each other: both keep copies of rows")
        bound = self._bound
        if bound is not None and staleness > bound:
            raise ValueError(
                f"cache_rows(staleness={staleness}) is beyond connect(staleness={bound}), what it promises"
            )
        self.caches = RowCaches(rows, staleness)

    def read(self, want: Lookup) -> Read:
        """Rows for a tensor of ids: those pulled ahead for these ids, or pulled now."""
        found = self.ahead.find(want, exact=self._exact)
        return found or self.pull([want], caches=self.caches)[want.table.spec.name][0]

    def read_ahead(self, wanted: Sequence[Lookup], dense: Sequence[DenseWeights]) -> None:
        """Pull what is not here yet, and the dense weights that are out of date, in one request per shard."""
        self.ahead.forward = {}
        stale = [weights for weights in dense if weights.stale(self.clock)]
        found = [(want, self.ahead.find(want, exact=self._exact)) for want in wanted]
        missing = [want for want, read in found if read is None]
        ahead = self.pull(missing, stale, self.caches) if missing or stale else {}
        for want, read in found:
            if read is not None:
                ahead.setdefault(want.table.spec.name, []).append(read)
        self.ahead.forward = ahead

    def pull(
        self, wanted: Sequence[Lookup], dense: Sequence[DenseWeights] = (), caches: RowCaches | None = None
    ) -> Reads:
        """Rows and dense weights after every push before, in one request per shard."""
        self.settle()
        if self.pipeline is not None or self._exact:  # its caches go by batches, and copies are rounded
            caches = None
        fetch = PullBatch(wanted)
        clock = self.clock
        with self.waiting():
            fetch.pull(self._source, dense, caches=caches, age=clock, clock=clock, exact=self._exact)
        return self._accept(fetch)

    def _accept(self, fetch: PullBatch) -> Reads:
        """Hand rows to the model; they decide how old the gradients of the next step are."""
        if fetch.versions is not None:
            self._versions = np.minimum(self._versions, fetch.versions)
        if self._lost_leases is None:
            self._lost_leases = fetch.lost_leases
        return fetch.accept(self.clock)

    def push(self, gradients: Gradients, lr_scale: LrScale, weight: float) -> None:
        """Push a step's gradients and advance the clock; inside a loop without waiting, unless too many are under way.

        A step on rows of the time before the lease was lost is dropped.
        """
        self.ahead.forget()
        clock, versions, lost_leases = self.clock, self._versions, self._lost_leases
        self.reset_read_versions()
        if lost_leases is not None and lost_leases != self._client.lost_leases:
            return
        self._clock = clock + 1
        send = partial(self._source.push, gradients, clock=clock, lr_scale=lr_scale, weight=weight, versions=versions)
        with self.waiting():
            if self.pipeline is None:
                send()
            else:
                sends = partial(self._send, send, self.pipeline)
                self.pipeline.submit(sends, [(table, route) for table, route, _ in gradients])

    def _send(self, send: Callable[[], object], pipeline: Prefetcher[Any]) -> None:
        """Push, and say which rows beside those of the step it changed: a codec may hold rows of earlier ones back."""
        try:
            send()
        finally:
            pipeline.mark_changed(self._client.compressor.beside)

    def load(self, table: str, route: Route, rows: Floats, *, keep_state: bool) -> None:
        """Assign rows, after every push before; what was pulled ahead of the table is no longer up to date."""
        self.settle()
        if keep_state and self._lost_leases not in (None, self._client.lost_leases):
            return  # what was read before is changed here, and will not be pushed either
        with self.waiting():
            self._source.load(table, route, rows, keep_state=keep_state)
        self.ahead.forget(table)
        if self.caches is not None:
            self.caches.drop(table, route.ids)
        if self.pipeline is not None:
            self.pipeline.touch(table, route)

    def check(self) -> None:
        """Before a step: raise the error of an earlier push, if there was one."""
        if self.pipeline is None:
            self.settle()
        else:
            self.pipeline.check()

    def loop(
        self,
        loader: Iterable[B],
        wanted: Callable[[B], list[Lookup]],
        dense: Sequence[DenseWeights],
        staleness: int | None,
    ) -> Iterator[B]:
        """The loader's batches, each with its rows; see Session.prefetch. ValueError for a staleness that cannot be."""
        caches = self.caches
        staleness = _staleness_of(staleness, self._bound, caches)
        # with other workers' pushes, or local steps, no row is safe from a change that nobody here knows of
        alone = self._client.membership is None and self.local is None
        pipeline = Prefetcher(self._source, wanted, dense, staleness, caches and caches.fresh(), early=alone)
        return self._run(pipeline, loader)

    @property
    def _bound(self) -> int | None:
        """The job's, in clocks of this worker; with local steps those of the job are rounds."""
        member = self._client.membership
        return None if member is None or self.local is not None else member.terms.staleness

    def _run(self, pipeline: Prefetcher[B], loader: Iterable[B]) -> Iterator[B]:
        if self.pipeline is not None:
            raise RuntimeError(
                "this session is inside a prefetch loop already; leave that one first, by loop.close() if it has a name"
            )
        self.settle()
        batches = iter(loader)
        self.pipeline = pipeline
        missed, found = self.ahead.missed, self.ahead.found
        try:
            pipeline.start(batches, self.clock)
            for number in count(1):
                with self.waiting():
                    ready = pipeline.next(self.clock)
                if ready is None:
                    break
                current = ready.fetch.lost_leases == self._client.lost_leases
                self.ahead.batch = self._accept(ready.fetch) if current else {}
                batch = ready.batch
                del ready
                yield batch
                self.ahead.batch = {}
                if number == _TRIAL and self.ahead.missed > missed and self.ahead.found == found:
                    _log.warning(_IN_VAIN)
        except BaseException:
            self._leave(pipeline)
            self._log_failure()
            raise
        self._leave(pipeline)
        self.flush()

    def _leave(self, pipeline: Prefetcher[B]) -> None:
        self.pipeline = self.ahead.batch = None
        self._failure = pipeline.close()

    def _log_failure(self) -> None:
        """Say what cannot be raised: an error of the loop is, or nobody asks any more."""
        if self._failure is not None:
            _log.error("a push failed as the loop was left: %s", self._failure)

    def settle(self) -> None:
        """Wait until every push is acknowledged; raises the error of one that was not."""
        if self.pipeline is not None:
            with self.waiting():
                self.pipeline.flush()
        if self._failure is not None:
            try:
                raise self._failure
            finally:
                self._failure = None

    def flush(self) -> None:
        """Settle, and push what local steps have changed since they last did."""
        self.settle()
        if self.local is not None:
            with self.waiting():
                self.local.flush()

    @contextmanager
    def exact(self, dense: Sequence[DenseWeights]) -> Iterator[None]:
        """Read past the tables' codecs; nothing that is read so, dense weights included, is there for training."""
        codecs = {name: directions.pull for name, directions in self._client.compressor.directions().items()}
        rounded = [weights for weights in dense if not codecs[weights.spec.name].is_lossless]
        before, self._exact = self._exact, not all(codec.is_lossless for codec in codecs.values())
        for weights in rounded:
            weights.forget()
        try:
            yield
        finally:
            self._exact = before
            for weights in rounded:
                weights.forget()

    def refresh(self) -> None:
        """Let the next reads come from the shards."""
        if self.caches is not None:
            self.caches = self.caches.fresh()
        if self.pipeline is not None:
            self.pipeline.forget_copies()
        self.ahead.forget()

    def close(self) -> None:
        """Wait for what is in flight."""
        if self.pipeline is not None:
            self._leave(self.pipeline)
            self._log_failure()
        self.ahead.forget()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time that the training thread spends for the shards."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.waited += time.perf_counter() - start


def _staleness_of(asked: int | None, bound: int | None, caches: RowCaches | None) -> int:
    """That of a prefetch loop in a job with a bound, which caches use up a part of; ValueError where it cannot be."""
    left = bound if bound is None or caches is None else bound - caches.staleness
    staleness = (left or 0) if asked is None else asked
    if staleness < 0:
        raise ValueError(f"staleness must be at least 0, got {staleness}")
    if left is not None and staleness > left:
        less = "" if caches is None else f", with cache_rows(staleness={caches.staleness})"
        raise ValueError(f"prefetch(staleness={staleness}) is beyond connect(staleness={bound}){less}")
    return staleness
