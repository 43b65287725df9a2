"""Declare tables on shards whose rows belong together, and refuse those of which one has lost its rows.

All shards of a job get one lineage, a random number, with its first table, and a new one by a restore. A shard that is
started again has none: where the others have rows, its own are lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from embershard.proto.errors import OtherLineage, RowsLost
from embershard.proto.messages import Declare, Declared, GetStatus, Greeting, Hello, ShardStatus, replace
from embershard.worker.client.connections import ShardConnections, raise_first


class Lineage:
    """The lineage of all shards, as one client knows it."""

    def __init__(self, connections: ShardConnections, worker: int) -> None:
        self._connections, self._worker = connections, worker

    @property
    def number(self) -> int:
        """The lineage; 0 before this client has declared a table or compared the shards."""
        return self._connections.lineage

    def check(self) -> None:
        """Compare the shards; RowsLost where one does not have the rows that belong to those of the others."""
        # twice: another worker may have given the shards a lineage while they were asked one after the other
        for _ in range(2):
            greetings = self._connections.call_all(Hello(worker=self._worker))
            lineages = {greeting.lineage for greeting in greetings if isinstance(greeting, Greeting)}
            self._connections.lineage = min(lineages) if len(lineages) == 1 else 0
            if len(lineages) == 1:
                return
            replies = self._connections.call_all(GetStatus())
            statuses = [reply for reply in replies if isinstance(reply, ShardStatus)]
            lost = shards_without_rows(statuses)
            if not lost:  # nothing was trained yet
                return
        indices = {status.shard for status in lost}
        raise RowsLost(
            lost=self._names(sorted(indices)),
            kept=self._names(status.shard for status in statuses if status.shard not in indices),
            minutes=min(status.uptime_seconds for status in lost) / 60,
        )

    def declare(self, request: Declare) -> list[Declared]:
        """Declare a table on all shards; the replies in order. Their first table gives them a lineage. RowsLost."""
        if not self._connections.lineage:
            self.check()
        try:
            return self._declare(request)
        except OtherLineage:  # they were restored since, or one was restarted
            self.check()
            return self._declare(request)

    def _declare(self, request: Declare) -> list[Declared]:
        if self._connections.lineage:
            return self._call(self._connections.shards, replace(request, lineage=self._connections.lineage))
        # first shard 0: its lineage is that of all, also where several workers begin at once
        request = replace(request, lineage=self._connections.clock.random_bits(64) or 1, begins_lineage=True)
        first = self._call([0], request)
        request = replace(request, lineage=first[0].lineage)
        connection = self._connections[0]
        connection.greeting = replace(connection.greeting, lineage=request.lineage)
        replies = first + self._call(self._connections.shards[1:], request)
        self._connections.lineage = request.lineage
        return replies

    def _call(self, shards: Iterable[int], request: Declare) -> list[Declared]:
        outcomes = self._connections.call(dict.fromkeys(shards, request))
        raise_first(outcomes)
        return [reply for _, reply in sorted(outcomes.items()) if isinstance(reply, Declared)]

    def _names(self, shards: Iterable[int]) -> str:
        return ", ".join(self._connections[shard].name for shard in shards)


def shards_without_rows(statuses: Sequence[ShardStatus]) -> list[ShardStatus]:
    """The shards whose rows do not belong to those of the others; none while no shard has a row.

    They are those of another lineage than the shard that has had rows for longest. One that recovers its rows is not
    among them, nor is one that was started for another number of shards: it is of another job.
    """
    statuses = [status for status in statuses if not status.recovering]
    with_rows = [status for status in statuses if any(table.rows for table in status.tables)]
    if not with_rows:
        return []
    oldest = max(with_rows, key=lambda status: status.uptime_seconds)
    return [its for its in statuses if its.lineage != oldest.lineage and its.num_shards == oldest.num_shards]
