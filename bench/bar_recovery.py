"""From kill -9 to serving again: at most the start of a shard with nothing to recover + 0.5 s + 2 s per GB of state.

For each size of state and dim, one shard process with `--durability log`: rows with Adagrad are pushed until the tables
have that many bytes, then random rows, until the log that a recovery replays is as long as it gets: until a base has
cut it and it has grown to 95 % of what it was before that, or, where none comes, by as much as the state. The shard is
killed, the files of its log leave the page cache (fdatasync, POSIX_FADV_DONTNEED), and the same command is started: the
time from there to its line that says that it serves. Some rows must be as before. What has nothing to recover is a
shard that was killed after one push, the median of three before each point.

Where the machine has more to do than cores, the CPU time of that process (all of its threads) is held against the bar,
with that of the start and the same allowance; the line says which.

Prints a table and one JSON line; exits 1 above the bar.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

import embershard as es
from embershard.proto.messages import ShardStatus
from embershard.proto.routing import make_route
from embershard.worker.client.client import Client
from timing import disk, finish, load, median, print_table

START_SECONDS, SECONDS_PER_GB = 0.5, 2.0
JUDGED_BY = {"seconds": ("seconds", "limit"), "cpu_seconds": ("cpu_seconds", "cpu_limit")}
ROWS_OF_PUSH = 65_536
TIMEOUT = timedelta(minutes=10)
Rows = npt.NDArray[np.float32]


class ShardCommand:
    """`embershard ps`, and how long it took to serve."""

    def __init__(self, folder: Path | None) -> None:
        command = [sys.executable, "-P", "-m", "embershard.cli", "ps", "--shard", "0", "--of", "1"]
        command += ["--listen", "127.0.0.1:0"]
        command += ["--log-dir", str(folder)] if folder is not None else []
        began = time.monotonic()
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        self.seconds = time.monotonic() - began
        if not line:
            raise SystemExit(f"the shard ended with exit code {self.popen.wait()} before it served")
        self.address = str(json.loads(line)["address"])
        times = psutil.Process(self.popen.pid).cpu_times()
        self.cpu_seconds = times.user + times.system

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()


@contextmanager
def shard(folder: Path | None = None) -> Iterator[ShardCommand]:
    command = ShardCommand(folder)
    try:
        yield command
    finally:
        command.kill()


def connect(command: ShardCommand, spec: es.TableSpec) -> Client:
    client = Client.connect([command.address], timeout=TIMEOUT)
    client.declare(spec)
    return client


class Filler:
    """Pushes to one table: all rows once, then random ones."""

    def __init__(self, client: Client, spec: es.TableSpec, num_rows: int) -> None:
        self._client, self._spec, self._num_rows = client, spec, num_rows
        self._random = np.random.default_rng(0)
        self._gradients = self._random.standard_normal((ROWS_OF_PUSH, spec.dim), np.float32)
        self._clock = 0

    def fill(self) -> None:
        for first in range(0, self._num_rows, ROWS_OF_PUSH):
            self._push(np.arange(first, min(first + ROWS_OF_PUSH, self._num_rows)))

    def lengthen(self, state_bytes: int) -> bool:
        """Push until the log is as long as it gets; whether a base has cut it on the way."""
        first = longest = self.log_bytes
        was_cut = False
        while True:
            for _ in range(8):
                self._push(np.unique(self._random.integers(0, self._num_rows, ROWS_OF_PUSH)))
            now = self.log_bytes
            was_cut |= now < longest
            longest = max(longest, now)
            if (was_cut and now > 0.95 * longest) or (not was_cut and now - first > state_bytes + 2**28):
                return was_cut

    @property
    def status(self) -> ShardStatus:
        return self._client.status()[0]

    @property
    def log_bytes(self) -> int:
        return int(self.status.log_bytes)

    def _push(self, ids: npt.NDArray[np.int64]) -> None:
        route = make_route(ids, self._spec.space_key, self._client.placement)
        self._client.push([(self._spec.name, route, self._gradients[: len(route.ids)])], clock=self._clock)
        self._clock += 1


def sample(client: Client, spec: es.TableSpec, num_rows: int) -> Rows:
    ids = np.unique(np.random.default_rng(1).integers(0, num_rows, 10_000))
    route = make_route(ids, spec.space_key, client.placement)
    return client.pull([(spec.name, route)])[0][route.index]


def drop_from_cache(folder: Path) -> int:
    """Have the files of a folder on the disk alone; their bytes."""
    num_bytes = 0
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDWR)
            try:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                num_bytes += os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
    return num_bytes


def read_rate(folder: Path) -> float:
    """MB per second at which the largest file of a folder comes from the disk; it leaves the page cache again."""
    path = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    began, num_bytes = time.monotonic(), 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(4 * 2**20):
            num_bytes += len(piece)
    seconds = time.monotonic() - began
    drop_from_cache(folder)
    return num_bytes / seconds / 1e6


def table_of(dim: int) -> es.TableSpec:
    return es.TableSpec(name="rows", dim=dim, optimizer=es.Adagrad(lr=0.05), initializer=es.Normal(std=0.1))


def start_with_nothing(folder: Path, dim: int) -> ShardCommand:
    """A start of a shard that was killed after one push."""
    spec = table_of(dim)
    with shard(folder) as running, closing(connect(running, spec)) as client:
        Filler(client, spec, ROWS_OF_PUSH // 64).fill()
        while len(list(folder.rglob("spare-*"))) < 2:
            time.sleep(0.1)
    drop_from_cache(folder)
    with shard(folder) as again:
        pass
    shutil.rmtree(folder)
    return again


def measure(folder: Path, gigabytes: float, dim: int, starts: list[ShardCommand]) -> dict[str, object]:
    spec = table_of(dim)
    num_rows = int(gigabytes * 1e9 / (8 * dim + 16))  # row, state, id and index
    with shard(folder) as running, closing(connect(running, spec)) as client:
        filler = Filler(client, spec, num_rows)
        filler.fill()
        state_bytes = sum(table.bytes for table in filler.status.tables)
        was_cut = filler.lengthen(state_bytes)
        client.flush()  # this client is gone when the shard comes back: it does not send again what was answered early
        status, before = filler.status, sample(client, spec, num_rows)
        running.kill()
    is_busy = os.getloadavg()[0] > (os.cpu_count() or 1)
    on_disk = drop_from_cache(folder)
    rate = read_rate(folder)
    with shard(folder) as again, closing(connect(again, spec)) as client:
        equal = bool(np.array_equal(sample(client, spec, num_rows), before))
        recovered = client.status()[0]
    state = state_bytes / 1e9
    allowed = START_SECONDS + SECONDS_PER_GB * state
    return {
        "dim": dim,
        "state_gb": round(state, 2),
        "rows": num_rows,
        "log_mb": round(status.log_bytes / 1e6),
        "folder_mb": round(on_disk / 1e6),
        "cut_by_a_base": was_cut,
        "disk_mb_per_second": round(rate),
        "seconds": round(again.seconds, 2),
        "limit": round(median([start.seconds for start in starts]) + allowed, 2),
        "cpu_seconds": round(again.cpu_seconds, 2),
        "cpu_limit": round(median([start.cpu_seconds for start in starts]) + allowed, 2),
        "judged_by": "cpu_seconds" if is_busy else "seconds",
        "said_before": round(status.recovery_seconds, 2),
        "term": recovered.term,
        "equal": equal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, nargs="+", default=[0.1, 1.0, 5.0], help="sizes of the state")
    parser.add_argument("--dim", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--folder", type=Path, help="where the log is kept; default: a temporary folder")
    args = parser.parse_args()
    found: list[dict[str, object]] = []
    failures: list[str] = []
    for gigabytes in args.gb:
        for dim in args.dim:
            folder = Path(tempfile.mkdtemp(dir=args.folder))
            try:
                starts = [start_with_nothing(folder / f"start-{number}", dim) for number in range(3)]
                one = measure(folder / "log", gigabytes, dim, starts)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            one = {**one, "empty_start": round(median([start.seconds for start in starts]), 2), "load": load()}
            found.append(one)
            print(one, flush=True)
            name = f"{one['state_gb']} GB of dim {dim}"
            judged, limit = (one[key] for key in JUDGED_BY[str(one["judged_by"])])
            if judged > limit:  # type: ignore[operator]
                failures.append(f"{name}: {judged} {one['judged_by']}, at most {limit}")
            if not one["equal"] or one["term"] != 2:
                failures.append(f"{name}: other rows than before, or term {one['term']}")
    columns = "state_gb dim log_mb folder_mb cut_by_a_base disk_mb_per_second empty_start seconds limit".split()
    columns += ["cpu_seconds", "cpu_limit", "said_before"]
    print_table(columns, [[one[column] for column in columns] for one in found])
    cache = "the log's files were dropped from it"
    finish({"bar": "recovery", "disk": disk(args.folder), "page_cache": cache, "points": found}, failures)


if __name__ == "__main__":
    main()
