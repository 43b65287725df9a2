"""Pulls of what changed since a version, against pulls of everything."""

import numpy as np
import pytest

from embershard.proto import spec
from embershard.proto.codec.payload import decode_elements
from embershard.proto.messages import DELTA, Load, Pull, TableGradients, TableIds
from embershard.ps.restore import Contents, UnloggedRows
from embershard.ps.table import changes
from embershard.ps.table.changes import ChangeTracker
from harness import shards
from harness.shards import join, make_shard, table

DIM = 16
IDS = np.random.default_rng(7).permutation(np.arange(-300, 300, 5, dtype=np.int64))


def make(optimizer=spec.SGD(lr=1.0)):  # noqa: B008
    return make_shard(table("t", DIM, optimizer=optimizer, initializer=spec.Normal()))


class Reader:
    """A worker that holds the rows of `ids` and asks for what changed."""

    def __init__(self, shard, ids=IDS) -> None:
        self.shard, self.ids = shard, ids
        self.rows = np.full((len(ids), DIM), np.nan, np.float32)
        self.version = self.got = 0  # got: elements of the last reply

    def pull(self):
        return self.shard.handle(Pull(1, (TableIds("t", self.ids, codec=DELTA, since=self.version),)))

    def read(self):
        """Read, and compare the rows with all of the shard's."""
        reply = self.pull()
        if reply.codecs:
            assert reply.codecs == (DELTA,)
            positions, values = decode_elements(reply.tables[0], len(self.ids), DIM)
            self.rows.reshape(-1)[positions] = values
            self.got = len(positions)
        else:
            self.rows[...] = reply.tables[0].reshape(self.rows.shape)
            self.got = self.rows.size
        self.version = reply.version
        assert self.rows.tobytes() == shards.rows(self.shard, *self.ids, name="t").tobytes()
        return self.got


class Pusher:
    """A worker that pushes, by default ones."""

    def __init__(self, shard, worker=0) -> None:
        self.shard, self.worker, self.seq = shard, worker, 0

    def push(self, ids, rows=None, **fields):
        self.seq += 1
        part = TableGradients("t", ids, np.ones((len(ids), DIM), np.float32) if rows is None else rows)
        self.shard.handle(shards.push(part, worker=self.worker, seq=self.seq, first=self.seq, **fields))


@pytest.fixture
def shard():
    return make()


@pytest.fixture
def reader(shard):
    return Reader(shard)


@pytest.fixture
def pusher(shard):
    return Pusher(shard)


def sparse(rng, count, density):
    rows = rng.standard_normal((count, DIM)).astype(np.float32)
    rows[rng.random(rows.shape) > density] = 0
    return rows


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "optimizer", [spec.SGD(lr=0.1), spec.SGD(lr=0.1, momentum=0.9), spec.Adam(lr=0.1)], ids=["sgd", "momentum", "adam"]
)
def test_what_changed_and_what_was_held_are_the_rows_to_the_bit(seed, optimizer):
    shard, rng = make(optimizer), np.random.default_rng(seed)
    pushers = [Pusher(shard, worker) for worker in range(3)]
    readers = [Reader(shard, ids) for ids in (IDS, IDS[::3].copy(), IDS[:1].copy(), IDS[:0])]
    saved = 0
    for _ in range(120):
        ids, action = rng.permutation(IDS)[: rng.integers(0, 12)], rng.integers(0, 10)
        if action < 5:
            rows = sparse(rng, len(ids), rng.choice([0.01, 0.3, 1.0]))
            rows[rng.random(rows.shape) < 0.005] = np.nan
            # a push may come in several messages, and a pull between them
            pushers[rng.integers(3)].push(ids, rows, last=bool(rng.random() < 0.7), difference=bool(rng.random() < 0.2))
        elif action == 5:
            shard.handle(Load("t", 1, ids, rng.standard_normal((len(ids), DIM)).astype(np.float32), keep_state=True))
        elif action == 6:
            pushers[0].push(np.array([10_000 + rng.integers(50)]), sparse(rng, 1, 1.0))  # of a row that nobody reads
        else:
            reader = readers[rng.integers(len(readers))]
            saved += reader.read() < reader.rows.size
    assert saved > 10


