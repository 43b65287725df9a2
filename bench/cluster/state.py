"""What the events of a simulated cluster read (Work) and change (State).

Times are seconds. `kind` is 0 for a pull, 1 for a push.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_WINDOW = 64  # clocks that may be open at once
_RING = 8192  # replies, of which the slowest of the shards that are not simulated are drawn


class Work(NamedTuple):
    """What is simulated: sizes, prices in seconds, modes. Arrays of two rows have pulls in the first."""

    workers: int
    shards: int
    unseen: int  # shards that are not simulated
    share: np.ndarray  # (S,) shards that each simulated one stands for, 1: itself alone
    staleness: int  # -1: asynchronous
    prefetch: int  # -1: none, every step waits for its pull and its push
    steps: int  # of each worker, 0: no end
    goal: int  # steps of all together, then it ends
    until: float  # when it ends in any case
    warmup: int  # steps of all together, before anything is counted
    queue: int  # requests that a shard lets wait
    cores: float  # of the one machine of all; 0: every thread has its own
    latency: float
    call: float  # of a client, for a pull or a push of all shards
    send: np.ndarray  # (2, S) float64, of a client
    receive: np.ndarray  # (2, S), of a client
    upload: np.ndarray  # (2, S), of a link
    download: np.ndarray  # (2, S)
    service: np.ndarray  # (2, S), of a shard
    apply: np.ndarray  # (S,), the part of a push that waits for its clock, with staleness 0
    wake: float
    refusal: float  # of a shard, for a request that it cannot take; also for one that it parks
    compute: np.ndarray  # (W,)
    compute_sigma: float
    service_sigma: float
    machine: np.ndarray  # (S,) int64
    fails: np.ndarray  # (S,) bool
    fail_at: float  # < 0: nothing fails
    back_at: float
    noticed_at: float  # before this, who calls a shard that is away waits
    lost_worker: int  # -1: none
    lease: float


class State(NamedTuple):
    """Everything that changes."""

    times: np.ndarray
    counts: np.ndarray  # the last one: members
    free: np.ndarray  # (2 W + S,) when a thread is done with what it has: trainers, clients, shards
    busy: np.ndarray  # (2 W + S,) seconds
    links: np.ndarray  # (4, max(W, M)) when a link is free: workers' up and down, machines' down and up
    link_busy: np.ndarray  # (4, max(W, M)) seconds
    queued: np.ndarray  # (S,)
    extra: np.ndarray  # (S,) seconds of refusals, which delay what is handled next
    is_down: np.ndarray  # (S,) bool
    life: np.ndarray  # (S,) 1 after a failure
    alive: np.ndarray  # (W,) bool
    phase: np.ndarray  # (W,) of the trainer
    done: np.ndarray  # (5, W): pulled, taken, finished, submitted, acknowledged
    calling: np.ndarray  # (2, W) bool
    waiting: np.ndarray  # (2, W) replies that are to come
    again: np.ndarray  # (2, W, S) bool: refused
    tries: np.ndarray  # (2, W)
    pause: np.ndarray  # (2, W) seconds
    called: np.ndarray  # (2, W) when
    took: np.ndarray  # (2, W, S) seconds until the reply was there
    open: np.ndarray  # (S,) clock
    pushed: np.ndarray  # (S, clocks) workers
    clock: np.ndarray  # (S, W) that comes next
    parked: np.ndarray  # (S, W) bool
    num_parked: np.ndarray  # (S,)
    unseen: np.ndarray  # (2, W) shards that are not simulated and have to answer yet
    refusals: np.ndarray  # (2, 2) share of first, and of later tries that shards refuse which stand for others, lately
    mean_took: np.ndarray  # (2,) seconds that they take, lately
    last_pause: np.ndarray  # (2,) seconds that a shard asked for
    seen: np.ndarray  # (2,) replies in the ring, until now
    ring: np.ndarray  # (2, replies) seconds above the mean of the same call
    ordered: np.ndarray  # (2, replies)
    ends: np.ndarray  # (W, N) of steps
    jobs: np.ndarray  # (threads, N) seconds of work that waits for the shared cores
    keys: np.ndarray  # (threads, N)
    lines: np.ndarray  # (2, threads): first and number of jobs
    ends_at: np.ndarray  # (threads,) virtual time at which the first job is done


def make_state(work: Work, max_steps: int) -> State:
    """The beginning: every worker has no rows, and nothing is on its way."""
    w, s = work.workers, work.shards
    links, threads = max(w, int(work.machine.max()) + 1), 2 * w + s
    jobs = 4 * w + 4 * s + 64 if work.cores else 1
    whole = np.int64
    return State(
        np.zeros(4), np.array([0] * 7 + [w], whole), np.zeros(threads), np.zeros(threads), np.zeros((4, links)),
        np.zeros((4, links)), np.zeros(s, whole), np.zeros(s), np.zeros(s, np.bool_), np.zeros(s, whole),
        np.ones(w, np.bool_), np.zeros(w, whole), np.zeros((5, w), whole), np.zeros((2, w), np.bool_),
        np.zeros((2, w), whole), np.zeros((2, w, s), np.bool_), np.zeros((2, w), whole), np.zeros((2, w)),
        np.zeros((2, w)), np.zeros((2, w, s)), np.zeros(s, whole), np.zeros((s, _WINDOW), whole),
        np.zeros((s, w), whole), np.zeros((s, w), np.bool_), np.zeros(s, whole), np.zeros((2, w), whole),
        np.zeros((2, 2)), np.zeros(2), np.zeros(2), np.zeros(2, whole), np.zeros((2, _RING)), np.zeros((2, _RING)),
        np.zeros((w, max_steps)), np.zeros((threads, jobs)), np.zeros((threads, jobs), whole),
        np.zeros((2, threads), whole), np.full(threads, np.inf),
    )  # fmt: skip
