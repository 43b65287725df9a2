"""Images of a shard that its log begins with: taken while it serves, whatever ends meanwhile, and read again."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgpack
import numpy as np
import pytest

from embershard.proto import errors
from embershard.proto.messages import Declare, Join, Snapshot
from embershard.proto.routing import Placement
from embershard.proto.snapshot.blocks import read_block
from embershard.proto.snapshot.manifest import unpack_part
from embershard.proto.snapshot.storage import Storage
from embershard.proto.spec import SGD, Adam
from embershard.ps.bases import base as module
from embershard.ps.bases.base import BASE, check_bases, read_bases
from embershard.ps.bases.bases import COST_SHARE, MOST_INCREMENTS, ROW_COST
from embershard.ps.journal.folder import LogFolder
from embershard.ps.journal.manifest import MANIFEST, read_manifest, write_manifest
from embershard.ps.journal.progress import RecoveryProgress
from embershard.ps.journal.segments import SegmentName
from embershard.ps.recovery import recover
from embershard.ps.restore import Contents
from embershard.ps.shard import Shard
from embershard.ps.table.frozen import CopyOnWriteRows
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Table
from harness.eventually import eventually
from harness.logged_shard import SEGMENT_BYTES, LoggedShard, bases_of, install
from harness.logs import FOLDER, disk_of, ids, open_log
from harness.random_job import RandomJob, state_of
from harness.shards import gradients, push, rows, table
from harness.simulated_disk import SimulatedDisk

GOLDEN = Path(__file__).parents[1] / "golden" / "log-2"
ALWAYS = {"least_cost": 0, "cost_share": 0.0}


def recovered(disk, mode="log", **options):
    """The state that the log gives, and the shard."""
    disk.kill()
    shard = LoggedShard(disk, mode, **options)
    return state_of(shard.shard.core), shard


def segments_of(disk):
    return sorted(filter(None, map(SegmentName.parse, disk.list(FOLDER))))


class LoggedJob(RandomJob):
    """A random job whose shard has a log."""

    def __init__(self, seed, staleness, disk, mode, **options):
        self.disk, self.options = disk, {"mode": mode, **options}
        super().__init__(seed, staleness, SGD(lr=0.1), aware=True)

    def begin(self):
        self.logged = LoggedShard(self.disk, **self.options)
        return self.logged.shard


class Crash(BaseException):
    pass


def crash_at(disk, number):
    """Have the process end before an operation, from 0; whether it did."""
    count = iter(range(number))
    ended = []

    def before(operation, path):
        if next(count, None) is None:
            ended.append(operation)
            raise Crash

    disk.before = before
    return ended


@pytest.mark.parametrize(("mode", "staleness"), [("log", 0), ("fsync", -1)])
def test_a_crash_at_every_step_of_a_base_leaves_a_log_with_the_same_bits(mode, staleness, monkeypatch):
    """The process ends, or the machine, in turn; the state is that of a log without bases.

    One takes the place of the base before, the other is an increment of it.
    """
    if is_image := mode == "fsync":
        monkeypatch.setattr("embershard.ps.bases.bases.MOST_INCREMENTS", 0)

    def written_job():
        job = LoggedJob(3, staleness, SimulatedDisk(), mode).run(6)
        job.logged.write()
        job.logged.take_base()  # an older one is there
        job.run(3)
        job.logged.begin_base()
        job.run(3)
        job.logged.write()
        return job

    job = written_job()
    want, _ = recovered(job.disk, mode)
    first_lsn, steps = job.logged.bases.lsn, set()
    for number in range(1000):
        job = written_job()
        ended = crash_at(job.disk, number)
        try:
            job.logged.works.pop()()
        except Crash:
            pass
        lost_power = number % 2
        if lost_power:
            job.disk.lose_power(random.Random(number))
        got, again = recovered(job.disk, mode)
        assert again.shard.core.lsn > first_lsn
        for part in want if mode == "fsync" or not lost_power else ():
            assert got[part] == want[part], (number, ended, part)
        assert sorted(bases_of(job.disk)) == [base.name for base in read_manifest(job.disk, FOLDER).bases]
        if not ended:
            break
        steps.update(ended)
        again.take_base()
        assert recovered(job.disk, mode)[0].keys() == want.keys()
        images = [not base.parent for base in check_bases(FOLDER, again.folder.manifest, job.disk)]
    assert number > 10
    assert images == ([True] if is_image else [True, False, False])
    assert {"make_folder", "pwritev", "sync", "sync_folder", "rename"} <= steps
    assert not is_image or {"remove", "remove_folder"} <= steps


def test_a_base_ends_what_a_recovery_replays_and_frees_segments_and_the_base_before():
    one = LoggedShard(SimulatedDisk(), least_cost=3 * SEGMENT_BYTES, cost_share=0.0, row_cost=0).begun()
    lsns = []
    for _ in range(12):
        one.push(20, num_ids=50)
        one.write()
        one.log.journal.segments.prepare_spare()
        assert one.shard.status().log_bytes == one.bases.tail_bytes
        if one.works:
            assert one.bases.tail_bytes > 3 * SEGMENT_BYTES
            before = len(segments_of(one.disk))
            one.works.pop()()
            assert one.bases.tail_bytes < 2 * SEGMENT_BYTES
            assert len(segments_of(one.disk)) < before
            assert len(bases_of(one.disk)) == len(read_manifest(one.disk, FOLDER).bases)
            lsns.append(one.shard.status().base_lsn)
    assert len(lsns) >= 3
    assert lsns == sorted(set(lsns))
    assert one.bases.taken == len(lsns)
    want = state_of(one.shard.core)
    got, again = recovered(one.disk)
    assert got["rows"] == want["rows"]
    assert again.shard.status().base_lsn == lsns[-1]
    assert read_manifest(one.disk, FOLDER).first_lsn == lsns[-1]


def test_a_base_is_due_once_a_replay_of_the_tail_takes_long_for_the_state():
    one = LoggedShard(SimulatedDisk()).begun()
    one.push(10, num_ids=20)
    cost, one.bases._least_cost = one.bases.replay_cost, 1000
    assert cost == one.bases.tail_bytes + ROW_COST * 200
    state = int(cost / COST_SHARE)
    assert one.bases.due(0.0, state - 2)
    assert not one.bases.due(0.0, state + 2)
    one.bases._least_cost = cost
    assert not one.bases.due(0.0, 0)
    # as many bytes of a few rows: the disk has room for three fifths of the state
    one.log.journal.appended_rows, one.bases._least_cost = 0, 1000
    assert one.bases.due(0.0, int(1.6 * one.bases.tail_bytes))
    assert not one.bases.due(0.0, int(1.7 * one.bases.tail_bytes))


def test_a_base_is_an_increment_of_the_one_before_while_increments_are_few_and_small():
    one = LoggedShard(SimulatedDisk()).begun()
    one.push(30, num_ids=150)
    kinds = []
    for number in range(24):
        one.push(1, num_ids=3 if number < 20 else 100)
        one.shard.core.tables.entry("items").table.remove(np.array([number]))  # no event does so yet
        want = state_of(one.shard.core)
        one.take_base()
        bases = check_bases(FOLDER, read_manifest(one.disk, FOLDER), one.disk)
        kinds.append("".join("+" if base.parent else "|" for base in bases))
        again = LoggedShard(one.disk.copy())
        assert state_of(again.shard.core)["rows"] == want["rows"]
        if number in (5, 15):  # another process goes on with the chain
            one.disk.kill()
            seq, one = one.seq, LoggedShard(one.disk)
            one.seq = seq
    assert max(map(len, kinds)) == 1 + MOST_INCREMENTS
    assert kinds[:10] == ["|" + "+" * number for number in range(9)] + ["|"]
    assert kinds[-1] == "|"  # more than half of the rows had changed
    files = [base.num_bytes for base in check_bases(FOLDER, read_manifest(one.disk, FOLDER), one.disk)]
    assert 2 * sum(files[1:]) <= files[0]


def rows_by_id(blocks):
    return {
        id_: [row.tobytes() for row in rows]
        for ids, *arrays in blocks
        for id_, *rows in zip(ids.tolist(), *arrays, strict=True)
    }


def test_bases_and_a_jobs_snapshots_each_know_what_changed_since_their_own_and_a_restart_forgets_the_jobs(tmp_path):
    url, written = str(tmp_path), {}

    def snapshot(number, parent=0):
        """Take one; the rows that it has in its files, and whether these are all."""
        request = partial(Snapshot, url=url, name=f"s{number}", id=number, incremental=True, parent=parent, max_share=1)
        one.shard.handle(request(step="begin"))
        assert eventually(lambda: one.shard.handle(request(step="watch")).state == "done")
        reply = one.shard.handle(request(step="watch"))
        (blocks,) = unpack_part((tmp_path / f"s{number}" / reply.path).read_bytes(), "part").tables
        new = rows_by_id(read_block(Storage(url), f"s{number}", file, blocks) for file in blocks.files)
        written[number] = {**written[parent], **new} if blocks.increment else new
        assert written[number] == rows_by_id(one.shard.core.tables.entry("items").table.scan())
        return len(new), blocks.increment is None

    one = LoggedShard(SimulatedDisk()).begun()
    one.push(30, num_ids=150)
    assert snapshot(1) == (200, True)
    one.take_base()
    one.push(1, num_ids=7)
    one.take_base()
    one.push(1, num_ids=5)
    one.begin_base()  # is written later
    one.push(1, num_ids=3)
    count, is_full = snapshot(2, parent=1)
    assert not is_full
    assert count <= 7 + 5 + 3
    one.write()
    one.works.pop()()
    one.push(1, num_ids=3)
    assert snapshot(3, parent=2) == (3, False)
    one.take_base()
    chain = read_bases(one.disk, FOLDER, one.folder.manifest)
    assert [bool(base.parent) for base in chain] == [False, True, True, True]
    want, again = recovered(one.disk)
    assert want["rows"] == state_of(one.shard.core)["rows"]
    again.seq, one = one.seq, again
    one.push(1, num_ids=3)
    assert snapshot(4, parent=3) == (200, True)  # nobody knows here what changed before the restart
    one.push(1, num_ids=3)
    assert snapshot(5, parent=4) == (3, False)


def test_increments_without_the_image_that_they_go_on_from_are_damaged():
    one = LoggedShard(SimulatedDisk()).begun()
    for num_ids in (150, 3, 3):
        one.push(1, num_ids=num_ids)
        one.take_base()
    log = one.folder.manifest
    assert len(log.bases) == 3
    for bases, orphan in ((log.bases[1:], 1), ((log.bases[0], log.bases[2]), 2)):
        disk = one.disk.copy()
        write_manifest(disk, FOLDER, replace(log, bases=bases))
        assert refused(disk, errors.LogDamaged)["path"] == str(FOLDER / log.bases[orphan].name / BASE)
    for base in log.bases:
        disk = one.disk.copy()
        disk.content(FOLDER / base.name / "0-0.safetensors")[-1] ^= 1
        assert refused(disk, errors.LogDamaged)["path"] == str(FOLDER / base.name / "0-0.safetensors")


def test_tables_that_a_restore_put_in_place_are_whole_in_the_next_base():
    one = LoggedShard(SimulatedDisk()).begun()
    one.push(3, num_ids=150)
    one.take_base()
    other = Table(table(optimizer=Adam(lr=0.1)), OptimizerRegistry().find(Adam(lr=0.1)))
    other.apply(np.arange(5), np.ones((5, 3), np.float32))
    install(one.shard, one.log, Contents([other], [], 7))
    one.take_base()
    assert recovered(one.disk)[0]["rows"] == state_of(one.shard.core)["rows"]


def test_pushes_that_wait_for_their_clock_keep_their_events_and_are_gathered_again():
    """No clock has to close for a base: a push that waits is in the log from which a recovery gathers it."""
    one = LoggedShard(SimulatedDisk()).begun()
    for worker in (0, 1):
        one.shard.handle(Join(worker=worker, epoch=1, clock=0, staleness=0, workers=2, lease_ms=60_000))
    part = gradients([1, 2], np.ones((2, 3), np.float32))
    one.shard.handle(push(part, worker=0))
    first = one.shard.core.lsn
    for name in "abc":
        one.shard.handle(Declare(table(name), lineage=5))
    one.take_base()
    manifest = read_manifest(one.disk, FOLDER)
    assert manifest.first_lsn == manifest.bases[0].redo_lsn == first < manifest.bases[0].lsn
    _, again = recovered(one.disk)
    again.shard.handle(push(part, worker=1))
    one.shard.handle(push(part, worker=1))
    np.testing.assert_array_equal(rows(again.shard, 1, 2), rows(one.shard, 1, 2))
    assert again.shard.core.clock.open == 1


def with_base(**options):
    one = LoggedShard(SimulatedDisk(), **options).begun()
    if options.get("of", 1) == 1:  # all ids are its own
        one.push(30)
    one.take_base()
    one.shard.handle(Declare(table("behind"), lineage=5))
    one.write()
    return one


def files_of_base(disk):
    name = max(bases_of(disk))
    return sorted(FOLDER / name / file for file in disk.list(FOLDER / name))


def refused(disk, error):
    """The error of a start, which changes nothing."""
    disk.kill()
    before = {path: bytes(inode.data) for path, inode in disk._names.items()}
    with pytest.raises(error) as raised:
        LoggedShard(disk)
    assert {path: bytes(inode.data) for path, inode in disk._names.items()} == before
    return raised.value.fields


def test_a_damaged_base_is_named_with_its_file_and_offset(monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 1024)
    one = with_base()
    chooser = random.Random(0)
    for path in files_of_base(one.disk):
        size = len(one.disk.content(path))
        for offset in [0, size - 1, *(chooser.randrange(size) for _ in range(30))]:
            disk = one.disk.copy()
            disk.content(path)[offset] ^= 1 << chooser.randrange(8)
            fields = refused(disk, (errors.LogDamaged, errors.LogTooNew))
            assert fields["path"] == str(path)
            if path.name != BASE:
                assert fields["offset"] == offset // 1024 * 1024
        for change in (lambda content: content.pop(), lambda content: content.append(0)):
            disk = one.disk.copy()
            change(disk.content(path))
            assert refused(disk, errors.LogDamaged)["path"] == str(path)
        disk = one.disk.copy()
        disk.remove(path)
        assert refused(disk, errors.LogDamaged)["path"] == str(path)


def test_a_base_of_another_shard_or_log_or_of_another_moment_is_refused():
    one = with_base()
    for other, what in ((with_base(of=2), "shard"), (with_base(), "lineage")):
        disk = one.disk.copy()
        disk.content(files_of_base(disk)[-1])[:] = other.disk.content(files_of_base(other.disk)[-1])
        assert refused(disk, errors.LogMismatch)["what"] == what
    disk = one.disk.copy()
    older = bytes(disk.content(files_of_base(disk)[-1]))
    again = recovered(disk)[1]
    again.take_base()
    disk.content(files_of_base(disk)[-1])[:] = older
    assert refused(disk, errors.LogMismatch)["what"] == "LSN"


def test_a_log_without_what_its_base_needs_is_damaged():
    one = with_base()
    disk = one.disk.copy()
    for name in segments_of(disk):
        disk.remove(FOLDER / str(name))
    assert refused(disk, errors.LogDamaged)["lsn"] == read_manifest(disk, FOLDER).first_lsn
    disk = one.disk.copy()
    content = disk.content(FOLDER / str(segments_of(disk)[0]))
    del content[64:]  # an event below the base: the log would seem to end there
    assert refused(disk, errors.LogDamaged)["path"].startswith(str(FOLDER))


def test_a_log_with_a_base_is_refused_by_readers_that_know_none():
    one = with_base()
    envelope = bytes(one.disk.content(FOLDER / MANIFEST))
    assert msgpack.unpackb(envelope)["version"] == 2
    without = LoggedShard(SimulatedDisk())
    assert msgpack.unpackb(bytes(without.disk.content(FOLDER / MANIFEST)))["version"] == 1


@pytest.mark.parametrize("operation", ["pwritev", "sync", "make_folder", "open"])
def test_a_base_that_cannot_be_written_leaves_the_log_as_it_is_and_is_tried_again(operation):
    one = LoggedShard(SimulatedDisk(), **ALWAYS).begun()
    one.push(10)
    one.write()
    before = read_manifest(one.disk, FOLDER)

    def refuse(done, path):
        if done == operation and "base-" in str(path):
            raise OSError(28, "No space left on device")

    one.disk.before = refuse
    one.works.pop()()
    assert read_manifest(one.disk, FOLDER) == before
    assert bases_of(one.disk) == []
    assert not one.fatal
    one.shard.advance(0.0)
    one.disk.before = lambda done, path: None
    one.push(1)
    one.write()
    assert one.works == []  # not at once
    one.shard.advance(10.0**9)
    one.works.pop()()
    assert one.bases.lsn == one.shard.core.lsn


@pytest.mark.parametrize("lacks", ["a thread", "blocks of rows"])
def test_a_base_without_memory_leaves_nothing_behind_and_is_tried_again(lacks, monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread") if lacks == "a thread" else MemoryError

    one = LoggedShard(SimulatedDisk()).begun()
    one.push(10)
    one.write()
    with monkeypatch.context() as patch:
        if lacks == "a thread":
            patch.setattr(one.bases, "_start", refuse)
        else:
            patch.setattr(CopyOnWriteRows, "read", refuse)
        one.begin_base()
        for work in one.works:
            work()
    assert not one.bases.writing
    assert bases_of(one.disk) == []
    (frozen,) = one.shard.core.tables.all()
    assert frozen._frozen == ()
    one.works.clear()
    one.take_base()
    assert one.bases.lsn == one.shard.core.lsn


@pytest.mark.parametrize("mode", ["log", "fsync"])
def test_a_manifest_that_may_be_on_the_disk_or_not_keeps_both_bases(mode):
    """The folder's sync fails after the rename: either manifest may be there after a loss of power."""
    for seed in range(6):
        one = LoggedShard(SimulatedDisk(), mode).begun()
        one.push(5)
        one.take_base()
        one.push(5)
        one.begin_base()
        one.write()
        renamed = []

        def refuse(done, path, renamed=renamed):
            renamed.extend([path] if done == "rename" else [])
            if done == "sync_folder" and renamed:
                raise OSError(5, "Input/output error")

        one.disk.before = refuse
        one.works.pop()()
        assert len(bases_of(one.disk)) == 2
        want = state_of(one.shard.core)
        one.disk.lose_power(random.Random(seed))
        assert recovered(one.disk, mode)[0]["rows"] == want["rows"]


