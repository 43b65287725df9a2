"""A shard's part of a snapshot, and a shard made of parts, without a transport."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from embershard.proto import spec
from embershard.proto.errors import (
    BadSnapshotName,
    MemoryLost,
    OtherOptimizer,
    SnapshotDamaged,
    SnapshotNotWritten,
    SnapshotRunning,
    SnapshotTooLate,
    SnapshotUnknown,
    SnapshotUnreadable,
    StaleWorker,
    TableLoading,
    TablesInTheWay,
    UnknownTable,
)
from embershard.proto.messages import (
    Declare,
    Join,
    Leave,
    Load,
    Pull,
    Push,
    Pushed,
    PushToken,
    Restore,
    Restored,
    Rows,
    Snapshot,
    Snapshotted,
    TableGradients,
    TableIds,
    replace,
)
from embershard.proto.reference import mix64
from embershard.proto.routing import Placement
from embershard.proto.snapshot import blocks
from embershard.proto.snapshot.manifest import MANIFEST, Manifest, ShardPart, pack_manifest, unpack_part
from embershard.proto.snapshot.storage import Storage
from embershard.ps import snapshot as module
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry

EPOCH, DIM = 1, 3
REGISTRY = OptimizerRegistry()
ITEMS = spec.TableSpec(name="ctr/items", dim=DIM, optimizer=spec.Adagrad(lr=0.5))
PLAIN = spec.TableSpec(name="plain", dim=1, optimizer=spec.SGD(lr=0.5), id_space="users")
IDS = np.random.default_rng(0).integers(-(2**62), 2**62, 3000)


def make(index: int = 0, of: int = 1, tables: Sequence[spec.TableSpec] = (ITEMS, PLAIN)) -> Shard:
    shard = Shard(index, Placement.even(of), REGISTRY)
    for table in tables:
        shard.handle(Declare(table))
    return shard


def own(ids: np.ndarray, table: spec.TableSpec, index: int, of: int) -> np.ndarray:
    return ids[Placement.even(of).shard_of[mix64(ids, table.space_key) >> np.uint64(52)] == index]


def push(
    shard: Shard, seq: int = 1, ids: np.ndarray = IDS, *, epoch: int = 1, clock: int = 0, worker: int = 0
) -> object:
    of, index = shard.greeting.num_shards, shard.greeting.shard
    parts = []
    for table in (ITEMS, PLAIN):
        mine = own(IDS, table, index, of)
        gradients = np.random.default_rng(seq).standard_normal((len(mine), table.dim)).astype(np.float32)
        parts.append(TableGradients(table.name, mine, gradients))
    reply = shard.handle(Push(PushToken(worker, epoch, seq, seq), clock, EPOCH, tuple(parts)))
    assert isinstance(reply, Pushed)
    return reply


def pulled(shards: Sequence[Shard]) -> dict[tuple[str, int], bytes]:
    found = {}
    for shard in shards:
        for table in (ITEMS, PLAIN):
            mine = own(IDS, table, shard.greeting.shard, shard.greeting.num_shards)
            reply = shard.handle(Pull(EPOCH, (TableIds(table.name, mine),)))
            assert isinstance(reply, Rows)
            found.update(
                {(table.name, i): row.tobytes() for i, row in zip(mine.tolist(), reply.tables[0], strict=True)}
            )
    return found


def ask(shard: Shard, request: Snapshot | Restore) -> Snapshotted | Restored:
    reply = shard.handle(request)
    assert isinstance(reply, Snapshotted | Restored)
    return reply


def settled(shard: Shard, request: Snapshot | Restore) -> Snapshotted | Restored:
    end = time.monotonic() + 30
    while (reply := ask(shard, replace(request, step="watch"))).state in ("writing", "reading"):
        assert time.monotonic() < end
        time.sleep(0.002)
    return reply


def work(shard: Shard, request: Snapshot | Restore) -> None:
    """Begin and wait: either may say what is wrong."""
    ask(shard, request)
    settled(shard, request)


def take(shards: Sequence[Shard], folder: Path, name: str = "one", number: int = 7) -> Manifest:
    """A whole snapshot, as the client makes it."""
    parts = []
    for shard in shards:
        ask(shard, Snapshot(url=str(folder), name=name, id=number, step="begin"))
    for shard in shards:
        reply = settled(shard, Snapshot(url=str(folder), name=name, id=number, step="begin"))
        assert isinstance(reply, Snapshotted)
        parts.append(unpack_part((folder / name / reply.path).read_bytes(), "part"))
    return finish(folder, name, parts)


def finish(folder: Path, name: str, parts: Sequence[ShardPart]) -> Manifest:
    manifest = Manifest(name, 0.0, "0", tuple(parts))
    (folder / name / MANIFEST).write_bytes(pack_manifest(manifest))
    return manifest


def request_of(folder: Path, number: int = 1, name: str = "one", **rest: object) -> Restore:
    digest = hashlib.sha256((folder / name / MANIFEST).read_bytes()).hexdigest()
    return Restore(url=str(folder), name=name, id=number, sha256=digest, **{"step": "begin", **rest})  # type: ignore[arg-type]


def restore(shard: Shard, folder: Path, number: int = 1, **rest: object) -> Restored:
    request = request_of(folder, number, **rest)
    ask(shard, request)
    assert settled(shard, request).state == "ready"
    reply = ask(shard, replace(request, step="install"))
    assert isinstance(reply, Restored)
    return reply


@contextmanager
def slow_storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A storage in which writers stop at their first file until they are let go."""
    go = threading.Event()
    create = Storage.create

    @contextmanager
    def wait(self, path):
        assert go.wait(30)
        with create(self, path) as file:
            yield file

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "create", wait)
        try:
            yield go.set
        finally:
            go.set()


