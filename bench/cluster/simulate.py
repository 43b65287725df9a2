"""Simulates a cluster: from prices and assumptions to samples per second, steps' times, and what is busy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import events
import numpy as np
from events import simulate_events
from prices import FLOAT_BYTES, ID_BYTES, Prices, dense_bytes
from state import State, Work, make_state

BATCH = 2048  # samples, for which `compute_ms` is


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What is assumed of a cluster and of the work of a step."""

    shards: int = 64
    workers: int = 256
    gbit: float = 25.0  # of every machine's link, each way; 0: no link
    latency_us: float = 30.0  # one way
    shards_per_machine: int = 8
    cores: float = 0.0  # of one machine that all share; 0: a core for each shard, and enough for workers
    batch: int = BATCH
    dim: int = 64
    compute_ms: float = 10.0  # forward and backward of 2,048 samples, on a GPU
    compute_jitter: float = 0.1  # sigma of its lognormal distribution
    slow_share: float = 0.0  # of the workers that compute slower
    slow_factor: float = 2.0
    staleness: int = -1  # of the job: 0 synchronous, k bounded, -1 asynchronous
    prefetch: int = 2  # its staleness; -1: none
    dense: bool = True  # dense weights on the shards; False: workers reduce their gradients among themselves
    cached: float = 0.0  # share of the rows that a worker need not pull
    row_bytes: float = 1.0  # of rows and gradients, to float32's
    cold: bool = False  # messages cost what they cost where a model trains on the same cores
    queue: int = 1024  # requests that a shard lets wait (QUEUE_REQUESTS), or two of each worker if these are more
    refused: float = 0.5  # cost of a request that is refused or parked, to a message's


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What fails, and when: shards that come back, or a worker, which does not while it is simulated."""

    at: float
    shards: int = 0  # the first ones
    away: float = 0.0  # seconds
    noticed: float = 0.0  # seconds, before which whoever calls them waits
    worker: bool = False
    lease: float = 10.0
    until: float = np.inf  # the end of the simulation


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a simulation found."""

    samples_per_second: float
    p50_ms: float  # of a step
    p99_ms: float
    busy: Mapping[str, float]  # share of the time, of the busiest of its kind
    refused: float  # tries that were refused, of each message
    ends: np.ndarray  # (W, N) seconds: the ends of steps, nan where there was none
    seconds: float  # simulated, after the warm-up
    cpu_seconds: float  # of all threads meanwhile

    @property
    def first(self) -> str:
        """What is busiest."""
        return max(self.busy, key=lambda part: self.busy[part])


def messages(c: Cluster, rows: np.ndarray) -> dict[str, np.ndarray]:
    """What a pull and a push of one worker are to each shard: bytes up and down, rows, (2, S) float64."""
    dense = dense_bytes(c.dim) / c.shards if c.dense else 0.0
    floats = rows * c.dim * FLOAT_BYTES * c.row_bytes
    pulled = rows * (1 - c.cached)
    # a push names the route of its pull in place of its ids
    up = np.stack([pulled * ID_BYTES, floats + dense])
    down = np.stack([floats * (1 - c.cached) + dense, np.zeros_like(rows)])
    return {"up": up, "down": down, "rows": np.stack([pulled, rows])}


def busy_ms(c: Cluster, prices: Prices, rows: np.ndarray) -> dict[str, float]:
    """Milliseconds for which each part is busy in a step, where nobody waits: without queues, the longest is a step."""
    work = make_work(c, prices, rows, steps=0, goal=0, warmup=0)
    per_machine = np.bincount(work.machine, minlength=int(work.machine.max()) + 1)
    fullest = int(np.argmax(per_machine))
    down, up = (x[:, work.machine == fullest].sum() for x in (work.download, work.upload))
    return {
        "worker's compute": float(work.compute.max()) * 1e3,
        "worker's CPU": float(2 * work.call + work.send.sum() + work.receive.sum()) * 1e3,
        "worker's link": float(max(work.upload.sum(), work.download.sum())) * 1e3,
        "shard's CPU": float(work.service.sum(axis=0).max()) * c.workers * 1e3,
        "shard's link": float(max(down, up)) * c.workers * 1e3,
    }


def make_work(
    c: Cluster,
    prices: Prices,
    rows: np.ndarray,  # (S,) of each simulated shard
    *,
    steps: int,
    goal: int,
    warmup: int,
    failure: Failure | None = None,
    share: np.ndarray | None = None,  # (S,) shards that each of them stands for
) -> Work:
    """The events' view of a cluster, of which only these shards are simulated."""
    share = np.ones(len(rows)) if share is None else share
    moved = messages(c, rows)
    byte = 8 / (c.gbit * 1e9) if c.gbit else 0.0
    worker, shard = prices.worker, prices.shard
    more = _more(c, prices)
    half = (worker.message_us + more[0]) / 2e6
    kb = worker.kb_ns / 1e12
    row = worker.row_ns / 1e9 / 2  # half of it by the pull
    pull_share = np.array([[prices.pull_share], [1 - prices.pull_share]])
    far = np.array([[prices.far_pull_ns], [prices.far_push_ns]])
    by_rows = moved["rows"] * (shard.row_ns * pull_share + far) / 1e9
    by_bytes = (moved["up"] + moved["down"]) * shard.kb_ns / 1e12
    compute = np.full(c.workers, c.compute_ms * c.batch / BATCH / 1e3)
    compute[: round(c.slow_share * c.workers)] *= c.slow_factor
    fails = np.zeros(len(rows), np.bool_)
    fails[np.flatnonzero(share == 1)[: failure.shards if failure else 0]] = True
    return Work(
        workers=c.workers,
        shards=len(rows),
        unseen=c.shards - len(rows),
        share=share,
        staleness=c.staleness,
        prefetch=c.prefetch,
        steps=steps,
        goal=goal,
        until=failure.until if failure else np.inf,
        warmup=warmup,
        queue=max(c.queue, 2 * c.workers),
        cores=c.cores,
        latency=c.latency_us / 1e6,
        call=worker.call_us / 1e6,
        send=(half + moved["up"] * kb + moved["rows"] * row) * share,
        receive=(half + moved["down"] * kb) * share,
        upload=moved["up"] * byte,
        download=moved["down"] * byte,
        service=(shard.message_us + more[1]) / 1e6 + by_rows + by_bytes,
        apply=by_rows[1].copy(),
        wake=shard.wake_us / 1e6,
        refusal=c.refused * shard.message_us / 1e6,
        compute=compute,
        compute_sigma=c.compute_jitter,
        service_sigma=prices.service_jitter,
        machine=np.arange(len(rows)) // c.shards_per_machine,
        fails=fails,
        fail_at=failure.at if failure else -1.0,
        back_at=failure.at + failure.away if failure else 0.0,
        noticed_at=failure.at + failure.noticed if failure else 0.0,
        lost_worker=0 if failure and failure.worker else -1,
        lease=failure.lease if failure else 0.0,
    )


