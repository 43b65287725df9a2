"""What a run's figures say about the run: a model worse than the mean label, and what a long wait is best met with."""

from __future__ import annotations

import math

from embershard.worker.job.job import Job
from embershard.worker.job.sections import UserModelSection
from embershard.worker.reporting.records import Figures
from embershard.worker.reporting.throughput import Waited

MUCH = 0.2  # of the training time: a part of the waiting that is worth a change


def first_warning(figures: Figures, split: str, step: int) -> str | None:
    """The warning that the first evaluation calls for: a normalised entropy (NE) above 1, or none at all.

    None where NE is not among the figures, or is at most 1.
    """
    ne = figures.get("ne")
    if ne is None or ne <= 1:
        return None
    if not math.isnan(ne):
        calibration = figures.get("calibration")
        known = "" if calibration is None else f" (calibration is {calibration:.2f}, 1 where they agree)"
        return (
            f"NE is {ne:.2f} on {split} at step {step:,}: these predictions are worse than the mean label for every "
            "sample. Likely causes: too few steps until now; first values that are too large "
            "(embedding.initializer); a learning rate that is too high (embedding.optimizer.lr, dense.optimizer.lr); "
            f"labels of another base rate in {split} than in train{known}; ids of {split} that train does not have "
            "(columns, hashing, id files). If the next evaluation is not below 1, change these one by one"
        )
    if not figures.get("samples", 1.0):
        return f"NE is undefined on {split}: it has no samples; look at the file and its filters"
    if math.isnan(figures.get("logloss", 0.0)):
        return f"NE is undefined on {split} at step {step:,}: predictions are NaN; lower the learning rate"
    return f"NE is undefined on {split}: all its labels are alike; look at the label's column, or take more samples"


def waiting_advice(job: Job, workers: int, shares: Waited) -> tuple[str, ...]:
    """Return a line for each kind of wait above 20 % of the training time: what would shorten it, and what that costs.

    `shares` are those of the training time.
    """
    lines = []
    if shares.shards > MUCH:
        lines.append(
            f"{shares.shards:.0%} of the training time is waiting for shards. What may help: {_for_shards(job)}"
        )
    if shares.workers > MUCH:
        lines.append(f"{shares.workers:.0%} of the training time is waiting for other workers: {_for_workers(job)}")
    if shares.data > MUCH:
        lines.append(f"{shares.data:.0%} of the training time is waiting for data: {_for_data(job, workers)}")
    return tuple(lines)


def _for_shards(job: Job) -> str:
    helps = []
    cache = job.embedding.cache
    taken = 0 if cache is None else cache.staleness  # of the bound
    if not job.train.prefetch and (job.train.bound is None or job.train.bound > taken):
        needs = (
            " (a model of your own needs embedding_inputs for it)" if isinstance(job.model, UserModelSection) else ""
        )
        helps.append(
            f"train.prefetch: 1{needs}, which pulls and pushes while a batch computes and costs up to .004 of AUC in "
            'short runs (docs/training/staleness.md, "What prefetch costs")'
        )
    helps.append(f"more shards (shards: {2 * job.shards}), if they are busy and cores are free")
    if job.compression is None:
        helps.append("compression, if the link is slow (`embershard compare` measures what it gains and costs)")
    return "; ".join(helps)


def _for_workers(job: Job) -> str:
    if job.all_reduces:
        return (
            "all workers make every step together, so give them equal machines and equal shares of the data; "
            "strategy: ps with dense.mode: ps and train.staleness: 4 lets them drift apart, at the cost of stale reads "
            "and of runs that differ in their bits"
        )
    bound = job.train.bound or 0
    return (
        "look first for a worker that always lags (embershard status). "
        f"train.staleness: {max(4, 2 * bound)} lets workers run further ahead of the slowest one, off without a bound; "
        "rows then miss more pushes of the others, and runs differ in their bits "
        '(docs/measurements.md, "Quality in six modes")'
    )


def _for_data(job: Job, workers: int) -> str:
    if job.data.reader == "ray":
        return (
            "Ray Data starts each epoch and each input split from scratch: more free cores of the cluster read "
            "faster, fewer data.splits start less often, and data.reader tabular avoids it if all nodes see the files"
        )
    if job.loader_processes(workers):
        return (
            "the loader process is too slow: read Parquet instead of text, and from a local disk; more workers "
            "share the reading"
        )
    return (
        "data.loader_processes: 1 makes batches in a separate process, which takes a core for each worker; Parquet "
        "is read faster than text"
    )