def test_a_snapshot_shows_the_rows_of_its_moment(tmp_path, monkeypatch):
    shard = make()
    push(shard)
    then = pulled([shard])
    with slow_storage(monkeypatch) as go:
        ask(shard, Snapshot(url=str(tmp_path), name="one", id=7, step="begin"))
        push(shard, 2)
        go()
        settled(shard, Snapshot(url=str(tmp_path), name="one", id=7, step="begin"))
    take([shard], tmp_path, "two", 8)
    after = pulled([shard])
    early = unpack_part(next((tmp_path / "one").glob("*/part.msgpack")).read_bytes(), "part")
    finish(tmp_path, "one", [early])
    for name, want in (("one", then), ("two", after)):
        fresh = make(tables=())
        restore(fresh, tmp_path, name=name)
        assert pulled([fresh]) == want
    assert then != after


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("now", [1, 2, 3])
def test_rows_and_states_come_back_onto_any_number_of_shards(before, now, tmp_path):
    shards = [make(i, before) for i in range(before)]
    for shard in shards:
        push(shard)
    take(shards, tmp_path)
    others = [make(i, now, tables=()) for i in range(now)]
    assert sum(restore(shard, tmp_path).rows for shard in others) == 2 * len(IDS)
    assert pulled(others) == pulled(shards)
    everything = [make()]  # the same gradients whatever the number of shards
    for table in (ITEMS, PLAIN):
        gradients = TableGradients(table.name, IDS, np.ones((len(IDS), table.dim), np.float32))
        for group in (shards, others, everything):
            for shard in group:
                mine = own(IDS, table, shard.greeting.shard, shard.greeting.num_shards)
                part = replace(gradients, ids=mine, gradients=np.ones((len(mine), table.dim), np.float32))
                shard.handle(Push(PushToken(5, 1, 1 if table is ITEMS else 2, 1), 0, EPOCH, (part,)))
    assert pulled(others) == pulled(shards)  # the accumulators were there


def test_files_are_safetensors_by_bucket_and_a_shard_reads_only_those_that_it_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "FILE_BYTES", 32 * 300)
    shard = make()
    push(shard)
    manifest = take([shard], tmp_path)
    table = manifest.tables[ITEMS.name]
    assert [file.rows for file in table.files] == [300] * 10
    last = 0
    for file in table.files:
        arrays = safetensors.numpy.load_file(tmp_path / "one" / file.path)
        buckets = mix64(arrays["ids"], ITEMS.space_key) >> np.uint64(52)
        assert (np.diff(buckets.astype(np.int64)) >= 0).all()
        assert (buckets[0], buckets[-1]) == (file.first_bucket, file.last_bucket)
        assert file.first_bucket >= last
        last = file.last_bucket
        assert {name: array.shape for name, array in arrays.items()} == {
            "ids": (300,), "rows": (300, DIM), "state": (300, DIM),
        }  # fmt: skip
    for file in [*table.files[6:], *manifest.tables[PLAIN.name].files[6:]]:
        (tmp_path / "one" / file.path).unlink()
    assert restore(make(0, 2, tables=()), tmp_path).rows > 2000


