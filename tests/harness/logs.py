"""Logs for tests: what is appended to them, and what is read back."""

import itertools
import random
from pathlib import Path

from embershard.proto.errors import LogDamaged
from embershard.ps.journal.folder import LogFolder
from embershard.ps.journal.journal import Journal
from embershard.ps.journal.record import LogRecord
from harness.simulated_disk import SimulatedDisk

FOLDER = Path("/logs/shard-0")


def record(number, num_bytes=None):
    """A record that shows its number; its body is in pieces, of sizes that are no multiples of 8."""
    chooser = random.Random(number)
    size = chooser.choice([0, 1, 5, 8, 40, 130, 700]) if num_bytes is None else num_bytes
    body = chooser.randbytes(size)
    pieces = [body[: size // 3], b"", bytearray(body[size // 3 :])]
    return LogRecord(number % 5 + 1, pieces, number, 2 * number, 3 * number, number % 7, number % 3, number % 256)


def plain(record, lsn, term):
    """What a reader must find of a record."""
    return (lsn, term, record.kind, record.flags, record.applied, record.skipped, record.done, record.version,
            record.clock, b"".join(record.body))  # fmt: skip


def found(logged):
    """What a reader found."""
    h = logged.header
    return (h.lsn, h.term, h.kind, h.flags, h.applied, h.skipped, h.done, h.version, h.clock, bytes(logged.body))


def ids():
    """Ids of segments, the same in every run."""
    chooser = random.Random(7)
    return lambda: chooser.getrandbits(64) | 1


def open_log(disk, folder=FOLDER, **options) -> LogFolder:
    options = {"shard": 0, "num_shards": 1, "disk": disk, **options}
    return LogFolder.open(folder, **options)


def disk_of(stored: Path) -> SimulatedDisk:
    """A disk with a copy of a stored folder of a log, at FOLDER."""
    disk = SimulatedDisk()
    for path in sorted(stored.rglob("*")):
        if path.is_file():
            target = FOLDER / path.relative_to(stored)
            disk.make_folder(target.parent)
            disk.open(target, write=True, create=True).pwritev([path.read_bytes()], 0)
    return disk


def begin(log: LogFolder, mode="fsync", segment_bytes=4096) -> Journal:
    """Read a log to its end, and go on behind it."""
    list(log.records())
    return log.begin(mode, segment_bytes=segment_bytes)


class Written:
    """Appends numbered records to a log on a disk, and knows what was acknowledged."""

    def __init__(self, disk, mode="fsync", segment_bytes=4096, folder=FOLDER, **options):
        self.disk = disk
        self.log = open_log(disk, folder, **options)
        self.before = [found(one) for one in self.log.records()]
        self.journal = self.log.begin(mode, segment_bytes=segment_bytes)
        self.appended = list(self.before)  # all that a reader may find
        self.acknowledged = self.journal.last_lsn
        self._numbers = itertools.count(self.acknowledged + 1)

    def append(self, count=1, num_bytes=None):
        for number in itertools.islice(self._numbers, count):
            one = record(number, num_bytes)
            lsn = self.journal.append(one)
            assert lsn == number
            self.appended.append(plain(one, lsn, self.journal.term))
            self.journal.when_safe(lsn, lambda lsn=lsn: setattr(self, "acknowledged", lsn))

    def write(self, groups=(1,), num_bytes=None):
        """Append and write groups of so many records."""
        for count in groups:
            self.append(count, num_bytes)
            assert self.journal.write_group()

    def end(self):
        self.journal.segments.close()
        self.log.close()


def read(disk, folder=FOLDER, **options):
    """All that a reader finds, and how the log ends."""
    log = open_log(disk, folder, **options)
    try:
        return [found(one) for one in log.records()], log.reader.end
    finally:
        log.close()


def read_or_damage(disk):
    """All that a reader finds, how the log ends, and the error where it is damaged."""
    try:
        return *read(disk), None
    except LogDamaged as error:
        return [], None, error
