"""The worker's compiled kernels: numbers of ids, membership in a set, and row optimizers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from embershard.proto.arrays import Floats, Ids
from embershard.proto.compiled import intrinsics
from embershard.proto.compiled.intrinsics import address_of, call_row_function, detached, window
from embershard.proto.compiled.jit import compiled
from embershard.proto.compiled.open_addressing import FREE, cell_of
from embershard.proto.optim import clip as gradients_module
from embershard.proto.optim.clip import clip_gradient, is_finite
from embershard.proto.optim.formulas import BUILTIN
from embershard.proto.routing import mix64
from embershard.proto.spec import Optimizer

Cells = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_SMALLEST = 1024  # cells
_U, _0 = np.uint64, np.uint64(0)
_IDS = types.Array(types.int64, 1, "C", readonly=True)
_ROWS = types.float32[:, ::1]


class IdIndex:
    """id -> number, 0 to len - 1."""

    def __init__(self) -> None:
        self._ids = np.empty(_SMALLEST // 2, np.int64)  # by number
        self._cells = np.full(_SMALLEST, FREE, np.int64)  # open addressing: the number of an id
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> Ids:
        """The ids by their number: (len,) int64."""
        return self._ids[: self._count]

    def numbers(self, ids: Ids) -> Ids:
        """The number of each id ((U,) int64); an id that is new gets the next one."""
        needed = self._count + len(ids)
        if needed > len(self._ids):
            size = 1 << (2 * needed - 1).bit_length()  # at most half full
            self._ids = np.concatenate([self.ids, np.empty(size // 2 - self._count, np.int64)])
            self._cells = np.full(size, FREE, np.int64)
            _number(self.ids.copy(), 0, self._ids, self._cells, np.empty(self._count, np.int64))
        numbers = np.empty(len(ids), np.int64)
        self._count = _number(ids, self._count, self._ids, self._cells, numbers)
        return numbers


@compiled(types.int64(_IDS, types.int64, types.int64[::1], types.int64[::1], types.int64[::1]))
def _number(ids: Ids, count: int, known: Ids, cells: Cells, numbers: Ids) -> int:
    """Fill `numbers`; how many ids there are now."""
    for i in range(ids.size):
        cell = cell_of(ids[i], mix64(_U(ids[i]), _0), cells, known)
        if cells[cell] < 0:
            cells[cell] = count
            known[count] = ids[i]
            count += 1
        numbers[i] = cells[cell]
    return count


def overlap(ids: Ids, others: Ids) -> Mask:
    """(U,) bool: whether ids[u] is among `others`. Both int64, in any order; without sorting, and without the GIL."""
    found = np.empty(len(ids), np.bool_)
    _overlap(ids, others, found)
    return found


@compiled(types.void(_IDS, _IDS, types.boolean[::1]), at_start=True)
def _overlap(ids: Ids, others: Ids, found: Mask) -> None:
    size = 16
    while size < 2 * others.size:
        size *= 2
    cells = np.full(size, FREE, np.int32)
    for i in range(others.size):
        cells[cell_of(others[i], mix64(_U(others[i]), _0), cells, others)] = i
    for u in range(ids.size):
        found[u] = cells[cell_of(ids[u], mix64(_U(ids[u]), _0), cells, others)] >= 0


def overlap_by_part(ids: Ids, counts: Ids, others: Ids, other_counts: Ids) -> Mask:
    """(U,) bool: whether ids[u] is among `others`, of those that are in the same part.

    Both int64; `counts`, of one shape, say how many ids each part has. Without the GIL.
    """
    found = np.empty(len(ids), np.bool_)
    _overlap_by_part(ids, np.cumsum(counts), others, np.cumsum(other_counts), found)
    return found


@compiled(types.void(_IDS, _IDS, _IDS, _IDS, types.boolean[::1]))
def _overlap_by_part(ids: Ids, ends: Ids, others: Ids, other_ends: Ids, found: Mask) -> None:
    longest, begin = 0, 0
    for end in other_ends:
        longest, begin = max(longest, end - begin), end
    size = 16
    while size < 2 * longest:
        size *= 2
    cells = np.empty(size, np.int32)
    begin, other_begin = 0, 0
    for p in range(ends.size):
        theirs = others[other_begin : other_ends[p]]
        size = 16
        while size < 2 * theirs.size:
            size *= 2
        part = cells[:size]
        part[:] = FREE
        for i in range(theirs.size):
            part[cell_of(theirs[i], mix64(_U(theirs[i]), _0), part, theirs)] = i
        for u in range(begin, ends[p]):
            found[u] = part[cell_of(ids[u], mix64(_U(ids[u]), _0), part, theirs)] >= 0
        begin, other_begin = ends[p], other_ends[p]


class LocalRowOptimizer:
    """One of the shards' row optimizers and its settings, compiled. KeyError for a user-defined optimizer.

    `hyper` are its settings as the compiled function at `address` reads them: hyper[0] is the learning rate.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = BUILTIN[optimizer.name]
        self.settings = self._optimizer.params(optimizer)
        self.hyper = np.array([*self.settings.values(), 1.0])  # the last one: a gradient is that of one step
        self._function = self._optimizer.compiled  # kept: it lives where the address says
        self.address = address_of(self._function)

    def initial(self, dim: int) -> Floats:
        """(num_state,), the first state of a row."""
        return self._optimizer.initial(dim, self.settings)

    def update(self, rows: Floats, state: Floats, numbers: Ids, gradients: Floats, lr: float) -> Mask:
        """Change rows (N, dim) and their state (N, num_state) at `numbers` (U,) by gradients (U, dim), clipped.

        A row whose gradient has a NaN or Inf is left alone. Returns which were changed, (U,).
        """
        self.hyper[0] = lr
        clips = np.array([self.settings["clip_value"], self.settings["clip_norm"]])
        changed = np.empty(len(numbers), np.bool_)
        _update((rows, state), numbers, gradients, self.hyper, clips, self.address, changed)
        return changed


@compiled(
    types.void(
        types.UniTuple(_ROWS, 2), _IDS, _ROWS, types.float64[::1], types.float64[::1], types.int64, types.boolean[::1]
    ),
    intrinsics,
    gradients_module,
)
def _update(
    both: tuple[Floats, Floats],
    numbers: Ids,
    gradients: Floats,
    hyper: npt.NDArray[np.float64],
    clips: npt.NDArray[np.float64],
    function: int,
    changed: Mask,
) -> None:
    """both: the rows and their state. clips: (2,) clip_value, clip_norm."""
    rows, state, gradients, hyper = detached(both[0]), detached(both[1]), detached(gradients), detached(hyper)
    dim, num_state = rows.shape[1], state.shape[1]
    clipped = np.empty(dim, np.float32)
    for i in range(numbers.size):
        number, grad = _U(numbers[i]), window(gradients, _U(i) * _U(dim), dim)
        changed[i] = is_finite(grad)
        if not changed[i]:
            continue
        if clips[0] > 0.0 or clips[1] > 0.0:
            clip_gradient(grad, clipped, clips[0], clips[1])
            grad = window(clipped, _U(0), dim)
        row, its_state = window(rows, number * _U(dim), dim), window(state, number * _U(num_state), num_state)
        call_row_function(function, row, its_state, grad, hyper)
