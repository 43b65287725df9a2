"""What forwards read from the shards: routes, the rows pulled for them, and which tensor of ids each belongs to."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from embershard.proto.arrays import Floats
from embershard.proto.routing import Route, ascending, make_routes
from embershard.proto.timing import span
from embershard.worker.client.chunks import select
from embershard.worker.client.client import Client
from embershard.worker.client.push import Versions, no_versions
from embershard.worker.device import host_rows, pinned, to_device
from embershard.worker.kernels import Mask, overlap
from embershard.worker.session.dense import DenseWeights
from embershard.worker.session.local_steps import LocalSteps
from embershard.worker.session.row_cache import RowCaches, pull_through_cache

if TYPE_CHECKING:
    from embershard.worker.session.remote_table import RemoteTable


class Lookup(NamedTuple):
    """Rows to be pulled: those of `ids` in a table, for a module on `device`."""

    table: RemoteTable
    ids: torch.Tensor  # any shape, int32 or int64
    device: torch.device


@dataclass(slots=True, eq=False)
class Read:
    """Rows of one table at one clock, for one tensor of ids."""

    table: RemoteTable
    ids: torch.Tensor
    version: int  # of `ids`: an in-place change makes the read useless
    route: Route
    rows: torch.Tensor  # (U, dim) float32 on the device, in route order
    index: torch.Tensor  # of the shape of `ids`, on the device: rows[index] are the rows of `ids`

    def holds(self, ids: torch.Tensor) -> bool:
        """Whether these are the rows of a tensor with the same ids in it."""
        if ids.shape != self.index.shape or ids.dtype not in (torch.int64, torch.int32):
            return False
        # what was routed, whatever became of self.ids since then
        return np.array_equal(ids.detach().cpu().reshape(-1).numpy(), self.route.ids[self.route.index])


Reads = dict[str, list[Read]]  # by table


class PrefetchedRows:
    """Rows that were pulled before the model asks for them."""

    def __init__(self) -> None:
        self.forward: Reads = {}  # for the forward that runs
        self.batch: Reads | None = None  # for the batch that `prefetch` gave out; None outside of it
        self.found = self.missed = 0  # reads inside `prefetch` that were pulled for the batch, and those that were not

    def find(self, want: Lookup, *, exact: bool = False) -> Read | None:
        """What is wanted, if it was pulled: for the very tensor of ids, or else for one with the same ids in it.

        An `exact` read is not that of the batch, whose rows came by the tables' codecs.
        """
        read = _find(self.forward, want)
        if read is None and self.batch is not None and not exact:
            read = _find(self.batch, want)
            self.found += read is not None
            self.missed += read is None
        return read

    def forget(self, table: str | None = None) -> None:
        """Let go of everything, or of what was pulled of a table for the batch: it changed on the shards."""
        if table is None:
            self.forward = {}
        if self.batch is not None:
            self.batch = {name: reads for name, reads in self.batch.items() if table not in (None, name)}


def _find(reads: Reads, want: Lookup) -> Read | None:
    _, ids, device = want
    candidates = [read for read in reads.get(want.table.spec.name, ()) if read.rows.device == device]
    for read in candidates:
        if read.ids is ids and read.version == _version(ids):
            return read
    return next((read for read in candidates if read.holds(ids)), None)


@dataclass(slots=True, eq=False)
class _Group:
    """Tables that are read by one route: one tensor of ids, one id space."""

    wanted: list[Lookup]  # of different tables
    version: int  # of their ids
    route: Route
    missing: Mask  # (U,): rows that were not pulled yet, or have to be pulled again
    rows: dict[str, torch.Tensor]  # table -> (U, dim) on the host
    index: dict[torch.device, torch.Tensor]  # on the host, ready to go to a device


class PullBatch:
    """The rows that a batch reads: routed at once, pulled in one or more stages, handed to the model at the end."""

    def __init__(self, wanted: Sequence[Lookup]) -> None:
        self.lost_leases = 0  # when its rows were pulled
        self.versions: Versions | None = None  # the lowest of its rows; 0 where copies of a cache may be among them
        self._dense: list[tuple[DenseWeights, Route, Floats]] = []
        self._groups: list[_Group] = []
        groups: dict[tuple[int, int], list[Lookup]] = {}
        for want in {(want.table.spec.name, id(want.ids)): want for want in wanted}.values():
            # one id space, one tensor: one route, whatever the number of tables
            groups.setdefault((id(want.ids), want.table.spec.space_key), []).append(want)
        versions = [_version(group[0].ids) for group in groups.values()]
        with span("route"):
            flats = [(group[0].table.flat(group[0].ids), key) for (_, key), group in groups.items()]
            routes = make_routes(flats, wanted[0].table.session.placement) if wanted else []
            routes = [
                ascending(route) if any(_packs_ids(want.table) for want in group) else route
                for group, route in zip(groups.values(), routes, strict=True)
            ]
        for group, version, route in zip(groups.values(), versions, routes, strict=True):
            rows = {want.table.spec.name: host_rows(len(route.ids), want.table.spec.dim, want.device) for want in group}
            index = torch.from_numpy(route.index).view(group[0].ids.shape)
            indices = {device: pinned(index, device) for device in {want.device for want in group}}
            self._groups.append(_Group(group, version, route, np.ones(len(route.ids), np.bool_), rows, indices))

    def pull(
        self,
        source: Client | LocalSteps,
        dense: Sequence[DenseWeights] = (),
        *,
        but: PullBatch | None = None,
        caches: RowCaches | None = None,
        age: int = 0,
        clock: int | None = None,
        exact: bool = False,
    ) -> None:
        """Pull the rows that are missing, save those that `but` reads too, and the dense weights, in one request.

        Rows that `caches` may give out at `age`, by their own clock, are not pulled. `clock` is that of the step which
        will read them. `exact` is that of Client.pull.
        """
        self.lost_leases = source.lost_leases
        if self.versions is None:
            self.versions = np.zeros(source.num_shards, np.int64) if caches else no_versions(source.num_shards)
        parts: list[tuple[str, Route]] = []
        out: list[Floats] = []
        partial: list[tuple[torch.Tensor, Mask, Floats]] = []
        for group in self._groups:
            take = group.missing if but is None else group.missing & ~but._shared_with(group)
            if not take.any():
                continue
            whole = bool(take.all())
            route = group.route if whole else select(group.route, take)
            for table, rows in group.rows.items():
                parts.append((table, route))
                out.append(rows.numpy() if whole else np.empty((len(route.ids), rows.shape[1]), np.float32))
                if not whole:
                    partial.append((rows, take, out[-1]))
            group.missing = group.missing & ~take
        num_tables = len(parts)
        for weights in dense:
            route = weights.reads()
            parts.append((weights.spec.name, route))
            out.append(np.empty((len(route.ids), weights.spec.dim), np.float32))
            self._dense.append((weights, route, out[-1]))
        if parts:
            # a push goes by a whole route, and only where there are gradients
            keep = torch.is_grad_enabled() and not partial
            if clock is not None and caches is not None:
                clock += caches.staleness  # a copy is as far from what a later step wants to see as its own clock
            pull = functools.partial(source.pull, clock=clock, versions=self.versions, exact=exact)
            pull_through_cache(pull, caches, age, parts, out, num_tables, keep=keep)
        for rows, take, pulled in partial:
            rows.numpy()[take] = pulled

    def _shared_with(self, group: _Group) -> Mask:
        """Rows of another fetch's group that this one reads too."""
        shared = np.zeros(len(group.route.ids), np.bool_)
        for mine in self._groups:
            if not mine.rows.keys().isdisjoint(group.rows):
                shared |= overlap(group.route.ids, mine.route.ids)
        return shared

    def reads(self, table: str, route: Route) -> bool:
        """Whether the rows of this very route are among those that it reads."""
        return any(table in group.rows and group.route.ids is route.ids for group in self._groups)

    def spoil(self, table: str, route: Route) -> None:
        """Have the next `pull` bring these rows, pulled before or not: they changed on the shards."""
        for group in self._groups:
            if table in group.rows and not group.missing.all():
                group.missing |= overlap(group.route.ids, route.ids)

    def accept(self, clock: int) -> Reads:
        """Send rows to their devices and put dense weights in place; the training thread alone may do that."""
        for weights, dense, pulled in self._dense:
            if _covers(dense, weights.reads()):  # unless more has to be read since then: then the forward pulls
                weights.accept(dense, pulled, clock)
        reads: Reads = {}
        for group in self._groups:
            indices = {device: to_device(index, device) for device, index in group.index.items()}
            for want in group.wanted:
                name, device = want.table.spec.name, want.device
                rows = to_device(group.rows[name], device)
                read = Read(want.table, want.ids, group.version, group.route, rows, indices[device])
                reads.setdefault(name, []).append(read)
        return reads


def _packs_ids(table: RemoteTable) -> bool:
    """Whether ids travel packed, which they do where rows or gradients do."""
    compressor, name = table.session.client.compressor, table.spec.name
    return compressor.packs(name) or not compressor.pull_codec(name).is_plain


def _covers(route: Route, needed: Route) -> bool:
    return needed is route or bool(np.isin(needed.ids, route.ids).all())


def _version(tensor: torch.Tensor) -> int:
    """Counts in-place changes; inference tensors do not count theirs."""
    return -1 if tensor.is_inference() else tensor._version
