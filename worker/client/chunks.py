"""Parts of routes, and requests cut into messages that a shard takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embershard.proto.errors import MessageTooLarge
from embershard.proto.routing import Route

# what protobuf adds to the arrays, generously: tags, lengths and numbers, once per message and once per table
MESSAGE_OVERHEAD = 256
TABLE_OVERHEAD = 64


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [start, stop) of the `part`-th table of a request."""

    part: int
    start: int
    stop: int

    def within(self, route: Route, shard: int) -> slice:
        """Where these rows of a shard lie in a route."""
        first = int(route.splits[shard])
        return slice(first + self.start, first + self.stop)


def cut(names: Sequence[str], counts: Sequence[int], row_bytes: Sequence[int], limit: int) -> list[list[Chunk]]:
    """Messages of at most `limit` bytes that together carry `counts[k]` rows of table k, in order.

    Tables without rows are left out. MessageTooLarge where not even one row fits.
    """
    messages: list[list[Chunk]] = []
    room = 0
    for part, (name, count, size) in enumerate(zip(names, counts, row_bytes, strict=True)):
        overhead = TABLE_OVERHEAD + len(name.encode())
        start = 0
        while start < count:
            fits = (room - overhead) // size
            if fits < 1:
                room = limit - MESSAGE_OVERHEAD
                fits = (room - overhead) // size
                if fits < 1:
                    raise MessageTooLarge(got=MESSAGE_OVERHEAD + overhead + size, limit=limit)
                messages.append([])
            stop = min(count, start + fits)
            messages[-1].append(Chunk(part, start, stop))
            room -= overhead + (stop - start) * size
            start = stop
    return messages


def select(route: Route, keep: npt.NDArray[np.bool_]) -> Route:
    """The route of the ids where `keep` ((U,) bool) holds; it has no index, for nothing is read through it."""
    before = np.concatenate(([0], np.cumsum(keep)))
    return Route(route.ids[keep], before[route.splits], np.empty(0, np.int64))
