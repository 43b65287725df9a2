"""Models of torchrec on the CPU: EmbeddingBagCollection with KeyedJaggedTensor, trained by TrainPipelineBase."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain

from wrap.compare import Case
from wrap.log import ITEMS, STEPS, USERS, batches

DIM = 8
FEATURES = ["user", "item", "hist_item"]


def keyed(batch: dict[str, torch.Tensor]) -> KeyedJaggedTensor:
    """The ids of a batch; histories have their own lengths, and some are empty."""
    size = len(batch["user"])
    one = torch.ones(size, dtype=torch.int64)
    lengths = (batch["hist_item"] != 0).sum(1) * (batch["user"] % 7 != 0)
    kept = torch.arange(batch["hist_item"].shape[1]) < lengths[:, None]
    values = torch.cat([batch["user"], batch["item"], batch["hist_item"][kept]])
    return KeyedJaggedTensor(keys=FEATURES, values=values, lengths=torch.cat([one, one, lengths]))


def train(model: nn.Module, optimizer: Any) -> list[float]:
    pipeline = TrainPipelineBase(model, optimizer, torch.device("cpu"))
    data = iter(Batch(batch["price"][:, None], keyed(batch), batch["click"]) for batch in batches())
    model.train()
    return [pipeline.progress(data)[0].item() for _ in range(STEPS)]


def collection() -> EmbeddingBagCollection:
    """One table of two features, of which one is a mean over a history."""
    user = EmbeddingBagConfig(name="t_user", embedding_dim=DIM, num_embeddings=USERS, feature_names=["user"])
    item = EmbeddingBagConfig(
        name="t_item", embedding_dim=DIM, num_embeddings=ITEMS, feature_names=["item", "hist_item"],
        pooling=PoolingType.MEAN,
    )  # fmt: skip
    return EmbeddingBagCollection(tables=[user, item])


def dlrm() -> nn.Module:
    return DLRMTrain(DLRM(collection(), 1, dense_arch_layer_sizes=[32, DIM], over_arch_layer_sizes=[32, 1]))


def dlrm_dcn() -> nn.Module:
    model = DLRM_DCN(
        collection(), 1, dense_arch_layer_sizes=[32, DIM], over_arch_layer_sizes=[32, 1],
        dcn_num_layers=2, dcn_low_rank_dim=8,
    )  # fmt: skip
    return DLRMTrain(model)


class DeepFMTrain(nn.Module):
    """SimpleDeepFMNN, which gives probabilities, as the pipeline takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SimpleDeepFMNN(1, collection(), hidden_layer_size=32, deep_fm_dimension=8)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        scores = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        loss = F.binary_cross_entropy(scores, batch.labels)
        return loss, (loss.detach(), scores.detach())


class Sequence(nn.Module):
    """EmbeddingCollection: rows of each id, here of a history, without pooling, in a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = EmbeddingCollection(
            tables=[
                EmbeddingConfig(name="t_user", embedding_dim=DIM, num_embeddings=USERS, feature_names=["user"]),
                EmbeddingConfig(name="t_item", embedding_dim=DIM, num_embeddings=ITEMS, feature_names=FEATURES[1:]),
            ]
        )
        self.gru = nn.GRU(DIM, DIM, batch_first=True)
        self.out = nn.Linear(3 * DIM, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        rows = self.rows(batch.sparse_features)
        _, state = self.gru(rows["hist_item"].to_padded_dense(6))
        joint = torch.cat([rows["user"].values(), rows["item"].values(), state[0]], 1)
        loss = F.binary_cross_entropy_with_logits(self.out(joint).squeeze(1), batch.labels)
        return loss, (loss.detach(),)


def case(name: str, build: Callable[[], nn.Module], *, sgd: float, adagrad: float) -> Case:
    return Case(package="torchrec", name=name, build=build, train=train, sgd=sgd, adagrad=adagrad)


CASES = (
    case("DLRM", dlrm, sgd=1.0, adagrad=0.05),
    case("DLRM_DCN", dlrm_dcn, sgd=1.0, adagrad=0.05),
    case("SimpleDeepFMNN", DeepFMTrain, sgd=1.0, adagrad=0.05),
    case("EmbeddingCollection and GRU", Sequence, sgd=1.0, adagrad=0.05),
)
