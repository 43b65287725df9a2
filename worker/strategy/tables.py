"""Embedding tables in the memory of this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from embershard.proto.errors import JobError
from embershard.proto.spec import Constant, Initializer, Normal, Uniform, name_key
from embershard.worker.patterns import first_match

_COPIES = 3  # of a table: its rows, and Adam's two moments


def materialise(
    model: nn.Module, initializers: Mapping[str, Initializer | None], seed: int, device: torch.device
) -> dict[str, nn.Embedding]:
    """Give the tables of a model, on the meta device until now, memory and first values; the tables by name.

    The values are of the distribution that shards draw from, though not the very same ones; every process with the
    same seed has the same. JobError where memory cannot hold them.
    """
    tables = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    _check_memory(tables, device)
    for name, table in tables.items():
        initializer = initializers[first_match(name, initializers) or "*"] or Normal()
        weight = torch.empty(table.num_embeddings, table.embedding_dim)
        generator = torch.Generator().manual_seed(name_key(f"{seed}/{name}") >> 1)
        match initializer:
            case Constant(value=value):
                weight.fill_(value)
            case Uniform(low=low, high=high):
                weight.uniform_(low, high, generator=generator)
            case Normal(mean=mean, std=std):
                weight.normal_(mean, std, generator=generator)
        table.weight = nn.Parameter(weight.to(device), requires_grad=table.weight.requires_grad)
        table.sparse = True
        table.register_forward_pre_hook(_bring_ids)
    return tables


def _check_memory(tables: Mapping[str, nn.Embedding], device: torch.device) -> None:
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory
    else:
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name, table in tables.items():
        size = 4 * table.num_embeddings * table.embedding_dim
        if size * _COPIES > room:
            reason = (
                f"table {name!r} of {table.num_embeddings:,} rows of dim {table.embedding_dim}, with its optimizer's "
                f"state, does not fit the {room / 2**30:.0f} GiB of {device}; strategy ps holds the rows that are used"
            )
            raise JobError(where="strategy", reason=reason)


def _bring_ids(table: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Ids wait on the host, where a session would route them."""
    weight = table.weight
    assert isinstance(weight, torch.Tensor)
    return tuple(ids.to(weight.device, non_blocking=True) for ids in inputs)
