"""Rows that forwards read: routed, pulled, and matched to the tensor of ids that asks for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from embershard.proto.arrays import Floats, Ids
from embershard.proto.messages import MAX_MEMBERS, TableKey
from embershard.proto.routing import BundleRoute, Placement, Route, ascending, make_bundle, make_route, make_routes
from embershard.proto.shared_memory import empty_floats
from embershard.proto.spec import TableSpec
from embershard.proto.timing import span
from embershard.worker.client.push import Versions
from embershard.worker.device import pinned, places_of, to_device, unique_on_gpu
from embershard.worker.kernels import Mask, overlap, overlap_by_part
from embershard.worker.session.dense import DenseWeights
from embershard.worker.session.row_source import RowSource

MANY_IDS = 1 << 17  # a GPU needs about a millisecond to find the distinct ones, however few they are

# What a module makes of the rows of its ids: nothing else, or the sum or mean for each row of 2-D ids; "" where nobody
# knows, or where more than their sum counts of gradients
How = Literal["", "rows", "sum", "mean"]


class EmbeddingModule(Protocol):
    """A module that reads a table."""

    @property
    def spec(self) -> TableSpec:
        """The specification of the table that is read."""

    @property
    def device(self) -> torch.device | None:
        """Return the device for its rows; None for that of the ids."""

    @property
    def frozen(self) -> bool:
        """Whether rows are read and never pushed."""

    def how(self, ids: torch.Tensor) -> How:
        """Return how a module reduces the rows of these ids (see How); "" where that is not known."""


class Lookup(NamedTuple):
    """Rows to be pulled: those of `ids` in a table, for a module on `device`."""

    spec: TableSpec
    ids: torch.Tensor  # any shape, int32 or int64
    device: torch.device
    how: How = ""
    reader: EmbeddingModule | None = None  # that module, where it can read them from a bundle


@dataclass(slots=True, eq=False)
class BundleRows:
    """Rows of several tables of one dim for one batch; worker/nn/bundle.py has what one forward makes of them."""

    route: BundleRoute
    rows: torch.Tensor  # (U, dim) float32 on the host, in route order
    index: torch.Tensor  # (N,) of the flat ids of all tables
    bounds: Bounds  # (T, 3) the first of each table's ids, their end, and how many are a bag; 1 without bags
    flat: Ids  # (N,) the ids themselves
    shapes: list[torch.Size]  # of each table's ids
    how: How  # what the readers make of their rows
    readers: list[EmbeddingModule | None]  # of each table
    least: list[int]  # id of each table; 0 where it has none
    largest: list[int]
    specs: Mapping[str, TableSpec]  # by table


@dataclass(slots=True, eq=False)
class LookupResult:
    """Rows of one table at one clock, for one tensor of ids.

    With a `bundle`, route and rows are those of all its tables, of which this is the one of number `member`.
    """

    ids: torch.Tensor
    version: int  # of `ids`: an in-place change makes the rows those of other ids
    route: Route
    rows: torch.Tensor  # (U, dim) float32 on the device, in route order
    index: torch.Tensor  # of the shape of `ids`, on the device: rows[index] are the rows of `ids`
    bundle: BundleRows | None = None
    member: int = 0
    # of all tables of the bundle, until their readers take them; apart from it, which the outputs' graph holds
    outputs: list[torch.Tensor | None] = field(default_factory=list)

    def is_of(self, ids: torch.Tensor) -> bool:
        """Whether these are the rows of this very tensor, or of one that is the same part of the same tensor."""
        mine = self.ids
        if mine is not ids and (not mine.is_set_to(ids) or mine._base is None or mine._base is not ids._base):
            return False
        return self.version == _version(ids)

    def has_rows_of(self, ids: torch.Tensor) -> bool:
        """Whether these are the rows of a tensor with the same ids in it."""
        if ids.shape != self.index.shape or ids.dtype not in (torch.int64, torch.int32):
            return False
        index = self.route.index
        if not len(index):  # it is on the GPU alone, see _gpu_group
            there = ids.detach().to(self.index.device, torch.int64)
            return torch.equal(torch.from_numpy(self.route.ids).to(there.device)[self.index], there)
        if self.bundle is not None:
            start, end, _ = self.bundle.bounds[self.member]
            index = index[start:end]
        # what was routed, whatever became of self.ids since then
        return np.array_equal(ids.detach().cpu().reshape(-1).numpy(), self.route.ids[index])

    def alone(self) -> LookupResult:
        """The same rows, in a copy of their own, apart from the rest of a bundle."""
        if self.bundle is None:
            return self
        route, places = self.bundle.route.member(self.member)
        index = np.searchsorted(places, self.index.numpy())
        route = replace(route, index=index.reshape(-1))
        return LookupResult(self.ids, self.version, route, self.rows[torch.from_numpy(places)], torch.from_numpy(index))


Bounds = npt.NDArray[np.int64]
LookupResults = dict[str, list[LookupResult]]  # by table


class PrefetchedRows:
    """Rows that were pulled before the model asks for them."""

    def __init__(self) -> None:
        self.forward: LookupResults = {}  # for the forward that runs
        self.batch: LookupResults | None = None  # for the batch that `prefetch` gave out; None outside of it
        self.found = self.missed = 0  # reads inside `prefetch` that were pulled for the batch, and those that were not

    def find(self, table: str, ids: torch.Tensor, device: torch.device, *, exact: bool = False) -> LookupResult | None:
        """The rows of ids, if they were pulled: for the very tensor of ids, or for one with the same ids in it.

        An `exact` read is not that of the batch, whose rows came by the tables' codecs.
        """
        result = _find(self.forward, table, ids, device) if self.forward else None
        if result is None and self.batch is not None and not exact:
            result = _find(self.batch, table, ids, device)
            self.found += result is not None
            self.missed += result is None
        return result

    def forget(self, table: str | None = None) -> None:
        """Drop everything, or what was pulled of a table, because it changed on the shards."""
        self.forward = {name: results for name, results in self.forward.items() if table not in (None, name)}
        if self.batch is not None:
            self.batch = {name: results for name, results in self.batch.items() if table not in (None, name)}


def _find(results: LookupResults, table: str, ids: torch.Tensor, device: torch.device) -> LookupResult | None:
    candidates = results.get(table, ())
    for result in candidates:
        if result.is_of(ids) and result.rows.device == device:
            return result
    for result in candidates:
        if result.rows.device == device and result.has_rows_of(ids):
            return result
    return None


@dataclass(slots=True, eq=False)
class _RouteGroup:
    """Tables that are read by one route: one tensor of ids, one id space; or a bundle."""

    lookups: list[Lookup]  # of different tables
    versions: list[int]  # of their ids
    route: Route
    missing: Mask  # (U,): rows that were not pulled yet, or have to be pulled again
    rows: dict[TableKey, torch.Tensor]  # table -> (U, dim) on the host
    index: dict[torch.device, torch.Tensor]  # on the host, ready to go to a device, or on it
    bundle: BundleRows | None = None

    def shared_with(self, table: TableKey, other: Route | Ids) -> Mask:
        """(U,) which of its rows are among those of `other` in a table, or in the tables of a bundle."""
        if isinstance(other, BundleRoute) and isinstance(self.route, BundleRoute) and other.tables == self.route.tables:
            return overlap_by_part(self.route.ids, self.route.counts, other.ids, other.counts)
        ids = other if isinstance(other, np.ndarray) else other.ids
        if table in self.rows and isinstance(table, str):
            return overlap(self.route.ids, ids)
        shared = np.zeros(len(self.route.ids), np.bool_)
        theirs: dict[TableKey, Ids] = {table: ids}
        if isinstance(other, BundleRoute):
            theirs = {name: part.ids for name, part, _ in other.members()}
        if isinstance(self.route, BundleRoute):
            for name, mine, places in self.route.members():
                if name in theirs:
                    shared[places] = overlap(mine.ids, theirs[name])
        else:
            for key in theirs.keys() & self.rows.keys():
                shared |= overlap(self.route.ids, theirs[key])
        return shared


class PullBatch:
    """The rows that a batch reads: routed at once, pulled in one or more stages, handed to the model at the end."""

    def __init__(self, source: RowSource, lookups: Sequence[Lookup]) -> None:
        self.lost_leases = 0  # when its rows were pulled
        self.versions: Versions | None = None  # the lowest of its rows, by shard; 0 where a cache may have given some
        self._source = source
        self._dense: list[tuple[DenseWeights, Route, Floats]] = []
        self._groups: list[_RouteGroup] = []
        groups: dict[tuple[int, int], list[Lookup]] = {}
        unique = {(lookup.spec.name, id(lookup.ids)): lookup for lookup in lookups}
        bundles, single = _bundles(list(unique.values()), source)
        self._groups += (_bundle_group(bundle, source.placement) for bundle in bundles)
        for lookup in single:
            # one id space, one tensor: one route, whatever the number of tables
            groups.setdefault((id(lookup.ids), lookup.spec.space_key), []).append(lookup)
        on_gpu = [key for key, group in groups.items() if _has_many_for_a_gpu(group)]
        self._groups += [_gpu_group(groups.pop(key), source.placement) for key in on_gpu]
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
            rows: dict[TableKey, torch.Tensor] = {
                lookup.spec.name: _memory_for(len(route.ids), lookup.spec.dim, lookup.device) for lookup in group
            }
            index = torch.from_numpy(route.index).view(group[0].ids.shape)
            devices = {lookup.device for lookup in group}
            indices = {device: index if device.type == "cpu" else pinned(index, device) for device in devices}
            missing = np.ones(len(route.ids), np.bool_)
            self._groups.append(_RouteGroup(group, [version] * len(group), route, missing, rows, indices))

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
        parts: list[tuple[TableKey, Route]] = []
        out: list[Floats] = []
        partial: list[tuple[torch.Tensor, Mask, Floats]] = []
        for group in self._groups:
            take = group.missing if except_for is None else group.missing & ~except_for._shared_with(group)
            if not take.any():
                continue
            whole = bool(take.all())
            route = group.route if whole else group.route.select(take)
            for table, rows in group.rows.items():
                parts.append((route.tables if isinstance(route, BundleRoute) else table, route))
                out.append(rows.numpy() if whole else empty_floats(len(route.ids), rows.shape[1]))
                if not whole:
                    partial.append((rows, take, out[-1]))
            group.missing = group.missing & ~take
        for weights in dense:
            route = weights.reads()
            parts.append((weights.spec.name, route))
            out.append(empty_floats(len(route.ids), weights.spec.dim))
            self._dense.append((weights, route, out[-1]))
        if parts:
            # a push goes by a whole route, and only where there are gradients
            keep = torch.is_grad_enabled() and not partial
            source.pull(parts, out, keep=keep, clock=clock, versions=self.versions, exact=exact)
        for rows, take, pulled in partial:
            rows.numpy()[take] = pulled

    def _shared_with(self, group: _RouteGroup) -> Mask:
        """Rows of another batch's group that this one reads too."""
        shared = np.zeros(len(group.route.ids), np.bool_)
        for mine in self._groups:
            if mine.rows.keys() & group.rows.keys():  # one id space: what one table shares, all do
                shared |= group.shared_with(next(iter(mine.rows.keys() & group.rows.keys())), mine.route)
            elif mine.bundle is not None or group.bundle is not None:
                for table in mine.rows:
                    shared |= group.shared_with(table, mine.route)
        return shared

    def reads(self, table: TableKey, what: Route | Ids) -> bool:
        """Whether the rows of this very array of a route are among those that it reads."""
        ids = what if isinstance(what, np.ndarray) else what.ids
        return any(table in group.rows and group.route.ids is ids for group in self._groups)

    def invalidate(self, table: TableKey, what: Route | Ids) -> None:
        """Have the next `pull` bring these rows, pulled before or not: they changed on the shards."""
        for group in self._groups:
            if not group.missing.all():
                group.missing |= group.shared_with(table, what)

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
            if group.bundle is not None:
                for name, found in _results(group, group.bundle):
                    results.setdefault(name, []).append(found)
                continue
            for lookup, version in zip(group.lookups, group.versions, strict=True):
                rows, index = group.rows[lookup.spec.name], indices[lookup.device]
                if lookup.device.type != "cpu":
                    rows = to_device(rows, lookup.device)
                result = LookupResult(lookup.ids, version, group.route, rows, index)
                results.setdefault(lookup.spec.name, []).append(result)
        return results


