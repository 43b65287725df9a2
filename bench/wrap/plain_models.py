"""Models in a loop of one's own: those that score all items read their table as a whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from wrap.compare import Case
from wrap.log import COLUMNS, ITEMS, LENGTH, USERS, batches

Batch = dict[str, torch.Tensor]
DIM = 16


def train(loss_of: Callable[[Any, Batch], torch.Tensor], model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    model.train()
    for batch in batches():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class SASRec(nn.Module):
    """Kang & McAuley 2018: positives and negatives of the next item, from the same table as the history."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.positions = nn.Embedding(LENGTH, DIM)
        layer = functools.partial(nn.TransformerEncoderLayer, DIM, 2, 2 * DIM, dropout=0.2, batch_first=True)
        self.blocks = nn.ModuleList([layer(norm_first=True) for _ in range(2)])
        self.norm = nn.LayerNorm(DIM)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_normal_(parameter)

    def forward(self, history: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        x = self.items(history) * DIM**0.5 + self.positions(torch.arange(LENGTH))
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        x = self.norm(x)
        scores = [(x * self.items(ids)).sum(-1) for ids in (positive, negative)]
        return torch.stack(scores)


def sasrec_loss(model: SASRec, batch: Batch) -> torch.Tensor:
    history = batch["hist_item"]
    positive = torch.cat([history[:, 1:], batch["item"][:, None]], 1)
    negative = torch.cat([batch["other_items"], batch["other_item"][:, None]], 1)
    scores = model(history, positive, negative)[:, history != 0]
    return F.binary_cross_entropy_with_logits(scores, torch.tensor([[1.0], [0.0]]).expand_as(scores))


def sasrec_l2_loss(model: SASRec, batch: Batch) -> torch.Tensor:
    """With the L2 of the items that its authors' code adds in the loop."""
    return sasrec_loss(model, batch) + sum(0.001 * torch.norm(parameter) for parameter in model.items.parameters())


class Bert4Rec(nn.Module):
    """Sun et al. 2019: masked items, scored by F.linear over the table of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS + 1, DIM, padding_idx=0)
        self.positions = nn.Embedding(LENGTH, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.bias = nn.Parameter(torch.zeros(ITEMS + 1))
        self.apply(lambda module: isinstance(module, nn.Embedding) and nn.init.trunc_normal_(module.weight, std=0.02))

    def forward(self, history: torch.Tensor) -> torch.Tensor:
        x = self.encoder(self.items(history) + self.positions(torch.arange(LENGTH)), src_key_padding_mask=history == 0)
        return F.linear(x, self.items.weight, self.bias)


def bert4rec_loss(model: Bert4Rec, batch: Batch) -> torch.Tensor:
    masked = batch["hist_item"].clone()
    masked[:, 0] = ITEMS
    return F.cross_entropy(model(masked)[:, 0], batch["hist_item"][:, 0])


class LightGCN(nn.Module):
    """He et al. 2020: both tables at once, through three rounds of a normalised adjacency."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, DIM), nn.Embedding(ITEMS, DIM)
        nn.init.normal_(self.users.weight, std=0.1)
        nn.init.normal_(self.items.weight, std=0.1)
        edges = torch.stack([torch.from_numpy(COLUMNS["user"]), torch.from_numpy(COLUMNS["item"]) + USERS])
        edges = torch.cat([edges, edges.flip(0)], 1).unique(dim=1)
        degree = torch.bincount(edges[0], minlength=USERS + ITEMS).clamp(min=1)
        values = (degree[edges[0]] * degree[edges[1]]).float() ** -0.5
        adjacency = torch.sparse_coo_tensor(edges, values, (USERS + ITEMS, USERS + ITEMS))
        self.register_buffer("adjacency", adjacency.coalesce().to_dense(), persistent=False)

    def forward(self) -> torch.Tensor:
        layers = [torch.cat([self.users.weight, self.items.weight])]
        for _ in range(3):
            layers.append(self.adjacency @ layers[-1])
        return torch.stack(layers).mean(0)


def lightgcn_loss(model: LightGCN, batch: Batch) -> torch.Tensor:
    """BPR, with the L2 of the batch's own rows."""
    all_rows = model()
    user, good, bad = (all_rows[ids] for ids in (batch["user"], batch["item"] + USERS, batch["other_item"] + USERS))
    own = (model.users(batch["user"]), model.items(batch["item"]), model.items(batch["other_item"]))
    penalty = sum(rows.square().sum() for rows in own) / len(user)
    return F.softplus((user * (bad - good)).sum(1)).mean() + 1e-4 * penalty


class LSTM(nn.Module):
    """The next item of a session, from a packed history, by a softmax with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.lstm = nn.LSTM(DIM, 24, 2, batch_first=True, dropout=0.1)
        self.out = nn.Linear(24, ITEMS)

    def forward(self, history: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.items(history), length, batch_first=True, enforce_sorted=False)
        return self.out(self.lstm(packed)[1][0][-1])


class TiedSoftmax(nn.Module):
    """A language model's tie: the output layer's weight is the table of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, DIM)
        self.gru = nn.GRU(DIM, DIM, batch_first=True)
        self.out = nn.Linear(DIM, ITEMS)
        self.out.weight = self.items.weight

    def forward(self, history: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        states, _ = self.gru(self.items(history))
        return self.out(states[torch.arange(len(history)), length - 1])


def next_item_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["hist_item"], batch["length"]), batch["item"])


def case(
    name: str,
    build: Callable[[], nn.Module],
    loss: Callable[..., torch.Tensor],
    *,
    sgd: float,
    adagrad: float,
    reads_whole: bool = False,
) -> Case:
    loop = functools.partial(train, loss)
    return Case(package="torch", name=name, build=build, train=loop, sgd=sgd, adagrad=adagrad, reads_whole=reads_whole)


CASES = (
    case("SASRec", SASRec, sasrec_loss, sgd=0.2, adagrad=0.02),
    case("SASRec, with L2 of the items", SASRec, sasrec_l2_loss, sgd=0.2, adagrad=0.02, reads_whole=True),
    case("BERT4Rec", Bert4Rec, bert4rec_loss, sgd=0.2, adagrad=0.02, reads_whole=True),
    case("LightGCN", LightGCN, lightgcn_loss, sgd=5.0, adagrad=0.05, reads_whole=True),
    case("LSTM", LSTM, next_item_loss, sgd=0.5, adagrad=0.02),
    case("tied softmax", TiedSoftmax, next_item_loss, sgd=0.2, adagrad=0.02, reads_whole=True),
)
