"""From a batch's ids to shards: mix64, buckets, the placement and the Route.

Everything here is part of the contract: worker and shard must agree to the bit, so golden values are tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from embershard.proto.arrays import Floats, Ids
from embershard.proto.compiled.jit import called, compiled
from embershard.proto.compiled.open_addressing import FREE, cell_of
from embershard.proto.shared_memory import SHARED_FROM_BYTES, zero_floats

NUM_BUCKETS = 4096
MAX_EVEN = 2**30  # ids that even_ids gives: 4 TiB of dense weights
BUCKET_SHIFT = 52  # high bits: the hash cells of a shard already use the low ones

Words = npt.NDArray[np.uint64]
Cells = npt.NDArray[np.int32]
Shards = npt.NDArray[np.uint16]

_U = np.uint64
_0, _1 = _U(0), _U(1)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@compiled(types.uint64(types.uint64, types.uint64), inline="always")
def mix64(x: np.uint64, key: np.uint64) -> np.uint64:
    """SplitMix64's finalizer (Steele et al. 2014) of `x ^ key`: a bijection of 64-bit x for every key."""
    z = x ^ key
    z = (z ^ (z >> np.uint64(30))) * _M1
    z = (z ^ (z >> np.uint64(27))) * _M2
    return z ^ (z >> np.uint64(31))


def even_ids(count: int, space_key: int) -> Ids:
    """`count` ids whose hashes rise and lie in the middle of equal shares of the id space, by the inverse of mix64.

    A placement of contiguous shares, whatever its size, routes them in the order in which they are.
    """
    return even_ids_at(np.arange(count), count, space_key)


