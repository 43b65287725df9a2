"""Models that tests train, and batches for them."""

import torch
from torch import nn

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class BagModel(nn.Module):
    """Bags of ids, and one layer over them, or with `hidden` units two."""

    def __init__(self, num_ids: int, dim: int, hidden: int = 0) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(num_ids, dim, mode="sum")
        layers = [nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, 1)] if hidden else [nn.Linear(dim, 1)]
        self.top = nn.Sequential(*layers)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.bag(ids)).squeeze(1)

    def embedding_inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"bag": ids}


class SumModel(nn.Module):
    """A table read by row, and one layer over the sum of a sample's rows."""

    def __init__(self, num_rows: int, dim: int = 4) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(num_rows, dim), nn.Linear(dim, 1)

    def embedding_inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"rows": ids}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.rows(ids).sum(1))
        return out.squeeze(1)


class BiasedModel(nn.Module):
    """Clicks by a sum of rows, a layer of a list and of an attribute, and a bias that is no layer's."""

    def __init__(self, num_ids: int, num_dense: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_ids, dim)
        self.layers = nn.ModuleList([nn.Linear(num_dense, 1)])
        self.last = self.layers[-1]
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """Return a logit for each sample."""
        return self.embedding(ids).sum((1, 2)) + self.layers[0](dense).squeeze(1) + self.bias.sum()

    def embedding_inputs(self, ids: torch.Tensor, dense: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the ids that the table reads."""
        return {"embedding": ids}


class BranchingModel(nn.Module):
    """Clicks by a sum of rows and two layers, of which about half of the batches leave one out."""

    def __init__(self, num_ids: int, num_dense: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_ids, dim)
        self.always, self.seldom = nn.Linear(num_dense, 1), nn.Linear(num_dense, 1)

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """Return a logit for each sample."""
        out = self.seldom(dense) if dense.mean() > 0.5 else 0.0
        return self.embedding(ids).sum((1, 2)) + (out + self.always(dense)).squeeze(1)

    def embedding_inputs(self, ids: torch.Tensor, dense: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the ids that the table reads."""
        return {"embedding": ids}


def random_pairs(count: int, size: int, num_rows: int, *, seed: int) -> Pairs:
    """Batches of three ids per sample, each id as likely, and targets of 0 to 1."""
    made = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(num_rows, (size, 3), generator=made), torch.rand(size, generator=made)) for _ in range(count)
    ]


def skewed_pairs(count: int = 8, size: int = 6, num_rows: int = 40, *, seed: int = 3) -> Pairs:
    """The same with small ids in every batch, and large ones in few."""
    made = torch.Generator().manual_seed(seed)
    ids = (torch.rand(count, size, 3, generator=made).square() * num_rows).long()
    return [(ids[t], torch.rand(size, generator=made)) for t in range(count)]
