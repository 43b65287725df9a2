"""A log that was cut, torn or damaged is its longest intact prefix, or an error that names the place."""

import errno
import os
import random

import pytest

from embershard.proto.errors import LogDamaged
from embershard.ps.journal.manifest import LogBase
from embershard.ps.journal.record import HEADER_BYTES
from embershard.ps.journal.segments import SegmentName
from harness.logs import FOLDER, Written, ids, open_log, read, read_or_damage, record
from harness.simulated_disk import SimulatedDisk

MODES = pytest.mark.parametrize("mode", ["log", "fsync"])


def written_log(mode="fsync", groups=(1, 3, 2, 5, 4, 3, 4, 2), segment_bytes=1536, **options):
    """A log of 24 records in 4 segments, by default."""
    written = Written(SimulatedDisk(), mode, segment_bytes, new_id=ids())
    written.write(groups, **options)
    written.end()
    return written


def segments(disk):
    return sorted(filter(None, map(SegmentName.parse, disk.list(FOLDER))))


def path_of(name):
    return FOLDER / str(name)


def places(written):
    """(segment, offset, end) of each record."""
    log = open_log(written.disk)
    found = [(one.segment, one.offset, one.offset + one.header.num_bytes) for one in log.records()]
    log.close()
    return found


@MODES
def test_a_log_cut_at_any_byte_of_its_last_records_has_all_whole_records_before(mode):
    written = written_log(mode, [1, 2, 6], 4096)
    spots = places(written)
    name = spots[-1][0]
    assert len(written.appended) == 9
    for size in range(spots[-3][1], spots[-1][2] + 1):
        disk = written.disk.copy()
        del disk.content(path_of(name))[size:]
        records, end = read(disk)
        whole = sum(last <= size for _, _, last in spots)
        assert records == written.appended[:whole]
        assert end.state == ("clean" if size in [last for _, _, last in spots] else "torn")
        assert end.position == (whole + 1, name, spots[whole][1] if whole < 9 else spots[-1][2])


@MODES
def test_a_log_goes_on_behind_a_torn_tail_which_is_no_record_any_more(mode):
    written = written_log(mode, [1, 2, 6], 4096)
    spots = places(written)
    disk = written.disk
    del disk.content(path_of(spots[-1][0]))[spots[-1][2] - 3 :]
    again = Written(disk, mode, 1536)
    assert again.before == written.appended[:8]
    again.write([2, 1])
    again.end()
    records, end = read(disk)
    assert records == again.appended
    assert (end.state, len(records)) == ("clean", 11)


