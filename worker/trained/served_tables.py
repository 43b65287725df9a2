"""Embedding tables of an export, read from its files: rows by id, without shards."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from embershard.proto.arrays import Floats, Ids
from embershard.proto.optim.initial_rows import initial_rows
from embershard.proto.spec import Initializer


class SortedRows:
    """Rows of hashed ids: `ids` (N,) int64, ascending, and `rows` (N, dim) float32, both of which may lie on the disk.

    An id that is not among them gets the first values that its shard would give it. Threads may read it at once.
    """

    def __init__(self, ids: Ids, rows: Floats, initializer: Initializer, row_seed: int) -> None:
        self.ids, self.rows = ids, rows
        self._initializer, self._row_seed = initializer, row_seed

    def read(self, ids: Tensor) -> Tensor:
        """(n, dim) rows of flat ids (n,), in their order."""
        unique, index = np.unique(ids.numpy(), return_inverse=True)
        place = np.searchsorted(self.ids, unique)
        place[place == len(self.ids)] = 0
        found = self.ids[place] == unique if len(self.ids) else np.zeros(len(unique), bool)
        rows = np.empty((len(unique), self.rows.shape[1]), np.float32)
        rows[found] = self.rows[place[found]]
        if not found.all():
            rows[~found] = initial_rows(self._initializer, self._row_seed, unique[~found], rows.shape[1])
        return torch.from_numpy(rows[index.reshape(-1)])


class NumberedRows:
    """Rows of ids from 0 on: `weight` (N, dim), which may lie on the disk. IndexError for another id."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def read(self, ids: Tensor) -> Tensor:
        """(n, dim) rows of flat ids (n,), in their order."""
        return functional.embedding(ids, self._weight)


class ServedEmbedding(nn.Module):
    """An nn.Embedding or nn.EmbeddingBag over rows of hashed ids, or with a `max_norm`, to be read only."""

    def __init__(self, table: SortedRows | NumberedRows, like: nn.Embedding | nn.EmbeddingBag) -> None:
        super().__init__()
        # a model may have given the module attributes and hooks, which it reads
        self.__dict__.update({name: value for name, value in vars(like).items() if name != "_parameters"})
        self.table = table
        self.num_embeddings, self.embedding_dim = like.num_embeddings, like.embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = like.padding_idx, like.max_norm, like.norm_type

    def rows(self, ids: Tensor) -> Tensor:
        """Rows (*ids.shape, dim), scaled down to `max_norm` as torch does."""
        rows = self.table.read(ids.reshape(-1))
        if self.max_norm is not None:
            norm = rows.norm(self.norm_type, dim=1, keepdim=True)
            rows = torch.where(norm > self.max_norm, rows * (self.max_norm / (norm + 1e-7)), rows)
        return rows.view(*ids.shape, self.embedding_dim)

    def forward(self, input: Tensor) -> Tensor:
        """Rows of the ids `input`, (*input.shape, dim)."""
        return self.rows(input)


def served_table(table: SortedRows | NumberedRows, like: nn.Embedding | nn.EmbeddingBag) -> ServedEmbedding:
    """The table that serves these rows in the place of `like`."""
    return ServedEmbeddingBag(table, like) if isinstance(like, nn.EmbeddingBag) else ServedEmbedding(table, like)


class ServedEmbeddingBag(ServedEmbedding):
    """An nn.EmbeddingBag over rows of hashed ids, or with a `max_norm`, to be read only."""

    def __init__(self, table: SortedRows | NumberedRows, like: nn.EmbeddingBag) -> None:
        super().__init__(table, like)
        self.mode, self.include_last_offset = like.mode, like.include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Pooled rows, (bags, dim), of ids (bags, n), or of flat ids with the starts of the bags in `offsets`."""
        unique, index = input.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        padding = None
        if self.padding_idx is not None and bool((unique == self.padding_idx).any()):
            padding = int((unique == self.padding_idx).nonzero()[0, 0])
        return functional.embedding_bag(
            index,
            self.rows(unique),
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )
