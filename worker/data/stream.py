"""Datasets larger than memory: blocks of rows, shared out over workers, shuffled through a buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from embershard.proto.errors import JobError
from embershard.worker.data.batch import Batch, Evaluation, Samples, Schema
from embershard.worker.data.shuffle import check_share

SHUFFLE_ROWS = 1 << 18  # of 39 columns: 70 MB


class BlockSource(Protocol):
    """The files of one split as blocks of rows."""

    @property
    def where(self) -> str:
        """The files that errors should name."""

    def check(self) -> None:
        """Look at every file, without reading all of it. JobError where one has no rows, or none of this layout."""

    def num_rows(self) -> int | None:
        """Samples, where that is known without reading everything."""

    def fingerprint(self) -> dict[str, object]:
        """Return what changes when a file is edited, added or moved, so that a resumed run warns; empty if unknown."""

    def blocks(self, rank: int, world_size: int, shuffle: np.random.Generator | None) -> Iterator[Samples]:
        """This worker's blocks, in file order or in an order drawn from `shuffle` (the same one on each worker).

        The workers' shares are disjoint and cover everything.
        """


class StreamDataset:
    """A pointwise dataset read anew in each epoch.

    A worker's share is whole blocks of rows, so shares differ by up to a block. Training visits blocks in a random
    order and mixes rows in a buffer of `shuffle_rows`, so memory is that buffer and one block. Every file of every
    split is looked at first: what is wrong with one to evaluate on should not end a training after its first epoch.
    """

    def __init__(
        self, schema: Schema, sources: Mapping[str, BlockSource], *, seed: int = 0, shuffle_rows: int = SHUFFLE_ROWS
    ) -> None:
        if shuffle_rows < 1:
            raise ValueError(f"shuffle_rows must be at least 1, got {shuffle_rows}")
        self._schema, self._sources = schema, dict(sources)
        self._seed, self._shuffle_rows = seed, shuffle_rows
        for source in self._sources.values():
            source.check()

    @property
    def schema(self) -> Schema:
        """Features and the id space."""
        return self._schema

    @property
    def evaluation(self) -> Evaluation:
        """Labels and logits, one by one."""
        return "pointwise"

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of all splits but train."""
        return tuple(name for name in self._sources if name != "train")

    def num_samples(self, split: str) -> int | None:
        """Samples of a split, where the files tell without being read."""
        return self._source(split).num_rows()

    def fingerprint(self) -> dict[str, object]:
        """Return what changes when a file of train is edited, added or moved, for a resumed run; empty if unknown."""
        return self._source("train").fingerprint()

    def train(self, epoch: int, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """This worker's blocks, shuffled; JobError (here or at the first batch) if it would get no samples."""
        check_share(rank, world_size, batch_size)
        blocks = self._source("train").blocks(rank, world_size, np.random.default_rng((self._seed, epoch)))
        own = np.random.default_rng((self._seed, epoch, rank))
        prepared = self.prepared(blocks, own)
        return self._train(shuffled(prepared, self._shuffle_rows, own), rank, world_size, batch_size)

    def evaluate(self, split: str, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """This worker's blocks in file order; the share may be empty."""
        check_share(rank, world_size, batch_size)
        blocks = self.prepared(self._source(split).blocks(rank, world_size, None), None)
        return (rows.batch() for rows in in_batches(blocks, batch_size))

    def prepared(self, blocks: Iterator[Samples], random: np.random.Generator | None) -> Iterator[Samples]:
        """Blocks as they are to be used, without `random` for an evaluation; here: as they are read."""
        return blocks

    def _train(self, blocks: Iterator[Samples], rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        empty = True
        for rows in in_batches(blocks, batch_size):
            empty = False
            yield rows.batch()
        if empty:
            reason = f"no samples for worker {rank} of {world_size}: too few rows, or blocks of them"
            advice = "start fewer workers, or lower data.splits"
            raise JobError(where=self._source("train").where, reason=f"{reason}; {advice}")

    def _source(self, split: str) -> BlockSource:
        if split not in self._sources:
            where = next(iter(self._sources.values())).where
            raise JobError(where=where, reason=f"no split {split!r} (known: {', '.join(self._sources)})")
        return self._sources[split]


def shuffled(blocks: Iterator[Samples], buffer_rows: int, generator: np.random.Generator) -> Iterator[Samples]:
    """The same rows in another order: whenever the buffer is full it is mixed and half of it goes out."""
    kept: list[Samples] = []
    held = 0
    for block in blocks:
        kept.append(block)
        held += len(block)
        if held >= buffer_rows:
            order = generator.permutation(held)
            buffer = Samples.concat(kept)
            keep = min(buffer_rows // 2, held)
            yield buffer.take(order[keep:])
            kept, held = [buffer.take(order[:keep])], keep
    if held:
        yield Samples.concat(kept).take(generator.permutation(held))


def in_batches(blocks: Iterator[Samples], batch_size: int) -> Iterator[Samples]:
    """The same rows in the same order, batch_size at a time; the last batch may be smaller."""
    kept: list[Samples] = []
    held = 0
    for block in blocks:
        kept.append(block)
        held += len(block)
        if held >= batch_size:
            rows = Samples.concat(kept)
            whole = held - held % batch_size
            for start in range(0, whole, batch_size):
                yield rows.take(slice(start, start + batch_size))
            kept, held = [rows.take(slice(whole, held))], held - whole
    if held:
        yield Samples.concat(kept)
