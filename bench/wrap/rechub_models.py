"""Models of torch-rechub, trained by CTRTrainer and MatchTrainer."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch_rechub.basic.features import DenseFeature, SequenceFeature, SparseFeature
from torch_rechub.models.matching import DSSM, NARM, YoutubeDNN
from torch_rechub.models.ranking import BST, DCNv2, DeepFM
from torch_rechub.trainers import CTRTrainer, MatchTrainer

from wrap.compare import Case, Recorded
from wrap.log import ITEMS, STEPS, USERS, batches

Features = list[Any]


class Loader:
    """Batches of columns, as the trainers take them."""

    def __init__(self, target: str | None) -> None:
        self.target = target

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for batch in batches():
            target = torch.zeros(len(batch["user"]), dtype=torch.int64)
            yield batch, target if self.target is None else batch[self.target]


def train(
    trainer: Callable[..., Any], target: str | None, settings: Mapping[str, Any], model: nn.Module, optimizer: Any
) -> list[float]:
    theirs = trainer(
        model, optimizer_fn=lambda parameters, **_: optimizer, model_path=tempfile.gettempdir(), n_epoch=1, **settings
    )
    theirs.criterion = Recorded(theirs.criterion)
    theirs.train_one_epoch(Loader(target))
    values: list[float] = theirs.criterion.values
    return values


def fields() -> Features:
    return [SparseFeature("user", USERS, 8), SparseFeature("item", ITEMS, 8), DenseFeature("price")]


def dcn_v2() -> nn.Module:
    return DCNv2(fields(), n_cross_layers=2, mlp_params={"dims": [64, 32]})


def deepfm() -> nn.Module:
    features = fields()
    return DeepFM(features, features[:2], mlp_params={"dims": [64, 32]})


def history(pooling: str, dim: int) -> SequenceFeature:
    return SequenceFeature("hist_item", ITEMS, dim, pooling=pooling, shared_with="item", padding_idx=0)


def bst() -> nn.Module:
    item = [SparseFeature("item", ITEMS, 8, padding_idx=0)]
    return BST([SparseFeature("user", USERS, 8)], [history("concat", 8)], item, {"dims": [64, 32]})


def dssm() -> nn.Module:
    user = [SparseFeature("user", USERS, 16), history("mean", 16)]
    item = [SparseFeature("item", ITEMS, 16, padding_idx=0)]
    return DSSM(user, item, {"dims": [32, 16]}, {"dims": [32, 16]})


def youtube_dnn() -> nn.Module:
    """One item table, read for the history (mean, padded), the clicked item, and five negatives."""
    user = [SparseFeature("user", USERS, 16), history("mean", 16)]
    item = [SparseFeature("item", ITEMS, 16, padding_idx=0)]
    negatives = [SequenceFeature("other_items", ITEMS, 16, pooling="concat", shared_with="item", padding_idx=0)]
    return YoutubeDNN(user, item, negatives, {"dims": [32, 16]}, temperature=0.1)


def narm() -> nn.Module:
    """Scores all items: its last layer is the item table."""
    return NARM(SequenceFeature("hist_item", ITEMS, 16), 16, 0.25, 0.5)


def case(
    name: str,
    build: Callable[[], nn.Module],
    trainer: Callable[..., Any],
    *,
    sgd: float,
    adagrad: float,
    target: str | None = None,
    reads_whole: bool = False,
    **settings: Any,
) -> Case:
    loop = functools.partial(train, trainer, target, settings)
    return Case(
        package="torch-rechub", name=name, build=build, train=loop, sgd=sgd, adagrad=adagrad, reads_whole=reads_whole
    )


L2 = {"embedding_l1": 0.0, "embedding_l2": 1e-4, "dense_l1": 0.0, "dense_l2": 1e-5}

CASES = (
    case("DCNv2", dcn_v2, CTRTrainer, target="click", sgd=0.5, adagrad=0.05),
    case(
        "DeepFM, with embedding_l2", deepfm, CTRTrainer, target="click", sgd=0.1, adagrad=0.05, reads_whole=True,
        regularization_params=L2,
    ),
    case("BST", bst, CTRTrainer, target="click", sgd=0.1, adagrad=0.005),
    case("DSSM", dssm, MatchTrainer, target="click", mode=0, sgd=0.5, adagrad=0.01),
    case("YoutubeDNN", youtube_dnn, MatchTrainer, mode=2, sgd=0.5, adagrad=0.02),
    case(
        "DSSM, negatives of the batch", dssm, MatchTrainer, mode=2, in_batch_neg=True, sampler_seed=1, sgd=0.5,
        adagrad=0.01,
    ),
    case("NARM", narm, MatchTrainer, target="item", mode=2, sgd=0.5, adagrad=0.02, reads_whole=True),
)  # fmt: skip
