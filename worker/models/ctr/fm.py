"""LR (Richardson et al., "Predicting Clicks", WWW 2007) and FM (Rendle, "Factorization Machines", ICDM 2010)."""

from __future__ import annotations

from torch import Tensor

from embershard.worker.models.ctr.wide_deep import WideDeep
from embershard.worker.models.layers import Device, FirstOrder, IdSpace, embed, embed_features, pairwise_interactions
from embershard.worker.models.recommender import Recommender, concat_dense


class LR(Recommender):
    """bias + sum of one weight per id + dense @ weights."""

    def __init__(self, num_ids: IdSpace, num_dense: int = 0, *, device: Device = None) -> None:
        super().__init__()
        self.linear = embed_features(num_ids, 1, device, own_dims=False)
        self.first_order = FirstOrder(num_dense)

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B,) of ids (B, F) and dense (B, D)."""
        logits: Tensor = self.first_order(*embed(self.linear, ids, dense))
        return logits


class FM(Recommender):
    """First order plus the dot products of all pairs of fields; dense features enter in first order only."""

    def __init__(self, num_ids: IdSpace, dim: int, num_dense: int = 0, *, device: Device = None) -> None:
        super().__init__()
        self.embedding = embed_features(num_ids, dim, device)
        self.linear = embed_features(num_ids, 1, device, own_dims=False)
        self.first_order = FirstOrder(num_dense)

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B,) of ids (B, F) and dense (B, D)."""
        first: Tensor = self.first_order(*embed(self.linear, ids, dense))
        return first + pairwise_interactions(embed(self.embedding, ids, dense)[0])


class DeepFM(WideDeep):
    """Wide&Deep with an FM for its linear part: FM and MLP read the same embeddings, and their logits are added."""

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B,) of ids (B, F) and dense (B, D)."""
        rows, numbers = embed(self.embedding, ids, dense)
        first: Tensor = self.first_order(*embed(self.linear, ids, dense))
        deep: Tensor = self.output(self.deep(concat_dense(rows, numbers)))
        return first + pairwise_interactions(rows) + deep.squeeze(1)
