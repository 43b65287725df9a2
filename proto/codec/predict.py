"""How many bytes a codec is expected to send, before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from embershard.proto.codec.flat import flat_nbytes
from embershard.proto.codec.integers import best_rice
from embershard.proto.codec.name import CodecName
from embershard.proto.codec.select import count_of
from embershard.proto.codec.values.registry import ValuesCodec, find_values

HEAD_BYTES = 2  # form and values codec
_KEY = 8
_FILL_BITS = 3.5  # that fill the last byte of Rice codes, on average: much of a message of a few rows


def predict_bytes(
    codec: CodecName,
    num_ids: int,
    dim: int,
    find: Callable[[str], ValuesCodec] = find_values,
    *,
    age: float | None = None,
    touched: float | None = None,
    elements: float | None = None,
) -> float:
    """Expected bytes of what is sent for num_ids rows of this dim, without their ids and what is around a message.

    Exact where all rows travel, and for randomk; the positions of topk, dgc and rows are taken to be random. age: the
    mean of the rows that are sent; where it is not known, 1 / ratio for rows, as after a few steps, and none for
    elements. touched: of how many rows something is sent, on average; where it is not known, by the ratio for rows,
    and as at random for elements. elements: how many are sent, on average; where it is not known, by the ratio. delta:
    as if every row had changed. ValueError for powersgd, whose bytes depend on the shapes of the parameters.
    """
    if codec.is_plain or codec.select == "delta":
        return 4.0 * num_ids * dim
    values = find(codec.values)
    if codec.select == "all":
        return float(HEAD_BYTES + values.nbytes(num_ids, dim))
    if codec.select == "powersgd":
        raise ValueError(f"codec {str(codec)!r}: its bytes depend on the shapes of the parameters")
    if codec.select == "rows":
        whole = float(count_of(codec.number, num_ids)) if touched is None else min(touched, num_ids)
        if age is None:
            age = num_ids / whole if whole else 1.0
        return HEAD_BYTES + sum(
            part * (_position_bytes(count, num_ids) + max(1.0, age_bytes(count, age)) + values.nbytes(count, dim))
            for count, part in _whole_counts(whole)
        )
    size = num_ids * dim
    whole = float(count_of(codec.number, size)) if elements is None else min(elements, size)
    if touched is None:
        touched = num_ids * (1 - math.pow(1 - whole / size, dim)) if whole else 0.0
    drawn = codec.select == "randomk"
    return HEAD_BYTES + age_bytes(touched, age or 1.0) + sum(
        part * (_varint_bytes(count) + 1 + _KEY if drawn else _position_bytes(count, size))
        + part * flat_nbytes(count, values)
        for count, part in _whole_counts(whole)
    )  # fmt: skip


def _whole_counts(mean: float) -> Iterator[tuple[int, float]]:
    """The two counts next to a mean, and which part of the messages has each: a message has whole rows and elements."""
    fewer, share = math.floor(mean), mean % 1
    yield fewer, 1 - share
    if share:
        yield fewer + 1, share


def _position_bytes(count: int, limit: int) -> float:
    """Bytes of `count` positions drawn at random from `limit`."""
    head = _varint_bytes(count) + 1
    return head if count in (0, limit) else head + _gap_bytes(count, count / limit)


def age_bytes(rows: float, age: float) -> float:
    """Bytes of the ages of rows, whose mean is `age`, in a message; none where all are 1."""
    return (1 - math.pow(age, -rows)) * (1 + _gap_bytes(rows, 1 / age)) if age > 1 else 0.0


def _gap_bytes(count: float, density: float) -> float:
    """Bytes of `count` integers that are g with the probability density * (1 - density) ** g."""

    def over(size: float) -> float:
        return math.pow(1 - density, size)

    def bits(k: int) -> float:
        return count * (k + 1 + over(2.0**k) / (1 - over(2.0**k)))

    varints = count * (1 + sum(over(2.0**length) for length in range(7, 64, 7)))
    return min((best_rice(bits, count)[1] + _FILL_BITS) / 8, varints)


def _varint_bytes(value: int) -> int:
    return max(1, math.ceil(value.bit_length() / 7))