def test_a_pull_brings_only_what_changed_to_other_bits_where_that_is_less_than_all(shard, reader, pusher):
    empty = shard.status().tables[0].bytes
    assert reader.read() == len(IDS) * DIM
    assert shard.status().tables[0].bytes - empty == len(IDS) * (changes.ID_BYTES + 4 * DIM)  # of what is watched
    pusher.push(IDS)
    assert reader.pull().codecs == ()
    reader.read()
    one = np.zeros((len(IDS), DIM), np.float32)
    one[2, 3] = 1
    pusher.push(IDS, one)
    assert [reader.read(), reader.read()] == [1, 0]
    assert reader.pull().tables[0].nbytes < 8


def test_rows_for_which_there_is_no_room_come_whole(shard, reader, pusher, monkeypatch):
    monkeypatch.setattr(changes, "MAX_BYTES", 20 * (changes.ID_BYTES + 4 * DIM))
    small = Reader(shard, IDS[:20].copy())
    for step in range(4):
        pusher.push(IDS[:1])
        assert small.read() == (small.rows.size if step == 0 else DIM)
        assert reader.read() == reader.rows.size


def test_what_nobody_asks_for_is_not_watched(shard, reader, pusher, monkeypatch):
    monkeypatch.setattr(changes, "IDLE_UPDATES", 5)
    watched = shard.core.tables.entry("t").table
    for pushes in (5, 6, 5, 12):
        reader.read()
        assert watched.changes is not None
        for _ in range(pushes):
            pusher.push(IDS[:1])
        assert (watched.changes is None) == (pushes > 6)
        reader.read()


def test_where_a_version_is_of_another_life_or_before_a_restore_all_rows_come(shard, reader, pusher):
    pusher.push(IDS)
    reader.read()
    reader.version += 5  # of a shard that had come further
    assert reader.read() == reader.rows.size
    other = make()
    Pusher(other).push(IDS, np.full((len(IDS), DIM), 3, np.float32))
    held = reader.rows.copy()
    shard._install(Contents([other.core.tables.entry("t").table]), UnloggedRows([]))
    Reader(shard).read()  # from here on the restored rows are watched
    assert reader.read() == reader.rows.size
    assert not np.array_equal(reader.rows, held)


def test_versions_beyond_32_bits_are_not_told_apart():
    version = 5
    watched = ChangeTracker(2, lambda: version)
    ids, rows = np.array([1, 2]), np.zeros((2, 2), np.float32)
    watched.watch(ids)
    watched.record(ids, rows, rows + 1)
    assert watched.since(ids, 5) is not None
    version += 2**32
    watched.record(ids, rows, rows + 1)
    assert watched.since(ids, 2**32) is None
    assert watched.since(ids, 5) is None


def test_few_new_ids_beside_many_that_are_watched_cost_no_copy_of_these():
    """Each pull of new ids sorted and copied all that were watched: the time grew with the square of their number."""
    rng, watched, copies = np.random.default_rng(1), ChangeTracker(2, lambda: 1), 0
    ids = rng.permutation(np.unique(rng.integers(-(2**63), 2**63 - 1, 6400)))
    for start in range(0, len(ids), 64):
        stamps = watched._stamps
        assert not watched.watch(ids[start : start + 64])
        assert watched.watch(rng.permutation(ids[: start + 64]))
        copies += watched._stamps is not stamps
        before, after = np.zeros((64, 2), np.float32), np.tile(np.float32([0, 1]), (64, 1))
        watched.record(ids[start : start + 64], before, after)
    assert copies < 10
    assert watched.nbytes == len(ids) * (changes.ID_BYTES + 8)
    assert np.array_equal(watched.since(ids, 1), np.arange(1, 2 * len(ids), 2))


def test_what_a_clock_changed_comes_once(shard, reader):
    pushers = [Pusher(shard, worker) for worker in (0, 1)]
    for worker in (0, 1):
        shard.handle(join(worker, workers=2))
    for clock in range(4):
        for pusher in pushers:
            pusher.push(IDS[:4], clock=clock)
        assert [reader.read(), reader.read()] == [(4 if clock else len(IDS)) * DIM, 0]
