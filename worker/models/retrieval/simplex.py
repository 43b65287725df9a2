"""SimpleX: Mao et al., "SimpleX: A Simple and Strong Baseline for Collaborative Filtering", CIKM 2021."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from embershard.worker.models.layers import Device, table
from embershard.worker.models.recommender import RetrievalModel

Pooling = Literal["mean", "user_attention"]


class SimpleX(RetrievalModel):
    """A user is the sum of an embedding and of what the user took, weighted by `gamma`; the logit is a cosine.

    ids (B, 2 + K + history) hold the user, the item, K items that the user did not take, and the items that the user
    took before, filled from the left with -1 behind them. In training the negatives of all rows of a batch are those of
    each row: N distinct ones cost N lookups, and not N for each row.

    What a user took is pooled to its mean, or by the user's attention: item k has the weight softmax_k(e_u . tanh(W e_k
    + b)). `dropout` is of the unit vector of a user, as in the authors' program: its noise is in the scores, also where
    a margin cuts them.
    """

    default_loss: ClassVar[str] = "ccl"
    history_start: ClassVar[int] = 2  # of a batch without negatives

    def __init__(
        self,
        num_ids: int,
        dim: int,
        history: int,
        *,
        gamma: float = 0.5,
        pooling: Pooling = "mean",
        dropout: float = 0.0,
        device: Device = None,
    ) -> None:
        super().__init__()
        self.embedding = table(num_ids, dim, device)
        self.history, self.gamma = history, gamma
        self.project = nn.Linear(dim, dim, bias=False) if history else None
        self.key = nn.Linear(dim, dim) if history and pooling == "user_attention" else None
        self.dropout = nn.Dropout(dropout)

    def embedding_inputs(self, ids: Tensor, dense: Tensor | None = None, lists: bool = False) -> dict[str, Tensor]:
        """Module name -> the ids it reads: users and items, then the histories."""
        single, history = self._parts(ids)
        return {"embedding": torch.cat([single.reshape(-1), history[history >= 0]])}

    def forward(self, ids: Tensor, dense: Tensor | None = None, lists: bool = False) -> Tensor:
        """Logits (B,) of users and items; lists: (B, 1 + B * K) of the own item and the negatives of the batch."""
        single, history = self._parts(ids)
        if torch.compiler.is_exporting():  # which needs shapes that values do not decide
            rows = self.embedding(ids.clamp(min=0))
            first, taken = rows[:, : single.shape[1]], rows[:, single.shape[1] :]
            users = self._unit(first[:, 0], taken * (history >= 0).unsqueeze(2), history)
        else:
            rows = self.embedding(self.embedding_inputs(ids)["embedding"])
            first = rows[: single.numel()].view(*single.shape, -1)
            users = self._users(first[:, 0], rows[single.numel() :], history)
        own = (users * functional.normalize(first[:, 1], dim=1)).sum(1)
        if not lists:
            return own
        others = users @ functional.normalize(first[:, 2:].flatten(0, 1), dim=1).T
        return torch.cat([own.unsqueeze(1), others], 1)

    def split_lists(self, scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) cosines of the own items, and (B, B * K) of the others, -inf where one is the row's own."""
        own, others = self.list_items(ids)
        same = (others == own.unsqueeze(1)).to(scores.device)
        return scores[:, 0], scores[:, 1:].masked_fill(same, float("-inf"))

    def list_items(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) ids of the own items, and (1, B * K) of the negatives of the batch."""
        single, _ = self._parts(ids)
        return single[:, 1], single[:, 2:].reshape(1, -1)

    def user_vectors(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Vectors (N, dim) of users with their histories, ids (N, 1 + history) or (N,), for ranking."""
        ids = ids.unsqueeze(1) if ids.dim() == 1 else ids
        users, history = ids[:, 0], ids[:, 1:]
        rows = self.embedding(torch.cat([users, history[history >= 0]]))
        return self._users(rows[: len(ids)], rows[len(ids) :], history)

    def item_vectors(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Vectors (N, dim) of items (N,) int64, for ranking."""
        return functional.normalize(self.embedding(ids), dim=1)

    def _parts(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The columns before the history, and those of the history."""
        width = ids.shape[1] - self.history
        return ids[:, :width], ids[:, width:]

    def _users(self, users: Tensor, taken: Tensor, history: Tensor) -> Tensor:
        """Vectors (B, dim) of users' rows (B, dim) and the rows of what they took, of all users one after another."""
        if self.project is None:
            return self._unit(users, taken, history)
        places = (history >= 0).flatten().nonzero().squeeze(1).to(users.device)
        rows = users.new_zeros(history.numel(), users.shape[1]).index_copy(0, places, taken)
        return self._unit(users, rows.view(*history.shape, users.shape[1]), history)

    def _unit(self, users: Tensor, taken: Tensor, history: Tensor) -> Tensor:
        """Vectors (B, dim) of users' rows (B, dim) and of what they took, (B, history, dim), zeros where nothing."""
        if self.project is not None:
            valid = (history >= 0).to(users.device)
            weights = valid.to(users.dtype)
            if self.key is not None:
                scores = (self.key(taken).tanh() @ users.unsqueeze(2)).squeeze(2)
                scores = scores.masked_fill(~valid, torch.finfo(scores.dtype).min)
                weights = weights * (scores - scores.amax(1, keepdim=True)).exp()
            # of a user who took something the sum is 1 at least: that of the largest score alone
            pooled = (weights.unsqueeze(1) @ taken).squeeze(1) / weights.sum(1, keepdim=True).clamp(min=1)
            users = self.gamma * users + (1.0 - self.gamma) * self.project(pooled)
        vectors: Tensor = self.dropout(functional.normalize(users, dim=1))
        return vectors
