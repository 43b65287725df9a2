"""Strategies `ps` and `hybrid`: embeddings on the shards, dense weights there too or in the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from embershard.proto.errors import JobError
from embershard.worker.client.byte_counts import ByteCounts, BytePart
from embershard.worker.client.client import Client
from embershard.worker.client.connections import ClientStats
from embershard.worker.compression.settings import describe_codecs
from embershard.worker.job.job import Job
from embershard.worker.models.loss import weight_by
from embershard.worker.models.user_defined import embedding_inputs_of
from embershard.worker.nn.activations import TABLES
from embershard.worker.nn.embedding import Embedding, EmbeddingBag
from embershard.worker.nn.optimizer import ShardOptimizer
from embershard.worker.nn.wrap import wrap
from embershard.worker.session.session import Session
from embershard.worker.strategy.allreduce import SynchronousSteps
from embershard.worker.strategy.dense import ReplicatedDense
from embershard.worker.strategy.optimizers import dense_specs
from embershard.worker.strategy.predicted_bytes import predict_volumes
from embershard.worker.strategy.protocol import EpochBatch, StepBatch, step_batches
from embershard.worker.strategy.state import TorchWeights


class ShardCounters:
    """Of the shards' counters, what came since this was made. A shard that was restarted since begins at zero."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._before = {status.instance: status for status in client.status()}

    def expired_leases(self) -> int:
        """Return how often a worker was evicted, as the first shard counts."""
        now = self._client.status()[0]
        before = self._before.get(now.instance)
        return now.expired_leases - (before.expired_leases if before else 0)

    def staleness_seen(self) -> tuple[int, ...]:
        """Pushes to all shards by the updates that their rows had missed: 0, 1, ...; the last: so many or more."""
        now = self._client.status()
        before = [self._before[status.instance] for status in now if status.instance in self._before]
        all_of, earlier = (zip_longest(*(s.staleness_seen for s in ss), fillvalue=0) for ss in (now, before))
        return tuple(sum(here) - sum(then) for here, then in zip_longest(all_of, earlier, fillvalue=()))

    def table_rows(self) -> dict[str, int]:
        """Table -> rows that exist now, on all shards."""
        rows: dict[str, int] = {}
        for status in self._client.status():
            for table in status.tables:
                rows[table.name] = rows.get(table.name, 0) + table.rows
        return rows


def _wrap(model: nn.Module, session: Session, **settings: Any) -> nn.Module:  # as of `wrap`
    """The model on the shards. JobError for one that cannot be wrapped."""
    try:
        return wrap(model, session, **settings)
    except ValueError as error:
        raise JobError(where="model", reason=str(error)) from None


def _move_layers(model: nn.Module, device: torch.device) -> None:
    """Bring all but the tables to a device, before a layer's weight may be that of a table on the shards."""
    for module in model.modules():
        if not isinstance(module, TABLES):
            module._apply(lambda tensor: tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]


