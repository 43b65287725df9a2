"""What has changed in a table: elements since an update, for pulls; rows since an image, for increments of it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from numba import types

from embershard.proto import routing
from embershard.proto.arrays import Floats, Ids
from embershard.proto.compiled.jit import compiled
from embershard.proto.routing import mix64

Stamps = npt.NDArray[np.uint32]
Cells = npt.NDArray[np.uint32]

# Of one table; 4 bytes for each of its elements, and ID_BYTES for its id. Rows beyond are read whole.
MAX_BYTES = 2**28
ID_BYTES = 24  # with its cells, of which up to four are there for each id
# Updates after which nobody is expected to ask any more: to watch is to read every row before and after its push.
IDLE_UPDATES = 1000
MOST_MARKS = 4  # images of a reader since which changes are known
_BITS = types.Array(types.int32, 2, "C", readonly=True)
_IDS = types.Array(types.int64, 1, "C", readonly=True)


class ImageMark:
    """The slots of rows that were changed or made since an image was taken, a bit of each; and the ids removed."""

    def __init__(self, name: object) -> None:
        self.name = name
        self.bits = np.empty(0, np.uint8)
        self.removed: list[Ids] = []

    def add(self, bits: npt.NDArray[np.uint8], removed: Sequence[Ids]) -> None:
        """Add rows that were changed (bits by slot) and ids that were removed."""
        if bits.size > self.bits.size:
            self.bits = np.concatenate([self.bits, np.zeros(bits.size - self.bits.size, np.uint8)])
        np.bitwise_or(self.bits[: bits.size], bits, out=self.bits[: bits.size])
        self.removed.extend(removed)

    def removed_ids(self) -> Ids:
        """The ids that were removed, ascending; some may be there again."""
        return np.unique(np.concatenate([np.empty(0, np.int64), *self.removed]))


class ChangeTracker:
    """Record when each watched element last changed.

    version: the updates that the shard has applied. The messages of one push are applied under the version before it,
    so that who read at a version may have seen changes that are stamped with it, and is sent them again.
    """

    def __init__(self, dim: int, version: Callable[[], int]) -> None:
        self._version = version
        self._base = self._asked = version()
        self._count = 0  # of the rows that are watched, in the order in which they came
        self._ids = np.empty(0, np.int64)  # of each
        self._stamps = np.empty((0, dim), np.uint32)  # of each: 0 unchanged, else the version of the change, from 1
        self._cells = np.zeros(2, np.uint32)  # a hash table: number + 1 of an id, 0 where free; at most half are taken
        self._key = np.uint64(secrets.randbits(64))  # nobody can send ids that collide

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        return self._count * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return ID_BYTES + 4 * self._stamps.shape[1]

    @property
    def idle(self) -> bool:
        """Whether nobody has asked for long."""
        return self._version() - self._asked > IDLE_UPDATES

    def watch(self, ids: Ids, room: int = MAX_BYTES) -> bool:
        """Watch the rows of ids ((U,) int64) from here on, if `room` bytes are enough; whether all were already."""
        self._asked = self._version()
        new = ids[self._places(ids) < 0]
        if not new.size:
            return True
        if len(new) * self._row_bytes <= min(room, MAX_BYTES - self.nbytes):
            self._make_room(self._count + len(new))
            _add(new, self._key, self._ids, self._cells, self._count)
            self._count += len(new)
        return False

    def _make_room(self, count: int) -> None:
        """Have room for so many rows: for twice as many as before at least, or each pull would copy all of them."""
        if count > len(self._ids):
            size, old = max(count, 2 * len(self._ids)), self._count
            ids, stamps = np.empty(size, np.int64), np.zeros((size, self._stamps.shape[1]), np.uint32)
            ids[:old], stamps[:old] = self._ids[:old], self._stamps[:old]
            self._ids, self._stamps = ids, stamps
        if 2 * count > len(self._cells):
            self._cells = np.zeros(2 << count.bit_length(), np.uint32)
            _add(self._ids[: self._count], self._key, self._ids, self._cells, 0)

    def record(self, ids: Ids, before: Floats, after: Floats) -> None:
        """The rows of ids ((U,) int64) were `before`, and are `after`, (U, dim) float32, now."""
        stamp = min(self._stamp(self._version()), 2**32 - 1)
        _record(self._places(ids), before.view(np.int32), after.view(np.int32), self._stamps, stamp)

    def since(self, ids: Ids, version: int) -> Ids | None:
        """Positions (K,) int64, ascending, in the flattened rows of ids that may have changed since a version.

        The rows are watched. None: it is not known.
        """
        now = self._version()
        if not self._base <= version <= now or self._stamp(now) >= 2**32:
            return None
        places, stamp = self._places(ids), self._stamp(version)
        positions = np.empty(_count(places, self._stamps, stamp), np.int64)
        _find(places, self._stamps, stamp, positions)
        return positions

    def _stamp(self, version: int) -> int:
        return version - self._base + 1

    def _places(self, ids: Ids) -> Ids:
        """Where ids are among those watched, -1 where they are not."""
        places = np.empty(len(ids), np.int64)
        _find_places(ids, self._key, self._ids, self._cells, places)
        return places


@compiled(types.void(_IDS, types.uint64, types.int64[::1], types.uint32[::1], types.int64), routing)
def _add(new: Ids, key: np.uint64, ids: Ids, cells: Cells, count: int) -> None:
    """Put ids that are not there behind the first `count`; some cells are free."""
    mask = np.uint64(cells.size - 1)
    for i in range(new.size):
        at = mix64(np.uint64(new[i]), key) & mask
        while cells[at]:
            at = (at + np.uint64(1)) & mask
        ids[count + i] = new[i]
        cells[at] = np.uint32(count + i + 1)


@compiled(types.void(_IDS, types.uint64, types.int64[::1], types.uint32[::1], types.int64[::1]), routing)
def _find_places(wanted: Ids, key: np.uint64, ids: Ids, cells: Cells, places: Ids) -> None:
    mask = np.uint64(cells.size - 1)
    for i in range(wanted.size):
        at = mix64(np.uint64(wanted[i]), key) & mask
        while cells[at] and ids[np.int64(cells[at]) - 1] != wanted[i]:
            at = (at + np.uint64(1)) & mask
        places[i] = np.int64(cells[at]) - 1


@compiled(types.void(_IDS, _BITS, _BITS, types.uint32[:, ::1], types.int64))
def _record(
    places: Ids, before: npt.NDArray[np.int32], after: npt.NDArray[np.int32], stamps: Stamps, stamp: int
) -> None:
    for i in range(places.size):
        place = places[i]
        if place < 0:
            continue
        for j in range(np.uint64(before.shape[1])):
            if before[i, j] != after[i, j]:
                stamps[place, j] = np.uint32(stamp)


@compiled(types.int64(_IDS, types.uint32[:, ::1], types.int64))
def _count(places: Ids, stamps: Stamps, stamp: int) -> int:
    count = 0
    for i in range(places.size):
        for j in range(stamps.shape[1]):
            count += stamps[places[i], j] >= np.uint32(stamp)
    return count


@compiled(types.void(_IDS, types.uint32[:, ::1], types.int64, types.int64[::1]))
def _find(places: Ids, stamps: Stamps, stamp: int, positions: Ids) -> None:
    """Fill positions, as many as _count says."""
    at, dim = 0, stamps.shape[1]
    for i in range(places.size):
        for j in range(dim):
            if stamps[places[i], j] >= np.uint32(stamp):
                positions[at] = i * dim + j
                at += 1
