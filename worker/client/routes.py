"""Routes of reads and pushes as they travel: under the placement of now, and a table at a time where bundles cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from embershard.proto.arrays import Floats, Ids
from embershard.proto.messages import TableKey
from embershard.proto.routing import BundleRoute, Placement, Route, regroup
from embershard.worker.client.push import Gradients

Part = tuple[Floats, Ids, Floats]  # rows, some places in them, and the rows that are to be copied there

Travels = Callable[[Route], bool]  # whether a route may travel as it is


class Directory:
    """The placement now. Any thread may read it; a route of an earlier placement is regrouped when it is used."""

    def __init__(self, placement: Placement) -> None:
        self.current = placement
        self._followers: list[Callable[[Placement], None]] = []

    def subscribe(self, follow: Callable[[Placement], None]) -> None:
        """Have `follow` called with each placement that takes the place of the one now."""
        self._followers.append(follow)

    def move(self, placement: Placement) -> None:
        """Replace the placement by a newer one; an older one, or the current one, changes nothing."""
        if placement.epoch <= self.current.epoch:
            return
        self.current = placement
        for follow in self._followers:
            follow(placement)


def placed_reads(
    reads: Sequence[tuple[TableKey, Route]], out: Sequence[Floats], placement: Placement, travels: Travels
) -> tuple[list[tuple[TableKey, Route]], list[Floats], list[Part]]:
    """The reads as they travel, places for their rows, and the parts that then have to be copied."""
    mine: list[tuple[TableKey, Route]] = []
    places: list[Floats] = []
    parts: list[Part] = []
    for (table, route), rows in zip(reads, out, strict=True):
        if travels(route):
            mine.append((table, route))
            places.append(rows)
            continue
        for name, part, at in _placed(table, route, placement):
            parts.append((rows, at, np.empty((len(at), rows.shape[1]), np.float32)))
            mine.append((name, part))
            places.append(parts[-1][2])
    return mine, places, parts


def placed_gradients(gradients: Gradients, placement: Placement, travels: Travels) -> Gradients:
    """The gradients as they travel."""
    mine: list[tuple[TableKey, Route, Floats]] = []
    for table, route, rows in gradients:
        if travels(route):
            mine.append((table, route, rows))
        else:
            mine += ((name, part, rows[at]) for name, part, at in _placed(table, route, placement))
    return mine


def _placed(table: TableKey, route: Route, placement: Placement) -> Iterator[tuple[TableKey, Route, Ids]]:
    """A route, or that of each table of a bundle, under a placement, and where its ids lie in the one given."""
    if isinstance(route, BundleRoute):
        members: Iterator[tuple[TableKey, Route, Ids]] = route.members()
    else:
        members = iter([(table, route, np.arange(len(route.ids)))])
    for name, member, at in members:
        mine = member if member.epoch == placement.epoch else regroup(member, placement)
        if mine is not member:
            places = np.empty_like(at)
            places[mine.index] = at
            at = places
        yield name, mine, at
