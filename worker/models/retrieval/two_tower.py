"""Two towers, trained by a sampled softmax: Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
Recommendations", RecSys 2019; uniform negatives beside those of the batch as in Yang et al., "Mixed Negative Sampling
for Learning Two-tower Neural Networks in Recommendations", WWW 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from embershard.worker.models.layers import Device, Tower, table
from embershard.worker.models.list_losses import candidates
from embershard.worker.models.recommender import RetrievalModel


class TwoTower(RetrievalModel):
    """A user vector and an item vector; the logit is their dot product over `temperature`.

    ids (B, 2 + K) hold the user, the item and K more items that the user did not take. Without `hidden` layers the
    vectors are the embeddings themselves.
    `normalize` puts them on the unit sphere. `dropout` is of the user's vector behind that, as in the authors' program
    of the cosine contrastive loss (Mao et al., CIKM 2021).
    """

    default_loss: ClassVar[str] = "sampled_softmax"
    in_batch: ClassVar[bool] = True

    def __init__(
        self,
        num_ids: int,
        dim: int,
        *,
        hidden: Sequence[int] = (),
        normalize: bool = True,
        temperature: float = 0.1,
        dropout: float = 0.0,
        device: Device = None,
    ) -> None:
        super().__init__()
        self.embedding = table(num_ids, dim, device)
        self.user_tower = _tower(dim, hidden)
        self.item_tower = _tower(dim, hidden)
        self.normalize = normalize
        self.temperature = temperature
        self.dropout = nn.Dropout(dropout)

    def embedding_inputs(self, ids: Tensor, dense: Tensor | None = None, lists: bool = False) -> dict[str, Tensor]:
        """Module name -> the ids it reads."""
        return {"embedding": ids}

    def forward(self, ids: Tensor, dense: Tensor | None = None, lists: bool = False) -> Tensor:
        """Logits (B,) of users ids[:, 0] and items ids[:, 1]; lists: of each user and every `candidates(ids)`."""
        rows = self.embedding(ids)
        users = self.dropout(self._vectors(self.user_tower(rows[:, 0])))
        items = self._vectors(self.item_tower(candidates(rows) if lists else rows[:, 1]))
        scores: Tensor = users @ items.T if lists else (users * items).sum(1)
        return scores / self.temperature

    def batch_items(self, ids: Tensor) -> Tensor:
        """(B * (1 + K),) ids of the items of a batch, the rows' own first."""
        return candidates(ids)

    def split_lists(self, scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) scores of the own items, and (B, C) of the others, -inf where one is the row's own item.

        The others are the uniform negatives of the batch, or the own items of its rows where there are none: these are
        drawn by popularity, which a loss without a correction would take for a reason to rank popular items low.
        """
        own, others = self.list_items(ids)
        same = (others == own.unsqueeze(1)).to(scores.device)
        return scores.diagonal(), scores[:, -others.shape[1] :].masked_fill(same, float("-inf"))

    def list_items(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) ids of the own items, and (1, C) of the others: the last of `candidates`."""
        others = ids[:, 2:] if ids.shape[1] > 2 else ids[:, 1]
        return ids[:, 1], others.reshape(1, -1)

    def user_vectors(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Vectors (N, dim) of users (N,) int64, for ranking."""
        return self._vectors(self.user_tower(self.embedding(ids)))

    def item_vectors(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Vectors (N, dim) of items (N,) int64, for ranking."""
        return self._vectors(self.item_tower(self.embedding(ids)))

    def _vectors(self, rows: Tensor) -> Tensor:
        return functional.normalize(rows, dim=1) if self.normalize else rows


def _tower(dim: int, hidden: Sequence[int]) -> nn.Module:
    if not hidden:
        return nn.Identity()
    tower = Tower(dim, hidden)
    return nn.Sequential(tower, nn.Linear(tower.out_dim, dim))