class ShardStrategy:
    """A model whose rows a session pulls and pushes."""

    def __init__(self, job: Job, model: nn.Module, session: Session, device: torch.device) -> None:
        self.session = session
        self._counted = ShardCounters(session.client)
        in_workers = job.dense_mode != "ps"
        self._inputs, self._weigh = embedding_inputs_of(model), weight_by(model, own_loss=job.own_loss is not None)
        if self._inputs is None and job.train.prefetch:
            reason = f"{job.model.name} does not say which ids its tables read: give it a method embedding_inputs(ids)"
            raise JobError(where="train.prefetch", reason=f"{reason} that returns {{'table': ids}}, or use 0")
        _move_layers(model, device)
        wrapped = _wrap(
            model,
            session,
            optimizer=job.embedding.optimizers(),
            dense_optimizer=None if in_workers else dense_specs(job),
            dense=job.dense_mode,
            initializer=job.initializers(),
            seed=job.train.seed,
            prefix=job.prefix,
        )
        self.model = self.module = wrapped
        remote = [module for module in wrapped.modules() if isinstance(module, Embedding | EmbeddingBag)]
        for table in remote:
            table.to(device)
        self._trained = [module for module in remote if not module.frozen]
        self._rows = ShardOptimizer(session)
        self.optimizers: list[torch.optim.Optimizer] = [self._rows]
        self._dense: ReplicatedDense | None = None
        self._together: SynchronousSteps | None = None
        if in_workers:
            self._dense = ReplicatedDense(wrapped, job.dense_mode, dense_specs(job), device)
            self.module = self._dense.module
            self.optimizers += self._dense.optimizers
            self._together = SynchronousSteps.join(self._set_idle)
            if self._together is not None and job.train.accumulate == 1:
                self._dense.add_up_by(self._together)
        self._ahead = job.train.prefetch if self._inputs is not None else None
        if job.embedding.cache is not None:
            session.cache_rows(job.embedding.cache.rows, job.embedding.cache.staleness)

    @property
    def num_shards(self) -> int:
        """The number of shards that hold rows."""
        return self.session.client.num_shards

    @property
    def stats(self) -> ClientStats:
        """Counters since the session began."""
        stats = self.session.stats
        if self._together is not None:
            waited = self._together.waited
            stats = replace(
                stats,
                wait_seconds=stats.wait_seconds + waited,
                workers_wait_seconds=stats.workers_wait_seconds + waited,
            )
        if self._dense is not None:
            stats = replace(stats, skipped_rows=stats.skipped_rows + self._dense.skipped)
        return stats

    def predicted(self, moved: ByteCounts) -> Mapping[BytePart, float]:
        """Return the bytes that are expected for what was moved, by the codecs in use now."""
        return predict_volumes(moved, self.session.client)

    def codecs(self) -> str:
        """Return the codecs of this session's tables, as they are now."""
        compressor = self.session.client.compressor
        directions = compressor.directions()
        dense = {name: directions.pop(name) for name in list(directions) if compressor.is_dense(name)}
        return describe_codecs(directions, dense)

    def batches(self, batches: Iterator[EpochBatch]) -> Iterator[StepBatch]:
        """The batches, with their rows pulled ahead; its end is the end of all that is in flight."""
        self.session.reset_read_versions()  # an evaluation's
        if self._ahead is not None and (inputs := self._inputs) is not None:
            # a loss may call the model in its own way, but on these ids
            batches = self.session.prefetch(batches, staleness=self._ahead, inputs=lambda item: inputs(item[1]))
        weighed = step_batches(batches, self._weigh)
        if self._together is None or self._dense is None:
            return weighed
        return self._dense.gathered(self._together.batches(weighed))

    def step(self, weight: float) -> None:
        """Push what backward left, and change the weights that are here."""
        self._rows.weight = weight
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def skip(self) -> None:
        """Push nothing, and change nothing."""
        self._rows.skip()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    @property
    def agree(self) -> Callable[[float], float] | None:
        """The largest of all workers' norms, where they make every step together."""
        return None if self._together is None else self._together.agree

    def collective_errors(self) -> AbstractContextManager[None]:
        """WorkerLost where a collective fails."""
        return nullcontext() if self._together is None else self._together.collective_errors()

    @property
    def local_weights(self) -> TorchWeights | None:
        """The dense weights, where they are in the workers."""
        return None if self._dense is None else TorchWeights(self.model, self._dense.optimizers)

    @property
    def clock(self) -> int:
        """The clock of the next push."""
        return self.session.clock

    def pause(self) -> None:
        """Let the others' clock go on without this worker."""
        self.session.flush()
        if self.session.membership is not None:
            self.session.membership.pause()

    def resume(self, clock: int) -> None:
        """Push from `clock` on, or as soon after it as the shards agree."""
        if self.session.membership is not None:
            self.session.membership.resume(clock)

    def refresh(self) -> None:
        """Read everything anew at the next forward."""
        self.session.refresh()
        if self._dense is not None:
            self._dense.gather()

    def exact(self) -> AbstractContextManager[None]:
        """Return a context in which reads bypass the tables' codecs."""
        return self.session.exact()

    def expired_leases(self) -> int:
        """Return the number of leases that ended, as the first shard counts them."""
        return self._counted.expired_leases()

    def staleness_seen(self) -> tuple[int, ...]:
        """Return the histogram of staleness, summed over all shards."""
        return self._counted.staleness_seen()

    def table_rows(self) -> dict[str, int]:
        """Table -> rows on all shards."""
        return self._counted.table_rows()

    def _set_idle(self, idle: bool) -> None:
        # gradients of zero would move rows under momentum, Adam or weight decay
        for module in self._trained:
            module.frozen = idle