def _bundles(lookups: Sequence[Lookup], source: RowSource) -> tuple[list[list[Lookup]], list[Lookup]]:
    """The lookups of tables of one dim that can be read as one, and those that stay alone."""
    alike: dict[tuple[int, How], dict[str, Lookup]] = {}
    known = set[str]()
    single: list[Lookup] = []
    names = [lookup.spec.name for lookup in lookups if lookup.how]
    fits = source.in_bundles(names) if len(names) > 1 else frozenset()
    for lookup in lookups:
        spec = lookup.spec
        if not lookup.how or spec.name not in fits or lookup.ids.dtype not in (torch.int64, torch.int32):
            single.append(lookup)
        elif spec.name in known:  # it is read twice
            single.append(lookup)
        else:
            known.add(spec.name)
            alike.setdefault((spec.dim, lookup.how), {})[spec.name] = lookup
    bundles: list[list[Lookup]] = []
    for them in alike.values():
        found = list(them.values())
        pieces = [found[start : start + MAX_MEMBERS] for start in range(0, len(found), MAX_MEMBERS)]
        bundles += (piece for piece in pieces if len(piece) > 1)
        single += (piece[0] for piece in pieces if len(piece) == 1)
    return bundles, single


def _has_many_for_a_gpu(lookups: list[Lookup]) -> bool:
    ids, device = lookups[0].ids, lookups[0].device
    is_one = device.type == "cuda" and all(lookup.device == device for lookup in lookups)
    # of ids that cannot be read flat_ids says so
    return is_one and ids.numel() >= MANY_IDS and ids.dtype in (torch.int64, torch.int32) and not _is_mapped(ids)


