"""A shard's part of a snapshot, and a shard made of parts, without a transport."""

import dataclasses
import errno
import hashlib
import os
import stat
import threading
import time
from contextlib import suppress
from functools import partial

import msgpack
import numpy as np
import pytest
import safetensors.numpy

from embershard.proto import errors, spec
from embershard.proto.arrays import mix64
from embershard.proto.clock import SystemClock
from embershard.proto.codec.name import CodecName
from embershard.proto.messages import Declare, Leave, Load, Pull, Restore, Snapshot, TableGradients, TableIds, replace
from embershard.proto.routing import Placement
from embershard.proto.snapshot import blocks
from embershard.proto.snapshot.manifest import MANIFEST, Manifest, pack_manifest, unpack_part
from embershard.proto.snapshot.storage import Storage
from embershard.ps import restore as restores
from embershard.ps import snapshot as module
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from harness import shards
from harness.eventually import eventually
from harness.logged_shard import SEGMENT_BYTES, LoggedShard
from harness.raises import raises
from harness.shards import join
from harness.simulated_disk import SimulatedDisk

DIM = 3
ITEMS = spec.TableSpec(name="ctr/items", dim=DIM, optimizer=spec.Adagrad(lr=0.5))
PLAIN = spec.TableSpec(name="plain", dim=1, optimizer=spec.SGD(lr=0.5), id_space="users")
MINE = spec.Custom(function="mine:step", lr=0.1)
IDS = np.random.default_rng(0).integers(-(2**62), 2**62, 3000)


def empty(index=0, of=1):
    return Shard(index, Placement.even(of), OptimizerRegistry())


def make(index=0, of=1):
    shard = empty(index, of)
    for table in (ITEMS, PLAIN):
        shard.handle(Declare(table))
    return shard


def own(table, shard):
    """The ids of this table that are this shard's."""
    greeting = shard.greeting
    buckets = mix64(IDS, table.space_key) >> np.uint64(52)
    return IDS[Placement.even(greeting.num_shards).shard_of[buckets] == greeting.shard]


def push(shard, seq=1, gradient=None, **fields):
    """Gradients of all rows, random ones by the number where `gradient` says no other; returns the reply."""
    parts = []
    for table in (ITEMS, PLAIN):
        ids = own(table, shard)
        rows = np.random.default_rng(seq).standard_normal((len(ids), table.dim)).astype(np.float32)
        parts.append(TableGradients(table.name, ids, rows if gradient is None else np.full_like(rows, gradient)))
    return shard.handle(shards.push(*parts, seq=seq, first=seq, **fields))


def pushed():
    shard = make()
    push(shard)
    return shard


def pulled(*group):
    """The bytes of all rows of these shards, by table and id."""
    found = {}
    for shard in group:
        for table in (ITEMS, PLAIN):
            ids = own(table, shard)
            rows = shard.handle(Pull(1, (TableIds(table.name, ids),))).tables[0]
            found.update({(table.name, i): row.tobytes() for i, row in zip(ids.tolist(), rows, strict=True)})
    return found


def snapshot_in(folder, name="one", number=7, **rest):
    """A snapshot's requests, but for their step."""
    return partial(Snapshot, url=str(folder), name=name, id=number, **{"step": "begin", **rest})


def restore_from(folder, number=1, name="one", **rest):
    digest = hashlib.sha256((folder / name / MANIFEST).read_bytes()).hexdigest()
    return partial(
        Restore, **{"url": str(folder), "name": name, "id": number, "sha256": digest, "step": "begin", **rest}
    )


def settled(shard, request):
    assert eventually(lambda: shard.handle(request(step="watch")).state not in ("writing", "reading"))
    return shard.handle(request(step="watch"))


def run(shard, request):
    """Begin and wait: either may say what is wrong."""
    shard.handle(request())
    return settled(shard, request)


def part_of(folder, reply, name="one"):
    return unpack_part((folder / name / reply.path).read_bytes(), "part")


def refuse_writes(operation, path):
    if operation == "pwritev":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def refuse(part):
    raise errors.SnapshotNotWritten(path="here", reason="not today")


def take(group, folder, name="one", number=7):
    """A whole snapshot, as the client makes it."""
    request = snapshot_in(folder, name, number)
    for shard in group:
        shard.handle(request())
    return finish(folder, *[part_of(folder, settled(shard, request), name) for shard in group], name=name)


