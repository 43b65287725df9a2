"""Pulls of what changed since a version, against pulls of everything."""

from __future__ import annotations

import numpy as np
import pytest

from embershard.proto import spec
from embershard.proto.codec.payload import decode_elements
from embershard.proto.messages import DELTA, Declare, Join, Load, Pull, Push, PushToken, Rows, TableGradients, TableIds
from embershard.proto.routing import Placement
from embershard.ps.restore import Contents
from embershard.ps.shard import Shard
from embershard.ps.table import changes
from embershard.ps.table.changes import ChangeTracker
from embershard.ps.table.optimizers import OptimizerRegistry

DIM = 16
IDS = np.random.default_rng(7).permutation(np.arange(-300, 300, 5, dtype=np.int64))


def make(optimizer: spec.Optimizer | None = None) -> Shard:
    shard = Shard(0, Placement.even(1), OptimizerRegistry())
    shard.handle(Declare(spec.TableSpec(name="t", dim=DIM, optimizer=optimizer or spec.SGD(lr=1.0))))
    return shard


def pull(shard: Shard, part: TableIds) -> Rows:
    reply = shard.handle(Pull(1, (part,)))
    assert isinstance(reply, Rows)
    return reply


def everything(shard: Shard, ids: np.ndarray = IDS) -> np.ndarray:
    return pull(shard, TableIds("t", ids)).tables[0]


class Reader:
    """A worker that holds the rows of `ids` and asks for what changed."""

    def __init__(self, shard: Shard, ids: np.ndarray = IDS) -> None:
        self.shard, self.ids = shard, ids
        self.rows = np.full((len(ids), DIM), np.nan, np.float32)
        self.version = 0
        self.got = 0  # elements of the last reply

    def read(self) -> np.ndarray:
        reply = pull(self.shard, TableIds("t", self.ids, codec=DELTA, since=self.version))
        if reply.codecs:
            assert reply.codecs == (DELTA,)
            positions, values = decode_elements(reply.tables[0], len(self.ids), DIM)
            self.rows.reshape(-1)[positions] = values
            self.got = len(positions)
        else:
            self.rows[...] = reply.tables[0].reshape(self.rows.shape)
            self.got = self.rows.size
        self.version = reply.version
        return self.rows


class Pusher:
    """A worker that pushes."""

    def __init__(self, shard: Shard, worker: int) -> None:
        self.shard, self.worker, self.seq = shard, worker, 0

    def push(self, ids: np.ndarray, rows: np.ndarray, *, last: bool = True, difference: bool = False) -> None:
        self.seq += 1
        token = PushToken(self.worker, 1, self.seq, self.seq)
        part = TableGradients("t", ids, rows)
        self.shard.handle(Push(token, 0, 1, (part,), last=last, difference=difference))


def sparse(rng: np.random.Generator, count: int, density: float) -> np.ndarray:
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
    readers = [Reader(shard), Reader(shard, IDS[::3].copy()), Reader(shard, IDS[:1].copy()), Reader(shard, IDS[:0])]
    saved = 0
    for _ in range(120):
        ids = rng.permutation(IDS)[: rng.integers(0, 12)]
        action = rng.integers(0, 10)
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
            assert reader.read().tobytes() == everything(shard, reader.ids).tobytes()
            saved += reader.got < reader.rows.size
    assert saved > 10


def test_the_first_pull_brings_all_rows_and_the_next_one_nothing():
    reader = Reader(make())
    Pusher(reader.shard, 0).push(IDS[:1], np.ones((1, DIM), np.float32))
    reader.read()
    assert reader.got == len(IDS) * DIM
    reader.read()
    assert reader.got == 0
    assert pull(reader.shard, TableIds("t", IDS, codec=DELTA, since=reader.version)).tables[0].nbytes < 8


