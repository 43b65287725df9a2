"""Less memory for activations: MLP towers compute them again in backward instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

TABLES = (nn.Embedding, nn.EmbeddingBag)  # remote ones, too


def checkpoint_activations(model: nn.Module) -> int:
    """Checkpoint activations of the outermost nn.Sequential parts without embeddings; returns their number.

    They keep only their input, and their forward runs a second time in backward (Chen et al. 2016, "Training Deep
    Nets with Sublinear Memory Cost"), with the same dropout. No row is pulled twice, because embeddings are
    excluded, and the second forward does not update the running statistics of batch norm.
    """
    towers = list(_towers(model))
    for tower in towers:
        tower.forward = partial(_forward, tower, tower.forward)
    return len(towers)


def _towers(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.Sequential) and not any(isinstance(part, TABLES) for part in module.modules()):
        yield module
        return
    for child in module.children():
        yield from _towers(child)


def _forward(tower: nn.Module, forward: Callable[..., Tensor], x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(x)
    result: Tensor = checkpoint(forward, x, use_reentrant=False, context_fn=partial(_contexts, tower))
    return result


def _contexts(tower: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of the first forward and of the recomputation."""
    return nullcontext(), _statistics_stand_still(tower)


@contextmanager
def _statistics_stand_still(tower: nn.Module) -> Iterator[None]:
    norms = [module for module in tower.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        norm.num_batches_tracked = None  # then nothing is counted
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, kept, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
