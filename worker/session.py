"""One worker's training: tables and dense weights read at a clock, gradients collected, and pushed at each step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import count
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from embershard.proto.routing import Placement, Route, make_route
from embershard.proto.spec import TableSpec
from embershard.worker.addresses import parse_addresses
from embershard.worker.announce import Inputs, WrappedModel, reads_of_batches
from embershard.worker.client import DEFAULT_TIMEOUT, Client, Stats
from embershard.worker.dense import DenseWeights
from embershard.worker.gradients import RowGradients, merge
from embershard.worker.pipeline import Pipeline
from embershard.worker.reads import Ahead, Fetch, Read, Reads, Wanted
from embershard.worker.row_cache import RowCaches
from embershard.worker.spans import span

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
B = TypeVar("B")

_TRIAL = 3  # batches after which it is clear that pulling ahead is in vain
_IN_VAIN = (
    "prefetch pulls rows that the model does not read, and the model waits for others: what `inputs`, or the model's "
    "embedding_inputs, gives for a batch must hold the very ids that each embedding is called with"
)

_log = logging.getLogger(__name__)


class RemoteTable:
    """One table of a session, declared on every shard."""

    def __init__(self, session: Session, spec: TableSpec) -> None:
        self.session = session
        self.spec = spec

    def pull(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of `ids` (any shape, int32 or int64) as they are now, (*ids.shape, dim), apart from autograd."""
        read = self.session.pull([Wanted(self, ids, ids.device)])[self.spec.name][0]
        return read.rows[read.index]

    def load(self, route: Route, rows: Floats, *, keep_state: bool = False) -> None:
        """Assign rows ((U, dim) float32, in route order); their optimizer's state starts anew, unless it is kept."""
        self.session.load(self, route, rows, keep_state=keep_state)

    def route(self, ids: torch.Tensor) -> Route:
        """The route of a tensor of ids. RuntimeError unless they are int32 or int64."""
        return make_route(self.flat(ids), self.spec.space_key, self.session.placement)

    def flat(self, ids: torch.Tensor) -> Ids:
        """Ids as (N,) int64 on the host. RuntimeError unless they are int32 or int64."""
        if ids.dtype not in (torch.int64, torch.int32):
            raise RuntimeError(f"table {self.spec.name!r}: ids must be int64 or int32, got {ids.dtype}")
        return ids.detach().to("cpu", torch.int64).contiguous().view(-1).numpy()

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            f"table {self.spec.name!r} lives on the shards and cannot be copied; copy the model before wrapping it"
        )

    __reduce__ = __deepcopy__  # type: ignore[assignment]


