"""Build a job's training step from its file."""

from __future__ import annotations

import torch
from torch import nn

from embershard.proto.errors import JobError
from embershard.worker.data.batch import Schema
from embershard.worker.job.job import Job
from embershard.worker.job.sections import UserModelSection
from embershard.worker.models.loss import Loss, loss_of
from embershard.worker.models.user_defined import Forward, take_first_values
from embershard.worker.nn.activations import TABLES, checkpoint_activations
from embershard.worker.nn.averaging import WeightAverage
from embershard.worker.nn.compile import compile_dense
from embershard.worker.nn.lr_schedule import LearningRates, Schedule
from embershard.worker.patterns import choose, first_match, freeze
from embershard.worker.session.session import Session
from embershard.worker.strategy.protocol import Strategy
from embershard.worker.strategy.shards import ShardStrategy
from embershard.worker.strategy.torch_only import TorchStrategy
from embershard.worker.training.step import TrainStep


def choose_strategy(job: Job, model: nn.Module, session: Session | None, device: torch.device) -> Strategy:
    """The strategy of a job over `model`, whose tables are on the meta device until then.

    `session` is the connection to the shards, for a job that has some.
    """
    if not job.has_shards:
        return TorchStrategy(job, model, device)
    assert session is not None
    return ShardStrategy(job, model, session, device)


def job_model(job: Job, schema: Schema) -> nn.Module:
    """The model of a job, with what the job freezes. A user's tables keep their first values unless the job has some.

    JobError where a pattern of the job fits nothing; BadModule or UserCodeFailed where a user's model cannot be made.
    """
    model: nn.Module = job.model.build(schema, job.dim, "meta")
    check_names(job, model)
    if isinstance(job.model, UserModelSection):
        all_given = job.embedding.initializer is not None
        given = {group.match: all_given or group.initializer is not None for group in job.embedding.groups}
        given["*"] = all_given
        take_first_values(model, lambda name: given[first_match(name, given) or "*"])
    return model


def check_names(job: Job, model: nn.Module) -> None:
    """Freeze what the job names, before the model is wrapped. JobError where a pattern of the job fits nothing."""
    tables = [name for name, module in model.named_modules() if isinstance(module, TABLES)]
    dense = [name for name, _ in model.named_parameters() if name.rpartition(".")[0] not in tables]
    try:
        choose(tables, dict.fromkeys([group.match for group in job.embedding.groups] + ["*"]), "embedding.groups")
        choose(dense, dict.fromkeys([group.match for group in job.dense.groups] + ["*"]), "dense.groups")
        freeze(model, job.freeze)
    except ValueError as error:
        where, _, reason = str(error).partition(": ")
        raise JobError(where=where, reason=reason) from None


def step_of(
    job: Job,
    strategy: Strategy,
    session: Session | None,
    device: torch.device,
    forward: Forward,
    *,
    worker: int,
    log_q: torch.Tensor | None = None,
) -> TrainStep:
    """The step of a job; `log_q` is as of ListLoss. JobError where this machine cannot compile it."""
    train, model = job.train, strategy.model
    if train.checkpoint_activations:
        checkpoint_activations(model)
    if train.compile:
        compile_dense(model)
    return TrainStep(
        strategy.module,
        job_loss(job, model, forward, log_q),
        strategy,
        train,
        device=device,
        average=average_of(job, model, session),
        agree=strategy.agree,
        worker=worker,
    )


def job_loss(job: Job, model: nn.Module, forward: Forward, log_q: torch.Tensor | None = None) -> Loss:
    """The loss of a job: its own, or that which the model is made for; `log_q` is as of ListLoss."""
    name, args = ("", {}) if job.loss is None else (job.loss.code, job.loss.args)
    return loss_of(model, forward, name, args, log_q=log_q)


def average_of(job: Job, model: nn.Module, session: Session | None) -> WeightAverage | None:
    """The average that a job evaluates with, if it wants one."""
    if job.train.average is None:
        return None
    tables = {module.weight for module in model.modules() if isinstance(module, TABLES)}
    dense = [parameter for parameter in model.parameters() if parameter not in tables]
    return WeightAverage(dense, decay=job.train.average.decay, read=None if session is None else session.read_dense)


def rates_of(job: Job, strategy: Strategy, total_steps: int | None) -> LearningRates:
    """The learning rates of a job. JobError where its schedule needs the number of steps and the data does not tell."""
    section = job.train.lr_schedule
    if section.name in ("linear", "cosine") and total_steps is None:
        raise JobError(
            where="train.lr_schedule",
            reason=f"{section.name} needs the number of steps, which this data does not tell: use train.steps",
        )
    given = section.model_dump(exclude={"name", "scheduler", "args"}, exclude_none=True)
    shape = "constant" if section.name == "torch" else section.name
    schedule = Schedule(shape=shape, total_steps=total_steps or 0, **given)
    return LearningRates(strategy.optimizers, schedule, section.scheduler, section.args)