def finish(folder, *parts, name="one"):
    manifest = Manifest(name, 0.0, "0", parts)
    (folder / name / MANIFEST).write_bytes(pack_manifest(manifest))
    return manifest


def restore(shard, folder, number=1, **rest):
    request = restore_from(folder, number, **rest)
    assert run(shard, request).state == "ready"
    return shard.handle(request(step="install"))


def restored(folder, index=0, of=1, **rest):
    shard = empty(index, of)
    restore(shard, folder, **rest)
    return shard


@pytest.fixture
def go(monkeypatch):
    """Writers stop at their first file until this is set."""
    go, create = threading.Event(), Storage.create
    monkeypatch.setattr(Storage, "create", lambda self, path: go.wait(30) and create(self, path))
    yield go
    go.set()


def test_a_snapshot_shows_the_rows_of_its_moment_and_a_repeated_request_begins_no_other(tmp_path, go):
    shard, request = pushed(), snapshot_in(tmp_path)
    then = pulled(shard)
    shard.handle(request())
    push(shard, 2)
    go.set()
    reply = settled(shard, request)
    assert shard.handle(request()) == reply
    finish(tmp_path, part_of(tmp_path, reply))
    take([shard], tmp_path, "two", 8)
    after = pulled(shard)
    assert pulled(restored(tmp_path)) == then != after
    assert pulled(restored(tmp_path, name="two")) == after


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("now", [1, 2, 3])
def test_rows_and_states_come_back_onto_any_number_of_shards(before, now, tmp_path):
    group = [make(i, before) for i in range(before)]
    for shard in group:
        push(shard)
    take(group, tmp_path)
    others = [empty(i, now) for i in range(now)]
    assert sum(restore(shard, tmp_path).rows for shard in others) == 2 * len(IDS)
    assert pulled(*others) == pulled(*group)
    for shard in (*group, *others):  # the same gradients whatever the number of shards
        push(shard, gradient=1.0, worker=5)
    assert pulled(*others) == pulled(*group)  # the accumulators were there


def test_what_is_known_of_a_table_comes_back_and_the_state_beside_the_rows_is_in_the_part(tmp_path):
    codecs = {name: CodecName.parse("int8") for name in ("push_codec", "pull_codec")}
    old, now = empty(), empty()
    old.handle(Declare(dataclasses.replace(ITEMS, **codecs), dense=True))
    (part,) = take([old], tmp_path).shards
    restore(now, tmp_path)
    entries = [shard.core.tables.entry(ITEMS.name) for shard in (old, now)]
    assert [(one.dense, one.codecs) for one in entries] == [(True, ("int8", "int8"))] * 2
    assert part.control == msgpack.unpackb(msgpack.packb(old.core.control()))


def test_files_are_safetensors_by_bucket_and_a_shard_reads_only_those_that_it_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "FILE_BYTES", 32 * 300)
    manifest = take([pushed()], tmp_path)
    table = manifest.tables[ITEMS.name]
    assert [file.rows for file in table.files] == [300] * 10
    last = 0
    for file in table.files:
        arrays = safetensors.numpy.load_file(tmp_path / "one" / file.path)
        buckets = mix64(arrays["ids"], ITEMS.space_key) >> np.uint64(52)
        assert (np.diff(buckets.astype(np.int64)) >= 0).all()
        assert last <= buckets[0] == file.first_bucket <= file.last_bucket == buckets[-1]
        last = file.last_bucket
        shapes = {name: array.shape for name, array in arrays.items()}
        assert shapes == {"ids": (300,), "rows": (300, DIM), "state": (300, DIM)}
    for file in [*table.files[6:], *manifest.tables[PLAIN.name].files[6:]]:
        (tmp_path / "one" / file.path).unlink()
    assert restore(empty(0, 2), tmp_path).rows > 2000


def test_pushes_before_a_snapshot_are_known_after_it_and_refused_on_another_number_of_shards(tmp_path):
    shard = pushed()
    push(shard, 2)
    take([shard], tmp_path)
    fresh = restored(tmp_path)
    then = pulled(fresh)
    assert push(fresh, 2).duplicate
    assert pulled(fresh) == then
    assert not push(fresh, 3).duplicate
    with pytest.raises(errors.StaleWorker):
        push(fresh, 1, epoch=0)
    with pytest.raises(errors.MemoryLost, match="If a snapshot was restored onto it, start the worker again"):
        push(restored(tmp_path, 0, 2), 2)


