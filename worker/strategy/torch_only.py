"""Strategies `local`, `dp` and `ddp`: all weights in the workers, by torch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel

from embershard.worker.client.byte_counts import ByteCounts, BytePart
from embershard.worker.client.connections import ClientStats
from embershard.worker.job.job import Job
from embershard.worker.models.recommender import Recommender
from embershard.worker.strategy.allreduce import SynchronousSteps, all_reduced
from embershard.worker.strategy.optimizers import by_spec, dense_optimizer, dense_specs, table_optimizer
from embershard.worker.strategy.protocol import EpochBatch, StepBatch
from embershard.worker.strategy.state import TorchWeights
from embershard.worker.strategy.tables import materialise


class TorchStrategy:
    """nn.Embedding tables with sparse gradients, beside the dense weights."""

    num_shards = clock = 0

    def __init__(self, job: Job, model: Recommender, device: torch.device) -> None:
        self._tables = materialise(model, job.embedding.initializers(), job.train.seed, device)
        self._prefix = job.prefix
        self.model: Recommender = model.to(device)
        self.module: nn.Module = model
        self._together = SynchronousSteps.join() if job.strategy == "ddp" else None
        if job.strategy == "dp":
            self.module = DataParallel(model)
        elif self._together is not None:
            # gloo, for nccl adds up no sparse gradients
            gloo = dist.new_group(backend="gloo")
            self.module = all_reduced(model, views=False, group=gloo)
        rows = [(name, parameter) for name, table in self._tables.items() for parameter in table.parameters()]
        of_rows = {id(parameter) for _, parameter in rows}
        dense = [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in of_rows]
        of_tables = [table_optimizer(*group) for group in by_spec(job.embedding.optimizers(), rows)]
        self._lazy = [lazy for _, lazy in of_tables]
        self.optimizers = [optimizer for optimizer, _ in of_tables]
        self.optimizers += [dense_optimizer(*group) for group in by_spec(dense_specs(job), dense)]

    @property
    def agree(self) -> Callable[[float], float] | None:
        """One norm of all workers' norms."""
        return None if self._together is None else self._together.agree

    @property
    def stats(self) -> ClientStats:
        """What was waited for the other workers, and the rows that were left out."""
        waited = 0.0 if self._together is None else self._together.waited
        return ClientStats(wait_seconds=waited, skipped_rows=sum(lazy.skipped for lazy in self._lazy))

    def predicted(self, moved: ByteCounts) -> Mapping[BytePart, float]:
        """Nothing: no shard is asked."""
        return {}

    def turns(self, batches: Iterator[EpochBatch]) -> Iterator[StepBatch]:
        """The batches."""
        turns = (StepBatch(epoch, batch, len(batch)) for epoch, batch in batches)
        return turns if self._together is None else self._together.turns(turns)

    def step(self, weight: float) -> None:
        """Change the weights."""
        for lazy in self._lazy:
            lazy.without_zeros = self._together is not None and self._together.accompanied
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def skip(self) -> None:
        """Drop the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def rest(self) -> None:
        """Nobody waits for a worker between its steps."""

    def resume(self, clock: int) -> None:
        """Nothing was let go."""

    def refresh(self) -> None:
        """All workers hold the same weights."""

    def exact(self) -> AbstractContextManager[None]:
        """No codec rounds them."""
        return nullcontext()

    def others(self) -> AbstractContextManager[None]:
        """WorkerLost where a collective fails."""
        return nullcontext() if self._together is None else self._together.others()

    @property
    def held(self) -> TorchWeights:
        """All weights."""
        return TorchWeights(self.model, self.optimizers)

    def expired_leases(self) -> int:
        """There are none."""
        return 0

    def staleness_seen(self) -> tuple[int, ...]:
        """Nothing is pushed."""
        return ()

    def table_rows(self) -> dict[str, int]:
        """Table -> its rows."""
        return {self._prefix + name: table.num_embeddings for name, table in self._tables.items()}
