"""A log while it runs: groups, segments, what is safe when, and a disk that fails."""

import errno
import os
import threading

import numpy as np
import pytest

from embershard.proto.errors import LogLocked, LogStalled, ShardBusy
from embershard.ps.journal import log_thread
from embershard.ps.journal.journal import Journal
from embershard.ps.journal.log_thread import LogThread
from embershard.ps.journal.manifest import LogBase
from embershard.ps.journal.record import HEADER_BYTES, LogRecord
from embershard.ps.journal.segments import NUM_SPARES, SyncFailed, is_spare
from harness.eventually import eventually
from harness.logs import FOLDER, Written, begin, ids, open_log, read, record
from harness.simulated_disk import SimulatedDisk


@pytest.mark.parametrize("mode", ["log", "fsync"])
def test_what_is_appended_is_read_back_in_order_over_many_segments_groups_and_processes(mode):
    disk = SimulatedDisk()
    for term in (1, 2, 3):
        written = Written(disk, mode)
        assert written.journal.term == term
        written.write([1, 7, 1, 40, 3])
        assert written.acknowledged == 52 * term
        written.end()
    assert len([name for name in disk.list(FOLDER) if name.startswith("log-")]) == 8
    records, end = read(disk)
    assert records == written.appended
    assert (len(records), end.state, end.position.lsn) == (156, "clean", 157)


def test_a_record_larger_than_a_segment_gets_one_of_its_own_size():
    written = Written(disk := SimulatedDisk())
    written.write([2, 1], num_bytes=100)
    written.write([1], num_bytes=9001)
    written.write([3], num_bytes=100)
    assert read_after(written) == written.appended
    sizes = [len(disk.content(FOLDER / name)) for name in disk.list(FOLDER) if name.startswith("log-")]
    assert max(sizes) == 2 * HEADER_BYTES + 9008


def read_after(written):
    written.end()
    return read(written.disk)[0]


def test_the_arrays_of_a_record_are_not_copied_before_they_are_written():
    written = Written(SimulatedDisk(), segment_bytes=2**20)
    array = np.zeros(10_000, np.float32)
    written.journal.append(LogRecord(1, [b"head", array]))
    array[:] = 7
    written.journal.write_group()
    written.end()
    records, _ = read(written.disk)
    assert np.frombuffer(records[0][-1][4:], np.float32).sum() == 70_000


def test_a_group_takes_what_waits_up_to_its_bytes_and_is_synced_once():
    disk = SimulatedDisk()
    log = open_log(disk)
    list(log.records())
    segments = log.begin("fsync", segment_bytes=2**20).segments
    journal = Journal(segments, next_lsn=1, term=1, group_bytes=2000)
    called = []
    for number in range(1, 7):
        journal.when_safe(journal.append(record(number, 600)), lambda number=number: called.append(number))
    assert journal.waiting_bytes == 6 * (64 + 600)
    disk.operations.clear()
    assert journal.write_group()
    assert (called, journal.safe.lsn, journal.waiting_bytes) == ([1, 2, 3, 4], 4, 2 * 664)
    assert [name for name in disk.operations if name in ("pwritev", "sync")] == ["pwritev", "sync"]
    assert journal.write_group()
    assert called == [1, 2, 3, 4, 5, 6]
    assert not journal.write_group()


def test_a_call_for_what_is_safe_comes_at_once_and_one_that_fails_keeps_no_other_back(caplog):
    written = Written(SimulatedDisk())
    written.append(3)
    called = []
    written.journal.when_safe(2, lambda: 1 / 0)
    written.journal.when_safe(3, lambda: called.append(3))
    written.journal.when_safe(1, lambda: called.append(1))
    written.journal.when_safe(0, lambda: called.append(0))
    assert called == [0]
    written.journal.write_group()
    assert called == [0, 3, 1]
    written.journal.when_safe(3, lambda: called.append("now"))
    assert called[-1] == "now"
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(("mode", "order"), [("log", ["pwritev"]), ("fsync", ["pwritev", "sync"])])
def test_an_event_is_safe_once_it_is_written_or_in_mode_fsync_synced(mode, order):
    disk = SimulatedDisk()
    written = Written(disk, mode)
    written.write()  # the segment is there
    disk.operations.clear()
    written.append()
    written.journal.when_safe(2, lambda: disk.operations.append("safe"))
    written.journal.write_group()
    assert disk.operations == [*order, "safe"]


