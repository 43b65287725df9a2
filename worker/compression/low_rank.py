"""PowerSGD (Vogels et al. 2019): gradients of dense matrices as two thin factors, with error feedback.

Every worker has factors of its own, and a shard adds their products: there is no all-reduce that would need one P for
all. What the factors leave out stays in a residual and is in the next gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embershard.proto.codec.low_rank import Factors, Piece, Run, decode_low_rank, encode_low_rank
from embershard.proto.codec.values import ValuesCodec

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Place(NamedTuple):
    """Where a parameter lies in a dense table: from the first element of block `start` on."""

    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def columns(self) -> int:
        """Of the matrix that it is to PowerSGD: all dims but the first are one; 0 for a vector."""
        return self.size // self.shape[0] if len(self.shape) > 1 and self.size else 0


@dataclass(slots=True)
class _Matrix:
    """The factors of one parameter; `right` is where the next step begins (the warm start)."""

    left: Floats  # (rows, rank), orthonormal; empty where the last gradient was not finite
    right: Floats  # (columns, rank)


class LowRank:
    """The gradients of one dense table, on their way to its shards.

    ids: (num_blocks,) those of its blocks, in the order in which parameters lie in them. A matrix for which the factors
    would be no smaller, and every vector, go as they are.
    """

    def __init__(
        self, ids: Ids, block: int, places: Sequence[Place], rank: int, values: ValuesCodec, seed: int
    ) -> None:
        self._order = np.argsort(ids)
        self._ids = ids[self._order]
        self._places, self._values, self._block = places, values, block
        self._residual = np.zeros((len(ids), block), np.float32)
        self._rate = 0.0  # of the last push
        self._gradients = np.zeros_like(self._residual)  # of this push, with the residual
        self._finite = np.ones(len(ids), np.bool_)  # blocks of it
        self._matrices: dict[int, _Matrix] = {}
        for number, place in enumerate(places):
            rows = place.shape[0] if place.columns else 0
            own = min(rank, rows, place.columns)
            if own and own * (rows + place.columns) < place.size:
                random = np.random.Generator(np.random.Philox(key=[seed, number]))
                right = random.standard_normal((place.columns, own), np.float32)
                self._matrices[number] = _Matrix(np.empty((0, own), np.float32), right)

    def begin(self, ids: Ids, rows: Floats, rate: float) -> None:
        """Take the gradients of a whole push: ids (U,) whose blocks are rows (U, block), at a learning rate."""
        blocks = self._blocks(ids)
        if rate > 0:
            if self._rate > 0 and rate != self._rate:
                self._residual *= np.float32(self._rate / rate)
            self._rate = rate
        self._finite[:] = True
        self._finite[blocks] = np.isfinite(rows).all(1)
        self._gradients[blocks] = rows
        here = blocks[self._finite[blocks]]
        self._gradients[here] += self._residual[here]
        present = np.zeros(len(self._residual), np.bool_)
        present[blocks] = True
        for number, matrix in self._matrices.items():
            place = self._places[number]
            span = slice(place.start, place.start - (-place.size // self._block))
            if (present & self._finite)[span].all():
                whole = self._gradients[span].reshape(-1)[: place.size].reshape(-1, place.columns)
                matrix.left = np.linalg.qr(whole @ matrix.right)[0]
                matrix.right = whole.T @ matrix.left
            else:
                matrix.left = matrix.left[:0]

    def payload(self, ids: Ids, key: int | None) -> Bytes:
        """What is sent for some of the ids of this push, in any part of it; the rest of theirs is held back."""
        blocks = self._blocks(ids)
        payload = encode_low_rank(list(self._pieces(blocks)), self._values, key)
        sent = decode_low_rank(payload[2:], self._values, len(ids), self._block)
        kept = np.isfinite(sent).all(1)  # a block that is not finite is skipped by the shard, and is never held back
        self._residual[blocks[kept]] = self._gradients[blocks[kept]] - sent[kept]
        return payload

    def give_back(self, ids: Ids, payload: Bytes, rate: float) -> None:
        """Hold back again what was sent at a learning rate, and will never be applied."""
        sent = decode_low_rank(payload[2:], self._values, len(ids), self._block)
        kept = np.isfinite(sent).all(1)
        factor = np.float32(rate / self._rate if self._rate > 0 else 1.0)
        self._residual[self._blocks(ids)[kept]] += factor * sent[kept]

    def held(self) -> tuple[Ids, Floats]:
        """Ids and rows of all that is held back, to be sent when another codec follows."""
        some = np.flatnonzero(self._residual.any(1))
        ids = np.empty_like(self._ids)
        ids[self._order] = self._ids
        return ids[some], self._residual[some]

    def state_dict(self) -> Mapping[str, object]:
        """What a resumed run goes on with, to the bit."""
        rights = {str(number): matrix.right for number, matrix in self._matrices.items()}
        return {"residual": self._residual, "rate": self._rate, "rights": rights}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from there. ValueError where it is that of other parameters."""
        match state:
            case {"residual": residual, "rate": float(rate), "rights": dict(rights)}:
                found = {int(number): np.asarray(right, np.float32) for number, right in rights.items()}
                same = {number: matrix.right.shape for number, matrix in self._matrices.items()}
                if {number: right.shape for number, right in found.items()} == same:
                    self._residual[...] = np.asarray(residual, np.float32)
                    self._rate = rate
                    for number, right in found.items():
                        self._matrices[number].right = right
                    return
        raise ValueError("the state of powersgd is that of other parameters, or of another rank")

    def _blocks(self, ids: Ids) -> Ids:
        return self._order[np.searchsorted(self._ids, ids)]

    def _pieces(self, blocks: Ids) -> Iterator[Piece]:
        """What is sent of these blocks, one run of neighbours after the other."""
        starts = np.flatnonzero(np.diff(blocks, prepend=-2) != 1)
        for first, last in zip(starts, [*starts[1:], len(blocks)], strict=True):
            begin, end = (int(blocks[first]) * self._block, (int(blocks[last - 1]) + 1) * self._block)
            for number, place in enumerate(self._places):
                low = max(begin, place.start * self._block)
                high = min(end, place.start * self._block + place.size)
                if low < high:
                    yield self._piece(number, low, high, int(first) * self._block + low - begin)

    def _piece(self, number: int, low: int, high: int, position: int) -> Piece:
        """Elements low to high of the table, which belong to one parameter."""
        place, matrix = self._places[number], self._matrices.get(number)
        if matrix is not None and len(matrix.left):
            row, skip = divmod(low - place.start * self._block, place.columns)
            rows = -(-(skip + high - low) // place.columns)
            if matrix.left.shape[1] * (rows + place.columns) < high - low:
                left, right = matrix.left[row : row + rows].T, matrix.right.T
                return Factors(position, high - low, skip, np.ascontiguousarray(left), np.ascontiguousarray(right))
        return Run(position, self._gradients.reshape(-1)[low:high])