def test_where_most_has_changed_all_rows_come():
    reader = Reader(make())
    pusher = Pusher(reader.shard, 0)
    pusher.push(IDS, np.ones((len(IDS), DIM), np.float32))
    reader.read()
    pusher.push(IDS, np.ones((len(IDS), DIM), np.float32))
    assert pull(reader.shard, TableIds("t", IDS, codec=DELTA, since=reader.version)).codecs == ()


def test_a_change_to_the_same_bits_is_none():
    reader = Reader(make())
    pusher = Pusher(reader.shard, 0)
    pusher.push(IDS, np.ones((len(IDS), DIM), np.float32))
    reader.read()
    gradients = np.zeros((len(IDS), DIM), np.float32)
    gradients[2, 3] = 1
    pusher.push(IDS, gradients)
    reader.read()
    assert reader.got == 1


def test_rows_for_which_there_is_no_room_come_whole(monkeypatch):
    monkeypatch.setattr(changes, "MAX_BYTES", 20 * (8 + 4 * DIM))
    shard = make()
    small, large, pusher = Reader(shard, IDS[:20].copy()), Reader(shard), Pusher(shard, 0)
    for step in range(4):
        pusher.push(IDS[:1], np.ones((1, DIM), np.float32))
        for reader in (small, large):
            assert reader.read().tobytes() == everything(shard, reader.ids).tobytes()
        assert large.got == large.rows.size
        assert small.got == (small.rows.size if step == 0 else DIM)


def test_what_nobody_asks_for_is_not_watched(monkeypatch):
    monkeypatch.setattr(changes, "IDLE_UPDATES", 5)
    shard = make()
    reader, pusher, table = Reader(shard), Pusher(shard, 0), shard._tables.entry("t").table
    for pushes in (5, 6, 5, 12):
        reader.read()
        assert table.changes is not None
        for _ in range(pushes):
            pusher.push(IDS[:1], np.ones((1, DIM), np.float32))
        assert (table.changes is None) == (pushes > 6)
        assert reader.read().tobytes() == everything(shard).tobytes()


def test_a_version_of_another_life_is_not_known():
    shard = make()
    reader, pusher = Reader(shard), Pusher(shard, 0)
    pusher.push(IDS, np.ones((len(IDS), DIM), np.float32))
    reader.read()
    reader.version += 5  # of a shard that had come further
    assert reader.read().tobytes() == everything(shard).tobytes()
    assert reader.got == reader.rows.size


def test_after_a_restore_all_rows_come():
    shard, other = make(), make()
    reader = Reader(shard)
    Pusher(shard, 0).push(IDS, np.ones((len(IDS), DIM), np.float32))
    held = reader.read().copy()
    Pusher(other, 0).push(IDS, np.full((len(IDS), DIM), 3, np.float32))
    shard._install(Contents([other._tables.entry("t").table]))
    Reader(shard).read()  # from here on the restored rows are watched
    assert not np.array_equal(everything(shard), held)
    assert reader.read().tobytes() == everything(shard).tobytes()


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


def test_status_counts_the_memory_of_what_is_watched():
    shard = make()
    table = shard._tables.entry("t").table
    before = table.nbytes
    Reader(shard).read()
    assert table.nbytes - before == len(IDS) * (8 + 4 * DIM)


def test_what_a_clock_changed_comes_once():
    shard = make()
    for worker in (0, 1):
        shard.handle(
            Join(
                worker=worker,
                epoch=1,
                clock=0,
                staleness=0,
                workers=2,
                lease_ms=60_000,
                staleness_aware_lr=False,
                run=0,
            )
        )
    reader = Reader(shard)
    for clock in range(4):
        for worker in (0, 1):
            part = TableGradients("t", IDS[:4], np.ones((4, DIM), np.float32))
            token = PushToken(worker, 1, clock + 1, clock + 1)
            shard.handle(Push(token, clock, 1, (part,)))
        assert reader.read().tobytes() == everything(shard).tobytes()
        assert reader.got == (4 if clock else len(IDS)) * DIM
        reader.read()
        assert reader.got == 0
