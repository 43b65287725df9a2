"""A table's memory as the kernels see it: an arena of records and an extendible hash index over it.

A record is contiguous: the id (8 bytes), the `dim` weights, the optimizer's state, padded to an even number of floats.
Its place is a slot. The slot of a row that was removed is free, and given to a new one; what it held stays until then.
The hash is keyed by the index alone (routing's is public), its high bits are the index's bucket.
`root` leads from a bucket to its part of `directory`, which leads, by the high bits of the fingerprint (the hash's low
32 bits), to a page of 512 cells. A cell is `fingerprint << 32 | slot + 1`, 0 where free; the fingerprint's low 6 bits
are the home line, of 8 cells, in its page. A full page is split in two and nothing else moves: no push pays for more
than a few pages, and no pull waits for a rehash. Below one page per bucket, neighbouring buckets share a page, so that
a table of three ids takes one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from embershard.proto.compiled.intrinsics import array_at, detached, first_match, prefetch
from embershard.proto.compiled.jit import called, inlined
from embershard.proto.routing import BUCKET_SHIFT, mix64

PAGE_CELLS = 512  # 4 KiB
PAGE_LIMIT = 448  # cells in use at which a page is split: at 7/8 a search still reads 1.3 cache lines
MAX_SPLITS = 20  # of one bucket by its fingerprints; ids that need more cannot be found without the index's key
HEADER = 2  # floats that the id takes at the head of a record

# places in HashIndex.counters
NUM_ROWS, NUM_PAGES, NUM_ENTRIES, NUM_SLOTS, NUM_FREE, MAY_REUSE, RESERVED = range(7)


class HashIndex(NamedTuple):
    """The arrays and the layout of one table."""

    floats: npt.NDArray[np.float32]  # (reserved slots * stride,) the records
    ids: npt.NDArray[np.int64]  # the same memory; the id of a slot is at slot * stride / 2
    root: npt.NDArray[np.uint64]  # (4096,) per bucket: first directory entry << 8 | log2 of their number
    directory: npt.NDArray[np.uint32]  # page numbers
    fill: npt.NDArray[np.uint32]  # per page: splits that led to it << 16 | cells in use
    cells: npt.NDArray[np.uint64]  # (reserved pages * 512,)
    free: npt.NDArray[np.uint32]  # the first counters[NUM_FREE] are the slots without a row
    dirty: npt.NDArray[np.uint8]  # a bit per slot: its row is new or was changed; (0,) where nobody wants to know
    # (7,) rows, pages, directory entries, slots, free ones of them; 1: reuse these; slots that there is room for
    counters: npt.NDArray[np.int64]
    fresh: npt.NDArray[np.float32]  # (num_state,) first state of a row
    bounds: npt.NDArray[np.float64]  # (3,) the initializer's numbers
    index_key: np.uint64  # secret: nobody can send ids that collide here, whatever the routing's public hash says
    row_seed: np.uint64
    stride: np.uint64  # floats per record
    dim: np.uint64
    initializer: np.uint64


HASH_INDEX = types.NamedTuple(
    (
        types.float32[::1],
        types.int64[::1],
        types.uint64[::1],
        types.uint32[::1],
        types.uint32[::1],
        types.uint64[::1],
        types.uint32[::1],
        types.uint8[::1],
        types.int64[::1],
        types.float32[::1],
        types.float64[::1],
        *([types.uint64] * 5),
    ),
    HashIndex,
)

_ARRAYS = 11  # of a HashIndex; the rest are numbers
STORE_WORDS = 2 * _ARRAYS + 5


def addresses(store: HashIndex) -> npt.NDArray[np.int64]:
    """(STORE_WORDS,) the address and the size of each array, and the numbers: what `store_at` reads."""
    arrays = [np.asarray(array) for array in store[:_ARRAYS]]
    words = [word for array in arrays for word in (array.ctypes.data, array.size)]
    return np.array([*words, *(np.uint64(number).view(np.int64) for number in store[_ARRAYS:])], np.int64)


_U = np.uint64  # uint64 throughout: a signed index costs a test for negative ones, a mixed one becomes a float
_0, _1, _3, _7, _8, _16, _32 = _U(0), _U(1), _U(3), _U(7), _U(8), _U(16), _U(32)
_BYTE, _HALF, _WORD = _U(0xFF), _U(0xFFFF), _U(0xFFFFFFFF)
_CELLS, _CELL_MASK = _U(PAGE_CELLS), _U(PAGE_CELLS - 1)
_LINE_MASK = _U(PAGE_CELLS // 8 - 1)
_BUCKET_BITS = _U(64 - BUCKET_SHIFT)
_BUCKET_SHIFT = _U(BUCKET_SHIFT)


@inlined
def open_store(store: HashIndex) -> HashIndex:
    """The store for the inside of a kernel: counting its arrays' references would cost more than the work."""
    return HashIndex(
        detached(store.floats),
        detached(store.ids),
        detached(store.root),
        detached(store.directory),
        detached(store.fill),
        detached(store.cells),
        detached(store.free),
        detached(store.dirty),
        detached(store.counters),
        detached(store.fresh),
        detached(store.bounds),
        store.index_key,
        store.row_seed,
        store.stride,
        store.dim,
        store.initializer,
    )


