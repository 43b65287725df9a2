"""What an increment of a snapshot saves, what it takes of training, and what a push pays for the shard to know changes.

1. Bytes and training. DLRM of Criteo's shape (26 features, Zipf ids of exponent 1.15, batches of 2,048) trains on two
   shard processes that hold a row for every id, and an increment is taken for every `--steps` steps. What it adds is
   the time of `--round` steps during which it is written, against as many without; these come in pairs, either first
   in turn. The steps between pairs push the ids of new batches without the model, for time's sake: an increment has
   the rows that all `--steps` changed. The share is what it adds, of the time of so many steps of training. The bar
   is on wall time, which other work disturbs; CPU time, of the worker and the shards with all their threads, is
   printed beside it: about what training loses where no core has time left. The folder's file system decides what a
   write costs: name a folder of it (`--folder`).
2. Bitmap. Pushes of Zipf ids to a table with Adagrad, in turn with and without the bits that say which rows changed;
   CPU time of the thread.
3. Restore. The last chain and a full snapshot of the same rows onto one shard in this process, in turn: CPU time.

Medians over pairs, with the 95 % interval of the median. Bars: an increment has at most 1/6 of a full one's bytes,
takes at most 1 % of training, and the bits cost at most 2 % of a push. Prints one JSON line; exits 1 below a bar.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from bar_log import interval, take_priority
from embershard.benchmark.conditions import process_seconds
from embershard.benchmark.dlrm import LR, Batch, make_model
from embershard.benchmark.ids import ZipfIds
from embershard.benchmark.settings import FIELDS, NUM_DENSE, Train
from embershard.deploy.supervisor import LocalShards
from embershard.local_shards import local
from embershard.proto.arrays import Ids
from embershard.proto.routing import make_route
from embershard.proto.spec import Adagrad, TableSpec, Uniform
from embershard.ps.table.changes import ImageMark
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Table
from embershard.worker.checkpoint.snapshots import (
    MOST_SHARE,
    SnapshotInfo,
    begin_snapshot,
    restore_snapshot,
    take_snapshot,
)
from embershard.worker.nn.wrap import wrap
from embershard.worker.session.connect import connect
from embershard.worker.session.session import Session
from timing import disk, finish, load, machine, median, print_table, thread_seconds

BYTES_BAR, TRAINING_BAR, BITMAP_BAR = 1 / 6, 0.01, 0.02
SHARDS, PUSH_IDS, PUSHES, RESTORES = 2, 32_768, 1000, 2


class Round(NamedTuple):
    """What some steps took, and the snapshot that began with them."""

    cpu: float
    wall: float
    snapshot: SnapshotInfo | None


class Training:
    """DLRM on shards that hold a row for every id."""

    def __init__(self, session: Session, pids: Sequence[int], rows: int, folder: str) -> None:
        self._settings, self._pids, self._folder = Train(rows=rows, shards=SHARDS), [os.getpid(), *pids], folder
        self._rng, self._taken = np.random.default_rng(0), 0
        self._source = ZipfIds(rows // FIELDS, self._settings.skew)
        self.session = session
        self._model = wrap(make_model(self._settings, "meta"), session, optimizer=Adagrad(lr=LR), prefix="bench/")
        self._train(self._batches(2))
        (table,) = (one for one in session.tables if one.spec.dim == self._settings.dim and one.spec.id_space)
        self.table = table.spec

    def fill(self) -> None:
        """A row for every id."""
        client, dim = self.session.client, self.table.dim
        for first in range(0, self._settings.rows, 65_536):
            ids = np.arange(first, min(first + 65_536, self._settings.rows))
            route = make_route(ids, self.table.space_key, client.placement)
            client.push([(self.table.name, route, np.full((len(ids), dim), 1e-3, np.float32))], clock=0)

    def push_ids(self, steps: int) -> None:
        """The pushes of so many steps, without the model: they change no row's value, and are changes to the shard."""
        client, none = self.session.client, np.zeros((FIELDS * self._settings.batch, self.table.dim), np.float32)
        for _ in range(steps):
            route = make_route(self._draw().ravel(), self.table.space_key, client.placement)
            client.push([(self.table.name, route, none[: len(route.ids)])], clock=0)

    def take(self) -> SnapshotInfo:
        self._taken += 1
        return take_snapshot(self.session.client, self._folder, f"s{self._taken}", incremental=True, keep=1)

    def round(self, steps: int, *, snapshot: bool) -> Round:
        batches, taken = self._batches(steps), []
        cpu, wall = self._cpu(), time.perf_counter()
        thread = self._begin(taken) if snapshot else None
        self._train(batches)
        if thread is not None:
            thread.join()
        return Round(self._cpu() - cpu, time.perf_counter() - wall, taken[0] if taken else None)

    def _begin(self, taken: list[SnapshotInfo]) -> threading.Thread:
        self._taken += 1
        running = begin_snapshot(self.session.client, self._folder, f"s{self._taken}", incremental=True)
        thread = threading.Thread(target=lambda: taken.append(running.finish(keep=1)))
        thread.start()
        return thread

    def _cpu(self) -> float:
        seconds = process_seconds(self._pids)
        assert seconds is not None, "the system does not tell the CPU time of processes"
        return seconds

    def _draw(self) -> Ids:
        per_field = self._settings.rows // FIELDS
        return self._source.draw(self._rng, (self._settings.batch, FIELDS)) + np.arange(FIELDS) * per_field

    def _batches(self, count: int) -> list[Batch]:
        size = self._settings.batch
        return [
            (
                torch.from_numpy(self._draw()),
                torch.from_numpy(self._rng.standard_normal((size, NUM_DENSE), np.float32)),
                torch.from_numpy((self._rng.random(size) < 0.25).astype(np.float32)),
            )
            for _ in range(count)
        ]

    def _train(self, batches: Sequence[Batch]) -> None:
        for ids, dense, labels in self.session.prefetch(iter(batches), staleness=0):
            loss = binary_cross_entropy_with_logits(self._model(ids, dense), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            self.session.step()
        self.session.flush()


def measure_training(training: Training, steps: int, of_round: int, pairs: int) -> dict[str, Any]:
    """Pairs of rounds, the one with the snapshot first and last in turn."""
    full = training.take().bytes
    sizes: list[float] = []
    chain = 0.0  # bytes of its increments, of a full one's
    added: list[Round] = []
    plain: list[Round] = []
    while len(added) < pairs:
        if sizes and chain + max(sizes) > MOST_SHARE:  # not in a round
            training.take()
            chain = 0.0
        training.push_ids(steps - 2 * of_round)
        order = [False, True] if len(plain) % 2 else [True, False]
        pair = {one: training.round(of_round, snapshot=one) for one in order}
        taken, other = pair[True].snapshot, pair[False]
        assert taken is not None
        plain.append(other)
        if not taken.parent:
            chain = 0.0
            continue
        sizes.append(taken.bytes / full)
        chain += sizes[-1]
        added.append(Round(pair[True].cpu - other.cpu, pair[True].wall - other.wall, taken))
        print(
            f"{len(added)}: {taken.bytes / 1e6:,.0f} MB in {taken.seconds:.1f} s, adds {added[-1].cpu:.2f} s CPU and "
            f"{added[-1].wall:+.2f} s to {other.cpu:.2f} and {other.wall:.2f} of {of_round} steps; {load()}",
            flush=True,
        )
    rounds = steps / of_round
    cpu, wall = rounds * median([one.cpu for one in plain]), rounds * median([one.wall for one in plain])
    shares = {"cpu": [one.cpu / cpu for one in added], "wall": [one.wall / wall for one in added]}
    return {
        "steps": steps,
        "pairs": len(added),
        "full_megabytes": round(full / 1e6),
        "bytes_of_full": round(median(sizes), 4),
        "bytes_of_full_at_most": round(max(sizes), 4),
        "cpu_seconds_added": round(median([one.cpu for one in added]), 3),
        "cpu_seconds_of_steps": round(cpu, 2),
        "wall_seconds_of_steps": round(wall, 2),
        **{f"{name}_share": round(median(found), 5) for name, found in shares.items()},
        **{f"{name}_share_interval": [round(value, 5) for value in interval(found)] for name, found in shares.items()},
    }


def measure_bitmap(rows: int) -> dict[str, Any]:
    """Pushes to one table, in turn with and without the bits."""
    spec = TableSpec(name="rows", dim=16, optimizer=Adagrad(lr=0.05), initializer=Uniform())
    table, rng = Table(spec, OptimizerRegistry().find(spec.optimizer)), np.random.default_rng(0)
    source = ZipfIds(rows, 1.15)
    gradients = rng.standard_normal((PUSH_IDS, spec.dim), np.float32)
    for first in range(0, rows, PUSH_IDS):
        ids = np.arange(first, min(first + PUSH_IDS, rows))
        table.apply(ids, gradients[: len(ids)])
    without = table._store
    table.mark("bench", 0)
    stores = {"with": table._store, "without": without}
    ratios, nanoseconds = [], {name: [] for name in stores}
    for _ in range(PUSHES):
        found = dict.fromkeys(stores, 0.0)
        for name in ("with", "without", "without", "with"):
            table._store = stores[name]
            ids = np.unique(source.draw(rng, (PUSH_IDS,)))
            rows_gradients = gradients[: len(ids)]
            found[name] += thread_seconds(lambda: table.apply(ids, rows_gradients)) / len(ids) * 5e8  # noqa: B023
        for name, value in found.items():
            nanoseconds[name].append(value)
        ratios.append(found["with"] / found["without"] - 1)
    table._store = stores["with"]
    changed = table.changed_since("bench", 0)
    assert isinstance(changed, ImageMark)
    assert np.unpackbits(changed.bits).any()
    return {
        "pushes": 4 * PUSHES,
        "ns_per_row": {name: round(median(found), 2) for name, found in nanoseconds.items()},
        "added": round(median(ratios), 5),
        "added_interval": [round(value, 5) for value in interval(ratios)],
    }


def measure_restore(training: Training, folder: str, full_folder: str) -> dict[str, Any]:
    """CPU seconds to restore a chain, and a full snapshot of the same rows."""
    client = training.session.client
    chain = take_snapshot(client, folder, "last", incremental=True)
    full = take_snapshot(client, full_folder, "last")
    seconds: dict[str, list[float]] = {}
    for _ in range(RESTORES):
        for name, url in (("chain", folder), ("full", full_folder)):
            session = local(1)
            began = time.process_time()
            restore_snapshot(session.client, url)
            seconds.setdefault(name, []).append(time.process_time() - began)
            session.close()
    return {
        "increment": bool(chain.parent),
        "rows": full.rows,
        **{f"{name}_cpu_seconds": round(median(found), 2) for name, found in seconds.items()},
    }


@contextlib.contextmanager
def trained(rows: int, folder: str, *, priority: bool) -> Iterator[Training]:
    with LocalShards(SHARDS) as shards, contextlib.closing(connect(shards.addresses)) as session:
        if priority:
            take_priority(shards.pids)
        training = Training(session, shards.pids, rows, folder)
        training.fill()
        yield training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=15_600_000)
    parser.add_argument("--steps", type=int, default=500, help="from one increment to the next")
    parser.add_argument("--round", type=int, default=12, help="steps of a round")
    parser.add_argument("--pairs", type=int, default=20, help="of rounds with and without an increment")
    parser.add_argument("--priority", action="store_true", help="run before all others on a busy machine (root)")
    parser.add_argument("--folder", help="where the snapshots are; by default that of temporary files")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.priority:
        with contextlib.suppress(PermissionError):  # a session of its own, unless it leads one
            os.setsid()
        take_priority([os.getpid()])
    where = disk(args.folder)
    print(f"{machine()}; {load()}; {where}; {args.rows:,} rows of dim 16", flush=True)
    bitmap = measure_bitmap(args.rows // 10)
    print(f"bitmap: {bitmap}", flush=True)
    with (
        tempfile.TemporaryDirectory(dir=args.folder) as place,
        trained(args.rows, f"{place}/chain", priority=args.priority) as training,
    ):
        of_training = measure_training(training, args.steps, args.round, args.pairs)
        restored = measure_restore(training, f"{place}/chain", f"{place}/full")
    figures = [
        ("bytes of an increment / a full one", of_training["bytes_of_full"], BYTES_BAR),
        ("time that it adds to training", of_training["wall_share"], TRAINING_BAR),
        ("what bits of changes add to a push", bitmap["added"], BITMAP_BAR),
    ]
    print(f"CPU time that it adds to training: {of_training['cpu_share']:.2%}, {of_training['cpu_share_interval']}")
    print_table(["", "median", "bar"], [[what, f"{got:.2%}", f"{bar:.2%}"] for what, got, bar in figures])
    failures = [f"{what}: {got:.2%}, the bar is {bar:.2%}" for what, got, bar in figures if got > bar]
    result = {"training": of_training, "bitmap": bitmap, "restore": restored}
    finish(
        {"bench": "increment", "rows": args.rows, "priority": args.priority, "load": load(), "disk": where, **result},
        failures,
    )


if __name__ == "__main__":
    main()
