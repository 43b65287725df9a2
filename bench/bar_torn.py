"""A shard's log that was cut or damaged gives its longest intact prefix, or an error that names the place. Always.

Logs of both modes, in segments of 8 KiB that were used before, are cut at every byte of their last three records, and
at random bytes anywhere; and one random bit is flipped at a time, in any of their files. After each, all is read:

- a cut, or a flip behind the last record, leaves exactly the records that are whole;
- a flip in a record (or in the header of a segment) is found: LogDamaged with the file, offset and LSN of that record,
  or a log that ends right before it. The latter only where nothing that is intact behind it proves that it was whole:
  in mode `fsync` in the last group, which a loss of power may have torn, in mode `log` in the last record.

Prints one JSON line; exits 1 on any other outcome.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from embershard.proto.errors import LogDamaged
from embershard.ps.journal.disk import LocalDisk
from embershard.ps.journal.folder import DurabilityMode, LogFolder
from embershard.ps.journal.manifest import LogBase, LogManifest, read_manifest
from embershard.ps.journal.reader import LogReader
from embershard.ps.journal.record import HEADER_BYTES, LogRecord
from timing import disk, finish, load, print_table

SEGMENT_BYTES = 8192
RECORDS = 90
LAST = 3  # records that are cut at every byte


@dataclass(frozen=True)
class Span:
    """A record's place in a log."""

    path: Path
    start: int
    end: int
    group: int  # LSN of the first record of its group


