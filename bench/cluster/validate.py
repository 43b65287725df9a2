"""Real shards and workers on this machine against the simulation of them, at 1, 2, 4 and 8 of each.

Two kinds of work, by the benches' own processes: pulls and pushes one after the other over TCP (4,096 uniform ids,
dim 16), and DLRM (2,048 samples, dim 16, prefetch with staleness 2, Unix sockets). The cores are those of this machine,
shared by all threads, without those that other processes keep busy. Prices are fitted to what is measured just before
(`measured_curves`), as bench/scale.py does it: one worker on 1, 2, 4 and 8 shards, and four workers on one shard. They
are multiplied by one number for each kind of work, the level: what CPU a step of one worker took during the rounds, to
its price (median over the shards), since what else runs on the machine changes meanwhile. What several workers do on
more shards is the simulation's to say.

For each number of shards eight workers are started once; a round measures 1, 2, 4 and 8 of them on every number of
shards, one after the other. Waits for a calm moment before each point, as far as `patience` reaches.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from prices import Prices
from simulate import Cluster, simulate

from embershard.benchmark.conditions import busy_seconds, process_seconds
from embershard.benchmark.fleet import Fleet
from embershard.benchmark.measure import steps_within
from embershard.benchmark.report import points_json
from embershard.benchmark.settings import Lap, Order, PullPush, Train
from embershard.benchmark.sweep import Axis, Sweep, plan, run_sweep
from embershard.deploy.supervisor import LocalShards

BAR = 0.25
COUNTS = (1, 2, 4, 8)
_GROUPS = (range(0, 1), range(1, 2), range(2, 4), range(4, 8))  # ranks that are started together: 1, 2, 4 and 8 of them
_LOOPBACK_US = 10.0
_STEPS = {"ps": 300, "train": 12}
_LEAST_CORES = 0.1
_CALM_SECONDS, _PAUSE = 0.3, 0.7

Settings = PullPush | Train
Curves = Mapping[str, list[Mapping[str, Any]]]


@dataclass
class Point:
    """One number of shards and workers: what its rounds found, and what the simulation says of each."""

    work: str
    shards: int
    workers: int
    steps: int  # of each worker in a round
    measured: list[float] = field(default_factory=list)  # samples or ids per second
    cpu_ms: list[float] = field(default_factory=list)  # of a step, worker and shards together
    others: list[float] = field(default_factory=list)  # cores that other processes kept busy
    simulated: list[float] = field(default_factory=list)  # with the cores that others left in that round
    simulated_cpu_ms: float = 0.0

    @property
    def ratio(self) -> float:
        """Simulated to measured speed, median of the rounds."""
        return statistics.median(ours / real for ours, real in zip(self.simulated, self.measured, strict=True))


def measured_curves(rounds: int, calm: float, patience: float) -> Curves:
    """What prices are fitted to: the curves `messages` and `shards` of bench/scale.py, with fewer steps."""
    small = {"steps": 10, "rounds": rounds}
    base = Sweep(axes=(Axis.MESSAGES, Axis.SHARDS), ids=(256, 4_096, 65_536), **small)
    one_shard = plan(Sweep(axes=(Axis.MESSAGES,), shards=(1,), **small))["messages"]
    wide = Sweep(axes=(Axis.MESSAGES,), dim=64, shards=(1,), ids=(4_096, 65_536), **small)
    planned = {
        **plan(base),
        "messages of dim 64": plan(wide)["messages"],
        "messages of 4 workers": [one.model_copy(update={"workers": 4}) for one in one_shard],
    }
    until, curves = time.monotonic() + patience, dict[str, list[object]]()
    for name, settings in planned.items():
        for one in settings:
            await_calm(calm, until)
            curves.setdefault(name, []).extend(run_sweep({name: [one]}, lambda *_: None)[name])
    return points_json(curves)["curves"]


def settings_of(work: str, shards: int, steps: int) -> Settings:
    """What a worker does; a lap is its steps."""
    if work == "ps":
        return PullPush(transport="tcp", shards=shards, ids=4096, skew=0.0, dim=16, fill=True, steps=steps)
    return Train(shards=shards, prefetch=2, beside_torch=False, steps=steps)


@contextmanager
def groups(settings: Settings) -> Iterator[tuple[list[Fleet], tuple[int, ...]]]:
    """Shards of their own, and workers by the group that they run with; process ids of the shards."""
    with ExitStack() as stack:
        shards = stack.enter_context(LocalShards(settings.shards))
        scheme = "tcp://" if settings.transport == "tcp" else ""
        addresses = tuple(scheme + address for address in shards.addresses)
        fleets = []
        for ranks in _GROUPS:
            orders = [Order(settings=settings, addresses=addresses, rank=rank) for rank in ranks]
            fleets.append(stack.enter_context(Fleet(orders, lambda: shards.failure)))
        yield fleets, shards.pids


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def await_calm(limit: float, until: float) -> None:
    """Wait until other processes keep at most `limit` cores busy, or until a moment of time.monotonic()."""
    while time.monotonic() < until:
        before, start = busy_seconds() or 0.0, time.monotonic()
        time.sleep(_CALM_SECONDS)
        if ((busy_seconds() or 0.0) - before) / (time.monotonic() - start) <= limit:
            return
        time.sleep(_PAUSE)


def measure(fleets: Sequence[Fleet], pids: Sequence[int], point: Point, batch: int) -> tuple[float, float, float]:
    """Samples per second, CPU ms of a step, and cores that others kept busy, of one lap of all these workers."""
    shards, busy, start = process_seconds(pids) or 0.0, busy_seconds() or 0.0, time.monotonic()
    with ThreadPoolExecutor(len(fleets)) as threads:
        laps = [lap for found in threads.map(Fleet.lap, fleets) for lap in found]
    wall, busy_after, shards_after = time.monotonic() - start, busy_seconds() or 0.0, process_seconds(pids) or 0.0
    assert len(laps) == point.workers
    mine = sum(lap.cpu for lap in laps) + shards_after - shards
    others = max(0.0, busy_after - busy - mine) / wall
    return speed(laps) * batch, mine / sum(len(lap.ends) for lap in laps) * 1e3, others


def speed(laps: Sequence[Lap]) -> float:
    """Steps per second of all workers while all of them ran, as the benches count them."""
    begin, end = max(lap.start for lap in laps), min(lap.ends[-1] for lap in laps)
    return sum(steps_within(lap, begin, end) for lap in laps) / (end - begin)


def simulated(point: Point, prices: Prices, others: float, seed: int = 0) -> tuple[float, float]:
    """Samples per second and CPU ms of a step, by the simulation of one lap, without the cores that others had."""
    settings, left = settings_of(point.work, point.shards, point.steps), max(_LEAST_CORES, cores() - others)
    same = {"shards": point.shards, "workers": point.workers, "gbit": 0.0, "latency_us": _LOOPBACK_US, "dim": 16,
            "cores": left, "shards_per_machine": point.shards}  # fmt: skip
    if isinstance(settings, PullPush):
        ids, rows = settings.ids, settings.rows
        unique = rows * (1 - (1 - 1 / rows) ** ids)
        cluster = Cluster(**same, prefetch=-1, compute_ms=0.0, dense=False, batch=ids)
        found = simulate(
            cluster, prices, rows=np.full(point.shards, unique / point.shards), lap=settings.steps, seed=seed
        )
    else:
        cluster = Cluster(
            **same, prefetch=2, compute_ms=prices.compute_ms, cold=True,
            batch=settings.batch,
        )  # fmt: skip
        found = simulate(cluster, prices, lap=settings.steps, seed=seed)
    laps = [Lap(start=0.0, ends=list(ends), cpu=0.0, parts={}, bytes=0, rows=0) for ends in found.ends]
    return speed(laps) * cluster.batch, found.cpu_seconds / (point.workers * settings.steps) * 1e3


def measure_all(works: Sequence[str], rounds: int, *, calm: float, patience: float, quick: bool) -> list[Point]:
    """Measure every point."""
    points: list[Point] = []
    for work in works:
        steps = _STEPS[work] // 2 if quick else _STEPS[work]
        grid = {shards: [Point(work, shards, workers, steps) for workers in COUNTS] for shards in COUNTS}
        with ExitStack() as stack:
            settings = {shards: settings_of(work, shards, steps) for shards in COUNTS}
            started = {shards: stack.enter_context(groups(settings[shards])) for shards in COUNTS}
            until = time.monotonic() + patience
            for number in range(rounds):
                for shards in COUNTS:
                    one_round(grid[shards], started[shards], settings[shards], calm, until)
                print(f"{work}: round {number + 1} of {rounds}, load {os.getloadavg()[0]:.1f}", flush=True)
        points += [point for row in grid.values() for point in row]
    return points


def simulate_all(points: Sequence[Point], prices: Prices) -> dict[str, float]:
    """Simulate every round of every point; by how much prices were higher during the rounds, for each kind of work."""
    levels = {}
    for work in dict.fromkeys(point.work for point in points):
        mine = [point for point in points if point.work == work]
        alone = [point for point in mine if point.workers == 1]
        priced = [simulated(point, prices, 0.0)[1] for point in alone]
        levels[work] = statistics.median(
            cpu / ms for point, ms in zip(alone, priced, strict=True) for cpu in point.cpu_ms
        )
        now = prices.scaled(levels[work])
        for point in mine:
            found = [simulated(point, now, others, seed) for seed, others in enumerate(point.others)]
            point.simulated, cpu_ms = [speed for speed, _ in found], [cpu for _, cpu in found]
            point.simulated_cpu_ms = statistics.median(cpu_ms)
    return levels


def one_round(
    row: Sequence[Point],
    started: tuple[list[Fleet], tuple[int, ...]],
    settings: Settings,
    calm: float,
    until: float,
) -> None:
    """Measure every number of workers on these shards."""
    fleets, pids = started
    batch = settings.ids if isinstance(settings, PullPush) else settings.batch
    for number, point in enumerate(row):
        await_calm(calm, until)
        found = measure(fleets[: number + 1], pids, point, batch)
        for values, value in zip((point.measured, point.cpu_ms, point.others), found, strict=True):
            values.append(value)


def as_json(point: Point) -> Mapping[str, object]:
    """What was measured."""
    return {**vars(point), "simulated": [], "simulated_cpu_ms": 0.0}