def _gpu_group(lookups: list[Lookup], placement: Placement) -> _RouteGroup:
    """Tables that modules on one GPU read by many ids: that GPU finds the distinct ones, and keeps the index."""
    spec, ids, device = lookups[0].spec, lookups[0].ids, lookups[0].device
    version = _version(ids)
    with span("route"):
        unique, places = unique_on_gpu(ids, device)
        route = make_route(unique.numpy(), spec.space_key, placement)  # each shard's ids ascend, as they do here
        index = places_of(places, torch.from_numpy(route.index))
    route = replace(route, index=np.empty(0, np.int64))
    rows: dict[TableKey, torch.Tensor] = {
        lookup.spec.name: _memory_for(len(route.ids), lookup.spec.dim, device) for lookup in lookups
    }
    missing = np.ones(len(route.ids), np.bool_)
    return _RouteGroup(lookups, [version] * len(lookups), route, missing, rows, {device: index})


def _bundle_group(lookups: list[Lookup], placement: Placement) -> _RouteGroup:
    """Tables that are read as one."""
    versions = [_version(lookup.ids) for lookup in lookups]
    flat = torch.cat([lookup.ids.detach().reshape(-1) for lookup in lookups]).to("cpu", torch.int64).numpy()
    bounds = np.ones((len(lookups), 3), np.int64)
    ends = np.cumsum([lookup.ids.numel() for lookup in lookups], dtype=np.int64)
    bounds[0, 0], bounds[1:, 0], bounds[:, 1] = 0, ends[:-1], ends
    if lookups[0].how != "rows":
        bounds[:, 2] = [lookup.ids.shape[1] for lookup in lookups]
    tables = tuple([lookup.spec.name for lookup in lookups])
    keys = tuple([lookup.spec.space_key for lookup in lookups])
    with span("route"):
        route, least, largest = make_bundle(flat, ends, tables, keys, placement)
    rows = _memory_for(len(route.ids), lookups[0].spec.dim, torch.device("cpu"))
    index = torch.from_numpy(route.index)
    shapes = [lookup.ids.shape for lookup in lookups]
    specs = {lookup.spec.name: lookup.spec for lookup in lookups}
    readers = [lookup.reader for lookup in lookups]
    bundle = BundleRows(route, rows, index, bounds, flat, shapes, lookups[0].how, readers, least, largest, specs)
    missing = np.ones(len(route.ids), np.bool_)
    return _RouteGroup(lookups, versions, route, missing, {tables: rows}, {rows.device: index}, bundle)


