"""One worker's training: tables and dense weights read at a clock, gradients collected, and pushed at each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import NoReturn, Self

import numpy as np
import numpy.typing as npt
import torch

from embershard.proto.messages import Pushed
from embershard.proto.routing import Placement, Route, make_route
from embershard.proto.spec import TableSpec
from embershard.worker.addresses import parse_addresses
from embershard.worker.client import DEFAULT_TIMEOUT, Client, Stats
from embershard.worker.dense import DenseWeights
from embershard.worker.device import host_rows, to_device
from embershard.worker.gradients import RowGradients, merge

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class Read:
    """Rows of one table at one clock, for one tensor of ids."""

    table: RemoteTable
    ids: torch.Tensor
    version: int  # of `ids`: an in-place change makes the read useless
    route: Route
    rows: torch.Tensor  # (U, dim) float32 on the device, in route order
    index: torch.Tensor  # of the shape of `ids`, on the device: rows[index] are the rows of `ids`


class RemoteTable:
    """One table of a session, declared on every shard."""

    def __init__(self, session: Session, spec: TableSpec) -> None:
        self.session = session
        self.spec = spec

    def pull(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of `ids` (any shape, int32 or int64) as they are now, (*ids.shape, dim), apart from autograd."""
        read = self.session.read(self, ids, ids.device)
        return read.rows[read.index]

    def load(self, route: Route, rows: Floats, *, keep_state: bool = False) -> None:
        """Assign rows ((U, dim) float32, in route order); their optimizer's state starts anew, unless it is kept."""
        self.session.client.load(self.spec.name, route, rows, keep_state=keep_state)

    def route(self, ids: torch.Tensor) -> Route:
        """The route of a tensor of ids. RuntimeError unless they are int32 or int64."""
        if ids.dtype not in (torch.int64, torch.int32):
            raise RuntimeError(f"table {self.spec.name!r}: ids must be int64 or int32, got {ids.dtype}")
        flat = ids.detach().to("cpu", torch.int64).contiguous().view(-1).numpy()
        return make_route(flat, self.spec.space_key, self.session.client.placement)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            f"table {self.spec.name!r} lives on the shards and cannot be copied; copy the model before wrapping it"
        )

    __reduce__ = __deepcopy__  # type: ignore[assignment]


