"""Samples that fit in memory, and the pointwise dataset over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from embershard.proto.errors import JobError
from embershard.worker.data.batch import Batch, Evaluation, Schema
from embershard.worker.data.shuffle import Positions, batches, check_enough, check_share, permutation


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples as arrays."""

    ids: npt.NDArray[np.int64]  # (N, F)
    dense: npt.NDArray[np.float32] | None  # (N, D)
    labels: npt.NDArray[np.float32]  # (N,)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, which: Positions | npt.NDArray[np.bool_] | slice) -> Samples:
        """The chosen samples."""
        return Samples(self.ids[which], None if self.dense is None else self.dense[which], self.labels[which])

    def batch(self) -> Batch:
        """These samples as one batch, without a copy."""
        dense = None if self.dense is None else torch.from_numpy(self.dense)
        return Batch(torch.from_numpy(self.ids), dense, torch.from_numpy(self.labels))

    @staticmethod
    def concat(parts: Sequence[Samples]) -> Samples:
        """All samples of at least one part, in order."""
        if len(parts) == 1:
            return parts[0]
        dense = [part.dense for part in parts if part.dense is not None]
        return Samples(
            np.concatenate([part.ids for part in parts]),
            np.concatenate(dense) if dense else None,
            np.concatenate([part.labels for part in parts]),
        )


class RowsDataset:
    """A pointwise dataset whose splits are in memory; `where` names it in errors."""

    def __init__(
        self, schema: Schema, splits: Mapping[str, Samples], *, where: str, seed: int = 0, shuffle: bool = True
    ) -> None:
        self._schema, self._rows, self._where = schema, dict(splits), where
        self._seed, self._shuffle = seed, shuffle

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
        """Every split but train."""
        return tuple(name for name in self._rows if name != "train")

    def num_samples(self, split: str) -> int | None:
        """Samples of a split."""
        return len(self._split(split))

    def train(self, epoch: int, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """This worker's share, shuffled anew each epoch (in file order with shuffle=False)."""
        check_share(rank, world_size, batch_size)
        rows = self._split("train")
        check_enough(self._where, len(rows), world_size)
        order = permutation(len(rows), self._seed, epoch) if self._shuffle else np.arange(len(rows))
        return (rows.take(part).batch() for part in batches(order, rank, world_size, batch_size))

    def evaluate(self, split: str, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """This worker's share of a split in file order."""
        check_share(rank, world_size, batch_size)
        rows = self._split(split)
        return (rows.take(part).batch() for part in batches(np.arange(len(rows)), rank, world_size, batch_size))

    def _split(self, split: str) -> Samples:
        if split not in self._rows:
            raise JobError(where=self._where, reason=f"no split {split!r} (known: {', '.join(self._rows)})")
        return self._rows[split]
