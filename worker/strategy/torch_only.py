"""Strategies `local`, `dp` and `ddp`: all weights in the workers, by torch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel

from embershard.proto.errors import JobError
from embershard.proto.monitoring.memory import usable_memory
from embershard.proto.spec import Constant, Initializer, Normal, Uniform, name_key
from embershard.worker.client.connections import ClientStats
from embershard.worker.job.job import Job
from embershard.worker.models.loss import weight_by
from embershard.worker.nn.activations import TABLES
from embershard.worker.patterns import first_match
from embershard.worker.strategy.allreduce import SynchronousSteps, all_reduced
from embershard.worker.strategy.optimizers import all_rows, by_spec, dense_optimizer, dense_specs, table_optimizer
from embershard.worker.strategy.protocol import EpochBatch, StepBatch, Strategy, step_batches
from embershard.worker.strategy.state import TorchWeights

Table = nn.Embedding | nn.EmbeddingBag
_COPIES = 3  # of a table: its rows, and Adam's two moments


def materialise(
    model: nn.Module, initializers: Mapping[str, Initializer | None], seed: int, device: torch.device
) -> dict[str, Table]:
    """Give the tables of a model that are on the meta device memory and first values; all of its tables by name.

    The values are of the distribution that shards draw from, though not the very same ones; every process with the
    same seed has the same. Tables of one weight still share it. JobError where memory cannot hold them.
    """
    # a parametrized one has no weight of its own: it is trained as dense weights are
    tables = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, TABLES) and isinstance(module.weight, nn.Parameter)
    }
    _check_memory(tables, device)
    made: dict[torch.Tensor, nn.Parameter] = {}
    for name, table in tables.items():
        table.register_forward_pre_hook(_bring_ids, with_kwargs=True)
        if not table.weight.is_meta:  # a user's model has made its values itself
            continue
        if (shared := made.get(table.weight)) is not None:
            table.weight = shared
            continue
        initializer = initializers[first_match(name, initializers) or "*"] or Normal()
        weight = torch.empty(table.num_embeddings, table.embedding_dim, dtype=torch.float32, device="cpu")
        generator = torch.Generator().manual_seed(name_key(f"{seed}/{name}") >> 1)
        match initializer:
            case Constant(value=value):
                weight.fill_(value)
            case Uniform(low=low, high=high):
                weight.uniform_(low, high, generator=generator)
            case Normal(mean=mean, std=std):
                weight.normal_(mean, std, generator=generator)
        parameter = nn.Parameter(weight.to(device), requires_grad=table.weight.requires_grad)
        made[table.weight] = table.weight = parameter
    return tables


def row_gradients(model: nn.Module, tables: Mapping[str, Table]) -> set[int]:
    """Have torch give the gradients of tables as rows, where it can; ids of the weights whose dense one is of all rows.

    It has none of rows for mode max and scale_grad_by_freq, none here of a table with parameters of its own, and none
    of a weight that is a layer's, too. This one's is of all rows, as is that of a weight which a step uses as a whole,
    by F.linear or a regulariser.
    """
    layers = [module for module in model.modules() if not isinstance(module, TABLES)]
    of_layers = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
    dense = {id(table.weight) for table in tables.values() if not _may_be_sparse(table)}
    for table in tables.values():
        table.sparse = id(table.weight) not in of_layers | dense
    for weight in {table.weight for table in tables.values() if table.sparse}:
        if weight.requires_grad:
            # before torch's DistributedDataParallel sees it, which takes none but rows of such a table
            weight.register_post_accumulate_grad_hook(_as_rows)  # type: ignore[no-untyped-call]
    return of_layers


def _may_be_sparse(table: Table) -> bool:
    is_max = isinstance(table, nn.EmbeddingBag) and table.mode == "max"
    # for DistributedDataParallel the gradients of all parameters of a module are sparse, or none of them
    return not is_max and not table.scale_grad_by_freq and len(list(table.parameters())) == 1


def _as_rows(weight: torch.Tensor) -> None:
    if weight.grad is not None and not weight.grad.is_sparse:
        weight.grad = all_rows(weight.grad)


def _check_memory(tables: Mapping[str, Table], device: torch.device) -> None:
    if device.type == "cuda":
        room, owner = torch.cuda.get_device_properties(device).total_memory, str(device)
    else:
        room, owner = usable_memory(), "memory that this process may use"
    for name, table in tables.items():
        size = 4 * table.num_embeddings * table.embedding_dim
        if size * _COPIES > room:
            reason = (
                f"table {name!r} of {table.num_embeddings:,} rows of dim {table.embedding_dim}, with its optimizer's "
                f"state, does not fit the {room / 2**30:,.2f} GiB of {owner}; strategy ps holds the rows that are used"
            )
            raise JobError(where="strategy", reason=reason)


def _bring_ids(
    table: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Ids wait on the host, where a session would route them."""
    weight = table.weight
    assert isinstance(weight, torch.Tensor)

    def bring(value: Any) -> Any:
        return value.to(weight.device, non_blocking=True) if isinstance(value, torch.Tensor) else value

    return tuple(map(bring, inputs)), {name: bring(value) for name, value in named.items()}