def _more(c: Cluster, prices: Prices) -> tuple[float, float]:
    """Microseconds that a message costs the worker and the shard beyond its price, by what else their cores do."""
    if c.cold:
        return prices.cold_worker_us, prices.cold_shard_us
    if c.cores:
        return prices.crowded_worker_us * (1 - 1 / c.workers), prices.crowded_shard_us * (1 - 1 / c.shards)
    return 0.0, 0.0


def sample(rows: np.ndarray, per_machine: int, shards: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Shards that are simulated in place of all, and how many each stands for.

    Whole machines, since shards share a link. One half of them have the fullest shards, which the others wait for, and
    stand for themselves; the other half are drawn, and stand for the rest.
    """
    machines = np.arange(len(rows) // per_machine * per_machine).reshape(-1, per_machine)
    number = max(2, shards // per_machine)
    order = np.argsort(-rows[machines].max(axis=1))
    fullest, rest = order[: number // 2], order[number // 2 :]
    drawn = np.random.default_rng(seed).permutation(rest)[: number - len(fullest)]
    chosen = machines[np.concatenate([fullest, drawn])].reshape(-1)
    own = len(fullest) * per_machine
    stands_for = (len(rows) - own) / (len(chosen) - own)
    share = np.where(np.arange(len(chosen)) < own, 1.0, stands_for)
    order = np.argsort(chosen)  # a worker sends to them in the order of their numbers
    return chosen[order], share[order]


def simulate(
    c: Cluster,
    prices: Prices,
    *,
    rows: np.ndarray | None = None,  # (S,) unique rows of a step on each shard; without them those of training
    sampled: int = 0,  # shards that are simulated; 0: all
    steps: float = 30,  # of each worker in the mean, after the warm-up
    warmup: float = 10,
    lap: int = 0,  # steps of each worker, after which it stops, as the benches' workers do; then there is no warm-up
    failure: Failure | None = None,
    seed: int = 0,
) -> Outcome:
    """Run a cluster for some steps."""
    rows = prices.routed(c.batch, c.shards) if rows is None else rows
    begin = 0.0 if lap else max(busy_ms(c, prices, rows).values()) / 1e3  # workers do not start at one moment
    share = None
    if sampled:
        chosen, share = sample(rows, c.shards_per_machine, sampled, seed)
        rows = rows[chosen]
    goal = int((warmup + steps) * c.workers) if not lap else c.workers * lap + 1
    first = int(warmup * c.workers) if not lap else 0
    work = make_work(c, prices, rows, steps=lap, goal=goal, warmup=first, failure=failure, share=share)
    state = make_state(work, lap or int(4 * (warmup + steps)))
    starts = np.random.default_rng(seed).uniform(0, begin, c.workers)
    simulate_events(work, state, starts, seed)
    return _outcome(c, work, state, first)


def _outcome(c: Cluster, work: Work, state: State, first: int) -> Outcome:
    begin, end = float(state.times[events.TOTAL_FROM]), float(state.times[events.NOW])
    ends = np.where(state.ends > 0, state.ends, np.nan)
    counted = ends[:, 1:] > begin
    with np.errstate(invalid="ignore"):
        durations = np.diff(ends, axis=1)[counted]
    durations = durations[~np.isnan(durations)]
    p50, p99 = np.percentile(durations, [50, 99]) * 1e3 if len(durations) else (np.nan, np.nan)
    seconds, w = end - begin, work.workers
    threads = state.busy - np.maximum(0.0, state.free - end)  # without what is still to be done
    links = state.link_busy - np.maximum(0.0, state.links - end)
    busy = {
        "worker's compute": threads[:w].mean(),
        "worker's CPU": threads[w : 2 * w].mean(),
        "worker's link": max(links[0, :w].mean(), links[1, :w].mean()),
        "shard's CPU": threads[2 * w :].max(),
        "shard's link": max(links[2].max(), links[3].max()),
    }
    return Outcome(
        samples_per_second=(state.counts[events.STEPS] - first) * c.batch / seconds,
        p50_ms=float(p50),
        p99_ms=float(p99),
        busy={part: float(value / seconds) for part, value in busy.items()},
        refused=float(state.counts[events.REFUSED_COUNT] / max(1, state.counts[events.HANDLED_COUNT])),
        ends=ends,
        seconds=seconds,
        cpu_seconds=float(threads.sum()),
    )