def test_a_lost_lock_or_a_failed_sync_of_the_log_ends_the_process_before_anything_is_named():
    for what in ("lock", "sync"):
        one = LoggedShard(SimulatedDisk()).begun()
        one.push(5)
        one.begin_base()
        one.write()
        before = read_manifest(one.disk, FOLDER)

        def refuse(done, path):
            if done == "sync" and path.name.startswith("log-"):
                raise OSError(5, "Input/output error")

        if what == "lock":
            one.disk._locks.clear()
        else:
            one.disk.before = refuse
        one.works.pop()()
        assert len(one.fatal) == 1
        assert read_manifest(one.disk, FOLDER) == before


def test_a_folder_at_its_limit_has_pushes_wait_until_a_base_frees_room_and_never_for_ever():
    limit = 5 * SEGMENT_BYTES
    one = LoggedShard(SimulatedDisk(), limit_bytes=limit).begun()
    largest = stalled = 0
    for seq in range(1, 400):
        ids = np.arange(50)
        request = push(gradients(ids, np.ones((50, 3), np.float32)), seq=seq, first=seq)
        for attempt in range(5):
            try:
                one.shard.handle(request, now=100.0 * seq + 10 * attempt)
                break
            except errors.LogStalled:
                stalled += 1
                assert attempt < 4
                one.write()
                if attempt:  # for a while nothing is done about it
                    one.works.pop()()
                one.log.journal.segments.prepare_spare()
        one.write()
        one.log.journal.segments.prepare_spare()
        used = sum(len(inode.data) for path, inode in one.disk._names.items() if path.name != "LOCK")
        largest = max(largest, used)
    assert stalled > 5
    assert one.bases.taken > 5
    assert largest <= limit
    assert recovered(one.disk)[0]["rows"] == state_of(one.shard.core)["rows"]


