"""LR (Richardson et al., "Predicting Clicks", WWW 2007) and FM (Rendle, "Factorization Machines", ICDM 2010)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from embershard.worker.models.ctr.wide_deep import WideDeep
from embershard.worker.models.layers import Device, FirstOrder, pairwise_interactions, table
from embershard.worker.models.recommender import Recommender, concat_dense


class LR(Recommender):
    """bias + sum of one weight per id + dense @ weights."""

    embedding_id_spaces: ClassVar[Mapping[str, str]] = {"linear": "features"}

    def __init__(self, num_ids: int, num_dense: int = 0, *, device: Device = None) -> None:
        super().__init__()
        self.linear = table(num_ids, 1, device)
        self.first_order = FirstOrder(num_dense)

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B,) of ids (B, F) and dense (B, D)."""
        logits: Tensor = self.first_order(self.linear(ids), dense)
        return logits


class FM(Recommender):
    """First order plus the dot products of all pairs of fields; dense features enter in first order only."""

    embedding_id_spaces: ClassVar[Mapping[str, str]] = {"embedding": "features", "linear": "features"}

    def __init__(self, num_ids: int, dim: int, num_dense: int = 0, *, device: Device = None) -> None:
        super().__init__()
        self.embedding = table(num_ids, dim, device)
        self.linear = table(num_ids, 1, device)
        self.first_order = FirstOrder(num_dense)

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B,) of ids (B, F) and dense (B, D)."""
        first: Tensor = self.first_order(self.linear(ids), dense)
        return first + pairwise_interactions(self.embedding(ids))


class DeepFM(WideDeep):
    """Wide&Deep with an FM for its linear part: FM and MLP read the same embeddings, and their logits are added."""

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B,) of ids (B, F) and dense (B, D)."""
        rows = self.embedding(ids)
        first: Tensor = self.first_order(self.linear(ids), dense)
        deep: Tensor = self.output(self.deep(concat_dense(rows, dense)))
        return first + pairwise_interactions(rows) + deep.squeeze(1)