class Log:
    """A log on disk, and what was written to it."""

    def __init__(self, folder: Path, mode: DurabilityMode, chooser: random.Random) -> None:
        self.folder, self.mode = folder, mode
        self.bodies: dict[int, bytes] = {}
        opened = LogFolder.open(folder, shard=0, num_shards=1)
        list(opened.records())
        journal = opened.begin(mode, segment_bytes=SEGMENT_BYTES)
        while journal.last_lsn < RECORDS:
            for _ in range(chooser.choice([1, 1, 2, 3, 7])):
                body = chooser.randbytes(chooser.choice([0, 3, 24, 100, 150, 900, 2000]))
                self.bodies[journal.append(LogRecord(4, [body[:10], body[10:]]))] = body
            journal.write_group()
            if journal.last_lsn in range(RECORDS // 2, RECORDS // 2 + 8):
                opened.recycle(journal, (LogBase("base", journal.last_lsn, journal.last_lsn - 3),))
        journal.segments.close()
        opened.close()
        manifest = read_manifest(LocalDisk(), folder)
        assert manifest is not None
        self.manifest: LogManifest = manifest
        self.spans: dict[int, Span] = {}  # by LSN
        for record in LogReader(LocalDisk(), folder, manifest).records():  # from its base on
            header, path = record.header, folder / str(record.segment)
            group = header.lsn - header.in_group
            self.spans[header.lsn] = Span(path, record.offset, record.offset + header.num_bytes, group)
        self.files = sorted(folder.glob("log-*"))
        self.first, self.last = min(self.spans), max(self.spans)
        assert self.last == max(self.bodies)

    def hit(self, path: Path, offset: int) -> int:
        """The LSN of the first record that a change of this byte concerns; last + 1: none."""
        mine = {lsn: span for lsn, span in self.spans.items() if span.path == path}
        if not mine:
            return self.last + 1
        if offset < HEADER_BYTES:
            return min(mine)
        lsns = sorted(mine)
        lsn = lsns[max(0, bisect_right([mine[one].start for one in lsns], offset) - 1)]
        return lsn if mine[lsn].start <= offset < mine[lsn].end else self.last + 1

    def check(self, intact: int, *, may_end: bool) -> str:
        """Read all; an outcome that begins with "wrong" where it is not `intact` records or an error about the next."""
        lsn = self.first
        try:
            reader = LogReader(LocalDisk(), self.folder, self.manifest)
            for record in reader.records():
                if record.header.lsn != lsn or record.body != self.bodies[lsn]:
                    return f"wrong: LSN {record.header.lsn} where {lsn} is due, or another body"
                lsn += 1
        except LogDamaged as error:
            fields = error.fields
            if fields["lsn"] != intact + 1 or not str(fields["path"]).startswith(str(self.folder)):
                return f"wrong: {fields}, LSN {intact + 1} was damaged"
            return "named"
        assert reader.end is not None
        if (lsn - 1, reader.end.position.lsn) != (intact, intact + 1):
            return f"wrong: ends before LSN {lsn} ({reader.end}), {intact} are intact"
        if intact < self.last and not may_end:
            return f"wrong: ends before LSN {lsn}, of which later records prove that it was whole"
        return "whole" if intact == self.last else "prefix"


def cut_everywhere(log: Log, chooser: random.Random, elsewhere: int) -> Counter[str]:
    """Cut the last segment at every byte of its last records, and all segments at some bytes."""
    outcomes: Counter[str] = Counter()
    last = [log.spans[lsn] for lsn in range(log.last - LAST + 1, log.last + 1)]
    places = [(span.path, size) for span in last for size in range(span.start, span.end + 1)]
    for _ in range(elsewhere):
        path = chooser.choice(log.files)
        places.append((path, chooser.randrange(path.stat().st_size)))
    for path, size in places:
        whole = path.read_bytes()
        os.truncate(path, size)
        gone = [lsn for lsn, span in log.spans.items() if span.path == path and span.end > size]
        intact = min(gone, default=log.last + 1) - 1
        is_last = path == log.spans[log.last].path
        outcomes[log.check(intact, may_end=is_last)] += 1
        path.write_bytes(whole)
    return outcomes


def flip(log: Log, chooser: random.Random, count: int) -> Counter[str]:
    """Flip one bit at a time, in any file."""
    outcomes: Counter[str] = Counter()
    last_group = log.spans[log.last].group if log.mode == "fsync" else log.last
    for _ in range(count):
        path = chooser.choice(log.files)
        with path.open("r+b", buffering=0) as file:
            offset = chooser.randrange(path.stat().st_size)
            (byte,) = os.pread(file.fileno(), 1, offset)
            os.pwrite(file.fileno(), bytes([byte ^ 1 << chooser.randrange(8)]), offset)
            hit = log.hit(path, offset)
            outcomes[log.check(hit - 1, may_end=hit >= last_group)] += 1
            os.pwrite(file.fileno(), bytes([byte]), offset)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=100_000)
    parser.add_argument("--logs", type=int, default=10, help="different logs, half of them of each mode")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.monotonic()
    outcomes: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.logs):
            chooser = random.Random(f"{args.seed} {number}")
            mode: DurabilityMode = ("log", "fsync")[number % 2]
            log = Log(Path(folder) / str(number), mode, chooser)
            for what, found in (
                ("cuts", cut_everywhere(log, chooser, args.flips // args.logs // 10)),
                ("flips", flip(log, chooser, args.flips // args.logs)),
            ):
                outcomes[f"{mode} {what}"] = outcomes.get(f"{mode} {what}", Counter()) + found
    columns = ["whole", "prefix", "named"]
    wrong = {what: {text: n for text, n in found.items() if text not in columns} for what, found in outcomes.items()}
    counts = [sum(found.values()) for found in wrong.values()]
    print_table(
        ["", *columns, "wrong"],
        [[what, *(found[c] for c in columns), n] for (what, found), n in zip(outcomes.items(), counts, strict=True)],
    )
    failures = [f"{what}: {n} times {text}" for what, found in wrong.items() for text, n in found.items()]
    failures += [f"{what}: none was {c}" for what, found in outcomes.items() for c in columns if not found[c]]
    result = {
        "bar": "torn",
        "load": load(),
        "disk": disk(),
        "flips": sum(sum(found.values()) for what, found in outcomes.items() if "flips" in what),
        "cuts": sum(sum(found.values()) for what, found in outcomes.items() if "cuts" in what),
        "wrong": sum(counts),
        "outcomes": {what: {c: found[c] for c in columns} for what, found in outcomes.items()},
    }
    finish({**result, "seconds": round(time.monotonic() - began, 1)}, failures)


if __name__ == "__main__":
    main()
