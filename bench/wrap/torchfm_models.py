"""Models of torchfm (pytorch-fm), trained as its examples/main.py does."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchfm.model.dfm import DeepFactorizationMachineModel
from torchfm.model.ffm import FieldAwareFactorizationMachineModel
from torchfm.model.xdfm import ExtremeDeepFactorizationMachineModel

from wrap.compare import Case
from wrap.log import ITEMS, USERS, batches

FIELDS = (USERS, ITEMS, ITEMS)  # one table for all, each with ids of its own


def train(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    model.train()
    for batch in batches():
        fields = torch.stack([batch["user"], batch["item"], batch["hist_item"][:, 0]], 1)
        loss = F.binary_cross_entropy(model(fields), batch["click"])
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def xdeepfm() -> nn.Module:
    sizes = {"cross_layer_sizes": (16, 16), "split_half": False, "mlp_dims": (32, 16), "dropout": 0.1}
    return ExtremeDeepFactorizationMachineModel(FIELDS, 8, **sizes)


case = functools.partial(Case, package="torchfm", train=train)

CASES = (
    case(name="DeepFM", build=lambda: DeepFactorizationMachineModel(FIELDS, 8, (32, 16), 0.1), sgd=0.1, adagrad=0.02),
    case(name="FFM", build=lambda: FieldAwareFactorizationMachineModel(FIELDS, 8), sgd=0.2, adagrad=0.05),
    case(name="xDeepFM", build=xdeepfm, sgd=0.1, adagrad=0.02),
)
