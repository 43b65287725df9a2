"""What autograd left for the tables: collected per read, one row per id when it is pushed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from embershard.proto.routing import Placement, Route, make_route
from embershard.proto.spec import TableSpec
from embershard.worker.device import to_host
from embershard.worker.pieces import select
from embershard.worker.spans import span

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class RowGradients:
    """Gradients of one read of one table."""

    spec: TableSpec
    route: Route
    gradients: torch.Tensor  # (U, dim), in route order
    padding: int | None = None  # position of the row that takes no gradient


def merge(collected: Sequence[RowGradients], placement: Placement) -> list[tuple[str, Route, Floats]]:
    """One (table, route, (U, dim) gradients) per table: gradients of an id that was read several times are summed."""
    with span("gather"):
        arrays = to_host([part.gradients for part in collected])
        tables: dict[str, list[tuple[Route, Floats]]] = {}
        specs: dict[str, TableSpec] = {}
        for part, array in zip(collected, arrays, strict=True):
            specs[part.spec.name] = part.spec
            tables.setdefault(part.spec.name, []).append(_without_padding(part.route, array, part.padding))
        return [(name, *_sum(parts, specs[name], placement)) for name, parts in tables.items()]


def _without_padding(route: Route, gradients: Floats, padding: int | None) -> tuple[Route, Floats]:
    # a zero gradient is not enough: it would move the row under momentum, Adam or weight decay
    if padding is None:
        return route, gradients
    keep = np.ones(len(route.ids), bool)
    keep[padding] = False
    return select(route, keep), gradients[keep]


def _sum(parts: list[tuple[Route, Floats]], spec: TableSpec, placement: Placement) -> tuple[Route, Floats]:
    route, total = parts[0]
    if len(parts) == 1:
        return route, total
    if all(other.ids is route.ids for other, _ in parts):
        for _, gradients in parts[1:]:
            total = total + gradients
        return route, total
    union = make_route(np.concatenate([other.ids for other, _ in parts]), spec.space_key, placement)
    summed = torch.zeros((len(union.ids), spec.dim))
    start = 0
    for other, gradients in parts:
        # ids of one part are unique, so that the order of the sum is the order of the reads
        index = torch.from_numpy(union.index[start : start + len(other.ids)])
        summed.index_add_(0, index, torch.from_numpy(gradients))
        start += len(other.ids)
    return union, summed.numpy()
