"""The base of every model here: logits from ids and dense features, in plain torch, without a parameter server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn


class Recommender(nn.Module):
    """A model over F features whose ids are unique across features, so that one table can serve all of them.

    `embedding_id_spaces` maps each embedding module's name to what its ids stand for. Modules of one id space that read
    the same id tensor are looked up once.
    """

    embedding_id_spaces: ClassVar[Mapping[str, str]] = {"embedding": "features"}
    default_loss: ClassVar[str] = "bce"

    def embedding_inputs(self, ids: Tensor, dense: Tensor | None = None) -> dict[str, Tensor]:
        """Embedding module name -> the ids that `forward` of the same arguments will read."""
        return dict.fromkeys(self.embedding_id_spaces, ids)

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B,) float32 of ids (B, F) int64 and dense (B, D) float32."""
        raise NotImplementedError


class ListRecommender(Recommender):
    """A model that is trained on lists: with `lists` its forward scores the item of each row beside other items.

    `in_batch`: the others are those of the batch, by which a softmax corrects for how often an item is in one.
    """

    in_batch: ClassVar[bool] = False

    def forward(self, ids: Tensor, dense: Tensor | None = None, lists: bool = False) -> Tensor:
        """Logits of ids and dense as a Recommender's, or for a loss over lists (R, C), which `split_lists` takes."""
        raise NotImplementedError

    def split_lists(self, scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(R,) scores of the own items, and (R, C) of others, -inf where one is no negative of its row."""
        return scores[:, 0], scores[:, 1:]


def concat_dense(rows: Tensor, dense: Tensor | None) -> Tensor:
    """Rows (B, F, dim) as one vector per sample, with dense (B, D) behind it: (B, F * dim + D)."""
    flat = rows.flatten(1)
    return flat if dense is None or dense.shape[1] == 0 else torch.cat([flat, dense], 1)


def num_dense_parameters(model: nn.Module) -> int:
    """Floats of a model outside its embedding tables."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    return sum(p.numel() for m in model.modules() if not isinstance(m, tables) for p in m.parameters(recurse=False))
