"""Requests cut into messages that a shard takes, and parts of routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embershard.proto.errors import MessageTooLarge
from embershard.proto.routing import Route

# what protobuf adds to the arrays, generously: tags, lengths and numbers, once per message and once per table
MESSAGE_OVERHEAD = 256
TABLE_OVERHEAD = 64


class Chunk(NamedTuple):
    """Rows of one table of a request that one message to one shard carries."""

    part: int  # number of the table in the request
    start: int  # the first row, counted among those of its shard
    rows: slice  # where they lie in the table's route
    is_whole: bool  # whether they are all rows of this table and shard


def split_into_messages(
    parts: Sequence[tuple[str, Route]], shard: int, row_bytes: Sequence[int], limit: int
) -> list[list[Chunk]]:
    """Messages of at most `limit` bytes that together carry a shard's rows of each (table, route), in order.

    `row_bytes` is what a row of each table takes. Tables without rows are left out. MessageTooLarge where not even one
    row fits.
    """
    messages: list[list[Chunk]] = []
    room = 0
    for part, ((table, route), size) in enumerate(zip(parts, row_bytes, strict=True)):
        overhead = TABLE_OVERHEAD + len(table.encode())
        first, end = int(route.splits[shard]), int(route.splits[shard + 1])
        start = first
        while start < end:
            fits = (room - overhead) // size
            if fits < 1:
                room = limit - MESSAGE_OVERHEAD
                fits = (room - overhead) // size
                if fits < 1:
                    raise MessageTooLarge(got=MESSAGE_OVERHEAD + overhead + size, limit=limit)
                messages.append([])
            stop = min(end, start + fits)
            messages[-1].append(Chunk(part, start - first, slice(start, stop), stop - start == end - first))
            room -= overhead + (stop - start) * size
            start = stop
    return messages


def select(route: Route, keep: npt.NDArray[np.bool_]) -> Route:
    """The route of the ids where `keep` ((U,) bool) holds; it has no index, for nothing is read through it."""
    before = np.concatenate(([0], np.cumsum(keep)))
    return Route(route.ids[keep], before[route.splits], np.empty(0, np.int64))
