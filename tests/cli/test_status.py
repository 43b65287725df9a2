"""What `embershard status` shows of shards, of workers and of the staleness really seen."""

import io
from types import SimpleNamespace

import pytest
from doctor_cases import STATUS, TABLE, member
from rich.console import Console

from embershard.cli import status as command
from embershard.proto.messages import replace
from embershard.proto.transport.transport import Unreachable

EMPTY = replace(STATUS, tables=())


def shown(*statuses):
    """The page, a space between words."""
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(command._view([command.Seen("h:1", status=status) for status in statuses]))
    return " ".join(console.export_text().split())


MEMBERS = replace(
    EMPTY, clock=7, staleness=0, members=(member(0, 8, 9.0), member(1, 7, 2.5), member(2, 4, 9.5, paused=True))
)
SEEN_LATER = replace(MEMBERS, members=(member(0, 8, 8.5), member(1, 8, 9.0), member(2, 4, 9.5, paused=True)))
UNBOUNDED = replace(EMPTY, clock=3, staleness=-1, members=(member(0, 9, 1.0), member(1, 3, 1.0)))
STALENESS = [0] * 32
STALENESS[0], STALENESS[1], STALENESS[5], STALENESS[31] = 4, 2, 1, 1
PLAIN = replace(TABLE, name="t", bytes=2**20, optimizer="adam", push_codec="none", pull_codec="none")
CODED = replace(PLAIN, name="u", push_codec="int8", pull_codec="fp16s")
GIB = 2**30


@pytest.mark.parametrize(
    ("statuses", "words"),
    [
        # as the shard sees them that heard of them least
        (
            [MEMBERS, SEEN_LATER],
            "staleness 0 worker clock lease state 0 8 8.5 s trains 1 7 2.5 s waited for 2 4 9.5 s paused",
        ),
        ([UNBOUNDED], "staleness off worker clock lease state 0 9 1.0 s trains 1 3 1.0 s trains"),
        (
            [replace(EMPTY, staleness_seen=tuple(STALENESS)), replace(EMPTY, staleness_seen=(2,))],
            "staleness pushes share 0 6 60.0% 1 2 20.0% 4 to 7 1 10.0% 31 or more 1 10.0%",
        ),
        ([replace(EMPTY, tables=(PLAIN,))], "table optimizer dim rows bytes t adam 4 10"),
        ([replace(EMPTY, tables=(PLAIN, CODED))], "table optimizer push pull dim rows bytes t adam none none 4 10"),
        ([replace(EMPTY, tables=(PLAIN, CODED))], "u adam int8 fp16s 4 10"),
        (
            [
                replace(
                    EMPTY,
                    durability="log",
                    term=3,
                    base_lsn=5000,
                    log_bytes=GIB,
                    log_waiting_bytes=1024,
                    recovery_seconds=9.54,
                )
            ],
            "shard durability term LSN bytes written would take 0 log 3 5,000 1.0 GiB 1.0 KiB 9.5 s",
        ),
        (
            [replace(EMPTY, recovering=True, log_bytes=2 * GIB, recovered_bytes=GIB // 2, recovery_seconds=90.0)],
            "log about shard bytes done left 0 2.0 GiB 25% 0:01:30",
        ),
        ([replace(EMPTY, recovering=True, log_bytes=1)], "h:1 recovering"),
        (
            [replace(EMPTY, recovering=True, log_bytes=GIB, recovered_bytes=GIB, waits_for_room="No space left")],
            "log about shard bytes done left 0 1.0 GiB 100% waits h:1: the shard has recovered its rows, but its event "
            "log cannot go on: No space left; it waits for room: free disk space, or raise the quota",
        ),
        ([replace(EMPTY, failed_update="the update failed")], "h:1: the update failed"),
        ([replace(EMPTY, failed_update="the update failed")], "0/1 h:1 update failed"),
        ([replace(EMPTY, draining=True)], "0/1 h:1 ending"),
        ([replace(EMPTY, used_bytes=3 * GIB, budget_bytes=4 * GIB)], "rows tables used left"),
        ([replace(EMPTY, used_bytes=3 * GIB, budget_bytes=4 * GIB)], "3.0 GiB 1.0 GiB"),
    ],
)
def test_what_shards_say_is_shown(statuses, words):
    assert words in shown(*statuses)


@pytest.mark.parametrize(
    "changes", [{"recovering": True}, {"draining": True}, {"waits_for_room": "No space left"}, {"failed_update": "it"}]
)
def test_a_shard_that_refuses_requests_does_not_serve(changes):
    assert command.Seen("h:1", status=EMPTY).is_serving
    assert not command.Seen("h:1", status=replace(EMPTY, **changes)).is_serving


@pytest.mark.parametrize(
    ("reason", "why"), [("no answer", "within 2 s"), ("Connection refused", "(Connection refused)")]
)
def test_a_shard_that_does_not_answer_is_shown_with_the_reason(reason, why):
    def result():
        raise Unreachable(reason)

    transport = SimpleNamespace(address="h:1", submit=lambda *_: SimpleNamespace(result=result))
    (seen,) = command._ask([transport])
    assert seen.problem.startswith(f"no answer {why}; check that it runs and is not stopped")


def test_tables_of_many_shards_are_gone_through_once_and_not_for_each_table():
    looks = []

    class Part(SimpleNamespace):
        @property
        def name(self):
            looks.append(self)
            return f"t{self.number}"

    fields = {"rows": 2, "bytes": 8, "dim": 4, "optimizer": "sgd", "push_codec": "", "pull_codec": ""}
    parts = [Part(number=number, **fields) for number in range(50)]
    seen = [command.Seen(f"h:{k}", status=SimpleNamespace(tables=parts)) for k in range(4)]
    (view,) = command._tables(seen)
    assert view.row_count == 50
    assert len(looks) == 200


def test_shards_without_workers_show_none():
    assert "worker" not in shown(EMPTY)


def test_a_shard_that_lost_its_rows_is_named_with_the_time_of_its_start():
    kept = replace(STATUS, instance="a", lineage=7, uptime_seconds=900.0)
    empty = replace(EMPTY, instance="b", shard=1, uptime_seconds=200.0)
    assert "lost" not in shown(kept, replace(kept, instance="b"))
    assert "lost" not in shown(empty, replace(empty, instance="a"))
    assert "lost" not in shown(kept, replace(empty, recovering=True))
    page = shown(kept, empty)
    for words in ("0/1 h:1 serving", "1/1 h:1 rows lost", "h:1: shard 1 lost its rows 3 minutes ago"):
        assert words in page


def test_shards_of_two_jobs_are_no_shards_without_rows():
    page = shown(STATUS, replace(STATUS, shard=1, num_shards=3, instance="b", lineage=STATUS.lineage + 1))
    assert "lost" not in page
    assert "these shards were started for 1 and 3 shards; name the shards of one job only" in page
