"""What a shard is told of how its tables are to travel."""

import re

import pytest

from embershard.proto.codec.name import CodecName
from embershard.proto.errors import InvalidRequest, UnknownCodec, UnknownTable
from embershard.proto.messages import Compress, Compressed, Declare, Leave, Pull, TableCodecs
from embershard.proto.protobuf import head_bytes
from embershard.proto.spec import SGD
from embershard.ps.restore import Contents, UnloggedRows
from harness.shards import join, make_shard, table

NOW = 1e9  # after whatever time.monotonic() says
INT8 = TableCodecs(table="rows", push="int8")


@pytest.fixture
def shard():
    shard = make_shard(table("rows", dim=2))
    shard.handle(Declare(table("dense", dim=2, optimizer=SGD(lr=1.0, momentum=0.5)), dense=True), 0.0)
    return shard


def tell(shard, revision=0, *tables, now=NOW):
    return shard.handle(Compress(revision=revision, tables=tables), now)


def told(revision, *tables):
    return Compressed(revision=revision, tables=tables)


NOTHING = told(4)  # under a revision of its own: who goes on asks, and finds nothing to follow


def joined(shard, worker, *, now=NOW, **fields):
    shard.handle(join(worker, clock=9, staleness=-1, lease_ms=10_000, **fields), now)
    return shard


def test_settings_add_up_under_a_growing_revision_that_workers_see_as_they_pull(shard):
    assert tell(shard) == tell(shard, 0, INT8) == told(0)  # revision 0 changes nothing
    tell(shard, 1, TableCodecs(table="rows", push="topk:0.01"), TableCodecs(table="dense", pull="delta"))
    found = tell(shard, 5, TableCodecs(table="rows", pull="int8"), TableCodecs(table="rows", pull="fp16s"))
    rows, dense = (TableCodecs(table="rows", push="topk:0.01", pull="fp16s"), TableCodecs(table="dense", pull="delta"))
    assert found == tell(shard) == told(5, rows, dense)
    assert shard.handle(Pull(1, ())).settings == 5


@pytest.mark.parametrize("revision", [0, 1])
@pytest.mark.parametrize(
    ("part", "kind", "words"),
    [
        (("wide", "int8", ""), UnknownTable, "wide"),
        (("rows", "onebit", ""), InvalidRequest, "'onebit' on the push of rows: it serves"),
        (("dense", "", "topk:0.1"), InvalidRequest, "'topk:0.1' on the pull of dense"),
        (("dense", "dgc:0.1", ""), InvalidRequest, "dgc:0.1 keeps the momentum in the worker"),
        (("rows", "gzip", ""), InvalidRequest, "codec 'gzip': there is no 'gzip'"),
        (("rows", "mine:codec", ""), UnknownCodec, "no codec 'mine:codec' here"),
    ],
)
def test_what_a_table_cannot_have_is_refused_and_changes_nothing(shard, part, kind, words, revision):
    name, push, pull = part
    with pytest.raises(kind, match=f"{name}.*{re.escape(words)}" if kind is InvalidRequest else words):
        tell(shard, revision, TableCodecs(table="dense", push="int8"), TableCodecs(table=name, push=push, pull=pull))
    assert tell(shard) == told(0)


def test_of_two_who_switch_at_once_the_second_is_told(shard):
    assert tell(shard, 1, INT8) == tell(shard, 1, INT8)  # its reply was lost
    with pytest.raises(InvalidRequest, match="revision 1 of the compression settings is taken, they are at 1"):
        tell(shard, 1, TableCodecs(table="rows", push="fp16s"))


@pytest.mark.parametrize("revision", [2**32 + 2, 2**63, 2**64 - 1])
def test_a_revision_that_no_count_leads_to_is_refused_and_rows_still_come(shard, revision):
    tell(shard, 1, INT8)
    with pytest.raises(InvalidRequest):
        tell(shard, revision, INT8)
    shard._install(Contents(), UnloggedRows([]))  # a revision of its own, which every reply has to hold
    assert head_bytes(shard.handle(Pull(1, ())))
    assert tell(shard) == told(2)


def test_what_was_said_ends_where_another_job_begins(shard):
    tell(joined(shard, 0), 3, INT8)
    shard.handle(Leave(worker=0, epoch=1), NOW)
    assert tell(shard) == told(3, INT8)
    assert tell(joined(shard, 0, epoch=2)) == NOTHING
    assert tell(joined(shard, 1), 5, INT8) == told(5, INT8)
    assert tell(joined(shard, 1, run=2)) == told(6)


@pytest.mark.parametrize(("worker", "epoch", "now"), [(1, 1, NOW), (0, 2, NOW), (0, 1, NOW + 99)])
def test_who_joins_late_or_again_is_told_what_its_job_was(shard, worker, epoch, now):
    tell(joined(joined(shard, 0), 7), 3, INT8)
    assert tell(joined(shard, worker, epoch=epoch, now=now), now=now) == told(3, INT8)


def test_what_was_said_of_tables_that_a_snapshot_replaces_is_forgotten(shard):
    tell(shard, 3, INT8)
    shard._install(Contents(), UnloggedRows([]))
    assert tell(shard) == NOTHING


def test_a_worker_that_trains_alone_begins_without_what_was_said_before(shard):
    tell(shard, 3, INT8)
    assert tell(shard, 4) == NOTHING
    tell(joined(shard, 0), 5, INT8)
    assert tell(shard, 6) == told(6, INT8)  # members are here: it is their job that goes on


def test_a_tables_status_names_the_codecs_of_whoever_declared_it_last(shard):
    shard.handle(Declare(table("rows", dim=2, push_codec=CodecName.parse("topk:0.01+fp16s"))))
    (rows, _) = shard.status().tables
    assert (rows.push_codec, rows.pull_codec) == ("topk:0.01+fp16s", "none")
