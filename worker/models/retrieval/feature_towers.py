"""Two towers over features: Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations",
RecSys 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from embershard.worker.data.batch import Schema
from embershard.worker.models.layers import Device, FeatureEmbedding, Tower
from embershard.worker.models.recommender import RankingModel

_PRIME = 0x100000001B3  # of the hash FNV-1a with 64 bits


class FeatureTowers(RankingModel):
    """A vector of the features of `item`, and one of all others; the logit is their dot product over `temperature`.

    Each tower is an MLP over the vectors and numbers of its features. `normalize` scales its output to length 1, and
    `dropout` is of the user's vector behind that, as in TwoTower.
    """

    default_loss: ClassVar[str] = "sampled_softmax"
    in_batch: ClassVar[bool] = True

    def __init__(
        self,
        num_ids: Schema,
        dim: int,
        *,
        item: Sequence[str],
        hidden: Sequence[int] = (),
        normalize: bool = True,
        temperature: float = 0.1,
        dropout: float = 0.0,
        device: Device = None,
    ) -> None:
        super().__init__()
        self.embedding = FeatureEmbedding(num_ids, dim, device)
        self.features_of_item = tuple(item)
        self.item = [field.name for field in num_ids.fields if field.name in item]
        self.user = [field.name for field in num_ids.fields if field.name not in item]
        numbers = list(enumerate(num_ids.numbers))
        self._item_numbers = [place for place, name in numbers if name in item]
        self._user_numbers = [place for place, name in numbers if name not in item]
        spans = [range(f.start, f.start + f.width) for f in num_ids.fields if f.name in item]
        self._item_columns = [column for span in spans for column in span]
        self.user_tower = _tower(len(self.user) * dim + len(self._user_numbers), hidden, dim)
        self.item_tower = _tower(len(self.item) * dim + len(self._item_numbers), hidden, dim)
        self.normalize, self.temperature = normalize, temperature
        self.dropout = nn.Dropout(dropout)

    def embedding_inputs(self, ids: Tensor, dense: Tensor | None = None, lists: bool = False) -> dict[str, Tensor]:
        """Module name -> the ids it reads."""
        return super().embedding_inputs(ids, dense)

    def forward(self, ids: Tensor, dense: Tensor | None = None, lists: bool = False) -> Tensor:
        """Logits (B,) of ids (B, C) and dense (B, D); lists: (B, B) of each row's user and every row's item."""
        rows = self.embedding.lookup(ids)
        users = self.dropout(self._vectors(self.user_tower, rows.pooled(dense, self.user), dense, self._user_numbers))
        items = self._vectors(self.item_tower, rows.pooled(dense, self.item), dense, self._item_numbers)
        scores: Tensor = users @ items.T if lists else (users * items).sum(1)
        return scores / self.temperature

    def batch_items(self, ids: Tensor) -> Tensor:
        """(B,) a number of each row's item, at least 0: the same one for the same ids of its features."""
        keys = ids.new_zeros(len(ids))
        for column in self._item_columns:
            keys = (keys ^ ids[:, column]) * _PRIME
        return (keys ^ (keys >> 32)) & ((1 << 62) - 1)

    def user_vectors(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Vectors (N, dim) of the users of ids (N, C) and dense (N, D), whose columns of the item are not read."""
        rows = self.embedding.lookup(ids, self.user).pooled(dense, self.user)
        return self._vectors(self.user_tower, rows, dense, self._user_numbers)

    def item_vectors(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Vectors (N, dim) of the items of ids (N, C) and dense (N, D), whose columns of the user are not read."""
        rows = self.embedding.lookup(ids, self.item).pooled(dense, self.item)
        return self._vectors(self.item_tower, rows, dense, self._item_numbers)

    def _vectors(self, tower: nn.Module, rows: Tensor, dense: Tensor | None, numbers: Sequence[int]) -> Tensor:
        parts = [rows.flatten(1)]
        if numbers and dense is not None:
            parts.append(dense[:, numbers])
        vectors: Tensor = tower(torch.cat(parts, 1))
        return functional.normalize(vectors, dim=1) if self.normalize else vectors


def _tower(width: int, hidden: Sequence[int], dim: int) -> nn.Module:
    tower = Tower(width, hidden)
    return nn.Sequential(tower, nn.Linear(tower.out_dim, dim))