class TorchStrategy(Strategy):
    """nn.Embedding tables with sparse gradients, beside the dense weights."""

    num_shards = clock = 0

    def __init__(self, job: Job, model: nn.Module, device: torch.device) -> None:
        self._tables = materialise(model, job.initializers(), job.train.seed, device)
        whole = row_gradients(model, self._tables)
        self._prefix, self._weigh = job.prefix, weight_by(model, own_loss=job.own_loss is not None)
        self.model: nn.Module = model.to(device)
        self.module: nn.Module = model
        self._together = SynchronousSteps.join() if job.strategy == "ddp" else None
        if job.strategy == "dp":
            self.module = DataParallel(model)
        elif self._together is not None:
            # gloo, for nccl adds up no sparse gradients
            gloo = dist.new_group(backend="gloo")
            self.module = all_reduced(model, views=False, group=gloo)
        # once, for tables may share a weight; that of the first name decides
        rows: dict[torch.Tensor, str] = {table.weight: name for name, table in reversed(self._tables.items())}
        dense = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p not in rows]
        named = [(name, weight) for weight, name in reversed(rows.items()) if isinstance(weight, nn.Parameter)]
        of_tables = [table_optimizer(*group, whole) for group in by_spec(job.embedding.optimizers(), named)]
        self._lazy = [lazy for _, lazy in of_tables]
        self.optimizers = [optimizer for optimizer, _ in of_tables]
        self.optimizers += [dense_optimizer(*group) for group in by_spec(dense_specs(job), dense)]

    @property
    def agree(self) -> Callable[[float], float] | None:
        """One norm of all workers' norms."""
        return None if self._together is None else self._together.agree

    @property
    def stats(self) -> ClientStats:
        """Counters: seconds of waiting for other workers, and rows that were skipped."""
        waited = 0.0 if self._together is None else self._together.waited
        skipped = sum(lazy.skipped for lazy in self._lazy)
        return ClientStats(wait_seconds=waited, workers_wait_seconds=waited, skipped_rows=skipped)

    def batches(self, batches: Iterator[EpochBatch]) -> Iterator[StepBatch]:
        """Iterate over the batches of this worker's steps."""
        weighed = step_batches(batches, self._weigh)
        return weighed if self._together is None else self._together.batches(weighed)

    def step(self, weight: float) -> None:
        """Apply the optimizers to the weights."""
        for lazy in self._lazy:
            lazy.without_zeros = self._together is not None and self._together.any_idle
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def skip(self) -> None:
        """Drop the gradients of this step."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def collective_errors(self) -> AbstractContextManager[None]:
        """WorkerLost where a collective fails."""
        return nullcontext() if self._together is None else self._together.collective_errors()

    @property
    def local_weights(self) -> TorchWeights:
        """All weights of the model, with their optimizers."""
        return TorchWeights(self.model, self.optimizers)

    def table_rows(self) -> dict[str, int]:
        """Return the number of rows of each table."""
        return {self._prefix + name: table.num_embeddings for name, table in self._tables.items()}
