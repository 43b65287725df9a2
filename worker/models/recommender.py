"""What every model here is: logits from ids and dense features, in plain torch, without a word of parameter servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn


class Recommender(nn.Module):
    """A model that scores rows of ids.

    `embedding_id_spaces` maps each embedding module's name to what its ids stand for. Modules of one id space that read
    the same id tensor are looked up once.
    """

    embedding_id_spaces: ClassVar[Mapping[str, str]] = {}

    def embedding_inputs(self, ids: Tensor, dense: Tensor | None = None) -> dict[str, Tensor]:
        """Embedding module name -> the ids that `forward` of the same arguments will read."""
        raise NotImplementedError

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B,) float32 of ids (B, F) int64 and dense (B, D) float32."""
        raise NotImplementedError


class FeatureModel(Recommender):
    """A model over F fields whose ids are unique across fields, so that one table `embedding` serves them all."""

    embedding_id_spaces: ClassVar[Mapping[str, str]] = {"embedding": "features"}

    def embedding_inputs(self, ids: Tensor, dense: Tensor | None = None) -> dict[str, Tensor]:
        """Module name -> the ids it reads."""
        return dict.fromkeys(self.embedding_id_spaces, ids)


def concat_dense(rows: Tensor, dense: Tensor | None) -> Tensor:
    """Rows (B, F, dim) as one vector per sample, with dense (B, D) behind it: (B, F * dim + D)."""
    flat = rows.flatten(1)
    return flat if dense is None or dense.shape[1] == 0 else torch.cat([flat, dense], 1)


def num_parameters(model: nn.Module) -> tuple[int, int]:
    """Number of embedding floats and of dense floats of a model that is not wrapped."""
    tables = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for p in module.parameters(recurse=False)
    }
    counts = [0, 0]
    for parameter in model.parameters():
        counts[id(parameter) not in tables] += parameter.numel()
    return counts[0], counts[1]
