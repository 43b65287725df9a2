"""The tables of a session: declared on every shard, with their first values, and read and assigned by id."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

import numpy as np
import torch

from embershard.proto.arrays import Floats, Ids
from embershard.proto.messages import Pull, TableIds
from embershard.proto.routing import Route, make_route
from embershard.proto.spec import TableSpec
from embershard.proto.timing import Deadline
from embershard.worker.client.client import Client
from embershard.worker.client.connections import raise_first
from embershard.worker.patterns import matches
from embershard.worker.session.dense import DenseWeights
from embershard.worker.session.inputs import Inputs, WrappedModel, lookups_of_batches
from embershard.worker.session.reads import Lookup, flat_ids

if TYPE_CHECKING:
    from embershard.worker.session.session import Session

B = TypeVar("B")
Values = Callable[[], Iterable[tuple[Ids, Floats]]]  # the first rows of a table, in portions

_PORTION = 2**16  # rows that are assigned at once
_LAST_TRY = timedelta(seconds=0.1)  # for a shard that is asked once more, to say which worker loads


class WholeTable(Protocol):
    """A table that may be read as a whole; the session says when its rows are no longer those of the shards."""

    def changed(self) -> str | None:
        """The name of the table, where somebody changed the values that were read."""
        ...

    def check_unchanged(self) -> None:
        """ParameterChanged where somebody changed the values that were read."""
        ...

    def stepped(self) -> bool:
        """The rows change on the shards now; whether the next step may read them as a whole, too."""
        ...

    def forget(self) -> None:
        """Read anew at the next use."""
        ...


class RemoteTable:
    """One table of a session, declared on every shard."""

    def __init__(self, session: Session, spec: TableSpec) -> None:
        self.session = session
        self.spec = spec
        self._parameter: weakref.ref[torch.Tensor] | None = None  # which holds this table

    @property
    def parameter(self) -> torch.Tensor | None:
        """The parameter of a wrapped model whose rows these are, while the model lives."""
        return None if self._parameter is None else self._parameter()

    @parameter.setter
    def parameter(self, parameter: torch.Tensor) -> None:
        self._parameter = weakref.ref(parameter)

    def pull(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of `ids` (any shape, int32 or int64) as they are now, (*ids.shape, dim), apart from autograd.

        Whatever the table's pull codec, they have the shards' bits.
        """
        result = self.session.pull([Lookup(self.spec, ids, ids.device)])[self.spec.name][0]
        return result.rows[result.index]

    def load(self, route: Route, rows: Floats, *, keep_state: bool = False) -> None:
        """Assign rows ((U, dim) float32, in route order); their optimizer's state starts anew, unless it is kept."""
        self.session.load(self.spec.name, route, rows, keep_state=keep_state)

    def assign(self, values: torch.Tensor) -> None:
        """Assign rows 0 to N - 1 ((N, dim)) on the shards; their optimizer's state stays."""
        for first in range(0, len(values), _PORTION):
            rows = values[first : first + _PORTION].detach().to("cpu", torch.float32).numpy()
            ids = np.arange(first, first + len(rows))
            route = make_route(ids, self.spec.space_key, self.session.placement)
            self.session.assign(self.spec.name, route, rows[_order(route)])

    def route(self, ids: torch.Tensor) -> Route:
        """The route of a tensor of ids. RuntimeError unless they are int32 or int64."""
        return make_route(flat_ids(self.spec, ids), self.spec.space_key, self.session.placement)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            f"table {self.spec.name!r} lives on the shards and cannot be copied; copy the model before wrapping it"
        )

    __reduce__ = __deepcopy__  # type: ignore[assignment]


