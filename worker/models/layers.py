"""Layers that several models share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Device = torch.device | str | None


def table(num_ids: int, dim: int, device: Device) -> nn.Embedding:
    """An embedding table for ids 0..num_ids-1.

    On the meta device it has no memory and may have more rows than a tensor can have floats (hashed ids have 2**62):
    the row count is then `num_embeddings` alone and the weight's shape a stand-in.
    """
    if device is None or torch.device(device).type != "meta":
        return nn.Embedding(num_ids, dim, device=device)
    # from_pretrained draws no first values; for those of the meta device torch imports its compiler
    weight = torch.empty(1, dim, device=device)
    embedding: nn.Embedding = nn.Embedding.from_pretrained(weight, freeze=False)  # type: ignore[no-untyped-call]
    embedding.num_embeddings = num_ids
    return embedding


class Tower(nn.Sequential):
    """Hidden layers, each Linear, [batch norm], ReLU, [dropout]; (B, in_dim) -> (B, hidden[-1])."""

    def __init__(self, in_dim: int, hidden: Sequence[int], *, batch_norm: bool = False, dropout: float = 0.0) -> None:
        layers: list[nn.Module] = []
        for out_dim in hidden:
            layers.append(nn.Linear(in_dim, out_dim))
            if batch_norm:
                layers.append(nn.BatchNorm1d(out_dim))
            layers.append(nn.ReLU())
            if dropout:
                layers.append(nn.Dropout(dropout))
            in_dim = out_dim
        super().__init__(*layers)
        self.out_dim = in_dim


class FirstOrder(nn.Module):
    """The linear part that LR, FM, DeepFM and Wide&Deep share: bias + sum of the ids' weights + dense @ weights."""

    def __init__(self, num_dense: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.dense_weight = nn.Parameter(torch.zeros(num_dense)) if num_dense else None

    def forward(self, weights: Tensor, dense: Tensor | None) -> Tensor:
        """Logits (B,) of the ids' weights (B, F, 1) and dense (B, D)."""
        logits = weights.sum((1, 2)) + self.bias
        if self.dense_weight is None or dense is None:
            return logits
        return logits + dense @ self.dense_weight


def pairwise_interactions(rows: Tensor) -> Tensor:
    """Sum over all pairs of fields of their dot product, (B, F, dim) -> (B,), in O(F dim) (Rendle 2010, lemma 3.1)."""
    return 0.5 * (rows.sum(1).square() - rows.square().sum(1)).sum(1)
