"""Payload form 3: what a shard's part of a dense table holds of matrices as P and Q, P Q^T for M (Vogels et al. 2019).

    3, values codec: 1 byte each; pieces: uint32
    of each piece: position, elements, skip, columns, rank: 5 x uint32
    of each piece: its floats

All little endian. A piece covers `elements` of the part, flat in its (U * dim), from `position` on: those of a run of
rows of a matrix with `columns` columns, of whose first row `skip` elements lie before the part. Its floats are P^T
(rank, rows of the run) and then Q^T (rank, columns), fewer than its elements. With rank 0 the elements themselves
follow. Pieces ascend and do not overlap; what lies between them is zero. The values codec writes each array as rows of
64 floats, and what is left over as one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import types

from embershard.proto.arrays import Bytes, Floats
from embershard.proto.codec.flat import NEXT_KEY, decode_flat, encode_flat, flat_nbytes
from embershard.proto.codec.name import MAX_RANK
from embershard.proto.codec.values.registry import ValuesCodec
from embershard.proto.compiled.jit import compiled
from embershard.proto.errors import DamagedPayload

Words = npt.NDArray[np.uint32]

LOW_RANK = 3  # the form, its first byte; the second is the values codec's code
MAX_PIECES = 65_536  # half a second to read; 64 MiB of dense weights have 16,384 blocks, and each one piece
_FIELDS = 5
_U = np.uint64
_WORD = np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class PlainRun:
    """A run of elements as they are."""

    position: int
    values: Floats  # (elements,)


@dataclass(frozen=True, slots=True)
class Factors:
    """A run of a matrix's elements as P Q^T: `elements` of them from `position` on, without the first `skip`."""

    position: int
    elements: int
    skip: int
    left: Floats  # (rank, rows), C order: P^T
    right: Floats  # (rank, columns), C order: Q^T

    @property
    def product(self) -> Floats:
        """The elements, (elements,): as a shard computes them, to the bit."""
        out = np.empty(self.elements, np.float32)
        _multiply(self.left, self.right, self.skip, out)
        return out


Chunk = PlainRun | Factors


def encode_low_rank(pieces: Sequence[Chunk], values: ValuesCodec, key: int | None) -> Bytes:
    """The payload of pieces that ascend; `key` is that of the values codec's random numbers."""
    arrays = [array for piece in pieces for array in _arrays(piece)]
    words = np.array([len(pieces), *(word for piece in pieces for word in _head(piece))], _WORD)
    parts = [np.array([LOW_RANK, values.code], np.uint8), words.view(np.uint8)]
    for array in arrays:
        parts.append(encode_flat(array.reshape(-1), values, key))
        key = None if key is None else (key + 2 * NEXT_KEY) % 2**64  # an array of loose floats takes two
    return np.concatenate(parts)


def low_rank_nbytes(pieces: Sequence[Sequence[int]], values: ValuesCodec) -> int:
    """Bytes of a payload, from the number of floats in each array of its pieces: one, or that of P and that of Q."""
    words = 1 + _FIELDS * len(pieces)
    return 2 + _WORD.itemsize * words + sum(flat_nbytes(size, values) for sizes in pieces for size in sizes)


def decode_low_rank(data: Bytes, values: ValuesCodec, num_ids: int, dim: int) -> Floats:
    """The rows (num_ids, dim) of a payload without its first two bytes. DamagedPayload, before memory is taken."""
    heads = _read_heads(data, values, num_ids * dim)
    flat = np.zeros(num_ids * dim, np.float32)
    start = _WORD.itemsize * (1 + heads.size)
    for position, elements, skip, columns, rank in map(np.ndarray.tolist, heads):
        if rank == 0:
            start = _decode(data, start, values, flat[position : position + elements])
            continue
        rows = -(-(skip + elements) // columns)
        left, right = np.empty((rank, rows), np.float32), np.empty((rank, columns), np.float32)
        start = _decode(data, start, values, left.reshape(-1))
        start = _decode(data, start, values, right.reshape(-1))
        _multiply(left, right, skip, flat[position : position + elements])
    return flat.reshape(num_ids, dim)


def _head(piece: Chunk) -> tuple[int, int, int, int, int]:
    if isinstance(piece, PlainRun):
        return piece.position, len(piece.values), 0, 0, 0
    return piece.position, piece.elements, piece.skip, piece.right.shape[1], len(piece.right)


def _arrays(piece: Chunk) -> tuple[Floats, ...]:
    return (piece.values,) if isinstance(piece, PlainRun) else (piece.left, piece.right)


def _read_heads(data: Bytes, values: ValuesCodec, size: int) -> Words:
    """The heads (pieces, 5) of a part of `size` elements, once they and the length of their floats are right."""
    words = data[: data.size // _WORD.itemsize * _WORD.itemsize].view(_WORD)
    count = int(words[0]) if words.size else -1
    if not 0 <= count <= min((words.size - 1) // _FIELDS, MAX_PIECES):
        raise _damaged(f"{data.size} bytes for {count} pieces, of at most {MAX_PIECES}")
    heads = words[1 : 1 + _FIELDS * count].reshape(-1, _FIELDS)
    end, want = 0, _WORD.itemsize * (1 + heads.size)
    for position, elements, skip, columns, rank in map(np.ndarray.tolist, heads):
        if position < end or elements == 0 or position + elements > size:
            raise _damaged(f"elements {position} to {position + elements} of {size}, after {end}")
        if columns <= skip if rank else skip or columns:
            raise _damaged(f"rank {rank} with {columns} columns, of which {skip} are skipped")
        end = position + elements
        rows = -(-(skip + elements) // columns) if rank else 0
        # bounds the memory by the rows', whatever the values codec makes of few bytes; and the work
        if rank * (rows + columns) >= elements or rank > MAX_RANK:
            raise _damaged(f"rank {rank} for {elements} elements of {rows} rows of {columns} columns")
        sizes = (rank * rows, rank * columns) if rank else (elements,)
        want += sum(flat_nbytes(size, values) for size in sizes)
    if want != data.size:
        raise _damaged(f"{data.size} bytes, not {want}")
    return heads


def _decode(data: Bytes, start: int, values: ValuesCodec, flat: Floats) -> int:
    """Fill `flat` from the bytes that begin at `start`; where they end."""
    stop = start + flat_nbytes(flat.size, values)
    decode_flat(data[start:stop], values, flat)
    return stop


def _damaged(reason: str) -> DamagedPayload:
    return DamagedPayload(codec="powersgd", reason=reason)


@compiled(types.void(types.float32[:, ::1], types.float32[:, ::1], types.int64, types.float32[::1]))
def _multiply(left: Floats, right: Floats, skip: int, out: Floats) -> None:
    """Elements skip, skip + 1, ... of the matrix sum over k of left[k, i] * right[k, j], in this order of sums.

    A loop of our own: the worker keeps back exactly what a shard does not apply, which takes the same bits, whatever
    library and how many threads multiply elsewhere.
    """
    rank, columns = _U(right.shape[0]), _U(right.shape[1])  # unsigned: the compiler then sees runs of memory
    row, column, place, size = _U(0), _U(skip), _U(0), _U(out.size)
    while place < size:
        stop = min(size - place, columns - column)
        for k in range(rank):
            factor = left[k, row]
            if k == 0:
                for j in range(stop):
                    out[place + j] = factor * right[k, column + j]
            else:
                for j in range(stop):
                    out[place + j] += factor * right[k, column + j]
        place += stop
        row += _U(1)
        column = _U(0)
