"""The base of every model here: logits from ids and dense features, in plain torch, without a parameter server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from embershard.worker.data.batch import Schema
from embershard.worker.models.layers import FeatureEmbedding

_PLAIN = re.compile(r"[A-Za-z0-9_./-]+")  # part of a name that TableSpec takes


class Recommender(nn.Module):
    """A model over the features of a batch, whose embeddings are its direct submodules, made by `embed_features`.

    `embedding_id_spaces` maps each table's name to what its ids stand for. Tables of one id space that read the same
    id tensor are looked up once.
    """

    default_loss: ClassVar[str] = "bce"
    in_batch: ClassVar[bool] = False
    """Whether its softmax is over the items of a batch, by how often an item is in one (`batch_items`)."""

    @property
    def embedding_id_spaces(self) -> Mapping[str, str]:
        """Name of each table -> its id space."""
        spaces: dict[str, str] = {}
        for name, module in self.named_children():
            if isinstance(module, FeatureEmbedding):
                for table, child in module.tables.items():  # whose name may have spaces, which no shard takes
                    spaces[f"{name}.{child}"] = f"features/{table}" if _PLAIN.fullmatch(table) else f"modules/{child}"
            elif isinstance(module, nn.Embedding):
                spaces[name] = "features"
        return spaces

    def embedding_inputs(self, ids: Tensor, dense: Tensor | None = None) -> dict[str, Tensor]:
        """Name of each table -> the ids that `forward` of the same arguments will read."""
        inputs: dict[str, Tensor] = {}
        read: dict[str, Tensor] = {}  # by table: of the same tensor for all embeddings, so that one route serves them
        for name, module in self.named_children():
            if isinstance(module, FeatureEmbedding):
                read = read or module.inputs(ids)
                inputs |= {f"{name}.{child}": read[table] for table, child in module.tables.items()}
            elif isinstance(module, nn.Embedding):
                inputs[name] = ids
        return inputs

    def batch_items(self, ids: Tensor) -> Tensor:
        """Numbers of at least 0 of the items that are scored for each row of a batch, the rows' own ones first."""
        raise NotImplementedError

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B,) float32 of ids (B, C) int64 and dense (B, D) float32."""
        raise NotImplementedError


class ListRecommender(Recommender):
    """A model that is trained on lists: with `lists` its forward scores the item of each row beside other items."""

    history: int = 0
    """Columns of ids that hold what a user took before, -1 behind a shorter history."""
    history_start: ClassVar[int] = 0
    """The first of these columns."""

    def forward(self, ids: Tensor, dense: Tensor | None = None, lists: bool = False) -> Tensor:
        """Logits of ids and dense as a Recommender's, or for a loss over lists (R, C), which `split_lists` takes."""
        raise NotImplementedError

    def num_lists(self, ids: Tensor) -> int:
        """R of `split_lists`, for ids with lists: the loss is a mean over so many."""
        return len(ids)

    def split_lists(self, scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(R,) scores of the own items, and (R, C) of others, -inf where one is no negative of its row."""
        return scores[:, 0], scores[:, 1:]

    def list_items(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(R,) ids of the own items, and (R, C) of the others, (1, C) where all rows have the same ones."""
        raise NotImplementedError


class RankingModel(Recommender):
    """A model that ranks all items by the dot product of a user's vector and an item's.

    `ids` and `dense` are those of its data: a RetrievalModel's ids are those of users or of items alone, another model
    has the columns of a batch, and reads those of one side.
    """

    features_of_item: tuple[str, ...] = ()
    """The features that `item_vectors` reads, of a model that reads features; `user_vectors` reads the others."""

    def user_vectors(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Vectors (N, dim) of the users of ids (N,) or (N, C) int64 and dense (N, D) float32."""
        raise NotImplementedError

    def item_vectors(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Vectors (N, dim) of the items of ids (N,) or (N, C) int64 and dense (N, D) float32."""
        raise NotImplementedError


class RetrievalModel(ListRecommender, RankingModel):
    """A model of users and items that are one id each: it ranks all items, and is trained on lists of them.

    Items are ids (N,); users are ids (N,), or with what they took before (N, 1 + history).
    """


def id_columns(model: nn.Module, schema: Schema) -> int:
    """Columns of ids that a score needs, or more of a history with items; those to train on may have negatives."""
    if isinstance(model, RetrievalModel):
        return 2 + model.history
    return model.history + 1 if isinstance(model, ListRecommender) else schema.num_id_columns


def scores_lists(model: nn.Module) -> bool:
    """Whether a row of ids is a history and any number of items, each of which has a logit."""
    return isinstance(model, ListRecommender) and not isinstance(model, RetrievalModel)


def concat_dense(rows: Tensor, dense: Tensor | None) -> Tensor:
    """Rows (B, F, dim) as one vector per sample, with dense (B, D) behind it: (B, F * dim + D)."""
    flat = rows.flatten(1)
    return flat if dense is None or dense.shape[1] == 0 else torch.cat([flat, dense], 1)


def num_dense_parameters(model: nn.Module) -> int:
    """Floats of a model outside its embedding tables."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    return sum(p.numel() for m in model.modules() if not isinstance(m, tables) for p in m.parameters(recurse=False))