def even_ids_at(places: Ids, count: int, space_key: int) -> Ids:
    """even_ids(count, space_key)[places], places (U,) int64, of at most MAX_EVEN ids."""
    # ((2 i + 1) << 63) // count, by a long division of halves that fit 64 bits
    high = (2 * places.astype(np.uint64) + _1) << _U(31)
    z: Words = (high // _U(count) << _U(32)) + (high % _U(count) << _U(32)) // _U(count)
    z = (z ^ (z >> _U(31)) ^ (z >> _U(62))) * _U(pow(int(_M2), -1, 2**64))
    z = (z ^ (z >> _U(27)) ^ (z >> _U(54))) * _U(pow(int(_M1), -1, 2**64))
    z = z ^ (z >> _U(30)) ^ (z >> _U(60)) ^ _U(space_key)
    return z.view(np.int64)


@dataclass(frozen=True, slots=True)
class Placement:
    """Which shard holds each bucket; `epoch` grows whenever the map changes."""

    epoch: int
    shards: tuple[int, ...]  # ids of all shards, ascending; one may hold no bucket
    shard_of: Shards  # (4096,)

    @property
    def num_shards(self) -> int:
        """Return the number of shards."""
        return len(self.shards)

    @staticmethod
    def even(num_shards: int, epoch: int = 1) -> Placement:
        """Contiguous, equal shares. ValueError unless 1 <= num_shards <= 4096."""
        if not 1 <= num_shards <= NUM_BUCKETS:
            raise ValueError(f"num_shards must be 1..{NUM_BUCKETS}, got {num_shards}")
        shard_of = (np.arange(NUM_BUCKETS) * num_shards // NUM_BUCKETS).astype(np.uint16)
        return Placement(epoch, tuple(range(num_shards)), shard_of)


@dataclass(frozen=True, slots=True)
class Route:
    """One batch's ids of one id space, unique and grouped by shard.

    ids[splits[s]:splits[s + 1]] belong to shard s, in the order of their first occurrence.
    ids[index] is the flat input. `epoch` is that of the placement that they are grouped by.
    """

    ids: Ids  # (U,) int64, unique
    splits: Ids  # (highest shard + 2,) int64
    index: Ids  # (N,) int64
    space_key: int = field(kw_only=True)
    epoch: int = field(kw_only=True)
    # (table or members, shard): the number under which the shard keeps these ids since a pull; a push may name it in
    # their place
    numbers: dict[tuple[object, int], int] = field(default_factory=dict, compare=False, repr=False)

    def slice_of(self, shard: int) -> slice:
        """Return the slice of the ids (and rows) that belong to a shard of its placement."""
        return slice(int(self.splits[shard]), int(self.splits[shard + 1]))

    def select(self, keep: npt.NDArray[np.bool_]) -> Route:
        """The route of the ids where `keep` ((U,) bool) holds; it has no index, for nothing is read through it."""
        before = np.concatenate(([0], np.cumsum(keep)))
        index = np.empty(0, np.int64)
        return Route(self.ids[keep], before[self.splits], index, space_key=self.space_key, epoch=self.epoch)


@dataclass(frozen=True, slots=True)
class BundleRoute(Route):
    """The ids of several tables of one batch as one route: of a shard's ids, those of one table lie behind the other's.

    ids[index] are the flat inputs of all tables, one behind the other. An id counts once per table.
    """

    tables: tuple[str, ...] = field(kw_only=True)
    space_keys: tuple[int, ...] = field(kw_only=True)  # of each table; space_key says nothing
    counts: Ids = field(kw_only=True)  # (shards, T): how many of a shard's ids are each table's

    def counts_of(self, shard: int, rows: slice) -> tuple[int, ...]:
        """How many ids each table has in a part of a shard's slice."""
        if rows == self.slice_of(shard):
            return tuple(self.counts[shard].tolist())
        ends = self.splits[shard] + np.cumsum(self.counts[shard])
        return tuple(np.diff(np.clip(ends, rows.start, rows.stop), prepend=rows.start).tolist())

    def select(self, keep: npt.NDArray[np.bool_]) -> BundleRoute:
        """The route of the ids where `keep` ((U,) bool) holds, of the tables that have such; it has no index."""
        before = np.concatenate(([0], np.cumsum(keep)))
        ends = before[np.concatenate(([0], np.cumsum(self.counts)))]
        counts = np.diff(ends).reshape(self.counts.shape)
        stay = np.flatnonzero(counts.any(0))
        return replace(
            self,
            ids=self.ids[keep],
            splits=before[self.splits],
            index=np.empty(0, np.int64),
            tables=tuple([self.tables[t] for t in stay]),
            space_keys=tuple([self.space_keys[t] for t in stay]),
            counts=np.ascontiguousarray(counts[:, stay]),
            numbers={},
        )

    def member(self, number: int) -> tuple[Route, Ids]:
        """A table's own route, without an index, and where its ids lie in this one."""
        counts = self.counts[:, number]
        ends = np.cumsum(self.counts).reshape(self.counts.shape)[:, number]
        places = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
        splits, index = np.concatenate(([0], np.cumsum(counts))), np.empty(0, np.int64)
        return Route(self.ids[places], splits, index, space_key=self.space_keys[number], epoch=self.epoch), places

    def members(self) -> Iterator[tuple[str, Route, Ids]]:
        """Each table that has ids: its name, its own route, without an index, and where its ids lie in this one."""
        for number in np.flatnonzero(self.counts.any(0)).tolist():
            yield self.tables[number], *self.member(number)


class RoutedBundle(NamedTuple):
    """A bundle's route, and the least and the largest id of each table: (0, 0) where it has none."""

    route: BundleRoute
    least: list[int]
    largest: list[int]


def make_bundle(
    flat: Ids, ends: Ids, tables: tuple[str, ...], space_keys: tuple[int, ...], placement: Placement
) -> RoutedBundle:
    """Route the flat ids of several tables as one; `ends`, (T,), says where each table's end."""
    keys, num_shards = np.array(space_keys, np.uint64), placement.shards[-1] + 1
    ids, counts, index, bounds = _route_bundle(flat, ends, keys, placement.shard_of, num_shards)
    splits = np.zeros(num_shards + 1, np.int64)
    np.cumsum(counts.sum(1), out=splits[1:])
    route = BundleRoute(
        ids,
        splits,
        index,
        space_key=0,
        epoch=placement.epoch,
        tables=tables,
        space_keys=space_keys,
        counts=counts,
    )
    return RoutedBundle(route, bounds[0].tolist(), bounds[1].tolist())


def make_route(ids: Ids, space_key: int, placement: Placement) -> Route:
    """Route of flat ids ((N,) int64, any order, duplicates welcome), without sorting."""
    return make_routes([(ids, space_key)], placement)[0]


def make_routes(inputs: Sequence[tuple[Ids, int]], placement: Placement) -> list[Route]:
    """The route of every (ids, space key), as `make_route` gives it, in one compiled call for all of them."""
    if not inputs:
        return []
    flats = [np.ascontiguousarray(ids, dtype=np.int64).reshape(-1) for ids, _ in inputs]
    starts = np.array([0, *accumulate(map(len, flats))], np.int64)
    keys = np.array([key for _, key in inputs], np.uint64)
    flat = flats[0] if len(flats) == 1 else np.concatenate(flats)
    ids, splits, index = _route(flat, starts, keys, placement.shard_of, placement.shards[-1] + 1)
    routes = []
    first = 0
    for number, ((start, stop), (_, key)) in enumerate(zip(pairwise(starts.tolist()), inputs, strict=True)):
        last = first + int(splits[number, -1])
        part = Route(ids[first:last], splits[number], index[start:stop], space_key=key, epoch=placement.epoch)
        routes.append(part)
        first = last
    return routes


def regroup(route: Route, placement: Placement) -> Route:
    """The route of a route's ids under another placement, where regrouped.ids[regrouped.index] == route.ids.

    Rows ((U, dim), in the order of the regrouped route) are rows[regrouped.index] in that of the old one.
    """
    return make_route(route.ids, route.space_key, placement)


def ascending(route: Route) -> Route:
    """The same route, each shard's ids in ascending order: so they take fewer bytes (proto/codec/ids.py)."""
    if route.ids.size and int(route.ids.max()) - int(route.ids.min()) < _NARROW:
        ids, index = _ascend(route.ids, route.splits, route.index)
        return Route(ids, route.splits, index, space_key=route.space_key, epoch=route.epoch)
    order = np.concatenate([np.argsort(route.ids[a:b]) + a for a, b in pairwise(route.splits.tolist())])
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    ids, index = route.ids[order], places[route.index]
    return Route(ids, route.splits, index, space_key=route.space_key, epoch=route.epoch)


_BLOCK = 256  # ids looked up together
_ROUTE_SIGNATURE = types.Tuple((types.int64[::1], types.int64[:, ::1], types.int64[::1]))(
    types.Array(types.int64, 1, "C", readonly=True),
    types.int64[::1],
    types.uint64[::1],
    types.Array(types.uint16, 1, "C", readonly=True),
    types.int64,
)


@called
def _number(ids: Ids, key: np.uint64, cells: Cells, unique: Ids, index: Ids, homes: Words, missed: Words) -> np.uint64:
    """Number ids by first occurrence: fills unique and index, and gives how many there are.

    cells: a power of two, four times the ids at least, so that few leave their home.
    homes, missed: scratch of _BLOCK and _BLOCK + 1.
    Most ids of a batch came before and lie in their home cell. Whether one does cannot be predicted, so that a first
    loop without branches finds those, and a second one probes and inserts the rest, in order.
    """
    cells[:] = FREE  # position of an id in `unique`
    shift = _U(64)
    while _1 << (_U(64) - shift) < _U(cells.size):
        shift -= _1
    count = _0
    for start in range(_0, _U(ids.size), _U(_BLOCK)):
        stop = min(start + _U(_BLOCK), _U(ids.size))
        for i in range(start, stop):
            homes[i - start] = mix64(_U(ids[i]), key) * _M1 >> shift  # low bits alone are equal in all of even_ids
        num_missed = _0
        for i in range(start, stop):
            u = cells[homes[i - start]]
            at = _U(max(u, np.int32(0)))
            index[i] = np.int64(at)
            missed[num_missed] = i
            num_missed += _U((u < 0) | (unique[at] != ids[i]))
        for m in range(num_missed):
            i = missed[m]
            cell = cell_of(ids[i], homes[i - start], cells, unique)
            if cells[cell] < 0:
                cells[cell] = np.int32(count)
                unique[count] = ids[i]
                count += _1
            index[i] = cells[cell]
    return count


@called
def _group(unique: Ids, key: np.uint64, shard_of: Shards, places: Cells, grouped: Ids, splits: Ids, index: Ids) -> None:
    """Group unique ids by shard, in their order, and let index follow. places: scratch of unique.size."""
    num_shards = splits.size - 1
    if num_shards == 1:
        for u in range(_U(unique.size)):  # `grouped[:] = unique` compiles for 1.4 s: it can raise an error with a text
            grouped[u] = unique[u]
        splits[1] = unique.size
        return
    for u in range(_U(unique.size)):
        places[u] = shard_of[mix64(_U(unique[u]), key) >> _U(BUCKET_SHIFT)]
        splits[_U(places[u]) + _1] += 1
    for s in range(num_shards):
        splits[s + 1] += splits[s]
    fill = splits[:num_shards].copy()
    for u in range(_U(unique.size)):
        shard = _U(places[u])
        place = fill[shard]
        fill[shard] = place + 1
        places[u] = np.int32(place)
        grouped[_U(place)] = unique[u]
    for i in range(_U(index.size)):
        index[i] = places[_U(index[i])]


@compiled(_ROUTE_SIGNATURE, at_start=True)
def _route(
    ids: Ids, starts: Ids, keys: Words, shard_of: Shards, num_shards: int
) -> tuple[Ids, npt.NDArray[np.int64], Ids]:
    """Routes of ids[starts[t]:starts[t + 1]] for every t: grouped ids one behind the other, splits and index."""
    num_tables = keys.size
    size = 16
    while size < 4 * ids.size:
        size *= 2
    cells = np.empty(size, np.int32)
    homes, missed = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK + 1, np.uint64)
    unique = np.empty(ids.size + 1, np.int64)  # one more: an id is compared before there is any
    index = np.empty(ids.size, np.int64)
    counts = np.empty(num_tables, np.int64)
    num_unique = 0  # no counts.sum(): to load code that uses numpy's reductions imports scipy
    for t in range(num_tables):
        start, stop = starts[t], starts[t + 1]
        size = 16
        while size < 4 * (stop - start):
            size *= 2
        counts[t] = _number(ids[start:stop], keys[t], cells[:size], unique[start:], index[start:stop], homes, missed)
        num_unique += counts[t]
    grouped = np.empty(num_unique, np.int64)
    splits = np.zeros((num_tables, num_shards + 1), np.int64)
    first = 0
    for t in range(num_tables):
        start, last = starts[t], first + counts[t]
        seen = unique[start : start + counts[t]]
        _group(seen, keys[t], shard_of, cells, grouped[first:last], splits[t], index[start : starts[t + 1]])
        first = last
    return grouped, splits, index


@compiled(
    types.Tuple((types.int64[::1], types.int64[:, ::1], types.int64[::1], types.int64[:, ::1]))(
        types.Array(types.int64, 1, "C", readonly=True),
        types.Array(types.int64, 1, "C", readonly=True),
        types.uint64[::1],
        types.Array(types.uint16, 1, "C", readonly=True),
        types.int64,
    )
)
def _route_bundle(
    ids: Ids, ends: Ids, keys: Words, shard_of: Shards, num_shards: int
) -> tuple[Ids, npt.NDArray[np.int64], Ids, npt.NDArray[np.int64]]:
    """Grouped ids, counts (shards, T), index, and least and largest id of each table, (2, T)."""
    longest, begin = 0, 0
    for t in range(ends.size):
        longest, begin = max(longest, ends[t] - begin), ends[t]
    size = 16
    while size < 4 * longest:
        size *= 2
    cells = np.empty(size, np.int32)
    homes, missed = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK + 1, np.uint64)
    unique, shards = np.empty(ids.size + 1, np.int64), np.zeros(ids.size, np.uint16)
    index, numbers = np.empty(ids.size, np.int64), np.empty(ends.size, np.int64)
    counts, bounds = np.zeros((num_shards, ends.size), np.int64), np.zeros((2, ends.size), np.int64)
    begin = 0
    for t in range(ends.size):
        size = 16
        while size < 4 * (ends[t] - begin):
            size *= 2
        part = ids[begin : ends[t]]
        found = np.int64(_number(part, keys[t], cells[:size], unique[begin:], index[begin : ends[t]], homes, missed))
        numbers[t] = found
        if found:
            bounds[0, t] = bounds[1, t] = unique[begin]
        for u in range(begin, begin + found):
            bounds[0, t], bounds[1, t] = min(bounds[0, t], unique[u]), max(bounds[1, t], unique[u])
            if num_shards > 1:
                shards[u] = shard_of[mix64(_U(unique[u]), keys[t]) >> _U(BUCKET_SHIFT)]
            counts[shards[u], t] += 1
        begin = ends[t]
    fill, total = np.empty((num_shards, ends.size), np.int64), 0
    for s in range(num_shards):
        for t in range(ends.size):
            fill[s, t] = total
            total += counts[s, t]
    grouped = np.empty(total, np.int64)
    begin = 0
    for t in range(ends.size):
        for u in range(begin, begin + numbers[t]):
            place = fill[shards[u], t]
            fill[shards[u], t] = place + 1
            grouped[place] = unique[u]
            cells[u - begin] = place
        for i in range(begin, ends[t]):
            index[i] = cells[index[i]]
        begin = ends[t]
    return grouped, counts, index, bounds


