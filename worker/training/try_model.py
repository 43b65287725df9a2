"""Try a job's model, loss and metrics on the first samples, before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from embershard.proto.errors import EmbershardError, JobError, UserCodeFailed
from embershard.proto.user_modules import find, where_defined
from embershard.worker.data.batch import Batch, Schema
from embershard.worker.job.job import Job
from embershard.worker.models.user_defined import embedding_inputs_of, forward_of, reads_dense
from embershard.worker.nn.activations import TABLES
from embershard.worker.training.build import job_loss, job_model
from embershard.worker.training.evaluate import Metrics, metrics_of


def try_model(job: Job, schema: Schema, batches: Mapping[str, Batch]) -> None:
    """Make the job's model in plain torch, and one step and one evaluation of the first batch of each split, by name.

    JobError, BadModule or UserCodeFailed where the model, its loss or a metric is not there, raises, gives another
    shape or NaN, or does not fit the data. Tables on the meta device have one row here, which stands for all.
    """
    torch.manual_seed(job.train.seed)
    model = job_model(job, schema)
    forward, metrics = forward_of(model, job.model.name), metrics_of(job)
    loss_of_batch = job_loss(job, model, forward)
    _check_inputs(job, model, schema)
    _check_hidden_layers(job, model)
    _shrink_meta_tables(model)
    for split, batch in batches.items():
        try:
            if split == "train":
                _try_step(job, model, lambda batch=batch: loss_of_batch(model, batch))  # type: ignore[misc]
            else:
                model.eval()
                with torch.no_grad():
                    _try_metrics(metrics, schema, batch, forward(model, batch))
                model.train()
        except (EmbershardError, IndexError) as error:
            _explain_ids(job, model, batch, split, error)
            raise


def _check_inputs(job: Job, model: nn.Module, schema: Schema) -> None:
    if schema.num_dense and not reads_dense(model):
        reason = f"takes no dense features, of which the data has {schema.num_dense}"
        reason += ": write forward(self, ids, dense), or read a file without them"
        raise UserCodeFailed(what=f"model {job.model.name}", reason=reason, where=where_defined(type(model)))
    if job.train.prefetch and embedding_inputs_of(model) is None:
        reason = f"{job.model.name} does not say which ids its tables read: give it a method embedding_inputs(ids) that"
        raise JobError(where="train.prefetch", reason=f"{reason} returns {{'table': ids}}, or use 0")


def _check_hidden_layers(job: Job, model: nn.Module) -> None:
    """UserCodeFailed where layers lie in a plain list, tuple or dict, in which torch does not find their parameters."""
    known = {id(parameter) for parameter in model.parameters()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") or not isinstance(value, list | tuple | dict):
                continue
            for layer in value.values() if isinstance(value, dict) else value:
                if isinstance(layer, nn.Module) and any(
                    p.requires_grad and id(p) not in known for p in layer.parameters()
                ):
                    holder = ".".join(filter(None, [path, name]))
                    kind = "nn.ModuleDict" if isinstance(value, dict) else "nn.ModuleList"
                    reason = f"keeps {type(layer).__name__} in {holder}, a plain {type(value).__name__}, whose "
                    reason += f"parameters torch does not find and nothing would train: use {kind}"
                    where = where_defined(type(model))
                    raise UserCodeFailed(what=f"model {job.model.name}", reason=reason, where=where)


def _shrink_meta_tables(model: nn.Module) -> None:
    def first_row(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (torch.zeros_like(given[0]), *given[1:])

    weights: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, TABLES) and module.weight.is_meta:
            row = nn.Parameter(torch.full((1, module.embedding_dim), 0.01))
            module.weight = weights.setdefault(id(module.weight), row)
            module.register_forward_pre_hook(first_row)


def _try_step(job: Job, model: nn.Module, make_loss: Callable[[], Tensor]) -> None:
    loss = make_loss()
    what, where = f"loss {job.own_loss.code}" if job.own_loss else f"model {job.model.name}", _where(job)
    if not loss.requires_grad:
        reason = "gave a loss without a gradient on the first samples: it detaches the logits, or nothing is trained"
        raise UserCodeFailed(what=what, reason=reason, where=where)
    if not math.isfinite(loss.item()):
        raise UserCodeFailed(what=what, reason=f"gave the loss {loss.item()} on the first samples", where=where)
    loss.backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            reason = f"gave a gradient of {name} with NaN or Inf on the first samples"
            raise UserCodeFailed(what=what, reason=reason, where=where)


def _where(job: Job) -> str:
    name = job.own_loss.code if job.own_loss else job.model.name
    return where_defined(find(name)) if ":" in name else ""


def _try_metrics(metrics: Metrics, schema: Schema, batch: Batch, logits: Tensor) -> None:
    if not metrics.own:
        return
    labels = batch.labels.clone()
    for own in labels.unbind(1) if len(schema.labels) > 1 else (labels,):
        known = own[~own.isnan()]
        if own.numel() > 1 and bool((known == known[:1]).all()):
            # the first samples may have one class where the split has two, and many metrics want both
            own.copy_(torch.arange(own.numel()).view(own.shape) % 2)
    collectors = metrics.collectors(schema.labels)
    collectors[-1].update(logits, labels, metrics.groups_of(batch, schema), batch.weights)
    metrics.of_user(collectors)


def _explain_ids(job: Job, model: nn.Module, batch: Batch, split: str, error: Exception) -> None:
    """UserCodeFailed where an id is beyond a table, which torch says without a number."""
    if not isinstance(error if isinstance(error, IndexError) else error.__cause__, IndexError):
        return
    largest = int(batch.ids.max())
    for name, module in model.named_modules():
        if isinstance(module, TABLES) and largest >= module.num_embeddings:
            reason = (
                f"has a table {name!r} of {module.num_embeddings:,} rows, and the first samples of {split} have the id "
                f"{largest:,}: make it as large as num_ids, which the constructor may take as an argument"
            )
            where = where_defined(type(model))
            raise UserCodeFailed(what=f"model {job.model.name}", reason=reason, where=where) from error
