"""Interactions with features of users and items, evaluated by ranking the items of a catalogue."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from embershard.proto.arrays import Ids
from embershard.worker.data.batch import Evaluation, Field, Samples, Schema
from embershard.worker.data.inputs.feature_ids import feature_id
from embershard.worker.data.inputs.rows import PADDING
from embershard.worker.data.negatives import ItemPool
from embershard.worker.data.shuffle import check_share
from embershard.worker.data.stream import BlockSource, StreamDataset, in_batches
from embershard.worker.metrics import Users

_log = logging.getLogger(__name__)
_NONE = np.empty(0, np.int64)
_Pairs = tuple[Ids, Ids]  # (N,) ids of users and (N,) keys of items


class RankedStream(StreamDataset):
    """A stream of interactions; in an evaluation each row is a user for whom all items are ranked, to find the row's.

    The items are those of all rows and of `catalogue`, samples with the columns of the item alone, and stay in memory.
    An item is the ids of its features; its numbers are those of its first row. `user` names the feature by which rows
    have the same user: items that the user took in train, and of test those in valid, are left out of a row's ranking.
    """

    def __init__(
        self,
        schema: Schema,
        sources: Mapping[str, BlockSource],
        pool: ItemPool,
        catalogue: Iterator[Samples],
        *,
        user: str | None = None,
        seed: int,
        shuffle_rows: int,
    ) -> None:
        super().__init__(schema, sources, seed=seed, shuffle_rows=shuffle_rows)
        self._pool = pool
        self._user = next((field for field in schema.fields if field.name == user), None)
        pairs = {split: self._observed(split) for split in self._sources}
        for rows in catalogue:
            pool.observe(self._whole(rows))
        self._user_ids = _NONE
        self._taken: dict[str, Ids] = {}  # before each split: number of a user * items + place of an item, ascending
        if self._user is not None:
            self._remember(self._user, pairs)

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
        """This worker's rows of a split, what each row's user took before, and the place of its item among `items`."""
        check_share(rank, world_size, batch_size)
        for rows in in_batches(self._source(split).blocks(rank, world_size, None), batch_size):
            if len(rows):
                batch, seen = rows.batch(), (_NONE, _NONE)
                if self._user is not None:
                    seen = self._seen(split, self._numbers(rows.ids[:, self._user.start]))
                places = self._pool.places(self._pool.keys(rows))
                yield Users(batch.ids, *seen, np.arange(len(rows)), places, batch.dense)

    def _observed(self, split: str) -> _Pairs:
        """Add the items of a split; its pairs, where users are known."""
        users, keys = [_NONE], [_NONE]
        for rows in self._sources[split].blocks(0, 1, None):
            own = self._pool.observe(rows)
            if self._user is not None:
                users.append(rows.ids[:, self._user.start].copy())  # a view would keep the block
                keys.append(own)
        return np.concatenate(users), np.concatenate(keys)

    def _remember(self, user: Field, pairs: Mapping[str, _Pairs]) -> None:
        """Note what the users of each evaluated split took in the splits before it."""
        self._user_ids = np.unique(np.concatenate([_NONE, *(pairs[split][0] for split in self.splits)]))
        nobody = feature_id(user.table, None)  # rows without a user are not all of one
        before, keys_before = pairs["train"]
        for split in self.splits:
            wanted = np.isin(before, self._user_ids) & (before != nobody)
            own, places = self._numbers(before[wanted]), self._pool.places(keys_before[wanted])
            taken = self._taken[split] = np.unique(own * len(self._pool) + places)
            users, keys = pairs[split]
            to_find = self._numbers(users) * len(self._pool) + self._pool.places(keys)
            if again := int(np.isin(to_find, taken).sum()):
                _log.warning(
                    "%s: of %s, %d of %d items are among those that their users took before, and count as not found: a "
                    "ranking leaves these out; to rank them, remove evaluate.user",
                    self._source(split).where, split, again, len(to_find)
                )  # fmt: skip
            before, keys_before = np.concatenate([before, users]), np.concatenate([keys_before, keys])

    def _seen(self, split: str, users: Ids) -> tuple[Ids, Ids]:
        """(S,) positions in `users`, and (S,) places of items: what users with these numbers took before a split."""
        taken, num_items = self._taken[split], len(self._pool)
        starts, ends = np.searchsorted(taken, users * num_items), np.searchsorted(taken, (users + 1) * num_items)
        counts = ends - starts
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(np.arange(len(users)), counts), taken[np.repeat(starts, counts) + within] % num_items

    def _numbers(self, users: Ids) -> Ids:
        """(N,) numbers of the ids of users who are evaluated."""
        return np.searchsorted(self._user_ids, users).astype(np.int64)

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
