"""What a shard's log costs per event: on the thread that applies, and on its own, by checksum, write and the rest.

Events of three sizes: a push of one row, of 26 rows, and one of 1.8 MB in two arrays. They are appended as a shard
does, with a call for each that is safe, while the log's thread writes them; and the parts are timed alone: records are
made (header and checksum), and written to segments that were used before. The rest is the hop: queue, groups, calls.

Figures are CPU time. The folder's file system decides what a write costs: name a folder of it (`--folder`), or have it
in the folder for temporary files.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from embershard.ps.journal.folder import DurabilityMode, LogFolder
from embershard.ps.journal.journal import Journal
from embershard.ps.journal.log_thread import LogThread
from embershard.ps.journal.record import LogRecord, encode_record
from timing import finish, load, machine, median, print_table, thread_seconds

ROUNDS = 5
SIZES = {"1 row": (120, 68), "26 rows": (120, 26 * 68), "1.8 MB": (200, 60_000, 1_800_000)}  # bytes of the pieces
BYTES = 2**28  # of a round, at most
EVENTS = 20_000  # of a round, at most


def events(sizes: tuple[int, ...]) -> list[LogRecord]:
    """Enough of them for a round; their arrays are few, as those of a training job that reuses its own."""
    count = min(EVENTS, BYTES // sum(sizes))
    bodies = [[np.random.default_rng(n).bytes(size) for size in sizes] for n in range(8)]
    return [LogRecord(4, bodies[n % 8], n, n) for n in range(count)]


def opened(folder: Path, mode: DurabilityMode, segment_bytes: int) -> tuple[LogFolder, Journal]:
    log = LogFolder.open(folder, shard=0, num_shards=1)
    list(log.records())
    return log, log.begin(mode, segment_bytes=segment_bytes)


def with_thread(folder: Path, mode: DurabilityMode, records: list[LogRecord]) -> tuple[float, float]:
    """CPU seconds of the thread that appends, and of the log's thread."""
    total = sum(record.num_bytes for record in records)
    log, journal = opened(folder, mode, max(total // 4, 2**21))
    used: list[float] = []
    write_group = journal.write_group

    def timed(*, wait: bool = False) -> bool:
        try:
            return write_group(wait=wait)
        finally:
            used[:] = [time.thread_time()]

    journal.write_group = timed  # type: ignore[method-assign]
    while journal.segments.prepare_spare():
        pass
    thread = LogThread(journal)
    done = threading.Event()

    def append() -> None:
        for record in records:
            while journal.waiting_bytes > 2**25:  # the apply thread would have other work
                done.wait(0.001)
            journal.check_room(record.num_bytes)
            journal.when_safe(journal.append(record), lambda: None)

    appended = thread_seconds(append)
    assert thread.close(120)
    log.close()
    return appended, used[0]


def alone(folder: Path, records: list[LogRecord]) -> tuple[float, float]:
    """CPU seconds of making the records, and of writing them."""
    log, journal = opened(folder, "log", sum(record.num_bytes for record in records) + 4096)
    segments = journal.segments
    segments.prepare_spare()
    segments.rotate(1, records[0].num_bytes)
    groups = [records[start : start + 64] for start in range(0, len(records), 64)]
    made: list[list[bytes | memoryview]] = []

    def make() -> None:
        for group in groups:
            pieces: list[bytes | memoryview] = []
            for index, record in enumerate(group):
                pieces += encode_record(record, index, 1, index, segments.id)
            made.append(pieces)

    def write() -> None:
        for group, pieces in zip(groups, made, strict=True):
            segments.write(pieces, sum(record.num_bytes for record in group))

    seconds = thread_seconds(make), thread_seconds(write)
    segments.close()
    log.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where the log is; by default that of temporary files")
    args = parser.parse_args()
    print(f"{machine()}; {load()}", flush=True)
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in SIZES}
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        for _ in range(ROUNDS):
            for name, sizes in SIZES.items():
                records, found = events(sizes), seconds[name]
                for mode in ("log", "fsync"):
                    appended, written = with_thread(Path(place) / "log", mode, records)  # type: ignore[arg-type]
                    found.setdefault(f"append {mode}", []).append(appended)
                    found.setdefault(f"thread {mode}", []).append(written)
                    shutil.rmtree(Path(place) / "log")
                made, written = alone(Path(place) / "log", records)
                found.setdefault("checksum", []).append(made)
                found.setdefault("write", []).append(written)
                shutil.rmtree(Path(place) / "log")
    columns = ["append log", "checksum", "write", "thread log", "append fsync", "thread fsync"]
    rows, result = [], {}
    for name, sizes in SIZES.items():
        records = events(sizes)
        per_event = {column: median(seconds[name][column]) / len(records) * 1e6 for column in columns}
        megabytes = records[0].num_bytes / 1e6
        rows.append([name, *(per_event[column] for column in columns), per_event["thread log"] / megabytes / 1e3])
        result[name] = {column: round(value, 2) for column, value in per_event.items()}
    print_table(["us of an event", *columns, "thread, ms per MB"], rows)
    finish({"bench": "log", "folder": str(args.folder or tempfile.gettempdir()), "microseconds": result}, [])


if __name__ == "__main__":
    main()
