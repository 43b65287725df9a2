"""Copies of hot rows in the worker, each no older than a bound in clocks.

A copy pulled at clock c shows this worker's acknowledged pushes before c. With staleness s it is read until clock
c + s, so that a read at clock t shows at least the pushes up to t - 1 - s. A push leaves copies as they are: nearly
every row that is read is pushed, and a cache without those would be empty. A load drops its rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import types

from embershard.proto.arrays import Floats, Ids
from embershard.proto.compiled.jit import compiled, inlined
from embershard.proto.messages import Pushed, TableKey
from embershard.proto.routing import Route, mix64
from embershard.worker.client.push import Gradients, Versions
from embershard.worker.compression.compressor import LrScale
from embershard.worker.session.row_source import RowSource, WrappedSource

Counts = npt.NDArray[np.uint8]
Places = tuple[Ids, Ids, Counts, Counts]

_WAYS = 8  # places of an id: their tags fill one cache line
_NEVER = -(2**62)  # the clock of a free place
_PERIOD = 16  # clocks after which uses count half

_U = np.uint64
_0, _1 = _U(0), _U(1)


class RowCache:
    """Copies of at most `rows` rows of one table. Every method may be called from any thread.

    An id has 8 places. A row that was pulled takes the place of the least used one among them if it was used as often,
    or more often than one that is still young enough (the admission of TinyLFU, Einziger et al. 2017): rows that come
    once do not push out those that come in every batch. Uses are counted also of ids without a place, and halved now
    and then.
    """

    def __init__(self, rows: int, dim: int, staleness: int) -> None:
        ways = min(_WAYS, rows)
        shape = (rows // ways, ways)
        self.staleness = staleness
        self._places = (
            np.zeros(shape, np.int64),  # the id of each place
            np.full(shape, _NEVER, np.int64),  # and the clock of its copy
            np.zeros(shape, np.uint8),  # its uses
            np.zeros(1 << max(18, (8 * rows).bit_length()), np.uint8),  # uses of other ids, by hash
        )
        self._rows = np.empty((shape[0] * ways, dim), np.float32)  # memory is taken as places are
        self._halved: int | None = None  # the clock at which uses were, or the first one
        self._lock = threading.Lock()

    def lookup(self, ids: Ids, clock: int, out: Floats) -> Ids:
        """Fill `out` ((U, dim) float32) with the rows of unique ids ((U,) int64) that are here; where it did not."""
        missed = np.empty(len(ids), np.int64)
        with self._lock:
            count = _lookup(ids, clock - self.staleness, self._places, self._rows, out, missed)
        return missed[:count]

    def store(self, ids: Ids, rows: Floats, clock: int) -> None:
        """Keep rows ((U, dim) float32) that were pulled at `clock`, as far as they are worth it."""
        with self._lock:
            if self._halved is None:
                self._halved = clock  # whatever it is: a resumed run counts from 0
            if clock - self._halved >= _PERIOD:
                self._halved = clock
                for uses in self._places[2:]:
                    np.right_shift(uses, 1, out=uses)
            _store(ids, rows, clock, clock - self.staleness, self._places, self._rows)

    def drop(self, ids: Ids) -> None:
        """Forget rows that were changed in another way than by a push."""
        with self._lock:
            _drop(ids, self._places)


@dataclass(slots=True)
class CacheCounts:
    """Counters of a session's row caches: hits, lookups."""

    hits: int = 0  # rows
    lookups: int = 0


