"""Lineages: random numbers by which shards show that their rows belong together.

All shards of a job get one lineage with its first table, and a new one by a restore. A shard that is started again has
none: where the others have rows, its own are lost.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from embershard.proto.messages import ShardStatus


def new_lineage() -> int:
    """A lineage that no other job has."""
    return secrets.randbits(64) or 1


def shards_without_rows(statuses: Sequence[ShardStatus]) -> list[ShardStatus]:
    """The shards whose rows do not belong to those of the others; none while no shard has a row.

    They are those of another lineage than the shard that has had rows for longest. One that recovers its rows is not
    among them.
    """
    statuses = [status for status in statuses if not status.recovering]
    with_rows = [status for status in statuses if any(table.rows for table in status.tables)]
    if not with_rows:
        return []
    oldest = max(with_rows, key=lambda status: status.uptime_seconds)
    return [status for status in statuses if status.lineage != oldest.lineage]