class Ahead(SystemClock):
    """A system time that is an hour ahead until it is corrected."""

    seconds = 3600.0

    def since_1970(self):
        return time.time() + self.seconds


def test_a_worker_epoch_of_a_clock_that_was_ahead_refuses_no_later_worker_after_a_restore(tmp_path):
    clock = Ahead()
    shard, ahead = Shard(0, Placement.even(1), OptimizerRegistry(), clock=clock), int(clock.since_1970() * 1e9)
    for table in (ITEMS, PLAIN):
        shard.handle(Declare(table))
    push(shard, epoch=ahead)
    take([shard], tmp_path)
    clock.seconds = 0.0
    fresh = restored(tmp_path)
    with pytest.raises(errors.FutureEpoch):
        push(fresh, epoch=ahead)
    assert not push(fresh, epoch=time.time_ns()).duplicate
    restore(shard, tmp_path, number=2, replace=True)
    assert push(shard, epoch=ahead).duplicate  # a session that restored goes on


def test_one_snapshot_at_a_time(tmp_path, go, monkeypatch):
    shard, one, two = pushed(), snapshot_in(tmp_path), snapshot_in(tmp_path, "two", 8)
    shard.handle(one())
    with pytest.raises(errors.SnapshotRunning, match="'one'"):
        shard.handle(two())
    monkeypatch.setattr(module, "HUNG_SECONDS", -1.0)
    assert shard.handle(two()).state == "writing"
    with pytest.raises(errors.SnapshotUnknown, match="'one'"):
        shard.handle(one(step="watch"))


def test_what_became_of_a_snapshot_is_known_after_the_next_ones_until_it_is_cancelled(tmp_path, monkeypatch):
    shard, one, two = pushed(), snapshot_in(tmp_path), snapshot_in(tmp_path, "two", 8)
    done = run(shard, one)
    with monkeypatch.context() as patch:
        patch.setattr(module, "pack_part", lambda part: 1 / 0)
        with pytest.raises(errors.SnapshotNotWritten):
            run(shard, two)
    for number in range(9, 9 + 6):
        run(shard, snapshot_in(tmp_path, f"{number}", number))
    assert shard.handle(one(step="watch")) == shard.handle(one()) == done
    with pytest.raises(errors.SnapshotNotWritten):
        shard.handle(two(step="watch"))
    shard.handle(one(step="cancel"))
    with pytest.raises(errors.SnapshotUnknown):
        shard.handle(one(step="watch"))
    for number in range(20, 20 + 9):
        run(shard, snapshot_in(tmp_path, f"{number}", number))
    with pytest.raises(errors.SnapshotUnknown):  # not for ever
        shard.handle(two(step="watch"))


def test_a_cancelled_snapshot_copies_no_more_rows_and_makes_room_for_another(tmp_path, go):
    shard, request = pushed(), snapshot_in(tmp_path)
    shard.handle(request())
    writer = shard._snapshots._writer
    assert [shard.handle(request(step="cancel")).state for _ in range(2)] == ["cancelling"] * 2
    push(shard, 2)
    assert [rows.num_kept for _, rows, _ in writer._frozen] == [0, 0]
    go.set()
    writer._thread.join(30)
    assert shard.handle(request(step="cancel")).state == "cancelled"  # no file is open
    take([shard], tmp_path, "two", 8)
    assert not list((tmp_path / "one").glob("*/part.msgpack"))


@pytest.mark.parametrize(
    ("request_", "error"),
    [(snapshot_in("/tmp", step=step), errors.InvalidRequest) for step in ("", "install", "nonsense")]
    + [(snapshot_in("/tmp", name), errors.BadSnapshotName) for name in ("../one", "/one", "")]
    + [(partial(Restore, url="/tmp", name="../one", id=7, sha256="", step="begin"), errors.BadSnapshotName)],
)
def test_a_step_that_there_is_none_of_and_a_name_that_leads_elsewhere_are_refused(request_, error):
    with pytest.raises(error):
        empty().handle(request_())


