"""GMF, MLP and NeuMF: He et al., "Neural Collaborative Filtering", WWW 2017.

ids (B, 2) hold the user and the item. `factors` are the paper's predictive factors, the width of the last hidden layer:
8 factors give the paper's MLP 64-32-16-8 over embeddings of dim 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from embershard.worker.models.layers import Device, Tower
from embershard.worker.models.recommender import Recommender


def _tower(factors: int) -> Tower:
    return Tower(8 * factors, (4 * factors, 2 * factors, factors))


class GMF(Recommender):
    """Generalised matrix factorisation: a learned weighting of the elementwise product (equation 9)."""

    embedding_id_spaces: ClassVar[Mapping[str, str]] = {"user": "users", "item": "items"}

    def __init__(self, num_users: int, num_items: int, factors: int = 8, *, device: Device = None) -> None:
        super().__init__()
        self.user = nn.Embedding(num_users, factors, device=device)
        self.item = nn.Embedding(num_items, factors, device=device)
        self.output = nn.Linear(factors, 1)

    def embedding_inputs(self, ids: Tensor, dense: Tensor | None = None) -> dict[str, Tensor]:
        """Module name -> the ids it reads."""
        return {"user": ids[:, 0], "item": ids[:, 1]}

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B,) of ids (B, 2)."""
        logits: Tensor = self.output(self.user(ids[:, 0]) * self.item(ids[:, 1]))
        return logits.squeeze(1)


class MLP(Recommender):
    """A tower of ReLU layers, each half as wide as the one below, over user and item side by side (equation 10)."""

    embedding_id_spaces: ClassVar[Mapping[str, str]] = {"user": "users", "item": "items"}

    def __init__(self, num_users: int, num_items: int, factors: int = 8, *, device: Device = None) -> None:
        super().__init__()
        self.user = nn.Embedding(num_users, 4 * factors, device=device)
        self.item = nn.Embedding(num_items, 4 * factors, device=device)
        self.tower = _tower(factors)
        self.output = nn.Linear(factors, 1)

    def embedding_inputs(self, ids: Tensor, dense: Tensor | None = None) -> dict[str, Tensor]:
        """Module name -> the ids it reads."""
        return {"user": ids[:, 0], "item": ids[:, 1]}

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B,) of ids (B, 2)."""
        both = torch.cat([self.user(ids[:, 0]), self.item(ids[:, 1])], 1)
        logits: Tensor = self.output(self.tower(both))
        return logits.squeeze(1)


class NeuMF(Recommender):
    """GMF and MLP with embeddings of their own, joined before the last layer (equation 12)."""

    embedding_id_spaces: ClassVar[Mapping[str, str]] = {
        "gmf_user": "users",
        "mlp_user": "users",
        "gmf_item": "items",
        "mlp_item": "items",
    }

    def __init__(self, num_users: int, num_items: int, factors: int = 8, *, device: Device = None) -> None:
        super().__init__()
        self.gmf_user = nn.Embedding(num_users, factors, device=device)
        self.gmf_item = nn.Embedding(num_items, factors, device=device)
        self.mlp_user = nn.Embedding(num_users, 4 * factors, device=device)
        self.mlp_item = nn.Embedding(num_items, 4 * factors, device=device)
        self.tower = _tower(factors)
        self.output = nn.Linear(2 * factors, 1)

    def embedding_inputs(self, ids: Tensor, dense: Tensor | None = None) -> dict[str, Tensor]:
        """Module name -> the ids it reads."""
        user, item = ids[:, 0], ids[:, 1]
        return {"gmf_user": user, "mlp_user": user, "gmf_item": item, "mlp_item": item}

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B,) of ids (B, 2)."""
        user, item = ids[:, 0], ids[:, 1]
        product = self.gmf_user(user) * self.gmf_item(item)
        hidden = self.tower(torch.cat([self.mlp_user(user), self.mlp_item(item)], 1))
        logits: Tensor = self.output(torch.cat([product, hidden], 1))
        return logits.squeeze(1)
