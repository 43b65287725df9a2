"""What a shard is told of how its tables are to travel."""

from __future__ import annotations

import numpy as np
import pytest

from embershard.proto.codec.name import CodecName
from embershard.proto.errors import InvalidRequest, UnknownCodec, UnknownTable
from embershard.proto.messages import Compress, Compressed, Declare, Join, Leave, Pull, TableCodecs, TableIds
from embershard.proto.routing import Placement
from embershard.proto.spec import SGD, TableSpec
from embershard.ps.restore import Contents
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry

IDS = np.array([1], np.int64)


@pytest.fixture
def shard():
    shard = Shard(0, Placement.even(1), OptimizerRegistry())
    for name, dense, momentum in (("rows", False, 0.0), ("dense", True, 0.5)):
        shard.handle(Declare(TableSpec(name=name, dim=2, optimizer=SGD(lr=1.0, momentum=momentum)), dense=dense))
    return shard


def test_settings_add_up_under_a_growing_revision(shard):
    assert shard.handle(Compress()) == Compressed(revision=0, tables=())
    shard.handle(
        Compress(
            revision=1, tables=(TableCodecs(table="rows", push="topk:0.01"), TableCodecs(table="dense", pull="delta"))
        )
    )
    found = shard.handle(
        Compress(revision=5, tables=(TableCodecs(table="rows", pull="int8"), TableCodecs(table="rows", pull="fp16s")))
    )
    assert found == Compressed(
        revision=5,
        tables=(
            TableCodecs(table="rows", push="topk:0.01", pull="fp16s"),
            TableCodecs(table="dense", push="", pull="delta"),
        ),
    )
    assert shard.handle(Compress()) == found


def test_the_revision_goes_to_workers_with_the_rows_that_they_pull(shard):
    pull = Pull(1, (TableIds("rows", IDS),))
    assert shard.handle(pull).settings == 0
    shard.handle(Compress(revision=3, tables=(TableCodecs(table="rows", push="int8"),)))
    assert shard.handle(pull).settings == 3


REFUSED = [
    (TableCodecs(table="wide", push="int8"), UnknownTable, "wide"),
    (
        TableCodecs(table="rows", push="onebit"),
        InvalidRequest,
        "table 'rows': codec 'onebit' on the push of rows: it serves",
    ),
    (
        TableCodecs(table="dense", pull="topk:0.1"),
        InvalidRequest,
        "table 'dense': codec 'topk:0.1' on the pull of dense",
    ),
    (
        TableCodecs(table="dense", push="dgc:0.1"),
        InvalidRequest,
        "table 'dense': dgc:0.1 keeps the momentum in the worker",
    ),
    (TableCodecs(table="rows", push="gzip"), InvalidRequest, "table 'rows': codec 'gzip': there is no 'gzip'"),
    (TableCodecs(table="rows", push="mine:codec"), UnknownCodec, "no codec 'mine:codec' here"),
]


@pytest.mark.parametrize("revision", [0, 1])
@pytest.mark.parametrize(("part", "kind", "text"), REFUSED)
def test_what_a_table_cannot_have_is_refused_and_changes_nothing(shard, part, kind, text, revision):
    with pytest.raises(kind, match=text.replace("(", r"\(")):
        shard.handle(Compress(revision=revision, tables=(TableCodecs(table="dense", push="int8"), part)))
    assert shard.handle(Compress()) == Compressed(revision=0, tables=())


def test_revision_0_changes_nothing(shard):
    assert shard.handle(Compress(revision=0, tables=(TableCodecs(table="rows", push="int8"),))) == Compressed(
        revision=0, tables=()
    )


def test_of_two_who_switch_at_once_the_second_is_told(shard):
    first = Compress(revision=1, tables=(TableCodecs(table="rows", push="int8"),))
    assert shard.handle(first) == shard.handle(first)  # its reply was lost
    with pytest.raises(InvalidRequest, match="revision 1 of the compression settings is taken, they are at 1"):
        shard.handle(Compress(revision=1, tables=(TableCodecs(table="rows", push="fp16s"),)))


NOW = 1e9  # after whatever time.monotonic() says


def joined(shard: Shard, worker: int, *, epoch: int = 1, run: int = 0, now: float = NOW) -> Shard:
    shard.handle(Join(worker=worker, epoch=epoch, clock=9, staleness=-1, workers=1, lease_ms=10_000, run=run), now)
    return shard


TOLD = Compress(revision=3, tables=(TableCodecs(table="rows", push="int8"),))
NOTHING = Compressed(
    revision=4, tables=()
)  # under a revision of its own: who goes on asks, and finds nothing to follow


def test_what_was_said_ends_with_its_job(shard):
    joined(shard, 0).handle(TOLD, NOW)
    shard.handle(Leave(worker=0, epoch=1), NOW)
    assert shard.handle(Compress(), NOW).tables == TOLD.tables
    assert joined(shard, 0, epoch=2).handle(Compress(), NOW) == NOTHING
    assert joined(shard, 1).handle(Compress(revision=5, tables=TOLD.tables), NOW) == Compressed(
        revision=5, tables=TOLD.tables
    )


def test_what_was_said_ends_where_a_later_run_begins(shard):
    joined(shard, 0, run=1).handle(TOLD, NOW)
    assert joined(shard, 1, run=2).handle(Compress(), NOW) == NOTHING


@pytest.mark.parametrize(("worker", "epoch", "now"), [(1, 1, NOW), (0, 2, NOW), (0, 1, NOW + 99)])
def test_who_joins_late_or_again_is_told_what_its_job_was(shard, worker, epoch, now):
    joined(joined(shard, 0), 7).handle(TOLD, NOW)
    assert joined(shard, worker, epoch=epoch, now=now).handle(Compress(), now) == Compressed(
        revision=3, tables=TOLD.tables
    )


def test_what_was_said_of_tables_that_a_snapshot_replaces_is_forgotten(shard):
    shard.handle(TOLD)
    shard._install(Contents())
    assert shard.handle(Compress()) == NOTHING


def test_a_worker_that_trains_alone_begins_without_what_was_said_before(shard):
    shard.handle(TOLD)
    assert shard.handle(Compress(revision=4)) == NOTHING
    joined(shard, 0).handle(Compress(revision=5, tables=TOLD.tables), NOW)
    assert (
        shard.handle(Compress(revision=6), NOW).tables == TOLD.tables
    )  # members are here: it is their job that goes on


def test_a_tables_status_names_the_codecs_of_whoever_declared_it_last(shard):
    spec = TableSpec(name="rows", dim=2, optimizer=SGD(lr=1.0), push_codec=CodecName.parse("topk:0.01+fp16s"))
    shard.handle(Declare(spec))
    (rows, _) = shard.status().tables
    assert (rows.push_codec, rows.pull_codec) == ("topk:0.01+fp16s", "none")


def test_a_table_is_not_declared_with_a_codec_that_the_shard_has_not(shard):
    spec = TableSpec(name="more", dim=2, optimizer=SGD(lr=1.0), pull_codec=CodecName.parse("mine:codec"))
    with pytest.raises(UnknownCodec):
        shard.handle(Declare(spec))
    assert [table.name for table in shard.status().tables] == ["rows", "dense"]