@inlined
def store_at(words: npt.NDArray[np.int64]) -> HashIndex:
    """The store of `addresses`, for the inside of a kernel."""
    return HashIndex(
        array_at(words[0], words[1], np.float32),
        array_at(words[2], words[3], np.int64),
        array_at(words[4], words[5], np.uint64),
        array_at(words[6], words[7], np.uint32),
        array_at(words[8], words[9], np.uint32),
        array_at(words[10], words[11], np.uint64),
        array_at(words[12], words[13], np.uint32),
        array_at(words[14], words[15], np.uint8),
        array_at(words[16], words[17], np.int64),
        array_at(words[18], words[19], np.float32),
        array_at(words[20], words[21], np.float64),
        _U(words[22]),
        _U(words[23]),
        _U(words[24]),
        _U(words[25]),
        _U(words[26]),
    )


@inlined
def page_of(store: HashIndex, h: np.uint64) -> np.uint64:
    """Return the page that a hash belongs to."""
    entry = store.root[h >> _BUCKET_SHIFT]
    return _U(store.directory[(entry >> _8) + ((h & _WORD) >> (_32 - (entry & _BYTE)))])


@inlined
def home_of(store: HashIndex, h: np.uint64) -> np.uint64:
    """First cell of the line where a hash's search begins."""
    return page_of(store, h) * _CELLS + (h & _LINE_MASK) * _8


@inlined
def next_line(cell: np.uint64) -> np.uint64:
    """First cell of the line after this one, round and round in its page."""
    return (cell & ~_CELL_MASK) | ((cell + _8) & _CELL_MASK)


@inlined
def probe(store: HashIndex, home: np.uint64, h: np.uint64) -> np.uint64:
    """slot + 1 of a cell with the hash's fingerprint, 0 if there is none; the record's id is not looked at.

    A line's cells are filled from the first on: an empty last one ends the search, and a fingerprint of 0 meets the 0
    of an empty cell only after those in use.
    """
    line = home
    while True:
        at = first_match(store.cells, line, h & _WORD)
        if at < _8:
            return _U(store.cells[line + at] & _WORD)
        if store.cells[line + _7] == _0:
            return _0
        line = next_line(line)


@inlined
def find(store: HashIndex, id_: np.int64, h: np.uint64) -> np.uint64:
    """slot + 1 of an id, 0 if it has no row."""
    line = home_of(store, h)
    while True:
        for j in range(_8):
            cell = store.cells[line + j]
            if cell == _0:
                return _0
            if cell >> _32 == h & _WORD and store.ids[((cell & _WORD) - _1) * (store.stride >> _1)] == id_:
                return _U(cell & _WORD)
        line = next_line(line)


@inlined
def _place(store: HashIndex, page: np.uint64, cell: np.uint64) -> None:
    """Put a cell into the first free place from its home."""
    at = page * _CELLS + ((cell >> _32) & _LINE_MASK) * _8
    while store.cells[at + _7] != _0:  # a full line
        at = next_line(at)
    while store.cells[at] != _0:
        at += _1
    store.cells[at] = cell
    store.fill[page] += np.uint32(1)


@called
def _point(store: HashIndex, h: np.uint64, depth: np.uint64, new: np.uint64) -> bool:
    """Let the upper half of what leads to a page of `depth` splits lead to page `new`; False if there is no room."""
    bucket = h >> _BUCKET_SHIFT
    used = _U(store.counters[NUM_ENTRIES])
    start, bits = store.root[bucket] >> _8, store.root[bucket] & _BYTE
    needed = _1 if depth < _BUCKET_BITS else _1 << (bits + _1)
    if used + needed > _U(store.directory.size):
        return False
    if depth < _BUCKET_BITS:  # shared by several buckets: the upper half of them gets a directory entry of its own
        store.counters[NUM_ENTRIES] += 1
        store.directory[used] = new
        half = _1 << (_BUCKET_BITS - depth - _1)
        first = (bucket & ~(half + half - _1)) + half
        for b in range(first, first + half):
            store.root[b] = used << _8
        return True
    depth -= _BUCKET_BITS
    if depth == bits:  # double this bucket's directory; all that are left behind are smaller than those in use
        for i in range(_1 << bits):
            store.directory[used + i + i] = store.directory[start + i]
            store.directory[used + i + i + _1] = store.directory[start + i]
        store.counters[NUM_ENTRIES] += np.int64(needed)
        start, bits = used, bits + _1
        store.root[bucket] = start << _8 | bits
    half = _1 << (bits - depth - _1)
    first = start + (((h & _WORD) >> (_32 - depth)) << (bits - depth)) + half
    for i in range(first, first + half):
        store.directory[i] = new
    return True


