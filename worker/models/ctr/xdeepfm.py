"""xDeepFM: Lian et al., "xDeepFM: Combining Explicit and Implicit Feature Interactions for Recommender Systems",
KDD 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from embershard.worker.models.ctr.wide_deep import WideDeep
from embershard.worker.models.layers import IdSpace, embed
from embershard.worker.models.recommender import concat_dense


class CIN(nn.Module):
    """Compressed interaction network: products of feature vectors, dimension by dimension (section 3.1).

    Layer k makes H_k maps of all products of the maps before with the m features; each map is summed over the dim, and
    all sums stand side by side.
    """

    def __init__(self, num_fields: int, layers: Sequence[int]) -> None:
        super().__init__()
        sizes = [num_fields, *layers]
        self.layers = nn.ModuleList(
            nn.Linear(before * num_fields, size, bias=False) for before, size in zip(sizes, layers, strict=False)
        )
        self.out_dim = sum(layers)

    def forward(self, x0: Tensor) -> Tensor:
        """(B, sum of H_k) of vectors (B, m, dim)."""
        x, sums = x0, []
        for layer in self.layers:
            products = x.unsqueeze(2) * x0.unsqueeze(1)  # (B, H, m, dim)
            x = layer(products.flatten(1, 2).transpose(1, 2)).transpose(1, 2)
            sums.append(x.sum(2))
        return torch.cat(sums, 1)


class XDeepFM(WideDeep):
    """The logits of a linear model, an MLP and a CIN, which read the same embeddings, added (section 3.3)."""

    def __init__(
        self,
        num_ids: IdSpace,
        num_fields: int,
        dim: int,
        num_dense: int = 0,
        *,
        cin: Sequence[int] = (100, 100),
        **deep: Any,  # as of WideDeep
    ) -> None:
        super().__init__(num_ids, num_fields, dim, num_dense, **deep)
        self.cin = CIN(num_fields, cin)
        self.cin_output = nn.Linear(self.cin.out_dim, 1, bias=False)

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B,) of ids (B, F) and dense (B, D)."""
        rows, numbers = embed(self.embedding, ids, dense)
        wide: Tensor = self.first_order(*embed(self.linear, ids, dense))
        deep: Tensor = self.output(self.deep(concat_dense(rows, numbers)))
        crossed: Tensor = self.cin_output(self.cin(rows))
        return wide + (deep + crossed).squeeze(1)
