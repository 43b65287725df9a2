"""The payload of one table's gradients in a push: which rows or elements it holds, and their values.

docs/payloads.md is the specification. A payload says neither how many ids it is about nor their dim: the message around
it does, so that it cannot make a reader take memory that the message does not account for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import types

from embershard.proto.arrays import MAX_MESSAGE_BYTES, Bytes, Floats, Ids
from embershard.proto.codec.flat import decode_flat, encode_flat, flat_nbytes
from embershard.proto.codec.integers import damaged, decode_integers, encode_integers, read_varint
from embershard.proto.codec.low_rank import LOW_RANK, decode_low_rank
from embershard.proto.codec.name import BUILTIN_VALUES
from embershard.proto.codec.positions import decode_positions, encode_drawn, encode_positions
from embershard.proto.codec.values.registry import ValuesCodec, find_values
from embershard.proto.compiled.jit import compiled

Find = Callable[[str], ValuesCodec]

ALL_ROWS, SOME_ROWS, ELEMENTS, AGED_ELEMENTS = 0, 1, 2, 4  # forms, beside LOW_RANK: the first byte
CUSTOM = 255  # the second byte of a user-defined values codec, which the message names
NO_AGES = 255  # in place of the kind of the ages' integers
MAX_AGE = 2**24  # float32 counts exactly up to it
_ALIGNMENT = 8  # bytes


class Decoded(NamedTuple):
    """A decoded payload: rows, and to which of the message's ids they belong."""

    positions: Ids | None  # (R,) int64 ascending, which of the ids; None: all
    rows: Floats  # (R, dim) float32
    ages: Floats | None  # (R,) float32 from 1, how many pushes each row stands for; None: one


def encode_rows(
    rows: Floats,
    values: ValuesCodec,
    key: int | None,
    *,
    positions: Ids | None = None,
    ages: Floats | None = None,
    num_ids: int = 0,
) -> Bytes:
    """rows: (R, dim) of all ids of the message, or of those at `positions` (R,) int64 ascending among its num_ids.

    ages: (R,) whole numbers from 1. key: of the values codec's random numbers.
    """
    if ages is not None and (ages == 1).all():
        ages = None
    parts = []
    if positions is not None or ages is not None:
        at = np.arange(len(rows)) if positions is None else positions
        parts.append(encode_positions(at, len(rows) if positions is None else num_ids))
        if ages is None:
            parts.append(np.array([NO_AGES], np.uint8))
        else:
            parts.append(_encode_ages(ages))
    head = np.array([SOME_ROWS if parts else ALL_ROWS, values.code], np.uint8)
    before = np.concatenate([head, *parts]) if parts else head
    # one piece of memory, in which the values begin where floats may: copying them behind the head would show
    gap = -before.size % _ALIGNMENT
    payload = np.empty(gap + before.size + values.nbytes(*rows.shape), np.uint8)[gap:]
    payload[: before.size] = before
    values.encode(rows, payload[before.size :], key)
    return payload


def encode_elements(
    positions: Ids,
    values: Floats,
    shape: tuple[int, int],
    values_codec: ValuesCodec,
    key: int | None,
    *,
    drawn: int | None = None,
    ages: Floats | None = None,
) -> Bytes:
    """values: (K,) float32 at `positions` (K,) int64 ascending in the flattened rows of `shape` (U, dim).

    drawn: the key with which random_positions gave just these positions; it then travels in their place. ages: (U,)
    whole numbers from 1, of all rows; those travel of which there are elements.
    """
    form, parts = (
        ELEMENTS,
        [encode_positions(positions, shape[0] * shape[1]) if drawn is None else encode_drawn(positions.size, drawn)],
    )
    if ages is not None:
        told = ages[_rows_of(positions, *shape)]
        if (told > 1).any():
            form = AGED_ELEMENTS
            parts.append(_encode_ages(told))
    head = np.array([form, values_codec.code], np.uint8)
    return np.concatenate([head, *parts, encode_flat(values, values_codec, key)])


def decode(payload: Bytes, num_ids: int, dim: int, find: Find = find_values, name: str = "") -> Decoded:
    """The rows of a payload about num_ids ids of a table of this dim; elements that it leaves out are 0.

    Total: any bytes give a value or DamagedPayload, and take at most four times the memory of num_ids ids and rows,
    which must not be over the largest message. find, name: where a user-defined values codec is found (UnknownCodec),
    and its name.
    """
    if 4 * num_ids * dim > MAX_MESSAGE_BYTES:  # as rows they could not have been sent, so nobody cut them for that
        raise damaged(f"{num_ids} rows of dim {dim} are over {MAX_MESSAGE_BYTES} bytes")
    form, values = _head(payload, find, name)
    body = payload[2:]
    if form == ALL_ROWS:
        return Decoded(None, _read_rows(body, values, num_ids, dim), None)
    if form == SOME_ROWS:
        return _read_some_rows(body, values, num_ids, dim)
    if form in (ELEMENTS, AGED_ELEMENTS):
        return _read_element_rows(body, values, num_ids, dim, aged=form == AGED_ELEMENTS)
    if form == LOW_RANK:
        return Decoded(None, decode_low_rank(body, values, num_ids, dim), None)
    raise damaged(f"form {form}, which nobody writes")