def test_a_step_that_there_is_none_of_is_refused_with_those_that_there_are(tmp_path):
    with pytest.raises(errors.InvalidRequest, match=r"no step 'start'.*begin, watch, cancel"):
        empty().handle(snapshot_in(tmp_path, step="start")())
    take([pushed()], tmp_path)
    shard, request = empty(), restore_from(tmp_path)
    run(shard, request)
    with pytest.raises(errors.InvalidRequest, match=r"no step 'end'.*begin, watch, install, cancel"):
        shard.handle(request(step="end"))


def test_a_shard_without_tables_has_a_part_and_one_whose_first_values_come_is_waited_for(tmp_path):
    shard = empty()
    manifest = take([shard], tmp_path)
    assert (manifest.rows, manifest.tables) == (0, {})
    assert restore(empty(), tmp_path).rows == 0
    shard.handle(Declare(PLAIN, 3, True))
    with pytest.raises(errors.TableLoading):
        shard.handle(snapshot_in(tmp_path, "two", 8)())
    shard.handle(Load("plain", 1, IDS[:1], np.ones((1, 1), np.float32), 3))
    assert take([shard], tmp_path, "two", 8).rows == 1


@pytest.mark.parametrize(("full_disk", "reason"), [(False, "NotADirectory"), (True, "No space left")])
def test_a_write_that_fails_is_named_leaves_nothing_and_the_shard_goes_on(tmp_path, monkeypatch, full_disk, reason):
    shard, synced, folder = pushed(), [], tmp_path / "place"

    def sync(handle):
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            synced.append(handle)
            raise OSError(28, "No space left on device")

    if full_disk:
        monkeypatch.setattr(os, "fsync", sync)
        folder.mkdir()
    else:
        folder.write_text("")
    for ask in (run, settled):
        with pytest.raises(errors.SnapshotNotWritten, match=reason):
            ask(shard, snapshot_in(folder))
    assert bool(synced) == full_disk
    assert not [path for path in folder.rglob("*") if path.is_file()]
    monkeypatch.undo()
    push(shard, 2)
    assert take([shard], tmp_path, number=8).rows == 2 * len(IDS)


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("embershard.ps.table.table.CopyOnWriteRows", OSError(12, "Cannot allocate memory")),
        ("threading.Thread.start", RuntimeError("can't start new thread")),
        ("os.fsync", MemoryError()),
        ("embershard.proto.snapshot.blocks.block_header", MemoryError()),
    ],
)
def test_a_snapshot_that_memory_keeps_from_being_written_says_so_and_the_shard_goes_on(
    tmp_path, monkeypatch, place, error
):
    def refuse(*_, **__):
        raise error

    shard = pushed()
    monkeypatch.setattr(place, refuse)
    with pytest.raises(errors.SnapshotNotWritten, match="memory") as caught:
        run(shard, snapshot_in(tmp_path / "place"))
    assert "give the shard more memory" in str(caught.value)
    assert "another folder" not in str(caught.value)
    monkeypatch.undo()
    push(shard, 2)
    assert not any(table._frozen for table in shard.core.tables.all())
    assert take([shard], tmp_path, number=8).rows == 2 * len(IDS)


