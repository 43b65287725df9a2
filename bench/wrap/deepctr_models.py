"""Models of deepctr-torch, trained by BaseModel.fit, with their L2 over whole tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat
from deepctr_torch.models import DIN, AutoInt, DeepFM, FiBiNET, xDeepFM
from torch import nn

from wrap.compare import Case, Recorded
from wrap.log import BATCH, COLUMNS, ITEMS, LENGTH, USERS


def train(model: Any, optimizer: Any) -> list[float]:
    loss = Recorded(nn.functional.binary_cross_entropy)
    model.compile(optimizer, loss)
    inputs = {name: COLUMNS[name] for name in model.feature_index}
    model.fit(inputs, COLUMNS["click"], batch_size=BATCH, shuffle=False, verbose=0)
    return [value / BATCH for value in loss.values]


def scores(model: Any) -> torch.Tensor:
    return torch.from_numpy(model.predict({name: COLUMNS[name] for name in model.feature_index}, BATCH))


def of_fields(kind: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        features = [SparseFeat("user", USERS, 8), SparseFeat("item", ITEMS, 8), DenseFeat("price", 1)]
        return kind(features, features)

    return build


def din() -> nn.Module:
    """Reads the item table for the candidate and for the history, with attention and Dice (batch norm) inside."""
    history = SparseFeat("hist_item", ITEMS, 8, embedding_name="item")
    features = [
        SparseFeat("user", USERS, 8), SparseFeat("item", ITEMS, 8, embedding_name="item"), DenseFeat("price", 1),
        VarLenSparseFeat(history, maxlen=LENGTH, length_name="length"),
    ]  # fmt: skip
    model: nn.Module = DIN(features, ["item"])
    return model


def case(name: str, build: Callable[[], nn.Module], *, sgd: float = 0.005, adagrad: float = 0.02) -> Case:
    return Case(
        package="deepctr-torch",
        name=name,
        build=build,
        train=train,
        scores=scores,
        sgd=sgd,
        adagrad=adagrad,
        reads_whole=True,
    )


CASES = (
    case("DeepFM", of_fields(DeepFM)),
    case("xDeepFM", of_fields(xDeepFM), sgd=0.001),
    case("AutoInt", of_fields(AutoInt)),
    case("FiBiNET", of_fields(FiBiNET)),
    case("DIN", din),
)