class Session:
    """A worker's connection to the shards, and its clock.

    One thread trains with a session: forward, backward, `step()`. With `zero_grad()` and `step()` it stands where a
    training loop expects an optimizer. `lr_scale` multiplies the learning rate of every following push.

    Inside `for batch in session.prefetch(loader):` rows are pulled before they are needed and pushes are on their way
    while the loop goes on; everywhere else a forward waits for its rows, and a step for its push.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.clock = 0
        self.lr_scale = 1.0
        self._tables: dict[str, RemoteTable] = {}
        self._dense: list[DenseWeights] = []
        self._models: list[WrappedModel] = []
        self._collected: list[RowGradients] = []
        self._ahead = Ahead()
        self._pipeline: Pipeline[Any] | None = None  # inside `prefetch`
        self._failure: BaseException | None = None  # of a push, in a loop that was left before it was known
        self._waited = 0.0  # seconds
        self._caches: RowCaches | None = None

    @property
    def placement(self) -> Placement:
        """Where ids live."""
        return self.client.placement

    @property
    def table_names(self) -> frozenset[str]:
        """Tables that this session declared."""
        return frozenset(self._tables)

    @property
    def stats(self) -> Stats:
        """Counters since the start; `wait_seconds` is what the training thread waited for rows and for pushes."""
        stats = replace(self.client.stats, wait_seconds=self._waited)
        if self._caches is not None:
            counts = self._caches.counts
            stats = replace(stats, cache_hits=counts.hits, cache_lookups=counts.lookups)
        return stats

    def cache_rows(self, rows: int = 100_000, staleness: int = 4) -> None:
        """Keep copies of up to `rows` hot rows per table in this process, and read them for `staleness` clocks.

        A forward at clock t (in `prefetch`: at batch t, beyond its own bound) then shows at least this worker's pushes
        up to t - 1 - staleness. `stats` counts the rows that were looked up and found. Dense weights, `pull`, and what
        a loop reads beyond its prefetched rows are never taken from copies; `load` and `refresh` drop them. Where
        max_norm scales a copy, it may take back pushes that the copy does not show. ValueError unless both are above
        zero.
        """
        self._caches = RowCaches(rows, staleness)

    @property
    def missed_reads(self) -> int:
        """Reads inside `prefetch` of rows that had not been pulled ahead."""
        return self._ahead.missed

    def table(self, spec: TableSpec, values: Callable[[], Iterable[tuple[Ids, Floats]]] | None = None) -> RemoteTable:
        """The table of `spec`, created where it does not exist.

        `values` gives its first (ids, rows) in portions; they are loaded by the worker that created the table, and
        every other worker waits until that is done. TableMismatch where the shards hold other settings.
        """
        known = self._tables.get(spec.name)
        if known is not None and known.spec == spec:
            return known
        created = self.client.declare(spec, load=values is not None)
        if values is not None and created:
            for ids, rows in values():
                route = make_route(ids, spec.space_key, self.placement)
                order = np.empty(len(route.ids), np.int64)
                order[route.index] = np.arange(len(ids))
                self.client.load(spec.name, route, rows[order], shards=created, last=False)
            nothing = make_route(np.empty(0, np.int64), spec.space_key, self.placement)
            self.client.load(spec.name, nothing, np.empty((0, spec.dim), np.float32), shards=created)
        if values is not None:
            self.client.await_loaded(spec.name)
        table = self._tables[spec.name] = RemoteTable(self, spec)
        return table

    def add_dense(self, dense: DenseWeights) -> None:
        """Pull and push these dense weights with the tables."""
        self.table(dense.spec, lambda: [(dense.ids, dense.values())])
        self._dense.append(dense)

    def add_model(self, model: WrappedModel) -> None:
        """Let `prefetch` know a model and what it says of its reads."""
        self._models.append(model)

    def read(self, table: RemoteTable, ids: torch.Tensor, device: torch.device) -> Read:
        """Rows for a tensor of ids: those pulled ahead for these ids, or pulled now."""
        want = Wanted(table, ids, device)
        return self._ahead.find(want) or self._pull([want], caches=self._caches)[table.spec.name][0]

    def read_ahead(self, wanted: Sequence[Wanted], dense: Sequence[DenseWeights] = ()) -> None:
        """Pull what is not here yet, and the dense weights that are out of date, in one request per shard."""
        self._ahead.forward = {}
        stale = [weights for weights in dense if weights.stale(self.clock)]
        found = [(want, self._ahead.find(want)) for want in wanted]
        missing = [want for want, read in found if read is None]
        ahead = self._pull(missing, stale, self._caches) if missing or stale else {}
        for want, read in found:
            if read is not None:
                ahead.setdefault(want.table.spec.name, []).append(read)
        self._ahead.forward = ahead

    def forget_ahead(self) -> None:
        """Let go of what was pulled for one forward."""
        self._ahead.forward = {}

    def pull(self, wanted: Sequence[Wanted], dense: Sequence[DenseWeights] = ()) -> Reads:
        """Rows and dense weights as they are now, after every push before, in one request per shard."""
        return self._pull(wanted, dense)

    def _pull(
        self, wanted: Sequence[Wanted], dense: Sequence[DenseWeights] = (), caches: RowCaches | None = None
    ) -> Reads:
        self.flush()
        if self._pipeline is not None:  # its caches go by batches
            caches = None
        fetch = Fetch(wanted)
        with self._waiting():
            fetch.pull(self.client, dense, caches=caches, clock=self.clock)
        return fetch.accept(self.clock)

    def load(self, table: RemoteTable, route: Route, rows: Floats, *, keep_state: bool = False) -> None:
        """Assign rows, after every push before; what was pulled ahead of the table is no longer up to date."""
        self.flush()
        with self._waiting():
            self.client.load(table.spec.name, route, rows, keep_state=keep_state)
        self._ahead.forget(table.spec.name)
        if self._caches is not None:
            self._caches.drop(table.spec.name, route.ids)
        if self._pipeline is not None:
            self._pipeline.touch(table.spec.name, route)

    def collect(self, gradients: RowGradients) -> None:
        """Keep gradients until the next step."""
        self._collected.append(gradients)

    def step(self) -> None:
        """Push what backward left, to all shards at once, and advance the clock; `stats` counts the rows.

        Gradients are cleared, so that no zero_grad is needed. It waits for the shards; inside `prefetch` it does not,
        unless too many pushes are on their way. There it first raises the error of an earlier push, if there was one,
        and has done nothing then. If a shard gives no answer in time, its part of the push is sent again, once, with
        the next step.
        """
        if self._pipeline is None:
            self.flush()
        else:
            self._pipeline.check()
        with span("push"):
            gradients = merge(self._collected, self.placement)
            gradients += [part for weights in self._dense if (part := weights.gradients()) is not None]
            self._collected.clear()
            self._ahead.forget()
            clock, self.clock = self.clock, self.clock + 1
            with self._waiting():
                if self._pipeline is None:
                    self.client.push(gradients, clock=clock, lr_scale=self.lr_scale)
                else:
                    self._pipeline.submit(gradients, clock, self.lr_scale)

    def prefetch(
        self,
        loader: Iterable[B],
        *,
        staleness: int = 0,
        inputs: Inputs[B] | None = None,
    ) -> Iterator[B]:
        """The loader's batches, each with its rows and the dense weights pulled ahead, while pushes are on their way.

        A batch shows this worker's pushes of all batches before it but the last `staleness` ones; with 0 the weights
        have the same bits as without prefetch. At most staleness + 1 pushes are in flight. The loader, and what says
        which ids a batch reads, run in a thread of their own, some batches ahead: `inputs(batch)` gives the ids by
        embedding module (of several models: by table), and defaults to the model's `embedding_inputs`, called with
        the batch, or with the parts of a batch that is a tuple or list. Rows that the model reads beyond these are
        pulled when it does.

        Errors of the loader, of pulls and of pushes are raised where the next batch is taken, those of pushes also by
        `step`; after a `break`, by the next use of the session. When the loop is left, everything in flight has been
        waited for. With a staleness above 0, max_norm may take back what a push in flight did to the rows it scales.

        ValueError where nothing says what a batch reads, or for a negative staleness; RuntimeError inside another
        prefetch of this session.
        """
        if staleness < 0:
            raise ValueError(f"staleness must be at least 0, got {staleness}")
        tables = [table for table in self._tables.values() if all(table.spec is not w.spec for w in self._dense)]
        wanted = reads_of_batches(self._models, tables, inputs)
        caches = None if self._caches is None else self._caches.fresh()
        return self._run(Pipeline(self.client, wanted, self._dense, staleness, caches), loader)

    def _run(self, pipeline: Pipeline[B], loader: Iterable[B]) -> Iterator[B]:
        if self._pipeline is not None:
            raise RuntimeError(
                "this session is inside a prefetch loop already; leave that one first, by loop.close() if it has a name"
            )
        self.flush()
        batches = iter(loader)
        self._pipeline = pipeline
        missed, found = self._ahead.missed, self._ahead.found
        try:
            pipeline.start(batches)
            for number in count(1):
                with self._waiting():
                    ready = pipeline.next()
                if ready is None:
                    break
                self._ahead.batch = ready.fetch.accept(self.clock)
                batch = ready.batch
                del ready
                yield batch
                self._ahead.batch = {}
                if number == _TRIAL and self._ahead.missed > missed and self._ahead.found == found:
                    _log.warning(_IN_VAIN)
        except BaseException:
            self._leave(pipeline)
            self._log_failure()
            raise
        self._leave(pipeline)
        self.flush()

    def _leave(self, pipeline: Pipeline[B]) -> None:
        self._pipeline = self._ahead.batch = None
        self._failure = pipeline.close()

    def _log_failure(self) -> None:
        """Say what cannot be raised: an error of the loop is, or nobody asks any more."""
        if self._failure is not None:
            _log.error("a push failed as the loop was left: %s", self._failure)

    def flush(self) -> None:
        """Wait until every push is acknowledged; raises the error of one that was not."""
        if self._pipeline is not None:
            with self._waiting():
                self._pipeline.flush()
        if self._failure is not None:
            try:
                raise self._failure
            finally:
                self._failure = None

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Time that the training thread spends for the shards."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - start

    def zero_grad(self) -> None:
        """Drop the gradients collected since the last step."""
        self._collected.clear()
        for weights in self._dense:
            weights.clear()

    def refresh(self) -> None:
        """Read everything anew at the next forward, for instance to evaluate what other workers pushed.

        Inside `prefetch`, batches that were pulled ahead already keep their rows.
        """
        if self._caches is not None:
            self._caches = self._caches.fresh()
        if self._pipeline is not None:
            self._pipeline.forget_copies()
        self._ahead.forget()
        for weights in self._dense:
            weights.forget()

    def close(self) -> None:
        """Wait for what is in flight and close the connections; what was not pushed is dropped."""
        if self._pipeline is not None:
            self._leave(self._pipeline)
            self._log_failure()
        self._collected.clear()
        self._ahead.forget()
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError("a session holds connections and cannot be copied; copy the model before wrapping it")

    __reduce__ = __deepcopy__  # type: ignore[assignment]


def connect(addresses: str | Sequence[str], *, worker: int = 0, timeout: timedelta = DEFAULT_TIMEOUT) -> Session:
    """A session with the shards at `addresses` ("host:port,host:port" or a list), in any order.

    Waits for shards that start later; every later call, too, ends by `timeout`. BadAddress where one cannot be.
    """
    return Session(Client.connect(parse_addresses(addresses), worker=worker, timeout=timeout))
