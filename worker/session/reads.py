"""Rows that forwards read: routed, pulled, and matched to the tensor of ids that asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from embershard.proto.arrays import Floats, Ids
from embershard.proto.routing import Route, ascending, make_routes
from embershard.proto.spec import TableSpec
from embershard.proto.timing import span
from embershard.worker.client.push import Versions
from embershard.worker.device import pinned, to_device
from embershard.worker.kernels import Mask, overlap
from embershard.worker.session.dense import DenseWeights
from embershard.worker.session.row_source import RowSource


class Lookup(NamedTuple):
    """Rows to be pulled: those of `ids` in a table, for a module on `device`."""

    spec: TableSpec
    ids: torch.Tensor  # any shape, int32 or int64
    device: torch.device


@dataclass(slots=True, eq=False)
class LookupResult:
    """Rows of one table at one clock, for one tensor of ids."""

    ids: torch.Tensor
    version: int  # of `ids`: an in-place change makes the rows those of other ids
    route: Route
    rows: torch.Tensor  # (U, dim) float32 on the device, in route order
    index: torch.Tensor  # of the shape of `ids`, on the device: rows[index] are the rows of `ids`

    def has_rows_of(self, ids: torch.Tensor) -> bool:
        """Whether these are the rows of a tensor with the same ids in it."""
        if ids.shape != self.index.shape or ids.dtype not in (torch.int64, torch.int32):
            return False
        # what was routed, whatever became of self.ids since then
        return np.array_equal(ids.detach().cpu().reshape(-1).numpy(), self.route.ids[self.route.index])


LookupResults = dict[str, list[LookupResult]]  # by table


class PrefetchedRows:
    """Rows that were pulled before the model asks for them."""

    def __init__(self) -> None:
        self.forward: LookupResults = {}  # for the forward that runs
        self.batch: LookupResults | None = None  # for the batch that `prefetch` gave out; None outside of it
        self.found = self.missed = 0  # reads inside `prefetch` that were pulled for the batch, and those that were not

    def find(self, lookup: Lookup, *, exact: bool = False) -> LookupResult | None:
        """The rows of a lookup, if they were pulled: for the very tensor of ids, or for one with the same ids in it.

        An `exact` read is not that of the batch, whose rows came by the tables' codecs.
        """
        result = _find(self.forward, lookup)
        if result is None and self.batch is not None and not exact:
            result = _find(self.batch, lookup)
            self.found += result is not None
            self.missed += result is None
        return result

    def forget(self, table: str | None = None) -> None:
        """Drop everything, or what was pulled of a table for the batch, because it changed on the shards."""
        if table is None:
            self.forward = {}
        if self.batch is not None:
            self.batch = {name: results for name, results in self.batch.items() if table not in (None, name)}


def _find(results: LookupResults, lookup: Lookup) -> LookupResult | None:
    spec, ids, device = lookup
    candidates = [result for result in results.get(spec.name, ()) if result.rows.device == device]
    for result in candidates:
        if result.ids is ids and result.version == _version(ids):
            return result
    return next((result for result in candidates if result.has_rows_of(ids)), None)


@dataclass(slots=True, eq=False)
class _Group:
    """Tables that are read by one route: one tensor of ids, one id space."""

    lookups: list[Lookup]  # of different tables
    version: int  # of their ids
    route: Route
    missing: Mask  # (U,): rows that were not pulled yet, or have to be pulled again
    rows: dict[str, torch.Tensor]  # table -> (U, dim) on the host
    index: dict[torch.device, torch.Tensor]  # on the host, ready to go to a device


class PullBatch:
    """The rows that a batch reads: routed at once, pulled in one or more stages, handed to the model at the end."""

    def __init__(self, source: RowSource, lookups: Sequence[Lookup]) -> None:
        self.lost_leases = 0  # when its rows were pulled
        self.versions: Versions | None = None  # the lowest of its rows, by shard; 0 where a cache may have given some
        self._source = source
        self._dense: list[tuple[DenseWeights, Route, Floats]] = []
        self._groups: list[_Group] = []
        groups: dict[tuple[int, int], list[Lookup]] = {}
        for lookup in {(lookup.spec.name, id(lookup.ids)): lookup for lookup in lookups}.values():
            # one id space, one tensor: one route, whatever the number of tables
            groups.setdefault((id(lookup.ids), lookup.spec.space_key), []).append(lookup)
        if not groups:
            return
        versions = [_version(group[0].ids) for group in groups.values()]
        with span("route"):
            flats = [(flat_ids(group[0].spec, group[0].ids), key) for (_, key), group in groups.items()]
            routes = make_routes(flats, source.placement)
            routes = [
                ascending(route) if any(source.packs_ids(lookup.spec.name) for lookup in group) else route
                for group, route in zip(groups.values(), routes, strict=True)
            ]
        for group, version, route in zip(groups.values(), versions, routes, strict=True):
            rows = {
                lookup.spec.name: torch.empty(
                    (len(route.ids), lookup.spec.dim), dtype=torch.float32, pin_memory=lookup.device.type == "cuda"
                )
                for lookup in group
            }
            index = torch.from_numpy(route.index).view(group[0].ids.shape)
            devices = {lookup.device for lookup in group}
            indices = {device: index if device.type == "cpu" else pinned(index, device) for device in devices}
            self._groups.append(_Group(group, version, route, np.ones(len(route.ids), np.bool_), rows, indices))

    def pull(
        self,
        dense: Sequence[DenseWeights] = (),
        *,
        except_for: PullBatch | None = None,
        clock: int | None = None,
        exact: bool = False,
    ) -> None:
        """Pull the rows that are missing, save those that `except_for` reads too, and dense weights, in one request.

        `clock` is that of the step which will read them. `exact` is that of Client.pull.
        """
        source = self._source
        self.lost_leases = source.lost_leases
        if self.versions is None:
            self.versions = {}
        parts: list[tuple[str, Route]] = []
        out: list[Floats] = []
        partial: list[tuple[torch.Tensor, Mask, Floats]] = []
        for group in self._groups:
            take = group.missing if except_for is None else group.missing & ~except_for._shared_with(group)
            if not take.any():
                continue
            whole = bool(take.all())
            route = group.route if whole else group.route.select(take)
            for table, rows in group.rows.items():
                parts.append((table, route))
                out.append(rows.numpy() if whole else np.empty((len(route.ids), rows.shape[1]), np.float32))
                if not whole:
                    partial.append((rows, take, out[-1]))
            group.missing = group.missing & ~take
        for weights in dense:
            route = weights.reads()
            parts.append((weights.spec.name, route))
            out.append(np.empty((len(route.ids), weights.spec.dim), np.float32))
            self._dense.append((weights, route, out[-1]))
        if parts:
            # a push goes by a whole route, and only where there are gradients
            keep = torch.is_grad_enabled() and not partial
            source.pull(parts, out, keep=keep, clock=clock, versions=self.versions, exact=exact)
        for rows, take, pulled in partial:
            rows.numpy()[take] = pulled

    def _shared_with(self, group: _Group) -> Mask:
        """Rows of another batch's group that this one reads too."""
        shared = np.zeros(len(group.route.ids), np.bool_)
        for mine in self._groups:
            if not mine.rows.keys().isdisjoint(group.rows):
                shared |= overlap(group.route.ids, mine.route.ids)
        return shared

    def reads(self, table: str, ids: Ids) -> bool:
        """Whether the rows of this very array of a route are among those that it reads."""
        return any(table in group.rows and group.route.ids is ids for group in self._groups)

    def invalidate(self, table: str, ids: Ids) -> None:
        """Have the next `pull` bring these rows, pulled before or not: they changed on the shards."""
        for group in self._groups:
            if table in group.rows and not group.missing.all():
                group.missing |= overlap(group.route.ids, ids)

    def accept(self, clock: int) -> LookupResults:
        """Send rows to their devices and put dense weights in place; the training thread alone may do that."""
        for weights, dense, pulled in self._dense:
            if _covers(dense, weights.reads()):  # unless more has to be read since then: then the forward pulls
                weights.accept(dense, pulled, clock)
        results: LookupResults = {}
        for group in self._groups:
            indices = {
                device: index if device.type == "cpu" else to_device(index, device)
                for device, index in group.index.items()
            }
            for lookup in group.lookups:
                rows, index = group.rows[lookup.spec.name], indices[lookup.device]
                if lookup.device.type != "cpu":
                    rows = to_device(rows, lookup.device)
                result = LookupResult(lookup.ids, group.version, group.route, rows, index)
                results.setdefault(lookup.spec.name, []).append(result)
        return results


def flat_ids(spec: TableSpec, ids: torch.Tensor) -> Ids:
    """Ids as (N,) int64 on the host. RuntimeError unless they are int32 or int64."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"table {spec.name!r}: ids must be int64 or int32, got {ids.dtype}")
    return ids.detach().to("cpu", torch.int64).contiguous().view(-1).numpy()


def _covers(route: Route, needed: Route) -> bool:
    return needed is route or bool(np.isin(needed.ids, route.ids).all())


def _version(tensor: torch.Tensor) -> int:
    """Counts in-place changes; inference tensors do not count theirs."""
    return -1 if tensor.is_inference() else tensor._version