class TestAtAClock:
    """Two workers at staleness 0: what they push of a clock is applied when both have."""

    @pytest.fixture
    def shard(self):
        made = make()
        for worker in (0, 1):
            made.handle(join(worker, workers=2, lease_ms=10_000))
        return made

    def close(self, shard, clock):
        for worker in (0, 1):
            push(shard, clock + 1, worker=worker, clock=clock)

    def test_it_is_taken_when_the_clock_closes_and_no_later(self, shard, tmp_path):
        request, seen = snapshot_in(tmp_path, at_clock=2), []
        for clock in range(3):
            self.close(shard, clock)
            seen.append(pulled(shard))
            if clock == 0:
                assert shard.handle(request()).state == "waiting"
        reply = settled(shard, request)
        assert reply.clock == 2
        finish(tmp_path, part_of(tmp_path, reply))
        assert pulled(restored(tmp_path)) == seen[1]
        with pytest.raises(errors.SnapshotTooLate):
            shard.handle(snapshot_in(tmp_path, number=8, at_clock=2)())
        assert shard.handle(snapshot_in(tmp_path, number=8, at_clock=3)()).state == "writing"

    def test_without_a_clock_it_waits_for_gathered_pushes_and_for_no_others(self, shard, tmp_path):
        request = snapshot_in(tmp_path)
        push(shard, worker=0)
        assert shard.handle(request()).state == "waiting"
        push(shard, worker=1)
        reply = settled(shard, request)
        assert (reply.state, reply.rows) == ("done", 2 * len(IDS))
        assert shard.handle(snapshot_in(tmp_path, "two", 8)()).state == "writing"

    def test_it_is_taken_too_where_the_end_of_a_lease_closes_the_clock(self, shard, tmp_path):
        request = snapshot_in(tmp_path, at_clock=1)
        shard.handle(request())
        push(shard, worker=0)
        shard.advance(time.monotonic() + 100)
        assert settled(shard, request).state == "done"

    def test_one_that_waits_gives_way_and_can_be_cancelled(self, shard, tmp_path):
        first, second = (snapshot_in(tmp_path, number=number, at_clock=9) for number in (7, 8))
        shard.handle(first())
        assert shard.handle(second(name="two")).state == "waiting"
        with raises(errors.SnapshotReplaced, name="one", other="two"):
            shard.handle(first(step="watch"))
        shard.handle(second(step="cancel"))
        with pytest.raises(errors.SnapshotUnknown):
            shard.handle(second(step="watch"))

    def test_one_that_somebody_waits_for_gives_way_to_an_earlier_one_alone(self, shard, tmp_path, monkeypatch):
        first, second, earlier = (snapshot_in(tmp_path, str(n), n, at_clock=at) for n, at in ((7, 9), (8, 9), (9, 8)))
        shard.handle(first())
        shard.handle(first(step="watch"))
        with pytest.raises(errors.SnapshotRunning, match="'7'"):
            shard.handle(second())
        assert shard.handle(first(step="watch")).state == "waiting"
        assert shard.handle(earlier()).state == "waiting"  # by a worker, say, who takes it before it goes on
        with raises(errors.SnapshotReplaced, name="7", other="9"):
            shard.handle(first(step="watch"))
        shard.handle(earlier(step="watch"))
        monkeypatch.setattr(module, "_WATCHED_SECONDS", -1.0)  # its client has ended
        assert shard.handle(second()).state == "waiting"

    def test_one_that_is_taken_at_once_leaves_one_that_waits_alone(self, shard, tmp_path, go):
        waits, now = snapshot_in(tmp_path, number=7, at_clock=2), snapshot_in(tmp_path, "now", 8)
        shard.handle(waits())
        assert shard.handle(now()).state == "writing"
        assert shard.handle(waits(step="watch")).state == "waiting"
        go.set()
        assert settled(shard, now).state == "done"
        for clock in (0, 1):
            self.close(shard, clock)
        assert settled(shard, waits).clock == 2

    def test_one_whose_clock_comes_while_another_is_written_begins_again(self, shard, tmp_path, go):
        waits, now = snapshot_in(tmp_path, number=7, at_clock=1), snapshot_in(tmp_path, "now", 8)
        shard.handle(waits())
        shard.handle(now())
        self.close(shard, 0)
        with raises(errors.SnapshotReplaced, name="one", other="now"):
            shard.handle(waits(step="watch"))
        go.set()
        assert settled(shard, now).state == "done"

    def test_a_clock_that_is_jumped_over_is_too_late_for_whoever_watches(self, shard, tmp_path):
        request = snapshot_in(tmp_path, at_clock=5)
        shard.handle(request())
        for worker in (0, 1):
            shard.handle(Leave(worker=worker, epoch=1))
        shard.handle(join(0, epoch=2, clock=9))
        with pytest.raises(errors.SnapshotTooLate):
            shard.handle(request(step="watch"))


