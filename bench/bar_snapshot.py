"""A snapshot of 10 million rows while a worker trains; restores onto 1, 2 and 3 shards; 100 snapshots that were killed.

1. Two shard processes hold 10 million rows of dim 16 with Adagrad. A worker pulls and pushes 8,192 random rows per
   step, a snapshot is taken, and the worker goes on. Measured: the worst and the median pull and push before and during
   it, and the steps per second before, during and after. The worker computes nothing between its calls, so that the
   shards have no idle time in which to write: training that computes loses less.
2. Without training, the snapshot of these shards is restored onto 1, 2 and 3 others: pulls are equal to the bit, and so
   are rows and states, by a digest that takes rows in any order, of a snapshot that these take in turn.
3. With 200,000 rows that every push changes alike, snapshots run while a worker pushes, and at a random moment kill -9
   hits a shard, whose threads write, or the process that asked for the snapshot. After each the latest snapshot must be
   the one before or the new one, and whole: in each shard's part all rows and states are those of one moment.

Prints one JSON line; exits 1 below the bar.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt

import embershard as es
from embershard.deploy.supervisor import LocalShards, RestartPolicy
from embershard.proto.arrays import mix64
from embershard.proto.errors import EmbershardError
from embershard.proto.routing import make_route
from embershard.proto.snapshot.blocks import read_block
from embershard.proto.snapshot.stored import StoredSnapshot, list_snapshots
from embershard.worker.checkpoint.snapshots import SnapshotInfo, begin_snapshot
from embershard.worker.client.client import Client
from timing import finish, machine, print_table

DIM, BATCH, SETTLE_SECONDS = 16, 8192, 3.0
STALL_MS = 50.0  # for which a shard may pause at the snapshot's moment
SAMPLE = 200_000  # ids whose pulls are compared
TABLE = es.TableSpec(name="rows", dim=DIM, optimizer=es.Adagrad(lr=0.05), initializer=es.Uniform())
ALIKE = es.TableSpec(name="alike", dim=DIM, optimizer=es.Adagrad(lr=0.05), initializer=es.Constant(value=0.0))
TIMEOUT = timedelta(seconds=60)
_NEVER = 2**40  # a clock that nobody closes
Rows = npt.NDArray[np.float32]


@contextlib.contextmanager
def clients(local: LocalShards, worker: int = 0) -> Iterator[Client]:
    with contextlib.closing(Client.connect(local.addresses, worker=worker, timeout=TIMEOUT)) as client:
        yield client


def fill(client: Client, num_rows: int) -> None:
    client.declare(TABLE)
    rng = np.random.default_rng(0)
    for first in range(0, num_rows, 65_536):
        ids = np.arange(first, min(first + 65_536, num_rows))
        route = make_route(ids, TABLE.space_key, client.placement)
        client.push([(TABLE.name, route, rng.standard_normal((len(ids), DIM), np.float32))], clock=0)


class Steps:
    """Pulls and pushes of random rows, and when they were done: (moment, pull seconds, push seconds)."""

    def __init__(self, client: Client, num_rows: int) -> None:
        client.declare(TABLE)
        self._client, self._num_rows = client, num_rows
        self._rng = np.random.default_rng(1)
        self._gradients = self._rng.standard_normal((BATCH, DIM), np.float32)
        self.done: list[tuple[float, float, float]] = []

    def run(self, until: float) -> None:
        while time.perf_counter() < until:
            self.step()

    def step(self) -> None:
        route = make_route(self._rng.integers(0, self._num_rows, BATCH), TABLE.space_key, self._client.placement)
        began = time.perf_counter()
        self._client.pull([(TABLE.name, route)], keep=True)
        pulled = time.perf_counter()
        self._client.push([(TABLE.name, route, self._gradients[: len(route.ids)])], clock=0)
        now = time.perf_counter()
        self.done.append((now, pulled - began, now - pulled))

    def between(self, start: float, end: float) -> dict[str, float]:
        part = np.array([step for step in self.done if start <= step[0] <= end])
        pulls, pushes = 1000 * part[:, 1], 1000 * part[:, 2]
        return {
            "steps_per_second": round(len(part) / (end - start), 1),
            "pull_ms": round(float(np.median(pulls)), 2),
            "push_ms": round(float(np.median(pushes)), 2),
            "worst_pull_ms": round(float(pulls.max()), 1),
            "worst_push_ms": round(float(pushes.max()), 1),
        }


def measure_stall(local: LocalShards, num_rows: int, folder: str) -> dict[str, object]:
    taken: list[SnapshotInfo] = []

    def take() -> None:
        with clients(local, 1) as client:
            taken.append(es.take_snapshot(client, folder, "training"))

    with clients(local) as client:
        steps = Steps(client, num_rows)
        steps.run(time.perf_counter() + SETTLE_SECONDS)
        start = time.perf_counter()
        steps.run(start + SETTLE_SECONDS)
        thread = threading.Thread(target=take)
        begun = time.perf_counter()
        thread.start()
        while thread.is_alive():
            steps.step()
        ended = time.perf_counter()
        steps.run(ended + SETTLE_SECONDS)
        phases = {
            "before": steps.between(start, begun),
            "during": steps.between(begun, ended),
            "after": steps.between(ended, ended + SETTLE_SECONDS),
        }
    (info,) = taken
    print_table(["", *phases["before"]], [[name, *figures.values()] for name, figures in phases.items()])
    loss = 1 - phases["during"]["steps_per_second"] / phases["before"]["steps_per_second"]
    return {
        "snapshot_seconds": round(info.seconds, 2),
        "megabytes": round(info.bytes / 1e6),
        "shard_stall_ms": round(info.stall_ms, 2),
        "throughput_loss_while_it_writes": round(loss, 3),
        "training_seconds_lost_per_snapshot": round(loss * info.seconds, 2),
        **phases,
    }


def digest(stored: StoredSnapshot, table: str) -> int:
    """A number of all (id, row, state), whatever their order: a sum of hashes."""
    weights = np.random.default_rng(7).integers(0, 2**63, 4096, np.uint64) | np.uint64(1)
    total = 0
    for ids, rows, state in stored.read_table(table):
        bits = np.concatenate([rows.view(np.uint32), state.view(np.uint32)], 1).astype(np.uint64)
        mixed = mix64((bits @ weights[: bits.shape[1]]).view(np.int64) ^ mix64(ids, 1).view(np.int64), 2)
        total += int(mixed.sum(dtype=np.uint64))
    return total % 2**64


def sample(client: Client, num_rows: int) -> Rows:
    """(SAMPLE, dim): rows of some ids, in their order."""
    client.declare(TABLE)
    ids = np.random.default_rng(3).choice(num_rows, min(SAMPLE, num_rows), replace=False)
    route = make_route(ids, TABLE.space_key, client.placement)
    return client.pull([(TABLE.name, route)])[0][route.index]


def check_restores(local: LocalShards, num_rows: int, folder: str) -> tuple[dict[str, object], list[str]]:
    failures, seconds = [], {}
    with clients(local) as client:
        es.take_snapshot(client, folder, "quiet", keep=1)
        want = sample(client, num_rows)
    local.close()  # their memory is needed
    whole = digest(es.open_snapshot(folder), TABLE.name)
    for shards in (1, 2, 3):
        with LocalShards(shards) as others, clients(others) as client:
            began = time.perf_counter()
            manifest = es.restore_snapshot(client, folder, "quiet")
            seconds[str(shards)] = round(time.perf_counter() - began, 2)
            if manifest.rows != num_rows or not np.array_equal(sample(client, num_rows), want):
                failures.append(f"pulls differ after a restore onto {shards} shards")
            again = f"{folder}-{shards}"
            es.take_snapshot(client, again)
        if digest(es.open_snapshot(again), TABLE.name) != whole:
            failures.append(f"rows or states differ after a restore onto {shards} shards")
        subprocess.run(["rm", "-r", again], check=True)
        print(f"restored onto {shards} shards in {seconds[str(shards)]:.2f} s", flush=True)
    return {"restore_seconds": seconds}, failures


class Pusher:
    """Pushes gradients of one to all rows, again and again, until it is stopped or its shards are gone."""

    def __init__(self, local: LocalShards, num_rows: int) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(local, num_rows))
        self._thread.start()

    def _work(self, local: LocalShards, num_rows: int) -> None:
        with contextlib.suppress(EmbershardError), clients(local, 2) as client:
            client.timeout = timedelta(seconds=1)
            while not self._stop.is_set():
                push_alike(client, num_rows)
                self._stop.wait(0.02)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def push_alike(client: Client, num_rows: int) -> None:
    client.declare(ALIKE)
    route = make_route(np.arange(num_rows), ALIKE.space_key, client.placement)
    client.push([(ALIKE.name, route, np.ones((num_rows, DIM), np.float32))], clock=0)


def torn(folder: str, num_rows: int) -> str:
    """What is wrong with the latest snapshot: empty where each shard's part is of one moment."""
    stored = es.open_snapshot(folder)
    if stored.manifest.rows != num_rows:
        return f"{stored.manifest.rows} rows"
    for part in stored.manifest.shards:
        for table in part.tables:
            blocks = [read_block(stored.storage, stored.folder, file, table) for file in table.files]
            if not all(
                (rows == blocks[0][1][0]).all() and (state == blocks[0][2][0]).all() for _, rows, state in blocks
            ):
                return f"rows of several moments in the part of shard {part.shard}"
    return ""