_DIGIT_BITS = _U(11)  # of a radix sort: its counters stay in the first cache
_DIGITS = 1 << 11
_NARROW = 2**33  # between the least and the largest id: three digits; with six, as of hashes, comparing is faster
_READ = types.Array(types.int64, 1, "C", readonly=True)


@called
def _sort(ids: Ids, keys: npt.NDArray[np.uint64], order: Cells, counts: Ids) -> Cells:
    """Positions of ids in ascending order, by their digits from the lowest. keys, order: (2, U) scratch, U < 2^31."""
    least, most = ids[0], ids[0]  # U > 0
    for i in range(_U(ids.size)):
        least, most = min(least, ids[i]), max(most, ids[i])
    span = _U(most) - _U(least)  # modulo 2^64: the difference of two int64 may have 64 bits
    for i in range(_U(ids.size)):
        keys[0, i], order[0, i] = _U(ids[i]) - _U(least), np.int32(i)
    now, shift = 0, _0
    while shift < _U(64) and span >> shift:
        counts[:] = 0
        for i in range(_U(ids.size)):
            counts[(keys[now, i] >> shift) & _U(_DIGITS - 1)] += 1
        total = 0
        for digit in range(_DIGITS):
            total, counts[digit] = total + counts[digit], total
        for i in range(_U(ids.size)):
            digit = (keys[now, i] >> shift) & _U(_DIGITS - 1)
            at = _U(counts[digit])
            counts[digit] += 1
            keys[1 - now, at], order[1 - now, at] = keys[now, i], order[now, i]
        now, shift = 1 - now, shift + _DIGIT_BITS
    found: Cells = order[now]
    return found