def test_a_new_segment_is_named_on_the_disk_before_anything_in_it_is_acknowledged():
    disk = SimulatedDisk()
    written = Written(disk)
    written.journal.segments.prepare_spare()
    disk.operations.clear()
    written.append()
    written.journal.when_safe(1, lambda: disk.operations.append("safe"))
    written.journal.write_group()
    assert disk.operations == ["rename", "open", "sync_folder", "pwritev", "sync", "safe"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_stalls_the_log_and_is_tried_again_with_nothing_lost(code):
    disk = SimulatedDisk()
    written = Written(disk)
    written.write([3])
    fail(disk, "pwritev", code)
    written.append(5)
    for _ in range(3):
        with pytest.raises(OSError, match=os.strerror(code)):
            written.journal.write_group()
        with pytest.raises(LogStalled) as raised:
            written.journal.check_room(10)
        assert isinstance(raised.value, ShardBusy)
        assert (raised.value.retryable, raised.value.fields["reason"]) == (True, os.strerror(code))
        assert written.journal.stalled() == os.strerror(code)
        assert written.acknowledged == 3
    disk.before = lambda operation, path: None
    assert written.journal.write_group()
    written.journal.check_room(10)
    assert not written.journal.stalled()
    assert written.acknowledged == 8
    assert read_after(written) == written.appended


def fail(disk, operation, code):
    def before(done, path):
        if done == operation:
            raise OSError(code, os.strerror(code))

    disk.before = before


def test_a_disk_that_fills_up_stops_the_log_and_space_lets_it_go_on():
    disk = SimulatedDisk(capacity=3 * 4096)
    written = Written(disk)
    for _ in range(100):
        try:
            written.append(2)
            written.journal.write_group()
        except OSError:
            break
    assert written.acknowledged < len(written.appended)
    kept, _ = read(disk.copy())
    assert kept == written.appended[: len(kept)]
    assert len(kept) >= written.acknowledged
    disk.capacity = 10**6
    written.journal.write_group()
    assert written.acknowledged == len(written.appended)
    assert read_after(written) == written.appended


def test_a_full_disk_shows_before_an_event_is_applied():
    disk = SimulatedDisk(capacity=3 * 4096)  # LOCK takes none here
    written = Written(disk)
    assert written.journal.segments.prepare_spare()
    written.write([8], num_bytes=300)  # in it
    assert written.journal.segments.prepare_spare()
    with pytest.raises(OSError, match="No space"):
        written.journal.segments.prepare_spare()
    left = written.journal.segments.room_bytes
    written.journal.check_room(left)
    assert not written.journal.stalled()
    with pytest.raises(LogStalled):
        written.journal.check_room(left + 1)
    assert "No space" in written.journal.stalled()  # though what fits goes on
    disk.capacity = 10**6
    written.journal.segments.prepare_spare()
    written.journal.check_room(left + 1)
    assert not written.journal.stalled()


def test_a_spare_for_which_a_disk_has_no_room_takes_none_of_what_others_need():
    written = Written(disk := SimulatedDisk())
    disk.capacity = 4096  # of which the manifest has some
    disk.operations.clear()
    with pytest.raises(OSError, match="No space"):
        written.journal.segments.prepare_spare()
    assert "pwritev" not in disk.operations


def test_too_many_waiting_bytes_make_the_shard_busy_but_one_event_always_fits():
    log = open_log(SimulatedDisk())
    journal = Journal(begin(log).segments, next_lsn=1, term=1, waiting_bytes=1000)
    journal.check_room(5000)
    journal.append(record(1, 500))
    with pytest.raises(ShardBusy) as raised:
        journal.check_room(600)
    assert raised.value.fields["queued_bytes"] == 64 + 504
    journal.check_room(400)


@pytest.mark.parametrize("operation", ["sync", "sync_folder"])
def test_a_failed_sync_acknowledges_nothing(operation):
    disk = SimulatedDisk()
    written = Written(disk)
    fail(disk, operation, errno.EIO)
    written.append(2)
    with pytest.raises(SyncFailed):
        written.journal.write_group()
    assert (written.acknowledged, written.journal.safe.lsn) == (0, 0)


@pytest.mark.parametrize(("code", "error"), [(errno.EIO, SyncFailed), (errno.EMFILE, OSError)])
def test_a_base_for_which_no_file_can_be_opened_is_not_one_that_a_sync_failed_for(code, error):
    written = Written(disk := SimulatedDisk(), mode="log")
    written.write([5] * 12, num_bytes=300)
    fail(disk, "open", code)
    with pytest.raises(error):
        written.log.recycle(written.journal, (LogBase("base-40", 40, 38),))


def test_segments_below_a_base_become_spares_and_what_was_in_them_is_not_read_again():
    disk = SimulatedDisk()
    written = Written(disk, new_id=ids())
    written.write([5] * 12, num_bytes=300)
    count = len(written.journal.segments.names)
    written.log.recycle(written.journal, (LogBase("base-40", 40, 38),))
    freed = count - len(written.journal.segments.names)
    assert sum(map(is_spare, disk.list(FOLDER))) == freed > NUM_SPARES
    written.write([4] * 4, num_bytes=300)  # over old records of the same size
    records, end = read_after(written), read(disk)[1]
    assert records == written.appended[records[0][0] - 1 :]
    assert records[0][0] <= 38
    assert end.state == "clean"
    assert b"EMBL" in disk.content(FOLDER / str(end.position.segment))[end.position.offset :]


def test_a_log_whose_bases_free_segments_as_fast_as_it_fills_them_makes_none():
    written = Written(disk := SimulatedDisk())
    segments = written.journal.segments
    made = []
    for number in range(8):
        written.write([4] * 4, num_bytes=300)
        disk.operations.clear()
        while segments.prepare_spare():  # as the thread that makes files does at once
            pass
        made.append(disk.operations.count("pwritev"))
        lsn = written.journal.safe.lsn
        written.log.recycle(written.journal, (LogBase(f"base-{number}", lsn, lsn),))
    assert made[0] > 0
    assert made[3:] == [0] * 5


def test_under_a_limit_a_base_leaves_the_room_of_its_segments_to_images():
    written = Written(disk := SimulatedDisk())
    segments = written.journal.segments
    written.write([4] * 12, num_bytes=300)
    while segments.prepare_spare():
        pass
    segments.limit_bytes = segments.file_bytes - 1
    written.log.recycle(written.journal, (LogBase("base-40", 40, 40),))
    assert sum(map(is_spare, disk.list(FOLDER))) == NUM_SPARES


# With threads, on the disk of this machine


class Fatal:
    def __init__(self):
        self.errors, self.came = [], threading.Event()

    def __call__(self, error):
        self.errors.append(error)
        self.came.set()


@pytest.mark.parametrize("mode", ["log", "fsync"])
def test_the_thread_writes_acknowledges_in_order_and_prepares_spares(mode, tmp_path):
    written = Written(None, mode, 2**16, tmp_path)
    thread = LogThread(written.journal, on_fatal=pytest.fail)
    order = []
    for _ in range(400):
        written.append()
        lsn = written.journal.last_lsn
        written.journal.when_safe(lsn, lambda lsn=lsn: order.append(lsn))
    assert eventually(lambda: sum(map(is_spare, os.listdir(tmp_path))) == NUM_SPARES)
    assert thread.close(60)
    assert order == list(range(1, 401))
    assert read_after_in(tmp_path, written) == written.appended


def read_after_in(folder, written):
    written.log.close()
    return read(None, folder)[0]


def test_the_thread_goes_on_once_a_full_disk_has_room():
    disk = SimulatedDisk(capacity=4096 * 2)
    written = Written(disk)
    thread = LogThread(written.journal, on_fatal=pytest.fail)
    written.append(60, num_bytes=300)
    assert eventually(lambda: "pwritev" in disk.operations and stalls(written.journal))
    assert written.acknowledged < 60
    disk.capacity = 10**6
    assert thread.close(60)
    assert written.acknowledged == 60
    assert read_after(written) == written.appended


def stalls(journal):
    try:
        journal.check_room(0)
    except LogStalled:
        return True
    return False


def test_a_failed_sync_ends_the_thread_at_once_and_it_is_not_tried_again():
    disk, fatal = SimulatedDisk(), Fatal()
    written = Written(disk, segment_bytes=2**16)
    written.write()
    fail(disk, "sync", errno.EIO)
    size = written.journal.segments.left_bytes
    thread = LogThread(written.journal, on_fatal=fatal)
    written.append(3)
    assert fatal.came.wait(60)
    assert isinstance(fatal.errors[0], SyncFailed)
    disk.before = lambda operation, path: None
    written.append(3)
    assert not thread.close(1)
    assert written.acknowledged == 1
    three = sum(record(number).num_bytes for number in (2, 3, 4))
    assert size - written.journal.segments.left_bytes == three


def test_no_segment_is_begun_in_a_folder_that_another_process_has_locked_meanwhile():
    disk = SimulatedDisk()
    written = Written(disk)
    written.write()
    disk._locks.clear()  # as a network drive does, for another process
    open_log(disk)
    written.append(1, num_bytes=5000)
    with pytest.raises(LogLocked):
        written.journal.write_group()
    assert written.acknowledged == 1


def test_a_lost_lock_ends_the_process(monkeypatch):
    monkeypatch.setattr(log_thread, "_WATCH_SECONDS", 0.05)
    disk, fatal = SimulatedDisk(), Fatal()
    written = Written(disk)
    thread = LogThread(written.journal, on_fatal=fatal)
    disk._locks.clear()  # as a network drive does, for another process
    open_log(disk)
    assert fatal.came.wait(60)
    assert isinstance(fatal.errors[0], LogLocked)
    thread.close(60)


def test_a_thread_that_was_closed_while_it_made_a_spare_leaves_the_manifest(monkeypatch):
    """It may be another process's by then."""
    written, recorded = Written(SimulatedDisk()), []
    making, made = threading.Event(), threading.Event()
    monkeypatch.setattr(written.journal.segments, "prepare_spare", lambda: making.set() or not made.wait(60))
    thread = LogThread(written.journal, record_end=lambda: recorded.append(1), on_fatal=pytest.fail)
    assert making.wait(60)
    thread.close(0)  # its time is up
    made.set()
    thread._keeper.join(60)
    assert not recorded


def test_a_defect_in_the_thread_ends_the_process_instead_of_leaving_it_silent():
    disk, fatal = SimulatedDisk(), Fatal()
    written = Written(disk)
    thread = LogThread(written.journal, on_fatal=fatal)
    written.journal.append(LogRecord(300, [b"no kind is that large"]))
    assert fatal.came.wait(60)
    assert not thread.close(60)


def test_appending_does_not_wait_for_the_disk():
    disk = SimulatedDisk()
    written = Written(disk)
    entered, leave = threading.Event(), threading.Event()

    def before(operation, path):
        if operation == "pwritev" and path.name.startswith("log-"):
            entered.set()
            assert leave.wait(60)

    disk.before = before
    thread = LogThread(written.journal, on_fatal=pytest.fail)
    written.append()
    assert entered.wait(60)
    written.append(50)
    assert (written.acknowledged, written.journal.last_lsn) == (0, 51)
    leave.set()
    assert thread.close(60)
    assert written.acknowledged == 51
