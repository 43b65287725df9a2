"""Routes of reads and pushes as they travel: under the placement of now, and a table at a time where bundles cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from embershard.proto.arrays import Floats, Ids
from embershard.proto.messages import TableKey
from embershard.proto.routing import BundleRoute, Placement, Route, regroup
from embershard.worker.client.push import Gradients

Part = tuple[Floats, Ids, Floats]  # rows of a bundle, which of them are a table's, and these rows

Travels = Callable[[BundleRoute], bool]


def placed(route: Route, placement: Placement) -> Route:
    """The route of the same ids under a placement; the route itself where it is of this one."""
    return route if route.epoch == placement.epoch else regroup(route, placement)


def in_order(rows: Floats, route: Route, mine: Route) -> Floats:
    """Rows of a route, (U, dim), in the order of `mine`, the route of the same ids under another placement."""
    if mine is route:
        return rows
    ordered = np.empty_like(rows)
    ordered[mine.index] = rows
    return ordered


def divide_reads(
    reads: Sequence[tuple[TableKey, Route]], out: Sequence[Floats], travels: Travels
) -> tuple[list[tuple[TableKey, Route]], list[Floats], list[Part]]:
    """The reads and their places, with a read of each table in place of those of bundles that do not travel.

    What is read then has to be copied from the parts into the rows of their bundles.
    """
    divided: list[tuple[TableKey, Route]] = []
    places: list[Floats] = []
    parts: list[Part] = []
    for (table, route), rows in zip(reads, out, strict=True):
        if not isinstance(route, BundleRoute) or travels(route):
            divided.append((table, route))
            places.append(rows)
            continue
        for name, member, at in route.members():
            parts.append((rows, at, np.empty((len(at), rows.shape[1]), np.float32)))
            divided.append((name, member))
            places.append(parts[-1][2])
    return divided, places, parts


def divide_gradients(gradients: Gradients, travels: Travels) -> Gradients:
    """The gradients, with those of each table in place of those of bundles that do not travel."""
    if all(not isinstance(route, BundleRoute) or travels(route) for _, route, _ in gradients):
        return gradients
    divided: list[tuple[TableKey, Route, Floats]] = []
    for table, route, rows in gradients:
        if not isinstance(route, BundleRoute) or travels(route):
            divided.append((table, route, rows))
        else:
            divided += ((name, member, rows[at]) for name, member, at in route.members())
    return divided
