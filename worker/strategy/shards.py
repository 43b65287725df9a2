"""Strategies `ps` and `hybrid`: embeddings on the shards, dense weights there too or in the workers, by torch."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from embershard.worker.client import Stats
from embershard.worker.job import Job
from embershard.worker.models.recommender import Recommender
from embershard.worker.session import Session
from embershard.worker.strategy.protocol import Numbered, Turn
from embershard.worker.wrap import wrap


class ShardStrategy:
    """A model whose rows a session pulls and pushes."""

    def __init__(self, job: Job, model: Recommender, session: Session) -> None:
        self.session = session
        wrapped = wrap(
            model,
            session,
            optimizer=job.embedding.optimizer.build(),
            dense_optimizer=job.dense.optimizer.build() if job.dense.optimizer else None,
            initializer=job.embedding.initializer.build() if job.embedding.initializer else None,
            seed=job.train.seed,
            prefix=job.prefix,
        )
        assert isinstance(wrapped, Recommender)
        self.model = wrapped
        self.module: nn.Module = wrapped
        self._ahead = job.train.ahead
        if job.embedding.cache is not None:
            session.cache_rows(job.embedding.cache.rows, job.embedding.cache.staleness)

    @property
    def num_shards(self) -> int:
        """Shards that hold rows."""
        return self.session.client.num_shards

    @property
    def stats(self) -> Stats:
        """Counters since the start."""
        return self.session.stats

    def turns(self, batches: Iterator[Numbered]) -> Iterator[Turn]:
        """The batches, with their rows pulled ahead; its end is the end of all that is in flight."""
        if self._ahead is not None:
            # a loss may call the model in its own way, but on these ids
            batches = self.session.prefetch(
                batches, staleness=self._ahead, inputs=lambda item: self.model.embedding_inputs(item[1].ids)
            )
        for epoch, batch in batches:
            yield Turn(epoch, batch, len(batch), weight=len(batch))

    def gradients(self) -> list[Tensor]:
        """Of rows, by table, and dense ones."""
        dense = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return [part.gradients for part in self.session.gradients()] + dense

    def step(self, turn: Turn, lr_scale: float) -> None:
        """Push what backward left."""
        self.session.lr_scale = lr_scale
        self.session.step()

    def skip(self, turn: Turn) -> None:
        """Push nothing."""
        self.session.zero_grad()
        self.session.step()

    def rest(self) -> None:
        """Training pauses."""

    def resume(self) -> None:
        """Training goes on."""

    def refresh(self) -> None:
        """Read everything anew at the next forward."""
        self.session.refresh()

    def table_rows(self) -> dict[str, int]:
        """Table -> rows on all shards."""
        rows: dict[str, int] = {}
        for status in self.session.client.status():
            for table in status.tables:
                rows[table.name] = rows.get(table.name, 0) + table.rows
        return rows
