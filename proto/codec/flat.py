"""Loose floats through a values codec: as rows of 64, and what is left over as one shorter row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from embershard.proto.arrays import Bytes, Floats
from embershard.proto.codec.values.registry import ValuesCodec
from embershard.proto.errors import DamagedPayload

ROW = 64  # floats: int8 scales by as many
NEXT_KEY = 0x9E3779B97F4A7C15  # equal keys would make both parts round alike


def flat_nbytes(size: int, values: ValuesCodec) -> int:
    """Return the bytes that `size` floats take in this form."""
    rows, rest = divmod(size, ROW)
    return (values.nbytes(rows, ROW) if rows else 0) + (values.nbytes(1, rest) if rest else 0)


def encode_flat(flat: Floats, values: ValuesCodec, key: int | None) -> Bytes:
    """Floats (N,) as bytes. key: of the values codec's random numbers."""
    out = np.empty(flat_nbytes(flat.size, values), np.uint8)
    start = 0
    for rows in _as_rows(np.ascontiguousarray(flat)):
        stop = start + values.nbytes(*rows.shape)
        values.encode(rows, out[start:stop], key)
        start, key = stop, None if key is None else (key + NEXT_KEY) % 2**64
    return out


def decode_flat(data: Bytes, values: ValuesCodec, out: Floats) -> None:
    """Fill out (N,) from all of data; DamagedPayload where it has more or fewer bytes."""
    if data.size != flat_nbytes(out.size, values):
        raise DamagedPayload(codec=values.name, reason=f"{data.size} bytes for {out.size} floats")
    start = 0
    for rows in _as_rows(out):
        stop = start + values.nbytes(*rows.shape)
        values.decode(data[start:stop], rows)
        start = stop


def _as_rows(flat: Floats) -> Iterator[Floats]:
    """Rows of 64 floats of (N,), and what is left as one row: views of it."""
    whole = flat.size // ROW * ROW
    if whole:
        yield flat[:whole].reshape(-1, ROW)
    if whole < flat.size:
        yield flat[whole:].reshape(1, -1)
