"""Batches, the schema of their ids, and the Dataset protocol that every reader implements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from embershard.proto.errors import JobError
from embershard.worker.data.inputs.rows import RowInputs
from embershard.worker.data.shuffle import Positions, batches, check_enough, check_share, permutation

if TYPE_CHECKING:  # files are looked at before training without torch, which takes seconds to import
    import torch

    from embershard.worker.metrics import Users


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples as arrays: ids, dense features, labels and weights. `Samples.of` converts other types, and tensors."""

    ids: npt.NDArray[np.int64]  # (N, C)
    dense: npt.NDArray[np.float32] | None  # (N, D)
    labels: npt.NDArray[np.float32]  # (N,), or (N, L) for several, where NaN stands for a missing one
    weights: npt.NDArray[np.float32] | None = None  # (N,): how much a sample counts in the loss

    @classmethod
    def of(cls, ids: object, dense: object, labels: object, weights: object = None) -> Samples:
        """Convert arrays or tensors to samples, with the types above; `dense` and `weights` may be None.

        ValueError if shapes or lengths do not fit, if ids are not integers, or if other values are not numbers.
        """
        numbers = _numbers("ids", ids, np.int64, 2)
        floats = None if dense is None else _numbers("dense features", dense, np.float32, 2)
        shown = floats if floats is not None and floats.shape[1] else None
        weighed = None if weights is None else _numbers("weights", weights, np.float32, 1)
        found = cls(numbers, shown, _numbers("labels", labels, np.float32, 1, 2), weighed)
        arrays = {"ids": numbers, "labels": found.labels, "dense features": floats, "weights": weighed}
        lengths = {name: len(array) for name, array in arrays.items() if array is not None}
        if len(set(lengths.values())) > 1:
            shown_lengths = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise ValueError(f"arrays of different lengths: {shown_lengths}")
        return found

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, which: Positions | npt.NDArray[np.bool_] | slice) -> Samples:
        """Return the chosen samples, as arrays."""
        dense, weights = self.dense, self.weights
        return Samples(
            self.ids[which],
            None if dense is None else dense[which],
            self.labels[which],
            None if weights is None else weights[which],
        )

    def batch(self) -> Batch:
        """Return these samples as one batch, without a copy."""
        import torch

        dense = None if self.dense is None else torch.from_numpy(self.dense)
        weights = None if self.weights is None else torch.from_numpy(self.weights)
        return Batch(torch.from_numpy(self.ids), dense, torch.from_numpy(self.labels), weights=weights)

    @staticmethod
    def concat(parts: Sequence[Samples]) -> Samples:
        """Concatenate one or more parts, in order."""
        if len(parts) == 1:
            return parts[0]
        dense = [part.dense for part in parts if part.dense is not None]
        weights = [part.weights for part in parts if part.weights is not None]
        return Samples(
            np.concatenate([part.ids for part in parts]),
            np.concatenate(dense) if dense else None,
            np.concatenate([part.labels for part in parts]),
            np.concatenate(weights) if weights else None,
        )


def _numbers(name: str, value: object, dtype: type[np.generic], *dims: int) -> npt.NDArray[Any]:
    """An array of this type and of one of these dimensions, copied only where it has another type."""
    array = np.asarray(value)
    if array.ndim not in dims:
        known = " or ".join("(N,)" if dim == 1 else "(N, columns)" for dim in dims)
        raise ValueError(f"{name} have shape {array.shape}, not {known}")
    if array.dtype.kind not in ("iu" if dtype is np.int64 else "iufb"):
        raise ValueError(f"{name} are {array.dtype}, not {dtype.__name__}")
    return np.require(array, dtype, ["W"])  # torch takes no array that cannot be written