def test_a_base_of_many_small_files_is_read_ahead_from_a_real_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "rows_per_file", lambda dim, num_state: 7)
    folder = LogFolder.open(tmp_path / "log", shard=0, num_shards=1, lineage=5)
    one = LoggedShard(folder.disk, folder=folder).begun()
    one.push(5)
    one.take_base()
    want = state_of(one.shard.core)["rows"]
    folder.close()
    again = LogFolder.open(tmp_path / "log", shard=0, num_shards=1)
    assert len(list(tmp_path.glob("log/base-*/*.safetensors"))) > 5
    assert state_of(LoggedShard(again.disk, folder=again).shard.core)["rows"] == want


def test_large_pushes_are_slowed_down_while_a_base_is_late_and_small_ones_are_not():
    one = LoggedShard(SimulatedDisk(), segment_bytes=2**20, least_cost=10**6, cost_share=0.0, row_cost=0).begun()
    large = gradients(np.arange(10_000), np.ones((10_000, 3), np.float32))  # 200,000 bytes
    small = gradients(np.arange(10), np.ones((10, 3), np.float32))

    def handle(parts, seq):
        one.shard.handle(push(parts, seq=seq, first=seq))
        one.write()

    def handle_many():
        for seq in range(8, 100):  # one each 200,000 bytes / 16 MiB/s = 12 ms
            handle(large, seq)

    for seq in range(1, 8):  # a base begins with the sixth; the seventh is the first of those that are slowed down
        handle(large, seq)
    assert one.works
    with pytest.raises(errors.LogTooLong) as refused:
        handle_many()
    assert refused.value.fields["tail_bytes"] == one.bases.tail_bytes
    for seq, parts in enumerate([small, *[large] * 5], start=100):
        while parts is large and one.works:
            one.works.pop()()
        handle(parts, seq)
    assert recovered(one.disk)[0]["rows"] == state_of(one.shard.core)["rows"]


