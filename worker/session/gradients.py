"""Collect the gradients that autograd computes for the tables, and sum them to one row per id for a push."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from embershard.proto.arrays import Floats
from embershard.proto.routing import Placement, Route, ascending, make_route
from embershard.proto.spec import TableSpec


@dataclass(frozen=True, slots=True, eq=False)
class RowGradients:
    """Gradients of one read of one table."""

    spec: TableSpec
    route: Route
    gradients: torch.Tensor  # (U, dim), in route order
    padding: int | None = None  # position of the row that takes no gradient


def merge(
    collected: Sequence[RowGradients], placement: Placement, packs: Callable[[str], bool] = lambda table: False
) -> list[RowGradients]:
    """One part per table, without padding: gradients of an id that was read several times are summed.

    `packs`: whether a table's ids may travel packed, for which they have to ascend.
    """
    tables: dict[str, list[RowGradients]] = {}
    for part in collected:
        tables.setdefault(part.spec.name, []).append(_without_padding(part))
    return [_sum(parts, placement, packs) for parts in tables.values()]


def to_arrays(merged: Sequence[RowGradients]) -> list[tuple[str, Route, Floats]]:
    """(table, route, (U, dim) gradients) of every part, on the host."""
    arrays = to_host([part.gradients for part in merged])
    return [(part.spec.name, part.route, array) for part, array in zip(merged, arrays, strict=True)]


def to_host(tensors: Sequence[torch.Tensor]) -> list[Floats]:
    """Every tensor as a float32 array: all copies start before any is waited for."""
    copies: list[torch.Tensor] = []
    devices: set[torch.device] = set()
    for tensor in tensors:
        tensor = tensor.detach().to(torch.float32)
        if tensor.is_cuda:
            target = torch.empty(tensor.shape, dtype=torch.float32, pin_memory=True)
            copies.append(target.copy_(tensor, non_blocking=True))
            devices.add(tensor.device)
        else:
            copies.append(tensor.cpu().contiguous())
    for device in devices:  # which need not be the current one
        torch.cuda.current_stream(device).synchronize()
    return [copy.numpy() for copy in copies]


def _without_padding(part: RowGradients) -> RowGradients:
    # a zero gradient is not enough: it would move the row under momentum, Adam or weight decay
    if part.padding is None:
        return part
    keep = np.ones(len(part.route.ids), bool)
    keep[part.padding] = False
    gradients = part.gradients[torch.from_numpy(keep).to(part.gradients.device)]
    return RowGradients(part.spec, part.route.select(keep), gradients)


def _sum(parts: list[RowGradients], placement: Placement, packs: Callable[[str], bool]) -> RowGradients:
    spec, route, total = parts[0].spec, parts[0].route, parts[0].gradients
    if len(parts) == 1:
        return parts[0]
    if all(other.route.ids is route.ids for other in parts):
        for other in parts[1:]:
            total = total + other.gradients.to(total)
        return RowGradients(spec, route, total)
    union = make_route(np.concatenate([other.route.ids for other in parts]), spec.space_key, placement)
    if packs(spec.name):
        union = ascending(union)
    summed = torch.zeros((len(union.ids), spec.dim), device=total.device)
    start = 0
    for other in parts:
        # ids of one part are unique, so that the order of the sum is the order of the reads, on every device
        index = torch.from_numpy(union.index[start : start + len(other.route.ids)]).to(summed.device)
        summed.index_add_(0, index, other.gradients.to(summed))
        start += len(other.route.ids)
    return RowGradients(spec, union, summed)