class RowsDataset:
    """A dataset in memory: the split "train", and other splits for evaluation.

    `where` is its name in errors; `seed` determines the order of each epoch. The dataset of a user-defined reader
    gets both from the job. `inputs` describes how ids and dense features are computed from columns, so that an
    export can score rows.
    """

    inputs: RowInputs | None = None

    def __init__(
        self,
        schema: Schema,
        splits: Mapping[str, Samples],
        *,
        where: str = "",
        seed: int | None = None,
        shuffle: bool = True,
        inputs: RowInputs | None = None,
    ) -> None:
        self.inputs = self.inputs if inputs is None else inputs
        self._schema, self._where, self._seed, self._shuffle = schema, where, seed, shuffle
        self._rows = {
            name: Samples.of(rows.ids, rows.dense, rows.labels, rows.weights) for name, rows in splits.items()
        }

    def set_defaults(self, where: str, seed: int) -> None:
        """Set the name in errors and the seed, if the dataset has none."""
        self._where = self._where or where
        self._seed = seed if self._seed is None else self._seed

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
        """Return the names of all splits except train."""
        return tuple(name for name in self._rows if name != "train")

    def num_samples(self, split: str) -> int | None:
        """Return the number of samples of a split."""
        return len(self._split(split))

    def train(self, epoch: int, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """This worker's share, shuffled anew each epoch (in file order with shuffle=False)."""
        check_share(rank, world_size, batch_size)
        rows = self._split("train")
        check_enough(self._where, len(rows), world_size)
        order = permutation(len(rows), self._seed or 0, epoch) if self._shuffle else np.arange(len(rows))
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


Evaluation = Literal["pointwise", "candidates", "ranking"]

NUM_HASHED_IDS = 1 << 62  # hashed ids are 0..2**62-1: non-negative int64, as torch's embeddings want them


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one batch, as tensors; a Schema describes their columns."""

    ids: torch.Tensor  # (B, C) int64
    dense: torch.Tensor | None  # (B, D) float32
    labels: torch.Tensor  # (B,) float32, or (B, L) for several labels, where NaN stands for a missing one
    groups: torch.Tensor | None = None  # (B,) int64: the user whom a candidate is ranked for; whole users per batch
    weights: torch.Tensor | None = None  # (B,) float32: how much each sample counts

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def weight(self) -> float:
        """Return the number of samples, or the sum of their weights: by which the loss is weighted among batches."""
        return len(self) if self.weights is None else float(self.weights.double().sum())


Pooling = Literal["none", "mean", "sum", "max", "sequence"]


@dataclass(frozen=True, slots=True)
class Field:
    """The columns of one feature in a batch: `width` columns of ids, filled from the left, the rest PADDING.

    `pooling`: how the rows of a list become one vector. "none": the feature has one value; "sequence": no pooling.
    """

    name: str
    table: str
    start: int  # its first column of ids
    width: int = 1
    pooling: Pooling = "none"
    weights: int | None = None  # first column of its weights among the dense features, `width` of them


@dataclass(frozen=True, slots=True)
class IdTable:
    """Describe an embedding table: its name, the number of its ids, and its dim."""

    name: str
    num_ids: int | None  # None: hashes in 0..2**62-1
    dim: int | None = None  # None: that of the job


@dataclass(frozen=True, slots=True)
class Schema:
    """Describe the features of a batch, and the size of their id space.

    `num_ids` is the size of the id space 0..num_ids-1 where the vocabulary is known, and None where ids are hashes
    in 0..2**62-1 (a table without a vocabulary).

    Without `fields` each feature is one column of ids, which are unique across features, so that one table can hold
    the rows of all features. With `fields`, one for each feature in the same order, a feature may have several
    columns and reads the table that it names among `tables`; the ids of each table start at 0, and `num_ids` has no
    meaning.
    """

    features: tuple[str, ...]
    num_dense: int  # numeric features; the weights of weighted lists come behind them in a batch
    num_ids: int | None
    fields: tuple[Field, ...] = ()
    tables: tuple[IdTable, ...] = ()
    labels: tuple[str, ...] = ("label",)
    numbers: tuple[str, ...] = ()  # names of the numeric features, where a model needs them

    @property
    def table_rows(self) -> int:
        """Rows that an nn.Embedding over these ids must have (on the meta device where ids are hashed)."""
        return NUM_HASHED_IDS if self.num_ids is None else self.num_ids

    @property
    def num_id_columns(self) -> int:
        """Columns of a batch's ids."""
        return sum(field.width for field in self.fields) if self.fields else len(self.features)

    @property
    def num_dense_columns(self) -> int:
        """Columns of a batch's dense features: the numeric ones, then the weights of weighted lists."""
        return self.num_dense + sum(field.width for field in self.fields if field.weights is not None)

    @property
    def num_vectors(self) -> int:
        """Vectors that a model gets of a sample: one for each feature that is no sequence."""
        return sum(field.pooling != "sequence" for field in self.fields) if self.fields else len(self.features)

    @property
    def is_hashed(self) -> bool:
        """Whether some table takes hashed ids, of which no memory can hold all."""
        return any(table.num_ids is None for table in self.tables) if self.fields else self.num_ids is None

    @property
    def id_limits(self) -> dict[str, int | None]:
        """Table -> the number that its ids are below, None for hashes."""
        return {table.name: table.num_ids for table in self.tables}


class Dataset(Protocol):
    """The interface of every reader. Errors in its files are JobError with `where` = file:line.

    Samples are numbered in an epoch's order and worker r of W takes r, r + W, r + 2W, ...: the shares are disjoint,
    cover everything, differ by at most one sample, and batch k of all workers together is the batch k of one worker
    with batch_size * W. (Streamed files split by blocks of rows instead; their docstrings say so.)
    """

    @property
    def schema(self) -> Schema:
        """Features and the id space."""

    @property
    def evaluation(self) -> Evaluation:
        """pointwise: labels and logits; candidates: `groups` are ranked lists; ranking: see RankingDataset."""

    @property
    def splits(self) -> tuple[str, ...]:
        """The names that `evaluate` takes."""

    def num_samples(self, split: str) -> int | None:
        """Samples of "train" (in one epoch) or of an evaluation split; None where only reading tells."""

    def train(self, epoch: int, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """This worker's share of an epoch, shuffled anew by (seed, epoch); the last batch may be smaller.

        JobError if there are more workers than samples.
        """

    def evaluate(self, split: str, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """This worker's share of a split, in a fixed order; it may be empty. JobError for an unknown split."""


class RankingDataset(Protocol):
    """A Dataset that is evaluated by ranking all items for each user, as a RankingModel scores them."""

    @property
    def items(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Ids (I,) or (I, C) and dense features (I, D) of all items, in the order of a score matrix's columns."""

    def users(self, split: str, rank: int, world_size: int, batch_size: int) -> Iterator[Users]:
        """This worker's share of the users that have something to be found."""