def one_kill(local: LocalShards, folder: str, name: str, hits_shard: bool, longest: float) -> float:
    """Begin a snapshot, and kill at a random moment of it; seconds into it."""
    command = [sys.executable, "-c", _COORDINATOR, ",".join(local.addresses), folder, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as asking:
        assert asking.stdin is not None
        assert asking.stdout is not None
        asking.stdout.readline()  # it has connected
        asking.stdin.write(b"\n")
        asking.stdin.flush()
        moment = random.uniform(0, longest)
        time.sleep(moment)
        os.kill(random.choice(local.pids) if hits_shard else asking.pid, signal.SIGKILL)
        asking.wait()
    return moment


_COORDINATOR = """
import sys
from datetime import timedelta
from embershard.worker.client.client import Client
from embershard.worker.checkpoint.snapshots import take_snapshot
addresses, folder, name = sys.argv[1:]
client = Client.connect(addresses.split(","), timeout=timedelta(seconds=2))
print(flush=True)
sys.stdin.readline()
take_snapshot(client, folder, name, wait_timeout=timedelta(seconds=5))
"""


def survive_kills(kills: int, num_rows: int, folder: str) -> tuple[dict[str, object], list[str]]:
    failures, finished, hits = [], 0, {"shard": 0, "coordinator": 0}
    policy = RestartPolicy(first_pause=timedelta(0), quick=timedelta(0))
    with LocalShards(2, restart=policy, report=lambda line: None) as local:
        with clients(local) as client:
            push_alike(client, num_rows)
            pusher = Pusher(local, num_rows)  # as in the snapshots to come
            longest = 1.2 * max(es.take_snapshot(client, folder, name).seconds for name in ("first", "second", "k0"))
            pusher.stop()
        before = "k0"
        prune(folder, before)
        for number in range(1, kills + 1):
            name, hits_shard = f"k{number}", number % 2 == 1
            pids = local.pids
            pusher = Pusher(local, num_rows)
            one_kill(local, folder, name, hits_shard, longest)
            pusher.stop()
            hits["shard" if hits_shard else "coordinator"] += 1
            latest = Path(folder, "LATEST").read_text().strip()
            finished += latest == name
            try:
                wrong = "" if latest in (before, name) else f"the latest is {latest}"
                wrong = wrong or torn(folder, num_rows)
                if hits_shard:
                    restore_after(local, pids, folder)
                settle(local, folder)
            except EmbershardError as error:
                wrong = str(error)
            if wrong:
                failures.append(f"kill {number} ({'shard' if hits_shard else 'coordinator'}): {wrong}")
            before = latest
            prune(folder, before)
            if number % 10 == 0:
                print(f"{number} kills, {finished} of these snapshots were whole already", flush=True)
    return {"kills": hits, "whole_in_spite_of_it": finished, "longest_moment_s": round(longest, 2)}, failures


def restore_after(local: LocalShards, pids: tuple[int, ...], folder: str) -> None:
    """Once the shard that was killed serves again, put the latest snapshot into both."""
    while local.pids == pids:
        time.sleep(0.01)
    with clients(local) as client:
        es.restore_snapshot(client, folder, replace_tables=True)


def settle(local: LocalShards, folder: str) -> None:
    """Wait until no shard writes: whoever asked may be dead, and what is removed under a writer would come back."""
    with clients(local) as client:
        begin_snapshot(client, folder, "settled", at_clock=_NEVER).cancel()  # waits for its turn on each shard


def prune(folder: str, latest: str) -> None:
    for name in os.listdir(folder):
        if name not in (latest, "LATEST"):
            subprocess.run(["rm", "-r", str(Path(folder, name))], check=True)
    assert list_snapshots(folder) == [latest]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--kill-rows", type=int, default=200_000)
    parser.add_argument("--folder", type=Path, help="where snapshots go (3 GB).  [default: a temporary folder]")
    args = parser.parse_args()
    random.seed(0)
    print(f"{machine()}; {args.rows:,} rows of dim {DIM}, Adagrad, 2 shards", flush=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        with LocalShards(2) as local:
            with clients(local) as client:
                fill(client, args.rows)
            stall = measure_stall(local, args.rows, f"{place}/large")
            restores, failures = check_restores(local, args.rows, f"{place}/large")
        killed, wrong = survive_kills(args.kills, args.kill_rows, f"{place}/killed") if args.kills else ({}, [])
    failures += wrong
    if float(str(stall["shard_stall_ms"])) > STALL_MS:
        failures.append(f"a shard paused for {stall['shard_stall_ms']} ms, the bar is {STALL_MS:.0f}")
    result = {"rows": args.rows, "dim": DIM, "batch": BATCH, **stall, **restores, **killed}
    finish({"bench": "bar_snapshot", **result, "failures": failures}, failures)


if __name__ == "__main__":
    main()
