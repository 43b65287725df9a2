"""How a run trains, in the words of its first line and of its last table."""

from __future__ import annotations

from embershard.worker.job.job import Job
from embershard.worker.reporting.records import RunMode


def mode_of(job: Job, *, workers: int, shards: int, codecs: str) -> RunMode:
    """The mode of a job that runs on so many workers and shards, with these codecs."""
    strategy: str = job.strategy
    staleness = prefetch = ""
    if job.has_shards:
        if job.dense_mode != "ps":
            strategy += f" (dense weights by {job.dense_mode})"
        prefetch = "off" if job.train.prefetch is None else str(job.train.prefetch)
        match job.train.staleness:
            case None:
                staleness = "unbounded (asynchronous)"
            case 0:
                staleness = "0 (synchronous)"
            case int(bound):
                staleness = f"at most {bound}"
            case str(local):
                staleness = local
    elif job.all_reduces:
        staleness = "0 (synchronous)"
    return RunMode(
        strategy=strategy, workers=workers, shards=shards, staleness=staleness, prefetch=prefetch, codecs=codecs
    )
