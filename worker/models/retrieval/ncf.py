"""GMF, MLP and NeuMF: He et al., "Neural Collaborative Filtering", WWW 2017.

ids (B, 2) hold the user and the item. `factors` are the paper's predictive factors, the width of the last hidden layer:
8 factors give the paper's MLP 64-32-16-8 over embeddings of dim 32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from embershard.worker.models.layers import Device, IdSpace, Tower, embed, embed_features
from embershard.worker.models.recommender import Recommender


def _tower(factors: int) -> Tower:
    """The paper's layers with the first values of its code: Glorot's, which reach higher here than torch's own."""
    tower = Tower(8 * factors, (4 * factors, 2 * factors, factors))
    for layer in tower:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return tower


class GMF(Recommender):
    """Generalised matrix factorisation: a learned weighting of the elementwise product (equation 9).

    It begins as the plain factorisation, with weights of one (section 3.2). Of random ones some are near zero, and with
    them the gradients of that factor's rows: a run in a few then ended with a factor less (docs/measurements.md).
    """

    def __init__(self, num_ids: IdSpace, factors: int = 8, *, device: Device = None) -> None:
        super().__init__()
        self.embedding = embed_features(num_ids, factors, device, own_dims=False)
        self.output = nn.Linear(factors, 1)
        nn.init.ones_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B,) of ids (B, 2)."""
        user, item = embed(self.embedding, ids, dense)[0].unbind(1)
        logits: Tensor = self.output(user * item)
        return logits.squeeze(1)


class MLP(Recommender):
    """A tower of ReLU layers, each half as wide as the one below, over user and item side by side (equation 10)."""

    def __init__(self, num_ids: IdSpace, factors: int = 8, *, device: Device = None) -> None:
        super().__init__()
        self.embedding = embed_features(num_ids, 4 * factors, device, own_dims=False)
        self.tower = _tower(factors)
        self.output = nn.Linear(factors, 1)

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B,) of ids (B, 2)."""
        logits: Tensor = self.output(self.tower(embed(self.embedding, ids, dense)[0].flatten(1)))
        return logits.squeeze(1)


class NeuMF(Recommender):
    """GMF and MLP with embeddings of their own, joined before the last layer (equation 12)."""

    def __init__(self, num_ids: IdSpace, factors: int = 8, *, device: Device = None) -> None:
        super().__init__()
        self.gmf = embed_features(num_ids, factors, device, own_dims=False)
        self.mlp = embed_features(num_ids, 4 * factors, device, own_dims=False)
        self.tower = _tower(factors)
        self.output = nn.Linear(2 * factors, 1)

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B,) of ids (B, 2)."""
        user, item = embed(self.gmf, ids, dense)[0].unbind(1)
        hidden = self.tower(embed(self.mlp, ids, dense)[0].flatten(1))
        logits: Tensor = self.output(torch.cat([user * item, hidden], 1))
        return logits.squeeze(1)