def _memory_for(num_rows: int, dim: int, device: torch.device) -> torch.Tensor:
    """Memory of the host for rows that a device reads: where a shard of this machine can write them, or pinned."""
    if device.type == "cuda":
        return torch.empty((num_rows, dim), dtype=torch.float32, pin_memory=True, device="cpu")
    return torch.from_numpy(empty_floats(num_rows, dim))


def _results(group: _RouteGroup, bundle: BundleRows) -> Iterator[tuple[str, LookupResult]]:
    """The rows of each table of a bundle, by its name."""
    sizes = [shape.numel() for shape in bundle.shapes]
    outputs: list[torch.Tensor | None] = []
    parts = zip(group.lookups, group.versions, torch.split(bundle.index, sizes), strict=True)
    for member, (lookup, version, index) in enumerate(parts):
        shaped = index if lookup.ids.dim() == 1 else index.view(lookup.ids.shape)
        result = LookupResult(lookup.ids, version, group.route, bundle.rows, shaped, bundle, member, outputs)
        yield lookup.spec.name, result


def flat_ids(spec: TableSpec, ids: torch.Tensor) -> Ids:
    """Ids as (N,) int64 on the host. RuntimeError unless they are int32 or int64."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"table {spec.name!r}: ids must be int64 or int32, got {ids.dtype}")
    if _is_mapped(ids):
        raise NotImplementedError(
            f"table {spec.name!r}: ids inside torch.func.vmap or grad have no values to pull by; call emb(ids) "
            "outside, and pass its result in"
        )
    return ids.detach().to("cpu", torch.int64).contiguous().view(-1).numpy()


def _is_mapped(ids: torch.Tensor) -> bool:
    """Whether they are inside torch.func.vmap or grad, where they have no values."""
    return torch._C._functorch.is_functorch_wrapped_tensor(ids)


def _covers(route: Route, needed: Route) -> bool:
    return needed is route or bool(np.isin(needed.ids, route.ids).all())


def _version(tensor: torch.Tensor) -> int:
    """Counts in-place changes; inference tensors do not count theirs."""
    return -1 if tensor.is_inference() else tensor._version
