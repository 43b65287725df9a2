"""The compiled inner loops of snapshots: old records kept, records read by slot, slots sorted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from embershard.proto.arrays import Floats, Ids
from embershard.proto.compiled import intrinsics
from embershard.proto.compiled.intrinsics import detached, prefetch
from embershard.proto.compiled.jit import compiled
from embershard.proto.routing import BUCKET_SHIFT, NUM_BUCKETS, mix64
from embershard.ps.table import hash_index as store_module
from embershard.ps.table.hash_index import HASH_INDEX, HEADER, HashIndex, find, home_of, open_store, probe

Slots = npt.NDArray[np.uint32]

BLOCK = 64  # ids in flight, as in kernels.py
READ = 2**32 - 1  # in `places`: the snapshot has the row, what becomes of it matters no more

_PARTS = (intrinsics, store_module)
_IDS = types.Array(types.int64, 1, "C", readonly=True)
_SLOTS = types.Array(types.uint32, 1, "C", readonly=True)

_U = np.uint64
_0, _1, _LINE = _U(0), _U(1), _U(16)  # floats per cache line


@compiled(types.void(HASH_INDEX, _IDS, types.uint32[::1], types.float32[::1], types.int64[::1]), *_PARTS)
def keep_records(store: HashIndex, ids: Ids, places: Slots, kept: Floats, count: Ids) -> None:
    """Copy the weights and states of those ids aside that were rows then, are not read, and are not kept yet.

    places: (slots then,) per slot: 1 + place of its copy in `kept`, 0 without one, READ. count: (1,) copies.
    """
    store, ids, places, kept = open_store(store), detached(ids), detached(places), detached(kept)
    hashes, homes, found = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.uint64)
    floats, num_slots = store.dim + _U(store.fresh.size), _U(places.size)
    for start in range(0, ids.size, BLOCK):
        size = min(BLOCK, ids.size - start)
        for i in range(size):
            hashes[i] = mix64(_U(ids[start + i]), store.index_key)
            homes[i] = home_of(store, hashes[i])
            prefetch(store.cells, homes[i])
        for i in range(size):
            found[i] = probe(store, homes[i], hashes[i])
            if found[i] and found[i] <= num_slots:
                prefetch(places, found[i] - _1)
                for j in range(_0, floats + _U(HEADER), _LINE):
                    prefetch(store.floats, (found[i] - _1) * store.stride + j)
        for i in range(size):
            slot = found[i]
            if slot and store.ids[(slot - _1) * (store.stride >> _1)] != ids[start + i]:  # only the fingerprint's
                slot = find(store, ids[start + i], hashes[i])
            if slot == _0 or slot > num_slots or places[slot - _1] != 0:
                continue
            first = (slot - _1) * store.stride + _U(HEADER)
            to = _U(count[0]) * floats
            for j in range(floats):
                kept[to + j] = store.floats[first + j]
            count[0] += 1
            places[slot - _1] = np.uint32(count[0])


@compiled(
    types.void(
        HASH_INDEX,
        _SLOTS,
        types.uint32[::1],
        types.float32[::1],
        types.int64[::1],
        types.float32[:, ::1],
        types.float32[:, ::1],
    ),
    *_PARTS,
)
def read_records(
    store: HashIndex, slots: Slots, places: Slots, kept: Floats, ids: Ids, rows: Floats, state: Floats
) -> None:
    """ids, rows and state of slots, as they were then: the copies where there are some; marks the slots as READ."""
    store, slots, places, kept = open_store(store), detached(slots), detached(places), detached(kept)
    ids, rows, state = detached(ids), detached(rows), detached(state)
    dim, num_state = store.dim, _U(store.fresh.size)
    for start in range(0, slots.size, BLOCK):
        stop = min(start + BLOCK, slots.size)
        for i in range(start, stop):
            prefetch(places, _U(slots[i]))
            first = _U(slots[i]) * store.stride
            for j in range(_0, dim + num_state + _U(HEADER), _LINE):
                prefetch(store.floats, first + j)
        for i in range(start, stop):
            slot = _U(slots[i])
            ids[i] = store.ids[slot * (store.stride >> _1)]
            place = _U(places[slot])
            source, first = store.floats, slot * store.stride + _U(HEADER)
            if place != _0:
                source, first = kept, (place - _1) * (dim + num_state)
            for j in range(dim):
                rows[i, j] = source[first + j]
            for j in range(num_state):
                state[i, j] = source[first + dim + j]
            places[slot] = READ


@compiled(types.void(HASH_INDEX, types.uint64, _SLOTS, types.uint16[::1]), *_PARTS)
def find_buckets(store: HashIndex, space_key: np.uint64, slots: Slots, buckets: npt.NDArray[np.uint16]) -> None:
    """Fill in the routing's buckets of slots."""
    store, slots = open_store(store), detached(slots)
    for i in range(buckets.size):
        id_ = store.ids[_U(slots[i]) * (store.stride >> _1)]
        buckets[i] = mix64(_U(id_), space_key) >> _U(BUCKET_SHIFT)


@compiled(types.UniTuple(types.uint64, 2)(_IDS, types.uint64))
def bucket_range(ids: Ids, space_key: np.uint64) -> tuple[np.uint64, np.uint64]:
    """The lowest and the highest of the routing's buckets of ids, of which there is one at least."""
    low, high = _U(NUM_BUCKETS), _0
    for i in range(ids.size):
        bucket = mix64(_U(ids[i]), space_key) >> _U(BUCKET_SHIFT)
        low, high = min(low, bucket), max(high, bucket)
    return low, high


@compiled(types.void(types.uint16[::1], _SLOTS, types.uint32[::1], types.int64[::1]))
def sort_by_bucket(buckets: npt.NDArray[np.uint16], slots: Slots, out: Slots, starts: Ids) -> None:
    """Sort slots by their buckets into `out`, in order within one; those of bucket b begin at out[starts[b]].

    starts: (NUM_BUCKETS + 1,) zeros.
    """
    for i in range(slots.size):
        starts[_U(buckets[i]) + _1] += 1
    for b in range(NUM_BUCKETS):
        starts[b + 1] += starts[b]
    fill = starts[:NUM_BUCKETS].copy()
    for i in range(slots.size):
        bucket = _U(buckets[i])
        out[_U(fill[bucket])] = slots[i]
        fill[bucket] += 1


@compiled(
    types.int64(_IDS, types.uint64, types.Array(types.uint16, 1, "C", readonly=True), types.int64, types.boolean[::1])
)
def mark_own(
    ids: Ids, space_key: np.uint64, shard_of: npt.NDArray[np.uint16], shard: int, own: npt.NDArray[np.bool_]
) -> int:
    """own[i]: whether ids[i] belongs to a shard; how many do."""
    count = 0
    for i in range(ids.size):
        own[i] = shard_of[mix64(_U(ids[i]), space_key) >> _U(BUCKET_SHIFT)] == shard
        count += own[i]
    return count
