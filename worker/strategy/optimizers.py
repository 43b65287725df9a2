"""Row optimizers as torch.optim has them: for dense weights with the shards' formulas, for tables nearly so."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from embershard.proto.spec import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from embershard.worker.job.job import Job
from embershard.worker.job.training import optimizers_of
from embershard.worker.nn.wrap import elementwise
from embershard.worker.patterns import first_match

Make = Callable[[Optimizer, Sequence[nn.Parameter]], torch.optim.Optimizer]


def dense_specs(job: Job) -> dict[str, Optimizer]:
    """Pattern -> optimizer of a job's dense weights: that of the embeddings, where they have none of their own."""
    optimizer = (job.dense.optimizer or job.embedding.optimizer).build()
    return optimizers_of(job.dense.groups, elementwise(optimizer) if job.dense.optimizer is None else optimizer)


def by_spec(
    specs: Mapping[str, Optimizer], named: Iterable[tuple[str, nn.Parameter]]
) -> list[tuple[Optimizer, list[nn.Parameter]]]:
    """Optimizers, each with the parameters that its pattern is the first to match, unless there are none."""
    chosen: dict[str, list[nn.Parameter]] = {pattern: [] for pattern in specs}
    for name, parameter in named:
        pattern = first_match(name, specs)
        assert pattern is not None
        chosen[pattern].append(parameter)
    return [(specs[pattern], parameters) for pattern, parameters in chosen.items() if parameters]


def torch_optimizer(spec: Optimizer, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Torch's own of this name and with these settings; ValueError where it has none."""
    match spec:
        case SGD():
            return torch.optim.SGD(
                parameters, momentum=spec.momentum, nesterov=spec.nesterov, weight_decay=spec.weight_decay
            )
        case Adagrad():
            return torch.optim.Adagrad(
                parameters,
                eps=spec.eps,
                initial_accumulator_value=spec.initial_accumulator,
                weight_decay=spec.weight_decay,
            )
        case RMSprop():
            return torch.optim.RMSprop(
                parameters, alpha=spec.alpha, eps=spec.eps, momentum=spec.momentum, weight_decay=spec.weight_decay
            )
        case Adam():
            kind = torch.optim.AdamW if isinstance(spec, AdamW) else torch.optim.Adam
            return kind(parameters, betas=(spec.beta1, spec.beta2), eps=spec.eps, weight_decay=spec.weight_decay)
    raise ValueError(f"torch has no {spec.name} for dense weights; use SGD, Adagrad, RMSprop, Adam or AdamW")


def dense_optimizer(
    spec: Optimizer, parameters: Iterable[nn.Parameter], make: Make = torch_optimizer
) -> torch.optim.Optimizer:
    """An optimizer in this process that does to dense parameters what a shard does to their blocks.

    `make`: torch's own, or the shards' (RowFormulaOptimizer). ValueError for what torch has not: FTRL, optimizers of
    the user's own, clip_norm.
    """
    optimizer = make(spec, list(parameters))
    if getattr(spec, "clip_norm", 0.0):
        raise ValueError(f"{type(spec).__name__}: clip_norm bounds a block on a shard, and torch has no such blocks")
    if clip_value := getattr(spec, "clip_value", 0.0):

        def clip(*_: object) -> None:
            nn.utils.clip_grad_value_([p for group in optimizer.param_groups for p in group["params"]], clip_value)

        optimizer.register_step_pre_hook(clip)
    return _begin(optimizer, spec, "dense")


class LazyRows:
    """Brings the sparse gradients of tables into the form that torch's optimizers take, as shards do with a push.

    A row with NaN or Inf is left out, and counted; the others are clipped and decayed, and rows without a gradient
    are left alone. Those with a gradient of 0 are too, where `without_zeros` says that a batch which weighs nothing
    may have named them. A dense gradient is of all rows, for the weights whose ids are in `whole`; for others it is of
    lookups, of which torch gives no rows (mode max, scale_grad_by_freq), and rows of zeros were not looked up.
    """

    def __init__(self, spec: SGD | Adagrad | Adam, whole: Container[int] = ()) -> None:
        self._spec, self._whole = spec, whole
        self.skipped = 0
        self.without_zeros = False

    @torch.no_grad()
    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Change the gradients of an optimizer's parameters."""
        for group in optimizer.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    table.grad = self._prepared(table, self._rows(table), group["lr"])

    def _rows(self, table: torch.Tensor) -> torch.Tensor:
        gradient = table.grad
        assert gradient is not None
        if gradient.is_sparse:
            return gradient.coalesce()
        return all_rows(gradient) if id(table) in self._whole else gradient.to_sparse(1)

    def _prepared(self, table: torch.Tensor, gradient: torch.Tensor, lr: float) -> torch.Tensor:
        spec, ids, rows = self._spec, gradient.indices(), gradient.values()
        finite = rows.isfinite().all(1)
        if not bool(finite.all()):
            self.skipped += int((~finite).sum())
            ids, rows = ids[:, finite], rows[finite]
        if self.without_zeros:
            moved = rows.any(1)
            ids, rows = ids[:, moved], rows[moved]
        if spec.clip_value:
            rows = rows.clamp(-spec.clip_value, spec.clip_value)
        if spec.clip_norm:
            rows = rows * (spec.clip_norm / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)
        if spec.weight_decay and isinstance(spec, AdamW):
            table[ids[0]] *= 1.0 - lr * spec.weight_decay
        elif spec.weight_decay:
            rows = rows + spec.weight_decay * table[ids[0]]
        return torch.sparse_coo_tensor(ids, rows, gradient.shape, is_coalesced=True, check_invariants=False)


def all_rows(gradient: torch.Tensor) -> torch.Tensor:
    """A dense gradient (rows, dim) as a sparse one of all rows."""
    ids = torch.arange(len(gradient), device=gradient.device)[None]
    return torch.sparse_coo_tensor(ids, gradient, gradient.shape, is_coalesced=True, check_invariants=False)


def table_optimizer(
    spec: Optimizer, tables: Iterable[nn.Parameter], whole: Container[int] = ()
) -> tuple[torch.optim.Optimizer, LazyRows]:
    """torch's own optimizer for the sparse gradients of tables, and what prepares these for it, with `whole` as there.

    Unlike a shard's, SparseAdam corrects its bias by the steps of the table, not of the row, and adds its eps before
    it does. ValueError for what torch has not for sparse gradients.
    """
    parameters = list(tables)
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]  # else torch warns
    optimizer: torch.optim.Optimizer
    match spec:
        case Adam():
            optimizer = torch.optim.SparseAdam(parameters, betas=(spec.beta1, spec.beta2), eps=spec.eps)
        case Adagrad():
            optimizer = torch.optim.Adagrad(
                parameters, eps=spec.eps, initial_accumulator_value=spec.initial_accumulator
            )
        case SGD(momentum=0.0):
            optimizer = torch.optim.SGD(parameters)
        case _:
            momentum = " with momentum" if isinstance(spec, SGD) else ""
            raise ValueError(
                f"torch has no {spec.name}{momentum} for sparse gradients; use SGD, Adagrad, Adam or AdamW"
            )
    rows = LazyRows(spec, whole)
    optimizer.register_step_pre_hook(rows)
    return _begin(optimizer, spec, "embedding"), rows


def _begin(optimizer: torch.optim.Optimizer, spec: Optimizer, name: str) -> torch.optim.Optimizer:
    group: dict[str, Any]
    for group in optimizer.param_groups:
        group.update(lr=spec.lr, name=name)  # here, for not all of them begin with a rate of 0
    return optimizer
