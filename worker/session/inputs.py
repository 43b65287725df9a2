"""Which ids a batch will read: what models say of themselves, or what the caller of `prefetch` says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import nn

from embershard.worker.session.reads import Lookup

if TYPE_CHECKING:
    from embershard.worker.session.remote_table import RemoteTable

B = TypeVar("B")
Inputs = Callable[[B], Mapping[str, torch.Tensor]]


class Reader(Protocol):
    """An embedding module."""

    @property
    def table(self) -> RemoteTable:
        """What it reads."""

    @property
    def device(self) -> torch.device | None:
        """Where its rows go; None for where the ids are."""


@dataclass(frozen=True, slots=True)
class _Table:
    """A table whose modules the session does not know."""

    table: RemoteTable
    device: None = None


@dataclass(frozen=True, slots=True, eq=False)
class WrappedModel:
    """A model and its embeddings by name. Its `embedding_inputs`, where it has one, says what a forward will read."""

    model: nn.Module
    readers: Mapping[str, Reader]

    @property
    def announces(self) -> bool:
        """Whether the ids of a forward are known before it runs."""
        return not self.readers or hasattr(self.model, "embedding_inputs")

    def wanted(self, *args: object, **kwargs: object) -> list[Lookup]:
        """What a forward of these arguments announces. ValueError where that names no embedding."""
        inputs = getattr(self.model, "embedding_inputs", None)
        return [] if inputs is None else _wanted(self.readers, inputs(*args, **kwargs), "embedding_inputs")

    def wanted_of(self, batch: object) -> list[Lookup]:
        """What it announces for a batch: of a tuple or list, as many parts as `embedding_inputs` takes."""
        if not isinstance(batch, tuple | list):
            return self.wanted(batch)
        return self.wanted(*batch[: _arity(getattr(self.model, "embedding_inputs", None))])


def reads_of_batches(
    models: Sequence[WrappedModel], tables: Iterable[RemoteTable], inputs: Inputs[B] | None
) -> Callable[[B], list[Lookup]]:
    """What a batch reads, by `inputs` (embedding or table name -> ids), or by what the one model announces.

    ValueError where neither says it.
    """
    if inputs is not None:
        readers: dict[str, Reader] = {table.spec.name: _Table(table) for table in tables}
        readers |= {reader.table.spec.name: reader for model in models for reader in model.readers.values()}
        if len(models) == 1:
            readers |= models[0].readers
        return lambda batch: _wanted(readers, inputs(batch), "inputs")
    if len(models) != 1:
        raise ValueError(
            f"prefetch cannot know which ids a batch reads: this session has {len(models)} wrapped models; pass "
            "inputs=lambda batch: {table name: ids}"
        )
    if not models[0].announces:
        first = next(iter(models[0].readers))
        raise ValueError(
            "prefetch cannot know which ids a batch reads: give the model a method embedding_inputs(...) that takes "
            "what forward takes and returns {module name: ids}, or pass "
            f"inputs=lambda batch: {{{first!r}: ids of the batch, ...}}"
        )
    return models[0].wanted_of


def _wanted(readers: Mapping[str, Reader], inputs: Mapping[str, torch.Tensor], source: str) -> list[Lookup]:
    for name in inputs:
        if name not in readers:
            raise ValueError(f"{source} names {name!r}, which is no embedding (known: {', '.join(readers) or 'none'})")
    return [Lookup((it := readers[name]).table, ids, it.device or ids.device) for name, ids in inputs.items()]


def _arity(function: Callable[..., object] | None) -> int | None:
    """Positional arguments that a function takes; None for any number."""
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()] if function else []
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return None
    return sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