def test_a_push_that_was_applied_before_the_snapshot_is_known_after_the_restore(tmp_path):
    shard = make()
    push(shard, 1)
    push(shard, 2, epoch=1)
    take([shard], tmp_path)
    fresh = make(tables=())
    restore(fresh, tmp_path)
    then = pulled([fresh])
    assert push(fresh, 2).duplicate
    assert pulled([fresh]) == then
    assert not push(fresh, 3).duplicate
    with pytest.raises(StaleWorker):
        push(fresh, 1, epoch=0)


def test_on_another_number_of_shards_an_earlier_workers_pushes_are_refused(tmp_path):
    shard = make()
    push(shard, 1)
    take([shard], tmp_path)
    fresh = make(0, 2, tables=())
    restore(fresh, tmp_path)
    with pytest.raises(MemoryLost):
        push(fresh, 2)


def test_a_first_reply_that_was_lost_begins_no_second_snapshot(tmp_path):
    shard = make()
    push(shard)
    request = Snapshot(url=str(tmp_path), name="one", id=7, step="begin")
    ask(shard, request)
    first = settled(shard, request)
    assert ask(shard, request) == first


def test_one_snapshot_at_a_time(tmp_path, monkeypatch):
    shard = make()
    push(shard)
    with slow_storage(monkeypatch):
        ask(shard, Snapshot(url=str(tmp_path), name="one", id=7, step="begin"))
        with pytest.raises(SnapshotRunning, match="'one'"):
            ask(shard, Snapshot(url=str(tmp_path), name="two", id=8, step="begin"))
        monkeypatch.setattr(module, "HUNG_SECONDS", -1.0)
        assert ask(shard, Snapshot(url=str(tmp_path), name="two", id=8, step="begin")).state == "writing"
        with pytest.raises(SnapshotUnknown, match="'one'"):
            ask(shard, Snapshot(url=str(tmp_path), name="one", id=7, step="watch"))


def test_a_cancelled_snapshot_copies_no_more_rows_and_makes_room_for_another(tmp_path, monkeypatch):
    shard = make()
    push(shard)
    request = Snapshot(url=str(tmp_path), name="one", id=7, step="begin")
    cancel = replace(request, step="cancel")
    with slow_storage(monkeypatch) as go:
        ask(shard, request)
        writer = shard._snapshots._writer
        assert writer is not None
        assert [ask(shard, cancel).state for _ in range(2)] == ["cancelling"] * 2
        push(shard, 2)
        assert [rows.num_kept for _, rows in writer._frozen] == [0, 0]
        go()
        writer._thread.join(30)
        assert ask(shard, cancel).state == "cancelled"  # no file is open
    take([shard], tmp_path, "two", 8)
    assert not list((tmp_path / "one").glob("*/part.msgpack"))


@pytest.mark.parametrize("step", ["", "install", "nonsense"])
def test_a_step_that_there_is_none_of_is_refused(step, tmp_path):
    with pytest.raises(Exception, match="no step"):
        ask(make(), Snapshot(url=str(tmp_path), name="one", id=7, step=step))


def test_a_name_that_leads_elsewhere_is_refused(tmp_path):
    for name in ("../one", "/one", ""):
        with pytest.raises(BadSnapshotName):
            ask(make(), Snapshot(url=str(tmp_path), name=name, id=7, step="begin"))
    with pytest.raises(BadSnapshotName):
        ask(make(), Restore(url=str(tmp_path), name="../one", id=7, sha256="", step="begin"))


def test_a_shard_without_tables_has_a_part_too(tmp_path):
    manifest = take([make(tables=())], tmp_path)
    assert (manifest.rows, manifest.tables) == (0, {})
    assert restore(make(tables=()), tmp_path).rows == 0


def test_a_table_whose_first_values_come_is_waited_for(tmp_path):
    shard = make(tables=())
    shard.handle(Declare(PLAIN, 3, True))
    with pytest.raises(TableLoading):
        ask(shard, Snapshot(url=str(tmp_path), name="one", id=7, step="begin"))
    shard.handle(Load("plain", EPOCH, IDS[:1], np.ones((1, 1), np.float32), 3))
    assert take([shard], tmp_path).rows == 1


def test_a_write_that_fails_is_named_and_the_shard_goes_on(tmp_path):
    (tmp_path / "file").write_text("")
    shard = make()
    push(shard)
    request = Snapshot(url=str(tmp_path / "file"), name="one", id=7, step="begin")
    with pytest.raises(SnapshotNotWritten, match="NotADirectory"):
        work(shard, request)
    with pytest.raises(SnapshotNotWritten, match="NotADirectory"):
        settled(shard, request)
    push(shard, 2)
    assert take([shard], tmp_path, number=8).rows == 2 * len(IDS)


