"""The first values of a table: loaded by the worker that created it, while every other worker waits."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta

import numpy as np

from embershard.proto.messages import Floats, Ids, Pull, TableIds
from embershard.proto.routing import make_route
from embershard.proto.spec import TableSpec
from embershard.proto.transport.transport import Deadline
from embershard.worker.client.client import Client
from embershard.worker.client.connections import raise_first

_LAST_WORD = timedelta(seconds=0.1)  # for a shard that is asked once more, to say who loads


def load_first(client: Client, spec: TableSpec, values: Iterable[tuple[Ids, Floats]], shards: frozenset[int]) -> None:
    """Load portions of (ids, rows) into a table that `declare` created on these shards, and end its loading."""
    for ids, rows in values:
        route = make_route(ids, spec.space_key, client.placement)
        order = np.empty(len(route.ids), np.int64)
        order[route.index] = np.arange(len(ids))
        client.load(spec.name, route, rows[order], shards=shards, last=False)
    nothing = make_route(np.empty(0, np.int64), spec.space_key, client.placement)
    client.load(spec.name, nothing, np.empty((0, spec.dim), np.float32), shards=shards)


def await_loaded(client: Client, table: str) -> None:
    """Wait until nobody loads the first values of a table any more.

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
            # the shard's own words, which name the loader
            empty = Pull(client.placement.epoch, (TableIds(table, np.empty(0, np.int64)),))
            raise_first(client.connections.call({min(loading): empty}, timeout=_LAST_WORD))
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