def test_a_base_that_takes_minutes_lets_16_mib_pass_a_second():
    one = LoggedShard(SimulatedDisk(), segment_bytes=2**20, least_cost=0, cost_share=0.0).begun()
    one.push()
    one.push()
    assert one.works
    passed, now = 0, 0.0
    while now < 2.0:
        try:
            one.bases.check_tail(2**20, now)
            passed += 2**20
        except errors.LogTooLong as error:
            now += error.fields["retry_after_ms"] / 1000
    assert passed == pytest.approx(32 * 2**20, rel=0.05)
    one.bases.check_tail(1000, now)


def test_a_limit_below_what_the_log_needs_is_exceeded():
    one = LoggedShard(SimulatedDisk(), limit_bytes=1).begun()
    for _ in range(200):
        one.push(1, num_ids=100)
        one.write()
        one.log.journal.segments.prepare_spare()
        if one.works:
            one.works.pop()()
    assert one.bases.taken > 3
    assert one.log.journal.segments.file_bytes <= 5 * SEGMENT_BYTES


def test_a_base_waits_for_a_snapshot_but_no_snapshot_for_a_base(tmp_path, monkeypatch):
    go, create = threading.Event(), Storage.create
    monkeypatch.setattr(Storage, "create", lambda self, path: go.wait(30) and create(self, path))
    one = LoggedShard(SimulatedDisk(), **ALWAYS).begun()
    one.push(5, num_ids=100)
    one.write()
    one.works.pop()()
    one.push(1)
    base = one.works.pop()  # its rows are frozen
    request = partial(Snapshot, url=str(tmp_path), name="s", id=1)
    one.shard.handle(request(step="begin"))  # while the base is not written
    one.push(3, num_ids=100)
    one.write()
    base()
    lsn = one.bases.lsn
    one.push(3)
    assert one.works == []  # while the snapshot is not written
    go.set()
    assert eventually(lambda: one.shard.handle(request(step="watch")).state == "done")
    one.push(1)
    one.write()
    assert recovered(one.disk.copy())[0]["rows"] == state_of(one.shard.core)["rows"]
    one.works.pop()()
    assert one.bases.lsn > lsn
    assert recovered(one.disk)[0]["rows"] == state_of(one.shard.core)["rows"]


