"""SASRec: Kang and McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from embershard.worker.models.layers import Device, table
from embershard.worker.models.recommender import ListRecommender


class SASRec(ListRecommender):
    """Causal self-attention over a user's last items; the logit of an item is its dot product with the last state.

    ids (B, history + C) hold the items that the user took, oldest first, filled from the left with -1 behind them, and
    C items to be scored. Lists to train on are (B, history * (1 + N)) behind the history: for each of its places the
    item that came next and N others. Places of -1 are neither looked up nor computed.

    `pre_norm` normalises what enters attention and feed-forward, the residual path not at all. Without it the query
    alone is normalised before attention, as in the authors' code.
    """

    def __init__(
        self,
        num_ids: int,
        dim: int,
        history: int,
        *,
        blocks: int = 2,
        heads: int = 1,
        dropout: float = 0.5,
        pre_norm: bool = False,
        device: Device = None,
    ) -> None:
        super().__init__()
        self.embedding = table(num_ids, dim, device)
        self.history = history
        self.position = nn.Parameter(nn.init.xavier_normal_(torch.empty(history, dim)))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(dim, heads, dropout, pre_norm) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim, eps=1e-8)

    def embedding_inputs(self, ids: Tensor, dense: Tensor | None = None, lists: bool = False) -> dict[str, Tensor]:
        """Module name -> the ids it reads: items of the histories, then those to be scored."""
        history, others = ids[:, : self.history], ids[:, self.history :]
        return {"embedding": torch.cat([history[history >= 0], others[others >= 0]])}

    def forward(self, ids: Tensor, dense: Tensor | None = None, lists: bool = False) -> Tensor:
        """Logits (B, C) of the items behind the history; lists: (places, 1 + N) of those of each place."""
        valid = ids[:, : self.history] >= 0
        lengths = valid.sum(1)
        if torch.compiler.is_exporting():
            return self._of_all_places(ids, lengths)
        rows = self.embedding(self.embedding_inputs(ids)["embedding"])
        num_places = int(lengths.sum())
        states = self._states(rows[:num_places], valid, lengths) if num_places else rows[:0]
        if not lists:
            # an empty history knows nothing: all its logits are 0
            before = torch.cat([states.new_zeros(1, states.shape[1]), states])
            states = before[torch.where(lengths > 0, lengths.cumsum(0), 0)]
        items: Tensor = rows[num_places:].view(len(states), -1, rows.shape[1])
        return (items * states.unsqueeze(1)).sum(2)  # bmm takes ten times as long for so many small products

    def num_lists(self, ids: Tensor) -> int:
        """The places that have an item."""
        return int((ids[:, : self.history] >= 0).sum())

    def list_items(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(places,) ids of the items that came next, and (places, N) of the others."""
        behind = ids[:, self.history :]
        items = behind[behind >= 0].view(self.num_lists(ids), -1)
        return items[:, 0], items[:, 1:]

    def _of_all_places(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Logits (B, C), with padding computed too: an exported program needs shapes that values do not decide."""
        rows = self.embedding(ids.clamp(min=0))
        history, items = rows[:, : self.history], rows[:, self.history :]
        place = torch.arange(self.history, device=rows.device)
        # what is padded stands behind the last item, which cannot see it
        position = (place + self.history - lengths.unsqueeze(1)).clamp(max=self.history - 1)
        x = (history * math.sqrt(rows.shape[2]) + self.position[position]).flatten(0, 1)
        users = ids.shape[0]
        where = torch.arange(users * self.history, device=rows.device)
        for block in self.blocks:
            x = block(x, [_UserGroup(users * self.history, users, self.history, where)])
        states = self.norm(x).view(users, self.history, -1)
        last = (lengths - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, states.shape[2])
        state = states.gather(1, last) * (lengths > 0).view(-1, 1, 1)
        logits: Tensor = (items * state).sum(2)
        return logits

    def _states(self, rows: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
        """What the model knows at each place, (places, dim), of their items' rows (places, dim)."""
        # users of about one length stand together, so that attention pads few places
        by_length = lengths.argsort(stable=True)
        user, place = valid[by_length].nonzero(as_tuple=True)
        moved = (lengths.cumsum(0) - lengths)[by_length][user] + place
        # the last item has the last position, however long the history is (section III.A)
        position = place + self.history - lengths[by_length][user]
        x = self.dropout(rows[moved] * math.sqrt(rows.shape[1]) + self.position[position])
        groups = _groups(lengths[by_length].tolist(), user, place)
        for block in self.blocks:
            x = block(x, groups)
        states: Tensor = self.norm(x)
        return torch.empty_like(states).index_copy(0, moved, states)


@dataclass(frozen=True, slots=True, eq=False)
class _UserGroup:
    """Users whose attention is computed together, padded to the longest of them."""

    num_places: int  # the next ones
    num_users: int
    longest: int
    where: Tensor  # (num_places,) each one's place among num_users * longest


def _groups(lengths: Sequence[int], user: Tensor, place: Tensor) -> list[_UserGroup]:
    """Split users, whose lengths ascend, where the length has doubled."""
    groups = []
    first = first_place = 0
    while first < len(lengths):
        last = bisect_right(lengths, max(8, 2 * lengths[first]))
        num_places, longest = sum(lengths[first:last]), lengths[last - 1]
        part = slice(first_place, first_place + num_places)
        groups.append(_UserGroup(num_places, last - first, longest, (user[part] - first) * longest + place[part]))
        first, first_place = last, part.stop
    return groups


class _Block(nn.Module):
    """Self-attention and a feed-forward network of two layers, each with a residual path (section III.B and III.C)."""

    def __init__(self, dim: int, heads: int, dropout: float, pre_norm: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.pre_norm = heads, dropout, pre_norm
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        for layer in (self.query, self.key, self.value, self.out):
            nn.init.xavier_normal_(layer.weight)
        self.attention_norm, self.forward_norm = nn.LayerNorm(dim, eps=1e-8), nn.LayerNorm(dim, eps=1e-8)
        hidden, output = nn.Linear(dim, dim), nn.Linear(dim, dim)
        nn.init.xavier_normal_(hidden.weight)
        nn.init.xavier_normal_(output.weight)
        self.feed_forward = nn.Sequential(hidden, nn.Dropout(dropout), nn.ReLU(), output, nn.Dropout(dropout))

    def forward(self, x: Tensor, groups: Sequence[_UserGroup]) -> Tensor:
        """(places, dim) of (places, dim)."""
        query = self.attention_norm(x)
        memory = query if self.pre_norm else x
        sizes = [group.num_places for group in groups]
        parts = [part.split(sizes) for part in (self.query(query), self.key(memory), self.value(memory))]
        attended = torch.cat([self._attend(group, part) for group, *part in zip(groups, *parts, strict=True)])
        x = (x if self.pre_norm else query) + self.out(attended)
        normed = self.forward_norm(x)
        out: Tensor = (x if self.pre_norm else normed) + self.feed_forward(normed)
        return out

    def _attend(self, group: _UserGroup, parts: Sequence[Tensor]) -> Tensor:
        """Causal attention of a group's places; what is padded stands behind them, where the mask hides it."""
        size = group.num_users * group.longest
        query, key, value = (
            part.new_zeros(size, part.shape[1])
            .index_copy(0, group.where, part)
            .view(group.num_users, group.longest, self.heads, -1)
            .transpose(1, 2)
            for part in parts
        )
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return attended.transpose(1, 2).reshape(size, -1)[group.where]
