"""Checks of a job's codecs: which of them cannot serve it, and which serve its optimizers badly."""

from __future__ import annotations

from embershard.proto.codec.name import CodecName
from embershard.worker.compression.settings import advice
from embershard.worker.job.compression import CompressionSection
from embershard.worker.job.job import Job
from embershard.worker.job.yaml import Problems

_WARM_UP = "dgc begins with a quarter of all elements, which later steps do not send; set warmup_steps to 0"


def check_compression(job: Job) -> Problems:
    """Yield each contradiction of these fields: (field, reason)."""
    section = job.compression
    if section is None:
        return
    if not job.has_shards:
        yield ("compression",), f"strategy {job.strategy} has no shards to send anything to; remove it"
        return
    if job.dense_mode != "ps" and "dense" in section.model_fields_set:
        reason = f"torch all-reduces the dense weights (dense.mode {job.dense_mode}), past the shards"
        yield ("compression", "dense"), f"{reason}; remove it, or use dense.mode ps"
    yield from _cannot_serve(job, section)
    yield from _without_meaning(section)
    yield from _auto(job, section)
    if section.unless_slower:
        yield from _unless_slower(job, section)


def compression_advice(job: Job) -> list[str]:
    """A line for every codec that is a poor choice for its optimizer; the job is trained all the same."""
    section = job.compression
    if section is None:
        return []
    names = {False: job.embedding.optimizer.name, True: (job.dense.optimizer or job.embedding.optimizer).name}
    found = []
    for at, direction, dense, codec in section.choices():
        line = advice(names[dense], codec) if direction == "push" and not _in_groups(job, at, dense) else ""
        if line:
            found.append(f"compression.{'.'.join(at)}: {line}")
    return found


def _cannot_serve(job: Job, section: CompressionSection) -> Problems:
    optimizers = {False: job.embedding.optimizer, True: job.dense.optimizer or job.embedding.optimizer}
    seen = set()
    for at, direction, dense, codec in section.choices():
        try:
            codec.check(direction, dense)
        except ValueError as error:
            yield ("compression", *at), str(error)
            continue
        optimizer = optimizers[dense]
        momentum = float(getattr(optimizer, "momentum", 0.0))
        if codec.select == "dgc" and momentum and not _in_groups(job, at, dense) and at not in seen:
            seen.add(at)
            reason = f"{codec} applies momentum before it selects, and the optimizer's {momentum:g} would again"
            yield ("compression", *at), f"{reason}; set the optimizer's momentum to 0"
        beta1 = section.momentum and float(getattr(optimizer, "beta1", 0.0))
        if codec.select == "dgc" and beta1 and not _in_groups(job, at, dense) and at not in seen:
            seen.add(at)
            reason = f"{codec} applies compression.momentum before it selects, and {optimizer.name} its beta1 after it"
            yield ("compression", *at), f"{reason}; remove compression.momentum"
        if codec.select == "dgc" and job.train.local_steps and at not in seen:
            seen.add(at)
            reason = (
                f"{codec} keeps a momentum of gradients, and train.staleness {job.train.staleness} pushes differences"
            )
            yield ("compression", *at), f"{reason} of weights; use topk"


def _in_groups(job: Job, at: tuple[str, ...], dense: bool) -> bool:
    """Whether a codec is that of tables which may have the optimizer of a group: it is known once the tables are."""
    return at[0] == "tables" and bool((job.dense if dense else job.embedding).groups)


def _without_meaning(section: CompressionSection) -> Problems:
    pushes = [(dense, codec) for _, direction, dense, codec in section.choices() if direction == "push"]
    pushes += [(False, CodecName.parse(text)) for text in section.allow]
    given = section.model_fields_set
    if "residual_rows" in given and not any(codec.has_feedback and not dense for dense, codec in pushes):
        yield ("compression", "residual_rows"), "no codec of an embedding table leaves anything for later; remove it"
    for name in ("warmup_steps", "momentum", "clip_norm"):
        if name in given and not any(codec.select == "dgc" for _, codec in pushes):
            yield ("compression", name), "only dgc has it, and no push travels so; remove it"


def _auto(job: Job, section: CompressionSection) -> Problems:
    if section.auto:
        if job.train.local_steps:
            reason = f"most steps send nothing with train.staleness {job.train.staleness}, and auto judges by steps"
            yield ("compression", "auto"), f"{reason}; name codecs"
        for name in ("push", "pull", "dense"):
            if name in section.model_fields_set:
                yield ("compression", name), "auto chooses it; remove it, or name tables under compression.tables"
        for position, text in enumerate(section.allow):
            if CodecName.parse(text).select in ("powersgd", "delta"):
                reason = f"what {text} sends is not known before it does; name it under compression.tables"
                yield ("compression", "allow", position), reason
            elif CodecName.parse(text).select == "dgc" and section.warmup_steps:
                yield ("compression", "allow", position), _WARM_UP
    elif section.allow:
        yield ("compression", "allow"), "says what auto may choose; add auto: true"


def _unless_slower(job: Job, section: CompressionSection) -> Problems:
    at = ("compression", "unless_slower")
    codecs = [codec for _, _, _, codec in section.choices()]
    if section.auto:
        yield at, "auto tries what it chooses anyway; remove it"
    elif all(codec.is_plain for codec in codecs):
        yield at, "there is no codec to try; remove it, or name one"
    elif job.train.local_steps:
        yield at, f"most steps send nothing with train.staleness {job.train.staleness}; remove either"
    elif section.steps:
        yield at, "codecs are tried in the first steps, and a schedule changes them later; remove either"
    elif section.warmup_steps and any(codec.select == "dgc" for codec in codecs):
        yield at, _WARM_UP