def test_a_base_is_named_only_once_the_events_in_it_are_safe():
    one = LoggedShard(SimulatedDisk(), start=lambda work: threading.Thread(target=work, daemon=True).start()).begun()
    one.push(3)
    one.begin_base()
    assert eventually(lambda: bases_of(one.disk) and BASE in one.disk.list(FOLDER / bases_of(one.disk)[0]))
    time.sleep(0.02)
    assert read_manifest(one.disk, FOLDER).bases == ()
    one.write()
    assert eventually(lambda: not one.bases.writing)
    assert read_manifest(one.disk, FOLDER).bases[0].lsn == one.shard.core.lsn


def test_a_table_that_still_loads_is_in_a_base_with_its_loader():
    one = LoggedShard(SimulatedDisk()).begun()
    one.shard.handle(Declare(table("loading"), worker=3, load=True, lineage=5))
    one.take_base()
    _, again = recovered(one.disk)
    assert again.shard.core.tables.flags() == one.shard.core.tables.flags()
    assert again.shard.status().tables[1].loading


def test_half_a_base_does_not_keep_the_room_that_its_log_waits_for(monkeypatch):
    one = with_base()
    begun = FOLDER / f"base-{50:020}-{1:016x}"
    one.disk.make_folder(begun)
    one.disk.open(begun / "0-0.safetensors", write=True, create=True).reserve(8 * SEGMENT_BYTES)
    one.disk.capacity = 2**40
    one.disk.capacity -= one.disk.free_bytes(FOLDER)
    monkeypatch.setattr(RecoveryProgress, "wait_for_room", lambda *_: pytest.fail("it waits"))
    assert recovered(one.disk)[0]["rows"] == state_of(one.shard.core)["rows"]


