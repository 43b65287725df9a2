"""Batches with their rows pulled ahead, and pushes on their way, for one loop over a loader."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from embershard.proto.arrays import Ids
from embershard.proto.messages import TableKey
from embershard.proto.routing import BundleRoute, Route
from embershard.proto.timing import span
from embershard.worker.device import with_current_gpu
from embershard.worker.session.dense import DenseWeights
from embershard.worker.session.reads import Lookup, PullBatch
from embershard.worker.session.row_cache import CachedRows
from embershard.worker.session.row_source import RowSource

B = TypeVar("B")
Touched = tuple[TableKey, Route | Ids]  # rows that changed, of a table or a bundle

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Ready(Generic[B]):
    """A batch whose rows are here."""

    batch: B
    pulled: PullBatch
    assignments: int  # before its last pull


@dataclass(frozen=True, slots=True, eq=False)
class _Push:
    """A push that is being sent or waits for those before it."""

    batch: int  # in which it was submitted
    send: Callable[[], object]


class Prefetcher(Generic[B]):
    """Runs ahead of a training thread, within a bound.

    Batch t shows every push of the batches up to t - 1 - staleness: it is pulled once the training thread is done with
    them, so that all their pushes are known, and these are acknowledged. With staleness 0 that is when the thread asks
    for batch t, and only then are the rows pulled that batch t - 1 reads too; the others, which no push on its way can
    change, come while batch t - 1 computes. What batch t - 1 pushed or loaded beyond its own rows is pulled again.
    Without `overlap_pulls` all of them are pulled then: what others push, no one here knows.

    Three threads. The training thread calls the public methods: it takes batches, and says by taking one that it is
    done with the one before. The puller owns the loader and everything up to a Ready batch. The pusher sends one push
    after the other. What they share is changed under one condition: the batches that are done, those that are ready,
    and the pushes in flight, of which there are staleness + 1 at most.
    """

    def __init__(
        self,
        source: RowSource,  # a cache among them ages by the numbers of batches
        lookups: Callable[[B], list[Lookup]],
        dense: Sequence[DenseWeights],
        staleness: int,
        *,
        overlap_pulls: bool = True,
    ) -> None:
        self._source, self._lookups, self._dense, self.staleness = source, lookups, dense, staleness
        self._cache = source if isinstance(source, CachedRows) else None
        self._overlap_pulls = overlap_pulls
        self._lost_leases = source.lost_leases
        self._start_clock = 0
        self._clocks: deque[int] = deque()  # the session's when each batch but the first was taken, until it is used
        self._changed = threading.Condition()
        self._taken = self._finished = 0  # batches
        self._ready: deque[Ready[B] | BaseException | None] = deque()  # None: the loader came to its end
        self._pushes: deque[_Push] = deque()  # in flight, in order; the first one is being sent
        self._touched: list[Touched] = []  # pushed or loaded since the last batch was taken
        self._failure: BaseException | None = None  # of a push, until the training thread was told
        self._failed = False  # whether there was one: it may be applied later than it should, with another push
        self.assignments = 0  # by the training thread, past the optimizer
        self._closing = False
        self._is_pulling = False  # whether the puller waits for rows, and not for its loader
        self._threads: list[threading.Thread] = []
        self._loading: tuple[float, float | None] = (0.0, None)  # seconds until now; when the present batch was begun

    @property
    def loading_seconds(self) -> float:
        """Seconds that the loader has taken until now. Any thread may ask."""
        seconds, since = self._loading
        return seconds if since is None else seconds + time.perf_counter() - since

    def start(self, batches: Iterator[B], clock: int) -> None:
        """Begin to run ahead; `clock` is the session's."""
        self._start_clock = clock
        for name, work in (("puller", partial(self._pull, batches)), ("pusher", self._push)):
            thread = threading.Thread(target=with_current_gpu(work), name=f"embershard {name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def next(self, clock: int) -> Ready[B] | None:
        """Be done with a batch and wait for the next one; None after the last one, or once the loop is closed.

        `clock` is the session's.

        Raises what the loader, a pull or a push raised.
        """
        with self._changed, span("wait"):
            self._finished = self._taken
            if self._taken:
                self._clocks.append(clock)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ready or self._failure or self._closing)
            self._raise_failure()
            ready = self._ready.popleft() if self._ready else None
            self._touched.clear()
            self._taken += 1
        if not isinstance(ready, BaseException):
            return ready
        try:
            raise ready
        finally:
            del ready  # its traceback holds this frame

    def check(self) -> None:
        """Raise the error of a push, once."""
        with self._changed:
            self._raise_failure()

    def submit(self, send: Callable[[], object], touched: list[Touched]) -> None:
        """Have rows pushed by `send`; waits while staleness + 1 pushes are in flight."""
        with self._changed, span("wait"):
            self._changed.wait_for(lambda: len(self._pushes) <= self.staleness)
            self._touched += touched
            self._pushes.append(_Push(self._finished, send))
            self._changed.notify_all()

    def mark_changed(self, rows: Iterable[Touched]) -> None:
        """The push that is being sent changes these rows, too."""
        with self._changed:
            self._touched += rows

    def touch(self, table: str, ids: Ids) -> None:
        """Rows were changed in another way than by a push."""
        self.forget_copies()
        with self._changed:
            self._touched.append((table, ids))

    def assigned(self) -> None:
        """Weights were assigned: what was pulled before, for a batch that may miss pushes, is not to be read."""
        with self._changed:
            self.assignments += 1

    def forget_copies(self) -> None:
        """Let what is pulled from here on come from the shards."""
        if self._cache is not None:
            self._cache.clear()

    def flush(self) -> None:
        """Wait until every push is acknowledged. Raises the error of one that was not."""
        with self._changed, span("wait"):
            self._changed.wait_for(lambda: not self._pushes)
            self._raise_failure()

    def close(self) -> BaseException | None:
        """Wait for everything in flight and end the threads; the error that nobody was told of."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        # pulls and pushes end by the client's deadlines, or its waits for other workers; a loader need not end at all
        for thread, seconds in zip(self._threads, [self._source.timeout.total_seconds(), None], strict=False):
            thread.join(seconds)
            if thread.is_alive():
                what = "a pull still waits for other workers" if self._is_pulling else "its loader still makes a batch"
                _log.warning("the loop is over, but %s; its thread is left behind", what)
        self._ready.clear()
        return self._failure

    def _raise_failure(self) -> None:
        if self._failure is not None:
            try:
                raise self._failure
            finally:
                self._failure = None

    def _pull(self, batches: Iterator[B]) -> None:
        """Run the puller's thread."""
        try:
            previous: PullBatch | None = None
            for number, batch in enumerate(self._timed(batches)):
                current = PullBatch(self._source, self._lookups(batch))
                if self._cache is not None:
                    self._cache.age = number
                if previous is not None and not self._failed:
                    current.pull(except_for=previous)
                bound = self._await_bound(number)
                if bound is None:
                    break
                clock, touched, assignments = bound
                if previous is not None:
                    for table, what in touched:
                        if not previous.reads(table, what):
                            current.invalidate(table, what)
                            self._drop_copies(table, what)
                if self._source.lost_leases != self._lost_leases:
                    self._lost_leases = self._source.lost_leases
                    self.forget_copies()  # they go by batches: no clock says that they are of before
                self._is_pulling = True
                current.pull(self._dense, clock=clock)
                self._is_pulling = False
                self._put(Ready(batch, current, assignments))
                previous = current if self._overlap_pulls and self.staleness == 0 else None
        except BaseException as error:  # the training thread raises it
            self._put(error)
        else:
            self._put(None)

    def _drop_copies(self, table: TableKey, what: Route | Ids) -> None:
        if self._cache is None:
            return
        if isinstance(what, BundleRoute):
            for name, route, _ in what.members():
                self._cache.drop(name, route.ids)
        elif isinstance(table, str):
            self._cache.drop(table, what if isinstance(what, np.ndarray) else what.ids)

    def _timed(self, batches: Iterator[B]) -> Iterator[B]:
        while True:
            self._loading = self._loading[0], time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._loading = self.loading_seconds, None
            yield batch

    def _await_bound(self, batch: int) -> tuple[int, list[Touched], int] | None:
        """Wait until a batch may be pulled; None at the end.

        The clock of its step, if every batch before it makes one, what changed since the last batch was taken, and the
        number of assignments so far.
        """
        first = batch - self.staleness  # the first batch whose pushes it need not show
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closing or (self._finished >= first and not (self._pushes and self._pushes[0].batch < first))
                )
            )
            if self._closing:
                return None
            clock = self._start_clock + batch if first <= 0 else self._clocks.popleft() + self.staleness
            return clock, list(self._touched), self.assignments

    def _put(self, ready: Ready[B] | BaseException | None) -> None:
        with self._changed:
            self._ready.append(ready)
            self._changed.notify_all()

    def _push(self) -> None:
        """Run the pusher's thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pushes or self._closing)
                if not self._pushes:
                    return
                push = self._pushes[0]
            try:
                push.send()
            except BaseException as error:  # the training thread raises it
                with self._changed:
                    self._failure, self._failed = self._failure or error, True
            with self._changed:
                self._pushes.popleft()
                self._changed.notify_all()


def loop_staleness(asked: int | None, bound: int | None, cache: CachedRows | None) -> int:
    """The staleness of a prefetch loop in a job with a bound, of which a cache uses up a part.

    ValueError where it is negative or beyond the bound.
    """
    left = bound if bound is None or cache is None else bound - cache.staleness
    staleness = (left or 0) if asked is None else asked
    if staleness < 0:
        raise ValueError(f"staleness must be at least 0, got {staleness}")
    if left is not None and staleness > left:
        less = "" if cache is None else f", with cache_rows(staleness={cache.staleness})"
        raise ValueError(f"prefetch(staleness={staleness}) is beyond connect(staleness={bound}){less}")
    return staleness
