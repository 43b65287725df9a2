"""What a failure costs a cluster, in seconds of its full speed: simulated, or counted where a job has to go back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from prices import Prices
from simulate import Cluster, Failure, simulate

_BEFORE, _AFTER = 2.0, 6.0  # seconds that are simulated before a failure, and after shards are back
_SAMPLED = 16  # shards


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """How long things take: what docs/durability.md and docs/snapshots.md measured, and assumptions."""

    resident: int = 10**8  # rows of a shard
    start_s: float = 1.4  # of a shard with an empty log, from its end until it serves (bar-recovery)
    read_s_per_gb: float = 1.5  # of rows with their state, dim 64 (bar-recovery)
    reboot_s: float = 120.0  # of a machine; assumed
    disk_gb_per_s: float = 2.0  # of a machine, which its shards share; assumed
    noticed_s: float = 60.0  # until a worker gives a machine up that does not answer: its call's timeout
    lease_s: float = 10.0
    restart_s: float = 30.0  # from the end of a job's processes until they train again; bar-recover's bar
    restore_s_per_gb: float = 4.3  # of a shard: 1.4 GB onto 3 shards in 2.0 s (bar-snapshot)
    checkpoint_minutes: float = 10.0  # between two; assumed

    def gigabytes(self, dim: int) -> float:
        """Of a shard's rows with row-wise Adagrad: 27 bytes of each are not its values (bar-scale)."""
        return self.resident * (4 * dim + 27) / 1e9


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one failure costs."""

    what: str
    mode: str
    away_s: float  # for which a part is away
    lost_s: float  # of the whole cluster's work
    samples: float


def mode_name(c: Cluster) -> str:
    """How workers wait for each other."""
    return "asynchronous" if c.staleness < 0 else "synchronous" if c.staleness == 0 else f"staleness {c.staleness}"


def in_mode(c: Cluster, staleness: int) -> Cluster:
    """The same cluster in another mode; a worker runs ahead as far as the bound lets it."""
    return replace(c, staleness=staleness, prefetch=staleness if staleness >= 0 else c.prefetch)


def failure_costs(c: Cluster, prices: Prices, r: Recovery) -> Iterator[Cost]:
    """Every failure in every mode."""
    read = r.start_s + r.read_s_per_gb * r.gigabytes(c.dim)
    # a recovery reads its rows about 1.5 times (docs/durability.md, bases)
    disk = r.start_s + 1.5 * r.gigabytes(c.dim) * c.shards_per_machine / r.disk_gb_per_s
    machine = r.reboot_s + max(read, disk)
    for staleness in (-1, c.prefetch, 0):
        one = in_mode(c, staleness)
        yield simulated(one, prices, "a shard with a log", Failure(at=_BEFORE, shards=1, away=read))
    failure = Failure(at=_BEFORE, shards=c.shards_per_machine, away=machine, noticed=r.noticed_s)
    yield simulated(c, prices, "a machine of shards with logs, which boots again", failure)
    for staleness in (-1, 0):
        one = in_mode(c, staleness)
        yield simulated(
            one, prices, "a worker", Failure(at=_BEFORE, worker=True, lease=r.lease_s, away=r.lease_s + _AFTER)
        )
    speed = simulate(c, prices).samples_per_second
    back = r.restart_s + r.restore_s_per_gb * r.gigabytes(c.dim)
    lost = back + 60 * r.checkpoint_minutes / 2
    for what in ("a shard in memory mode", "a machine of shards that is lost for good"):
        yield Cost(what=f"{what}: back to a checkpoint", mode="any", away_s=back, lost_s=lost, samples=lost * speed)


def simulated(c: Cluster, prices: Prices, what: str, failure: Failure) -> Cost:
    """What the cluster did not do from the failure on, until what failed was back and some seconds longer."""
    sampled = _SAMPLED if c.shards > _SAMPLED else 0
    rate = simulate(c, prices, sampled=sampled, steps=20).samples_per_second / c.batch  # steps a second, of all workers
    seconds = failure.away + (0.0 if failure.worker else _AFTER)
    steps = rate * (failure.at + seconds) / c.workers
    failure = replace(failure, until=failure.at + seconds)
    ends = simulate(c, prices, sampled=sampled, warmup=0, steps=steps, failure=failure).ends
    done = np.count_nonzero((ends > failure.at) & (ends <= failure.at + seconds))
    lost = seconds - done / rate
    return Cost(what=what, mode=mode_name(c), away_s=failure.away, lost_s=lost, samples=lost * rate * c.batch)