def test_a_disk_that_is_full_without_half_a_base_is_waited_for(monkeypatch):
    one, waits = with_base(), []
    begun = FOLDER / f"base-{50:020}-{1:016x}"
    one.disk.make_folder(begun)
    one.disk.capacity = 2**40
    one.disk.capacity -= one.disk.free_bytes(FOLDER)

    def wait(*_):
        waits.append(1)
        one.disk.capacity = None

    monkeypatch.setattr(RecoveryProgress, "wait_for_room", wait)
    recovered(one.disk)
    assert waits == [1]


def test_what_an_ended_process_began_is_removed():
    one = with_base()
    begun = FOLDER / f"base-{50:020}-{1:016x}"
    one.disk.make_folder(begun)
    one.disk.open(begun / "0-0.safetensors", write=True, create=True)
    (kept,) = [name for name in bases_of(one.disk) if FOLDER / name != begun]
    recovered(one.disk)
    assert bases_of(one.disk) == [kept]


@pytest.mark.parametrize("mode", ["log", "fsync"])
def test_bases_are_taken_by_their_thread_while_pushes_are_applied_and_written_by_others(mode, tmp_path):
    def start():
        shard = Shard(0, Placement.even(1), OptimizerRegistry())
        folder = open_log(None, tmp_path)
        small = {"least_cost": 2**16, "cost_share": 0.0}
        return folder, shard, recover(shard, folder, mode, segment_bytes=2**16, on_fatal=pytest.fail, **small)

    folder, shard, log = start()
    log.start()
    shard.handle(Declare(table(optimizer=Adam(lr=0.1)), lineage=5, begins_lineage=True))
    chooser = np.random.default_rng(0)
    for seq in range(1, 401):
        part = gradients(chooser.choice(5000, 300, replace=False), chooser.standard_normal((300, 3)))
        while True:
            try:
                shard.handle(push(part, seq=seq, first=seq))
                break
            except errors.ShardBusy:
                time.sleep(0.001)
        if seq % 80 == 0:
            assert eventually(lambda: not log.bases.writing)
    want = state_of(shard.core)["rows"]
    assert eventually(lambda: not log.bases.writing)
    assert log.close(10.0)
    folder.close()
    assert log.bases.taken >= 3
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 2**21  # of 2.4 MB of events
    folder, shard, log = start()
    assert state_of(shard.core)["rows"] == want
    folder.close()


