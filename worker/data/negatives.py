"""Items that a user did not take, drawn for the interactions of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from embershard.proto.arrays import Floats, Ids
from embershard.worker.data.batch import Samples, Schema
from embershard.worker.data.stream import BlockSource, StreamDataset

Shares = npt.NDArray[np.float64]
_PRIME = np.int64(0x100000001B3)


@dataclass(frozen=True, kw_only=True)
class NegativeSampling:
    """Choose how many samples of other items follow each interaction, and which features are the item's.

    uniform: each item is as likely as another; popularity: as often as it was taken in the training data.
    """

    count: int
    by: Literal["uniform", "popularity"] = "uniform"
    features: tuple[str, ...]


class _Items(NamedTuple):
    """Items, each with a key of its ids, how often it was taken, its ids and its numbers."""

    keys: Ids
    counts: Ids
    ids: Ids
    dense: Floats


class ItemPool:
    """The items of the training data: what their features are, and how often each was taken."""

    def __init__(self, sampling: NegativeSampling, schema: Schema, numbers: tuple[str, ...]) -> None:
        self.sampling = sampling
        fields = {field.name: field for field in schema.fields}
        own = [fields[name] for name in sampling.features if name in fields]
        spans = [np.arange(field.start, field.start + field.width) for field in own]
        self.columns = np.concatenate([np.empty(0, np.int64), *spans]).astype(np.int64)
        weights = [np.arange(f.weights, f.weights + f.width) for f in own if f.weights is not None]
        plain = np.array([numbers.index(name) for name in sampling.features if name in numbers], np.int64)
        self.dense_columns = np.concatenate([plain, *weights]).astype(np.int64)
        empty, ids = np.empty(0, np.int64), np.empty((0, len(self.columns)), np.int64)
        dense = np.empty((0, len(self.dense_columns)), np.float32)
        self._parts = [_Items(empty, empty, ids, dense)]  # those of all blocks but a few are in the first one

    def __len__(self) -> int:
        return len(self._items.keys)

    def observe(self, rows: Samples) -> Ids:
        """Add the items of these training rows, with their counts, to those that negatives are drawn from.

        Returns the key of each row's item.
        """
        ids, keys = rows.ids[:, self.columns], self.keys(rows)
        dense = np.empty((len(rows), 0), np.float32) if rows.dense is None else rows.dense[:, self.dense_columns]
        self._parts.append(_distinct([_Items(keys, np.ones(len(rows), np.int64), ids, dense)]))
        if sum(len(part.keys) for part in self._parts[1:]) > len(self._parts[0].keys):  # else each block would sort all
            self._parts = [_distinct(self._parts)]
        return keys

    @property
    def _items(self) -> _Items:
        if len(self._parts) > 1:
            self._parts = [_distinct(self._parts)]
        return self._parts[0]

    @property
    def items(self) -> Samples:
        """The columns of all items, ordered by key."""
        found = self._items
        return Samples(found.ids, found.dense, np.ones(len(self), np.float32))

    def keys(self, rows: Samples) -> Ids:
        """(N,) a key of each row's item: of its ids."""
        return _keys(rows.ids[:, self.columns])

    def places(self, keys: Ids) -> Ids:
        """(N,) the place in `items` of each of these keys, which were observed."""
        return np.searchsorted(self._items.keys, keys).astype(np.int64)

    def beside(self, rows: Samples, shares: Shares) -> Samples:
        """Each sample, then `count` of other items, whose labels are 0.

        `shares` (N * count,), in 0 to below 1, choose them: each says which share of all draws comes before its item.
        """
        each = 1 + self.sampling.count
        out = rows.take(np.repeat(np.arange(len(rows)), each))
        drawn = np.flatnonzero(np.arange(len(out)) % each)
        picks = self._picked(shares)
        out.ids[np.ix_(drawn, self.columns)] = self._items.ids[picks]
        if out.dense is not None and len(self.dense_columns):
            out.dense[np.ix_(drawn, self.dense_columns)] = self._items.dense[picks]
        out.labels[drawn] = 0
        return out

    def _picked(self, shares: Shares) -> npt.NDArray[np.int64]:
        ends = np.cumsum(self._items.counts)
        draws: Ids = (shares * (len(self) if self.sampling.by == "uniform" else ends[-1])).astype(np.int64)
        return draws if self.sampling.by == "uniform" else np.searchsorted(ends, draws, side="right")


def _keys(ids: Ids) -> Ids:
    """(N,) a key of each row of ids."""
    keys = np.zeros(len(ids), np.int64)
    for column in ids.T:
        keys = (keys ^ column) * _PRIME
    return keys


def _distinct(parts: Sequence[_Items]) -> _Items:
    """The items of all parts, each once, as it was first, ordered by key."""
    keys, counts, ids, dense = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    keys, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return _Items(keys, np.bincount(inverse, counts).astype(np.int64), ids[first], dense[first])


class InteractionStream(StreamDataset):
    """A stream of interactions, each followed by samples of other items; new ones in each epoch.

    In an evaluation a row's own ids choose them, so that they are the same whichever worker reads the row.
    """

    def __init__(self, stream: StreamDataset, pool: ItemPool) -> None:
        self.__dict__.update(stream.__dict__)
        self._pool = pool

    def num_samples(self, split: str) -> int | None:
        """Samples of a split, those of other items included."""
        count = super().num_samples(split)
        return None if count is None else count * (1 + self._pool.sampling.count)

    def prepared(self, blocks: Iterator[Samples], random: np.random.Generator | None) -> Iterator[Samples]:
        """Blocks with samples of other items."""
        return (self._pool.beside(block, self._shares(block, random)) for block in blocks if len(block))

    def _shares(self, rows: Samples, random: np.random.Generator | None) -> Shares:
        count = self._pool.sampling.count
        if random is not None:
            return random.random(len(rows) * count)
        from embershard.worker.data.hashing import hash_numbers  # here: its kernels need numba

        draws = hash_numbers("row", _keys(rows.ids))[:, None] + np.arange(count)
        hashes = hash_numbers(f"negatives {self._seed}", draws.reshape(-1))
        return (hashes >> 9).astype(np.float64) / 2.0**53  # of 53 bits, as a float64 has


def observe_all(pool: ItemPool, source: BlockSource) -> ItemPool:
    """Let a pool take in all training rows."""
    for rows in source.blocks(0, 1, None):
        pool.observe(rows)
    return pool
