"""DeepFM: Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI 2017."""

from __future__ import annotations

from torch import Tensor

from embershard.worker.models.layers import pairwise_interactions
from embershard.worker.models.recommender import concat_dense
from embershard.worker.models.wide_deep import WideDeep


class DeepFM(WideDeep):
    """Wide&Deep with an FM for its linear part: FM and MLP read the same embeddings, and their logits are added."""

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B,) of ids (B, F) and dense (B, D)."""
        rows = self.embedding(ids)
        first: Tensor = self.first_order(self.linear(ids), dense)
        deep: Tensor = self.output(self.deep(concat_dense(rows, dense)))
        return first + pairwise_interactions(rows) + deep.squeeze(1)