def golden_log(folder):
    """What tests/golden/log-2 was made by: a base with a push that waits for its clock, and events behind it."""
    log = open_log(None, folder, lineage=0xE5BE, package="0.2.0", new_id=ids())
    one = LoggedShard(None, "fsync", folder=log, segment_bytes=2048)
    for name, optimizer in (("plain", SGD(lr=1.0)), ("adam", Adam(lr=0.5))):
        one.shard.handle(Declare(table(name, 2, optimizer=optimizer), lineage=7, begins_lineage=True))
    for seq in (1, 2):
        parts = [gradients([seq, 10], name=name, dim=2) for name in ("plain", "adam")]
        one.shard.handle(push(*parts, worker=5, seq=seq, first=seq))
    for worker in (0, 1):
        one.shard.handle(Join(worker=worker, epoch=1, clock=0, staleness=0, workers=2, lease_ms=60_000))
    part = gradients([3], 4.0, name="plain", dim=2)
    one.shard.handle(push(part, worker=0))
    one.shard.handle(Declare(table("empty", 1), lineage=7))
    one.take_base()
    one.shard.handle(push(part, worker=1))
    one.write()
    one.log.journal.segments.close()
    log.close()


def test_a_log_with_a_base_of_version_2_is_read():
    disk = disk_of(GOLDEN)
    manifest = read_manifest(disk, FOLDER)
    (base,) = manifest.bases
    assert (manifest.lineage, base.lsn, base.redo_lsn, manifest.first_lsn) == (0xE5BE, 9, 8, 8)
    again = LoggedShard(disk, "fsync")
    assert again.shard.core.lsn == 11  # the base's, a push, and the new term
    np.testing.assert_array_equal(rows(again.shard, 1, 2, 3, 10, name="plain")[:, 0], [-1, -1, -4, -2])
    core = again.shard.core
    table_rows, states = core.tables.entry("adam").table.records(np.array([1, 10]))
    np.testing.assert_allclose(table_rows[:, 0], [-0.5, -1.0], rtol=1e-5)
    assert states.shape[1] > 1
    assert (states[1] != 0).any()
    assert core.clock.open == 1
    assert core.tables.names() == ["plain", "adam", "empty"]