class Session:
    """A worker's connection to the shards, and its clock.

    One thread trains with a session: forward, backward, `step()`. With `zero_grad()` and `step()` it stands where a
    training loop expects an optimizer. `lr_scale` multiplies the learning rate of every following push.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.clock = 0
        self.lr_scale = 1.0
        self._tables: dict[str, RemoteTable] = {}
        self._dense: list[DenseWeights] = []
        self._collected: list[RowGradients] = []
        self._ahead: dict[tuple[str, int], Read] = {}

    @property
    def placement(self) -> Placement:
        """Where ids live."""
        return self.client.placement

    @property
    def table_names(self) -> frozenset[str]:
        """Tables that this session declared."""
        return frozenset(self._tables)

    @property
    def stats(self) -> Stats:
        """Counters since the start."""
        return self.client.stats

    def table(self, spec: TableSpec, values: Callable[[], Iterable[tuple[Ids, Floats]]] | None = None) -> RemoteTable:
        """The table of `spec`, created where it does not exist.

        `values` gives its first (ids, rows) in portions; they are loaded by the worker that created the table, and
        every other worker waits until that is done. TableMismatch where the shards hold other settings.
        """
        known = self._tables.get(spec.name)
        if known is not None and known.spec == spec:
            return known
        created = self.client.declare(spec, load=values is not None)
        if values is not None and created:
            for ids, rows in values():
                route = make_route(ids, spec.space_key, self.placement)
                order = np.empty(len(route.ids), np.int64)
                order[route.index] = np.arange(len(ids))
                self.client.load(spec.name, route, rows[order], shards=created, last=False)
            nothing = make_route(np.empty(0, np.int64), spec.space_key, self.placement)
            self.client.load(spec.name, nothing, np.empty((0, spec.dim), np.float32), shards=created)
        if values is not None:
            self.client.await_loaded(spec.name)
        table = self._tables[spec.name] = RemoteTable(self, spec)
        return table

    def add_dense(self, dense: DenseWeights) -> None:
        """Pull and push these dense weights with the tables."""
        self.table(dense.spec, lambda: [(dense.ids, dense.values())])
        self._dense.append(dense)

    def read(self, table: RemoteTable, ids: torch.Tensor, device: torch.device) -> Read:
        """Rows for a tensor of ids: those pulled ahead for this very tensor, or pulled now."""
        ahead = self._ahead.get((table.spec.name, id(ids)))
        if ahead is not None and ahead.version == _version(ids) and ahead.rows.device == device:
            return ahead
        return self._pull([(table, ids, device)], [])[0]

    def read_ahead(
        self, wanted: Sequence[tuple[RemoteTable, torch.Tensor, torch.device]], dense: Sequence[DenseWeights] = ()
    ) -> None:
        """Pull for several tables, and the dense weights that are out of date, in one request per shard."""
        self._ahead.clear()
        stale = [weights for weights in dense if weights.stale(self.clock)]
        unique = {(table.spec.name, id(ids)): (table, ids, device) for table, ids, device in wanted}
        if unique or stale:
            reads = self._pull(list(unique.values()), stale)
            self._ahead = dict(zip(unique, reads, strict=True))

    def forget_ahead(self) -> None:
        """Let go of what was pulled ahead."""
        self._ahead.clear()

    def _pull(
        self, wanted: Sequence[tuple[RemoteTable, torch.Tensor, torch.device]], stale: Sequence[DenseWeights]
    ) -> list[Read]:
        routes: dict[tuple[int, int], Route] = {}
        parts: list[tuple[str, Route]] = []
        buffers: list[torch.Tensor] = []
        for table, ids, device in wanted:
            # one id space, one tensor: one route, whatever the number of tables
            key = (id(ids), table.spec.space_key)
            route = routes.get(key)
            if route is None:
                route = routes[key] = table.route(ids)
            parts.append((table.spec.name, route))
            buffers.append(host_rows(len(route.ids), table.spec.dim, device))
        blocks = [weights.reads() for weights in stale]
        parts += [(weights.spec.name, route) for weights, route in zip(stale, blocks, strict=True)]
        rows = [np.empty((len(route.ids), w.spec.dim), np.float32) for w, route in zip(stale, blocks, strict=True)]
        self.client.pull(parts, [buffer.numpy() for buffer in buffers] + rows)
        for weights, route, pulled in zip(stale, blocks, rows, strict=True):
            weights.accept(route, pulled, self.clock)
        on_device: dict[tuple[int, torch.device], torch.Tensor] = {}
        reads = []
        for (table, ids, device), (_, route), buffer in zip(wanted, parts, buffers, strict=False):
            place = (id(route), device)
            if place not in on_device:
                on_device[place] = to_device(torch.from_numpy(route.index), device).view(ids.shape)
            reads.append(Read(table, ids, _version(ids), route, to_device(buffer, device), on_device[place]))
        return reads

    def collect(self, gradients: RowGradients) -> None:
        """Keep gradients until the next step."""
        self._collected.append(gradients)

    def step(self) -> Pushed:
        """Push what backward left, to all shards at once, wait for them, and advance the clock.

        Gradients are cleared, so that no zero_grad is needed. If a shard gives no answer in time, its part of the push
        is sent again, once, with the next step.
        """
        gradients = merge(self._collected, self.placement)
        gradients += [part for weights in self._dense if (part := weights.gradients()) is not None]
        self._collected.clear()
        self._ahead.clear()
        clock, self.clock = self.clock, self.clock + 1
        return self.client.push(gradients, clock=clock, lr_scale=self.lr_scale)

    def zero_grad(self) -> None:
        """Drop the gradients collected since the last step."""
        self._collected.clear()
        for weights in self._dense:
            weights.clear()

    def refresh(self) -> None:
        """Pull dense weights anew at the next forward, for instance to evaluate what other workers pushed."""
        for weights in self._dense:
            weights.forget()

    def close(self) -> None:
        """Close the connections; what was not pushed is dropped."""
        self._collected.clear()
        self._ahead.clear()
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError("a session holds connections and cannot be copied; copy the model before wrapping it")

    __reduce__ = __deepcopy__  # type: ignore[assignment]


def _version(tensor: torch.Tensor) -> int:
    """Counts in-place changes; inference tensors do not count theirs."""
    return -1 if tensor.is_inference() else tensor._version


def connect(addresses: str | Sequence[str], *, worker: int = 0, timeout: timedelta = DEFAULT_TIMEOUT) -> Session:
    """A session with the shards at `addresses` ("host:port,host:port" or a list), in any order.

    Waits for shards that start later; every later call, too, ends by `timeout`. BadAddress where one cannot be.
    """
    return Session(Client.connect(parse_addresses(addresses), worker=worker, timeout=timeout))
