"""What a job names of a user's code, and its data, tried before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from embershard.cli.signals import ended_by_signals
from embershard.deploy.job_check import check_job
from embershard.proto import spec
from embershard.proto.codec.name import CodecName
from embershard.proto.user_modules import search_from
from embershard.worker.job.job import Job


def check_user_code(jobs: Iterable[Job], imports: Sequence[str], *, starts_shards: bool = True) -> None:
    """Import the modules as workers and shards will, and find in them all that the jobs name.

    Row optimizers are left to shards that run already. BadModule, BadCodec, BadOptimizer, UnknownCodec and
    UnknownOptimizer say what is wrong.
    """
    served = [job for job in jobs if job.has_shards]
    codecs = {codec.values for job in served for codec in _codecs(job) if codec.is_custom}
    optimizers = [found for job in served for found in _optimizers(job) if isinstance(found, spec.Custom)]
    if not (imports or codecs or optimizers):
        return
    # here: kernels are loaded for them, which other jobs need not wait for
    from embershard.proto.codec.user_defined import CodecRegistry
    from embershard.ps.table.optimizers import OptimizerRegistry

    search_from(Path())  # as workers and shards do
    known = CodecRegistry(imports)
    for name in sorted(codecs):
        known.find(name)
    if starts_shards:
        compiled = OptimizerRegistry(imports)
        for optimizer in optimizers:
            compiled.find(optimizer)


def try_job(
    job: Job,
    path: Path,
    overrides: Sequence[str],
    data: Path | None,
    imports: Sequence[str],
    say: Callable[[str], object],
) -> dict[str, str]:
    """Try the data and the model of a job on the first samples, before anything starts.

    Returns the sha256 of each file of the user's code that the job names (`sha256_of_modules`).

    What a user wrote runs in a process of its own. Files of the built-in readers are looked at here, in milliseconds
    and without torch. JobError, BadModule, UserCodeFailed or CheckEnded say what is wrong.
    """
    if not job.has_user_code:
        job.data.look(path.parent)
        return {}
    with ended_by_signals():
        return check_job(path, overrides=overrides, data=data, imports=imports, say=say)


def _codecs(job: Job) -> Iterator[CodecName]:
    if job.compression is not None:
        yield from (codec for *_, codec in job.compression.choices())
        yield from map(CodecName.parse, job.compression.allow)


def _optimizers(job: Job) -> Iterator[spec.Optimizer]:
    """Those of its weights on shards."""
    sections = [job.embedding.optimizer, *(group.optimizer for group in job.embedding.groups)]
    if job.dense_mode == "ps":
        sections += [group.optimizer for group in job.dense.groups]
        sections += [job.dense.optimizer] if job.dense.optimizer is not None else []
    return (section.build() for section in sections)
