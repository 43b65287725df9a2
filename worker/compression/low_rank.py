"""PowerSGD (Vogels et al. 2019): gradients of dense matrices as two thin factors, with error feedback.

Every worker has factors of its own, and a shard adds their products: there is no all-reduce that would need one P for
all workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from embershard.proto.arrays import Bytes, Floats, Ids
from embershard.proto.codec.low_rank import Chunk, Factors, PlainRun, encode_low_rank, low_rank_nbytes
from embershard.proto.codec.values.registry import ValuesCodec


class ParameterSlice(NamedTuple):
    """Name the place of a parameter in a dense table: from the first element of block `start` on."""

    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements of the parameter."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def columns(self) -> int:
        """Columns of the parameter as a matrix for PowerSGD (all dims but the first); 0 for a vector."""
        return self.size // self.shape[0] if len(self.shape) > 1 and self.size else 0

    def rank(self, most: int) -> int:
        """Rank of its factors, at most `most`; 0 where factors would be no smaller, as for every vector."""
        rows = self.shape[0] if self.columns else 0
        own = min(most, rows, self.columns)
        return own if own * (rows + self.columns) < self.size else 0

    def rows(self, low: int, high: int) -> tuple[int, int, int]:
        """Return where its elements low to high are: the first row, what they skip of it, and the number of rows."""
        row, skip = divmod(low, self.columns)
        return row, skip, -(-(skip + high - low) // self.columns)


class DenseLayout(NamedTuple):
    """Which blocks of which ids the parameters of a dense table fill."""

    ids: Ids  # (num_blocks,) in the order in which parameters lie in the blocks
    places: Sequence[ParameterSlice]  # in that order

    def filled(self, block: int) -> Ids:
        """Return how many floats of each block (num_blocks,) are those of a parameter; the rest is padding."""
        filled = np.full(len(self.ids), block)
        for place in self.places:
            if rest := place.size % block:
                filled[place.start + place.size // block] = rest
        return filled


@dataclass(slots=True)
class _Matrix:
    """The factors of one parameter; `right` is where the next step begins (the warm start)."""

    left: Floats  # (rows, rank), orthonormal; none where not all of the last gradient was there
    right: Floats  # (columns, rank)


class LowRank:
    """The factors of one dense table's gradients, from push to push.

    A matrix for which they would be no smaller, and every vector, goes as it is.
    """

    def __init__(self, layout: DenseLayout, block: int, rank: int, seed: int) -> None:
        self.rank = rank
        self._order = np.argsort(layout.ids)
        self._ids = layout.ids[self._order]
        self._places, self._block = layout.places, block
        self._gradients = np.zeros((len(layout.ids), block), np.float32)  # of this push, with what was held back
        self._matrices: dict[int, _Matrix] = {}
        for number, place in enumerate(self._places):
            if own := place.rank(rank):
                random = np.random.Generator(np.random.Philox(key=[seed, number]))
                right = random.standard_normal((place.columns, own), np.float32)
                self._matrices[number] = _Matrix(np.empty((0, own), np.float32), right)

    def begin(self, ids: Ids, rows: Floats) -> None:
        """Factor what a whole push is to send: finite blocks (U, block) of ids (U,)."""
        blocks = self._blocks(ids)
        self._gradients[blocks] = rows
        present = np.zeros(len(self._ids), np.bool_)
        present[blocks] = True
        for number, matrix in self._matrices.items():
            place = self._places[number]
            span = slice(place.start, place.start - (-place.size // self._block))
            matrix.left = matrix.left[:0]
            if not present[span].all():
                continue
            whole = self._gradients[span].reshape(-1)[: place.size].reshape(-1, place.columns)
            if not np.isfinite(whole).all():
                continue
            left = np.linalg.qr(whole @ matrix.right)[0]
            right = whole.T @ left
            if np.isfinite(right).all():  # else no later step would be
                matrix.left, matrix.right = left, right

    def payload(self, ids: Ids, values: ValuesCodec, key: int | None) -> Bytes:
        """Encode the factors for some of the ids of this push, in any order."""
        return encode_low_rank(list(self._pieces(self._blocks(ids))), values, key)

    def state_dict(self) -> Mapping[str, object]:
        """Return the factors, by which a resumed run has the same bits."""
        return {"rank": self.rank, "rights": {str(number): matrix.right for number, matrix in self._matrices.items()}}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore the state that `state_dict` returned. ValueError where it is of other parameters."""
        match state:
            case {"rights": dict(rights)}:
                found = {int(number): np.asarray(right, np.float32) for number, right in rights.items()}
                same = {number: matrix.right.shape for number, matrix in self._matrices.items()}
                if {number: right.shape for number, right in found.items()} == same:
                    for number, right in found.items():
                        self._matrices[number].right = right
                    return
        raise ValueError("the state of powersgd is that of other parameters, or of another rank")

    def _blocks(self, ids: Ids) -> Ids:
        return self._order[np.searchsorted(self._ids, ids)]

    def _pieces(self, blocks: Ids) -> Iterator[Chunk]:
        """Yield the factors or plain values of these blocks, one run of neighbours after the other."""
        for number, low, high, position in _runs(self._places, self._block, blocks):
            place, matrix = self._places[number], self._matrices.get(number)
            rank = 0 if matrix is None or not len(matrix.left) else matrix.left.shape[1]
            if matrix is not None and len(_float_counts(place, rank, low, high)) == 2:
                row, skip, rows = place.rows(low, high)
                left, right = matrix.left[row : row + rows].T, matrix.right.T
                yield Factors(position, high - low, skip, np.ascontiguousarray(left), np.ascontiguousarray(right))
            else:
                start = place.start * self._block
                yield PlainRun(position, self._gradients.reshape(-1)[start + low : start + high])


def predict_low_rank(layout: DenseLayout, block: int, rank: int, parts: Iterable[Ids], values: ValuesCodec) -> int:
    """Bytes of the payloads of a push of these parts, of all blocks and finite."""
    order, places = np.argsort(layout.ids), layout.places
    total = 0
    for ids in parts:
        runs = _runs(places, block, order[np.searchsorted(layout.ids[order], ids)])
        counts = [_float_counts(places[number], places[number].rank(rank), low, high) for number, low, high, _ in runs]
        total += low_rank_nbytes(counts, values)
    return total


def _runs(places: Sequence[ParameterSlice], block: int, blocks: Ids) -> Iterator[tuple[int, int, int, int]]:
    """The parts of parameters that lie in these blocks, and where they are among them.

    Each as the number of its place, from which of its elements to which, and its position in the flat blocks.
    """
    if not len(blocks):  # where none was finite
        return
    starts = np.flatnonzero(np.diff(blocks, prepend=-2) != 1)
    for first, last in zip(starts, [*starts[1:], len(blocks)], strict=True):
        begin, end = (int(blocks[first]) * block, (int(blocks[last - 1]) + 1) * block)
        for number, place in enumerate(places):
            start = place.start * block
            low, high = max(begin, start), min(end, start + place.size)
            if low < high:
                yield number, low - start, high - start, int(first) * block + low - begin


def _float_counts(place: ParameterSlice, rank: int, low: int, high: int) -> tuple[int, ...]:
    """How many floats are sent for elements low to high of a parameter: those of P and Q, or, if fewer, themselves."""
    if rank:
        rows = place.rows(low, high)[2]
        if rank * (rows + place.columns) < high - low:
            return rank * rows, rank * place.columns
    return (high - low,)
