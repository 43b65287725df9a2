"""What `embershard status` shows of the workers and of the staleness really seen."""

import io

from rich.console import Console

from embershard.cli import status as command
from embershard.proto.messages import MemberStatus, ShardStatus, TableStatus, replace

STATUS = ShardStatus(
    shard=0,
    num_shards=1,
    placement_epoch=1,
    version="1",
    instance="a",
    uptime_seconds=1.0,
    resident_bytes=1,
    requests=1,
    pulled_rows=1,
    pushed_rows=1,
    duplicate_pushes=0,
    skipped_rows=0,
    queued_bytes=0,
    tables=(),
    staleness=-1,
)


def shown(*statuses: ShardStatus) -> str:
    """The page, a space between words."""
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(command._view([command.Seen("h:1", status=status) for status in statuses]))
    return " ".join(console.export_text().split())


def member(worker: int, clock: int, lease: float, paused: bool = False) -> MemberStatus:
    return MemberStatus(worker=worker, clock=clock, paused=paused, lease_seconds=lease)


def test_shards_without_workers_show_none():
    assert "worker" not in shown(STATUS)
    assert "missed" not in shown(STATUS)


def test_workers_are_shown_as_the_shard_sees_them_that_heard_of_them_least():
    one = replace(STATUS, clock=7, staleness=0, members=(member(0, 8, 9.0), member(1, 7, 2.5), member(2, 4, 9.5, True)))
    other = replace(one, members=(member(0, 8, 8.5), member(1, 8, 9.0), member(2, 4, 9.5, True)))
    page = shown(one, other)
    assert "staleness 0 worker clock lease state 0 8 8.5 s trains 1 7 2.5 s waited for 2 4 9.5 s paused" in page


def test_without_a_bound_nobody_is_waited_for():
    page = shown(replace(STATUS, clock=3, staleness=-1, members=(member(0, 9, 1.0), member(1, 3, 1.0))))
    assert "staleness off worker clock lease state 0 9 1.0 s trains 1 3 1.0 s trains" in page


def test_a_shard_that_lost_its_rows_is_named_with_the_time_of_its_start():
    rows = TableStatus(name="t", dim=4, rows=10, bytes=2**20, optimizer="adam", loading=False)
    kept = replace(STATUS, instance="a", lineage=7, uptime_seconds=900.0, tables=(rows,))
    empty = replace(STATUS, instance="b", shard=1, uptime_seconds=200.0)
    assert "lost" not in shown(kept, replace(kept, instance="b"))
    assert "lost" not in shown(empty, replace(empty, instance="a"))
    assert "0/1 h:1 serving" in shown(kept, empty)
    assert "1/1 h:1 rows lost" in shown(kept, empty)
    assert "h:1: shard 1 lost its rows 3 minutes ago" in shown(kept, empty)


def test_the_histogram_of_staleness_is_that_of_all_shards():
    seen = [0] * 32
    seen[0], seen[1], seen[5], seen[31] = 4, 2, 1, 1
    page = shown(replace(STATUS, staleness_seen=tuple(seen)), replace(STATUS, staleness_seen=(2,)))
    assert "staleness pushes share 0 6 60.0% 1 2 20.0% 4 to 7 1 10.0% 31 or more 1 10.0%" in page


def test_the_codecs_of_tables_are_shown_where_there_are_some():
    plain = TableStatus(
        name="t", dim=4, rows=10, bytes=2**20, optimizer="adam", loading=False, push_codec="none", pull_codec="none"
    )
    assert "table optimizer dim rows bytes t adam 4 10" in shown(replace(STATUS, tables=(plain,)))
    coded = replace(plain, name="u", push_codec="int8", pull_codec="fp16s")
    page = shown(replace(STATUS, tables=(plain, coded)))
    assert "table optimizer push pull dim rows bytes t adam none none 4 10" in page
    assert "u adam int8 fp16s 4 10" in page


def test_an_update_that_failed_is_shown_with_its_shard():
    assert "h:1: the update failed" in shown(replace(STATUS, failed_update="the update failed"))


def test_the_memory_of_the_tables_is_shown_with_what_is_left():
    page = shown(replace(STATUS, used_bytes=3 * 2**30, budget_bytes=4 * 2**30))
    assert "rows tables used left" in page
    assert "3.0 GiB 1.0 GiB" in page