class CachedRows(WrappedSource):
    """A source of rows that keeps copies of at most `rows` rows of each table and gives them for `staleness` clocks.

    `age` is the clock by which copies age; its owner sets it before a pull. Dense weights are always pulled.
    ValueError unless rows and staleness are above zero.
    """

    def __init__(
        self,
        source: RowSource,
        rows: int,
        staleness: int,
        *,
        is_dense: Callable[[str], bool],
        counts: CacheCounts | None = None,
    ) -> None:
        if rows < 1:
            raise ValueError(f"cache rows must be at least 1, got {rows}")
        if staleness < 1:
            raise ValueError(f"cache staleness must be at least 1 clock, got {staleness}; without a cache it is 0")
        super().__init__(source)
        self.staleness, self.age = staleness, 0
        self.counts = counts or CacheCounts()
        self._size, self._is_dense = rows, is_dense
        self._tables: dict[str, RowCache] = {}
        self._lock = threading.Lock()

    def for_another_clock(self) -> CachedRows:
        """An empty cache over the same source, with the same counters."""
        return CachedRows(self._source, self._size, self.staleness, is_dense=self._is_dense, counts=self.counts)

    def clear(self) -> None:
        """Have what is pulled from here on come from the source."""
        self._tables = {}  # a pull that is under way may still bring old rows, into copies that nobody reads any more

    def drop(self, table: str, ids: Ids) -> None:
        """Forget rows that were changed in another way than by a push of the step that read them."""
        if (cache := self._tables.get(table)) is not None:
            cache.drop(ids)

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
        """Pull as RowSource.pull does, but not the rows of which there is a copy that is young enough.

        No ids are kept for the push: a pull asks for a part of those that are pushed. The versions of copies are not
        known, and `versions` become 0. An `exact` pull goes past the copies.
        """
        if exact or out is None:
            return self._source.pull(reads, out, keep=keep, clock=clock, versions=versions, exact=exact)
        age, missing, places = self.age, list[tuple[TableKey, Route]](), list[Floats]()
        kept: list[tuple[RowCache, Ids, Floats, Ids, Floats]] = []
        for (table, route), rows in zip(reads, out, strict=True):
            pulled = rows
            assert isinstance(table, str)  # see WrappedSource.in_bundles
            if not self._is_dense(table):
                cache = self._cache_of(table, rows.shape[1])
                missed = cache.lookup(route.ids, age, rows)
                self._count(len(route.ids), len(route.ids) - len(missed))
                if not len(missed):
                    continue
                if len(missed) < len(route.ids):
                    take = np.zeros(len(route.ids), np.bool_)
                    take[missed] = True
                    route, pulled = route.select(take), np.empty((len(missed), rows.shape[1]), np.float32)
                kept.append((cache, route.ids, pulled, missed, rows))
            missing.append((table, route))
            places.append(pulled)
        if versions is not None:
            versions.update(dict.fromkeys(self.placement.shards, 0))
        if missing:
            # a copy is as far from what a later step wants to see as its own clock
            self._source.pull(missing, places, clock=None if clock is None else clock + self.staleness)
        for cache, ids, pulled, missed, rows in kept:
            if pulled is not rows:
                rows[missed] = pulled
            cache.store(ids, pulled, age)
        return list(out)

    def push(
        self,
        gradients: Gradients,
        *,
        clock: int,
        lr_scale: LrScale = 1.0,
        weight: float = 1.0,
        versions: Versions | None = None,
    ) -> Pushed:
        """Push as RowSource.push does; copies stay as they are."""
        return self._source.push(gradients, clock=clock, lr_scale=lr_scale, weight=weight, versions=versions)

    def load(self, table: str, route: Route, rows: Floats, *, keep_state: bool = False) -> None:
        """Load as RowSource.load does, and drop the copies of these rows."""
        self._source.load(table, route, rows, keep_state=keep_state)
        self.drop(table, route.ids)

    def _cache_of(self, table: str, dim: int) -> RowCache:
        with self._lock:
            if table not in self._tables:
                self._tables[table] = RowCache(self._size, dim, self.staleness)
            return self._tables[table]

    def _count(self, lookups: int, hits: int) -> None:
        with self._lock:
            self.counts.lookups += lookups
            self.counts.hits += hits


_IDS = types.Array(types.int64, 1, "C", readonly=True)
_NEW = types.Array(types.float32, 2, "C", readonly=True)
_ROWS = types.float32[:, ::1]
_PLACES = types.Tuple((types.int64[:, ::1], types.int64[:, ::1], types.uint8[:, ::1], types.uint8[::1]))


@inlined
def _set_of(h: np.uint64, num_sets: int) -> np.uint64:
    return ((h >> _U(32)) * _U(num_sets)) >> _U(32)


@inlined
def _place_of(id_: np.int64, s: np.uint64, tags: Ids, clocks: Ids) -> np.uint64:
    """The place of an id in its set, or how many there are."""
    ways = _U(tags.shape[1])
    found = ways
    for w in range(ways):
        if tags[s, w] == id_ and clocks[s, w] != _NEVER:
            found = _U(w)
    return found


@compiled(types.int64(_IDS, types.int64, _PLACES, _ROWS, _ROWS, types.int64[::1]))
def _lookup(ids: Ids, oldest: int, places: Places, rows: Floats, out: Floats, missed: Ids) -> int:
    tags, clocks, uses, _ = places
    ways = _U(tags.shape[1])
    count = _0
    for i in range(_U(ids.size)):
        s = _set_of(mix64(_U(ids[i]), _0), tags.shape[0])
        w = _place_of(ids[i], s, tags, clocks)
        if w < ways:
            uses[s, w] += uses[s, w] < 255
            if clocks[s, w] >= oldest:
                for j in range(_U(out.shape[1])):
                    out[i, j] = rows[s * ways + w, j]
                continue
        missed[count] = i
        count += _1
    return int(count)


@compiled(types.void(_IDS, _NEW, types.int64, types.int64, _PLACES, _ROWS))
def _store(ids: Ids, new: Floats, clock: int, oldest: int, places: Places, rows: Floats) -> None:
    tags, clocks, uses, others = places
    ways = _U(tags.shape[1])
    last = _U(others.size - 1)
    for i in range(_U(ids.size)):
        h = mix64(_U(ids[i]), _0)
        s = _set_of(h, tags.shape[0])
        w = _place_of(ids[i], s, tags, clocks)
        if w == ways:
            others[h & last] += others[h & last] < 255
            mine = others[h & last]
            w, least = _0, 1 << 30
            for v in range(ways):
                worth = -1 if clocks[s, v] == _NEVER else 2 * np.int64(uses[s, v]) + (clocks[s, v] >= oldest)
                if worth < least:
                    w, least = _U(v), worth
            if least > 2 * np.int64(mine):
                continue
            if least >= 0:
                others[mix64(_U(tags[s, w]), _0) & last] = uses[s, w]
            tags[s, w] = ids[i]
            uses[s, w] = mine
        clocks[s, w] = clock
        for j in range(_U(new.shape[1])):
            rows[s * ways + w, j] = new[i, j]


@compiled(types.void(_IDS, _PLACES))
def _drop(ids: Ids, places: Places) -> None:
    tags, clocks, _, _ = places
    for i in range(_U(ids.size)):
        s = _set_of(mix64(_U(ids[i]), _0), tags.shape[0])
        w = _place_of(ids[i], s, tags, clocks)
        if w < _U(tags.shape[1]):
            clocks[s, w] = _NEVER