def decode_elements(payload: Bytes, num_ids: int, dim: int) -> tuple[Ids, Floats]:
    """The positions (K,) int64 and values (K,) float32 of a payload of elements, as it holds them; DamagedPayload."""
    form, values = _head(payload, find_values, "")
    if form != ELEMENTS:
        raise damaged(f"form {form} where elements should be")
    positions, data = _read_element_positions(payload[2:], values, num_ids * dim)
    return positions, _read_floats(data, values, positions.size)


def _head(payload: Bytes, find: Find, name: str) -> tuple[int, ValuesCodec]:
    if payload.size < 2:
        raise damaged(f"it ends after {payload.size} bytes")
    form, code = payload[:2].tolist()
    if code == CUSTOM and name:
        return form, find(name)
    if code >= len(BUILTIN_VALUES):
        raise damaged(f"values codec {code}, which nobody writes")
    return form, find(BUILTIN_VALUES[code])


def _read_rows(data: Bytes, values: ValuesCodec, num_rows: int, dim: int) -> Floats:
    if data.size != values.nbytes(num_rows, dim):  # before memory is taken
        raise damaged(f"{data.size} bytes for {num_rows} rows of dim {dim} by {values.name}")
    rows = np.empty((num_rows, dim), np.float32)
    values.decode(data, rows)
    return rows


def _read_some_rows(data: Bytes, values: ValuesCodec, num_ids: int, dim: int) -> Decoded:
    positions, used = decode_positions(data, num_ids)
    ages, data = _read_ages(data[used:], positions.size)
    return Decoded(positions, _read_rows(data, values, positions.size, dim), ages)


def _read_element_rows(data: Bytes, values: ValuesCodec, num_ids: int, dim: int, *, aged: bool) -> Decoded:
    """The rows that have at least one element."""
    positions, data = _read_element_positions(data, values, num_ids * dim)
    touched, ages = _rows_of(positions, num_ids, dim), None
    if aged:
        ages, data = _read_ages(data, touched.size)
    floats = _read_floats(data, values, positions.size)
    rows = np.zeros((touched.size, dim), np.float32)
    _scatter(positions, floats, rows)
    return Decoded(touched, rows, ages)


def _read_element_positions(data: Bytes, values: ValuesCodec, num_elements: int) -> tuple[Ids, Bytes]:
    """The positions, and the bytes after them."""
    count, _ = read_varint(data, num_elements, "the count of elements")
    if data.size < flat_nbytes(count, values):  # before memory is taken
        raise damaged(f"{data.size} bytes for {count} elements by {values.name}")
    positions, used = decode_positions(data, num_elements)
    return positions, data[used:]


def _read_floats(data: Bytes, values: ValuesCodec, count: int) -> Floats:
    floats = np.empty(count, np.float32)
    decode_flat(data, values, floats)
    return floats


def _encode_ages(ages: Floats) -> Bytes:
    return encode_integers(np.minimum(ages, MAX_AGE).astype(np.uint64) - np.uint64(1))


def _read_ages(data: Bytes, count: int) -> tuple[Floats | None, Bytes]:
    """The ages of `count` rows, None where all are 1, and the bytes after them."""
    if not data.size:
        raise damaged("it ends where ages should begin")
    if data[0] == NO_AGES:
        return None, data[1:]
    more, used = decode_integers(data, count)
    if more.size and more.max() >= MAX_AGE:
        raise damaged(f"a row of age {int(more.max()) + 1}, over {MAX_AGE}")
    return (more + np.uint64(1)).astype(np.float32), data[used:]


def _rows_of(positions: Ids, num_ids: int, dim: int) -> Ids:
    """The rows in which elements lie, each once."""
    touched = np.empty(min(positions.size, num_ids), np.int64)
    return touched[: _touched_rows(positions, dim, touched)]


_IDS = types.Array(types.int64, 1, "C", readonly=True)


@compiled(types.int64(_IDS, types.int64, types.int64[::1]))
def _touched_rows(positions: Ids, dim: int, touched: Ids) -> int:
    """Fill touched with the rows of these elements, each once; how many."""
    count, end = 0, np.int64(0)
    for i in range(positions.size):
        if positions[i] >= end:
            row = positions[i] // dim
            touched[count] = row
            count += 1
            end = (row + 1) * dim
    return count


@compiled(types.void(_IDS, types.Array(types.float32, 1, "C", readonly=True), types.float32[:, ::1]))
def _scatter(positions: Ids, floats: Floats, rows: Floats) -> None:
    """rows: (R, dim), of those that have elements, in their order."""
    dim = np.int64(rows.shape[1])
    row, start = np.int64(-1), np.int64(-dim)
    for i in range(positions.size):
        at = positions[i]
        if at >= start + dim:
            start = at // dim * dim
            row += 1
        rows[row, at - start] = floats[i]
