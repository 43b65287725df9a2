"""Rows that are assigned, not trained: first values, weights that were read from elsewhere, renormalised rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from embershard.proto.errors import LeaseLost
from embershard.proto.messages import Load
from embershard.proto.routing import Route
from embershard.worker.client.connections import ShardConnections, raise_first, split_into_messages
from embershard.worker.client.membership import Membership
from embershard.worker.client.push import PushQueue


def load_rows(
    connections: ShardConnections,
    limits: Mapping[int, int],
    whole: Load,
    route: Route,
    *,
    shards: Iterable[int] | None,
    member: Membership | None,
    pushes: PushQueue,
) -> bool:
    """Send `whole`, the rows of a route for all shards, in messages of at most `limits` bytes to each shard.

    False where the change is dropped, because the member's lease was lost. Nothing is pushed meanwhile. `pushes`
    numbers the messages: each says that those before it were answered, or a shard that has lost one of them with its
    machine's power would take it.
    """
    queues: dict[int, deque[Load]] = {}
    row_bytes = 8 + whole.rows.itemsize * whole.rows.shape[1]
    for shard in limits if shards is None else shards:
        messages = split_into_messages([(whole.table, route)], shard, [row_bytes], limits[shard])
        rows = [chunk.rows for (chunk,) in messages]
        if whole.last and not rows:
            rows = [slice(0, 0)]  # a shard without rows is told of the end, too
        queues[shard] = deque(_part(whole, rows, number) for number in range(len(rows)))
    while batch := {
        shard: replace(queue.popleft(), token=pushes.next_load_token(shard), term=connections.term(shard))
        for shard, queue in queues.items()
        if queue
    }:
        lost_leases, ask = 0 if member is None else member.lost_leases, partial(connections.call, batch)
        outcomes = ask() if member is None or whole.keep_state else member.call_with_rejoin(ask)
        pushes.loaded(batch, outcomes)
        if member is not None and whole.keep_state and any(isinstance(one, LeaseLost) for one in outcomes.values()):
            member.rejoin(lost_leases)
            return False
        raise_first(outcomes)
    return True


def _part(whole: Load, rows: Sequence[slice], number: int) -> Load:
    """The message with the `number`-th of these parts of the rows."""
    part, last = rows[number], whole.last and number == len(rows) - 1
    return replace(whole, ids=whole.ids[part], rows=whole.rows[part], last=last)