@pytest.mark.parametrize(("mode", "seed"), [("log", 1), ("fsync", 2)])
def test_a_flipped_bit_gives_the_longest_prefix_or_an_error_that_names_the_place(mode, seed):
    written = written_log(mode)
    spots = places(written)
    chooser = random.Random(seed)
    names = segments(written.disk)
    outcomes = {"damaged": 0, "prefix": 0, "whole": 0}
    disk = written.disk.copy()
    for _ in range(800):
        name = chooser.choice(names)
        content = disk.content(path_of(name))
        bit = chooser.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        outcome = check_flip(disk, written, spots, name, bit // 8)
        outcomes[outcome] += 1
        content[bit // 8] ^= 1 << bit % 8
    assert outcomes["damaged"] > 400
    assert outcomes["prefix"] > 6
    assert outcomes["whole"] > 40  # zeros behind the last record


def check_flip(disk, written, spots, name, offset):
    """What a reader makes of a flip at this byte."""
    hit = [n for n, (segment, start, end) in enumerate(spots) if segment == name and start <= offset < end]
    first = next(n for n, (segment, _, _) in enumerate(spots) if segment == name)
    intact = hit[0] if hit else first if offset < HEADER_BYTES else len(spots)
    records, end, error = read_or_damage(disk)
    if error is None:
        assert records == written.appended[:intact]
        assert end.position.lsn == intact + 1
        return "whole" if intact == len(spots) else "prefix"
    assert error.fields["lsn"] == intact + 1
    # the header of a segment is due where the one before it ends
    segment, start, _ = spots[intact] if hit else (name, 0, 0)
    if not hit and first:
        segment, _, start = spots[first - 1]
    assert (error.fields["path"], error.fields["offset"]) == (str(path_of(segment)), start)
    return "damaged"


def test_only_the_last_group_can_be_torn_a_record_of_an_earlier_one_is_damage():
    written = written_log("fsync", [2, 3, 3], num_bytes=40)
    spots = places(written)
    for number, (name, start, _) in enumerate(spots):
        disk = written.disk.copy()
        disk.content(path_of(name))[start + 70] ^= 1
        if number < 5:
            with pytest.raises(LogDamaged):
                read(disk)
        else:
            records, end = read(disk)
            assert (records, end.state) == (written.appended[:number], "torn")


@MODES
def test_a_damaged_header_does_not_make_a_log_of_one_group_an_empty_one(mode):
    written = written_log(mode, [3])
    (name,) = segments(written.disk)
    for offset in range(HEADER_BYTES):
        disk = written.disk.copy()
        disk.content(path_of(name))[offset] ^= 16
        with pytest.raises(LogDamaged) as raised:
            read(disk)
        assert (raised.value.fields["lsn"], raised.value.fields["offset"]) == (1, 0)


def test_in_mode_log_a_record_that_the_kernel_had_is_damage_until_the_machine_starts_anew():
    written = written_log("log", [2, 3, 3], num_bytes=40)
    name, start, _ = places(written)[3]
    disk = written.disk.copy()
    disk.content(path_of(name))[start + 70] ^= 1
    with pytest.raises(LogDamaged):
        read(disk)
    disk.boot += 1
    records, end = read(disk)
    assert (records, end.state, end.lost_records) == (written.appended[:3], "unsynced", 4)
    again = Written(disk, "log", 1536)
    again.write([6], num_bytes=40)
    again.end()
    records, end = read(disk)
    assert (records, end.state) == (again.appended, "clean")


def test_a_record_in_the_place_of_another_is_damage():
    written = written_log("fsync", [1] * 6, num_bytes=40)
    spots = places(written)
    content = written.disk.content(path_of(spots[0][0]))
    content[spots[3][1] : spots[3][2]] = content[spots[1][1] : spots[1][2]]  # as a disk that writes to another place
    with pytest.raises(LogDamaged) as raised:
        read(written.disk)
    assert raised.value.fields["lsn"] == 4


def test_what_was_synced_is_damaged_even_if_a_later_process_did_not_sync():
    written = written_log("fsync", [2], num_bytes=40)
    again = Written(written.disk, "log", 1536)
    again.write([2])
    again.end()
    content = written.disk.content(path_of(segments(written.disk)[0]))
    content[HEADER_BYTES + 70] ^= 1
    written.disk.boot += 1
    with pytest.raises(LogDamaged) as raised:
        read(written.disk)
    assert raised.value.fields["lsn"] == 1


def test_the_header_of_an_earlier_use_of_a_file_proves_nothing():
    written = Written(SimulatedDisk(), "fsync", 1536, new_id=ids())
    written.write([1] * 16, num_bytes=300)
    old = bytes(written.disk.content(path_of(segments(written.disk)[0])))
    written.end()
    written.disk.kill()
    again = Written(written.disk, "log", 1536)
    again.write([1] * 6, num_bytes=300)
    again.end()
    *_, last, renamed = segments(written.disk)
    # power was lost: the last group of one segment, and all of the next, which was a synced one before, but its name
    del written.disk.content(path_of(last))[-500:]
    written.disk.content(path_of(renamed))[:] = old
    written.disk.boot += 1
    records, end = read(written.disk)
    assert records == again.appended[: len(records)]
    assert (end.state, end.position.segment) == ("torn", last)
    assert 16 < len(records) < 20


def test_records_of_an_earlier_use_of_a_file_are_never_taken_for_new_ones():
    written = Written(SimulatedDisk(), segment_bytes=1536, new_id=ids())
    written.write([1] * 16, num_bytes=300)  # 4 in each segment
    old = [bytes(written.disk.content(path_of(name))) for name in segments(written.disk)[:2]]
    written.log.recycle(written.journal, (LogBase("b", 12, 13),))
    for count in range(1, 7):
        written.write([1], num_bytes=300)
        disk = written.disk.copy()
        disk._locks.clear()
        records, end = read(disk)
        assert records == written.appended[12:]
        assert (end.state, len(records)) == ("clean", 4 + count)
    new = [bytes(written.disk.content(path_of(name))) for name in segments(written.disk)]
    assert any(one[-300:] == other[-300:] and one != other for one in old for other in new)  # a part is still old


def test_the_body_of_a_record_that_holds_a_record_is_not_taken_for_one():
    """Whoever pushes does not know the id of the segment, but a log of one's own may be pushed."""
    inner = written_log("fsync", [3], num_bytes=40)
    stored = bytes(inner.disk.content(path_of(segments(inner.disk)[0])))
    written = Written(SimulatedDisk())
    one = record(1)._replace(body=[stored[: 3 * 104 + 64]])
    written.journal.append(one)
    written.journal.write_group()
    written.end()
    name = segments(written.disk)[0]
    written.disk.content(path_of(name))[HEADER_BYTES] ^= 1  # the outer one is no record any more
    records, end = read(written.disk)
    assert (records, end.state) == ([], "clean")


def test_damage_below_what_a_base_needs_does_not_matter():
    written = Written(SimulatedDisk(), segment_bytes=4096, new_id=ids())
    written.write([1, 2, 3, 4], num_bytes=40)
    written.log.recycle(written.journal, (LogBase("b", 4, 5),))
    written.end()
    spots = places(written)
    name = spots[0][0]
    first, last = HEADER_BYTES, spots[0][1]
    for offset in range(first, last, 7):
        disk = written.disk.copy()
        disk.content(path_of(name))[offset] ^= 4
        records, end = read(disk)
        assert (records, end.state) == (written.appended[4:], "clean")
        again = Written(disk)
        again.write([1])
        again.end()
        assert read(disk)[0] == again.appended
    disk = written.disk.copy()
    disk.content(path_of(name))[first] ^= 4
    disk.content(path_of(name))[last] ^= 4
    with pytest.raises(LogDamaged) as raised:
        read(disk)
    assert raised.value.fields["lsn"] == 5


def test_a_record_within_an_intact_one_is_not_counted():
    """Even with the id of its segment, as whoever can read the log's folder may push it."""
    inner = written_log("fsync", [3], 4096, num_bytes=40)
    (name,) = segments(inner.disk)
    written = Written(SimulatedDisk(), new_id=ids())
    stored = bytes(inner.disk.content(path_of(name))[HEADER_BYTES : HEADER_BYTES + 3 * 104])
    for body in ([b"one"], [bytes(24), stored], [b"three"]):
        written.journal.append(record(1)._replace(body=body))
    written.journal.write_group()
    written.end()
    assert segments(written.disk) == [name]
    log = open_log(written.disk)
    lost = log.lost_by_cut(1)
    assert (sum(lost.kinds.values()), lost.last_lsn) == (3, 3)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_missing_segment_is_damage_that_names_the_lsn(victim):
    written = written_log()
    names = segments(written.disk)
    assert len(names) == 4
    written.disk.remove(path_of(names[victim]))
    with pytest.raises(LogDamaged) as raised:
        read(written.disk)
    assert raised.value.fields["lsn"] == names[victim].first_lsn
    assert str(FOLDER) in raised.value.fields["path"]


@pytest.mark.parametrize("seed", range(8))
def test_files_that_were_named_and_never_written_do_not_break_the_chain_of_segments(seed):
    chooser = random.Random(seed)
    disk = SimulatedDisk()
    written = Written(disk, new_id=lambda: chooser.getrandbits(64), lineage=5)
    written.write([2])
    written.journal.segments.prepare_spare()

    def before(operation, path):
        if operation == "open" and path.name.startswith("log-"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    disk.before = before
    written.append(1, num_bytes=3900)
    with pytest.raises(OSError, match="Too many open files"):
        written.journal.write_group()
    disk.before = lambda operation, path: None
    assert written.journal.write_group()
    written.write([1], num_bytes=3900)
    written.end()
    names = segments(disk)
    assert [name.first_lsn for name in names] == [1, 3, 3, 4]
    content = disk.content(path_of(names[-1]))
    content[HEADER_BYTES:] = bytes(len(content) - HEADER_BYTES)  # the group of a header is torn
    again = Written(disk)
    assert again.before == written.appended[:3]
    again.write([1])
    again.end()
    assert read(disk)[0] == again.appended


def seeds(first, count):
    """So many of them, of which the first run always."""
    return [pytest.param(seed, marks=[pytest.mark.long] * (seed >= first)) for seed in range(count)]


@pytest.mark.parametrize("seed", seeds(75, 150))
def test_a_loss_of_power_in_mode_fsync_takes_nothing_that_was_acknowledged(seed):
    survive_power_losses("fsync", seed)


@pytest.mark.parametrize("seed", seeds(25, 50))
def test_a_loss_of_power_in_mode_log_leaves_a_prefix_or_an_error(seed):
    survive_power_losses("log", seed)


def survive_power_losses(mode, seed):
    """A machine that loses power at random operations, several times in a row, while groups are written."""
    chooser = random.Random(seed)
    disk, known, safe, term = SimulatedDisk(), [], 0, 0
    for _ in range(6):
        countdown = [chooser.randint(1, 120)]

        def before(operation, path, countdown=countdown):
            countdown[0] -= 1
            if countdown[0] < 0 or (operation in ("pwritev", "sync") and chooser.random() < 0.03):
                raise PowerLoss

        disk.before = before
        written = None
        try:
            written = Written(disk, mode, chooser.choice([1536, 4096]))
            assert written.journal.term > term
            term = written.journal.term
            for _ in range(100):
                if chooser.random() < 0.2:
                    written.journal.segments.prepare_spare()
                written.append(chooser.randint(1, 12))
                written.journal.write_group()
                if chooser.random() < 0.1:
                    lsn = written.acknowledged
                    written.log.recycle(written.journal, (LogBase(f"base-{lsn}", lsn, lsn + 1),))
        except PowerLoss:
            pass
        if written is not None:
            known, safe = written.appended, written.acknowledged
        disk.lose_power(chooser)
        records, end, error = read_or_damage(disk)
        if error is not None:
            assert mode == "log"
            return
        by_lsn = {one[0]: one for one in known}
        assert records == [by_lsn[one[0]] for one in records]
        assert [one[0] for one in records] == list(range(end.position.lsn - len(records), end.position.lsn))
        assert mode == "log" or end.position.lsn > safe


class PowerLoss(BaseException):
    pass
