"""Runs a bench: starts shards and workers, lets them measure some rounds, and adds up what they say."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from embershard.benchmark.conditions import MachineConditions, busy_seconds, process_seconds
from embershard.benchmark.fleet import Fleet
from embershard.benchmark.settings import Lap, Order, PullPush, TorchTrain, Train, TransportName
from embershard.deploy.supervisor import LocalShards, ShardSettings
from embershard.proto.errors import EmbershardError
from embershard.proto.transport.addresses import shard_addresses

S = TypeVar("S", PullPush, Train)
_SCHEME = {
    TransportName.STREAM: "",
    TransportName.TCP: "tcp://",
    TransportName.GRPC: "grpc://",
    TransportName.RPC: "rpc://",
}


@dataclass(frozen=True, slots=True)
class Percentiles:
    """A step, or a part of it, over all measured steps of all workers."""

    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Round:
    """All workers measuring at once."""

    laps: list[Lap]
    steps_per_second: float  # of all workers together, while all of them ran
    bytes_per_second: float
    shard_cpu: float | None  # seconds
    other_cores: float | None  # cores that something else kept busy meanwhile

    @property
    def steps(self) -> int:
        """The number of steps of all workers."""
        return sum(len(lap.ends) for lap in self.laps)


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult(Generic[S]):
    """The result of a bench; speeds and costs are medians over rounds."""

    bench: str
    settings: S
    conditions: MachineConditions
    steps_per_second: float
    samples_per_second: float  # `ps`: ids, duplicates included
    rows_per_second: float  # rows pulled, and as many pushed by `ps`
    mb_per_second: float  # ids, rows and gradients, both ways
    rows_per_step: float  # unique
    worker_cpu_ms: float  # per step of one worker, all threads
    shard_cpu_ms: float | None  # per step of one worker, all shards together; None where they are not ours
    other_cores: float | None
    # "step" and what it consists of; in the training thread of worker 0, or as `ps` sees it
    parts: dict[str, Percentiles]
    overlapped: dict[str, Percentiles] = field(default_factory=dict)  # of worker 0's other threads
    torch_samples_per_second: float | None = None
    ratio_to_torch: float | None = None  # median over rounds of samples per second, ours to one torch process's


def measure_pull_push(settings: PullPush) -> BenchResult[PullPush]:
    """Pull and push. ShardFailed, BenchFailed or ShardUnavailable where a process cannot go on."""
    with _serve(settings) as (addresses, pids, watch), _workers(settings, addresses, watch) as fleet:
        conditions = MachineConditions.now()
        rounds = [_round(fleet, pids) for _ in range(settings.rounds)]
    laps = [lap for found in rounds for lap in found.laps]
    steps = [second for lap in laps for second in _durations(lap)]
    parts = {"step": _part(steps)}
    parts |= {name: _part([second for lap in laps for second in lap.parts[name]]) for name in laps[0].parts}
    return _result("ps", settings, conditions, rounds, settings.ids, parts)


def measure_train(settings: Train) -> BenchResult[Train]:
    """Training, and torch in one process in turn with it. Errors as `measure_pull_push`."""
    with _serve(settings) as (addresses, pids, watch), _workers(settings, addresses, watch) as fleet:
        plain = TorchTrain.model_validate({**settings.model_dump(), "work": "torch", "warmup": min(settings.warmup, 5)})
        orders = [Order(settings=plain, addresses=(), rank=0)] if settings.beside_torch else []
        with Fleet(orders, watch) as torch:
            conditions = MachineConditions.now()
            rounds, beside = [], []
            for _ in range(settings.rounds):
                rounds.append(_round(fleet, pids))
                beside += [_round(torch, ()).steps_per_second] if orders else []
    split = rounds[-1].laps[0].split
    groups = {group: {name: Percentiles(p50, p99) for name, (p50, p99, _) in split[group].items()} for group in split}
    parts = {**groups["step"], **groups["parts"]}
    result = _result("train", settings, conditions, rounds, settings.batch, parts)
    if not beside:
        return replace(result, overlapped=groups["overlapped"])
    return replace(
        result,
        overlapped=groups["overlapped"],
        torch_samples_per_second=statistics.median(beside) * settings.batch,
        ratio_to_torch=statistics.median(
            ours.steps_per_second / theirs for ours, theirs in zip(rounds, beside, strict=True)
        ),
    )


@contextmanager
def _serve(
    settings: PullPush | Train,
) -> Iterator[tuple[tuple[str, ...], tuple[int, ...], Callable[[], EmbershardError | None]]]:
    """Addresses of the shards, their process ids where they are ours, and what says that one is gone."""
    if settings.transport is TransportName.LOCAL:
        yield (), (), lambda: None
    elif settings.ps:
        yield tuple(shard_addresses(settings.ps)), (), lambda: None
    else:
        rpc = settings.transport is TransportName.RPC
        options = ShardSettings(rpc=rpc, tls=Path(settings.tls) if settings.tls else None)
        with LocalShards(settings.shards, options) as shards:
            bare = shards.rpc_addresses if rpc else shards.addresses
            addresses = tuple(_SCHEME[settings.transport] + address for address in bare)
            yield addresses, shards.pids, lambda: shards.failure


def _workers(
    settings: PullPush | Train, addresses: tuple[str, ...], watch: Callable[[], EmbershardError | None]
) -> Fleet:
    return Fleet([Order(settings=settings, addresses=addresses, rank=rank) for rank in range(settings.workers)], watch)


def _round(fleet: Fleet, shard_pids: Sequence[int]) -> Round:
    shards, busy, start = process_seconds(shard_pids), busy_seconds(), time.monotonic()
    laps = fleet.lap()
    wall, busy_after, shards_after = time.monotonic() - start, busy_seconds(), process_seconds(shard_pids)
    shard_cpu = None if shards is None or shards_after is None else shards_after - shards
    other = None
    if busy is not None and busy_after is not None:
        mine = sum(lap.cpu for lap in laps) + (shard_cpu or 0.0)
        other = max(0.0, busy_after - busy - mine) / wall
    begin, end = max(lap.start for lap in laps), min(lap.ends[-1] for lap in laps)
    speed = sum(steps_within(lap, begin, end) for lap in laps) / (end - begin)
    bytes_per_step = sum(lap.bytes for lap in laps) / sum(len(lap.ends) for lap in laps)
    return Round(laps, speed, speed * bytes_per_step, shard_cpu, other)


def _durations(lap: Lap) -> list[float]:
    return [float(seconds) for seconds in np.diff([lap.start, *lap.ends])]


def steps_within(lap: Lap, begin: float, end: float) -> float:
    """Steps, and fractions of steps, of one worker while all others ran too."""
    ends = np.array([lap.start, *lap.ends])
    inside = np.clip(ends[1:], begin, end) - np.clip(ends[:-1], begin, end)
    return float((inside / np.diff(ends)).sum())


def _part(seconds: Sequence[float]) -> Percentiles:
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    return Percentiles(float(p50), float(p99))


def _result(
    bench: str,
    settings: S,
    conditions: MachineConditions,
    rounds: list[Round],
    batch: int,
    parts: dict[str, Percentiles],
) -> BenchResult[S]:
    middle = statistics.median
    rows = sum(lap.rows for found in rounds for lap in found.laps) / sum(found.steps for found in rounds)
    speed = middle([found.steps_per_second for found in rounds])
    shard_cpu = [found.shard_cpu / found.steps * 1e3 for found in rounds if found.shard_cpu is not None]
    others = [found.other_cores for found in rounds if found.other_cores is not None]
    return BenchResult(
        bench=bench,
        settings=settings,
        conditions=conditions,
        steps_per_second=speed,
        samples_per_second=speed * batch,
        rows_per_second=speed * rows,
        mb_per_second=middle([found.bytes_per_second for found in rounds]) / 1e6,
        rows_per_step=rows,
        worker_cpu_ms=middle([sum(lap.cpu for lap in found.laps) / found.steps * 1e3 for found in rounds]),
        shard_cpu_ms=None if settings.ps or not shard_cpu else middle(shard_cpu),
        other_cores=middle(others) if others else None,
        parts=parts,
    )
