"""The model of the tests of compression."""

from __future__ import annotations

import torch
from torch import nn


class BagModel(nn.Module):
    """Bags of ids, and one layer over them, or with `hidden` units two."""

    def __init__(self, num_ids: int, dim: int, hidden: int = 0) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(num_ids, dim, mode="sum")
        layers = [nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, 1)] if hidden else [nn.Linear(dim, 1)]
        self.top = nn.Sequential(*layers)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.bag(ids)).squeeze(1)

    def embedding_inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"bag": ids}
