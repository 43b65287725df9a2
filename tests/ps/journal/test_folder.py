"""The folder of a log: whose it is, who may use it, what is wrong with it, and how it is cut."""

import errno
import os
import random
from pathlib import Path

import msgpack
import pytest

from embershard.proto.errors import LogDamaged, LogMismatch, LogTooNew, LogUnusable
from embershard.ps.journal import disk as disks
from embershard.ps.journal.disk import LocalDisk
from embershard.ps.journal.folder import LogFolder
from embershard.ps.journal.manifest import MANIFEST, LogBase, LogManifest, read_manifest, write_manifest
from embershard.ps.journal.record import LogRecord, SegmentHeader, encode_segment_header
from embershard.ps.journal.segments import SegmentName
from embershard.ps.journal.summary import summarize
from harness.logs import FOLDER, Written, begin, disk_of, ids, open_log, read
from harness.simulated_disk import SimulatedDisk

GOLDEN = Path(__file__).parents[2] / "golden" / "log-1"
MODULES = {"mine": "ab" * 32}


def snapshot(disk):
    """The bytes of all files, and their names."""
    return {name: bytes(disk.content(FOLDER / name)) for name in disk.list(FOLDER)}


def names_of(disk):
    return sorted(filter(None, map(SegmentName.parse, disk.list(FOLDER))))


@pytest.fixture
def log():
    """A log of a shard with 30 records."""
    written = Written(SimulatedDisk(), segment_bytes=1536, lineage=5, modules=MODULES)
    written.write([1, 4, 8, 8, 9])
    written.end()
    return written


def test_a_manifest_keeps_what_it_is_told(log):
    manifest = LogManifest(5, 1, 4, 3, 77, (LogBase("base-90", 90, 77),), {"m": "00"}, "1.0")
    write_manifest(log.disk, FOLDER, manifest)
    assert read_manifest(log.disk, FOLDER) == manifest


def test_each_process_that_goes_on_with_a_log_has_a_higher_term_even_if_it_wrote_nothing():
    disk = SimulatedDisk()
    for term in (1, 2, 3):
        with_log = open_log(disk)
        assert begin(with_log).term == term
        disk.kill()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"shard": 1, "num_shards": 2}, "shard"),
        ({"num_shards": 2}, "shard"),
        ({"lineage": 6}, "lineage"),
        ({"modules": {"mine": "cd" * 32}}, "module mine with sha256"),
    ],
)
def test_a_log_of_another_shard_job_or_code_is_refused_and_stays_as_it_is(log, options, what):
    before = snapshot(log.disk)
    with pytest.raises(LogMismatch) as raised:
        open_log(log.disk, **{"lineage": 5, "modules": MODULES, **options})
    assert (raised.value.fields["what"], raised.value.fields["path"]) == (what, str(FOLDER / MANIFEST))
    assert snapshot(log.disk) == before
    assert len(read(log.disk, modules={"other": "ef" * 32})[0]) == 30


def test_a_segment_of_another_log_is_refused_by_its_name(log):
    other = Written(SimulatedDisk(), lineage=9)
    other.write([2])
    (name,) = names_of(other.disk)
    moved = FOLDER / str(name)
    log.disk.open(moved, write=True, create=True).pwritev([bytes(other.disk.content(moved))], 0)
    with pytest.raises(LogMismatch) as raised:
        read(log.disk)
    assert (raised.value.fields["what"], raised.value.fields["path"]) == ("lineage", str(moved))


def test_another_version_of_the_format_is_refused(log):
    name = names_of(log.disk)[0]
    newer = SegmentHeader(2, 1, 0, 5, name.first_lsn, name.id, 0, 1)
    log.disk.content(FOLDER / str(name))[:64] = encode_segment_header(newer)
    with pytest.raises(LogTooNew) as raised:
        read(log.disk)
    assert raised.value.fields == {"path": str(FOLDER / str(name)), "got": 2, "want": 1}
    content = log.disk.content(FOLDER / MANIFEST)
    content[:] = msgpack.packb({**msgpack.unpackb(bytes(content)), "version": 3})
    with pytest.raises(LogTooNew) as raised:
        read(log.disk)
    assert raised.value.fields == {"path": str(FOLDER / MANIFEST), "got": 3, "want": 2}


