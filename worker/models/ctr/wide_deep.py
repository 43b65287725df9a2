"""Wide&Deep: Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from embershard.worker.models.layers import Device, FirstOrder, IdSpace, Tower, embed, embed_features
from embershard.worker.models.recommender import Recommender, concat_dense


class WideDeep(Recommender):
    """A linear model over the ids beside an MLP over their embeddings."""

    def __init__(
        self,
        num_ids: IdSpace,
        num_fields: int,
        dim: int,
        num_dense: int = 0,
        *,
        hidden: Sequence[int] = (400, 400, 400),
        batch_norm: bool = False,
        dropout: float = 0.0,
        device: Device = None,
    ) -> None:
        super().__init__()
        self.embedding = embed_features(num_ids, dim, device)
        self.linear = embed_features(num_ids, 1, device, own_dims=False)
        self.first_order = FirstOrder(num_dense)
        self.deep = Tower(num_fields * dim + num_dense, hidden, batch_norm=batch_norm, dropout=dropout)
        self.output = nn.Linear(self.deep.out_dim, 1)

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B,) of ids (B, F) and dense (B, D)."""
        wide: Tensor = self.first_order(*embed(self.linear, ids, dense))
        deep: Tensor = self.output(self.deep(concat_dense(*embed(self.embedding, ids, dense))))
        return wide + deep.squeeze(1)
