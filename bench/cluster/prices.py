"""Prices of work, fitted to what bench/scale.py measured on one machine (scale.json).

Least squares of relative errors over the pulls and pushes of the curves `messages`: a message's price shows in small
steps, a byte's in large ones. Training tells the rest: what a step computes, and what a message costs more where the
processor's caches are full of other things.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from embershard.benchmark.ids import ZipfIds
from embershard.benchmark.settings import FIELDS, NUM_DENSE, Train
from embershard.proto.routing import Placement, make_route
from embershard.worker.models.ctr.dlrm import DLRM
from embershard.worker.models.recommender import num_dense_parameters

ID_BYTES, FLOAT_BYTES = 8, 4
_FILLED = 10**6  # rows of the tables that the fit's points were measured with
_Z99 = 2.326  # of the normal distribution
_ROUTED = 64  # batches, of which a route's counts are the mean

_TIMES = ("compute_ms", "cold_worker_us", "cold_shard_us", "crowded_worker_us", "crowded_shard_us", "far_pull_ns",
          "far_push_ns")  # fmt: skip

Point = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Price:
    """CPU of one side."""

    call_us: float = 0.0  # of a worker, for a pull or a push of all shards
    message_us: float  # a pull or a push of one shard, with its reply
    wake_us: float = 0.0  # of a shard, for a message that finds it idle: two threads have to be woken
    row_ns: float  # a row that is pulled and pushed
    kb_ns: float
    error: float = 0.0  # of the fit: median of |fitted / measured - 1|

    def scaled(self, factor: float) -> Price:
        """The price of a slower machine."""
        return replace(self, **{name: value * factor for name, value in vars(self).items() if name != "error"})

    def ms(self, *, calls: float = 0, messages: float, wakes: float = 0, rows: float, num_bytes: float) -> float:
        """CPU time of some work."""
        us = self.call_us * calls + self.message_us * messages + self.wake_us * wakes
        return us / 1e3 + (self.row_ns * rows + self.kb_ns * num_bytes / 1e3) / 1e6


def moved_bytes(point: Point) -> float:
    """Bytes of ids, rows and gradients that a step of a point moved, both ways."""
    settings = point["settings"]
    if settings["work"] == "train":
        return float(point["mb_per_second"] * 1e6 / point["steps_per_second"])
    return float(point["rows_per_step"] * (ID_BYTES + 2 * FLOAT_BYTES * settings["dim"]))


def least_squares(work: Sequence[Sequence[float]], ns: Sequence[float]) -> tuple[np.ndarray, float]:
    """Prices in ns, none below zero, of the columns of `work`; and the median of the relative errors."""
    scaled = np.array(work) / np.array(ns)[:, None]
    active = list(range(scaled.shape[1]))
    while True:
        solution = np.linalg.lstsq(scaled[:, active], np.ones(len(ns)), rcond=None)[0]
        if (solution >= 0).all():
            break
        active.pop(int(np.argmin(solution)))
    prices = np.zeros(scaled.shape[1])
    prices[active] = solution
    return prices, float(np.median(np.abs(scaled @ prices - 1)))


def fit_worker(points: Sequence[Point]) -> Price:
    """The price of a worker that does nothing but pull and push."""
    work = [[2e3, 2e3 * p["settings"]["shards"], p["rows_per_step"], moved_bytes(p) / 1e3] for p in points]
    (call, message, row, kb), error = least_squares(work, [p["worker_cpu_ms"] * 1e6 for p in points])
    return Price(call_us=call, message_us=message, row_ns=row, kb_ns=kb, error=error)


def fit_shard(points: Sequence[Point]) -> Price:
    """The price of a shard with a core to itself; as many messages find it idle as it is idle of the time."""
    work, ns = [], []
    for p in points:
        workers = p["settings"]["workers"]
        idle = 1.0 if workers == 1 else max(0.0, 1 - p["shard_cpu_ms"] * p["steps_per_second"] / 1e3)
        work.append([2e3, 2e3 * idle, p["rows_per_step"], moved_bytes(p) / 1e3])
        ns.append(p["shard_cpu_ms"] * 1e6)
    (message, wake, row, kb), error = least_squares(work, ns)
    return Price(message_us=message, wake_us=wake, row_ns=row, kb_ns=kb, error=error)


class Prices:
    """Prices of both sides, and the work of a training step."""

    def __init__(self, measured: Mapping[str, Any], resident: int = 10**8) -> None:
        curves = measured["curves"]
        points = [p for name, curve in curves.items() if name.startswith("messages") for p in curve]
        # a shard with a core to itself, as in a cluster: eight on two cores cost each other their caches
        self.worker = fit_worker([p for p in points if p["settings"]["workers"] == 1])
        self.shard = fit_shard([p for p in points if p["settings"]["shards"] == 1])
        # Processes of a kind that share two cores take each other's caches: so much more for a message that follows
        # one of another process. Of n processes, n - 1 of n do.
        several = [p for p in points if p["settings"]["workers"] > 1]
        self.crowded_worker_us = _more_us(several, "workers", self.worker_ms, "worker")
        several = [p for p in curves["messages"] if p["settings"]["shards"] > 1]
        self.crowded_shard_us = _more_us(several, "shards", self.shard_ms, "shard")
        self._fit_training(curves["shards"])
        rows = {int(count): figures for count, figures in measured["rows"]["curve"].items()}
        large, small = (rows[min(rows, key=lambda n: abs(n - near))] for near in (resident, _FILLED))
        self.far_pull_ns, self.far_push_ns = (large[side] - small[side] for side in ("pull_ns", "push_ns"))
        self.pull_share = small["pull_ns"] / (small["pull_ns"] + small["push_ns"])  # of the price of a row
        first = next(p for p in curves["messages"] if p["settings"]["shards"] == 1)
        self.service_jitter = _sigma(first["parts"]["pull"])
        self.machine = first["conditions"]["machine"]
        self._source = ZipfIds(Train().rows // FIELDS, Train().skew)
        self._routes: dict[tuple[int, int], np.ndarray] = {}

    def _fit_training(self, curve: Sequence[Point]) -> None:
        """What a step of 2,048 samples computes on a CPU core, and what each message costs there beyond its price."""
        messages = np.array([2.0 * p["settings"]["shards"] for p in curve])
        matrix = np.stack([np.ones_like(messages), messages], axis=1)
        left = [p["worker_cpu_ms"] - self.worker_ms(p) for p in curve]
        self.compute_ms, worker_cold = (float(x) for x in np.linalg.lstsq(matrix, np.array(left), rcond=None)[0])
        left = [p["shard_cpu_ms"] - self.shard_ms(p) for p in curve]
        shard_cold = float(np.linalg.lstsq(messages[:, None], np.array(left), rcond=None)[0][0])
        # messages of processes whose caches a model empties meanwhile cost so much more
        self.cold_worker_us, self.cold_shard_us = 1e3 * max(0.0, worker_cold), 1e3 * max(0.0, shard_cold)

    def scaled(self, factor: float) -> Prices:
        """Prices on a machine on which everything takes `factor` times as long."""
        same = copy(self)
        same.worker, same.shard = self.worker.scaled(factor), self.shard.scaled(factor)
        for name in _TIMES:
            setattr(same, name, getattr(self, name) * factor)
        return same

    def worker_ms(self, point: Point) -> float:
        """CPU of a worker's step by the prices, without what it computes."""
        messages = 2 * point["settings"]["shards"]
        return self.worker.ms(calls=2, messages=messages, rows=point["rows_per_step"], num_bytes=moved_bytes(point))

    def shard_ms(self, point: Point) -> float:
        """CPU of all shards for a step of a lone worker by the prices."""
        messages = 2 * point["settings"]["shards"]
        rows, moved = point["rows_per_step"], moved_bytes(point)
        return self.shard.ms(messages=messages, wakes=messages, rows=rows, num_bytes=moved)

    def routed(self, batch: int, shards: int) -> np.ndarray:
        """Unique rows of a batch on each shard, (S,) float64: the mean of the routes that training makes."""
        if (batch, shards) not in self._routes:
            offsets = np.arange(FIELDS) * (Train().rows // FIELDS)
            counts = np.zeros(shards)
            for seed in range(_ROUTED):
                ids = self._source.draw(np.random.default_rng(seed), (batch, FIELDS)) + offsets
                counts += np.diff(make_route(ids.reshape(-1), 1, Placement.even(shards)).splits)
            self._routes[batch, shards] = counts / _ROUTED
        return self._routes[batch, shards]


def dense_bytes(dim: int) -> int:
    """Bytes of the dense weights of the benches' DLRM."""
    return FLOAT_BYTES * num_dense_parameters(DLRM(FIELDS, FIELDS, dim, NUM_DENSE, device="meta"))


def _sigma(part: Mapping[str, float]) -> float:
    """Of a lognormal distribution with these percentiles."""
    return math.log(part["p99_ms"] / part["p50_ms"]) / _Z99


def _more_us(points: Sequence[Point], count: str, priced: Callable[[Point], float], side: str) -> float:
    """Microseconds by which a message after one of another process costs more, the median of some points."""
    more = []
    for p in points:
        after_another = 2 * p["settings"]["shards"] * (1 - 1 / p["settings"][count])
        more.append((p[f"{side}_cpu_ms"] - priced(p)) / after_another)
    return 1e3 * max(0.0, float(np.median(more)))