class TestRestore:
    @pytest.fixture
    def folder(self, tmp_path):
        (self.part,) = take([pushed()], tmp_path).shards
        self.file = sorted(tmp_path.glob("one/shard-*/*.safetensors"))[1]
        return tmp_path

    def ends_with(self, data=b""):
        self.file.write_bytes(self.file.read_bytes()[:-1] + data)

    def items(self, folder, **changes):
        """The snapshot with another manifest of its first table."""
        items, plain = self.part.tables
        finish(folder, replace(self.part, tables=(replace(items, **changes), plain)))

    # (what is wrong, how it is made so, the restore's own fields, its error and words)
    BROKEN = (
        ("damaged", lambda it, _: it.ends_with(b"\xff"), {}, errors.SnapshotDamaged, "{file} .*damaged.*sha256"),
        ("short", lambda it, _: it.ends_with(), {}, errors.SnapshotDamaged, "{file} .*bytes, not"),
        ("missing", lambda it, _: it.file.unlink(), {}, errors.SnapshotDamaged, "{file} .*missing"),
        ("manifest", lambda it, _: None, {"sha256": "00"}, errors.SnapshotDamaged, "began with"),
        ("folder", lambda it, _: None, {"name": "two"}, errors.SnapshotUnreadable, "all shards and workers share"),
        ("another table's file", lambda it, folder: it.items(folder, files=it.part.tables[1].files),
         {}, errors.SnapshotDamaged, "'rows' is .*3000, 1.* float32, not .*3000, 3"),
        ("state", lambda it, folder: it.items(folder, num_state=4),
         {}, errors.OtherOptimizer, "'ctr/items' has 4 floats .* but 'adagrad' has 3"),
        ("optimizer", lambda it, folder: it.items(folder, spec=replace(ITEMS, optimizer=MINE)),
         {}, errors.UnknownOptimizer, "no optimizer 'mine:step' here"),
    )  # fmt: skip

    @pytest.mark.parametrize("broken", BROKEN, ids=lambda case: case[0])
    def test_what_is_wrong_is_named_and_changes_no_shard(self, folder, broken):
        _, spoil, changes, error, words = broken
        spoil(self, folder)
        shard, request = empty(), partial(restore_from(folder), **changes)
        for ask in (run, lambda shard, request: shard.handle(request(step="install"))):
            with pytest.raises(error, match=words.format(file=self.file)):
                ask(shard, request)
        with pytest.raises(errors.UnknownTable):
            pulled(shard)

    def test_ids_of_other_buckets_than_the_manifest_says_are_damage(self, folder):
        self.items(folder, files=(replace(self.part.tables[0].files[0], first_bucket=0, last_bucket=9),))
        with pytest.raises(errors.SnapshotDamaged, match="other buckets"):
            restore(empty(0, 2), folder)

    def test_tables_are_in_the_way_unless_they_are_to_be_replaced(self, folder):
        shard, late, request = pushed(), empty(), restore_from(folder)
        push(shard, 2)
        with pytest.raises(errors.TablesInTheWay, match="ctr/items, plain"):
            shard.handle(request())
        assert restore(shard, folder, 2, replace=True).state == "installed"
        assert pulled(shard) == pulled(pushed())
        run(late, request)
        late.handle(Declare(PLAIN))  # meanwhile
        with pytest.raises(errors.TablesInTheWay):
            late.handle(request(step="install"))

    def test_an_install_whose_reply_was_lost_is_done_once(self, folder):
        shard = restored(folder)
        push(shard, 2)
        after = pulled(shard)
        assert shard.handle(restore_from(folder, step="install")()).state == "installed"
        assert pulled(shard) == after

    def test_a_second_restore_is_refused_as_long_as_somebody_asks_for_the_first(self, folder):
        shard, first, second = empty(), restore_from(folder, 1), restore_from(folder, 2)
        now = time.monotonic() + 100
        shard.handle(first(), now)
        shard.handle(first(step="watch"), now + 4)
        with raises(errors.RestoreRunning, name="one"):
            shard.handle(second(), now + 8)
        shard.handle(second(), now + 4 + restores.WATCHED_SECONDS)
        with pytest.raises(errors.SnapshotUnknown):
            shard.handle(first(step="install"))
        assert settled(shard, second).state == "ready"
        shard.handle(second(step="install"))
        assert restore(shard, folder, 3, replace=True).state == "installed"

    def test_a_restore_into_a_log_waits_for_room_goes_on_where_it_was_and_no_base_cuts_it(self, folder, monkeypatch):
        monkeypatch.setattr(restores, "_PIECE_BYTES", 2**12)
        # the limit is below the bytes of the rows, and a base is always due
        one = LoggedShard(SimulatedDisk(), limit_bytes=5 * SEGMENT_BYTES, least_cost=0, cost_share=0.0).begun()
        shard, request = one.shard, restore_from(folder, replace=True)
        run(shard, request)
        one.write()
        one.works.pop()()
        before, pushes = shard.core.lsn, 0
        assert shard.handle(request(step="install")).state == "installing"
        one.write()
        one.works.pop()()
        one.disk.before = refuse_writes
        assert shard.handle(request(step="watch")).state == "installing"
        with pytest.raises(OSError, match="No space"):
            one.log.journal.write_group()
        lsn = shard.core.lsn
        for _ in range(2):
            with pytest.raises(errors.LogStalled):
                shard.handle(request(step="watch"))
        assert shard.core.lsn == lsn
        one.disk.before = lambda operation, path: None
        one.write()
        while (reply := shard.handle(request(step="watch"))).state == "installing":
            one.log.journal.segments.prepare_spare()
            one.push()  # others are served meanwhile
            pushes += 1
            one.write()
            assert not one.works
        assert reply.state == "installed"
        assert shard.core.lsn == before + pushes + 25 + 10 + 1  # each piece of both tables once, and the end
        one.write()
        want = pulled(shard)
        one.disk.kill()
        assert pulled(LoggedShard(one.disk).shard) == want == pulled(pushed())

    def test_a_restore_that_is_being_put_in_place_goes_on_although_its_client_has_ended(self, folder, monkeypatch):
        monkeypatch.setattr(restores, "_PIECE_BYTES", 2**12)
        one, request = LoggedShard(SimulatedDisk()).begun(), restore_from(folder, replace=True)
        run(one.shard, request)
        assert one.shard.handle(request(step="install")).state == "installing"
        one.disk.before = refuse_writes
        for silent in range(1, 100):
            one.shard.advance(time.monotonic() + silent)
            if silent == restores.HELD_SECONDS:
                one.disk.before = lambda operation, path: None
            with suppress(OSError):
                one.write()
        assert pulled(one.shard) == pulled(pushed())

    def test_a_restore_whose_client_has_ended_removes_no_table_that_was_declared_since(self, folder, monkeypatch):
        monkeypatch.setattr(restores, "_PIECE_BYTES", 2**12)
        one, request = LoggedShard(SimulatedDisk()), restore_from(folder)
        run(one.shard, request)
        assert one.shard.handle(request(step="install")).state == "installing"
        one.begun()
        for silent in range(1, 100):
            one.shard.advance(time.monotonic() + silent)
            one.write()
        assert (one.shard.core.tables.names(), one.shard._restores.reader) == (["items"], None)

    @pytest.mark.parametrize("fails", [False, True])
    def test_a_snapshot_that_has_ended_keeps_no_table_that_a_restore_replaces(self, folder, fails, monkeypatch):
        shard = pushed()
        before = shard.core.budget.used
        if fails:
            monkeypatch.setattr(module, "pack_part", refuse)
            with pytest.raises(errors.SnapshotNotWritten):
                take([shard], folder, "two", 8)
        else:
            take([shard], folder, "two", 8)
        restore(shard, folder, 2, replace=True)
        assert eventually(lambda: shard.core.budget.used == before, 5)

    def test_what_was_read_for_a_client_that_asks_no_more_is_dropped(self, folder):
        shard, request, now = empty(), restore_from(folder), time.monotonic()
        before = shard.core.budget.used
        run(shard, request)
        assert shard.core.budget.used > before
        shard.handle(request(step="watch"), now + 50)
        shard.advance(now + 50 + restores.HELD_SECONDS)  # it may be the next one that is late
        shard.extend_leases(20)  # in which this process was stopped
        shard.advance(now + 69 + restores.HELD_SECONDS)
        assert shard.core.budget.used > before
        shard.advance(now + 71 + restores.HELD_SECONDS)
        assert shard.core.budget.used == before
        with pytest.raises(errors.SnapshotUnknown):
            shard.handle(request(step="install"))
        assert restore(shard, folder, 2).state == "installed"

    def test_a_cancelled_restore_changes_nothing(self, folder):
        shard, request = empty(), restore_from(folder)
        shard.handle(request())
        assert shard.handle(request(step="cancel")).state == "cancelled"
        with pytest.raises(errors.SnapshotUnknown):
            shard.handle(request(step="install"))
        with pytest.raises(errors.UnknownTable):
            pulled(shard)
