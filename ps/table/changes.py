"""What has changed in a table: elements since an update, for pulls; rows since an image, for increments of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from numba import types

from embershard.proto.arrays import Floats, Ids
from embershard.proto.compiled.jit import compiled

Stamps = npt.NDArray[np.uint32]

# Of one table; 4 bytes for each of its elements. Rows beyond are read whole.
MAX_BYTES = 2**28
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
    """When each element of the rows that are watched changed last.

    version: the updates that the shard has applied. The messages of one push are applied under the version before it,
    so that who read at a version may have seen changes that are stamped with it, and is sent them again.
    """

    def __init__(self, dim: int, version: Callable[[], int]) -> None:
        self._version = version
        self._base = self._asked = version()
        self._ids = np.empty(0, np.int64)  # ascending
        self._stamps = np.empty((0, dim), np.uint32)  # of each: 0 unchanged, else the version of the change, from 1

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        return self._ids.nbytes + self._stamps.nbytes

    @property
    def idle(self) -> bool:
        """Whether nobody has asked for long."""
        return self._version() - self._asked > IDLE_UPDATES

    def watch(self, ids: Ids, room: int = MAX_BYTES) -> bool:
        """Watch the rows of ids ((U,) int64) from here on, if `room` bytes are enough; whether all were already."""
        self._asked = self._version()
        new = np.setdiff1d(ids, self._ids)
        if not new.size:
            return True
        nbytes = len(new) * (8 + 4 * self._stamps.shape[1])
        if nbytes <= min(room, MAX_BYTES - self.nbytes):
            places = np.searchsorted(self._ids, new)
            self._ids = np.insert(self._ids, places, new)
            self._stamps = np.insert(self._stamps, places, 0, axis=0)
        return False

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
        places = np.searchsorted(self._ids, ids)
        inside = places < len(self._ids)
        inside[inside] = self._ids[places[inside]] == ids[inside]
        return np.where(inside, places, -1)


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
