"""What shards counted while a run went on; they themselves count from their start, through one job after the other."""

from __future__ import annotations

from itertools import zip_longest

from embershard.worker.client.client import Client


class ShardCounters:
    """Of the shards' counters, what came since this was made. A shard that was restarted since begins at zero."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._before = {status.instance: status for status in client.status()}

    def expired_leases(self) -> int:
        """Times that a worker was given up, as the first shard counts them."""
        now = self._client.status()[0]
        before = self._before.get(now.instance)
        return now.expired_leases - (before.expired_leases if before else 0)

    def staleness_seen(self) -> tuple[int, ...]:
        """Pushes to all shards by the updates that their rows had missed: 0, 1, ...; the last: so many or more."""
        now = self._client.status()
        before = [self._before[status.instance] for status in now if status.instance in self._before]
        all_of, earlier = (zip_longest(*(s.staleness_seen for s in ss), fillvalue=0) for ss in (now, before))
        return tuple(sum(here) - sum(then) for here, then in zip_longest(all_of, earlier, fillvalue=()))

    def table_rows(self) -> dict[str, int]:
        """Table -> rows that exist now, on all shards."""
        rows: dict[str, int] = {}
        for status in self._client.status():
            for table in status.tables:
                rows[table.name] = rows.get(table.name, 0) + table.rows
        return rows
