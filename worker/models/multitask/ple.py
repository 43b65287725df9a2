"""PLE: Tang et al., "Progressive Layered Extraction (PLE): A Novel Multi-Task Learning Model for Personalized
Recommendations", RecSys 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from torch import Tensor, nn

from embershard.worker.models.layers import Device, IdSpace, Tower, embed, embed_features
from embershard.worker.models.multitask.mmoe import Mixture, logit_tower, side_by_side
from embershard.worker.models.recommender import Recommender, concat_dense


class PLE(Recommender):
    """Levels of experts, of which some belong to one label and others to all; then a tower for each label.

    A label's gate mixes its own and the shared experts (CGC, section 4.1), and its input is what the gate below
    gave; the shared experts of the next level read what a gate over all experts of a level gives (section 4.2).
    """

    def __init__(
        self,
        num_ids: IdSpace,
        num_fields: int,
        dim: int,
        num_dense: int = 0,
        num_labels: int = 2,
        *,
        levels: int = 2,
        experts: int = 2,
        shared_experts: int = 2,
        expert: Sequence[int] = (256,),
        tower: Sequence[int] = (64,),
        batch_norm: bool = False,
        dropout: float = 0.0,
        device: Device = None,
    ) -> None:
        super().__init__()
        width = num_fields * dim + num_dense
        self.embedding = embed_features(num_ids, dim, device)
        self.levels = nn.ModuleList()
        for level in range(levels):
            sizes = [experts] * num_labels + [shared_experts]
            self.levels.append(_Level(width, expert, sizes, batch_norm, dropout, last=level == levels - 1))
            width = expert[-1] if expert else width
        self.towers = nn.ModuleList(logit_tower(width, tower, dropout=dropout) for _ in range(num_labels))

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B, labels), or (B,) of one label, of ids (B, C) and dense (B, D)."""
        x = concat_dense(*embed(self.embedding, ids, dense))
        inputs = [x] * (len(self.towers) + 1)  # of each label's experts and gate, then of the shared ones
        for level in self.levels:
            inputs = level(inputs)
        return side_by_side([tower(x) for tower, x in zip(self.towers, inputs, strict=False)])


class _Level(nn.Module):
    """Experts of each label and shared ones, `sizes` of them, and the gates above."""

    def __init__(
        self, width: int, expert: Sequence[int], sizes: Sequence[int], batch_norm: bool, dropout: float, *, last: bool
    ) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.ModuleList(Tower(width, expert, batch_norm=batch_norm, dropout=dropout) for _ in range(size))
            for size in sizes
        )
        self.gates = nn.ModuleList(Mixture(width, size + sizes[-1]) for size in sizes[:-1])
        self.shared_gate = None if last else Mixture(width, sum(sizes))

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the next level's inputs (B, dim): one for each label, then the shared one unless it is the last."""
        outputs = [
            [expert(x) for expert in experts]  # type: ignore[attr-defined]
            for x, experts in zip(inputs, self.experts, strict=True)
        ]
        found = [gate(x, own + outputs[-1]) for gate, x, own in zip(self.gates, inputs, outputs, strict=False)]
        if self.shared_gate is not None:
            found.append(self.shared_gate(inputs[-1], list(chain(*outputs))))
        return found
