"""Layers that several models share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from embershard.worker.data.batch import NUM_HASHED_IDS, Field, Schema
from embershard.worker.data.inputs.rows import PADDING

Device = torch.device | str | None
IdSpace = int | Schema  # the ids 0..n-1 of one table; or the data's schema, whose features may have several


def table(num_ids: int, dim: int, device: Device) -> nn.Embedding:
    """An embedding table for ids 0..num_ids-1.

    On the meta device it has no memory and may have more rows than a tensor can have floats (hashed ids have 2**62):
    the row count is then `num_embeddings` alone and the weight's shape a stand-in.
    """
    if device is None or torch.device(device).type != "meta":
        return nn.Embedding(num_ids, dim, device=device)
    # from_pretrained draws no first values; for those of the meta device torch imports its compiler
    weight = torch.empty(1, dim, device=device)
    embedding: nn.Embedding = nn.Embedding.from_pretrained(weight, freeze=False)  # type: ignore[no-untyped-call]
    embedding.num_embeddings = num_ids
    return embedding


class Tower(nn.Sequential):
    """Hidden layers, each Linear, [batch norm], ReLU, [dropout]; (B, in_dim) -> (B, hidden[-1])."""

    def __init__(self, in_dim: int, hidden: Sequence[int], *, batch_norm: bool = False, dropout: float = 0.0) -> None:
        layers: list[nn.Module] = []
        for out_dim in hidden:
            layers.append(nn.Linear(in_dim, out_dim))
            if batch_norm:
                layers.append(nn.BatchNorm1d(out_dim))
            layers.append(nn.ReLU())
            if dropout:
                layers.append(nn.Dropout(dropout))
            in_dim = out_dim
        super().__init__(*layers)
        self.out_dim = in_dim


class FirstOrder(nn.Module):
    """The linear part that LR, FM, DeepFM and Wide&Deep share: bias + sum of the ids' weights + dense @ weights."""

    def __init__(self, num_dense: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.dense_weight = nn.Parameter(torch.zeros(num_dense)) if num_dense else None

    def forward(self, weights: Tensor, dense: Tensor | None) -> Tensor:
        """Logits (B,) of the ids' weights (B, F, 1) and dense (B, D)."""
        logits = weights.sum((1, 2)) + self.bias
        if self.dense_weight is None or dense is None:
            return logits
        return logits + dense @ self.dense_weight


def pairwise_interactions(rows: Tensor) -> Tensor:
    """Sum over all pairs of fields of their dot product, (B, F, dim) -> (B,), in O(F dim) (Rendle 2010, lemma 3.1)."""
    return 0.5 * (rows.sum(1).square() - rows.square().sum(1)).sum(1)


class FeatureEmbedding(nn.Module):
    """Embed the features of a schema with `fields`: one vector per feature, its row or the pooled rows of its list.

    Each table is one nn.Embedding, a submodule; features of the same table are looked up together. Padding is not
    looked up, so that no row is pulled or changed for it. Rows of a table with another dim are projected by a
    linear layer (Ginart et al., "Mixed Dimension Embeddings with Application to Memory-Efficient Recommendation
    Systems", 2021). With `own_dims=False` all tables have `dim`, as the weights of a linear model need.
    """

    def __init__(self, schema: Schema, dim: int, device: Device = None, *, own_dims: bool = True) -> None:
        super().__init__()
        self.dim, self.num_dense = dim, schema.num_dense
        self.fields = {field.name: field for field in schema.fields}
        self.tables: dict[str, str] = {}
        """Name of a table -> that of its submodule."""
        for id_table in schema.tables:
            own_dim = (id_table.dim or dim) if own_dims else dim
            num_ids = NUM_HASHED_IDS if id_table.num_ids is None else id_table.num_ids
            self.tables[id_table.name] = self._add(id_table.name, table(num_ids, own_dim, device))
        self._maps = {
            name: self._add(f"{name}_map", nn.Linear(rows, dim, bias=False))
            for name, child in self.tables.items()
            if (rows := int(str(self.get_submodule(child).embedding_dim))) != dim
        }
        self._columns = {name: [f for f in schema.fields if f.table == name] for name in self.tables}

    def _add(self, name: str, module: nn.Module) -> str:
        """Add a submodule under a name like this one, which no other attribute has."""
        child = re.sub(r"\W", "_", name, flags=re.ASCII) or "_"
        while hasattr(self, child):
            child += "_"
        self.add_module(child, module)
        return child

    def inputs(self, ids: Tensor) -> dict[str, Tensor]:
        """Name of a table -> the ids (any shape) that `lookup` reads in it."""
        return {name: _valid_ids(ids, fields)[0] for name, fields in self._columns.items()}

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Return the vectors (B, F, dim) of all features except sequences, in order; an empty list gives zeros."""
        return self.lookup(ids).pooled(dense)

    def sequence(self, name: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows (B, L, dim) of a sequence, zeros where it is shorter, and (B, L) bool: where it has an item."""
        return self.lookup(ids).sequence(name)

    def lookup(self, ids: Tensor, features: Sequence[str] | None = None) -> FeatureRows:
        """The rows of all features of ids (B, C), or of these alone, each table read once."""
        found: dict[str, _TableRows] = {}
        whole = torch.compiler.is_exporting()
        for name, own in self._columns.items():
            fields = own if features is None else [field for field in own if field.name in features]
            if not fields:
                continue
            wanted, mask = _all_ids(ids, fields) if whole else _valid_ids(ids, fields)
            rows = self.get_submodule(self.tables[name])(wanted)
            if name in self._maps:
                rows = self.get_submodule(self._maps[name])(rows)
            kind = _PaddedRows if whole and mask is not None else _TableRows
            found[name] = kind(fields, rows, None if mask is None else mask.to(rows.device))
        return FeatureRows(self.fields, found, self.dim)


def _valid_ids(ids: Tensor, fields: Sequence[Field]) -> tuple[Tensor, Tensor | None]:
    """The ids of some features: (B, C) where each has one, else flat without padding, and the (B, C) mask of these."""
    parts = [ids[:, field.start : field.start + field.width] for field in fields]
    columns = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    if all(field.width == 1 and field.pooling == "none" for field in fields):
        return columns, None
    mask = columns != PADDING
    return columns[mask], mask


def _all_ids(ids: Tensor, fields: Sequence[Field]) -> tuple[Tensor, Tensor | None]:
    """The same in a shape that values do not decide, as an exported program needs: (B, C), 0 in place of padding."""
    columns = torch.cat([ids[:, field.start : field.start + field.width] for field in fields], 1)
    if all(field.width == 1 and field.pooling == "none" for field in fields):
        return columns, None
    return columns.clamp(min=0), columns != PADDING


@dataclass(frozen=True, slots=True, eq=False)
class _TableRows:
    """Rows of one table, of features that stand side by side."""

    fields: Sequence[Field]
    rows: Tensor  # (B, C, dim), or (N, dim) of the places of `mask`
    mask: Tensor | None  # (B, C) bool

    def pooled(self, dense: Tensor | None) -> list[Tensor]:
        """(B, dim) of each feature that is no sequence."""
        if self.mask is None:
            return list(self.rows.unbind(1))
        fields = [field for field in self.fields if field.pooling != "sequence"]
        if not fields:
            return []
        device = self.rows.device
        of_column = [
            fields.index(field) if field in fields else -1 for field in self.fields for _ in range(field.width)
        ]
        sample, column = self.mask.nonzero(as_tuple=True)
        place = torch.tensor(of_column, device=device)[column]
        rows = self.rows
        if -1 in of_column:
            keep = place >= 0
            rows, sample, column, place = rows[keep], sample[keep], column[keep], place[keep]
        bag = sample * len(fields) + place
        weights = self._weights(dense, sample, column)
        bags = self.mask.shape[0] * len(fields)
        if weights is not None or any(field.pooling == "mean" for field in fields):
            means = torch.tensor([field.pooling == "mean" for field in fields], device=device)[place]
            weights = torch.ones(rows.shape[0], device=device) if weights is None else weights
            total = weights.new_zeros(bags).index_add(0, bag, weights)[bag]
            share = torch.where(total == 0, 0.0, weights / torch.where(total == 0, 1.0, total))
            rows = rows * torch.where(means, share, weights).unsqueeze(1)
        sums = rows.new_zeros(bags, rows.shape[1])
        pooled = sums.index_add(0, bag, rows).view(-1, len(fields), rows.shape[1]).unbind(1)
        if all(field.pooling != "max" for field in fields):
            return list(pooled)
        index = bag.unsqueeze(1).expand_as(rows)
        maxima = sums.scatter_reduce(0, index, rows, "amax", include_self=False)
        largest = maxima.view(-1, len(fields), rows.shape[1]).unbind(1)
        return [largest[i] if field.pooling == "max" else pooled[i] for i, field in enumerate(fields)]

    def _weights(self, dense: Tensor | None, sample: Tensor, column: Tensor) -> Tensor | None:
        """(N,) weights of the places, 1 of a feature without; None where no feature has some."""
        if all(field.weights is None for field in self.fields):
            return None
        assert dense is not None
        of_column = [-1 if f.weights is None else f.weights + i for f in self.fields for i in range(f.width)]
        at = torch.tensor(of_column, device=dense.device)[column]
        return torch.where(at < 0, 1.0, dense[sample, at.clamp(min=0)])

    def sequence(self, field: Field) -> tuple[Tensor, Tensor]:
        assert self.mask is not None
        first = sum(f.width for f in self.fields[: self.fields.index(field)])
        mask = self.mask[:, first : first + field.width]
        if len(self.fields) == 1:
            rows = self.rows
        else:
            column = self.mask.nonzero(as_tuple=True)[1]
            rows = self.rows[(column >= first) & (column < first + field.width)]
        at = mask.reshape(-1).nonzero().squeeze(1)
        padded = rows.new_zeros(mask.numel(), rows.shape[1]).index_copy(0, at, rows)
        return padded.view(*mask.shape, -1), mask


@dataclass(frozen=True, slots=True, eq=False)
class _PaddedRows(_TableRows):
    """The rows of all places (B, C, dim), those of padding too, which count nothing."""

    def pooled(self, dense: Tensor | None) -> list[Tensor]:
        found = []
        for field in self.fields:
            if field.pooling == "sequence":
                continue
            rows, mask = self._columns_of(field)
            if field.pooling == "max":
                largest = rows.masked_fill(~mask.unsqueeze(2), float("-inf")).amax(1)
                found.append(torch.where(mask.any(1, keepdim=True), largest, 0.0))
                continue
            weights = mask.to(rows.dtype)
            if field.weights is not None:
                assert dense is not None
                weights = weights * dense[:, field.weights : field.weights + field.width]
            if field.pooling == "mean":
                total = weights.sum(1, keepdim=True)
                weights = weights / torch.where(total == 0, 1.0, total)
            found.append((rows * weights.unsqueeze(2)).sum(1))
        return found

    def sequence(self, field: Field) -> tuple[Tensor, Tensor]:
        rows, mask = self._columns_of(field)
        return rows * mask.unsqueeze(2), mask

    def _columns_of(self, field: Field) -> tuple[Tensor, Tensor]:
        assert self.mask is not None
        first = sum(f.width for f in self.fields[: self.fields.index(field)])
        return self.rows[:, first : first + field.width], self.mask[:, first : first + field.width]


@dataclass(frozen=True, slots=True, eq=False)
class FeatureRows:
    """The rows of a batch's features, before they are pooled."""

    _fields: Mapping[str, Field]
    _tables: Mapping[str, _TableRows]
    _dim: int

    def pooled(self, dense: Tensor | None = None, features: Sequence[str] | None = None) -> Tensor:
        """Vectors (B, F, dim) of the features that are no sequences, or of these; dense (B, D) has weights of lists."""
        if features is None and len(self._tables) == 1 and (only := next(iter(self._tables.values()))).mask is None:
            return only.rows
        vectors: dict[str, Tensor] = {}
        for table_rows in self._tables.values():
            fields = [field.name for field in table_rows.fields if field.pooling != "sequence"]
            vectors |= dict(zip(fields, table_rows.pooled(dense), strict=True))
        if features is None:
            features = [name for name, field in self._fields.items() if field.pooling != "sequence"]
        return torch.stack([vectors[name] for name in features], 1)

    def sequence(self, name: str) -> tuple[Tensor, Tensor]:
        """Rows (B, L, dim) of a sequence, zeros where it is shorter, and (B, L) bool: where it has an item."""
        field = self._fields[name]
        return self._tables[field.table].sequence(field)


def embed_features(
    space: IdSpace, dim: int, device: Device, *, own_dims: bool = True
) -> nn.Embedding | FeatureEmbedding:
    """The embedding of all features: one table of that many ids, or the tables that a schema's features name."""
    if isinstance(space, Schema):
        if space.fields:
            return FeatureEmbedding(space, dim, device, own_dims=own_dims)
        space = space.table_rows
    return table(space, dim, device)


def embed(embedding: nn.Module, ids: Tensor, dense: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Vectors (B, F, dim) of the features, and the numeric ones (B, D) without the weights of lists."""
    if not isinstance(embedding, FeatureEmbedding):
        rows: Tensor = embedding(ids)
        return rows, dense
    numbers = None if dense is None or not embedding.num_dense else dense[:, : embedding.num_dense]
    return embedding(ids, dense), numbers
