"""Collect the gradients that autograd computes for the tables, and sum them to one row per id for a push."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from embershard.proto.arrays import Floats
from embershard.proto.messages import TableKey
from embershard.proto.routing import BundleRoute, Placement, Route, ascending, make_route
from embershard.proto.spec import TableSpec
from embershard.worker.client.client import Client

_MANY_PARTS = 1024  # of gradients, before they are summed: so much memory at most where many backwards make a step
_MANY_BACKWARDS = 1000  # without a step: more than anybody accumulates
_NO_STEP = (
    "%d backward passes and no session.step(): the shards' weights are as they were; call it where torch's loop has "
    "optimizer.step()"
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class RowGradients:
    """Gradients of one read of one table."""

    spec: TableSpec
    route: Route
    gradients: torch.Tensor  # (U, dim), in route order
    padding: int | None = None  # position of the row that takes no gradient
    specs: Mapping[str, TableSpec] | None = None  # of the tables of a bundle, by name; `spec` is one of them

    @property
    def key(self) -> TableKey:
        """The table, or the members of a bundle."""
        return self.route.tables if isinstance(self.route, BundleRoute) else self.spec.name

    @property
    def tables(self) -> tuple[str, ...]:
        """The table, or those of a bundle."""
        return self.route.tables if isinstance(self.route, BundleRoute) else (self.spec.name,)

    def split(self) -> list[RowGradients]:
        """Gradients of one table each."""
        if not isinstance(self.route, BundleRoute):
            return [self]
        assert self.specs is not None
        return [
            RowGradients(self.specs[name], route, self.gradients[torch.from_numpy(places)])
            for name, route, places in self.route.members()
        ]


class CollectedGradients:
    """The gradients of the tables since the last step, which a loop may forget: the log says so then."""

    def __init__(self, client: Client) -> None:
        self.backwards = 0  # since the last step
        self._client = client
        self._parts: list[RowGradients] = []
        self._of_table: dict[str, RowGradients] | None = None  # the parts, once they are one per table
        self._most = _MANY_PARTS  # parts that there may be before they are summed
        self._last_backward = -1  # autograd's number of it

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, part: RowGradients) -> None:
        """Keep gradients that a backward has computed."""
        self._parts.append(part)
        self._of_table = None
        if len(self._parts) >= self._most:
            self._most = max(_MANY_PARTS, 2 * len(self.merged()))  # more tables than that would be summed at each part
        if (backward := torch._C._current_graph_task_id()) != self._last_backward:
            self._last_backward = backward
            self.backwards += 1
            if self.backwards == _MANY_BACKWARDS:
                _log.warning(_NO_STEP, self.backwards)

    def merged(self) -> Sequence[RowGradients]:
        """One part per table, or bundle: those of an id that was read several times are summed."""
        if self._of_table is None:
            self._parts = merge(self._parts, self._client.placement, self._client.compressor.packs)
        return self._parts

    def by_table(self) -> list[RowGradients]:
        """One part per table, in the order of their names; you may change them in place."""
        return sorted(self._split().values(), key=lambda part: part.spec.name)

    def of_table(self, table: str) -> RowGradients | None:
        """The gradients of one table; None where it has none. Cheap to ask again, as loops over parameters do."""
        return self._split().get(table)

    def _split(self) -> dict[str, RowGradients]:
        if self._of_table is None:
            self._parts = [one for part in self.merged() for one in part.split()]
            self._of_table = {part.spec.name: part for part in self._parts}
        return self._of_table

    def drop(self, table: str) -> None:
        """Forget those of one table."""
        if self._of_table is not None:
            self._of_table.pop(table, None)
            self._parts = list(self._of_table.values())
        elif any(table in part.tables for part in self._parts):
            self._parts = [one for part in self._parts for one in part.split() if table not in one.tables]

    def clear(self) -> None:
        """Forget the gradients of all tables, as after a step."""
        self._parts, self._of_table = [], None

    def warn_if_unused(self) -> None:
        """Say in the log that there were several backward passes, and never a step."""
        if 1 < self.backwards < _MANY_BACKWARDS:
            _log.warning(_NO_STEP, self.backwards)


def merge(
    collected: Sequence[RowGradients], placement: Placement, packs: Callable[[str], bool] = lambda table: False
) -> list[RowGradients]:
    """One part per table, without padding: gradients of an id that was read several times are summed.

    `packs`: whether a table's ids may travel packed, for which they have to ascend.
    """
    tables: dict[TableKey, list[RowGradients]] = {}
    for part in _bundled(collected):
        tables.setdefault(part.key, []).append(_without_padding(part))
    return [_sum(parts, placement, packs) for parts in tables.values()]


def _bundled(collected: Sequence[RowGradients]) -> Sequence[RowGradients]:
    """The parts, with those of bundles divided into tables where another part has one of these, read otherwise."""
    if not any(isinstance(part.route, BundleRoute) for part in collected):
        return collected
    reads = {id(part.route.ids): part.tables for part in collected}
    if len(set(chain.from_iterable(reads.values()))) == sum(map(len, reads.values())):
        return collected
    return [one for part in collected for one in part.split()]


def to_arrays(merged: Sequence[RowGradients]) -> list[tuple[TableKey, Route, Floats]]:
    """(table or members of a bundle, route, (U, dim) gradients) of every part, on the host."""
    arrays = to_host([part.gradients for part in merged])
    return [(part.key, part.route, array) for part, array in zip(merged, arrays, strict=True)]


def to_host(tensors: Sequence[torch.Tensor]) -> list[Floats]:
    """Every tensor as a float32 array: all copies start before any is waited for."""
    copies: list[torch.Tensor] = []
    devices: set[torch.device] = set()
    for tensor in tensors:
        tensor = tensor.detach().to(torch.float32)
        if tensor.is_cuda:
            target = torch.empty(tensor.shape, dtype=torch.float32, pin_memory=True, device="cpu")
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
        return replace(parts[0], gradients=total)
    union = make_route(np.concatenate([other.route.ids for other in parts]), spec.space_key, placement)
    if packs(spec.name):
        union = ascending(union)
    summed = torch.zeros((len(union.ids), spec.dim), dtype=torch.float32, device=total.device)
    start = 0
    for other in parts:
        # ids of one part are unique, so that the order of the sum is the order of the reads, on every device
        index = torch.from_numpy(union.index[start : start + len(other.route.ids)]).to(summed.device)
        summed.index_add_(0, index, other.gradients.to(summed))
        start += len(other.route.ids)
    return RowGradients(spec, union, summed)
