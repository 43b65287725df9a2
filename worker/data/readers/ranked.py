"""Interactions with features of users and items, evaluated by ranking the items of a catalogue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from embershard.worker.data.batch import Evaluation, Samples, Schema
from embershard.worker.data.inputs.rows import PADDING
from embershard.worker.data.negatives import ItemPool, observe_all
from embershard.worker.data.shuffle import check_share
from embershard.worker.data.stream import BlockSource, StreamDataset, in_batches
from embershard.worker.metrics import Users


class RankedStream(StreamDataset):
    """A stream of interactions; in an evaluation each row is a user for whom all items are ranked, to find the row's.

    The items are those of all rows and of `catalogue`, samples with the columns of the item alone, and stay in memory.
    An item is the ids of its features; its numbers are those of its first row.
    """

    def __init__(
        self,
        schema: Schema,
        sources: Mapping[str, BlockSource],
        pool: ItemPool,
        catalogue: Iterator[Samples],
        *,
        seed: int,
        shuffle_rows: int,
    ) -> None:
        super().__init__(schema, sources, seed=seed, shuffle_rows=shuffle_rows)
        self._pool = pool
        for source in self._sources.values():
            observe_all(pool, source)
        for rows in catalogue:
            pool.observe(self._whole(rows))

    @property
    def evaluation(self) -> Evaluation:
        """Recall@K and NDCG@K over all items."""
        return "ranking"

    @property
    def items(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Ids (I, C) and dense features (I, D) of all items; the columns of other features hold nothing."""
        batch = self._whole(self._pool.items).batch()
        return batch.ids, batch.dense

    def users(self, split: str, rank: int, world_size: int, batch_size: int) -> Iterator[Users]:
        """This worker's rows of a split, and the place of each one's item among `items`."""
        check_share(rank, world_size, batch_size)
        none = np.empty(0, np.int64)
        for rows in in_batches(self._source(split).blocks(rank, world_size, None), batch_size):
            if len(rows):
                batch = rows.batch()
                yield Users(batch.ids, none, none, np.arange(len(rows)), self._pool.places(rows), batch.dense)

    def _whole(self, items: Samples) -> Samples:
        """Samples with all columns, of the columns of the item."""
        schema = self._schema
        ids = np.full((len(items), schema.num_id_columns), PADDING, np.int64)
        ids[:, self._pool.columns] = items.ids
        dense = None
        if schema.num_dense_columns:
            dense = np.zeros((len(items), schema.num_dense_columns), np.float32)
            if items.dense is not None:
                dense[:, self._pool.dense_columns] = items.dense
        return Samples(ids, dense, np.ones(len(items), np.float32))
