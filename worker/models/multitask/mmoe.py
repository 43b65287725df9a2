"""MMoE: Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts",
KDD 2018.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from embershard.worker.models.layers import Device, IdSpace, Tower, embed, embed_features
from embershard.worker.models.recommender import Recommender, concat_dense


class Mixture(nn.Module):
    """A gate that weighs experts by a softmax of its input: g(x) = softmax(W x) (section 4.2)."""

    def __init__(self, in_dim: int, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(in_dim, num_experts, bias=False)

    def forward(self, x: Tensor, experts: Sequence[Tensor]) -> Tensor:
        """(B, dim) of the gate's input x (B, in_dim) and the outputs of experts, (B, dim) each."""
        weights = self.gate(x).softmax(1)
        return torch.einsum("be,bed->bd", weights, torch.stack(list(experts), 1))


class MMoE(Recommender):
    """Experts that all labels share, and for each label a gate over them and a tower (section 4.2).

    With one label and one expert it is an MLP.
    """

    def __init__(
        self,
        num_ids: IdSpace,
        num_fields: int,
        dim: int,
        num_dense: int = 0,
        num_labels: int = 2,
        *,
        experts: int = 4,
        expert: Sequence[int] = (256,),
        tower: Sequence[int] = (64,),
        batch_norm: bool = False,
        dropout: float = 0.0,
        device: Device = None,
    ) -> None:
        super().__init__()
        width = num_fields * dim + num_dense
        self.embedding = embed_features(num_ids, dim, device)
        self.experts = nn.ModuleList(
            Tower(width, expert, batch_norm=batch_norm, dropout=dropout) for _ in range(experts)
        )
        self.gates = nn.ModuleList(Mixture(width, experts) for _ in range(num_labels))
        self.towers = nn.ModuleList(
            logit_tower(expert[-1] if expert else width, tower, dropout=dropout) for _ in range(num_labels)
        )

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B, labels), or (B,) of one label, of ids (B, C) and dense (B, D)."""
        x = concat_dense(*embed(self.embedding, ids, dense))
        outputs = [expert(x) for expert in self.experts]
        logits = [tower(gate(x, outputs)) for gate, tower in zip(self.gates, self.towers, strict=True)]
        return side_by_side(logits)


def logit_tower(in_dim: int, hidden: Sequence[int], *, dropout: float) -> nn.Sequential:
    """The layers of one label, (B, in_dim) -> (B, 1)."""
    layers = Tower(in_dim, hidden, dropout=dropout)
    return nn.Sequential(layers, nn.Linear(layers.out_dim, 1))


def side_by_side(logits: Sequence[Tensor]) -> Tensor:
    """(B, labels) of the logits (B, 1) of each label; (B,) of one label."""
    return torch.cat(list(logits), 1) if len(logits) > 1 else logits[0].squeeze(1)
