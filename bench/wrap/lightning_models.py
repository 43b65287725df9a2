"""Modules of Lightning, trained by its Trainer: by a callback of three lines, and by ShardOptimizer with clipping."""

from __future__ import annotations

import functools
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import nn

import embershard as es
from wrap.compare import Case
from wrap.log import ITEMS, USERS, batches


class Module(lightning.LightningModule):
    """What both have: the optimizer that Lightning asks for, and losses."""

    optimizer: Any = None

    def configure_optimizers(self) -> Any:
        return self.optimizer


class Factors(Module):
    """Matrix factorisation with a raw parameter, all of it in training_step; there is no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)
        self.scale = nn.Parameter(torch.full((8,), 0.5))

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        logits = (self.user(batch["user"]) * self.item(batch["item"]) * self.scale).sum(1)
        loss = F.binary_cross_entropy_with_logits(logits, batch["click"])
        self.log("loss", loss)
        return loss


def tower() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8))


class Towers(Module):
    """Two towers with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, 16), nn.Embedding(ITEMS, 16)
        self.user_tower = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8)
        )
        self.item_tower = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8)
        )

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return (self.user_tower(self.user(user)) * self.item_tower(self.item(item))).sum(1)

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(self(batch["user"], batch["item"]), batch["click"])


class Losses(lightning.Callback):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(outputs["loss"].item())


def fit(module: Module, callbacks: list[lightning.Callback], **settings: Any) -> list[float]:
    losses = Losses()
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[losses, *callbacks], **settings,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(list(batches()), batch_size=None))
    return losses.values


def by_callback(module: Module, optimizer: Any) -> list[float]:
    """`configure_optimizers` gives none: the callback steps."""
    if not isinstance(optimizer, es.Session):
        module.optimizer = optimizer
        return fit(module, [])

    class Step(lightning.Callback):
        def on_train_batch_end(self, *_: object) -> None:
            optimizer.step()

    return fit(module, [Step()])


def by_optimizer(module: Module, optimizer: Any) -> list[float]:
    """`configure_optimizers` gives a ShardOptimizer, whose gradients Lightning clips."""
    module.optimizer = es.ShardOptimizer(optimizer) if isinstance(optimizer, es.Session) else optimizer
    try:
        return fit(module, [], gradient_clip_val=0.5)
    finally:
        module.optimizer = None


case = functools.partial(Case, package="lightning")

CASES = (
    case(name="factors, by a callback", build=Factors, train=by_callback, sgd=2.0, adagrad=0.1),
    case(name="two towers, clipped", build=Towers, train=by_optimizer, sgd=0.5, adagrad=0.02),
)
