"""The compiled inner loops of a table: gather, apply, load, restore.

Each works in blocks of ids: hash and prefetch the cells, probe by fingerprint and prefetch the records, then verify the
id in the record and do the work; the memory's latency is paid once per block. reference.py says the same in plain
numpy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from embershard.proto.arrays import Floats, Ids
from embershard.proto.compiled import intrinsics
from embershard.proto.compiled.intrinsics import array_at, call_row_function, detached, prefetch, window
from embershard.proto.compiled.jit import called, compiled, inlined
from embershard.proto.optim import clip as gradients_module
from embershard.proto.optim.clip import clip_gradient
from embershard.proto.routing import mix64
from embershard.ps.table import hash_index as store_module
from embershard.ps.table import initial_values as initial
from embershard.ps.table.hash_index import (
    HASH_INDEX,
    HEADER,
    NUM_PAGES,
    NUM_ROWS,
    NUM_SLOTS,
    RESERVED,
    STORE_WORDS,
    HashIndex,
    addresses,
    erase,
    find,
    home_of,
    insert,
    mark_dirty,
    open_store,
    prefetch_dirty,
    probe,
    store_at,
)
from embershard.ps.table.initial_values import write_initial

Words = npt.NDArray[np.uint64]

BLOCK = 64  # ids in flight: enough to hide the memory's latency, few enough to stay in the first caches

DONE, INDEX_FULL, OPTIMIZER_RAISED = 0, 1, 2  # what apply and load return

_PARTS = (initial, intrinsics, store_module, gradients_module)
_IDS = types.Array(types.int64, 1, "C", readonly=True)  # they come straight from a message
_ROWS = types.Array(types.float32, 2, "C", readonly=True)
_AGES = types.Array(types.float32, 1, "C", readonly=True)
_BITS = types.Array(types.int32, 2, "C", readonly=True)

_U = np.uint64
_0, _1 = _U(0), _U(1)
_LINE = 16  # floats per cache line
_EXPONENT = np.int32(0x7F800000)
_NO_AGES, _NO_BITS = np.empty(0, np.float32), np.empty(0, np.int32)


@inlined
def _hash_block(store: HashIndex, ids: Ids, start: int, count: int, hashes: Words, homes: Words) -> None:
    for i in range(count):
        h = mix64(_U(ids[start + i]), store.index_key)
        hashes[i], homes[i] = h, home_of(store, h)
        prefetch(store.cells, homes[i])


@inlined
def _prefetch_record(store: HashIndex, found: np.uint64, floats: np.uint64) -> None:
    first = (found - _1) * store.stride
    for j in range(_0, floats, _U(_LINE)):
        prefetch(store.floats, first + j)
    prefetch(store.floats, first + floats - _1)


@inlined
def _is_of(store: HashIndex, found: np.uint64, id_: np.int64) -> bool:
    return bool(store.ids[(found - _1) * (store.stride >> _1)] == id_)


# Tables come by their addresses, so that a call for many costs as much as one for a single table: each would be eleven
# arrays for numba to look at.
TABLE_WORDS = STORE_WORDS + 5
_HYPER, _RATES, _UPDATE = STORE_WORDS, STORE_WORDS + 2, STORE_WORDS + 4  # places of the rest of a table


def table_words(
    store: HashIndex, hyper: npt.NDArray[np.float64], rates: npt.NDArray[np.float64], update: int
) -> npt.NDArray[np.int64]:
    """(TABLE_WORDS,) what `gather` and `apply` want to know of a table, for as long as these arrays live.

    hyper: as the row function reads it, written by `apply`. rates: (3,) learning rate, clip_value, clip_norm. update:
    the address of the row function.
    """
    more = hyper.ctypes.data, hyper.size, rates.ctypes.data, rates.size, update
    return np.concatenate([addresses(store), np.array(more, np.int64)])


@compiled(types.void(_IDS, _IDS, types.boolean[::1]), *_PARTS)
def find_short(tables: Ids, ends: Ids, short: npt.NDArray[np.bool_]) -> None:
    """short[t]: whether table t may have no room for as many new rows as it has ids. tables, ends: as in `gather`."""
    begin = 0
    for t in range(tables.size):
        store = store_at(array_at(tables[t], TABLE_WORDS, np.int64))
        short[t] = store.counters[NUM_SLOTS] + ends[t] - begin > store.counters[RESERVED]
        begin = ends[t]


@compiled(types.void(_IDS, _IDS, _IDS, types.float32[:, ::1]), *_PARTS, at_start=True)
def gather(tables: Ids, ends: Ids, ids: Ids, out: Floats) -> None:
    """out[i] = weights of ids[i], or its first values where it has no row; changes nothing.

    tables: (T,) the address of each table's words. ends: (T,) where its ids end, one table's behind the other's.
    """
    tables, ends, ids, out = detached(tables), detached(ends), detached(ids), detached(out)
    hashes, homes = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.uint64)
    slots = np.empty(BLOCK, np.uint64)
    begin = 0
    for t in range(tables.size):
        store = store_at(array_at(tables[t], TABLE_WORDS, np.int64))
        dim = np.int64(store.dim)
        for start in range(begin, ends[t], BLOCK):
            count = min(BLOCK, ends[t] - start)
            _hash_block(store, ids, start, count, hashes, homes)
            for i in range(count):
                found = probe(store, homes[i], hashes[i])
                slots[i] = found
                if found:
                    _prefetch_record(store, found, store.dim + _U(HEADER))
            for i in range(count):
                found = slots[i]
                id_ = ids[start + i]
                if found and not _is_of(store, found, id_):  # another id with this fingerprint
                    found = find(store, id_, hashes[i])
                row = window(out, _U(start + i) * store.dim, dim)
                if found:
                    first = (found - _1) * store.stride + _U(HEADER)
                    for j in range(store.dim):
                        row[j] = store.floats[first + j]
                else:
                    write_initial(row, id_, store.row_seed, store.initializer, store.bounds)
        begin = ends[t]


@inlined
def _create(store: HashIndex, id_: np.int64, h: np.uint64) -> np.uint64:
    """slot + 1 of a new row with its first values; 0 if the index is full."""
    found = insert(store, id_, h)
    if found:
        first = (found - _1) * store.stride + _U(HEADER)
        row = window(store.floats, first, np.int64(store.dim))
        write_initial(row, id_, store.row_seed, store.initializer, store.bounds)
        for j in range(_U(store.fresh.size)):
            store.floats[first + store.dim + j] = store.fresh[j]
    return found


@called
def _find_or_create(store: HashIndex, id_: np.int64, h: np.uint64) -> np.uint64:
    store = open_store(store)
    found = find(store, id_, h)
    return found if found else _create(store, id_, h)


Pushed = tuple[Floats, npt.NDArray[np.int32], Floats, npt.NDArray[np.int32]]


def pushed(gradients: Floats, copy: Floats | None = None, ages: Floats | None = None) -> Pushed:
    """Gradients as `apply` takes them: read-only ones may change, and are copied, to `copy` where there is one."""
    taken = _NO_BITS
    if copy is not None:
        taken = copy.reshape(-1).view(np.int32)
    elif not gradients.flags.writeable:
        taken = np.empty(BLOCK * gradients.shape[-1], np.int32)
    return gradients, gradients.view(np.int32), _NO_AGES if ages is None else ages, taken


@inlined
def _is_finite(bits: npt.NDArray[np.int32], i: int) -> bool:
    """Whether no float of row i has the exponent of NaN and Inf; on bits, so that the loop is a vector loop."""
    bad = False
    for j in range(bits.shape[1]):
        bad |= bits[i, j] & _EXPONENT == _EXPONENT
    return not bad


@inlined
def _take_finite(bits: npt.NDArray[np.int32], i: int, taken: npt.NDArray[np.int32]) -> bool:
    """Copy row i, and whether the copy is finite."""
    bad = False
    for j in range(taken.size):
        word = bits[i, j]
        taken[j] = word
        bad |= word & _EXPONENT == _EXPONENT
    return not bad


@compiled(
    types.int64(
        _IDS,
        _IDS,
        _IDS,
        types.Tuple((_ROWS, _BITS, _AGES, types.int32[::1])),
        types.float64,
        types.UniTuple(types.int64[::1], 2),
    ),
    *_PARTS,
    at_start=True,
)
def apply(
    tables: Ids,
    ends: Ids,
    ids: Ids,
    pushed: Pushed,
    lr_scale: float,
    counts: tuple[Ids, Ids],
) -> int:
    """Update the rows of ids with their gradients, in order, and create those that are new.

    tables, ends: as in `gather`. pushed: the gradients (U, dim), their memory as int32, and their ages (U,); (0,) where
    all are 1: the last float of `hyper` is the age of the row that is updated; and () or, where another process may
    change them meanwhile, memory for a block of rows or for all, to which each is copied before it is checked.
    counts: of each table, (T,) each, the rows whose gradient is not finite, which are left alone, and the new ones.
    Returns DONE, or why not.
    """
    tables, ends, ids, skipped, created = (
        detached(tables),
        detached(ends),
        detached(ids),
        detached(counts[0]),
        detached(counts[1]),
    )
    gradients, bits, ages = detached(pushed[0]), detached(pushed[1]), detached(pushed[2])
    taken_bits = detached(pushed[3])
    taken = taken_bits.view(np.float32)
    may_change, takes_all = taken.size > 0, taken.size == bits.size
    hashes, homes = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.uint64)
    slots = np.empty(BLOCK, np.uint64)
    clipped = np.empty(bits.shape[1], np.float32)
    begin = 0
    for t in range(tables.size):
        words = array_at(tables[t], TABLE_WORDS, np.int64)
        store = store_at(words)
        hyper = array_at(words[_HYPER], words[_HYPER + 1], np.float64)
        rates = array_at(words[_RATES], words[_RATES + 1], np.float64)
        hyper[0], hyper[_U(hyper.size - 1)] = rates[0] * lr_scale, 1.0
        clips = rates[1] > 0.0 or rates[2] > 0.0
        update = words[_UPDATE]
        dim, num_state = np.int64(store.dim), store.fresh.size
        used = store.dim + _U(HEADER + num_state)
        before = store.counters[NUM_ROWS]
        for start in range(begin, ends[t], BLOCK):
            count = min(BLOCK, ends[t] - start)
            _hash_block(store, ids, start, count, hashes, homes)
            pages = store.counters[NUM_PAGES]
            first_taken = _U(start) * store.dim if takes_all else _0
            for i in range(count):
                slots[i] = _0
                if may_change:
                    own = window(taken_bits, first_taken + _U(i) * store.dim, dim)
                    is_finite = _take_finite(bits, start + i, own)
                else:
                    is_finite = _is_finite(bits, start + i)
                if not is_finite:
                    skipped[t] += 1
                    continue
                if store.counters[NUM_PAGES] != pages:  # a page was split
                    homes[i] = home_of(store, hashes[i])
                found = probe(store, homes[i], hashes[i])
                if found:
                    _prefetch_record(store, found, used)
                    prefetch_dirty(store, found)
                else:
                    found = _create(store, ids[start + i], hashes[i])
                    if not found:
                        return INDEX_FULL
                slots[i] = found
            for i in range(count):
                found, id_ = slots[i], ids[start + i]
                if not found:
                    continue
                if not _is_of(store, found, id_):  # another id with this fingerprint
                    found = _find_or_create(store, id_, hashes[i])
                    if not found:
                        return INDEX_FULL
                mark_dirty(store, found)
                first = (found - _1) * store.stride + _U(HEADER)
                row, state = window(store.floats, first, dim), window(store.floats, first + store.dim, num_state)
                grad = window(gradients, _U(start + i) * store.dim, dim)
                if may_change:
                    grad = window(taken, first_taken + _U(i) * store.dim, dim)
                if clips:
                    clip_gradient(grad, clipped, rates[1], rates[2])
                    grad = window(clipped, _0, dim)
                if ages.size > 0:
                    hyper[_U(hyper.size - 1)] = ages[_U(start + i)]
                if not call_row_function(update, row, state, grad, hyper):
                    return OPTIMIZER_RAISED
        created[t] = store.counters[NUM_ROWS] - before
        begin = ends[t]
    return DONE


@compiled(types.void(HASH_INDEX, _IDS, types.float32[:, ::1], types.float32[:, ::1]), *_PARTS)
def copy_records(store: HashIndex, ids: Ids, rows: Floats, state: Floats) -> None:
    """rows[i], state[i] = those of ids[i], or the first ones where it has no row; changes nothing."""
    store, ids = open_store(store), detached(ids)
    for i in range(ids.size):
        found = find(store, ids[i], mix64(_U(ids[i]), store.index_key))
        if found:
            first = (found - _1) * store.stride + _U(HEADER)
            for j in range(store.dim):
                rows[i, j] = store.floats[first + j]
            for j in range(state.shape[1]):
                state[i, j] = store.floats[first + store.dim + _U(j)]
        else:
            write_initial(rows[i], ids[i], store.row_seed, store.initializer, store.bounds)
            for j in range(state.shape[1]):
                state[i, j] = store.fresh[_U(j)]


@compiled(types.int64(HASH_INDEX, _IDS), *_PARTS)
def remove(store: HashIndex, ids: Ids) -> int:
    """Remove the rows of ids; how many there were. `store.free` has room for all."""
    store, ids = open_store(store), detached(ids)
    count = 0
    for i in range(ids.size):
        count += erase(store, ids[i], mix64(_U(ids[i]), store.index_key))
    return count


@compiled(types.int64(HASH_INDEX, _IDS), *_PARTS)
def count_missing(store: HashIndex, ids: Ids) -> int:
    """Count the ids that have no row; equal ones count again."""
    store, ids = open_store(store), detached(ids)
    count = 0
    for i in range(ids.size):
        count += find(store, ids[i], mix64(_U(ids[i]), store.index_key)) == _0
    return count


@compiled(types.int64(HASH_INDEX, _IDS, _ROWS, types.boolean), *_PARTS, at_start=True)
def load(store: HashIndex, ids: Ids, rows: Floats, keep_state: bool) -> int:
    """Give ids these weights, in order, and new rows (all rows, unless keep_state) a fresh state.

    Returns DONE or INDEX_FULL.
    """
    store, ids, rows = open_store(store), detached(ids), detached(rows)
    for i in range(ids.size):
        h = mix64(_U(ids[i]), store.index_key)
        found = find(store, ids[i], h)
        fresh = not (found and keep_state)
        if not found:
            found = insert(store, ids[i], h)
            if not found:
                return INDEX_FULL
        mark_dirty(store, found)
        first = (found - _1) * store.stride + _U(HEADER)
        for j in range(store.dim):
            store.floats[first + j] = rows[i, j]
        if not fresh:
            continue
        for j in range(_U(store.fresh.size)):
            store.floats[first + store.dim + j] = store.fresh[j]
    return DONE


@compiled(types.int64(HASH_INDEX, _IDS, _ROWS, _ROWS), *_PARTS)
def restore(store: HashIndex, ids: Ids, rows: Floats, state: Floats) -> int:
    """Give ids, which are new or not, these weights and states, in order. Returns DONE or INDEX_FULL."""
    store, ids, rows, state = open_store(store), detached(ids), detached(rows), detached(state)
    hashes, homes = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.uint64)
    slots = np.empty(BLOCK, np.uint64)
    num_state = _U(store.fresh.size)
    used = store.dim + _U(HEADER) + num_state
    for start in range(0, ids.size, BLOCK):
        count = min(BLOCK, ids.size - start)
        _hash_block(store, ids, start, count, hashes, homes)
        pages = store.counters[NUM_PAGES]
        for i in range(count):
            if store.counters[NUM_PAGES] != pages:  # a page was split
                homes[i] = home_of(store, hashes[i])
            found = probe(store, homes[i], hashes[i])
            if found:
                _prefetch_record(store, found, used)
                prefetch_dirty(store, found)
            else:
                found = insert(store, ids[start + i], hashes[i])
                if not found:
                    return INDEX_FULL
            slots[i] = found
        for i in range(count):
            found, id_ = slots[i], ids[start + i]
            if not _is_of(store, found, id_):  # another id with this fingerprint
                found = _find_or_create(store, id_, hashes[i])
                if not found:
                    return INDEX_FULL
            mark_dirty(store, found)
            first = (found - _1) * store.stride + _U(HEADER)
            row, values = _U(start + i) * store.dim, _U(start + i) * num_state
            target, source = window(store.floats, first, np.int64(store.dim)), window(rows, row, np.int64(store.dim))
            for j in range(store.dim):
                target[j] = source[j]
            target = window(store.floats, first + store.dim, np.int64(num_state))
            source = window(state, values, np.int64(num_state))
            for j in range(num_state):
                target[j] = source[j]
    return DONE
