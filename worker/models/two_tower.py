"""Two towers, trained by a sampled softmax: Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
Recommendations", RecSys 2019; uniform negatives beside those of the batch as in Yang et al., "Mixed Negative Sampling
for Learning Two-tower Neural Networks in Recommendations", WWW 2020.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from embershard.worker.models.layers import Device, Tower, table
from embershard.worker.models.recommender import Recommender


class TwoTower(Recommender):
    """A user vector and an item vector; the logit is their dot product over `temperature`.

    ids (B, 2 + K) hold the user, the item and K more items that the user did not take. Without `hidden` layers the
    vectors are the embeddings themselves.
    `normalize` puts them on the unit sphere.
    """

    def __init__(
        self,
        num_ids: int,
        dim: int,
        *,
        hidden: Sequence[int] = (),
        normalize: bool = True,
        temperature: float = 0.1,
        device: Device = None,
    ) -> None:
        super().__init__()
        self.embedding = table(num_ids, dim, device)
        self.user_tower = _tower(dim, hidden)
        self.item_tower = _tower(dim, hidden)
        self.normalize = normalize
        self.temperature = temperature

    def embedding_inputs(self, ids: Tensor, dense: Tensor | None = None, in_batch: bool = False) -> dict[str, Tensor]:
        """Module name -> the ids it reads."""
        return {"embedding": ids}

    def forward(self, ids: Tensor, dense: Tensor | None = None, in_batch: bool = False) -> Tensor:
        """Logits (B,) of users ids[:, 0] and items ids[:, 1]; in_batch: of each user and every `candidates(ids)`."""
        rows = self.embedding(ids)
        users = self._vectors(self.user_tower(rows[:, 0]))
        items = self._vectors(self.item_tower(candidates(rows) if in_batch else rows[:, 1]))
        scores = users @ items.T if in_batch else (users * items).sum(1)
        return scores / self.temperature

    def user_vectors(self, users: Tensor) -> Tensor:
        """Vectors (N, dim) of users (N,) int64, for ranking."""
        return self._vectors(self.user_tower(self.embedding(users)))

    def item_vectors(self, items: Tensor) -> Tensor:
        """Vectors (N, dim) of items (N,) int64, for ranking."""
        return self._vectors(self.item_tower(self.embedding(items)))

    def _vectors(self, rows: Tensor) -> Tensor:
        return functional.normalize(rows, dim=1) if self.normalize else rows


def _tower(dim: int, hidden: Sequence[int]) -> nn.Module:
    if not hidden:
        return nn.Identity()
    tower = Tower(dim, hidden)
    return nn.Sequential(tower, nn.Linear(tower.out_dim, dim))


def candidates(ids: Tensor) -> Tensor:
    """The items of a batch, (B, 2 + K, ...) -> (B * (1 + K), ...): each row's own item first, then what else it has."""
    return torch.cat([ids[:, 1], ids[:, 2:].flatten(0, 1)])


class FrequencyEstimator:
    """How often an item is in a batch, estimated from the steps between its appearances (Yi et al., algorithm 2).

    A stream needs no counts in advance; items share `slots` cells by their id's remainder.
    """

    def __init__(self, slots: int = 1 << 20, *, decay: float = 0.05, first_interval: float = 1000.0) -> None:
        self._last = torch.zeros(slots, dtype=torch.int64)
        self._interval = torch.full((slots,), first_interval)
        self._decay = decay
        self._step = 0

    def update(self, items: Tensor) -> Tensor:
        """Counts one batch of items (B,) int64 and returns the log of each one's chance of being in a batch, (B,)."""
        self._step += 1
        slots = items % len(self._last)
        seen = self._last[slots]
        interval = torch.where(
            seen > 0,
            torch.lerp(self._interval[slots], (self._step - seen).float(), self._decay),
            self._interval[slots],
        )
        self._interval[slots] = interval.clamp(min=1.0)
        self._last[slots] = self._step
        return -interval.clamp(min=1.0).log()

    def state_dict(self) -> Mapping[str, object]:
        """Return the estimates and the step."""
        return {"last": self._last, "interval": self._interval, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._last, self._interval, self._step = state["last"], state["interval"], state["step"]


def sampled_softmax(logits: Tensor, items: Tensor, log_q: Tensor) -> Tensor:
    """Cross-entropy of each user's own item among all C candidates, corrected for how they were drawn.

    logits (B, C); items (C,) int64, row i's own item is items[i]; log_q (C,) is the log of each candidate's
    expected number in a batch. Other appearances of a row's own item are no negatives and are left out.
    """
    batch = torch.arange(len(logits), device=logits.device)
    same = items.unsqueeze(0) == items[: len(logits)].unsqueeze(1)
    same[batch, batch] = False
    corrected = (logits - log_q).masked_fill(same, float("-inf"))
    return functional.cross_entropy(corrected, batch)