def test_a_snapshot_that_met_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    shard = make()
    push(shard)
    files = []

    def sync(handle):
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            files.append(handle)
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", sync)
    request = Snapshot(url=str(tmp_path), name="one", id=7, step="begin")
    with pytest.raises(SnapshotNotWritten, match="No space left"):
        settled(shard, request) if work(shard, request) else None
    assert files
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    monkeypatch.undo()
    push(shard, 2)
    assert take([shard], tmp_path, number=8).rows == 2 * len(IDS)


class TestAtAClock:
    """Two workers at staleness 0: what they push of a clock is applied when both have."""

    @pytest.fixture
    def shard(self):
        made = make()
        for worker in (0, 1):
            made.handle(Join(worker=worker, epoch=1, clock=0, staleness=0, workers=2, lease_ms=10_000))
        return made

    def test_it_is_taken_when_the_clock_closes(self, shard, tmp_path):
        request = Snapshot(url=str(tmp_path), name="one", id=7, at_clock=2, step="begin")
        seen = []
        for clock in range(3):
            for worker in (0, 1):
                push(shard, clock + 1, worker=worker, clock=clock)
            seen.append(pulled([shard]))
            if clock == 0:
                assert ask(shard, request).state == "waiting"
        reply = settled(shard, request)
        assert isinstance(reply, Snapshotted)
        assert reply.clock == 2
        finish(tmp_path, "one", [unpack_part((tmp_path / "one" / reply.path).read_bytes(), "part")])
        fresh = make(tables=())
        restore(fresh, tmp_path)
        assert pulled([fresh]) == seen[1]

    def test_a_clock_that_is_closed_is_too_late(self, shard, tmp_path):
        for clock in range(2):
            for worker in (0, 1):
                push(shard, clock + 1, worker=worker, clock=clock)
        with pytest.raises(SnapshotTooLate):
            ask(shard, Snapshot(url=str(tmp_path), name="one", id=7, at_clock=1, step="begin"))
        assert ask(shard, Snapshot(url=str(tmp_path), name="one", id=8, at_clock=2, step="begin")).state == "writing"

    def test_without_a_clock_it_waits_for_what_was_acknowledged(self, shard, tmp_path):
        request = Snapshot(url=str(tmp_path), name="one", id=7, step="begin")
        push(shard, 1, worker=0)
        assert ask(shard, request).state == "waiting"
        push(shard, 1, worker=1)
        reply = settled(shard, request)
        assert (reply.state, reply.rows) == ("done", 2 * len(IDS))

    def test_it_is_taken_too_where_the_end_of_a_lease_closes_the_clock(self, shard, tmp_path):
        request = Snapshot(url=str(tmp_path), name="one", id=7, at_clock=1, step="begin")
        ask(shard, request)
        push(shard, 1, worker=0)
        shard.advance(time.monotonic() + 100)
        assert settled(shard, request).state == "done"

    def test_one_that_waits_gives_way_and_can_be_cancelled(self, shard, tmp_path):
        first, second = (
            Snapshot(url=str(tmp_path), name="one", id=number, at_clock=9, step="begin") for number in (7, 8)
        )
        ask(shard, first)
        assert ask(shard, second).state == "waiting"
        with pytest.raises(SnapshotUnknown):
            ask(shard, replace(first, step="watch"))
        ask(shard, replace(second, step="cancel"))
        with pytest.raises(SnapshotUnknown):
            ask(shard, replace(second, step="watch"))

    def test_a_clock_that_is_jumped_over_is_too_late_for_whoever_watches(self, shard, tmp_path):
        request = Snapshot(url=str(tmp_path), name="one", id=7, at_clock=5, step="begin")
        ask(shard, request)
        for worker in (0, 1):
            shard.handle(Leave(worker=worker, epoch=1))
        shard.handle(Join(worker=0, epoch=2, clock=9, staleness=0, workers=1, lease_ms=10_000))
        with pytest.raises(SnapshotTooLate):
            ask(shard, replace(request, step="watch"))


