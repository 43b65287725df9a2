"""Rows that are assigned, not trained: first values, weights that were read from elsewhere, renormalised rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from embershard.proto.arrays import Floats
from embershard.proto.errors import LeaseLost
from embershard.proto.messages import Load, PushToken
from embershard.proto.routing import Route
from embershard.worker.client.calls import Requests, raise_first
from embershard.worker.client.chunks import Chunk, cut
from embershard.worker.client.membership import Membership


class Assigner:
    """Sends rows to be assigned, in messages of at most `limits` bytes to each shard."""

    def __init__(
        self,
        calls: Requests,
        worker: int,
        placement_epoch: int,
        limits: Sequence[int],
        next_token: Callable[[int], PushToken],
    ) -> None:
        self._calls, self._worker, self._next_token = calls, worker, next_token
        self._placement_epoch, self._limits = placement_epoch, limits

    def assign(
        self,
        table: str,
        route: Route,
        rows: Floats,
        *,
        shards: Iterable[int] | None,
        last: bool,
        keep_state: bool,
        member: Membership | None,
    ) -> bool:
        """What Client.load says; False where the change is dropped, for the member's lease was lost.

        Nothing is pushed meanwhile: the pushes' tokens count the loads as answered.
        """
        queues: dict[int, deque[Load]] = {}
        for shard in range(len(self._limits)) if shards is None else shards:
            part = route.slice_of(shard)
            whole = Load(
                table,
                self._placement_epoch,
                route.ids[part],
                rows[part],
                self._worker,
                last=last,
                keep_state=keep_state,
            )
            queues[shard] = deque(_cut(whole, self._limits[shard]))
        while batch := {
            shard: replace(queue.popleft(), token=self._next_token(shard)) for shard, queue in queues.items() if queue
        }:
            if not self._send(batch, member, keep_state=keep_state):
                return False
        return True

    def _send(self, loads: Mapping[int, Load], member: Membership | None, *, keep_state: bool) -> bool:
        """Send loads; False where a change of rows is dropped, for the lease was lost, and this worker joined again."""
        if member is None or not keep_state:
            raise_first(self._calls(loads) if member is None else member.call_with_rejoin(partial(self._calls, loads)))
            return True
        lost_leases, outcomes = member.lost_leases, self._calls(loads)
        if any(isinstance(outcome, LeaseLost) for outcome in outcomes.values()):
            member.rejoin(lost_leases)
            return False
        raise_first(outcomes)
        return True


def _cut(load: Load, limit: int) -> list[Load]:
    """The same in messages of at most `limit` bytes."""
    messages = cut([load.table], [len(load.ids)], [8 + load.rows.itemsize * load.rows.shape[1]], limit)
    if load.last and not messages:  # a shard without rows is told of the end, too
        messages = [[Chunk(0, 0, 0)]]
    return [
        replace(
            load,
            ids=load.ids[piece.start : piece.stop],
            rows=load.rows[piece.start : piece.stop],
            last=load.last and number == len(messages),
        )
        for number, (piece,) in enumerate(messages, start=1)
    ]
