"""Half an hour of mixed faults: no acknowledged push is lost or doubled, all go on by themselves, and nothing grows.

Full        a shard whose log is on a tmpfs, which is filled up: pulls go on, pushes are told LogStalled and wait, and
            go on once there is room.
Power, log  the machine of two shards with `durability: log` loses power under load, three times, two of them a moment
            after its kernel wrote all that it had. What it had not written is gone, and each worker is told so
            (MemoryLost, or ShardRestarted where the tables are gone too); none goes on as if nothing had happened.
Soak        two shards with `durability: fsync` on an ext4 (chaos_disk.py), two workers behind links of faulty_link.py
            that lose, repeat and delay 1 % of all replies. Every few seconds one of: kill -9 of a shard, or of both;
            SIGSTOP of one for up to 30 s; a link that is cut for up to 10 s; a full disk; a loss of power. Some
            begin while another lasts. After each one all workers must make steps again.

Gradients are small integers, tables begin at 0 and SGD has rate 1, so that minus a row is the exact sum of what was
applied to it, in whatever order. At the end each row must be that of what was pushed, less what topk holds back, and
a replay of the logs must make the same rows.

What grows: each process (the workers' and each shard's) is looked at once a second for its resident memory, threads and
descriptors, and the folder of the logs for the bytes that its files take. Looks of the first fifth, and at a shard that
has served for less than 2 s, are left out. The median of the later half of the others may lie above that of the
earlier half by 3 % and 16 MiB, 1 thread, 4 descriptors; the folder, which rises to each base and falls by it, by
a segment (256 MiB) per shard, and never above three times the rows and 1.25 GiB per shard, less than
docs/durability.md allows.

Disks need root; without it, their faults are left out, and the JSON line says so. Prints one JSON line; exits 1 on
anything else.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

import embershard as es
from chaos import MODES, WORKERS, Job, Machine, Pusher, Rows, job_on, kill, other_rows, shards_with_logs, stop
from chaos_disk import PowerDisk, SmallDisk, own_mounts
from embershard.deploy.supervisor import LocalShards
from embershard.proto.codec.name import CodecName
from embershard.proto.errors import EmbershardError, LogStalled, MemoryLost, ShardRestarted
from embershard.proto.messages import Push, PushToken, TableGradients
from embershard.proto.routing import Placement, make_route
from embershard.proto.transport.addresses import transport_for
from embershard.ps.journal.folder import LogFolder, log_folder
from embershard.ps.recovery import replay
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.worker.client.client import Client
from faulty_link import FaultyLink
from timing import disk, finish, load, median

SHARDS, DIM, BATCH, NUM_IDS = 2, 32, 3000, 50_000
SHARE = 0.01  # of the replies that something happens to
GIB, MIB = 2**30, 2**20
DISK_BYTES, TMPFS_BYTES = 4 * GIB, 700 * MIB
POWER_LOSSES_OF_LOG = 3
LOOK_SECONDS, YOUNG_SECONDS, WARM_UP = 1.0, 2.0, 0.2
SLACK_SHARE, SLACK_BYTES, SLACK_THREADS, SLACK_FILES = 0.03, 16 * MIB, 1, 4
SLACK_FOLDER, MOST_OF_ROWS, MOST_BESIDE_ROWS = 256 * MIB * SHARDS, 3, 1.25 * GIB
Sums = npt.NDArray[np.int32]


class SumPusher(Pusher):
    """A worker whose pushes are whole numbers, and the sum of them."""

    specs = tuple(
        es.TableSpec(
            name=name, dim=DIM, optimizer=es.SGD(lr=1.0), initializer=es.Constant(), push_codec=CodecName.parse(codec)
        )
        for name, codec in (("plain", "none"), ("topk", "topk:0.25"))
    )
    num_ids = NUM_IDS

    def __init__(self, client: Client, mode: str) -> None:
        super().__init__(client, mode)
        self.pushed: dict[str, Sums] = {spec.name: np.zeros((NUM_IDS, DIM), np.int32) for spec in self.specs}

    def step(self, step: int) -> None:
        """Push to all tables; what was pushed counts, also where the push ends with an error."""
        chooser = np.random.default_rng([self.client.worker, step])
        ids = chooser.choice(NUM_IDS, BATCH, replace=False)
        gradients = chooser.integers(-2, 3, (BATCH, DIM), np.int32)
        routes = {spec.name: make_route(ids, spec.space_key, self.client.placement) for spec in self.specs}
        self.client.pull(list(routes.items()), clock=step if self.clocked else None)
        for sums in self.pushed.values():
            sums[ids] += gradients
        parts = [(name, route, gradients[route.index.argsort()].astype(np.float32)) for name, route in routes.items()]
        self.client.push(parts, clock=step)

    def held(self, table: str) -> Sums:
        """What its codec keeps back of a table."""
        sums, residual = np.zeros((NUM_IDS, DIM), np.int32), self.client.compressor.residual(table)
        sums[residual.ids] = (residual.rows * residual.rates[:, None]).astype(np.int32)
        return sums


def wrong_sums(job: Job, rows: Rows) -> list[str]:
    """Tables whose rows are not the sums of what the workers pushed."""
    share = WORKERS if job.mode == "synchronous" else 1  # a clock's gradients are averaged
    problems = []
    for table, got in rows.items():
        want = np.zeros((NUM_IDS, DIM), np.int32)
        for pusher in job.pushers:
            assert isinstance(pusher, SumPusher)
            want -= pusher.pushed[table]
            if table == "topk":
                want += pusher.held(table)
        wrong = int((share * got != want).any(1).sum())
        if wrong:
            problems.append(f"table {table}: {wrong} rows are not the sums of what was pushed")
    return problems


def replay_problems(log_dir: Path, rows: Rows) -> list[str]:
    """What a replay of the logs of shards that have ended makes otherwise."""
    problems, placement = [], Placement.even(SHARDS)
    for index in range(SHARDS):
        folder = LogFolder.existing(log_folder(log_dir, index))
        try:
            shard = Shard(index, placement, OptimizerRegistry())
            replay(shard.core, folder)
        finally:
            folder.close()
        problems += other_rows(shard, placement, SumPusher.specs, rows)
    return problems


def full_disk(folder: Path) -> tuple[dict[str, object], list[str]]:
    """A shard whose disk fills up, and has room again."""
    problems = []
    with (
        SmallDisk.mounted(folder / "small", TMPFS_BYTES) as disk,
        shards_with_logs(1, disk.folder / "logs", "log", lambda line: None) as shards,
        job_on(shards.addresses, "asynchronous", SumPusher) as job,
        closing(Client.connect(shards.addresses, worker=WORKERS, timeout=timedelta(seconds=60))) as looker,
        closing(transport_for(shards.addresses[0])) as transport,
    ):
        for spec in SumPusher.specs:
            looker.declare(spec)
        job.await_steps(5)
        disk.fill()
        while job.moves(2.0):  # until what it had room for is used up
            disk.fill()
        stood_at, pulls = [pusher.acknowledged for pusher in job.pushers], 0
        began = time.monotonic()
        route = make_route(np.arange(NUM_IDS), SumPusher.specs[0].space_key, looker.placement)
        while time.monotonic() - began < 5.0:
            looker.pull([("plain", route)])
            pulls += 1
        gradients = TableGradients("plain", route.ids[:1], np.ones((1, DIM), np.float32), 1.0)
        push = Push(PushToken(WORKERS + 1, 1, 1, 1), 0, looker.placement.epoch, (gradients,))
        told = "nothing"
        try:
            transport.submit(push, timedelta(seconds=20)).result()
        except EmbershardError as error:
            told = type(error).__name__
        if told != LogStalled.__name__:
            problems.append(f"full disk: a push was answered by {told}")
        if stood_at != [pusher.acknowledged for pusher in job.pushers]:
            problems.append("full disk: workers went on")
        disk.free()
        began = time.monotonic()
        job.await_steps(5)
        seconds = time.monotonic() - began
        _, rows = job.finish()
        problems += wrong_sums(job, rows)
    return {"pulls_meanwhile": pulls, "push_was_told": told, "seconds_until_steps": round(seconds, 2)}, problems


def power_of_log(folder: Path, chooser: random.Random) -> tuple[dict[str, object], list[str]]:
    """Losses of power in mode `log`: what every worker was told."""
    told, problems = Counter[str](), []
    for number in range(POWER_LOSSES_OF_LOG):
        with (
            PowerDisk.mounted(folder / f"log-{number}", DISK_BYTES) as disk,
            closing(Machine(SHARDS, disk, "log")) as machine,
            job_on(machine.shards.addresses, "asynchronous", SumPusher) as job,
        ):
            job.await_steps(3)
            if number:
                disk.sync()
                job.await_steps(3)
            time.sleep(chooser.uniform(0.0, 2.0))
            machine.lose_power()
            for pusher in job.pushers:
                pusher.last = pusher.acknowledged + 20  # enough to be told
            for pusher in job.pushers:
                pusher.join(120.0)
            told.update(type(pusher.error).__name__ for pusher in job.pushers)
    if not told[MemoryLost.__name__] or told.keys() - {MemoryLost.__name__, ShardRestarted.__name__}:
        problems.append(f"power, log: workers that lost acknowledged pushes were told {dict(told)}")
    return {"losses": POWER_LOSSES_OF_LOG, "told": dict(told)}, problems


class Watch:
    """Looks at a process that may be another one each time."""

    def __init__(self, name: str, pid: Callable[[], int]) -> None:
        self.name, self._pid = name, pid
        self.looks: list[tuple[float, float, float]] = []  # bytes, threads, descriptors

    def look(self) -> None:
        with suppress(psutil.Error):
            process = psutil.Process(self._pid())
            if process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                if time.time() - process.create_time() > 2 * YOUNG_SECONDS:  # its start takes as long
                    self.looks.append((process.memory_info().rss, process.num_threads(), process.num_fds()))

    def judge(self) -> tuple[dict[str, object], list[str]]:
        """Medians of the earlier and the later half, and what grew."""
        looks = np.array(self.looks[int(len(self.looks) * WARM_UP) :])
        if len(looks) < 4:
            return {"looks": len(looks)}, [f"{self.name}: only {len(looks)} looks"]
        half = len(looks) // 2
        before, after = np.median(looks[:half], 0), np.median(looks[half:], 0)
        allowed = np.array([SLACK_SHARE * before[0] + SLACK_BYTES, SLACK_THREADS, SLACK_FILES])
        failures = [
            f"{self.name}: {what} grew from {first:.0f} to {last:.0f}, by {most:.0f} is allowed"
            for what, first, last, most in zip(("bytes", "threads", "descriptors"), before, after, allowed, strict=True)
            if last - first > most
        ]
        figures: dict[str, object] = {
            "mib": [round(before[0] / MIB, 1), round(after[0] / MIB, 1)],
            "threads": [int(before[1]), int(after[1])],
            "descriptors": [int(before[2]), int(after[2])],
            "looks": len(looks),
        }
        return figures, failures


@dataclass
class FolderWatch:
    """Looks at the bytes that files of a folder take."""

    folder: Path
    looks: list[int] = field(default_factory=list)

    def look(self) -> None:
        total = 0
        for path in self.folder.glob("*/**/*"):
            with suppress(OSError):  # removed meanwhile
                total += path.stat().st_blocks * 512
        if total:  # not while its machine has no power
            self.looks.append(total)

    def judge(self, row_bytes: int) -> tuple[dict[str, object], list[str]]:
        """The most of the earlier and the later half, and what is too much."""
        looks = self.looks[int(len(self.looks) * WARM_UP) :]
        if len(looks) < 4:
            return {"looks": len(looks)}, [f"the folder: only {len(looks)} looks"]
        half = len(looks) // 2
        before, after = max(looks[: half + 1]), max(looks[half:])
        limit = MOST_OF_ROWS * row_bytes + MOST_BESIDE_ROWS * SHARDS
        failures = []
        if after - before > SLACK_FOLDER:
            failures.append(f"the folder grew from {before} to {after} bytes")
        if max(before, after) > limit:
            failures.append(f"the folder took {max(before, after)} bytes, more than {limit:.0f}")
        return {"mib": [before // MIB, after // MIB], "limit_mib": int(limit / MIB)}, failures


class Soak:
    """Faults of one job, until the time is up."""

    def __init__(self, job: Job, links: Sequence[FaultyLink], get: Callable[[], LocalShards], chooser: random.Random):
        self._job, self._links, self._get, self._random = job, links, get, chooser
        self.happened, self.pauses = Counter[str](), list[float]()
        self._faults: dict[str, tuple[int, Callable[[], None]]] = {
            "kill": (8, self._kill),
            "stop": (3, self._stop),
            "cut": (4, self._cut),
        }

    def with_disk(self, machine: Machine, disk: PowerDisk) -> None:
        """Have the faults of disks too."""
        self._faults["full disk"] = (2, lambda: self._fill(disk))
        self._faults["power"] = (3, machine.lose_power)

    def run(self, seconds: float) -> None:
        """Faults in turn, and steps after each."""
        end = time.monotonic() + seconds
        weights = [weight for weight, _ in self._faults.values()]
        while time.monotonic() < end:
            time.sleep(self._random.uniform(0.0, 4.0))
            (name,) = self._random.choices(list(self._faults), weights)
            self.happened[name] += 1
            began = time.monotonic()
            also = threading.Timer(self._random.uniform(0.1, 2.0), self._also_kill, (name,))
            if name not in ("power", "kill") and self._random.random() < 0.4:
                also.start()
            self._faults[name][1]()
            also.cancel()
            lasted = time.monotonic() - began
            self._job.await_steps(2)
            self.pauses.append(time.monotonic() - began - lasted)
            print(f"{name}: {lasted:.1f} s, steps {self.pauses[-1]:.1f} s later", flush=True)

    def _also_kill(self, name: str) -> None:
        self.happened[f"kill while {name}"] += kill(self._get(), self._random.randrange(SHARDS))

    def _kill(self) -> None:
        both = self._random.random() < 0.3
        for index in range(SHARDS) if both else [self._random.randrange(SHARDS)]:
            kill(self._get(), index)

    def _stop(self) -> None:
        long = not self.happened["stop of 30 s"] or self._random.random() < 0.2
        self.happened["stop of 30 s"] += long
        stop(self._get(), self._random.randrange(SHARDS), 30.0 if long else self._random.uniform(0.5, 8.0))

    def _cut(self) -> None:
        link = self._random.choice(self._links)
        link.cut()
        time.sleep(self._random.uniform(0.1, 10.0))
        link.mend()

    def _fill(self, disk: PowerDisk) -> None:
        disk.fill()
        time.sleep(self._random.uniform(0.5, 6.0))
        disk.free()


@contextmanager
def every(seconds: float, look: Callable[[], None]) -> Iterator[None]:
    """Call again and again, in a thread, until the block ends."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(seconds):
            look()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def soak(
    folder: Path, minutes: float, mode: str, with_disks: bool, chooser: random.Random
) -> tuple[dict[str, object], list[str]]:
    """The mixed faults; their figures, and what was wrong."""
    with ExitStack() as stack:
        if with_disks:
            disk = stack.enter_context(PowerDisk.mounted(folder / "disk", DISK_BYTES))
            machine = stack.enter_context(closing(Machine(SHARDS, disk, "fsync")))
            log_dir, get = machine.log_dir, lambda: machine.shards
        else:
            log_dir = folder / "logs"
            shards = stack.enter_context(shards_with_logs(SHARDS, log_dir, "fsync", lambda line: None))
            get = lambda: shards  # noqa: E731
        watches = [Watch("workers", os.getpid)]
        watches += [Watch(f"shard {index}", lambda index=index: get().pids[index]) for index in range(SHARDS)]
        folder_watch = FolderWatch(log_dir)

        def look() -> None:
            for watch in watches:
                watch.look()
            folder_watch.look()

        links = [FaultyLink(address, SHARE, index) for index, address in enumerate(get().addresses)]
        addresses = [stack.enter_context(link.serving()) for link in links]
        with job_on(addresses, mode, SumPusher) as job:
            faults = Soak(job, links, get, chooser)
            if with_disks:
                faults.with_disk(machine, disk)
            with every(LOOK_SECONDS, look):
                faults.run(60 * minutes)
            steps, rows = job.finish()
            problems = wrong_sums(job, rows)
            status = job.pushers[0].client.status()
        get().close()
        problems += replay_problems(log_dir, rows)
    looked: dict[str, object] = {}
    for watch in watches:
        looked[watch.name], grown = watch.judge()
        problems += grown
    row_bytes = sum(table.bytes for shard in status for table in shard.tables)
    looked["folder"], grown = folder_watch.judge(row_bytes)
    problems += grown
    return {
        "minutes": minutes,
        "mode": mode,
        "steps": steps,
        "faults": dict(faults.happened),
        "replies": dict(sum((link.happened for link in links), Counter[str]())),
        "seconds_until_steps": {"median": round(median(faults.pauses), 2), "worst": round(max(faults.pauses), 2)},
        "base_lsn": [shard.base_lsn for shard in status],
        **looked,
    }, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of mixed faults")
    parser.add_argument("--mode", choices=list(MODES), default="bounded")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["full", "power", "soak"])
    parser.add_argument("--folder", type=Path, help="where the disks' files are; default: a temporary folder")
    args = parser.parse_args()
    with_disks = own_mounts()
    chooser, found, problems = random.Random(args.seed), dict[str, object](), list[str]()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        if with_disks and args.only in (None, "full"):
            found["full"], wrong = full_disk(folder)
            problems += wrong
            print(found["full"], wrong, flush=True)
        if with_disks and args.only in (None, "power"):
            found["power"], wrong = power_of_log(folder, chooser)
            problems += wrong
            print(found["power"], wrong, flush=True)
        if args.only in (None, "soak"):
            found["soak"], wrong = soak(folder, args.minutes, args.mode, with_disks, chooser)
            problems += wrong
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    left_out = [] if with_disks else ["full disks", "losses of power"]
    where = disk(args.folder)
    finish({"bar": "soak", "load": load(), "disk": where, "seed": args.seed, "left_out": left_out, **found}, problems)


if __name__ == "__main__":
    main()
