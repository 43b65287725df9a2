"""Which elements or rows of a gradient to send: the largest, by a sampled threshold, or random ones.

The threshold as in Deep Gradient Compression (Lin et al. 2018), which samples it too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import types

from embershard.proto.arrays import Floats, Ids
from embershard.proto.compiled.jit import compiled, inlined
from embershard.proto.routing import mix64

SMALL = 65_536  # up to as many elements an exact selection costs little, and a threshold fits them badly
REUSE = 32  # calls that share a threshold
FEWEST, MOST = 0.8, 1.25  # of the wanted count: where a threshold fits no more

_AIM = 1.1  # of the wanted count: what is over it is trimmed, what is missing would be missing
_SAMPLE = 0.01
_SAMPLE_LARGE = 256  # elements over the threshold that a sample should hold: it is off by 6 % then
_ROOM = 2.0  # of the wanted count: where the search stops, with more than fits

_BLOCK = 32  # elements that are looked at together: of the usual ratios most blocks have none to be sent

_U = np.uint64
Bits = npt.NDArray[np.int32]
_ABS = np.int32(0x7FFFFFFF)
_BITS = types.Array(types.int32, 1, "C", readonly=True)


def count_of(ratio: float, size: int) -> int:
    """Return the number of `size` elements that a ratio in (0, 1] means: at least one, where there is one."""
    return min(size, max(1, round(ratio * size)))


@dataclass(slots=True)
class Threshold:
    """The threshold of one table's part on one shard. Its fields are training state: plain numbers."""

    bits: int = 0  # of the float32 magnitude
    calls: int = REUSE  # that used it; a new one has to be sampled

    def select(self, values: Floats, count: int) -> Ids:
        """Positions of the `count` largest magnitudes of values (N,), ascending; the same for the same state.

        Fewer, but at least 0.8 of them, where the threshold of an earlier call is too high, or where others are 0: a
        zero is not sent, unless all are. Of equal ones an even share is taken, from the first to the last. What is not
        finite counts as larger than everything, so that it is sent, and seen, instead of staying in a residual.
        """
        if count >= values.size:
            return np.arange(values.size)
        bits = values.view(np.int32)
        if values.size <= SMALL:
            return _trimmed(_at_least(bits, _kth(bits & _ABS, count), values.size), bits, count)
        room = int(_ROOM * count)
        found = _at_least(bits, self.bits, room) if self.calls < REUSE else None
        if found is None or not self._fits(found, count):
            self.bits, self.calls = _sampled(bits, count), 0
            found = _at_least(bits, self.bits, room)
        if not self._fits(found, count):  # many equal ones, or a sample that was unlucky
            self.bits = _kth(bits & _ABS, count)
            found = _at_least(bits, self.bits, values.size)
        self.calls = self.calls + 1 if found.size <= MOST * count else REUSE
        return _trimmed(found, bits, count)

    def _fits(self, found: Ids, count: int) -> bool:
        return found.size <= int(_ROOM * count) and (found.size >= FEWEST * count or self.bits <= 1)


def row_norms(rows: Floats) -> Floats:
    """L2 norm (R,) of each of rows (R, dim), by which whole rows are selected."""
    norms = np.empty(len(rows), np.float32)
    _norms(rows, norms)
    return norms


def random_positions(size: int, count: int, key: int) -> Ids:
    """`count` positions below `size`, ascending, one at random from each of `count` equal shares.

    A function of its arguments: a retry and a resumed run draw the same. key: 64 bits.
    """
    positions = np.empty(count, np.int64)
    _draw(size, np.uint64(key), positions)
    return positions


def _sampled(bits: Bits, count: int) -> int:
    """The magnitude that somewhat more than `count` elements reach, by a sample of about 1 %."""
    size = max(bits.size * _SAMPLE, _SAMPLE_LARGE * bits.size / count)
    sample = np.empty(min(int(size), bits.size), np.int32)
    _take_sample(bits, sample)
    return _kth(sample, count_of(min(1.0, _AIM * count / bits.size), sample.size))


def _kth(magnitudes: Bits, count: int) -> int:
    """The count-th largest, at least the smallest that is not 0."""
    at = magnitudes.size - count
    return max(1, int(np.partition(magnitudes, at)[at]))


def _at_least(bits: Bits, threshold: int, room: int) -> Ids:
    """Positions whose magnitude is at least the threshold; of all of them, only somewhat more than `room`."""
    found = np.empty(room + 1 + _BLOCK, np.int64)
    return found[: _collect(bits, threshold, found)]


def _trimmed(found: Ids, bits: Bits, count: int) -> Ids:
    """The `count` largest of these, and of equal ones an even share: the first of them would starve the last rows."""
    if found.size <= count:
        return found
    magnitudes = bits[found] & _ABS
    least = _kth(magnitudes, count)
    kept = magnitudes > least
    equal = np.flatnonzero(magnitudes == least)
    missing = count - np.count_nonzero(kept)
    kept[equal[(2 * np.arange(missing) + 1) * equal.size // (2 * missing)]] = True
    return found[kept]


@compiled(types.int64(_BITS, types.int32, types.int64[::1]))
def _collect(bits: Bits, threshold: int, found: Ids) -> int:
    """Fill found, which has room for _BLOCK more than are wanted; how many."""
    count = _U(0)
    for start in range(_U(0), _U(bits.size), _U(_BLOCK)):
        stop = min(start + _U(_BLOCK), _U(bits.size))
        hits = np.int32(0)
        for i in range(start, stop):  # without a branch, so that it is done by vectors
            hits += np.int32((bits[i] & _ABS) >= threshold)
        if not hits:
            continue
        if count + _U(_BLOCK) > _U(found.size):
            break
        for i in range(start, stop):
            found[count] = i  # written always and counted sometimes: a branch would often be guessed wrong
            count += _U((bits[i] & _ABS) >= threshold)
    return int(count)


@inlined
def _place(i: int, size: int, shares: int, key: np.uint64) -> int:
    """A random position of the share i of `size`."""
    first, last = _U(i) * _U(size) // _U(shares), _U(i + 1) * _U(size) // _U(shares)
    return int(first + (mix64(_U(i), key) >> _U(32)) * (last - first) // _U(2**32))


@compiled(types.void(_BITS, types.int32[::1]))
def _take_sample(bits: Bits, sample: Bits) -> None:
    """Magnitudes, one of each of as many equal shares; not at one stride, which may be that of a row."""
    for i in range(sample.size):
        sample[i] = bits[_place(i, bits.size, sample.size, _U(0))] & _ABS


@compiled(types.void(types.int64, types.uint64, types.int64[::1]))
def _draw(size: int, key: np.uint64, positions: Ids) -> None:
    for i in range(positions.size):
        positions[i] = _place(i, size, positions.size, key)


@compiled(types.void(types.Array(types.float32, 2, "C", readonly=True), types.float32[::1]))
def _norms(rows: Floats, norms: Floats) -> None:
    for i in range(rows.shape[0]):
        squares = 0.0  # float64: no square of a float32 is too large or too small for it
        for j in range(rows.shape[1]):
            squares += np.float64(rows[i, j]) * np.float64(rows[i, j])
        norms[i] = np.sqrt(squares)
