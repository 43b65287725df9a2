"""DIN: Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from embershard.worker.data.batch import Schema
from embershard.worker.models.layers import Device, FeatureEmbedding, Tower
from embershard.worker.models.recommender import Recommender


class ActivationUnit(nn.Module):
    """Weigh an item of a history for a target, a(e_j, v_A): an MLP of both, their difference and product."""

    def __init__(self, dim: int, hidden: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = 4 * dim
        for out_dim in hidden:
            layers += [nn.Linear(width, out_dim), nn.PReLU()]
            width = out_dim
        self.layers = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, history: Tensor, target: Tensor) -> Tensor:
        """(N,) weights of items (N, dim) for targets (N, dim); no softmax, so that their sum tells of the interest."""
        weights: Tensor = self.layers(torch.cat([history, target, history - target, history * target], 1))
        return weights.squeeze(1)


class DIN(Recommender):
    """An MLP over the features and, for each target, the sum of its history weighed by the target (equation 3).

    `target` and `history` name features of the data: a category, and the sequence of a user's earlier values of it.
    Several of each (item and shop, say) form pairs in the order given, and are weighed together.
    """

    def __init__(
        self,
        num_ids: Schema,
        num_fields: int,
        dim: int,
        num_dense: int = 0,
        *,
        target: Sequence[str],
        history: Sequence[str],
        attention: Sequence[int] = (80, 40),
        hidden: Sequence[int] = (200, 80),
        batch_norm: bool = False,
        dropout: float = 0.0,
        device: Device = None,
    ) -> None:
        super().__init__()
        vectors = [field.name for field in num_ids.fields if field.pooling != "sequence"]
        self.target, self.history = [vectors.index(name) for name in target], tuple(history)
        self.embedding = FeatureEmbedding(num_ids, dim, device)
        self.num_dense = num_dense
        self.unit = ActivationUnit(len(target) * dim, attention)
        width = (num_fields + len(history)) * dim + num_dense
        self.tower = Tower(width, hidden, batch_norm=batch_norm, dropout=dropout)
        self.output = nn.Linear(self.tower.out_dim, 1)

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B,) of ids (B, C) and dense (B, D)."""
        rows = self.embedding.lookup(ids)
        vectors = rows.pooled(dense)
        sequences, masks = zip(*map(rows.sequence, self.history), strict=True)
        interest = self._interest(vectors[:, self.target].flatten(1), sequences, masks)
        parts = [vectors.flatten(1), interest]
        if dense is not None and self.num_dense:
            parts.append(dense[:, : self.num_dense])
        logits: Tensor = self.output(self.tower(torch.cat(parts, 1)))
        return logits.squeeze(1)

    def _interest(self, target: Tensor, sequences: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
        """(B, P * dim) of targets (B, P * dim) and P histories (B, L, dim); only places with an item are computed."""
        mask = masks[0]
        for other in masks[1:]:
            mask = mask & other
        if torch.compiler.is_exporting():  # which needs shapes that values do not decide
            places = torch.cat(list(sequences), 2)
            targets = target.unsqueeze(1).expand_as(places)
            weights = self.unit(places.flatten(0, 1), targets.flatten(0, 1)).view(mask.shape) * mask
            interest: Tensor = (places * weights.unsqueeze(2)).sum(1)
            return interest
        user = mask.nonzero()[:, 0]
        items = torch.cat([sequence[mask] for sequence in sequences], 1)
        weighed = items * self.unit(items, target[user]).unsqueeze(1)
        return torch.zeros_like(target).index_add(0, user, weighed)