class TestRestore:
    @pytest.fixture
    def folder(self, tmp_path):
        shard = make()
        push(shard)
        take([shard], tmp_path)
        return tmp_path

    def file(self, folder: Path, number: int = 0) -> Path:
        return sorted(folder.glob("one/shard-*/*.safetensors"))[number]

    def fails(self, folder: Path, error: type[Exception], words: str, **changes: object) -> None:
        """Neither this nor what follows changes the shard."""
        shard = make(tables=())
        request = replace(request_of(folder), **changes)  # type: ignore[arg-type]
        with pytest.raises(error, match=words):
            work(shard, request)
        with pytest.raises(error, match=words):
            ask(shard, replace(request, step="install"))
        with pytest.raises(UnknownTable):
            pulled([shard])

    def test_a_damaged_file_is_named(self, folder):
        file = self.file(folder, 1)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        self.fails(folder, SnapshotDamaged, f"{file} is damaged or not ours: its sha256")

    def test_a_file_that_was_cut_is_named(self, folder):
        file = self.file(folder)
        file.write_bytes(file.read_bytes()[:-1])
        self.fails(folder, SnapshotDamaged, f"{file} .* bytes, not")

    def test_a_file_that_is_missing_is_named(self, folder):
        file = self.file(folder)
        file.unlink()
        self.fails(folder, SnapshotDamaged, f"{file} .*missing")

    def test_a_manifest_that_changed_on_the_way_is_refused(self, folder):
        self.fails(folder, SnapshotDamaged, "began with", sha256="00")

    def test_a_folder_that_the_shard_does_not_see_is_named(self, folder):
        self.fails(folder, SnapshotUnreadable, "all shards and workers share", name="two")

    def test_a_file_of_another_table_is_damage(self, folder):
        manifest = take([self.pushed()], folder)
        part = manifest.shards[0]
        items, plain = part.tables
        finish(folder, "one", [replace(part, tables=(replace(items, files=plain.files, rows=plain.rows), plain))])
        self.fails(folder, SnapshotDamaged, "'rows' is .*3000, 1.* float32, not .*3000, 3")

    def test_ids_of_other_buckets_than_the_manifest_says_are_damage(self, folder):
        manifest = take([self.pushed()], folder)
        part = manifest.shards[0]
        items, plain = part.tables
        (file,) = items.files
        wrong = replace(items, files=(replace(file, first_bucket=0, last_bucket=9),))
        finish(folder, "one", [replace(part, tables=(wrong, plain))])
        with pytest.raises(SnapshotDamaged, match="other buckets"):
            work(make(0, 2, tables=()), request_of(folder))

    def test_another_optimizer_state_than_here_is_named(self, folder):
        manifest = take([self.pushed()], folder)
        part = manifest.shards[0]
        items, plain = part.tables
        finish(folder, "one", [replace(part, tables=(replace(items, num_state=4), plain))])
        self.fails(folder, OtherOptimizer, "'ctr/items' has 4 floats .* 'adagrad' keeps 3 here")

    def test_an_optimizer_that_is_not_here_is_named(self, folder):
        manifest = take([self.pushed()], folder)
        part = manifest.shards[0]
        own = replace(part.tables[0].spec, optimizer=spec.Custom(function="mine:step", lr=0.1))
        finish(folder, "one", [replace(part, tables=(replace(part.tables[0], spec=own),))])
        self.fails(folder, Exception, "no optimizer 'mine:step' here")

    def test_tables_are_in_the_way_unless_they_are_to_be_replaced(self, folder):
        shard = self.pushed()
        push(shard, 2)
        with pytest.raises(TablesInTheWay, match="ctr/items, plain"):
            ask(shard, request_of(folder))
        assert restore(shard, folder, 2, replace=True).state == "installed"
        assert pulled([shard]) == pulled([self.pushed()])

    def test_a_table_that_was_declared_meanwhile_is_in_the_way(self, folder):
        shard = make(tables=())
        request = request_of(folder)
        ask(shard, request)
        settled(shard, request)
        shard.handle(Declare(PLAIN))
        with pytest.raises(TablesInTheWay):
            ask(shard, replace(request, step="install"))

    def test_an_install_whose_reply_was_lost_is_done_once(self, folder):
        shard = make(tables=())
        restore(shard, folder)
        push(shard, 2)
        after = pulled([shard])
        assert ask(shard, request_of(folder, step="install")).state == "installed"
        assert pulled([shard]) == after

    def test_another_restore_takes_the_place_of_one_that_nobody_ends(self, folder):
        shard = make(tables=())
        ask(shard, request_of(folder, 1))
        restore(shard, folder, 2)
        with pytest.raises(SnapshotUnknown):
            ask(shard, request_of(folder, 1, step="watch"))

    def test_a_cancelled_restore_changes_nothing(self, folder):
        shard = make(tables=())
        ask(shard, request_of(folder))
        assert ask(shard, request_of(folder, step="cancel")).state == "cancelled"
        with pytest.raises(SnapshotUnknown):
            ask(shard, request_of(folder, step="install"))
        with pytest.raises(UnknownTable):
            pulled([shard])

    def pushed(self) -> Shard:
        shard = make()
        push(shard)
        return shard
