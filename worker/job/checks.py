"""Which modes of training contradict each other: strategies, where dense weights live, and consistency."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from embershard.proto.transport.emulated_link import parse_bandwidth
from embershard.worker.job.yaml import Path as Location

if TYPE_CHECKING:
    from embershard.worker.job.job import Job
    from embershard.worker.job.sections import OptimizerSection

Found = Iterator[tuple[Location, str]]

# what torch.optim has for dense gradients, and for the sparse ones of its own tables
DENSE_OPTIMIZERS = ("sgd", "adagrad", "rmsprop", "adam", "adamw")
SPARSE_OPTIMIZERS = ("sgd", "adagrad", "adam", "adamw")
# what worker/session/local_steps.py trains copies by
LOCAL_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "rmsprop", "adam", "adamw")

# fields of a job that a strategy without shards sets aside, so that a job can be compared with itself
_OF_SHARDS = (
    "shards",
    "dense.mode",
    "embedding.cache",
    "train.staleness",
    "train.staleness_aware_lr",
    "train.lease",
    "train.prefetch",
    "train.restart_workers",
    "data.splits",
    "compression",
    "network.bandwidth",
)
IGNORED_BY_STRATEGY = {"local": ("workers", *_OF_SHARDS), "dp": ("workers", *_OF_SHARDS), "ddp": _OF_SHARDS}


def mode_contradictions(job: Job) -> Found:
    """Field -> why it cannot be with the others."""
    yield from _strategy(job)
    yield from _dense(job)
    yield from _network(job)
    yield from _consistency(job)
    yield from _torch_optimizers(job)


def _given(job: Job, *path: str) -> bool:
    """Whether the job itself says it."""
    section: object = job
    for name in path[:-1]:
        section = getattr(section, name)
    return path[-1] in getattr(section, "model_fields_set", ())


def _strategy(job: Job) -> Found:
    name = job.strategy
    if job.has_shards:
        return
    if name in ("local", "dp") and job.workers > 1:
        yield ("workers",), f"strategy {name} trains in one process; set it to 1, or use strategy ddp"
    if _given(job, "shards"):
        yield ("shards",), f"strategy {name} has no shards; remove it"
    for path in (("train", "staleness"), ("train", "staleness_aware_lr"), ("train", "lease"), ("train", "prefetch")):
        # 0, which equals False, says what is true of them: nothing is stale
        if _given(job, *path) and getattr(job.train, path[1]) not in (None, False):
            yield path, f"has no meaning for strategy {name}, which has no shards to wait for; remove it"
    if job.embedding.cache is not None:
        yield ("embedding", "cache"), f"has no meaning for strategy {name}, whose rows are in the worker; remove it"
    for at, optimizer in _optimizers(job, "embedding"):
        if optimizer.name not in SPARSE_OPTIMIZERS:
            reason = f"strategy {name} trains by torch, which has no {optimizer.name} for sparse gradients"
            yield (*at, "name"), f"{reason}; use {_either(SPARSE_OPTIMIZERS)}, or strategy ps"
        elif getattr(optimizer, "momentum", 0.0):
            reason = f"strategy {name} trains by torch, whose momentum would move every row that was ever read"
            yield (*at, "momentum"), f"{reason}; set it to 0, or use strategy ps"
    if job.data.hashed:
        reason = f"strategy {name} needs tables in memory, and hashed ids have 2**62 rows"
        yield ("strategy",), f"{reason}; use global ids, or strategy ps"
    if name == "dp":
        yield from _data_parallel(job)


def _data_parallel(job: Job) -> Found:
    import torch  # only here: a job is checked without it

    if not torch.cuda.is_available():
        yield ("strategy",), "dp (DataParallel) splits a batch over GPUs, and this machine has none; use local or ddp"
    elif job.train.device == "cpu":
        yield ("train", "device"), "strategy dp needs GPUs; remove it"
    if job.model.name == "two_tower":
        yield (
            ("model", "name"),
            "two_tower compares each sample with the whole batch, which strategy dp splits; use ddp",
        )


def _dense(job: Job) -> Found:
    mode = job.dense.mode
    if not _given(job, "dense", "mode"):
        return
    if not job.has_shards and not job.strategy == mode == "ddp":
        yield ("dense", "mode"), f"has no meaning for strategy {job.strategy}, which has no shards; remove it"
    elif job.strategy == "hybrid" and mode == "ps":
        yield ("dense", "mode"), "strategy hybrid keeps dense weights in the workers: set it to ddp or fsdp, or use ps"


def _network(job: Job) -> Found:
    at, bandwidth = ("network", "bandwidth"), job.network.bandwidth
    if parse_bandwidth(bandwidth) is None:
        return
    if not job.has_shards:
        yield at, f"is that of the link to the shards, and strategy {job.strategy} has none; remove it"
    elif job.dense_mode != "ps":
        reason = f"{bandwidth} slows the link to the shards, and not torch's own ones"
        yield at, f"{reason}, over which dense weights are all-reduced; keep them on the shards, or remove it"


def _consistency(job: Job) -> Found:
    train, staleness = job.train, job.train.staleness
    if not job.has_shards:
        return
    if train.staleness_aware_lr and (train.bound == 0 or train.local_steps):
        why = "no push is stale" if train.bound == 0 else "a difference has no learning rate"
        yield ("train", "staleness_aware_lr"), f"with train.staleness {staleness} {why}; remove it"
    if train.local_steps:
        if job.dense_mode != "ps":
            at = ("strategy",) if job.strategy == "hybrid" else ("dense", "mode")
            yield at, f"all-reduces dense weights at every step, but train.staleness is {staleness}; use strategy ps"
        if train.prefetch:
            yield ("train", "prefetch"), f"train.staleness {staleness} reads copies of its own; set it to 0"
        if job.embedding.cache is not None:
            yield ("embedding", "cache"), f"train.staleness {staleness} reads copies of its own; remove it"
        yield from _local_optimizers(job)
    elif train.bound is not None:
        if (train.prefetch or 0) > train.bound:
            yield ("train", "prefetch"), f"pulls {train.prefetch} clocks ahead, beyond train.staleness {staleness}"
        elif job.embedding.cache is not None and (train.prefetch or 0) + job.embedding.cache.staleness > train.bound:
            age = (train.prefetch or 0) + job.embedding.cache.staleness
            reason = f"its copies may be {age} clocks old (train.prefetch included), beyond train.staleness {staleness}"
            yield ("embedding", "cache"), f"{reason}; remove it, or raise the bound"


def _local_optimizers(job: Job) -> Found:
    for path, optimizer in (*_optimizers(job, "embedding"), *_optimizers(job, "dense")):
        if optimizer.name not in LOCAL_OPTIMIZERS:
            reason = f"train.staleness {job.train.staleness} trains copies of rows, which knows no {optimizer.name}"
            yield (*path, "name"), f"{reason}; use {_either(LOCAL_OPTIMIZERS)}"


def _torch_optimizers(job: Job) -> Found:
    """The dense optimizers, where torch applies them."""
    if job.has_shards and job.dense_mode == "ps":
        return
    named = [(path, optimizer.name, optimizer) for path, optimizer in _optimizers(job, "dense")]
    if job.dense.optimizer is None:
        inherited = job.embedding.optimizer
        # row-wise Adagrad as wrap takes it; what the tables of torch cannot have is refused there already
        known = inherited.name in DENSE_OPTIMIZERS or (inherited.name != "rowwise_adagrad" and job.has_shards)
        named.append((("embedding", "optimizer"), inherited.name if known else "adagrad", inherited))
    for path, name, optimizer in named:
        if name not in DENSE_OPTIMIZERS:
            reason = f"torch applies it to the dense weights, and has no {name}"
            yield (*path, "name"), f"{reason}; give dense.optimizer one of {', '.join(DENSE_OPTIMIZERS)}"
        elif getattr(optimizer, "clip_norm", 0.0):
            reason = "bounds a block of 1024 dense floats on a shard, and torch applies this optimizer to them"
            yield (*path, "clip_norm"), f"{reason}; give dense.optimizer without it"


def _optimizers(job: Job, name: Literal["embedding", "dense"]) -> list[tuple[Location, OptimizerSection]]:
    """Where the optimizers of a section stand: its own, if it has one, and those of its groups."""
    section = job.embedding if name == "embedding" else job.dense
    own: list[tuple[Location, OptimizerSection]] = []
    if section.optimizer is not None:
        own.append(((name, "optimizer"), section.optimizer))
    return own + [
        ((name, "groups", number, "optimizer"), group.optimizer) for number, group in enumerate(section.groups)
    ]


def _either(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
