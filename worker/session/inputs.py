"""Find out which rows a batch will read: from the model's `embedding_inputs`, or from the caller of `prefetch`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from embershard.proto.spec import TableSpec
from embershard.worker.session.reads import EmbeddingModule, How, Lookup

B = TypeVar("B")
Inputs = Callable[[B], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _DeclaredTable:
    """A table whose modules the session does not know."""

    spec: TableSpec
    device: None = None
    frozen: bool = False

    def how(self, ids: torch.Tensor) -> How:
        """Return "": no module is known that would reduce these rows."""
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class WrappedModel:
    """A model and its embeddings by name. Its `embedding_inputs`, where it has one, gives the ids of a forward."""

    model: nn.Module
    embeddings: Mapping[str, EmbeddingModule]

    @property
    def declares_inputs(self) -> bool:
        """Whether the ids of a forward are known before it runs."""
        return not self.embeddings or hasattr(self.model, "embedding_inputs")

    def lookups(self, *args: object, **kwargs: object) -> list[Lookup]:
        """The rows that a forward of these arguments reads. ValueError where `embedding_inputs` names no embedding."""
        inputs = getattr(self.model, "embedding_inputs", None)
        return [] if inputs is None else _lookups(self.embeddings, inputs(*args, **kwargs), "embedding_inputs")

    def lookups_of(self, batch: object) -> list[Lookup]:
        """The rows that a batch reads: of a tuple or list, as many parts count as `embedding_inputs` takes."""
        if not isinstance(batch, tuple | list):
            return self.lookups(batch)
        return self.lookups(*batch[: _arity(getattr(self.model, "embedding_inputs", None))])


def lookups_of_batches(
    models: Sequence[WrappedModel], specs: Iterable[TableSpec], inputs: Inputs[B] | None
) -> Callable[[B], list[Lookup]]:
    """Which rows a batch reads, by `inputs` (embedding or table name -> ids), or by the one model's embedding_inputs.

    ValueError where neither is there.
    """
    if inputs is not None:
        embeddings: dict[str, EmbeddingModule] = {spec.name: _DeclaredTable(spec) for spec in specs}
        embeddings |= {module.spec.name: module for model in models for module in model.embeddings.values()}
        if len(models) == 1:
            embeddings |= models[0].embeddings
        return lambda batch: _lookups(embeddings, inputs(batch), "inputs")
    if len(models) != 1:
        raise ValueError(
            f"prefetch cannot know which ids a batch reads: this session has {len(models)} wrapped models; pass "
            "inputs=lambda batch: {table name: ids}"
        )
    if not models[0].declares_inputs:
        first = next(iter(models[0].embeddings))
        raise ValueError(
            "prefetch cannot know which ids a batch reads: give the model a method embedding_inputs(...) that takes "
            "what forward takes and returns {module name: ids}, or pass "
            f"inputs=lambda batch: {{{first!r}: ids of the batch, ...}}"
        )
    return models[0].lookups_of


def _lookups(
    embeddings: Mapping[str, EmbeddingModule], inputs: Mapping[str, torch.Tensor], source: str
) -> list[Lookup]:
    for name in inputs:
        if name not in embeddings:
            known = ", ".join(embeddings) or "none"
            raise ValueError(f"{source} names {name!r}, which is no embedding (known: {known})")
    flat = {name: ids.values() if ids.layout == torch.jagged else ids for name, ids in inputs.items()}
    return [
        Lookup((it := embeddings[name]).spec, ids, it.device or ids.device, it.how(ids), it)
        for name, ids in flat.items()
    ]


def _arity(function: Callable[..., object] | None) -> int | None:
    """Positional arguments that a function takes; None for any number."""
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()] if function else []
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return None
    return sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
