"""LR: logistic regression over one-hot fields (as in Richardson et al., "Predicting Clicks", WWW 2007)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from embershard.worker.models.layers import Device, FirstOrder, table
from embershard.worker.models.recommender import Recommender


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
