"""Which settings of several workers contradict each other: data that is dealt out, and workers that are lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from embershard.worker.job.yaml import Path as Location

if TYPE_CHECKING:
    from embershard.worker.job.job import Job


def worker_contradictions(job: Job) -> Iterator[tuple[Location, str]]:
    """Field -> why it cannot be with the others."""
    mode = f"strategy {job.strategy}" if not job.has_shards else f"dense.mode {job.dense_mode}"
    survives = job.has_shards and job.dense_mode == "ps"
    if job.train.restart_workers and not survives:
        yield ("train", "restart_workers"), f"has no meaning for {mode}, which ends with the first worker that is lost"
    if job.train.restart_workers and survives and job.workers == 1:
        reason = "starts workers again beside others; a run with one goes on from a checkpoint, by --resume"
        yield ("train", "restart_workers"), reason
    if job.data.splits is None:
        return
    at = ("data", "splits")
    if not survives:
        yield at, f"gives workers uneven numbers of steps, but {mode} makes every step of all of them together"
    if job.train.budget is not None and job.train.budget[0] != "epochs":
        yield at, f"deals out whole epochs: give train.epochs in place of train.{job.train.budget[0]}, or remove it"
    if isinstance(job.data.splits, int) and job.data.splits < job.workers:
        yield at, f"must be at least as many as workers, which are {job.workers}"
    gzipped = [str(file) for file in job.data.files().get("train", ()) if file.suffix == ".gz"]
    if gzipped and job.data.streams_text:
        yield at, f"{gzipped[0]} would be read from its start for every split; decompress it, or remove data.splits"
