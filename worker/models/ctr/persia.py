"""The Adult income model of PERSIA's example and tests (Lian et al., "Persia", KDD 2022), for a like-for-like check."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from embershard.worker.models.layers import Device, IdSpace, embed, embed_features
from embershard.worker.models.recommender import Recommender


class PersiaDNN(Recommender):
    """Linear layers without activations: embeddings -> 128 and dense -> 16, batch norm, 256, 128, 1."""

    def __init__(self, num_ids: IdSpace, num_fields: int, dim: int, num_dense: int, *, device: Device = None) -> None:
        super().__init__()
        self.embedding = embed_features(num_ids, dim, device)
        self.sparse = nn.Sequential(nn.Linear(num_fields * dim, 128), nn.BatchNorm1d(128))
        self.dense = nn.Sequential(nn.Linear(num_dense, 16), nn.BatchNorm1d(16))
        self.head = nn.Sequential(nn.Linear(128 + 16, 256), nn.Linear(256, 128), nn.Linear(128, 1))

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B,) of ids (B, F) and dense (B, D)."""
        rows, numbers = embed(self.embedding, ids, dense)
        both = torch.cat([self.sparse(rows.flatten(1)), self.dense(numbers)], 1)
        logits: Tensor = self.head(both)
        return logits.squeeze(1)