def test_any_flipped_bit_of_a_manifest_is_damage_that_names_it(log):
    content = log.disk.content(FOLDER / MANIFEST)
    for bit in range(8 * len(content)):
        content[bit // 8] ^= 1 << bit % 8
        with pytest.raises((LogDamaged, LogTooNew)) as raised:
            open_log(log.disk)
        assert raised.value.fields["path"] == str(FOLDER / MANIFEST)
        content[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize(
    "fields",
    [{"lineage": -1}, {"shard": "0"}, {"first_lsn": 0}, {"bases": [{"name": "../x", "lsn": 1, "redo_lsn": 1}]},
     {"bases": [3]}, {"modules": {"m": 5}}, {"term": None}],
)  # fmt: skip
def test_a_manifest_that_says_what_none_can_say_is_damage(log, fields):
    from embershard.ps.journal.manifest import _SEALED

    content = log.disk.content(FOLDER / MANIFEST)
    plain = msgpack.unpackb(msgpack.unpackb(bytes(content))["body"])
    content[:] = _SEALED.seal({**plain, **fields})
    with pytest.raises(LogDamaged):
        open_log(log.disk)


def test_segments_without_their_manifest_are_not_taken_for_a_new_log(log):
    log.disk.remove(FOLDER / MANIFEST)
    before = snapshot(log.disk)
    with pytest.raises(LogDamaged) as raised:
        open_log(log.disk)
    assert (raised.value.fields["path"], raised.value.fields["lsn"]) == (str(FOLDER / MANIFEST), 1)
    assert snapshot(log.disk) == before


def test_the_lock_of_a_folder_is_given_back_where_opening_fails(log):
    with pytest.raises(LogMismatch):
        open_log(log.disk, shard=1, num_shards=2)
    open_log(log.disk).close()


@pytest.mark.parametrize(("operation", "code"), [
    ("make_folder", errno.EACCES), ("lock", errno.EROFS), ("lock", errno.ENOLCK), ("lock", errno.EOPNOTSUPP),
    ("open", errno.EROFS), ("sync", errno.EIO), ("pwritev", errno.ENOSPC), ("list", errno.EIO),
])  # fmt: skip
def test_a_folder_that_cannot_be_used_is_named_with_what_the_system_says(operation, code):
    disk = SimulatedDisk()

    def before(done, path):
        if done == operation:
            raise OSError(code, os.strerror(code), str(path))

    disk.before = before
    with pytest.raises(LogUnusable) as raised:
        open_log(disk)
    assert str(FOLDER) in raised.value.fields["path"]
    assert os.strerror(code) in raised.value.fields["reason"]
    disk.before = lambda done, path: None
    open_log(disk).close()


def test_a_drive_that_grants_one_lock_to_two_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(disks.fcntl, "flock", lambda descriptor, operation: None)
    with pytest.raises(LogUnusable):
        open_log(None, tmp_path)


def test_a_lock_is_lost_once_another_process_has_written_to_its_file(tmp_path):
    lock = LocalDisk().lock(tmp_path / "LOCK")
    assert lock.is_held()
    (tmp_path / "LOCK").write_text("1 elsewhere 00\n")
    assert not lock.is_held()
    (tmp_path / "LOCK").unlink()
    assert not lock.is_held()
    lock.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(LogUnusable):
        open_log(None, tmp_path / "shard-0")
    tmp_path.chmod(0o700)


def test_a_disk_without_room_for_a_segment_is_refused_at_the_start():
    disk = SimulatedDisk(capacity=8000)
    log = open_log(disk)
    list(log.records())
    with pytest.raises(LogUnusable):
        log.begin("log", segment_bytes=8192)
    disk.capacity = 20000
    log.begin("log", segment_bytes=8192)


def test_what_a_process_left_in_the_kernel_is_synced_before_more_is_built_on_it():
    for seed in range(20):
        disk = SimulatedDisk()
        written = Written(disk, "log")
        written.write([3])
        disk.kill()
        assert len(Written(disk, "fsync").before) == 3
        disk.lose_power(random.Random(seed))
        assert len(read(disk)[0]) == 3


@pytest.mark.parametrize("lsn", [1, 2, 9, 17, 30])
def test_a_cut_takes_the_records_from_an_lsn_on_and_says_which(log, lsn):
    folder = LogFolder.existing(FOLDER, disk=log.disk)
    lost = folder.lost_by_cut(lsn)
    kinds = [one[2] for one in log.appended[lsn - 1 :]]
    assert lost.kinds == {kind: kinds.count(kind) for kind in kinds}
    assert (lost.last_lsn, lost.num_bytes) == (
        30,
        sum(64 + -(-len(one[-1]) // 8 * 8) for one in log.appended[lsn - 1 :]),
    )
    folder.cut(lsn)
    folder.close()
    records, end = read(log.disk)
    assert (records, end.state) == (log.appended[: lsn - 1], "clean")
    again = Written(log.disk)
    again.write([2])
    again.end()
    assert read(log.disk)[0] == again.appended


def test_a_cut_mends_damage_and_counts_what_lies_behind_it(log):
    spots = {}
    folder = LogFolder.existing(FOLDER, disk=log.disk)
    for one in folder.records():
        spots[one.header.lsn] = one
    log.disk.content(FOLDER / str(spots[11].segment))[spots[11].offset] ^= 1
    folder.close()
    folder = LogFolder.existing(FOLDER, disk=log.disk)
    with pytest.raises(LogDamaged):
        list(folder.records())
    before = snapshot(log.disk)
    with pytest.raises(LogDamaged):
        folder.lost_by_cut(12)
    with pytest.raises(LogDamaged):
        folder.cut(12)
    assert snapshot(log.disk) == before
    assert sum(folder.lost_by_cut(11).kinds.values()) == 19
    folder.cut(11)
    folder.close()
    assert read(log.disk)[0] == log.appended[:10]


def test_a_cut_with_its_first_segment_missing_takes_the_rest(log):
    log.disk.remove(FOLDER / str(names_of(log.disk)[0]))
    folder = LogFolder.existing(FOLDER, disk=log.disk)
    assert sum(folder.lost_by_cut(1).kinds.values()) > 0
    folder.cut(1)
    folder.close()
    assert read(log.disk)[0] == []


@pytest.mark.parametrize("mode", ["log", "fsync"])
@pytest.mark.parametrize("kept", [0, 2])
def test_a_log_that_is_shorter_than_at_the_last_start_is_damaged(mode, kept):
    """As where somebody has removed its last files, or all of them."""
    disk = SimulatedDisk()
    first = Written(disk, mode, segment_bytes=1536)
    first.write([1] * 30)
    first.end()
    Written(disk, mode).end()
    for name in names_of(disk)[kept:]:
        disk.remove(FOLDER / str(name))
    with pytest.raises(LogDamaged) as raised:
        read(disk)
    lsn = raised.value.fields["lsn"]
    assert 1 <= lsn <= 30
    assert (lsn == 1) == (kept == 0)
    folder = LogFolder.existing(FOLDER, disk=disk)
    folder.cut(lsn)
    folder.close()
    assert read(disk)[0] == first.appended[: lsn - 1]


@pytest.mark.parametrize("mode", ["log", "fsync"])
def test_a_loss_of_power_may_take_what_was_not_synced_when_the_shard_last_started(mode):
    disk = SimulatedDisk()
    Written(disk).end()
    disk.write_back()
    first = Written(disk, mode)
    first.write([1] * 30)
    first.end()
    Written(disk, mode).end()
    disk.lose_power(random.Random(1))
    records, end = read(disk)
    assert records == (first.appended if mode == "fsync" else first.appended[: end.position.lsn - 1])


def test_a_cut_that_would_leave_less_than_an_image_holds_is_refused(log):
    folder = LogFolder.existing(FOLDER, disk=log.disk)
    folder.update_manifest(bases=(LogBase("b", 20, 15),), first_lsn=15)
    for lsn in (14, 15, 20):
        with pytest.raises(LogUnusable):
            folder.cut(lsn)
    folder.cut(21)


@pytest.mark.parametrize("seed", range(40))
def test_a_cut_that_loses_power_leaves_a_log_that_is_whole_or_as_damaged_as_it_was(seed):
    chooser = random.Random(seed)
    written = Written(disk := SimulatedDisk(), segment_bytes=1536)
    written.write([1, 4, 8, 8, 9])
    written.end()
    disk.sync_folder(FOLDER)
    countdown = [chooser.randint(1, 40)]

    def before(operation, path):
        countdown[0] -= 1
        if countdown[0] == 0:
            raise KeyboardInterrupt

    disk.before = before
    try:
        folder = LogFolder.existing(FOLDER, disk=disk)
        folder.cut(8)
    except KeyboardInterrupt:
        pass
    disk.lose_power(chooser)
    records, _ = read(disk)
    assert records == written.appended[: len(records)]
    assert len(records) >= 7


def test_a_folder_without_a_log_is_named(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(LogUnusable) as raised:
            LogFolder.existing(path)
        assert raised.value.fields["path"] == str(path)
    assert os.listdir(tmp_path) == []


def test_a_summary_of_a_log_that_is_written_meanwhile_shows_no_damage_that_is_gone_at_the_next_look(log):
    content = log.disk.content(FOLDER / str(names_of(log.disk)[0]))
    whole = bytes(content)
    content[100] ^= 1
    assert summarize(FOLDER, log.disk).damage.fields["lsn"] == 1

    def before(operation, path):
        if operation == "open" and path.name.startswith("log-"):
            looks.append(path)
        if operation == "list" and looks:
            content[:] = whole

    looks = []
    log.disk.before = before
    summary = summarize(FOLDER, log.disk)
    assert (summary.damage, sum(summary.kinds.values()), summary.end.state) == (None, 30, "clean")


def golden_log(folder):
    """What tests/golden/log-1 was made by; its last record is torn."""
    log = LogFolder.open(folder, shard=1, num_shards=2, lineage=0xE5BE, modules=MODULES, package="0.1.0", new_id=ids())
    list(log.records())
    journal = log.begin("fsync", segment_bytes=384)
    for number in range(1, 6):
        journal.append(LogRecord(number, [b"event " * number, bytes([number])], number, number + 10, number, 2, 1, 3))
        if number != 2:
            assert journal.write_group()
    journal.segments.close()
    log.close()
    last = sorted(folder.glob("log-*"))[-1]
    last.write_bytes(last.read_bytes()[:-150])


def test_a_log_of_version_1_is_read():
    disk = disk_of(GOLDEN)
    manifest = read_manifest(disk, FOLDER)
    assert manifest == LogManifest(0xE5BE, 1, 2, 1, 1, (), MODULES, "0.1.0")
    records, end = read(disk, shard=1, num_shards=2, lineage=0xE5BE)
    assert records == [(n, 1, n, 3, n, 2, 1, n, n + 10, b"event " * n + bytes([n])) for n in range(1, len(records) + 1)]
    assert (len(records), end.state) == (4, "torn")
