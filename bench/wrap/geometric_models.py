"""Models of torch-geometric over the graph of users and items of the log."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch_geometric.nn import ComplEx, LightGCN, TransE

from wrap.compare import Case
from wrap.log import COLUMNS, ITEMS, USERS, batches

NODES = USERS + ITEMS  # items after users
EDGES = torch.stack([torch.from_numpy(COLUMNS["user"]), torch.from_numpy(COLUMNS["item"]) + USERS]).unique(dim=1)


def by_ranking(model: Any, optimizer: Any) -> list[float]:
    """BPR with the L2 of the batch's nodes, both from all rows at once."""
    losses = []
    for batch in batches():
        user, good, bad = batch["user"], batch["item"] + USERS, batch["other_item"] + USERS
        ranks = model(EDGES, torch.stack([torch.cat([user, user]), torch.cat([good, bad])]))
        nodes = torch.cat([user, good, bad]).unique()
        loss = model.recommendation_loss(*ranks.chunk(2), node_id=nodes, lambda_reg=1e-3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def by_triples(model: Any, optimizer: Any) -> list[float]:
    """Whether a user clicked an item is the relation."""
    losses = []
    model.train()
    for batch in batches():
        optimizer.zero_grad()
        loss = model.loss(batch["user"], batch["click"].long(), batch["item"] + USERS)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def light_gcn() -> nn.Module:
    return LightGCN(NODES, 16, 2)


case = functools.partial(Case, package="torch-geometric")

CASES = (
    case(name="LightGCN", build=light_gcn, train=by_ranking, sgd=20.0, adagrad=0.05, reads_whole=True),
    case(name="ComplEx", build=lambda: ComplEx(NODES, 2, 16), train=by_triples, sgd=5.0, adagrad=0.1),
    case(name="TransE", build=lambda: TransE(NODES, 2, 16), train=by_triples, sgd=1.0, adagrad=0.1),
)
