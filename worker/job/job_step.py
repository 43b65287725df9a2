"""Sections of a job file that say how a training step is made, and which of its fields contradict others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from embershard.proto import spec
from embershard.worker.job.checks import Found
from embershard.worker.job.sections import AnyInitializer, AnyOptimizer, Count, Section

if TYPE_CHECKING:
    from embershard.worker.job.job import Job

Pattern = Annotated[str, Field(min_length=1)]


def _argument(value: object) -> object:
    """One reason, where pydantic gives one for each kind that it could be."""
    parts = value if isinstance(value, (list, tuple)) else (value,)
    kinds = (int, float) if isinstance(value, (list, tuple)) else (bool, int, float, str, type(None))
    if not all(isinstance(part, kinds) for part in parts):
        raise ValueError("must be a number, a text, true, false, null or a list of numbers")
    if not all(math.isfinite(part) for part in parts if isinstance(part, float)):
        raise ValueError("must be finite")
    return tuple(value) if isinstance(value, list) else value


Argument = Annotated[bool | int | float | str | tuple[int | float, ...] | None, PlainValidator(_argument)]


class GroupSection(Section):
    """Weights with an optimizer of their own: those whose name, or that of a module they lie in, `match` fits."""

    match: Pattern
    optimizer: AnyOptimizer


class TableGroupSection(GroupSection):
    """Embeddings with an optimizer of their own, and first values, where it gives some."""

    initializer: AnyInitializer | None = None


class AverageSection(Section):
    """Evaluate with the exponential moving average of the dense weights."""

    decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.999


class StepSection(Section):
    """How a step is made (docs/training.md, "The training step").

    `amp`: the forward in bfloat16 or float16. `accumulate`: one step with the mean gradient of so many batches.
    `clip_norm`: the largest L2 norm of all gradients of a worker. `non_finite`: a NaN or Inf ends the run or leaves the
    step out. `checkpoint_activations`: MLP towers compute their activations again in backward. `compile`: torch.compile
    for all but the embeddings.
    """

    # YAML reads off as false
    amp: Annotated[
        Literal["off", "bf16", "fp16"], BeforeValidator(lambda value: "off" if value is False else value)
    ] = "off"
    accumulate: Count = 1
    clip_norm: Annotated[float, Field(gt=0.0)] | None = None
    non_finite: Literal["stop", "skip"] = "stop"
    checkpoint_activations: bool = False
    compile: bool = False
    average: AverageSection | None = None


def optimizers_of(groups: Sequence[GroupSection], default: spec.Optimizer) -> dict[str, spec.Optimizer]:
    """Pattern -> optimizer, the groups' first."""
    return {**{group.match: group.optimizer.build() for group in groups}, "*": default}


def initializers_of(
    groups: Sequence[TableGroupSection], default: spec.Initializer | None
) -> dict[str, spec.Initializer | None]:
    """Pattern -> first values, as `optimizers_of`; a group without any has the default ones."""
    own = {group.match: group.initializer.build() if group.initializer else default for group in groups}
    return {**own, "*": default}


def step_contradictions(job: Job) -> Found:
    """Field -> why it cannot be with the others."""
    train = job.train
    if train.compile and train.checkpoint_activations:
        reason = "torch.compile decides itself what backward computes again; remove it, or train.compile"
        yield ("train", "checkpoint_activations"), reason
    if train.linear == "onednn" and (train.compile or train.amp != "off"):
        why = "train.compile" if train.compile else f"train.amp {train.amp}"
        yield ("train", "linear"), f"with {why} torch multiplies itself; use auto"
    for name in ("compile", "checkpoint_activations"):
        if job.strategy == "dp" and getattr(train, name):
            yield ("train", name), "DataParallel copies the model for every batch; use strategy ddp"
    for name in ("compile", "average"):
        if job.has_shards and job.dense_mode == "fsdp" and getattr(train, name):
            yield ("train", name), "with fsdp a worker holds but a part of each dense weight; use ddp or ps"
    yield from _patterns(job)
    in_blocks = job.has_shards and job.dense_mode == "ps"
    for position, group in enumerate(job.dense.groups if in_blocks else ()):
        if group.optimizer.name == "rowwise_adagrad":
            reason = "keeps one accumulator per row, and dense weights have no rows; use adagrad"
            yield ("dense", "groups", position, "optimizer", "name"), reason


def _patterns(job: Job) -> Found:
    for section, groups in (("embedding", job.embedding.groups), ("dense", job.dense.groups)):
        matches = [group.match for group in groups]
        for position, match in enumerate(matches):
            at = (section, "groups", position, "match")
            if match in matches[:position]:
                yield at, f"{match!r} is that of an earlier group"
            elif match == "*":
                yield at, f"'*' is all of them: that is {section}.optimizer"