@compiled(types.Tuple((types.int64[::1], types.int64[::1]))(_READ, _READ, _READ))
def _ascend(ids: Ids, splits: Ids, index: Ids) -> tuple[Ids, Ids]:
    """ids with each part ids[splits[s]:splits[s + 1]] in ascending order, and the index that goes with them."""
    ordered, places, followed = np.empty_like(ids), np.empty_like(ids), np.empty_like(index)
    keys, order = np.empty((2, ids.size), np.uint64), np.empty((2, ids.size), np.int32)
    counts = np.empty(_DIGITS, np.int64)
    for s in range(splits.size - 1):
        start, stop = splits[s], splits[s + 1]
        if start == stop:
            continue
        found = _sort(ids[start:stop], keys[:, : stop - start], order[:, : stop - start], counts)
        for i in range(found.size):
            at = start + found[i]
            ordered[start + i], places[at] = ids[at], start + i
    for i in range(_U(index.size)):
        followed[i] = places[_U(index[i])]
    return ordered, followed


def sum_rows(index: Ids, rows: Floats, num_rows: int) -> Floats:
    """(num_rows, dim) float32: the sum of all rows[i] with index[i] == u, added in the order of i.

    index: (N,) int64, each at least 0 and below num_rows, as Route.index. rows: (N, dim) float32, C-ordered.
    The bits are those of torch's index_add_ (bench/kernels.py compares the time).
    """
    shape = num_rows, rows.shape[1]
    out = zero_floats(*shape) if 4 * num_rows * rows.shape[1] >= SHARED_FROM_BYTES else np.zeros(shape, np.float32)
    _sum_rows(index, rows, out)
    return out


@compiled(
    types.void(
        types.Array(types.int64, 1, "C", readonly=True),
        types.Array(types.float32, 2, "C", readonly=True),
        types.float32[:, ::1],
    ),
    at_start=True,
)
def _sum_rows(index: Ids, rows: Floats, out: Floats) -> None:
    for i in range(index.size):
        u = np.uint64(index[i])  # unsigned: no test for negative ones
        for j in range(np.uint64(rows.shape[1])):
            out[u, j] += rows[i, j]
