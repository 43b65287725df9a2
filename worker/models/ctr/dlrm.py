"""DLRM: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from embershard.worker.models.layers import Device, IdSpace, Tower, embed, embed_features
from embershard.worker.models.recommender import Recommender


class DLRM(Recommender):
    """A bottom MLP brings the dense features to the embeddings' dim; a top MLP reads them and the interactions.

    `interaction` is the paper's: `dot` takes the dot products of all pairs of vectors behind the bottom MLP's output,
    `cat` the vectors themselves. Without dense features there is no bottom MLP.
    """

    def __init__(
        self,
        num_ids: IdSpace,
        num_fields: int,
        dim: int,
        num_dense: int = 0,
        *,
        bottom: Sequence[int] = (512, 256, 64),
        hidden: Sequence[int] = (512, 256),
        interaction: Literal["dot", "cat"] = "dot",
        batch_norm: bool = False,
        dropout: float = 0.0,
        device: Device = None,
    ) -> None:
        super().__init__()
        self.embedding = embed_features(num_ids, dim, device)
        self.interaction = interaction
        vectors = num_fields + (num_dense > 0)
        self.bottom = Tower(num_dense, (*bottom, dim), batch_norm=batch_norm) if num_dense else None
        width = vectors * dim
        if interaction == "dot":
            width = vectors * (vectors - 1) // 2 + (dim if num_dense else 0)
        self.top = Tower(width, hidden, batch_norm=batch_norm, dropout=dropout)
        self.output = nn.Linear(self.top.out_dim, 1)
        row, column = torch.tril_indices(vectors, vectors, -1)
        self.register_buffer("pairs", row * vectors + column, persistent=False)

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B,) of ids (B, F) and dense (B, D)."""
        vectors, numbers = embed(self.embedding, ids, dense)
        if self.bottom is None:
            head = vectors[:, 0, :0]  # no dense features: nothing stands before the interactions
        else:
            head = self.bottom(numbers)
            vectors = torch.cat([head.unsqueeze(1), vectors], 1)
        interactions = vectors.flatten(1) if self.interaction == "cat" else torch.cat([head, self._dots(vectors)], 1)
        logits: Tensor = self.output(self.top(interactions))
        return logits.squeeze(1)

    def _dots(self, vectors: Tensor) -> Tensor:
        """Dot products of all pairs of vectors, (B, V, dim) -> (B, V * (V - 1) / 2)."""
        pairs: Tensor = self.get_buffer("pairs")
        return torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, pairs)
