"""A model of our own: a table of users, one of items and one of tags, beside dense features."""

import torch
from torch import nn


class Clicks(nn.Module):
    """Logits (B,) of ids (B, 5), which are a user, an item and three tags, and of dense features (B, num_dense).

    `num_ids`, `num_dense` and `dim` come from the data and from embedding.dim, since they are named here; `num_users`
    and `hidden` are args of the job file.
    """

    def __init__(self, num_ids, num_dense, dim, num_users, hidden=32):
        super().__init__()
        self.users = nn.Embedding(num_users, dim)  # users have the ids below num_users
        self.items = nn.Embedding(num_ids, dim)  # theirs, and those of tags, lie above
        self.tags = nn.EmbeddingBag(num_ids, dim, mode="mean")
        for table in (self.users, self.items, self.tags):
            nn.init.normal_(table.weight, std=0.1)
        self.dense = nn.BatchNorm1d(num_dense)
        self.tower = nn.Sequential(nn.Linear(3 * dim + num_dense, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def embedding_inputs(self, ids, dense):
        """Which ids each table reads: for train.prefetch, which pulls their rows ahead, and only for that."""
        return {"users": ids[:, 0], "items": ids[:, 1], "tags": ids[:, 2:]}

    def forward(self, ids, dense):
        """A logit per sample: the ids as the reader has them, and its dense features."""
        user, item, tags = self.users(ids[:, 0]), self.items(ids[:, 1]), self.tags(ids[:, 2:])
        match = (user * (item + tags)).sum(1)
        return match + self.tower(torch.cat([user, item, tags, self.dense(dense)], 1)).squeeze(1)


class NextItem(nn.Module):
    """Logits (B,) that an item follows others: ids (B, 5) as above; one table of everything, read as a whole, too.

    What came before, in an order that matters, says how likely each item is; its softmax is over all ids, by the
    weight of the same table.
    """

    def __init__(self, num_ids, num_fields, dim):
        super().__init__()
        self.emb = nn.Embedding(num_ids, dim)
        nn.init.normal_(self.emb.weight, std=0.1)
        self.position = nn.Parameter(torch.zeros(num_fields - 1, dim))
        self.attention = nn.MultiheadAttention(dim, 1, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, ids, dense):
        """A logit per sample; dense features are there, so they have to be taken."""
        item, before = ids[:, 1], torch.cat([ids[:, :1], ids[:, 2:]], 1)
        rows = self.emb(before) + self.position
        state = self.norm(rows + self.attention(rows, rows, rows, need_weights=False)[0])[:, -1]
        everything = nn.functional.linear(state, self.emb.weight).logsumexp(1)
        return self.scale * ((state * self.emb(item)).sum(1) - everything + self.emb.weight.shape[0] ** 0.5)