class TableRegistry:
    """The tables that a session declared, the dense weights among them, and its wrapped models, in their order."""

    def __init__(self, client: Client) -> None:
        self.tables: dict[str, RemoteTable] = {}
        self.dense: list[DenseWeights] = []
        self.models: list[WrappedModel] = []
        self.closed: dict[str, frozenset[int]] | None = None  # table -> shards, see `keep_closed`
        self._client = client

    def declare(self, spec: TableSpec, values: Values | None, num_rows: int) -> None:
        """Create a table on every shard where it does not exist; see Session.table."""
        closes = values is None and self.closed is not None
        load, dense = closes or values is not None, self._is_dense(spec)
        replies = self._client.declare_on_each(spec, load=load, dense=dense, num_rows=num_rows)
        if self.closed is not None and closes:
            self.closed[spec.name] = frozenset(shard for shard, reply in replies.items() if reply.created)
        elif values is not None:
            if created := frozenset(shard for shard, reply in replies.items() if reply.created):
                _load_first(self._client, spec, values(), created)
            # a shard's status is of all its tables: to ask for it at each of thousands would take minutes
            if any(reply.loading and not reply.created for reply in replies.values()):
                await_loaded(self._client, spec.name)

    @contextmanager
    def keep_closed(self) -> Iterator[None]:
        """Keep tables without first values that are created inside closed to all workers until it ends well.

        Inside, rows are loaded into them without `last`. A process that ends before has left a part of its rows: other
        workers get TableLoading or LoadLost until it is done again.
        """
        self.closed = {}
        try:
            yield
            for name, created in self.closed.items():
                _end_load(self._client, self.tables[name].spec, created)
        finally:
            self.closed = None

    def matching(self, pattern: str) -> list[str]:
        """Tables that a name, a pattern, or "dense" stands for. ValueError where there are none."""
        dense = {name: self._client.compressor.is_dense(name) for name in self.tables}
        names = [name for name in dense if (dense[name] if pattern == "dense" else matches(name, pattern))]
        if not names:
            known = dict.fromkeys([*(["dense"] if any(dense.values()) else []), *dense])  # one may have that name
            raise ValueError(f"no table matches {pattern!r} (known: {', '.join(known) or 'none'})")
        return names

    def lookups(self, inputs: Inputs[B] | None) -> Callable[[B], list[Lookup]]:
        """Which rows a batch reads; see lookups_of_batches."""
        specs = [table.spec for table in self.tables.values() if not self._is_dense(table.spec)]
        return lookups_of_batches(self.models, specs, inputs)

    def _is_dense(self, spec: TableSpec) -> bool:
        return any(spec is weights.spec for weights in self.dense)


def _order(route: Route) -> Ids:
    """(U,) the place of each id of a route, all of them different, among those that it was made of."""
    order = np.empty(len(route.ids), np.int64)
    order[route.index] = np.arange(len(order))
    return order


def _load_first(client: Client, spec: TableSpec, values: Iterable[tuple[Ids, Floats]], shards: frozenset[int]) -> None:
    """Load portions of (ids, rows) into a table that `declare` created on these shards, and end its loading."""
    for ids, rows in values:
        load_portion(client, spec, ids, rows, shards)
    _end_load(client, spec, shards)


def load_portion(client: Client, spec: TableSpec, ids: Ids, rows: Floats, shards: frozenset[int] | None = None) -> None:
    """Load rows ((N, dim) float32) of different ids, in any order; the loading of their table goes on."""
    route = make_route(ids, spec.space_key, client.placement)
    client.load(spec.name, route, rows[_order(route)], shards=shards, last=False)


def _end_load(client: Client, spec: TableSpec, shards: frozenset[int]) -> None:
    """Open a table that this worker has loaded on these shards."""
    nothing = make_route(np.empty(0, np.int64), spec.space_key, client.placement)
    client.load(spec.name, nothing, np.empty((0, spec.dim), np.float32), shards=shards)


def await_loaded(client: Client, table: str) -> None:
    """Wait until no worker loads the first values of a table any more.

    TableLoading, or the shard's silence, ends the wait once the client's timeout passed without a row more.
    """
    rows, deadline, pause = -1, Deadline(client.timeout), 0.01
    while True:
        loading = {s.shard: t.rows for s in client.status() for t in s.tables if t.name == table and t.loading}
        if not loading:
            return
        if sum(loading.values()) != rows:
            rows, deadline = sum(loading.values()), Deadline(client.timeout)
        if deadline.seconds <= 0:
            # the shard's own error, which names the loader
            empty = Pull(client.placement.epoch, (TableIds(table, np.empty(0, np.int64)),))
            raise_first(client.connections.call({min(loading): empty}, timeout=_LAST_TRY))
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