@called
def _split(store: HashIndex, page: np.uint64, h: np.uint64) -> bool:
    """Split the full page of a hash in two; False if it cannot be."""
    depth = _U(store.fill[page]) >> _16
    new = _U(store.counters[NUM_PAGES])
    if new == _U(store.fill.size) or depth == _BUCKET_BITS + _U(MAX_SPLITS) or not _point(store, h, depth, new):
        return False
    store.counters[NUM_PAGES] += 1
    store.fill[page] = store.fill[new] = np.uint32((depth + _1) << _16)
    base = page * _CELLS
    old = store.cells[base : base + _CELLS].copy()
    for i in range(_CELLS):
        store.cells[base + i] = _0
        if depth < _BUCKET_BITS and old[i] != _0:
            prefetch(store.ids, ((old[i] & _WORD) - _1) * (store.stride >> _1))
    for i in range(_CELLS):
        cell = old[i]
        if cell == _0:
            continue
        if depth < _BUCKET_BITS:  # the bucket is not in the cell
            id_ = store.ids[((cell & _WORD) - _1) * (store.stride >> _1)]
            upper = (mix64(_U(id_), store.index_key) >> (_U(63) - depth)) & _1
        else:
            upper = (cell >> (_U(63) - (depth - _BUCKET_BITS))) & _1
        _place(store, new if upper else page, cell)
    return True


@inlined
def mark_dirty(store: HashIndex, found: np.uint64) -> None:
    """Note that the row of slot `found` - 1 is not what it was."""
    if store.dirty.size:
        slot = found - _1
        store.dirty[slot >> _3] |= np.uint8(_1 << (slot & _7))


@inlined
def prefetch_dirty(store: HashIndex, found: np.uint64) -> None:
    """Fetch what `mark_dirty` will change."""
    if store.dirty.size:
        prefetch(store.dirty, (found - _1) >> _3)


@inlined
def insert(store: HashIndex, id_: np.int64, h: np.uint64) -> np.uint64:
    """slot + 1 of a new record with this id, which has no row yet; 0 if the index is full.

    The caller has made sure that the arena has room; weights and state are the caller's to write.
    """
    page = page_of(store, h)
    while _U(store.fill[page]) & _HALF >= _U(PAGE_LIMIT):
        if not _split(store, page, h):
            return _0
        page = page_of(store, h)
    if store.counters[NUM_FREE] and store.counters[MAY_REUSE]:
        store.counters[NUM_FREE] -= 1
        slot = _U(store.free[_U(store.counters[NUM_FREE])])
    else:
        slot = _U(store.counters[NUM_SLOTS])
        store.counters[NUM_SLOTS] += 1
    store.counters[NUM_ROWS] += 1
    store.ids[slot * (store.stride >> _1)] = id_
    _place(store, page, (h & _WORD) << _32 | (slot + _1))
    mark_dirty(store, slot + _1)
    return slot + _1


@called
def erase(store: HashIndex, id_: np.int64, h: np.uint64) -> bool:
    """Free the slot of an id's row, whose record stays as it is; False where it has none. `free` has room for it."""
    found = find(store, id_, h)
    if found == _0:
        return False
    page = page_of(store, h)
    base = page * _CELLS
    old = store.cells[base : base + _CELLS].copy()
    store.fill[page] = np.uint32(_U(store.fill[page]) & ~_HALF)
    for i in range(_CELLS):
        store.cells[base + i] = _0
    for i in range(_CELLS):  # a search ends at the first empty cell, so none may be left between two of one line
        if old[i] != _0 and old[i] & _WORD != found:
            _place(store, page, old[i])
    store.free[_U(store.counters[NUM_FREE])] = np.uint32(found - _1)
    store.counters[NUM_FREE] += 1
    store.counters[NUM_ROWS] -= 1
    return True
