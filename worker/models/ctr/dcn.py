"""DCN-V2: Wang et al., "DCN V2: Improved Deep & Cross Network", WWW 2021."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from embershard.worker.models.layers import Device, IdSpace, Tower, embed, embed_features
from embershard.worker.models.recommender import Recommender, concat_dense


class CrossLayers(nn.Module):
    """Matrix cross layers, x_{l+1} = x_0 * (W_l x_l + b_l) + x_l; (B, width) -> (B, width) (equation 1)."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x0: Tensor) -> Tensor:
        """x_L of x_0 (B, width)."""
        x = x0
        for layer in self.layers:
            x = torch.addcmul(x, x0, layer(x))
        return x


class DCNV2(Recommender):
    """Cross layers and an MLP, one after the other (`stacked`) or side by side (`parallel`)."""

    def __init__(
        self,
        num_ids: IdSpace,
        num_fields: int,
        dim: int,
        num_dense: int = 0,
        *,
        cross_layers: int = 3,
        structure: Literal["stacked", "parallel"] = "parallel",
        hidden: Sequence[int] = (400, 400, 400),
        batch_norm: bool = False,
        dropout: float = 0.0,
        device: Device = None,
    ) -> None:
        super().__init__()
        width = num_fields * dim + num_dense
        self.structure = structure
        self.embedding = embed_features(num_ids, dim, device)
        self.cross = CrossLayers(width, cross_layers)
        self.deep = Tower(width, hidden, batch_norm=batch_norm, dropout=dropout)
        self.output = nn.Linear(self.deep.out_dim + (width if structure == "parallel" else 0), 1)

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B,) of ids (B, F) and dense (B, D)."""
        x0 = concat_dense(*embed(self.embedding, ids, dense))
        crossed = self.cross(x0)
        if self.structure == "stacked":
            last = self.deep(crossed)
        else:
            last = torch.cat([crossed, self.deep(x0)], 1)
        logits: Tensor = self.output(last)
        return logits.squeeze(1)
